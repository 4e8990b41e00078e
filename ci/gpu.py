"""The measurements of ci/gpu.sh: a vLLM server against the policy in this process. Not yet run on a GPU."""

import datetime
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from drivelit.policy.engines import Conversation, TransformersEngine
from drivelit.policy.model import load_policy, toy_config
from drivelit.policy.vllm import VLLMEngine

RECORDS = Path(__file__).parent / "records"


def make(model, folder):
    "A small model with random weights, of the real class, with the files of a real tokenizer and image processor."
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    snapshot_download(
        model, local_dir=folder, allow_patterns=["*.json", "*.txt", "*.jinja"], ignore_patterns="*.index.json"
    )
    torch.manual_seed(0)
    small = Qwen2_5_VLForConditionalGeneration(toy_config(AutoTokenizer.from_pretrained(folder), "small"))
    small.to(torch.bfloat16).save_pretrained(folder)


def picture(seed):
    "Noise of a size that is no multiple of a patch, so that both image processors must resize it."
    pixels = np.random.default_rng(seed).integers(256, size=(150, 300, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def question(seed, text):
    return dict(role="user", content=[dict(type="image", image=picture(seed)), dict(type="text", text=text)])


def scored(policy, conversation, said):
    "The log-probability of each word of an answer, from one pass of the policy in this process."
    row = conversation.ids + said.ids
    with torch.inference_mode():
        logits = policy.model(**policy.collate([row], [conversation.images], pad="right")).logits[0].float()
    logp = logits.log_softmax(-1)[len(conversation.ids) - 1 : -1]
    return logp.gather(-1, torch.tensor(said.ids, device=logp.device)[:, None])[:, 0].tolist()


def compare(policy, engine, what):
    "A row of the record: two turns of eight conversations, a picture in each turn."
    here, equal, apart = TransformersEngine(policy), [], []
    talk = [Conversation([question(k, "What is the speed of the vehicle?")]) for k in range(8)]
    for turn in range(2):
        for temperature in (0.0, 1.0):
            said = engine.generate(talk, 32, temperature=temperature, seed=turn)
            for c, s in zip(talk, said, strict=True):
                apart += np.abs(np.subtract(scored(policy, c, s), s.logprobs)).tolist()
            if temperature == 0:
                ours = here.generate(talk, 32, temperature=0)
                equal += [
                    np.mean([a == b for a, b in zip(o.ids, s.ids, strict=False)])
                    for o, s in zip(ours, said, strict=True)
                ]
        more = [policy.encode_more([question(100 + k, "And now?")], closed=s.stop == "eos") for k, s in enumerate(said)]
        rows = zip(talk, said, more, strict=True)
        talk = [Conversation(None, c.ids + s.ids + m.input_ids, c.images + m.images) for c, s, m in rows]
    numbers = f"{np.mean(equal):.3f} | {np.mean(apart):.2e} | {np.quantile(apart, 0.99):.2e} | {max(apart):.2e}"
    return f"| {what} | {numbers} |", float(np.mean(apart))


def main(folder, server, weights):
    "Compare, publish moved weights, compare again; then the old policy against the new weights, which must differ."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(folder, device=device)
    old = load_policy(folder, device=device)
    engine = VLLMEngine(policy, [server], weights)
    rows, means = [], []
    for what in ("weights of the start", "after an update", "after another update"):
        row, mean = compare(policy, engine, what)
        rows.append(row)
        means.append(mean)
        with torch.no_grad():
            for p in policy.model.parameters():
                p.add_(0.3 * p.float().std().nan_to_num() * torch.randn_like(p))
        engine.publish("gpu")
    row, mean = compare(old, engine, "the start's policy against the last weights: must be far")
    gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.strip() or "no GPU"
    version = json.loads(urllib.request.urlopen(f"{server}/version", timeout=30).read())["version"]
    text = [
        f"# vLLM {version}, {datetime.date.today()}",
        "",
        gpu,
        "",
        "Two turns of eight conversations, a picture in each.",
        "",
    ]
    text += [
        "| weights | equal tokens, greedy | mean difference of log-probabilities | 99 % | largest |",
        "| --- " * 5 + "|",
    ]
    RECORDS.mkdir(exist_ok=True)
    record = RECORDS / f"vllm-{datetime.date.today()}.md"
    record.write_text("\n".join([*text, *rows, row, ""]))
    print(record.read_text())
    if max(means) > 0.05 or mean < 5 * max(means):
        sys.exit("sampler and trainer differ too much, or the update changed nothing")


if __name__ == "__main__":
    dict(make=make, compare=main)[sys.argv[1]](*sys.argv[2:])

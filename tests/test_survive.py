"""Killed with SIGKILL during SFT and during RL, and run again: the same metrics as an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
from drivelit.policy.model import load_policy
from drivelit.rollout.core import Step, Task
from drivelit.training.sft import train_sft
from drivelit.training.turn_grpo import train_rl

says = lambda role, text: {"role": role, "content": [{"type": "text", "text": text}]}


class Echo(Task):
    def prompt(self, scene): return [says("user", f"Predict {scene} future trajectory points")]

    def step(self, state, completion):
        text = completion.text
        right = sum(c.isdigit() for c in text) / max(len(text), 1)
        return Step([says("user", "Based on these issues: ")] if state.turn == 0 else None, dict(reward=right))


what, out = sys.argv[1], Path(sys.argv[2])
policy = load_policy("toy", size="tiny")
if what == "sft":
    rows = [dict(messages=[says("user", f"Predict {k} future trajectory points"), says("assistant", f"{k}.{k}{k}")], images=[]) for k in range(24)]
    train_sft(policy, rows, out, steps=60, lr=1e-3, batch=8, save_steps=10, seed=3)
else:
    train_rl(policy, Echo(), list(range(6)), out, "turn", steps=14, batch=2, group=4, lr=1e-3, save_steps=2, max_turns=2, max_new_tokens=6, seed=3)
"""
TIMES = ("step_time", "epoch", "num_tokens")


def start(what, out):
    env = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what, str(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors[-2000:]


def metrics(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


def complete(out):
    return [int(p.parent.name.split("-")[1]) for p in Path(out).glob("checkpoint-*/complete")]


@pytest.mark.parametrize("what, last", [("sft", 60), ("rl", 14)])
def test_sigkill(what, last, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(what, whole))
    process = start(what, killed)
    begin = time.time()
    while not complete(killed) and process.poll() is None and time.time() - begin < 120:
        time.sleep(0.05)
    time.sleep(0.3)  # somewhere behind the checkpoint
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL and max(complete(killed)) < last, "it was over before the kill"
    assert not (killed / "final").exists()
    finish(start(what, killed))
    assert metrics(killed) == metrics(whole)
    assert metrics(killed)[-1]["step"] == last

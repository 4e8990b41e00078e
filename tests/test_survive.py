"""Killed, damaged or out of disk during SFT and during RL, and run again: the same metrics as an uninterrupted run."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from drivelit.io import weights
from drivelit.policy.model import load_policy
from drivelit.rollout.core import Step, Task
from drivelit.training import checkpoints as marks
from drivelit.training.sft import train_sft
from drivelit.training.turn_grpo import train_rl

TIMES = ("step_time", "epoch", "num_tokens")
LAST = dict(sft=30, rl=7)


def says(role, text):
    return {"role": role, "content": [{"type": "text", "text": text}]}


class Echo(Task):
    "Say digits."

    def prompt(self, scene):
        return [says("user", f"Predict {scene} future trajectory points")]

    def step(self, state, completion):
        text = completion.text
        right = sum(c.isdigit() for c in text) / max(len(text), 1)
        return Step([says("user", "Based on these issues: ")] if state.turn == 0 else None, dict(reward=right))


def train(what, out, **more):
    "A small run: SFT saves at 10, 20 and 30, RL at 2, 4, 6 and 7, with a reference that is refreshed."
    policy = load_policy("toy", size="tiny")
    if what == "sft":
        rows = [dict(messages=[says("user", f"Predict {k}"), says("assistant", f"{k}.{k}{k}")]) for k in range(24)]
        return train_sft(policy, rows, out, max_steps=30, learning_rate=1e-3, batch=8, save_steps=10, seed=3, **more)
    played = dict(steps=7, batch=2, num_generations=4, save_steps=2, max_turns=2, max_new_tokens=6, reference_every=3)
    return train_rl(policy, Echo(), list(range(6)), out, "turn", learning_rate=1e-3, seed=3, **played, **more)


def metrics(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMES} for r in rows]


class Killed(Exception):
    "What stops a run in this process."


class KillAt(TrainerCallback):
    "Stops a run behind its second checkpoint."

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


class Steps(TrainerCallback):
    "Remembers the updates that were made."

    def __init__(self):
        self.taken = []

    def on_step_end(self, args, state, control, **_):
        self.taken.append(state.global_step)


@pytest.fixture(scope="module", params=["sft", "rl"])
def runs(request, tmp_path_factory):
    "What it is, an uninterrupted run, and one that was stopped between its second and its third checkpoint."
    what, folder = request.param, tmp_path_factory.mktemp(request.param)
    train(what, folder / "whole")
    with pytest.raises(Killed):
        train(what, folder / "stopped", callbacks=[KillAt(dict(sft=25, rl=5)[what])])
    return what, folder


def newest(out):
    return marks.checkpoints(out)[-1][1]


def remove(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


HARMS = [
    (remove, "optimizer.pt", "is missing"),
    (remove, "scheduler.pt", "is missing"),
    (truncate, "optimizer.pt", "bytes, complete says"),
    (truncate, "model.safetensors", "bytes, complete says"),
    (flip, "optimizer.pt", "has other bytes"),
    (flip, "model.safetensors", "has other bytes"),
    (flip, "rng_state.pth", "has other bytes"),
    (truncate, "complete", "cannot be read"),
]


@pytest.mark.parametrize("harm, name, sentence", HARMS, ids=lambda x: getattr(x, "__name__", x))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(runs, harm, name, sentence, tmp_path):
    what, folder = runs
    out = tmp_path / "run"
    shutil.copytree(folder / "stopped", out)
    assert [s for s, _ in marks.checkpoints(out)] == dict(sft=[10, 20], rl=[2, 4])[what]
    harm(newest(out) / name)
    with pytest.warns(UserWarning, match=f"{newest(out).name} is damaged and not used: {name} .*{sentence}"):
        train(what, out)
    assert metrics(out) == metrics(folder / "whole")
    assert metrics(out)[-1]["step"] == LAST[what]
    assert (out / "final" / "model.safetensors").exists()


def test_the_whole_checkpoint_is_used(runs, tmp_path, recwarn):
    what, folder = runs
    shutil.copytree(folder / "stopped", tmp_path / "run")
    steps = Steps()
    train(what, tmp_path / "run", callbacks=[steps])
    assert steps.taken[0] == dict(sft=21, rl=5)[what]
    assert metrics(tmp_path / "run") == metrics(folder / "whole")
    assert not [w for w in recwarn if "damaged" in str(w.message)]
    kept = [p for _, p in marks.checkpoints(tmp_path / "run")]
    assert len(kept) == 2 and not any((p / "README.md").exists() for p in (*kept, tmp_path / "run"))


@pytest.mark.parametrize("written", ["complete", "final"])
def test_a_full_disk(runs, written, tmp_path, monkeypatch):
    "The disk is full when the second checkpoint is marked, or the final policy written: the first stays, and is used."
    what, folder = runs
    out, whole, wrote = tmp_path / "run", weights.write_json, []

    def full(path, text):
        wrote.append(path)
        if len(wrote) > 1:  # the first mark, and now the second
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, text)

    def half(policy, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        if written == "complete":
            m.setattr(weights, "write_json", full)
        else:
            m.setattr("drivelit.policy.model.Policy.save", half)
        with pytest.raises(OSError, match="No space left"):
            train(what, out)
    assert not (out / "final").exists()
    assert (
        marks.last_checkpoint(out).name
        == {"sft": ("checkpoint-10", "checkpoint-30"), "rl": ("checkpoint-2", "checkpoint-7")}[what][written == "final"]
    )
    train(what, out)
    assert metrics(out) == metrics(folder / "whole") and (out / "final" / "model.safetensors").exists()


class Waits(TrainerCallback):
    "Stands still behind a step, for whoever comes to kill the process."

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        while state.global_step == self.step:
            time.sleep(1)


SCRIPT = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_survive import Waits, train
train(sys.argv[1], Path(sys.argv[2]), callbacks=[Waits(int(sys.argv[3]))])
"""


def start(what, out, until=0):
    env = os.environ | dict(HF_HUB_OFFLINE="1")  # as many threads as here, for they round otherwise
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what, str(out), str(until)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate(timeout=1200)  # to end a hang
    assert process.returncode == 0, errors[-2000:]


def complete(out):
    return [int(p.parent.name.split("-")[1]) for p in Path(out).glob("checkpoint-*/complete")]


def test_sigkill(runs, tmp_path):
    what, folder = runs
    killed = tmp_path / "killed"
    process = start(what, killed, dict(sft=25, rl=5)[what])
    begin = time.time()
    while not complete(killed) and process.poll() is None and time.time() - begin < 1200:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL and max(complete(killed)) < LAST[what], "it was over before the kill"
    assert not (killed / "final").exists()
    with (killed / "metrics.jsonl").open("a") as f:
        f.write('{"step": 9, "lo')  # as a kill in the middle of a line leaves it
    finish(start(what, killed))
    assert metrics(killed) == metrics(folder / "whole")
    assert metrics(killed)[-1]["step"] == LAST[what]

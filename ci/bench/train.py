"""How fast the toy trains, and what takes the time: python ci/bench/train.py [--size toy].

Ratios, measured in one run on one core: length-sorted batches against shuffled ones (supervised tuning), a group's shared prompt
against separate reading (rollout), and the shares of playing and learning in a step of reinforcement learning.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from drivelit.mtdrive import data
from drivelit.mtdrive.task import MTDriveTask
from drivelit.policy.engines import Conversation, TransformersEngine
from drivelit.policy.model import load_policy
from drivelit.rollout.core import rollout
from drivelit.scene.town import scenes
from drivelit.training.sft import batches, collator, encode_row
from drivelit.training.turn_grpo import train_rl


def clock(f, *args):
    begin = time.perf_counter()
    out = f(*args)
    return time.perf_counter() - begin, out


def sft(policy, rows):
    "Seconds for the same rows in sorted and in shuffled batches."
    encoded = [encode_row(policy, r, True)[:2] for r in rows]
    collate, lengths = collator(policy, rows, encoded), [len(r[0]) for r in encoded]

    def epoch(order):
        for b in order:
            policy.model(**collate([dict(labels=i) for i in b])).loss.backward()
        return sum(lengths[i] for b in order for i in b)

    steps = len(rows) // 16
    epoch(batches(lengths, 16, 1))
    took, tokens = clock(epoch, batches(lengths, 16, steps, pool=steps))
    naive, _ = clock(epoch, np.random.default_rng(0).permutation(len(rows))[: steps * 16].reshape(-1, 16))
    print(f"supervised tuning   {tokens / took:8,.0f} tokens/s sorted by length, {naive / took:.2f} x the speed of shuffled rows")


def reading(policy, task, some):
    "Seconds for eight answers a scene, prompts shared and not."
    engine = TransformersEngine(policy)
    encode = lambda s: policy.encode(task.prompt(s))
    shared = [Conversation([], e.input_ids, e.images) for e in map(encode, some) for _ in range(8)]
    alone = [Conversation([], e.input_ids, [i.copy() for i in e.images]) for e in map(encode, some) for _ in range(8)]
    run = lambda c: engine.generate(c, 50, seed=0)
    run(shared[:8])
    took, said = clock(run, shared)
    naive, _ = clock(run, alone)
    words = sum(len(s.ids) for s in said)
    print(f"rollout             {words / took:8,.0f} tokens/s with a group's prompt read once, {naive / took:.2f} x the speed of reading each")


def step(policy, task, some):
    "Shares of a step."
    played, _ = clock(lambda: rollout(TransformersEngine(policy), policy, task, [s for s in some for _ in range(8)], max_turns=2, max_new_tokens=64, seed=0))
    with tempfile.TemporaryDirectory() as out:
        settings = dict(steps=3, batch=len(some), group=8, lr=1e-5, save_steps=100, max_turns=2, max_new_tokens=64)
        whole, _ = clock(lambda: train_rl(policy, task, some, Path(out), "turn", **settings))
    print(f"reinforcement       {whole / 3:8.1f} s a step of {8 * len(some)} episodes, {3 * played / whole:.0%} of it playing")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="toy")
    torch.set_num_threads(1)
    policy, some, task = load_policy("toy", size=parser.parse_args().size), scenes(60), MTDriveTask(max_turns=2)
    sft(policy, data.single_turn(some, task) + data.two_turn(some, None, task) + data.pdm_understanding(some, None, 120, task))
    reading(policy, task, some[:8])
    step(policy, task, some[:8])


if __name__ == "__main__": main()

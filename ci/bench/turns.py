"""What later turns cost: python ci/bench/turns.py [--pictures 672x364] [--turns 6] [--episodes 16] [--size toy].

The same episodes of MTDrive's task, played twice in one run: by the engine that keeps the keys and values of what it
has read between turns, and by the same engine without that memory, which reads the whole conversation in each turn.
Tokens of prompts that the model was given, CPU seconds, and how far the log-probabilities lie apart.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time  # noqa: E402
from unittest.mock import patch  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from drivelit.mtdrive.formats import fixed_parts, kit_text  # noqa: E402
from drivelit.mtdrive.task import MTDriveTask  # noqa: E402
from drivelit.policy.engines import TransformersEngine  # noqa: E402
from drivelit.policy.model import load_policy  # noqa: E402
from drivelit.rollout.core import rollout  # noqa: E402
from drivelit.town.scenes import scenes  # noqa: E402

GROUP = 8


def played(policy, task, some, memory, turns):
    "Episodes, prompt tokens that were given to the model, tokens of all prompts, CPU seconds."
    engine, given, asked, forward = TransformersEngine(policy, memory=memory), [0], [0], policy.model.forward

    def reads(*args, **kwargs):
        given[0] += kwargs["input_ids"].numel() if kwargs["input_ids"].shape[1] > 1 else 0  # one token: writing
        return forward(*args, **kwargs)

    def asks(conversations, *args, **kwargs):
        asked[0] += sum(len(c.ids) for c in conversations)
        return generate(conversations, *args, **kwargs)

    generate = engine.generate
    with patch.object(policy.model, "forward", reads), patch.object(engine, "generate", asks):
        begin = time.process_time()
        episodes = rollout(engine, policy, task, some, max_turns=turns, max_new_tokens=64, seed=0)
        return episodes, given[0], asked[0], time.process_time() - begin


def same_until(a, b):
    "The number of tokens before the first that differs."
    return next((k for k, (i, j) in enumerate(zip(a.ids, b.ids, strict=False)) if i != j), len(a.ids))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", default="672x364", help="width x height, multiples of 28")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--episodes", type=int, default=16, help=f"in groups of {GROUP}")
    parser.add_argument("--size", default="toy")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = tuple(map(int, args.pictures.split("x")))
    policy = load_policy("toy", size=args.size, text=kit_text(), fixed=fixed_parts(), image_size=size)
    task, some = MTDriveTask(max_turns=args.turns, image_size=size), scenes(args.episodes // GROUP)
    some = [s for s in some for _ in range(GROUP)]
    played(policy, task, some[:GROUP], 0, 1)
    anew, all_read, asked, slow = played(policy, task, some, 0, args.turns)
    kept, few, _, fast = played(policy, task, some, 1e9, args.turns)
    # A draw that falls on the edge of two words may go either way by rounding: compared is what stands before it.
    same = [same_until(a, b) for a, b in zip(kept, anew, strict=True)]
    apart = max(
        np.abs(np.subtract(a.logprobs[:k], b.logprobs[:k])).max() for a, b, k in zip(kept, anew, same, strict=True)
    )
    edges = sum(k < len(e.ids) for k, e in zip(same, kept, strict=True))
    print(f"{len(some)} episodes of {np.mean([e.turns for e in kept]):.1f} turns, pictures {args.pictures}")
    print(f"words drawn: {sum(sum(t >= 0 for t in e.turn) for e in anew):,}; fell on an edge: {edges}")
    print(f"prompts of {asked:,} tokens: {few / asked:.1%} of them read with memory, {all_read / asked:.1%} without")
    print(f"CPU {fast:.1f} s with memory, {slow:.1f} s without: {slow / fast:.2f} times")
    print(f"log-probabilities at most {apart:.1e} apart")


if __name__ == "__main__":
    main()

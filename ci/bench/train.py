"""How fast the toy trains, and what takes the time: python ci/bench/train.py [--size toy].

Ratios of CPU time, measured in one run on one core: length-sorted batches against shuffled ones (supervised tuning), a
group's shared prompt against separate reading (rollout), the shares of playing and learning in a step of reinforcement
learning, its micro-batches sorted by length against shuffled ones, and the words that count alone scored against the
vocabulary, instead of every position.
"""

import argparse
import tempfile
import time
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from drivelit.driveagent import formats
from drivelit.driveagent.task import DriveAgentTask
from drivelit.mtdrive import data
from drivelit.mtdrive.formats import fixed_parts, kit_text
from drivelit.mtdrive.task import MTDriveTask
from drivelit.policy.engines import Completion, Conversation, TransformersEngine
from drivelit.policy.model import load_policy
from drivelit.rollout.core import rollout
from drivelit.town.scenes import scenes
from drivelit.training.batches import chosen, micro_batches
from drivelit.training.grpo import ADVANTAGES
from drivelit.training.sft import batches, collator, encode_row
from drivelit.training.turn_grpo import TurnGRPOTrainer, rl_config, train_rl


def clock(f, *args):
    begin = time.process_time()
    out = f(*args)
    return time.process_time() - begin, out


def sft(policy, rows):
    "Seconds for the same rows in sorted and in shuffled batches."
    encoded = [encode_row(policy, r, True)[:2] for r in rows]
    collate, lengths = collator(policy, rows, encoded), [len(r[0]) for r in encoded]

    def epoch(order):
        for b in order:
            policy.model(**collate([dict(row=i) for i in b])).loss.backward()
        return sum(lengths[i] for b in order for i in b)

    steps = len(rows) // 16
    epoch(batches(lengths, 16, 1))
    took, tokens = clock(epoch, batches(lengths, 16, steps, pool=steps))
    naive, _ = clock(epoch, np.random.default_rng(0).permutation(len(rows))[: steps * 16].reshape(-1, 16))
    speed = f"{tokens / took:8,.0f} tokens/s sorted by length"
    print(f"supervised tuning   {speed}, {naive / took:.2f} x the speed of shuffled rows")


def reading(policy, task, some):
    "Seconds for eight answers a scene, prompts shared and not."
    engine = TransformersEngine(policy)

    def encode(s):
        return policy.encode(task.prompt(s))

    shared = [Conversation([], e.input_ids, e.images) for e in map(encode, some) for _ in range(8)]
    alone = [Conversation([], e.input_ids, [i.copy() for i in e.images]) for e in map(encode, some) for _ in range(8)]

    def run(c):
        return engine.generate(c, 50, seed=0)

    run(shared[:8])
    took, said = clock(run, shared)
    naive, _ = clock(run, alone)
    words = sum(len(s.ids) for s in said)
    speed = f"{words / took:8,.0f} tokens/s with a group's prompt read once"
    print(f"rollout             {speed}, {naive / took:.2f} x the speed of reading each")


def step(policy, task, some):
    "Shares of a step."
    played, _ = clock(
        lambda: rollout(
            TransformersEngine(policy),
            policy,
            task,
            [s for s in some for _ in range(8)],
            max_turns=2,
            max_new_tokens=64,
            seed=0,
        )
    )
    with tempfile.TemporaryDirectory() as out:
        settings = dict(
            steps=3,
            batch=len(some),
            num_generations=8,
            learning_rate=1e-5,
            save_steps=100,
            max_turns=2,
            max_new_tokens=64,
        )
        whole, _ = clock(lambda: train_rl(policy, task, some, Path(out), "turn", **settings))
    share = f"{3 * played / whole:.0%} of it playing"
    print(f"reinforcement       {whole / 3:8.1f} s a step of {8 * len(some)} episodes, {share}")


class Looks:
    "In place of a trained agent: in the tool mode it looks once, sometimes again, then it answers."

    look = formats.format_call(formats.ToolCall("Retrieve View", dict(frame_index="0s", view_index="back")))
    end = formats.format_actions([("Keep Speed", "Straight")] * 4)

    def __init__(self, policy):
        self.policy, self.rng = policy, np.random.default_rng(0)

    def generate(self, conversations, **_):
        def again(c):
            return len(c.images) > 1 and self.rng.random() < 0.3

        return [self._say(self.look if "tool" in c.opening or again(c) else self.end) for c in conversations]

    def _say(self, text):
        return Completion(
            text,
            [*self.policy.tokenizer(text, add_special_tokens=False)["input_ids"], self.policy.tokenizer.eos_token_id],
        )


class Everywhere(TurnGRPOTrainer):
    "Scores every position against the vocabulary, prompts and pictures too."

    def log_probabilities(self, model, batch):
        ids, width = batch["inputs"]["input_ids"], batch["completion_ids"].shape[1]
        inputs = {k: v.to(ids.device) for k, v in batch["inputs"].items()}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        found = chosen(logits.flatten(0, 1), ids[:, 1:].flatten())
        return tuple(v.view(len(ids), -1)[:, -width:] * batch["tool_mask"] for v in found)


def learn(trainer, episodes, advantages, rows):
    "Seconds for one pass over a rollout."

    def once():
        for r in rows:
            batch = trainer.make_batch([episodes[i] for i in r], advantages[r])
            trainer.objective(batch).backward()

    return clock(once)[0]


def cut(some):
    "Seconds to learn from a rollout in which half of the episodes have a second picture."
    task = DriveAgentTask(mode="partition")
    policy = load_policy("toy", fixed=task.fixed_parts(), text=(*formats.kit_lines(), Looks.look))
    with tempfile.TemporaryDirectory() as out:

        def trainer(kind):
            limits = dict(per_device_train_batch_size=16, max_turns=5, max_length=900)
            args = rl_config(
                out, steps=1, batch=len(some), num_generations=4, learning_rate=1e-5, use_cpu=True, **limits
            )
            made = kind(policy, task, some, args, ADVANTAGES["sequence"], engine=Looks(policy))
            made.current_gradient_accumulation_steps = 1
            return made

        ours, theirs = trainer(TurnGRPOTrainer), trainer(Everywhere)
        episodes = ours.play([some[i // 4] for i in range(4 * len(some))])
        advantages = ours.score(episodes)
        rows = micro_batches([len(e.ids) for e in episodes], 16, len(episodes))
        learn(ours, episodes, advantages, rows[:1])
        took = learn(ours, episodes, advantages, rows)
        shuffled = learn(
            ours, episodes, advantages, np.random.default_rng(0).permutation(len(episodes)).reshape(-1, 16)
        )
        everywhere = learn(theirs, episodes, advantages, rows)
    speed = f"{len(episodes) / took:8.1f} episodes/s learnt from"
    print(f"micro-batches       {speed}, sorted by length, {shuffled / took:.2f} x the speed of shuffled ones")
    print(f"positions scored    {'':8} own words alone, {everywhere / took:.2f} x the speed of all")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="toy")
    torch.set_num_threads(1)
    policy = load_policy("toy", size=parser.parse_args().size, text=kit_text(), fixed=fixed_parts())
    some, task = scenes(60), MTDriveTask(max_turns=2)
    rows = chain(
        data.single_turn(some, task), data.two_turn(some, None, task), data.pdm_understanding(some, None, 120, task)
    )
    sft(policy, list(rows))
    reading(policy, task, some[:8])
    step(policy, task, some[:8])
    cut(some[:32])


if __name__ == "__main__":
    main()

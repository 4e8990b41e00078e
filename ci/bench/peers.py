"""How fast the kit is beside its peers: python ci/bench/peers.py [--only score|play|learn] [--repeats 5] [--size toy].

Each peer does the same work in the same process on one core, kit and peer in turn, and the ratio of CPU times is
printed: above 1 the kit is faster.

score: PDMS and EPDMS of 16 and 256 plans in one call, beside the loop that users write, one plan a call.
play:  tokens a second of `TransformersEngine` beside transformers' `generate`, for single prompts with a picture, for
       groups of eight that share their prompt, and for four turns. Both write the same number of words each turn.
learn: a GRPO step of `TurnGRPOTrainer` beside the one of TRL's own trainer: the same prompts without pictures, the
       same number of words, one pass; 16 and 64 completions. Then what the kit's step is made of.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib  # noqa: E402
import io  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

WORDS = 48  # that every answer has


def seconds(use):
    "CPU seconds; what the trainers log is not shown."
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        use()
    return time.process_time() - begin


def compare(name, ours, theirs, repeats):
    "Print the median ratio of CPU seconds of `theirs` to those of `ours`, both run in turn, and the range."
    clock = []
    for _ in range(repeats + 1):
        for use in (ours, theirs):
            clock.append(seconds(use))
    a, b = np.reshape(clock, (-1, 2))[1:].T  # the first of each does not count
    ratio = b / a
    print(f"{name:44s} {1e3 * np.median(a):10.1f} {1e3 * np.median(b):10.1f} {np.median(ratio):8.2f}", end="")
    print(f"   {ratio.min():.2f} to {ratio.max():.2f}", flush=True)


def score(args):
    from drivelit.metrics import epdms, pdm
    from drivelit.scene.town import scenes

    town, rng = [pdm.prepare(s) for s in scenes(8, seed=0)], np.random.default_rng(0)
    pdm.add_references(town)
    plans = [r.scene.expert.poses * rng.uniform(0.8, 1.1, (256, 1, 1)) for r in town]
    for name, scorer in (("PDMS", pdm.score), ("EPDMS", epdms.score)):
        for n in (16, 256):
            compare(
                f"{name}, {n} plans in one call / one a call",
                lambda n=n, f=scorer: [f(r, p[:n]) for r, p in zip(town, plans, strict=True)],
                lambda n=n, f=scorer: [f(r, p[k : k + 1]) for r, p in zip(town, plans, strict=True) for k in range(n)],
                args.repeats if n < 256 else 1,
            )


def play(args):
    from drivelit.mtdrive.formats import fixed_parts, kit_text
    from drivelit.mtdrive.task import MTDriveTask
    from drivelit.policy.engines import Completion, TransformersEngine, fill_ids
    from drivelit.policy.model import load_policy
    from drivelit.rollout.core import rollout
    from drivelit.scene.town import scenes

    policy = load_policy("toy", size=args.size, text=kit_text(), fixed=fixed_parts())
    task, some = MTDriveTask(max_turns=4), scenes(64)

    class Plain:
        "What users write: pad, `generate`, decode."

        def generate(self, conversations, max_new_tokens, **_):
            policy.model.eval()
            for n, c in enumerate(conversations):
                fill_ids(policy, n, c, "raise")
            batch = policy.collate([c.ids for c in conversations], [c.images for c in conversations])
            width = batch["input_ids"].shape[1]
            length = dict(max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens)
            said = policy.model.generate(**batch, **length, do_sample=True, top_k=0, suppress_tokens=ours.never)
            said = [ids[width:].tolist() for ids in said]
            return [Completion(policy.tokenizer.decode(ids), ids, [0.0] * len(ids)) for ids in said]

    ours = TransformersEngine(policy)
    ours.eos = -1  # no answer ends early
    for name, who, turns in (
        ("1 scene, one answer", some[:1], 1),
        ("16 scenes, one answer each", some[:16], 1),
        ("64 scenes, one answer each", some, 1),
        ("2 scenes, 8 answers each", [s for s in some[:2] for _ in range(8)], 1),
        ("8 scenes, 8 answers each", [s for s in some[:8] for _ in range(8)], 1),
        ("4 scenes, 4 turns", some[:4], 4),
    ):

        def go(e, who=who, turns=turns):
            return rollout(e, policy, task, who, max_turns=turns, max_new_tokens=WORDS, seed=0)

        compare(f"play: {name}", lambda go=go: go(ours), lambda go=go: go(Plain()), args.repeats)


def learn(args):
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from drivelit.mtdrive.formats import fixed_parts, kit_text
    from drivelit.policy.engines import TransformersEngine
    from drivelit.policy.model import load_policy
    from drivelit.rollout.core import Step, Task
    from drivelit.training.grpo import ADVANTAGES
    from drivelit.training.turn_grpo import TurnGRPOTrainer, rl_config

    torch.set_num_threads(1)

    def make():
        return load_policy("toy", size=args.size, text=kit_text(), fixed=fixed_parts())

    prompts = [f"Scene {k}. " + "The ego drives straight on at 8 m/s. " * 8 for k in range(8)]

    def points(text):
        return text.count("0") - text.count("1")

    class Digits(Task):
        "A prompt without pictures; digits are worth something."

        def prompt(self, scene):
            return [dict(role="user", content=scene)]

        def step(self, state, completion):
            return Step(None, dict(reward=float(points(completion.text))))

    def ours(group, out):
        policy = make()
        settings = rl_config(
            out, steps=1, batch=8, group=group, lr=1e-5, beta=0.0, use_cpu=True, save_strategy="no", max_turns=1,
            max_new_tokens=WORDS,
        )  # fmt: skip
        engine = TransformersEngine(policy)
        engine.eos = -1
        return TurnGRPOTrainer(policy, Digits(), prompts, settings, ADVANTAGES["sequence"], engine=engine)

    def theirs(group, out):
        policy, rows = make(), 8 * group
        settings = GRPOConfig(
            output_dir=str(out), max_steps=1, per_device_train_batch_size=rows, generation_batch_size=rows,
            num_generations=group, max_completion_length=WORDS, generation_kwargs=dict(min_new_tokens=WORDS),
            learning_rate=1e-5, beta=0.0, loss_type="grpo", scale_rewards="none", use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, bf16=False,
        )  # fmt: skip
        data = Dataset.from_dict(dict(prompt=[[dict(role="user", content=p)] for p in prompts]))

        def worth(completions, **_):
            return [float(points(c[0]["content"])) for c in completions]

        return GRPOTrainer(policy.model, worth, settings, train_dataset=data, processing_class=policy.tokenizer)

    with tempfile.TemporaryDirectory() as out:
        for group in (2, 8):
            pair = ours(group, Path(out) / "ours"), theirs(group, Path(out) / "theirs")
            compare(f"learn: a GRPO step of {8 * group} completions", *[t.train for t in pair], args.repeats)
        trainer, playing = pair[0], []
        generate = trainer.engine.generate

        def timed(*args, **settings):
            said = []
            playing.append(seconds(lambda: said.extend(generate(*args, **settings))))
            return said

        trainer.engine.generate = timed
        whole = seconds(trainer.train)
    print(f"of the kit's step {sum(playing) / whole:.0%} is playing, the rest learning")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=("score", "play", "learn"))
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--size", default="toy")
    args = p.parse_args()
    print(f"{'':44s} {'kit ms':>10} {'peer ms':>10} {'ratio':>8}   range")
    for part in (score, play, learn):
        if args.only in (None, part.__name__):
            part(args)


if __name__ == "__main__":
    main()

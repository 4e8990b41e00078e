"""How fast the kit is beside its peers: python ci/bench/peers.py [--only score|navsim|play|learn] [--repeats 5].

Kit and peer do the same work on one core, in turn, and the ratio of CPU times is printed: above 1 the kit is faster.
Each part has a process of its own. The first round of each pair warms up and does not count.

score:  PDMS and EPDMS of 16 and 256 plans in one call, beside the loop that users write, one plan a call.
navsim: the same beside NAVSIM's own scorer, v1.1 for PDMS and v2 for EPDMS, on 27 synthetic logs; nothing is timed
        before the values of both are equal. Once both drive the reference in each call, once both have kept it.
        --navsim CLONE [CLONE ...] --nuplan CLONE, or installed; where neither can be imported, it says so.
play:   `TransformersEngine` beside transformers' `generate`: single prompts with a picture, groups of eight that share
        their prompt, and four turns. Both write the same number of words each turn; the share of episodes that are
        equal, token by token, when both take the likeliest is printed, and below each pair what products and attention,
        which `generate` computes as well, take of our operators' time.
learn:  a GRPO step of `TurnGRPOTrainer` beside the one of TRL's own trainer, each in a process of its own, since an
        allocator that one sets up speeds the other: the same prompts without pictures, the same number of words, one
        pass, 16 and 64 completions. Only the step is timed: what comes before the first is set-up, and the first warms
        up. That the gradients of both are equal is tested in nbs/65_bridges/75_advantages.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import contextlib  # noqa: E402
import importlib.util  # noqa: E402
import io  # noqa: E402
import multiprocessing  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

WORDS = 48  # that every answer has
PLANS = (1, 8, 64, 256)  # of a call, beside NAVSIM
PARTS = dict(no_at_fault_collisions="nc", drivable_area_compliance="dac", driving_direction_compliance="ddc")
PARTS |= dict(traffic_light_compliance="tlc", ego_progress="ep", time_to_collision_within_bound="ttc")
PARTS |= dict(lane_keeping="lk", history_comfort="hc")  # v2's columns and ours


def seconds(use):
    "CPU seconds; what the trainers log is not shown."
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        use()
    return time.process_time() - begin


def line(name, ours, theirs):
    "Print the medians of CPU seconds, and the median and range of their ratio."
    a, b = np.array(ours), np.array(theirs)
    ratio = b / a
    print(f"{name:44s} {1e3 * np.median(a):10.1f} {1e3 * np.median(b):10.1f} {np.median(ratio):8.2f}", end="")
    print(f"   {ratio.min():.2f} to {ratio.max():.2f}", flush=True)


def compare(name, ours, theirs, repeats):
    "Both in turn; the first of each does not count."
    line(name, *np.array([[seconds(use) for use in (ours, theirs)] for _ in range(repeats + 1)])[1:].T)


PRODUCTS, ATTENTION = ("mm", "bmm", "addmm", "baddbmm", "mkldnn_convolution"), ("_scaled_dot_product", "_softmax")


def shares(use):
    "Of the operators' time, what products and attention take: what `generate` must compute as well."
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        use()
    spent = {e.key.removeprefix("aten::"): e.self_cpu_time_total for e in profiled.key_averages()}
    products = sum(v for k, v in spent.items() if k in PRODUCTS) / sum(spent.values())
    attention = sum(v for k, v in spent.items() if k.startswith(ATTENTION)) / sum(spent.values())
    print(f"    of ours: products {products:.0%}, attention {attention:.0%}, all else {1 - products - attention:.0%}")


def score(args):
    from drivelit.metrics import epdms, pdm
    from drivelit.town.scenes import scenes

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


def navsim(args):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if not args.navsim:
        lacking = [k for k in ("navsim", "nuplan") if importlib.util.find_spec(k) is None]
        if lacking:
            print(
                f"NAVSIM's scorer: not compared, {' and '.join(lacking)} cannot be imported; --help says what to give"
            )
            return
        one_devkit(None, args)
    elif not args.nuplan:
        raise SystemExit("--navsim needs --nuplan, a clone of motional/nuplan-devkit")
    elif len(args.navsim) > 1:  # two versions have modules of the same names
        for clone in args.navsim:
            again(["--only", "navsim", "--navsim", clone, "--nuplan", args.nuplan, "--repeats", str(args.repeats)])
    else:
        one_devkit(args.navsim[0], args)


def one_devkit(clone, args):
    "One version of NAVSIM beside ours."
    import navsim_devkit as devkit

    from drivelit.metrics import epdms, pdm
    from drivelit.scene.core import from_json

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        with contextlib.redirect_stdout(io.StringIO()):
            devkit.write(folder := Path(folder))
            made = {f.stem: pdm.prepare(from_json(f)) for f in sorted((folder / "scenes").glob("*.json"))}
            try:
                version, call = devkit.opened(folder, clone, args.nuplan)
            except ImportError as e:
                raise SystemExit(
                    f"NAVSIM's scorer: not compared, {clone or 'navsim'} cannot be imported ({e})"
                ) from None
        name, key, scorer = ("PDMS", "pdms", pdm.score) if version == "v1" else ("EPDMS", "epdms", epdms.score)
        rng, plans = np.random.default_rng(0), devkit.plans_of(folder)
        # NAVSIM keeps plans in single precision
        plans = {k: (p * rng.uniform(0.8, 1.1, (max(PLANS), 1, 1))).astype(np.float32) for k, p in plans.items()}
        far = equal(made, plans, scorer, call, key)
        print(
            f"{name} beside NAVSIM {version}: {len(made)} scenes, {2 * len(made)} plans, largest difference {far:.1g}"
        )

        def ours(n, kept):
            for k, r in made.items():
                if not kept:
                    r.kept.pop(key, None)
                scorer(r, plans[k][:n])

        for kept, word in ((False, "reference driven by both"), (True, "reference kept by both")):
            for n in PLANS:
                compare(
                    f"{name}, {n} plans, {word}",
                    lambda n=n, kept=kept: ours(n, kept),
                    lambda n=n, kept=kept: [call(k, plans[k][:n], not kept) for k in made],
                    args.repeats if n < 64 else 1,
                )


def equal(made, plans, scorer, call, key):
    "The largest difference of a number, both asked for one plan a call; it must be nothing."
    far = 0.0
    for k, r in made.items():
        found = scorer(r, plans[k][:2])
        for i in range(2):
            theirs = call(k, plans[k][i : i + 1], True)[1]  # 0 is the reference
            if key == "pdms":
                pairs = [(found.pdms[i], theirs)]
            else:
                pairs = [(getattr(found, ours)[i], theirs.at[0, column]) for column, ours in PARTS.items()]
            far = max([far, *(abs(float(a) - float(b)) for a, b in pairs)])
    assert far < 1e-6, f"{key}: ours and NAVSIM's differ by {far}"
    return far


def play(args):
    from drivelit.mtdrive.formats import fixed_parts, kit_text
    from drivelit.mtdrive.task import MTDriveTask
    from drivelit.policy.engines import Completion, TransformersEngine, fill_ids
    from drivelit.policy.model import load_policy
    from drivelit.rollout.core import rollout
    from drivelit.town.scenes import scenes

    policy = load_policy("toy", size=args.size, text=kit_text(), fixed=fixed_parts())
    task, some = MTDriveTask(max_turns=4), scenes(64)

    class Plain:
        "What users write: pad, `generate`, decode."

        def generate(self, conversations, max_new_tokens, temperature=1.0, **_):
            policy.model.eval()
            for n, c in enumerate(conversations):
                fill_ids(policy, n, c, "raise")
            batch = policy.collate([c.ids for c in conversations], [c.images for c in conversations])
            width = batch["input_ids"].shape[1]
            how = dict(max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, suppress_tokens=ours.never)
            how |= dict(do_sample=True, top_k=0) if temperature else dict(do_sample=False)
            said = [ids[width:].tolist() for ids in policy.model.generate(**batch, **how)]
            return [Completion(policy.tokenizer.decode(ids), ids, [0.0] * len(ids), "length") for ids in said]

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

        def go(e, temperature=1.0, who=who, turns=turns):
            limits = dict(max_turns=turns, max_new_tokens=WORDS)
            return rollout(e, policy, task, who, temperature=temperature, seed=0, **limits)

        same = np.mean([a.ids == b.ids for a, b in zip(go(ours, 0), go(Plain(), 0), strict=True)])
        title = f"play: {name} ({same:.0%} equal)"
        compare(title, lambda go=go: go(ours), lambda go=go: go(Plain()), args.repeats)
        shares(lambda go=go: go(ours))


PROMPTS = [f"Scene {k}. " + "The ego drives straight on at 8 m/s. " * 8 for k in range(8)]


def points(text):
    "What an answer is worth."
    return float(text.count("0") - text.count("1"))


def toy(size):
    from drivelit.mtdrive.formats import fixed_parts, kit_text
    from drivelit.policy.model import load_policy

    return load_policy("toy", size=size, text=kit_text(), fixed=fixed_parts())


def our_trainer(size, group, steps, out):
    "The trainer, and the object and name of what plays."
    from drivelit.policy.engines import TransformersEngine
    from drivelit.rollout.core import Step, Task
    from drivelit.training.grpo import ADVANTAGES
    from drivelit.training.turn_grpo import TurnGRPOTrainer, rl_config

    class Digits(Task):
        "A prompt without pictures; digits are worth something."

        def prompt(self, scene):
            return [dict(role="user", content=scene)]

        def step(self, state, completion):
            return Step(None, dict(reward=points(completion.text)))

    policy = toy(size)
    settings = rl_config(
        out, steps=steps, batch=8, num_generations=group, learning_rate=1e-5, beta=0.0,
        use_cpu=True, save_strategy="no", max_turns=1,
        max_new_tokens=WORDS,
    )  # fmt: skip
    engine = TransformersEngine(policy)
    engine.eos = -1
    return (
        TurnGRPOTrainer(policy, Digits(), PROMPTS, settings, ADVANTAGES["sequence"], engine=engine),
        engine,
        "generate",
    )


def trl_trainer(size, group, steps, out):
    "As `our_trainer`."
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    policy, rows = toy(size), 8 * group
    settings = GRPOConfig(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=rows, generation_batch_size=rows,
        num_generations=group, max_completion_length=WORDS, generation_kwargs=dict(min_new_tokens=WORDS),
        learning_rate=1e-5, beta=0.0, loss_type="grpo", scale_rewards="none", use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    data = Dataset.from_dict(dict(prompt=[[dict(role="user", content=p)] for p in PROMPTS]))

    def worth(completions, **_):
        return [points(c[0]["content"]) for c in completions]

    trainer = GRPOTrainer(policy.model, worth, settings, train_dataset=data, processing_class=policy.tokenizer)
    return trainer, trainer, "_generate"


def side(pipe, make, *given):
    "In a process of its own: a trainer that makes a step whenever it is told to, and sends its CPU seconds."
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        trainer, player, name = make(*given, out)
        generate, played = getattr(player, name), []

        def timed(*args, **settings):
            begin = time.process_time()
            said = generate(*args, **settings)
            played.append(time.process_time() - begin)
            return said

        setattr(player, name, timed)

        class Turns(TrainerCallback):
            "Waits for its turn before each step."

            def on_step_begin(self, *_, **__):
                pipe.recv()
                played.clear()
                self.begin = time.process_time()

            def on_step_end(self, *_, **__):
                pipe.send((time.process_time() - self.begin, sum(played)))

        trainer.add_callback(Turns())
        trainer.train()


def learn(args):
    spawn = multiprocessing.get_context("spawn")
    for group in (2, 8):
        pipes, workers = [], []
        for make in (our_trainer, trl_trainer):
            here, there = spawn.Pipe()
            workers.append(spawn.Process(target=side, args=(there, make, args.size, group, args.repeats + 1)))
            workers[-1].start()
            there.close()  # a side that fails ends the wait
            pipes.append(here)
        clock = []
        for _ in range(args.repeats + 1):
            for pipe in pipes:
                pipe.send("go")
                clock.append(pipe.recv())
        for worker in workers:
            worker.join()
        whole, playing = np.moveaxis(np.reshape(clock, (-1, 2, 2))[1:], -1, 0)
        name = f"learn: {8 * group} completions,"
        for part, took in (("a step", whole), ("its play", playing), ("its update", whole - playing)):
            line(f"{name} {part}", *took.T)


def again(options):
    "This program in a process of its own, without its head line."
    subprocess.run([sys.executable, __file__, *options, "--inner"], check=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = dict(score=score, navsim=navsim, play=play, learn=learn)
    p.add_argument("--only", choices=parts)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--size", default="toy")
    p.add_argument("--navsim", nargs="+", help="clones of autonomousvision/navsim, v1.1 or main")
    p.add_argument("--nuplan", help="a clone of motional/nuplan-devkit")
    p.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if not args.inner:
        print(f"{'':44s} {'kit ms':>10} {'peer ms':>10} {'ratio':>8}   range", flush=True)
    if args.only:
        return parts[args.only](args)
    for part in parts:
        again(["--only", part, *sys.argv[1:]])


if __name__ == "__main__":
    main()

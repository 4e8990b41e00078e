"""Where the time of a run goes: python ci/bench/stages.py --system mtdrive --scale 0.1 --stages grpo --set model=base.

Every stage of a system's laptop run, made smaller, in one process on one core. CPU seconds of each stage, and how
they are shared out to the parts of the kit. A part's time is its own: what it calls in another part counts there.
With --naive each stage runs a second time, on the same data, without the kit's short cuts: plans driven again for the
feedback, a scene at a time, references made anew for each stage, a stock cache that is copied for every token, a
random number for each word of the vocabulary, and whole conversations read again in every turn.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from contextlib import ExitStack, nullcontext  # noqa: E402
from functools import wraps  # noqa: E402
from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import Qwen2_5_VLModel  # noqa: E402
from transformers.cache_utils import DynamicLayer  # noqa: E402

from drivelit.data import rows  # noqa: E402
from drivelit.driveagent import evidence, labels  # noqa: E402
from drivelit.metrics import pdm, pdm_closed  # noqa: E402
from drivelit.mtdrive import agent  # noqa: E402
from drivelit.policy import engines  # noqa: E402
from drivelit.policy.engines import TransformersEngine  # noqa: E402
from drivelit.policy.model import Policy, train_tokenizer  # noqa: E402
from drivelit.runs import stages  # noqa: E402
from drivelit.runs.profiles import find_system, load_profile  # noqa: E402
from drivelit.scene import cameras  # noqa: E402
from drivelit.town import scenes as town  # noqa: E402
from drivelit.training import sft
from drivelit.training.turn_grpo import TurnGRPOTrainer  # noqa: E402

PARTS = dict(  # part: functions, or (class, method)
    scenes=[town.scenes, stages.save_scenes, stages.read_scenes],
    references=[pdm_closed.references],
    scoring=[pdm.prepare, pdm.score, pdm.score_scenes, labels.label_scene],
    feedback=[agent.find_issues, agent.feedback_text],
    evidence=[evidence.evidence],
    painting=[cameras.get_image, cameras.get_depth],
    pixels=[(Policy, "pixels")],
    tokens=[(Policy, "encode"), (Policy, "encode_more"), sft.encode_row, sft.estimate_lengths, train_tokenizer],
    disk=[rows.write_rows, rows.card, (rows.Rows, "__getitem__"), (rows.Picture, "load"), (Policy, "save")],
    generation=[(TransformersEngine, "generate")],
    forward=[(Qwen2_5_VLModel, "forward"), (TurnGRPOTrainer, "log_probabilities")],
    backward=[(Accelerator, "backward")],
    update=[(AcceleratedOptimizer, "step")],
)
KEPT = ("generation",)  # what the model reads while it writes is generation


class Clock:
    "CPU seconds of the innermost part that is open."

    def __init__(self):
        self.seconds, self.open, self.since = Counter(), ["rest"], time.process_time()

    def switch(self):
        now = time.process_time()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def timed(self, part, function):
        "The function; while it runs, its part is open."

        @wraps(function)
        def inner(*args, **kwargs):
            if self.open[-1] == part or part == "forward" and self.open[-1] in KEPT:
                return function(*args, **kwargs)
            self.switch()
            self.open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.open.pop()

        return inner

    def take(self):
        "The seconds since the last call."
        self.switch()
        found, self.seconds = self.seconds, Counter()
        return found


def watch(clock):
    "Replace what PARTS names, wherever it was imported to."
    modules = [m for name, m in sys.modules.items() if name.startswith("drivelit")]
    for part, things in PARTS.items():
        for thing in things:
            if isinstance(thing, tuple):
                setattr(*thing, clock.timed(part, getattr(*thing)))
                continue
            timed = clock.timed(part, thing)
            for m in modules:
                for name, value in list(vars(m).items()):
                    if value is thing:
                        setattr(m, name, timed)


def draw_all(logits, temperature, top_p=1.0, generator=None, never=()):
    "A token for each row by `torch.multinomial`, which draws a number for every word."
    logp = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    p = logp.exp()
    p[:, list(never)] = 0
    ids = torch.multinomial(p, 1, generator=generator)[:, 0] if temperature else p.argmax(-1)
    return ids, logp.gather(-1, ids[:, None])[:, 0]


def judge_apart(self, scenes, plans, results=None):
    "The feedback of a PDM agent, scene by scene, every plan driven again."
    out = []
    for prepared, poses in zip(map(self.prepared, scenes), plans, strict=True):
        result = pdm.score(prepared, poses, ep=False)
        found = [agent.find_issues(prepared, result, poses, k) for k in range(len(poses))]
        out.append([agent.Feedback(agent.feedback_text(f), f) for f in found])
    return out


def references_apart(scenes):
    "PDM-Closed scene by scene, and nothing is kept."
    for p in scenes:
        if p.reference is None:
            p.reference = pdm_closed.reference(p)
        pdm.reference_progress(p, p.reference)


def naive():
    "A context without the short cuts."
    stack, engine = ExitStack(), TransformersEngine.__init__
    for target, name, value in (
        (engines, "_Layer", DynamicLayer),
        (engines, "draw", draw_all),
        (agent.PDMAgent, "judge_many", judge_apart),
        (pdm, "add_references", references_apart),
        (TransformersEngine, "__init__", lambda self, policy, batch_size=256: engine(self, policy, batch_size, 0)),
    ):
        stack.enter_context(patch.object(target, name, value))
    return stack


def smaller(profile, scale):
    "The keys of a profile that say how much there is, times the scale."

    def times(v, low):
        return max(low, round(v * scale))

    least = dict(train_scenes=64, eval_scenes=12, rl_scenes=16, data_thoughts=16)
    keys = [k for k in (*least, "sft_max_steps", "align_steps", "rl_steps") if getattr(profile, k, 0)]
    return {k: times(getattr(profile, k), least.get(k, 2)) for k in keys}


def show(table, slow):
    "Seconds by stage, shares by part, and how many times as long it takes without the short cuts."
    parts = [p for p in [*PARTS, "rest"] if sum(t[p] for t in table.values()) >= 0.005 * total(table)]
    print("stage".ljust(16) + "seconds".rjust(9) + "".join(p.rjust(11) for p in parts) + "naive".rjust(8) * bool(slow))
    table, slow = ({**t, "all": sum(t.values(), Counter())} if t else t for t in (table, slow))
    for stage, found in table.items():
        whole = sum(found.values())
        shares = "".join(f"{found[p] / max(whole, 1e-9):11.0%}" for p in parts)
        ratio = f"{sum(slow[stage].values()) / max(whole, 1e-9):7.2f}x" if slow else ""
        print(f"{stage:16}{whole:9.1f}{shares}{ratio}", flush=True)


def total(table):
    return sum(sum(t.values()) for t in table.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", default="mtdrive")
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--stages", default="", help="those to show, with commas; what they need runs, too")
    parser.add_argument("--naive", action="store_true", help="each stage a second time, without the short cuts")
    parser.add_argument("--set", default="", help="keys of the profile, key=value with commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    full = load_profile(args.system, "laptop")
    keys = dict(k.split("=", 1) for k in args.set.split(",") if k)
    profile = load_profile(args.system, "laptop", **smaller(full, args.scale) | keys)
    graph = importlib.import_module(f"{find_system(args.system).package}.pipeline").STAGES
    wanted = [s for s in args.stages.split(",") if s] or [s for s in graph.needs if s not in graph.optional]
    clock, table, slow = Clock(), {}, {}
    watch(clock)
    with tempfile.TemporaryDirectory() as out:
        stages.start(out, profile)
        for stage in graph.order(wanted):
            for took, how in ((slow, naive), (table, nullcontext)) if args.naive else ((table, nullcontext),):
                shutil.rmtree(graph.folder(out, stage), ignore_errors=True)
                pdm.REFERENCES.clear()
                clock.take()
                with how():
                    graph.work(out, stage, 0)
                took[stage] = clock.take()
                print(f"{stage}: {sum(took[stage].values()):.1f} s", file=sys.stderr, flush=True)

    def of(found):
        return {s: t for s, t in found.items() if s in wanted or not args.stages}

    show(of(table), of(slow))


if __name__ == "__main__":
    main()

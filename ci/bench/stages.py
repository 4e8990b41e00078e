"""Where the time of a run goes: python ci/bench/stages.py --system mtdrive --scale 0.1 --stages grpo --set model=base.

Every stage of a system's laptop run, made smaller, in one process on one core. CPU seconds of each stage, and how
they are shared out to the parts of the kit. A part's time is its own: what it calls in another part counts there.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from functools import wraps  # noqa: E402

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import Qwen2_5_VLModel  # noqa: E402

from drivelit.data import rows  # noqa: E402
from drivelit.driveagent import evidence, labels  # noqa: E402
from drivelit.metrics import pdm, pdm_closed  # noqa: E402
from drivelit.mtdrive import agent  # noqa: E402
from drivelit.policy.engines import TransformersEngine  # noqa: E402
from drivelit.policy.model import Policy, train_tokenizer  # noqa: E402
from drivelit.scene import cameras, town  # noqa: E402
from drivelit.training import sft, stages  # noqa: E402
from drivelit.training.profiles import find_system, load_profile  # noqa: E402
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


def smaller(profile, scale):
    "The keys of a profile that say how much there is, times the scale."
    times = lambda v, low: max(low, round(v * scale))
    least = dict(train_scenes=64, eval_scenes=12, rl_scenes=16, data_thoughts=16)
    keys = [k for k in (*least, "sft_steps", "align_steps", "rl_steps") if getattr(profile, k, 0)]
    return {k: times(getattr(profile, k), least.get(k, 2)) for k in keys}


def show(table):
    "Seconds by stage, shares by part."
    parts = [p for p in [*PARTS, "rest"] if sum(t[p] for t in table.values()) >= 0.005 * total(table)]
    print("stage".ljust(16) + "seconds".rjust(9) + "".join(p.rjust(11) for p in parts))
    table = table | {"all": sum(table.values(), Counter())}
    for stage, found in table.items():
        whole = sum(found.values())
        shares = "".join(f"{found[p] / max(whole, 1e-9):11.0%}" for p in parts)
        print(f"{stage:16}{whole:9.1f}{shares}", flush=True)


def total(table):
    return sum(sum(t.values()) for t in table.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", default="mtdrive")
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--stages", default="", help="those to show, with commas; what they need runs, too")
    parser.add_argument("--set", default="", help="keys of the profile, key=value with commas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    full = load_profile(args.system, "laptop")
    keys = dict(k.split("=", 1) for k in args.set.split(",") if k)
    profile = load_profile(args.system, "laptop", **smaller(full, args.scale) | keys)
    graph = importlib.import_module(f"{find_system(args.system).package}.pipeline").STAGES
    wanted = [s for s in args.stages.split(",") if s] or [s for s in graph.needs if s not in graph.optional]
    clock, table = Clock(), {}
    watch(clock)
    with tempfile.TemporaryDirectory() as out:
        stages.start(out, profile)
        for stage in graph.order(wanted):
            clock.take()
            graph.work(out, stage, 0)
            table[stage] = clock.take()
            print(f"{stage}: {sum(table[stage].values()):.1f} s", file=sys.stderr, flush=True)
    show({s: t for s, t in table.items() if s in wanted or not args.stages})


if __name__ == "__main__":
    main()

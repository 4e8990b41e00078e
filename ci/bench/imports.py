"""What is paid before the first line of work: python ci/bench/imports.py [--only NAME] [--longest 12].

CPU seconds of a new process that imports what a command, a stage or a page of a notebook needs, and which of the large
packages it has then. Below, with --only, the imports that take longest (`python -X importtime`; each with all that it
brings along). Which packages may be there is tested in tests/test_core.py; how long they take is not.
"""

import argparse
import subprocess
import sys

LARGE = "shapely matplotlib pandas scipy pyarrow sympy torch transformers accelerate peft datasets trl".split()
WAYS = {
    "command: --help": "from drivelit.__main__ import main",
    "command: plan": "from drivelit.__main__ import main\nmain(['plan', 'mtdrive.laptop'])",
    "command: score": "import drivelit.bridges.score",
    "page: the claims": "import drivelit.closed_loop.claims",
    "page: MTDrive's report": "import drivelit.mtdrive.report",
    "notebook: the PDM Score": "import drivelit.metrics.pdm",
    "notebook: the town": "import drivelit.town.scenes",
    "a policy that plays": "import drivelit.policy.engines",
    "training: TurnGRPOTrainer": "import drivelit.training.turn_grpo",
    "its share: from torch": "import torch",
    "its share: from transformers": "from transformers import PreTrainedModel",
    "its share: from trl": "from trl import GRPOTrainer",
} | {
    f"stages of {s}": f"import drivelit.{s}.pipeline"
    for s in ("mtdrive", "driveagent", "autodrive_p3", "minddriver", "minddrive")
}
TELL = """
import sys, time
print("told", time.process_time(), *(m for m in {large} if m in sys.modules))
"""


def paid(code):
    "CPU seconds, and the large packages."
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code + TELL.format(large=LARGE)], capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    _, spent, *there = done.stdout.decode().splitlines()[-1].split()
    return float(spent), there


def longest(code, count):
    "Lines of the imports that take longest, with what they bring along."
    done = subprocess.run([sys.executable, "-W", "ignore", "-X", "importtime", "-c", code], capture_output=True)
    rows = [r.split("|") for r in done.stderr.decode().splitlines() if r.startswith("import time:")][1:]
    rows = sorted(((int(whole), name.strip()) for _, whole, name in rows), reverse=True)
    return [f"    {1e-6 * whole:6.2f} s of wall time  {name}" for whole, name in rows[:count]]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", choices=WAYS)
    p.add_argument("--longest", type=int, default=12)
    p.add_argument("--repeats", type=int, default=3)
    args = p.parse_args()
    for name, code in WAYS.items():
        if args.only in (None, name):
            paid(code)  # fills the caches of byte code
            spent = sorted(paid(code)[0] for _ in range(args.repeats))
            print(f"{name:30s} {spent[len(spent) // 2]:6.2f} CPU s  {' '.join(paid(code)[1])}", flush=True)
    if args.only:
        print("\n".join(longest(WAYS[args.only], args.longest)))


if __name__ == "__main__":
    main()

"""What scoring costs on scenes that nothing was kept of: python ci/bench/cold.py [--scenes 96] [--repeats 3].

Scenes of the town as files, one core, CPU milliseconds a scene: reading a file, making it ready, PDM-Closed's plan, and
one plan scored beside it; scene by scene, and 32 scenes together as `drivelit score` does it. Then all of `drivelit
score` on those files (three plans a scene: the planner's, constant velocity, the human's), without its imports, and
the minutes that this makes for the 12,146 scenes of navtest on two cores. Reading NAVSIM's logs takes another time
than reading these files. Both ways must give equal scores.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from drivelit.bridges.score import score  # noqa: E402
from drivelit.metrics import pdm, pdm_closed  # noqa: E402
from drivelit.metrics.kinematics import constant_velocity  # noqa: E402
from drivelit.scene.core import from_json, to_json  # noqa: E402
from drivelit.town.scenes import scenes  # noqa: E402

NAVTEST, CORES, TOGETHER = 12_146, 2, 32


class Clock:
    "CPU seconds of what is done, by name."

    def __init__(self):
        self.spent = {}

    def of(self, name, work):
        begin = time.process_time()
        out = work()
        self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - begin
        return out


def judged(files, batch_size):
    "CPU seconds by step, and the scores of constant velocity."
    clock, found = Clock(), []
    for k in range(0, len(files), batch_size):
        some = clock.of("read", lambda k=k: [from_json(f) for f in files[k : k + batch_size]])
        ready = clock.of("prepare", lambda some=some: [pdm.prepare(s) for s in some])
        plans = clock.of("PDM-Closed", lambda ready=ready: pdm_closed.references(ready))
        for r, plan in zip(ready, plans, strict=True):
            r.reference = plan
        own = [constant_velocity(s)[None] for s in some]
        results = clock.of("one plan", lambda ready=ready, own=own: pdm.score_scenes(ready, own))
        found += [r.pdms[0] for r in results]
    return clock.spent, np.array(found)


def command(folder, out):
    "CPU seconds of `drivelit score`, in this process."
    begin = time.process_time()
    score("drivelit.metrics.kinematics:constant_velocity", "json", folder, out)
    return time.process_time() - begin


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scenes", type=int, default=96)
    p.add_argument("--repeats", type=int, default=3)
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "scenes"
        folder.mkdir()
        begin = time.process_time()
        town = scenes(args.scenes, seed=0)
        made = (time.process_time() - begin) / args.scenes
        for s in town:
            to_json(s, folder / f"{s.id.replace('/', '-')}.json")
        del town
        files = sorted(folder.glob("*.json"))
        runs = {n: [judged(files, n) for _ in range(args.repeats + 1)][1:] for n in (1, TOGETHER)}
        (_, one), (_, many) = runs[1][0], runs[TOGETHER][0]
        assert np.array_equal(one, many), f"one by one and together differ by {np.abs(one - many).max()}"
        print(f"{args.scenes} scenes; CPU ms a scene, the median of {args.repeats}; making one takes {1e3 * made:.1f}")
        for n, found in runs.items():
            steps = {k: 1e3 * np.median([spent[k] for spent, _ in found]) / len(files) for k in found[0][0]}
            parts = ", ".join(f"{k} {v:.2f}" for k, v in steps.items())
            print(f"{n:3d} together: {sum(steps.values()) - steps['read']:6.2f} without reading ({parts})")
        took = [command(folder, Path(where) / f"out{k}") for k in range(args.repeats + 1)][1:]
        each = np.median(took) / len(files)
        minutes = each * NAVTEST / CORES / 60
        print(f"drivelit score: {1e3 * each:.2f} ms a scene, {minutes:.1f} minutes for {NAVTEST:,} on {CORES} cores")


if __name__ == "__main__":
    main()

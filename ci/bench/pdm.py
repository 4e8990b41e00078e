"""How fast the PDM Score is.   python ci/bench/pdm.py [--scenes 24] [--repeats 5]

Toy town scenes, plans around each expert, one core. Milliseconds per plan at several batch sizes, split into
tracking (LQR and bicycle) and scoring (contacts, map, comfort, progress), beside a loop that scores one plan at
a time, as a planner's own script would: once on prepared scenes, once on plain scenes (geometry and reference
made again for each plan). Then the peak memory of a batch, and a training step's shape (a few plans for each of
many scenes) scored scene by scene and all together. The batch must give
the loop's scores.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time  # noqa: E402
import tracemalloc  # noqa: E402

import numpy as np  # noqa: E402

from drivelit.metrics import kinematics as kin  # noqa: E402
from drivelit.metrics import pdm, pdm_closed  # noqa: E402
from drivelit.town.scenes import scenes  # noqa: E402

BATCHES = (1, 8, 64, 256)
MEMORY = (256, 512, 1024)


def plans_around(expert, n, rng):
    "(n, 8, 3) plans: the expert's, faster or slower, and shifted to a side."
    stretch, side = 1 + 0.1 * rng.standard_normal((n, 1, 1)), 0.3 * rng.standard_normal((n, 1))
    plans = expert[None] * np.concatenate([stretch, stretch, np.ones_like(stretch)], -1)
    plans[..., 1] += side * np.linspace(0, 1, expert.shape[0])
    return plans


def milliseconds(call, repeats):
    "The median time of a call, after one that does not count."
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times))


def over(town, call, repeats):
    "The mean over scenes of the median time of call(index)."
    return float(np.mean([milliseconds(lambda i=i: call(i), repeats) for i in range(len(town))]))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scenes", type=int, default=24)
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()

    town, rng = scenes(args.scenes, seed=0), np.random.default_rng(0)
    ready = [pdm.prepare(s) for s in town]
    plans = [plans_around(s.expert.poses, max(BATCHES), rng) for s in town]
    agents, areas = np.mean([(len(s.agents), len(s.map.areas)) for s in town], axis=0)
    print(f"{len(town)} scenes, on average {agents:.1f} agents and {areas:.1f} areas")
    print(f"prepare    {over(town, lambda i: pdm.prepare(town[i]), args.repeats):8.2f} ms a scene")
    once = over(town, lambda i: pdm_closed.reference(town[i]), args.repeats)
    many = milliseconds(lambda: pdm_closed.references(ready), args.repeats) / len(ready)
    print(f"reference  {once:8.2f} ms a scene, once; then kept; {many:.2f} ms made together")

    one = over(town, lambda i: [pdm.score(ready[i], x[None]) for x in plans[i][:8]], 1) / 8
    plain = over(town, lambda i: [pdm.score(town[i], x[None]) for x in plans[i][:2]], 1) / 2
    print(f"one at a time: {one:.2f} ms a plan on ready scenes, {plain:.2f} ms on plain ones\n")

    print(
        f"{'batch':>5} {'call ms':>9} {'ms a plan':>10} {'tracking':>9} {'scoring':>9}"
        f" {'x ready loop':>13} {'x plain loop':>13}"
    )
    for n in BATCHES:
        whole = over(town, lambda i, n=n: pdm.score(ready[i], plans[i][:n]), args.repeats)
        tracking = over(town, lambda i, n=n: kin.simulate(plans[i][:n], town[i].ego), args.repeats)
        ratios = f"{one * n / whole:13.1f} {plain * n / whole:13.1f}"
        print(f"{n:5d} {whole:9.2f} {whole / n:10.3f} {tracking / n:9.3f} {(whole - tracking) / n:9.3f} {ratios}")

    print(f"\n{'batch':>5} {'peak MB':>8} {'kB a plan':>10}")
    for n in (64, 128, *MEMORY):
        many = np.concatenate([plans[0]] * (n // 64 + 1))[:n]
        tracemalloc.start()
        pdm.score(ready[0], many)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"{n:5d} {peak / 1e6:8.1f} {peak / 1e3 / n:10.1f}")

    few, whose = [x[:8] for x in plans], [ready[i % len(ready)] for i in range(len(plans))]
    apart = milliseconds(lambda: [pdm.score(r, x) for r, x in zip(whose, few, strict=True)], args.repeats)
    together = milliseconds(lambda: pdm.score_scenes(whose, few), args.repeats)
    n = 8 * len(few)
    print(f"\n8 plans for each of {len(few)} scenes")
    print(f"{apart / n:.3f} ms a plan scene by scene, {together / n:.3f} ms together")

    for r, x in zip(ready, plans, strict=True):
        batch = pdm.score(r, x[:8]).pdms
        single = np.concatenate([pdm.score(r, y[None]).pdms for y in x[:8]])
        assert np.allclose(batch, single, atol=1e-9), f"{r.scene.id}: a batch scores {batch}, one at a time {single}"
    print("\nbatch and loop give the same scores")


if __name__ == "__main__":
    main()

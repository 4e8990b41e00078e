"""What one look at each picture saves.   python ci/bench/looks.py [--routes 2] [--passes 2] [--repeats 3]

Moments of routes as the base's experts read them, one core; times are of the processor, so a busy machine does not
count. Two jobs: decide (both experts, no gradients), and an update of `passes` over the moments (value and
log-probabilities, forward and backward). Each with the vision encoder asked once, as the kit does it, and asked again
by whoever reads.
Both ways must give the same meta-actions, way-points and gradients.
"""

import argparse
import os
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore", category=FutureWarning)

import time  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from drivelit.minddrive.experts import Experts, add_value, decide, value  # noqa: E402
from drivelit.minddrive.meta_actions import Inputs, moments, shown, state_of, state_text  # noqa: E402
from drivelit.town.routes import routes  # noqa: E402


def decided(experts, prompts, states, once):
    "Words and way-points of all moments; the naive way lets the action expert look for itself."
    if once:
        return decide(experts, prompts, states)
    with torch.no_grad():
        speed, path = (x.argmax(1) for x in experts.logps(prompts))
        fast, where, _ = experts.ways(prompts, speed, path, torch.as_tensor(states, dtype=torch.float32))
    n = torch.arange(len(prompts))
    return dict(speed=speed.numpy(), speed_points=fast[n, speed].numpy(), path_points=where[n, path].numpy())


def updated(experts, prompts, passes, once):
    "The gradients after passes over all moments, 64 at a time."
    experts.zero_grad()
    looks = [k for i in range(0, len(prompts), 64) for k in experts.look(prompts[i : i + 64])] if once else None
    for _ in range(passes):
        for i in range(0, len(prompts), 64):
            some, seen = prompts[i : i + 64], looks[i : i + 64] if once else None
            loss = value(experts, some, seen).square().sum() - experts.logps(some, looks=seen)[0][:, 0].sum()
            for p in experts.trained("decision", "value"):
                p.requires_grad_(True)
            loss.backward()
    return {f"weight {k}": p.grad.numpy() for k, p in enumerate(experts.trained("decision")) if p.grad is not None}


def fastest(work, once, repeats):
    "Seconds of the processor of the fastest of some repeats, and the result."
    spent = []
    for _ in range(repeats):
        begin = time.process_time()
        found = work(once)
        spent.append(time.process_time() - begin)
    return min(spent), found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, n in (("routes", 2), ("passes", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=n)
    given = parser.parse_args()
    if min(given.routes, given.passes, given.repeats) < 1:
        parser.error("--routes, --passes and --repeats are at least 1")
    torch.set_num_threads(1)
    experts, inputs = Experts("base").eval(), Inputs("front")
    add_value(experts)
    seen = [m.scene for scene in routes(given.routes, "tuning") for m in moments(scene)[0]]
    prompts = [experts.encode(shown(s, inputs), state_text(s)) for s in seen]
    states = np.stack([state_of(s) for s in seen])
    print(f"{len(prompts)} moments; the fastest of {given.repeats} repeats, milliseconds of the processor for a moment")
    for job, work in (
        ("decide", lambda once: decided(experts, prompts, states, once)),
        (f"update, {given.passes} passes", lambda once: updated(experts, prompts, given.passes, once)),
    ):
        (b, naive), (a, ours) = (fastest(work, once, given.repeats) for once in (False, True))
        for k in naive:
            np.testing.assert_allclose(ours[k], naive[k], rtol=1e-3, atol=1e-3 * np.abs(naive[k]).max(), err_msg=k)
        ms = 1000 / len(prompts)
        print(f"{job:20} one look {a * ms:6.1f}, a look each time {b * ms:6.1f}, ratio {b / a:.2f}")


if __name__ == "__main__":
    main()

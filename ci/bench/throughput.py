"""What moving pictures costs: python ci/bench/throughput.py [--pictures 1932x1092] [--episodes 16] [--play 3] [--step].

A step of reinforcement learning whose playing is slept and whose computing is left out: episodes end one after another
in a process of their own and travel to this one, where three modules (old log-probabilities, reference, update) read
what the vision tower reads. MTDrive section 3.4, figure 3, in seven rows of one run. Seconds of the clock and of the
CPU (both processes), the least of --repeats; "over the floor" is the distance from playing alone.

With --step, where the time of a real step goes on the toy, in CPU seconds of one process: playing, scoring, pictures,
moving (as if another process sampled), log-probabilities, update; with the cache of pictures and without.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile  # noqa: E402
import time  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from functools import lru_cache, partial  # noqa: E402
from pathlib import Path  # noqa: E402
from unittest.mock import patch  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from PIL import Image  # noqa: E402
from stages import Clock  # noqa: E402

from drivelit.mtdrive.formats import fixed_parts, format_trajectory, kit_text  # noqa: E402
from drivelit.mtdrive.task import MTDriveTask  # noqa: E402
from drivelit.policy import model  # noqa: E402
from drivelit.policy.engines import Completion, TransformersEngine  # noqa: E402
from drivelit.policy.model import Policy, load_policy  # noqa: E402
from drivelit.town.scenes import scenes  # noqa: E402
from drivelit.training.throughput import RolloutWorkers, TensorCache, get, put  # noqa: E402
from drivelit.training.turn_grpo import TurnGRPOTrainer, train_rl  # noqa: E402

GROUP, MODULES = 8, 3
ROWS = {  # name: what an episode carries, handed over as it ends, read once
    "naive, torch": ("torch", False, False),
    "IPSS, torch": ("torch", True, False),
    "IPSS + IPTC, torch": ("torch", True, True),
    "naive, numpy": ("numpy", False, False),
    "IPSS + IPTC, numpy": ("numpy", True, True),
    "pixels once a picture": ("pixels", True, True),
    "playing alone": ("nothing", True, True),
}


@lru_cache(maxsize=1)
def processor(size):
    "Qwen's image processor, which leaves pictures of this size as they are."
    return load_policy("toy", size="tiny", image_size=size).processor.image_processor


@lru_cache(maxsize=2)
def pictures(size, count):
    "Pictures of noise, one for each group."
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8)) for _ in range(-(-count // GROUP))]


@lru_cache(maxsize=1)
def patches(size, count):
    "What the vision tower reads, a copy of its own for each episode."
    made = [model._prepared(processor(size), p)[0] for p in pictures(size, count)]
    return [made[n // GROUP].clone() for n in range(count)]


def item(kind, size, count, n):
    "What an episode carries."
    if kind == "nothing":
        return n
    if kind == "pixels":
        return n, pictures(size, count)[n // GROUP]
    tensor = patches(size, count)[n]
    return n, tensor if kind == "torch" else tensor.numpy()


def play(job, hand_over):
    "Stands in for playing: sleeps until each episode's end. They end between 30 % and 100 % of the time."
    if job is None:
        return hand_over(time.process_time())
    kind, size, count, seconds, streamed = job
    items = [item(kind, size, count, n) for n in range(count)]  # made before the clock starts
    ends = np.sort(np.random.default_rng(1).uniform(0.3, 1.0, count)) * seconds
    ends[-1] = seconds
    order = np.random.default_rng(2).permutation(count)
    begin = time.perf_counter()
    hand_over(begin)
    for n, end in zip(order, ends, strict=True):
        time.sleep(max(0.0, end - (time.perf_counter() - begin)))
        if streamed:
            hand_over(items[n])
    if not streamed:
        hand_over(items)


def use(values):
    "A module touches what it got."
    return sum(float(torch.as_tensor(v)[::97, ::13].sum()) for v in values)


def receive(found, prepare):
    "The tensors of what was handed over."
    found = found if isinstance(found, list) else [found]
    return [prepare(v) if isinstance(v, Image.Image) else v for _, v in found]


def step(rollout_workers, row, size, count, seconds):
    "Seconds of a step, from the moment in which playing begins, and of both CPUs; what was read, pictures prepared."
    kind, streamed, once = row

    def cpu():
        return time.process_time() + sum(seconds for _, seconds in rollout_workers.stream([None]))

    before = cpu()
    cache = TensorCache()

    def prepare(image):
        return cache.get(image, partial(model._prepared, processor(size)))[0]

    parcels, kept, total = [], [], 0.0
    came = rollout_workers.stream([(kind, size, count, seconds, streamed)], opened=False)
    begin = get(next(came)[1])  # the clock is the machine's, the same in all processes
    for _, parcel in came:
        if kind == "nothing":
            get(parcel)
        elif once:
            kept += receive(get(parcel), prepare)
        else:
            parcels.append(parcel)
    for module in range(MODULES if kind != "nothing" else 0):
        last = module == MODULES - 1
        total += use(kept) if once else sum(use(receive(get(p, keep=not last), prepare)) for p in parcels)
    took = time.perf_counter() - begin
    return (took, cpu() - before), total, cache.made


def moving(size, count, seconds, repeats):
    "The table of seven rows."
    one = (size[0] // 14) * (size[1] // 14) * 1176 * 4
    print(
        f"{count} episodes in groups of {GROUP}, pictures {size[0]} x {size[1]}: {one / 1e6:.1f} MB as patches, "
        f"{size[0] * size[1] * 3 / 1e6:.1f} MB as pixels; {seconds:.1f} s of playing, slept; least of {repeats}"
    )
    found, sums = {name: [] for name in ROWS}, {}
    with RolloutWorkers(play, workers=1) as rollout_workers:
        step(rollout_workers, ("torch", True, True), size, count, 0.5)  # the pictures are made
        for _ in range(repeats):
            for name, row in ROWS.items():
                took, sums[name], made = step(rollout_workers, row, size, count, seconds)
                found[name].append(took)
                assert row[0] != "pixels" or made == len(pictures(size, count)), f"{made} pictures prepared"
    same = {f"{total:.3e}" for name, total in sums.items() if name != "playing alone"}
    assert len(same) == 1, f"the rows have not read the same: {sums}"
    least = {name: np.min(times, 0) for name, times in found.items()}
    floor, naive = least["playing alone"][0], least["naive, torch"][0]
    print(f"\n{'':24}{'step, s':>9}{'beyond playing, s':>19}{'x naive':>9}{'over the floor':>16}{'CPU, s':>9}")
    for name, (took, cpu) in least.items():
        print(f"{name:24}{took:9.2f}{took - floor:19.2f}{naive / took:9.2f}{took / floor - 1:16.1%}{cpu:9.2f}")


class Plans(TransformersEngine):
    """Draws as ever; then a straight plan of random speed takes the place of what was drawn.

    The untrained toy writes no plan, and without one nothing is scored.
    """

    def generate(self, conversations, **how):
        said = super().generate(conversations, **how)
        speeds = np.random.default_rng(how["seed"]).uniform(0, 15, len(said))
        return [self.plan(speed) for speed in speeds]

    def plan(self, speed):
        along = speed * 0.5 * np.arange(1, 9)[:, None]
        text = format_trajectory(np.concatenate([along, np.zeros((8, 2))], 1))
        ids = [*self.policy.tokenizer(text, add_special_tokens=False)["input_ids"], self.eos]
        return Completion(text, ids, [-0.5] * len(ids))


class Moved(TurnGRPOTrainer):
    "Its episodes go to a shelf and back, group by group, as from another process."

    def rollout(self, scenes, **how):
        episodes, group = super().rollout(scenes, **how), self.num_generations
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as shelf:
            parcels = [there(episodes[i : i + group], shelf) for i in range(0, len(episodes), group)]
            return [e for parcel in parcels for e in back(parcel)]


there, back = put, get
PARTS = {  # part: (class or module, name)
    "playing": [(TransformersEngine, "generate")],
    "scoring": [(MTDriveTask, "step_batch")],
    "pictures": [(Policy, "pixels")],
    "moving": [],
    "log-probabilities": [(TurnGRPOTrainer, "make_batch")],
    "update": [(TurnGRPOTrainer, "objective"), (Accelerator, "backward"), (AcceleratedOptimizer, "step")],
}


def shares(steps):
    "CPU seconds of the parts of a step, with the cache of pictures and without."
    global there, back
    clock = Clock()

    def bare(self, images):
        return model._pixels(self.processor.image_processor, images) if images else {}

    for part, places in PARTS.items():
        for where, name in places:
            setattr(where, name, clock.timed(part, getattr(where, name)))
    there, back = clock.timed("moving", put), clock.timed("moving", get)
    inner, counted, table = model._prepared, [], {}
    town = scenes(8)

    def prepared(processor, image):
        counted.append(image.tobytes())
        return inner(processor, image)

    for name in ("without the cache", "with it"):
        policy = load_policy("toy", text=kit_text(), fixed=fixed_parts(), image_size=(336, 168))
        settings = dict(
            batch=2,
            num_generations=8,
            per_device_train_batch_size=4,
            beta=0.01,
            learning_rate=1e-5,
            num_iterations=2,
            max_turns=3,
        )
        cached = nullcontext() if name == "with it" else patch.object(Policy, "pixels", clock.timed("pictures", bare))
        with tempfile.TemporaryDirectory() as out, patch.object(model, "_prepared", prepared), cached:
            counted.clear()
            clock.take()
            task = MTDriveTask(max_turns=3, image_size=(336, 168))
            how = settings | dict(trainer=Moved, engine=Plans(policy))
            train_rl(policy, task, town, out, steps=steps, max_new_tokens=64, save_steps=100, **how)
            table[name] = clock.take(), len(counted), len(set(counted))
    parts = [*PARTS, "rest"]
    print("\na step of 16 episodes on the toy, pictures 336 x 168, 3 turns, 2 passes: CPU seconds\n")
    print(f"{'':20}" + "".join(f"{name:>22}" for name in table))
    for part in parts:
        cells = [(found[part] / steps, found[part] / sum(found.values())) for found, _, _ in table.values()]
        print(f"{part:20}" + "".join(f"{took:13.3f} ({share:6.1%})" for took, share in cells))
    print(
        f"{'whole step':20}" + "".join(f"{sum(found.values()) / steps:13.3f}{'':9}" for found, _, _ in table.values())
    )
    print(
        f"{'pictures prepared':20}"
        + "".join(f"{f'{made} of {different}':>22}" for _, made, different in table.values())
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", default="1932x1092", help="width x height, multiples of 28")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--play", type=float, default=3.0, help="seconds that are slept")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step", action="store_true", help="where the time of a step goes, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    moving(tuple(map(int, args.pictures.split("x"))), args.episodes, args.play, args.repeats)
    if args.step:
        shares(steps=1)


if __name__ == "__main__":
    main()

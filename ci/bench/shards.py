"""What scenes in shards cost: python ci/bench/shards.py [--scenes 2000] [--references] [--folder FOLDER]

Toy town scenes, one core. CPU time to make and to write them, bytes on disk beside one JSON file a scene, CPU time to
read one in order and in random order beside JSON, and the memory of a process that walks through a tenth of the
scenes and through all of them, beside one that holds them in a list. Each reader is a process of its own (Linux); its
memory is the highest resident size less that before the first scene. The last column is for 100,000 scenes, about as
many as navtrain has. FOLDER keeps the shards: a second run measures the readers alone.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from drivelit.data.shards import Shards, pack, write_shard  # noqa: E402
from drivelit.metrics.pdm_closed import references  # noqa: E402
from drivelit.runs.prepare import prepare  # noqa: E402
from drivelit.scene.core import from_json, to_json  # noqa: E402
from drivelit.town.scenes import scenes  # noqa: E402

NAVSIM = 100_000


def clock(use):
    "CPU seconds."
    begin = time.process_time()
    use()
    return time.process_time() - begin


def memory(name):
    "Bytes of this process: VmRSS now, VmHWM at the most since the process began or was told to forget."
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def child(folder, what, count):
    "In a process of its own: read scenes; seconds of CPU time and bytes of memory, printed."
    shards = Shards(folder)
    shards[0]
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = memory("VmRSS")
    if what == "order":
        seconds = clock(lambda: [s.id for s in shards[:count]])
    if what == "random":
        numbers = np.random.default_rng(0).permutation(len(shards))[:count]
        seconds = clock(lambda: [shards[int(k)].id for k in numbers])
    if what == "list":
        held = []
        seconds = clock(lambda: held.extend(shards[:count]))
    print(seconds, memory("VmHWM") - before)


def reader(folder, what, count):
    "What `child` prints."
    command = [sys.executable, __file__, "--child", str(folder), what, str(count)]
    return map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def line(what, value, unit, total=""):
    print(f"{what:44}{value:10.2f} {unit:12}{total:>14}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=2000)
    parser.add_argument("--references", action="store_true", help="PDM-Closed's plans, too")
    parser.add_argument("--folder")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        folder, what, count = given.child
        return child(folder, what, int(count))
    n, hours = given.scenes, lambda seconds: f"{NAVSIM * seconds / 3600:.1f} h"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary) / "shards"
        whole = clock(lambda: prepare("toy", "-", folder, n=n, references=given.references, require=()))
        shards = Shards(folder)
        some = scenes(64)
        for k, s in enumerate(some):
            to_json(s, Path(temporary) / f"{k}.json")
        jsons = sorted(Path(temporary).glob("*.json"))
        print(f"{n} toy scenes in {len(shards.shards)} shards{'':32}100,000 scenes")
        line("the whole preparation", 1e3 * whole / n, "ms a scene", hours(whole / n))
        line("  of it painting the town", 1e3 * clock(lambda: scenes(64)) / 64, "ms a scene")
        line("  of it PDM-Closed's plans, if wanted", 1e3 * clock(lambda: references(some)) / 64, "ms a scene")
        line("  of it packing", 1e3 * clock(lambda: [pack(s) for s in some]) / 64, "ms a scene")
        write = clock(lambda: write_shard(some, Path(temporary) / "x.parquet")) / 64
        line("  of it packing, writing", 1e3 * write, "ms a scene", hours(write))
        size = sum((folder / s["file"]).stat().st_size for s in shards.shards) / n
        line("on disk", size / 1e3, "kB a scene", f"{NAVSIM * size / 1e9:.1f} GB")
        json_size = np.mean([p.stat().st_size for p in jsons])
        line("  as JSON files", json_size / 1e3, "kB a scene", f"{json_size / size:.1f} x")
        for what, count in (("order", n // 10), ("order", n), ("random", n // 10), ("random", n), ("list", n // 10)):
            seconds, taken = reader(folder, what, count)
            name = (
                f"{count} in a list" if what == "list" else f"{count} in {what if what == 'order' else 'random order'}"
            )
            line(f"read {name}", 1e3 * seconds / count, "ms a scene")
            total = f"{NAVSIM / count * taken / 1e9:.1f} GB" if what == "list" else "the same"
            line("  memory of that process", taken / 1e6, "MB", total)
        slow = clock(lambda: [from_json(p) for p in jsons]) / 64
        line("read JSON files", 1e3 * slow, "ms a scene")


if __name__ == "__main__":
    main()

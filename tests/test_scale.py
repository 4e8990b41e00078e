"""Data larger than the memory: a preparation that is killed, pictures that stay closed, memory that stays flat."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image
from transformers import TrainerCallback

from drivelit.data.rows import Picture, make_row, read_rows, says, write_rows
from drivelit.data.shards import Shards, read_index
from drivelit.policy.model import load_policy
from drivelit.scene.core import to_json
from drivelit.scene.town import scenes
from drivelit.training.sft import train_sft

TOWN = ("toy", "-")
HOW = ("--n", "40", "--in-shard", "5", "--no-references")


def prepare(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "drivelit", "prepare", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def prepared(*words, **more):
    "The exit status and what was said."
    process = prepare(*words, **more)
    return process.communicate()[0], process.returncode


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    "Forty scenes, prepared by one process."
    folder = tmp_path_factory.mktemp("town") / "one"
    said, status = prepared(*TOWN, folder, *HOW, "--workers", 1)
    assert status == 0 and "40 scenes in 8 shards; 0 left out" in said, said
    return folder


def test_the_scenes_are_the_towns(town):
    assert [to_json(s) for s in Shards(town)] == [to_json(s) for s in scenes(40)]


def test_the_number_of_workers_does_not_matter(town, tmp_path):
    said, status = prepared(*TOWN, tmp_path / "three", *HOW, "--workers", 3)
    assert status == 0, said
    assert read_index(tmp_path / "three") == read_index(town)


def children(pid):
    "The processes that a process has started."
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(p) for p in found.split()]


def test_a_killed_preparation_goes_on(town, tmp_path):
    folder = tmp_path / "killed"
    process = prepare(*TOWN, folder, *HOW, "--workers", 2)
    end = time.monotonic() + 300
    while len(list(folder.glob("*.parquet"))) < 2:
        assert process.poll() is None and time.monotonic() < end, "it ended before it could be killed"
        time.sleep(0.02)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while any(os.path.exists(f"/proc/{p}") for p in workers):  # they leave with their parent
        assert time.monotonic() < end
        time.sleep(0.1)
    there = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.parquet")}
    assert 2 <= len(there) < 8 and not (folder / "index.json").exists()
    said, status = prepared(*TOWN, folder, *HOW, "--workers", 2)
    assert status == 0, said
    assert read_index(folder) == read_index(town)
    assert {n: (folder / n).stat().st_mtime_ns for n in there} == there  # what was whole was left as it is
    assert not list(folder.glob("*.new"))


def test_a_full_disk_is_a_sentence(town, tmp_path):
    sizes = sorted(p.stat().st_size for p in town.glob("*.parquet"))
    little = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({sizes[4]}, {sizes[4]}))"  # a few shards are larger
    words = ["prepare", *TOWN, "full", *HOW, "--workers", "1"]
    run = f"{little}; from drivelit.__main__ import main; raise SystemExit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "parquet: cannot be written (" in done.stderr, done.stderr
    assert "whole shards stay, and the same command goes on" in done.stderr and "Traceback" not in done.stderr
    whole = sorted(p.name for p in (tmp_path / "full").glob("*.parquet"))
    assert all(f"{k:05d}.parquet" == n for k, n in enumerate(whole)) and not list((tmp_path / "full").glob("*.new"))
    said, status = prepared(*TOWN, tmp_path / "full", *HOW, "--workers", 1)
    assert status == 0 and read_index(tmp_path / "full") == read_index(town), said


def rows_with_pictures(count):
    "Rows that share no picture."
    (scene,) = scenes(1)
    for k in range(count):
        shade = Image.new("RGB", (168, 84), (k % 256, k // 256, 7))
        asked = {"role": "user", "content": [{"type": "image", "image": shade}, {"type": "text", "text": "Yes or No"}]}
        yield make_row("colour", scene, [asked, says("assistant", "Yes. " * (1 + k % 9))])


class Opened(TrainerCallback):
    "How many pictures had been opened when training began, and at the end of each update."

    def __init__(self, names):
        self.names, self.counts = names, []

    def on_train_begin(self, *_, **__):
        self.counts.append(len(self.names))

    def on_step_end(self, *_, **__):
        self.counts.append(len(self.names))


def test_no_picture_is_opened_before_the_first_batch(tmp_path, monkeypatch):
    opened, read = [], Picture._read
    monkeypatch.setattr(Picture, "_read", lambda self: opened.append(self.name) or read(self))
    rows, watch = read_rows(write_rows(rows_with_pictures(300), tmp_path / "rows.parquet")), Opened(opened)
    train_sft(load_policy("toy", size="tiny"), rows, tmp_path / "run", steps=3, batch=8, callbacks=[watch])
    assert watch.counts[0] == 0
    assert 8 <= watch.counts[1] <= 16 and len(opened) == 24  # a batch, and perhaps the one that is made meanwhile


PEAK = """
import sys
from pathlib import Path
from drivelit.data.rows import read_rows
from drivelit.policy.model import load_policy
from drivelit.training.sft import train_sft

policy, here = load_policy("toy", size="tiny"), Path(sys.argv[1])
train_sft(policy, read_rows(here / sys.argv[2])[:40], here / "warm", steps=2, batch=8)
Path("/proc/self/clear_refs").write_text("5")  # forget the peak
train_sft(policy, read_rows(here / sys.argv[2]), here / sys.argv[2].split(".")[0], steps=2, batch=8)
lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("peak", lines["VmHWM"].split()[0])
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is read as Linux tells it"
)
def test_memory_does_not_grow_with_the_rows(tmp_path):
    "Ten times the rows: their pictures would be 380 MB more, their unpacked words 15 MB."
    peaks = {}
    for count in (1000, 10_000):
        write_rows(rows_with_pictures(count), tmp_path / f"{count}.parquet")
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path), f"{count}.parquet"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[count] = int(done.stdout.split("peak")[-1]) / 1000
    print(json.dumps(peaks), "MB")
    assert peaks[10_000] - peaks[1000] < 12, peaks

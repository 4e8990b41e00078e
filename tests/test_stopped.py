"""Ctrl-C as a terminal sends it, to all processes: one line says how to go on, and the same command does."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from drivelit.bridges.blocks import BATCH_SIZE

PLANNER = """
import os
import time
from pathlib import Path

import numpy as np

from drivelit.bridges.blocks import BATCH_SIZE


def straight(scene):
    asked = Path(__file__).with_name("asked.txt")
    with open(asked, "a") as f:
        f.write(f"{scene.id}\\n")
    # the second block stands still until it is stopped
    while os.environ.get("STANDS") and len(asked.read_text().split()) > BATCH_SIZE:
        time.sleep(0.05)
    return np.stack([2.0 * np.arange(1, 9), np.zeros(8), np.zeros(8)], 1)
"""


def begun(where, *words, **env):
    "The command in a group of its own, as a shell starts it."
    return subprocess.Popen(
        [sys.executable, "-m", "drivelit", *map(str, words)],
        cwd=where,
        env=os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1") | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # what a shell has put into the background would not hear Ctrl-C, nor what that starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def stopped(process, when):
    "What it said after Ctrl-C, which comes as soon as something is there."
    while not when() and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate()
    return process.returncode, out, error


def goes_on(code, error, *words):
    "It ended in one line, the words that were typed, and without a traceback."
    again = shlex.join(["python", "-m", "drivelit", *map(str, words)])
    last = error.strip().splitlines()[-1]
    assert (code, last) == (130, f"stopped; what is finished is kept, and this goes on: {again}"), error
    assert "Traceback" not in error


def ended(where, *words, **env):
    process = begun(where, *words, **env)
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_score(tmp_path):
    (tmp_path / "mine.py").write_text(PLANNER)
    n = BATCH_SIZE + 2
    words = ["score", "mine.py:straight", "toy", "-", "--n", n, "--workers", 1, "--json"]
    whole = json.loads(ended(tmp_path, *words, "--out", "whole"))
    asked, said = tmp_path / "asked.txt", [*words, "--out", "parts"]
    first = lines(asked)
    asked.unlink()
    code, out, error = stopped(begun(tmp_path, *said, STANDS="1"), lambda: len(lines(asked)) > BATCH_SIZE)
    goes_on(code, error, *said)
    assert (out, len(lines(asked))) == ("", BATCH_SIZE + 1)
    parts = json.loads(ended(tmp_path, *said))

    def same(told):
        return {k: v for k, v in told.items() if k not in ("out", "seconds")}

    assert same(parts) == same(whole)
    assert set(lines(asked)) == set(first)
    assert len(lines(asked)) == n + 1  # the first block was kept, and the second asked again


def test_prepare(tmp_path):
    words = ["prepare", "toy", "-", "made", "--n", 60, "--in-shard", 2, "--workers", 2, "--no-references"]

    def shards():
        return sorted((tmp_path / "made").rglob("*.parquet"))

    code, _, error = stopped(begun(tmp_path, *words), lambda: len(shards()) > 1)
    goes_on(code, error, *words)
    kept = {p: p.stat().st_mtime_ns for p in shards() if not p.name.startswith(".")}
    ended(tmp_path, *words)
    assert kept and {p: p.stat().st_mtime_ns for p in kept} == kept


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run that was stopped in its second stage, and went on."
    where = tmp_path_factory.mktemp("run")
    words = ["run", "mtdrive.smoke", "--out", "mine", "--stages", "sft_single", "--workers", 1]
    out = where / "mine"
    code, _, error = stopped(begun(where, *words), lambda: any(out.rglob("scenes/done.json")))
    goes_on(code, error, *words)
    kept = {p: p.stat().st_mtime_ns for p in out.rglob("done.json")}
    ended(where, *words)
    return where, kept


def test_run(run):
    where, kept = run
    assert any(p.parts[-2] == "scenes" for p in kept)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept and any((where / "mine").rglob("sft_single/done.json"))


def test_plans(run):
    where, _ = run
    n = 4 * BATCH_SIZE
    words = ["plans", "mine", "toy", "-", "--n", n, "--out", "plans"]

    def blocks():
        return {p: p.stat().st_mtime_ns for p in (where / "plans" / "blocks").glob("[0-9]*.json")}

    code, _, error = stopped(begun(where, *words), blocks)
    goes_on(code, error, *words)
    kept = blocks()
    ended(where, *words)
    assert {p: t for p, t in blocks().items() if p in kept} == kept and len(blocks()) == 4
    assert len(lines(where / "plans" / "plans.jsonl")) >= n

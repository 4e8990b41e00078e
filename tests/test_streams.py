"""What can go wrong between a trainer and its rollout workers: a death, a full disk, a server that is gone."""

import importlib
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from drivelit.data.rows import Picture, picture_name
from drivelit.policy.model import load_policy
from drivelit.rollout.core import Episode, RolloutError
from drivelit.testing.server import StubServer, chat
from drivelit.training.throughput import (
    RolloutWorkers,
    StoreError,
    WorkerError,
    get,
    play_rollout,
    prepared_once,
    put,
    rollout_on_workers,
)

PLAYS = """
import os, resource, signal, time
import numpy as np

_, MOST = resource.getrlimit(resource.RLIMIT_FSIZE)

def play(job, hand_over):
    "A list of (what, seconds): sleep so long, then hand over an item, die, or write more than the system allows."
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST))
    for what, seconds in job:
        time.sleep(seconds)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "big":
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, MOST))
        hand_over((what, os.getpid(), np.zeros(100_000 if what == "big" else 100)))
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    "Two processes; each has played a first job."
    folder = tmp_path_factory.mktemp("plays")
    (folder / "plays_for_streams.py").write_text(PLAYS)
    sys.path.insert(0, str(folder))  # a process imports what it runs by its name
    with RolloutWorkers(importlib.import_module("plays_for_streams").play) as both:
        drained(both, [[("up", 0.0)]] * 2)
        yield both
    sys.path.remove(str(folder))


def drained(workers, jobs):
    "What came, as (job, name, process), and the error at the end."
    items, error = [], None
    try:
        for number, item in workers.stream(jobs):
            items.append((number, *item[:2]))
    except WorkerError as e:
        error = e
    return items, error


def names(items):
    return sorted((number, name) for number, name, _ in items)


def test_one_that_dies_is_named_and_another_takes_its_place(workers):
    before = {pid for *_, pid in drained(workers, [[("a", 0.5)]] * 2)[0]}
    items, error = drained(workers, [[("a", 0.0)], [("b", 0.0), ("die", 3.0)], [("c", 0.0)]])
    assert (names(items), list(error.lost)) == ([(0, "a"), (1, "b"), (2, "c")], [1])  # what was finished is there
    assert "job 1: its rollout worker died (killed by signal 9" in str(error)
    items, error = drained(workers, [[("d", 0.5)]] * 2)
    assert (names(items), error) == ([(0, "d"), (1, "d")], None)
    assert len({pid for *_, pid in items} & before) == 1  # one is new
    assert list(Path(workers.shelf.name).iterdir()) == []


def test_when_all_have_died_the_rest_is_named(workers):
    _, error = drained(workers, [[("die", 0.0)], [("die", 0.0)], [("c", 0.0)]])
    assert (sorted(error.lost), error.lost[2]) == ([0, 1, 2], "no rollout worker was left")
    text = str(WorkerError({3: "late", 1: "early"}, 5))
    assert text.startswith("2 of 5 jobs were not played to their end, the first is job 1")


def test_what_comes_late_belongs_to_no_later_step(workers):
    half = workers.stream([[("old", 0.0), ("late", 1.0)]])
    assert next(half)[1][0] == "old"
    half.close()  # somebody stops listening
    items, error = drained(workers, [[("new", 0.0)]] * 2)
    assert (names(items), error) == ([(0, "new"), (1, "new")], None)


def test_an_item_without_room_is_named_by_its_size(workers):
    items, error = drained(workers, [[("small", 0.0), ("big", 0.0)]])
    assert (names(items), list(Path(workers.shelf.name).iterdir())) == ([(0, "small")], [])  # no half of a file
    assert "0.8 MB of a finished episode cannot be written (File too large" in str(error)
    assert "pass folder=" in str(error)


KILLED = """
import os, signal, sys
import numpy as np
from drivelit.training.throughput import RolloutWorkers, put

left = RolloutWorkers(print, 1, folder=sys.argv[1])
put(np.zeros(100_000), left.shelf.name)
print(left.shelf.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_trainer_leaves_is_taken_away_by_the_next(tmp_path):
    dead = [subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True) for _ in range(2)]
    assert [d.returncode for d in dead] == [-signal.SIGKILL] * 2
    # the second has taken away what the first had left
    assert [p.name for p in tmp_path.iterdir()] == [Path(dead[1].stdout.strip()).name]
    (tmp_path / "somebody-else").mkdir()
    with RolloutWorkers(print, 1, folder=tmp_path) as one, RolloutWorkers(print, 1, folder=tmp_path) as two:
        shelves = {Path(p.shelf.name).name for p in (one, two)}
        assert {p.name for p in tmp_path.iterdir()} == shelves | {"somebody-else"}  # those that live stay
    assert [p.name for p in tmp_path.iterdir()] == ["somebody-else"]


def test_a_picture_that_is_gone_is_said(tmp_path):
    shade = Image.new("RGB", (168, 84), (7, 100, 200))
    gone = put(Episode("e", [], [1], [0], [-0.5], [shade], 1), tmp_path)
    (tmp_path / picture_name(shade).replace("/", "")).unlink()
    with pytest.raises(StoreError, match=r"a picture of an episode cannot be read \(FileNotFoundError"):
        get(gone)
    with pytest.raises(StoreError, match=r"a finished episode cannot be read \(FileNotFoundError"):
        get(gone)
    lost = Picture(tmp_path / "lost.png", "ab/cd.png", (168, 84), "rows.parquet, row 3")
    (read,) = get(put([lost], tmp_path))  # travels as its path
    policy = load_policy("toy", size="tiny")
    with prepared_once(policy), pytest.raises(Exception, match="rows.parquet, row 3: picture"):
        policy.pixels([read])


SERVED = """
from drivelit.policy.engines import OpenAIEngine
from drivelit.policy.model import load_policy
from drivelit.rollout.core import Step, Task

class Ask(Task):
    def prompt(self, scene):
        return [dict(role="user", content="Yes or No")]

    def step(self, state, completion):
        return Step(None, dict(reward=1.0))

def make(url):
    policy = load_policy("toy", size="tiny")
    return OpenAIEngine(url, "stub", policy), policy, Ask()
"""


def test_a_server_that_is_gone_is_named_by_the_engine(tmp_path, monkeypatch):
    (tmp_path / "served_for_streams.py").write_text(SERVED)
    monkeypatch.syspath_prepend(tmp_path)
    served = importlib.import_module("served_for_streams")
    with StubServer(lambda ask: chat("Yes.")) as server:
        play = partial(play_rollout, partial(served.make, server.url))
        with RolloutWorkers(play, 1) as workers:
            options = dict(places=[(0, 1)], max_new_tokens=4)
            (episode,) = rollout_on_workers(workers, [1], **options)
            assert episode.texts == ["Yes."]
            server.__exit__(None, None, None)
            with pytest.raises(RolloutError, match="RolloutError: http://127.0.0.1"):
                rollout_on_workers(workers, [1], **options)
            folder = Path(workers.shelf.name)
        assert not folder.exists()

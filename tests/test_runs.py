"""A whole run killed with SIGKILL: its workers leave with it, the next one gives the same. And: every key is read."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from drivelit.io.files import RunError
from drivelit.runs import stages
from drivelit.runs.profiles import find_system, load_profile, systems
from drivelit.runs.unread import read_keys, unread_keys

PIPELINE = """
"A run of two long stages side by side, and one that adds up what they wrote."

import json
import os
import time
from functools import partial

from drivelit.runs.stages import Stages

LINES = 40
STAGES = Stages("killed", dict(scenes=(), left=("scenes",), right=("scenes",), both=("left", "right")))


def write_lines(name, out, profile, seed):
    "Goes on from the whole lines that an earlier process has written, as the trainers do."
    path = STAGES.folder(out, name, seed) / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(True) if line.endswith("\\n")] if path.exists() else []
    path.write_text("".join(kept))
    for k in range(len(kept), LINES):
        with open(path, "a") as f:
            f.write(json.dumps(dict(step=k, value=(7 * k + len(name)) % 11)) + "\\n")
        time.sleep(float(os.environ["PAUSE"]))
    return dict(lines=LINES)


def add_up(out, profile, seed):
    files = [STAGES.folder(out, s, seed) / "metrics.jsonl" for s in ("left", "right")]
    return dict(total=sum(json.loads(line)["value"] for f in files for line in f.read_text().splitlines()))


FUNCTIONS = dict(
    scenes=lambda out, profile, seed: {},
    left=partial(write_lines, "left"),
    right=partial(write_lines, "right"),
    both=add_up,
)
"""
RUN = "import sys; from killed.pipeline import STAGES; STAGES.run(sys.argv[1])"
# What every python of a run imports first: who works, or is copied, stands still before it imports anything while the
# gate is shut.
GATE = """
import os, sys, time
helps = any(word in " ".join(sys.orig_argv) for word in ("spawn_main", "forkserver"))
while helps and os.path.exists(os.path.join(os.path.dirname(__file__), "shut")):
    time.sleep(0.01)
"""
LEFT, RIGHT = ([dict(step=k, value=(7 * k + n) % 11) for k in range(40)] for n in (len("left"), len("right")))
HANG = 1800  # seconds; ends a test that hangs, and nothing else


@pytest.fixture
def run(tmp_path):
    "A run's folder, and a function that starts the run in a process group of its own."
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "__init__.py").touch()
    (tmp_path / "killed" / "pipeline.py").write_text(PIPELINE)
    (tmp_path / "sitecustomize.py").write_text(GATE)
    out, started = stages.start(tmp_path / "run", load_profile("mtdrive", "smoke")), []

    def begin(pause):
        paths = os.pathsep.join(
            [str(tmp_path), str(Path(stages.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        )
        env = os.environ | dict(PYTHONPATH=paths, PAUSE=str(pause))
        command = [sys.executable, "-c", RUN, str(out)]
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield out, begin
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it is over


def until(what, process=None):
    "Wait until something is there; what it is."
    end = time.monotonic() + HANG
    while not (found := what()):
        assert process is None or process.poll() is None, process.stderr.read()[-2000:]
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.02)
    return found


def started_by(pid):
    "The processes that one has started: number -> command."
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(p): Path(f"/proc/{p}/cmdline").read_text() for p in found}
    except (FileNotFoundError, ProcessLookupError):  # one is gone by now
        return {}


def helpers(process):
    "The server whose copies work, or beside a GPU the workers; not multiprocessing's own helper."
    return [p for p, line in started_by(process.pid).items() if "forkserver" in line or "spawn_main" in line]


def workers(process):
    "The copies of the server, or beside a GPU the workers."
    own = started_by(process.pid)
    copies = [w for p, line in own.items() if "forkserver" in line for w in started_by(p)]
    return copies + [p for p, line in own.items() if "spawn_main" in line]


def gone(pid):
    "Whether a process has ended (an ended one may wait for its new parent to ask for it)."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def written(out, stage):
    path = out / "seed-0" / stage / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_killed_and_started_again(run, monkeypatch, tmp_path):
    out, begin = run

    # the main process dies before its first worker has imported anything
    (tmp_path / "shut").touch()
    process = begin(1)
    children = until(lambda: helpers(process), process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    (tmp_path / "shut").unlink()
    until(lambda: all(map(gone, children)))
    assert not (out / "scenes" / "log.txt").exists()  # it left before it had begun to work

    # it dies while they write
    process = begin(1)
    until(lambda: written(out, "left") and written(out, "right"), process)
    children = until(lambda: len(w := workers(process)) == 2 and w, process)
    time.sleep(random.random())
    # another run in the same folder is told who holds the stage
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stages, "hold", partial(stages.hold, wait=0.2))
    from killed.pipeline import STAGES

    with pytest.raises(RunError, match=f"stage left, seed 0 is held by process ({children[0]}|{children[1]}) on"):
        STAGES.work(out, "left")
    children += helpers(process)
    process.kill()
    process.wait()
    until(lambda: all(map(gone, children)))
    assert 0 < written(out, "left") < 40 and 0 < written(out, "right") < 40  # they did not write to the end

    # one worker dies alone: the run says so and ends, and so does the other worker
    process = begin(1)
    children = until(lambda: len(w := workers(process)) == 2 and w, process)
    lines = written(out, "left")
    until(lambda: written(out, "left") > lines, process)
    os.kill(children[0], signal.SIGKILL)
    error = process.communicate(timeout=HANG)[1]
    assert process.returncode == 1 and "a worker was killed (out of memory?) during" in error
    until(lambda: all(map(gone, children)))

    # to the end: the same as without any kill
    process = begin(0)
    assert process.wait(HANG) == 0, process.stderr.read()[-2000:]
    for stage, lines in (("left", LEFT), ("right", RIGHT)):
        kept = (out / "seed-0" / stage / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in kept] == lines
    total = sum(line["value"] for line in LEFT + RIGHT)
    assert json.loads((out / "seed-0" / "both" / "done.json").read_text())["total"] == total


@pytest.mark.parametrize("system", systems())
def test_every_key_of_a_profile_is_read(system):
    assert unread_keys(system) == []


@pytest.mark.parametrize("system", systems())
def test_a_key_that_nobody_reads_is_found(system, monkeypatch):
    cls = find_system(system).profile_class
    planted = dict(cls.keys(), kl_estimator=fields(cls)[1])
    monkeypatch.setattr(cls, "keys", classmethod(lambda c: planted))
    assert unread_keys(system) == ["kl_estimator"]


def test_a_key_that_is_no_longer_read_is_found():
    folder = Path(find_spec(find_system("mtdrive").package).origin).parent
    cls = find_system("mtdrive").profile_class
    told = ("profile", "report", "pictures")
    text = "\n".join(p.read_text() for p in sorted(folder.glob("*.py")) if p.stem not in told)
    for read, keys in {
        "profile.decodings": {"eval_temperature", "eval_decoding"},
        "profile.sft_warm_lr_scale": {"sft_warm_lr_scale"},
        "rl_options(profile)": {"beta", "rl_learning_rate", "num_generations", "std"},
    }.items():
        assert read in text and keys <= read_keys(cls, [text])
        assert not keys & read_keys(cls, [text.replace(read, "something_else")])

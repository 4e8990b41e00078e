"""ci/serve_carla.sh: who crashes or hangs is started anew, a port that is taken is left alone, none is left behind.

A stage that drives in two simulators, a process for each, one of which dies."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from drivelit.minddrive.evaluation import CONDITIONS
from drivelit.minddrive.experts import Experts, save_experts
from drivelit.minddrive.pipeline import STAGES
from drivelit.minddrive.rows import make_rows, save_rows
from drivelit.runs.profiles import load_profile
from drivelit.runs.record import Condition, read_results
from drivelit.runs.stages import start
from drivelit.town.routes import make_route

ROOT = Path(__file__).parents[1]
# What stands for CarlaUE4.sh: it starts a child that listens, as the engine does, and dies, hangs or stays deaf.
STAND_IN = f"""#!{sys.executable}
import os, socket, subprocess, sys, time
port = int(next(a for a in sys.argv if a.startswith("-carla-rpc-port=")).split("=")[1])
here = os.environ["HERE"]
open(f"{{here}}/starts", "a").write(f"{{port}} {{' '.join(sys.argv[1:])}}\\n")
mode = os.environ["MODE"]
if mode == "deaf":
    time.sleep(600)
code = '''
import socket, sys, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1]))); s.listen(0)
end = time.time() + 600
while time.time() < end:
    s.accept()[0].close() if sys.argv[2] != "stuck" else time.sleep(1)
'''
child = subprocess.Popen([sys.executable, "-c", code, str(port), mode])
open(f"{{here}}/children", "a").write(f"{{child.pid}}\\n")
if mode == "crashes":
    time.sleep(0.8)
    child.kill(); child.wait()
    sys.exit(139)
child.wait()
if mode == "hangs":
    time.sleep(600)
"""


def free(count):
    "The first of so many ports, ten apart, on none of which anybody listens."
    for port in range(21000 + os.getpid() % 1000 * 10, 60000, 10):
        try:
            for k in range(0, 10 * count):
                with closing(socket.socket()) as s:
                    s.bind(("127.0.0.1", port + k))
            return port
        except OSError:
            continue


@pytest.fixture
def serve(tmp_path):
    "Starts the script with the stand-in; whatever the test does, the script is ended."
    binary, running = tmp_path / "CarlaUE4.sh", []
    binary.write_text(STAND_IN)
    binary.chmod(0o755)

    def start(n, port, mode="stays", **more):
        out = open(tmp_path / "out", "w")
        env = os.environ | dict(CARLA_BIN=str(binary), LOGS=str(tmp_path / "logs"), HERE=str(tmp_path), MODE=mode)
        env |= dict(POLL_S="0.2", PORTS_FILE=str(tmp_path / "ports")) | more
        command = ["bash", str(ROOT / "ci/serve_carla.sh"), str(n), str(port), "-quality-level=Low"]
        # bash cannot trap what was ignored when it began, as SIGINT is behind a shell's "&"
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        running.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=heed))
        return running[-1]

    yield start
    for p in running:
        if p.poll() is None:
            p.terminate()
            p.wait(30)


def until(fact, seconds=1800.0):
    "What a function gives as soon as that is true."
    end = time.monotonic() + seconds
    while not (out := fact()):
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.05)
    return out


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def listens(port):
    with closing(socket.socket()) as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def dead(pid):
    "Whether a process is gone, or only waits to be buried."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_two_run_and_none_is_left(serve, tmp_path, ending):
    port = free(2)
    p = serve(2, port, GPUS="3 5")
    until(lambda: listens(port) and listens(port + 10))
    started = sorted(lines(tmp_path / "starts"))
    assert [s.split()[0] for s in started] == [str(port), str(port + 10)]
    assert "-graphicsadapter=3" in started[0] and "-graphicsadapter=5" in started[1]
    assert "-RenderOffScreen" in started[0] and started[0].endswith("-quality-level=Low")
    until(lambda: lines(tmp_path / "ports") == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 10}"])
    until(lambda: len(lines(tmp_path / "children")) == 2)
    children = [int(x) for x in lines(tmp_path / "children")]
    p.send_signal(ending)
    assert p.wait(30) == 128 + ending
    until(lambda: all(dead(c) for c in children))
    assert len(children) == 2 and not listens(port) and not (tmp_path / "ports").exists()


def test_one_that_crashes_is_started_anew_and_in_the_end_given_up(serve, tmp_path):
    port = free(1)
    p = serve(1, port, "crashes", RESTARTS="2")
    assert p.wait(60) == 1
    said = (tmp_path / "out").read_text()
    assert [s.split()[0] for s in lines(tmp_path / "starts")] == [str(port)] * 3, said
    assert len(re.findall("it has died .*; it is started anew", said)) == 2 and "given up after 2 restarts" in said
    assert "no simulator is left" in said and not listens(port)


def test_one_that_never_listens_is_started_anew(serve, tmp_path):
    p = serve(1, free(1), "deaf", START_S="1", RESTARTS="1")
    assert p.wait(60) == 1
    said = (tmp_path / "out").read_text()
    assert "it did not listen within 1 s; it is started anew" in said
    assert re.findall(r", start (\d)$", said, re.M) == ["1", "2"]


@pytest.mark.parametrize(("mode", "words"), [("stays", "it has died"), ("hangs", "it has not answered for 1 s")])
def test_an_engine_that_is_gone_is_noticed(serve, tmp_path, mode, words):
    port = free(1)
    serve(1, port, mode, HANG_S="1" if mode == "hangs" else "60")  # the dead one may take a while to go
    until(lambda: f"listens on {port}" in (tmp_path / "out").read_text())  # the script has seen it, too
    os.kill(int(until(lambda: lines(tmp_path / "children"))[0]), signal.SIGKILL)
    until(lambda: len(lines(tmp_path / "children")) == 2 and listens(port))
    assert words in (tmp_path / "out").read_text()


def test_an_engine_that_takes_no_callers_is_started_anew(serve, tmp_path):
    p = serve(1, free(1), "stuck", HANG_S="1")
    until(lambda: len(lines(tmp_path / "starts")) == 2)  # it listens; a call that waited would hold up the watch
    assert "it has not answered for 1 s; it is started anew" in (tmp_path / "out").read_text()
    p.send_signal(signal.SIGTERM)
    assert p.wait(30) == 128 + signal.SIGTERM


def test_one_that_takes_calls_and_answers_none_is_started_anew(serve, tmp_path):
    asked, there = tmp_path / "asked", tmp_path / "there"
    there.touch()
    p = serve(1, free(1), HANG_S="1", PROBE=f"test -e {there} && echo >>{asked}")
    until(lambda: len(lines(asked)) > 2)  # it answers, so it stays
    assert len(lines(tmp_path / "starts")) == 1
    there.unlink()
    until(lambda: len(lines(tmp_path / "starts")) == 2)
    assert "it has not answered for 1 s; it is started anew" in (tmp_path / "out").read_text()
    p.send_signal(signal.SIGTERM)
    assert p.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("which", [0, 2])
def test_a_port_of_somebody_else_is_left_to_him(serve, tmp_path, which):
    port = free(2)
    with closing(socket.socket()) as mine:
        mine.bind(("127.0.0.1", port + which))
        mine.listen()
        serve(1, port)
        until(lambda: listens(port + 10))
        assert [s.split()[0] for s in lines(tmp_path / "starts")] == [str(port + 10)]
        assert f"port {port} to {port + 2}: somebody listens there already; skipped" in (tmp_path / "out").read_text()
        mine.getsockname()  # still ours


@pytest.mark.parametrize(
    ("n", "port", "words"),
    [("none", "2000", "N: 'none'"), ("0", "2000", "N: '0'"), ("2", "80", "'80'"), ("9", "65500", "no room for 9")],
)
def test_wrong_numbers_are_refused(serve, tmp_path, n, port, words):
    assert serve(n, port).wait(10) == 2
    assert words in (tmp_path / "out").read_text()


def test_no_carla_is_a_sentence(serve, tmp_path):
    assert serve(1, 2000, CARLA_BIN="/nowhere/CarlaUE4.sh").wait(10) == 2
    assert "no CARLA at /nowhere/CarlaUE4.sh: unpack CARLA 0.9.16" in (tmp_path / "out").read_text()


@pytest.mark.skipif(importlib.util.find_spec("carla") is None, reason='needs pip install "drivelit[carla]"')
def test_the_real_client_says_that_nobody_answers():
    import carla

    from drivelit.rollout.carla import NoSimulator, connect

    port = free(1)
    with pytest.raises(NoSimulator, match=rf"127.0.0.1:{port} within 0.5 s: start one with .bash ci/serve_carla.sh"):
        connect("127.0.0.1", port, 0.5, carla)


# What stands for the client in processes that are spawned: a server for each port; whoever dies does so once, whichever
# process it is in: a file says that it has happened. Pictures cost nothing, and a car that stands for 3 s is blocked.
CLIENT = """
import os
from pathlib import Path

from drivelit.rollout import carla as ours
from drivelit.testing import carla as stub

globals().update(vars(stub.VALUES))
ours.BLOCKED, here, black = 3.0, Path(os.environ["HERE"]), {}


def picture(self, frame):
    w, h = (int(self._blueprint._given[k]) for k in ("image_size_x", "image_size_y"))
    image = stub.SimpleNamespace(frame=frame, width=w, height=h)
    image.raw_data = black.setdefault((w, h), bytes(4 * w * h))
    return image


stub._Sensor._picture = picture
servers = {}


def Client(host, port):
    if port not in servers:
        dying = here / f"dies-{port}"
        dies = int(dying.read_text()) if dying.exists() else None
        cone = stub.Scripted("static.prop.trafficcone01", lambda t: (25.0, 0.0, 0.0), (0.2, 0.2, 0.4))
        servers[port] = stub.StubCarla(dict(Town01=stub.road([[0, 0], [300, 0]])), [cone], dies=dies, back=1)
        dying.unlink(missing_ok=True)
    with open(here / "asked", "a") as f:
        f.write(f"{os.getpid()} {port}\\n")
    return servers[port].Client(host, port)
"""
WAY = """<route id="{}" town="Town01"><waypoints><position x="10.0" y="0.0" z="0.0"/>
<position x="{}" y="0.0" z="0.0"/></waypoints></route>"""


def reinforced(out, client, simulators, routes, collectors):
    "The stage `rl` of a tiny run, in a process of its own, from experts that have learnt nothing; what it has found."
    # rl_learning_rate = 0: what is compared is the driving, not what is learnt from it
    keys = dict(
        simulators=simulators, routes=str(routes), collectors=collectors, rollouts=2, rl_learning_rate=0.0, workers=1
    )
    profile = load_profile("minddrive", "smoke", eval_scenes=2, eval_rounds=1, **keys)
    start(out, profile)
    short = make_route("cruise", 1)
    save_rows(out / "data" / "heldout.parquet", make_rows([short], profile.inputs, look=0))
    for place in ("scenes", "data", "warm", "seed-0/il"):
        (out / place).mkdir(parents=True, exist_ok=True)
        (out / place / "done.json").write_text("{}")
    save_experts(Experts("toy", image_size=profile.image_size), STAGES.trained(out, "il"))
    paths = os.pathsep.join([str(client), str(ROOT)])
    env = os.environ | dict(PYTHONPATH=paths, HERE=str(client), OMP_NUM_THREADS="1")
    stage = [sys.executable, "-m", "drivelit", "stage", "minddrive", str(out), "rl"]
    ended = subprocess.run(stage, env=env, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr[-3000:]
    asked = [tuple(line.split()) for line in (client / "asked").read_text().splitlines()]
    (client / "asked").unlink()
    return STAGES.result(out, "rl"), asked


def test_a_stage_on_two_simulators_of_which_one_dies_is_that_on_one(tmp_path):
    client, routes = tmp_path / "client", tmp_path / "routes"
    for folder in (client, routes):
        folder.mkdir()
    (client / "carla.py").write_text(CLIENT)
    for split, numbers in dict(train=(1, 2), heldout=(3, 4)).items():
        text = "".join(WAY.format(k, 26 + k) for k in numbers)
        (routes / f"{split}.xml").write_text(f"<routes>{text}</routes>")
    one, alone = reinforced(tmp_path / "one", client, "here:2000", routes, 0)
    assert len({pid for pid, _ in alone}) == 1
    assert len(alone) == 4 + 1 + 4 * 2  # two routes twice; imitation's policy on one; four plays of two
    of_one = read_results(tmp_path / "one", ["rl-0"])
    scores = [of_one.values(Condition("rl", "rounds", turn=k), "score").loc[0, 0] for k in (0, 1)]
    assert scores[0] == scores[1]  # nothing was learnt
    kept = "seed-0/il/heldout/greedy.json"
    (tmp_path / "two" / kept).parent.mkdir(parents=True)
    (tmp_path / "two" / kept).write_text((tmp_path / "one" / kept).read_text())
    (client / "dies-2010").write_text("25")  # 0.75 s into its first drive
    two, asked = reinforced(tmp_path / "two", client, "here:2000,here:2010", routes, 2)
    assert not (client / "dies-2010").exists()
    by_process = Counter(asked)

    def processes(p):
        return len({pid for pid, port in asked if port == p})

    assert (processes("2000"), processes("2010")) == (5, 5)  # one each round or play
    assert sorted(by_process.values()) == [1] * 8 + [2, 3]  # in collecting two each, and one was driven anew
    assert [n for (_, port), n in by_process.items() if port == "2010"][0] == 3
    assert two["log"][0]["collectors"] == {"kept": 0, "started again": 0, "lost drives": 0}
    assert (one["log"][0]["drives"], two["log"][0]["drives"]) == (4, 4)
    of_two = read_results(tmp_path / "two", ["rl-0"])
    pd.testing.assert_frame_equal(of_two.scenes, of_one.scenes)
    # neither of training nor of its log
    measured = [r.sets[~r.sets.decoding.isin(["", "log"])] for r in (of_one, of_two)]
    pd.testing.assert_frame_equal(*measured)
    ends = measured[1][measured[1].name.astype(str).str.startswith("ends_") & (measured[1].decoding != "rounds")]
    assert ends.groupby(["decoding", "ablation"], observed=True).value.sum().tolist() == [2] * len(CONDITIONS)

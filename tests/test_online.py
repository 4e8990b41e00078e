"""MindDrive's rounds: killed, damaged, side by side or on simulators, a run is the run that it would have been."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from drivelit.io.files import RunError
from drivelit.minddrive import controls, online
from drivelit.minddrive.controls import Drive, by_experts
from drivelit.minddrive.experts import Experts, save_experts, value
from drivelit.minddrive.online import (
    ARRAYS,
    collect,
    collect_round,
    play,
    played,
    read_played,
    reinforce,
    routes_of,
    simulator,
    write_played,
)
from drivelit.minddrive.profile import MindDriveProfile
from drivelit.rollout.carla import NoSimulator, carla
from drivelit.testing.carla import VALUES, StubCarla, road
from drivelit.town.routes import make_route
from drivelit.training.checkpoints import last_checkpoint, read_metrics

TINY = MindDriveProfile(
    "tiny",
    views="front",
    image_size=(56, 28),
    rl_scenes=2,
    rollouts=2,
    collectors=0,
    decisions=8,
    num_iterations=2,
    rl_learning_rate=1e-3,
)
ROUNDS = replace(TINY, rl_steps=2)
ROUTE = """<route id="{}" town="Town01"><waypoints><position x="10.0" y="0.0" z="0.0"/>
<position x="{}" y="0.0" z="0.0"/></waypoints></route>"""
warnings.filterwarnings("ignore", category=FutureWarning)


def short(scene):
    return replace(scene, meta=scene.meta | dict(goal=25.0))  # a few decisions


TWO = [short(make_route("cruise", 1)), short(make_route("red_light", 4))]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    out = tmp_path_factory.mktemp("online") / "start"
    save_experts(Experts("toy", image_size=TINY.image_size), out)
    return out


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    "Two rounds in one go: the folder, the experts, the log."
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, *reinforce(start, out, TWO, ROUNDS)


TOLD = dict(round=0, seed=3)  # what a file of drives belongs to


@pytest.fixture(scope="module")
def pair():
    "Two short drives."
    policy = by_experts(Experts("toy", image_size=TINY.image_size), torch.Generator().manual_seed(0))
    return [played(d) for d in play(policy, [Drive(s) for s in TWO], TINY.inputs)]


def test_a_file_of_drives_that_is_missing_or_cut_short(pair, tmp_path):
    file = write_played(tmp_path / "a.npz", pair, TOLD)
    (tmp_path / "b.npz").write_bytes(file.read_bytes()[:-200])
    assert read_played(tmp_path / "b.npz", TOLD)[1].startswith("damaged")
    assert read_played(tmp_path / "c.npz", TOLD) == (None, "not there")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: dict(speed=d.speed + 99), id="words"),
        pytest.param(lambda d: dict(speed_logp=np.nan * d.speed_logp), id="numbers"),
        pytest.param(lambda d: dict(rewards=d.rewards[:-1]), id="rewards"),
    ],
)
def test_a_file_of_drives_that_holds_nonsense(pair, tmp_path, change):
    file = write_played(tmp_path / "a.npz", [replace(pair[0], **change(pair[0]))], TOLD)
    assert read_played(file, TOLD)[1].startswith("damaged (ValueError")


@pytest.mark.parametrize("head", ["[]", "{}", json.dumps(dict(told=TOLD)), json.dumps(dict(told=TOLD, drives=[]))])
def test_a_file_of_drives_whose_head_is_wrong(tmp_path, head):
    np.savez(tmp_path / "head.npz", told=head, **{k: np.zeros(0) for k in ARRAYS})
    assert read_played(tmp_path / "head.npz", TOLD)[1].startswith("damaged")


def test_a_full_disk_leaves_the_file_of_drives_that_was_there(pair, tmp_path):
    file = write_played(tmp_path / "a.npz", pair, TOLD)
    with patch.object(np, "savez_compressed", side_effect=OSError("no space left")):
        with pytest.raises(OSError, match="no space"):
            write_played(file, pair[:1], TOLD)
    assert len(read_played(file, TOLD)[0]) == 2


def trained(experts):
    "All numbers that are trained."
    return {n: p.detach() for n, p in experts.named_parameters() if "lora" in n or "head" in n}


def untimed(out):
    return [{k: v for k, v in r.items() if k != "step_time"} for r in read_metrics(out)]


def test_rounds_that_are_killed_and_damaged_end_with_the_same_weights(start, whole, tmp_path):
    "After the first round's drives, in the middle of writing a checkpoint, with a file of drives cut in half."
    out, experts, log = whole
    online._first(start, tmp_path, ROUNDS)
    collect_round(tmp_path, TWO, ROUNDS, 0)  # and killed here
    reinforce(start, tmp_path, TWO, replace(ROUNDS, rl_steps=1))
    (tmp_path / "checkpoint-2").mkdir()  # killed while it was written: there, without its mark
    collect_round(tmp_path, TWO, ROUNDS, 1)
    file = online._place(tmp_path, 1, 0)
    file.write_bytes(file.read_bytes()[:-100])
    again, log_2 = reinforce(start, tmp_path, TWO, ROUNDS)
    assert all(torch.equal(a, b) for a, b in zip(trained(experts).values(), trained(again).values(), strict=True))
    assert [r["collectors"]["kept"] for r in log_2] == [1, 0]
    assert [r["reward"] for r in log] == [r["reward"] for r in log_2]
    assert untimed(out) == untimed(tmp_path)  # no line twice, none missing
    with pytest.raises(RunError, match="2 other routes"):
        reinforce(start, tmp_path, TWO[:1], ROUNDS)


@pytest.mark.parametrize(
    ("much", "error", "why"),
    [
        (3e30, RunError, r"gradients of this update are no numbers \(policy"),
        (np.nan, ValueError, "episode 0: a reward or a value is not a number"),
    ],
)
def test_a_value_that_explodes_leaves_the_checkpoint_before(start, whole, tmp_path, much, error, why):
    shutil.copytree(whole[0] / "checkpoint-1", tmp_path / "checkpoint-1")
    with patch.object(online, "value", lambda *how: value(*how) + much), pytest.raises(error, match=why):
        reinforce(start, tmp_path, TWO, ROUNDS)
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    assert (len(read_metrics(tmp_path)), len(list(tmp_path.glob("round-1/*.npz")))) == (0, 1)


def test_each_round_has_an_order_of_its_own_whoever_goes_on(start, tmp_path):
    orders = []

    def improved(*a):
        return orders.append(a[-2]) or dict(updates=0)  # the last gets the log

    drives = collect(Experts("toy", image_size=TINY.image_size), TWO, TINY, 1)
    with patch.multiple(online, collect_round=lambda *a: (drives, Counter()), improve=improved):
        for n in (2, 3):  # the second goes on
            reinforce(start, tmp_path, TWO, replace(TINY, rl_steps=n), seed=3)
    assert orders == [30_000, 30_001, 30_002]


def test_a_collector_that_is_killed_is_started_again_and_drives_the_same(start, tmp_path):
    side = replace(TINY, collectors=2)
    for name in ("calm", "killed"):
        online._first(start, tmp_path / name, side)
    calm, counted = collect_round(tmp_path / "calm", TWO, side, 0)
    assert (counted["kept"], counted["started again"]) == (0, 0)

    def strike():
        while not (running := multiprocessing.active_children()):
            time.sleep(0.05)
        os.kill(running[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    after, counted = collect_round(tmp_path / "killed", TWO, side, 0)
    thread.join()
    assert counted["started again"] == 1
    assert [(p.scene, list(p.speed)) for p in after] == [(p.scene, list(p.speed)) for p in calm]


@pytest.mark.parametrize(
    ("seconds", "why"), [(0, r"\(not there\)"), (600, r"\(Timeout \(0:00:01\)!")], ids=["left nothing", "hangs"]
)
def test_a_collector_that_left_nothing_or_hangs_is_named(tmp_path, seconds, why):
    "What hangs is `time.sleep`, where a second of silence is allowed; it is ended, and says where it was."
    told, once = tmp_path / "told" / "collector-0.error", replace(TINY, collectors=1, tries=1, silence=1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"collectors \[0\] left no drives in 1 tries {why}"):
        online.side_by_side(time.sleep, {0: (seconds,)}, lambda k: "not there", lambda k: told, once)
    assert time.monotonic() - begin < 600
    if seconds:
        assert "in _process" in told.read_text()


@contextmanager
def stand_in(**servers):
    "Instead of `carla`: port -> how its server dies. Small pictures, short drives, little patience."
    town = dict(Town01=road([[0, 0], [300, 0]]))
    known = {int(port[1:]): StubCarla(town, **how) for port, how in (dict(p2000={}, p2010={}) | servers).items()}
    library = SimpleNamespace(**vars(VALUES), Client=lambda host, port: known[port].Client(host, port))

    def small(*how):
        world = controls.new_carla(*how)
        world.size, world.limit, world.patience = (160, 90), 6.0, 0.3
        return world

    with patch.object(carla, "_loaded", library), patch.object(online, "new_carla", small):
        yield


@pytest.fixture(scope="module")
def afar(tmp_path_factory):
    "A profile with two simulators, a road of 300 m and routes of some 30 m on it."
    folder = tmp_path_factory.mktemp("routes")
    for split, numbers in dict(train=range(1, 5), heldout=range(5, 7)).items():
        text = "".join(ROUTE.format(k, 40.0 + k) for k in numbers)
        (folder / f"{split}.xml").write_text(f"<routes>{text}</routes>")
    there = dict(simulators="here:2000,here:2010", routes=str(folder), rollouts=1, rl_scenes=4, eval_rounds=2)
    return replace(TINY, **there)


@pytest.fixture(scope="module")
def driven(afar):
    "k, servers -> what collector k has driven on its half of the routes."
    experts, lanes = Experts("toy", image_size=TINY.image_size), routes_of(afar, "train")

    def half(k, routes=None, out=None, **servers):
        with stand_in(**servers), simulator(afar, k) as world:
            return collect(experts, lanes[k::2] if routes is None else routes, afar, 5, world, out)

    return half


@pytest.fixture(scope="module")
def calm(driven):
    return [driven(0), driven(1)]


def test_routes_of_a_file(afar):
    lanes = routes_of(afar, "train")
    assert [(r.id, r.length) for r in lanes] == [("1", 31.0), ("2", 32.0), ("3", 33.0), ("4", 34.0)]
    with pytest.raises(RunError, match="4 routes, and rl_scenes asks for 5"):
        routes_of(replace(afar, rl_scenes=5), "train")
    with pytest.raises(RunError, match=r"no \$NOT_SET/train.xml"):
        routes_of(replace(afar, routes="$NOT_SET"), "train")


def test_a_simulator_that_dies_costs_the_drives_that_it_had_not_driven(driven, calm):
    assert [[p.scene for p in half] for half in calm] == [["1", "3"], ["2", "4"]]
    ends = {p.reason for half in calm for p in half}
    assert ends <= {"completed", "route_timeout", "vehicle_blocked", "outside_route_lanes"}
    ticks = 10 + 2 * calm[1][0].steps  # half a second until the car stands, two for each 0.1 s
    up = driven(1, p2010=dict(dies=ticks + 20, back=1))
    assert [p.scene for p in up] == ["2", "4"] and list(up[0].speed) == list(calm[1][0].speed)
    gone = driven(1, p2010=dict(dies=ticks + 20))
    assert [(p.scene, list(p.rewards)) for p in gone] == [("2", list(calm[1][0].rewards))]
    with pytest.raises(NoSimulator, match="here:2010 was lost in each of 2 drives"):
        driven(1, p2010=dict(dies=30))


def test_a_collector_that_is_killed_drives_what_is_missing(afar, driven, calm, tmp_path):
    "A drive in a simulator takes minutes, so each is kept as soon as it is over."
    lanes, asked, kept = routes_of(afar, "train"), [], (tmp_path, dict(round=0))
    driven(1, lanes[1:2], kept)

    def watched(*how, **more):
        return asked.append(how[1][0].scene.id) or play(*how, **more)

    with patch.object(online, "play", watched):
        rest = driven(1, lanes[1::2], kept)
    assert (asked, sorted(p.name for p in tmp_path.iterdir())) == (["4"], ["drive-0.npz", "drive-1.npz"])
    assert [list(p.speed) for p in rest] == [list(p.speed) for p in calm[1]]


def test_a_route_in_another_town_costs_itself(afar, driven):
    lanes = routes_of(afar, "train")
    off = [lanes[0], replace(lanes[1], town="Town99"), lanes[2]]
    assert [p.scene for p in driven(0, off)] == ["1", "3"]
    with pytest.raises(ValueError, match="none of 1 drives could begin; the first: "):
        driven(0, off[1:2])


def test_a_decision_may_hold_for_one_tick(afar):
    experts, often = Experts("toy", image_size=TINY.image_size), replace(afar, decision_seconds=0.05)
    with stand_in(), simulator(often, 0) as world:
        (drive,) = collect(experts, routes_of(afar, "train")[:1], often, 5, world)
        assert world.hold == 1
    assert abs(len(drive.rewards) - 2 * drive.steps) < 2


def test_rounds_on_simulators(start, afar, tmp_path):
    quick, lanes = replace(afar, rl_steps=2, num_iterations=1, decisions=64), routes_of(afar, "train")

    def rounds(name, profile=quick, **servers):
        with stand_in(**servers):
            return reinforce(start, tmp_path / name, lanes, profile)[1]

    log = rounds("afar")
    assert [(r["drives"], r["collectors"]["lost drives"]) for r in log] == [(4, 0), (4, 0)]
    assert json.loads((tmp_path / "afar" / "routes.json").read_text()) == ["1", "2", "3", "4"]
    told = online._told(tmp_path / "afar", quick, 0, 0, 0)
    first = online.read_played(online._place(tmp_path / "afar", 0, 0), told)[0]
    then, once = 20 + 2 * sum(p.steps for p in first[:2]), replace(quick, rl_steps=1)
    (row,) = rounds("dying", once, p2000=dict(dies=then + 20))  # in its third drive of four, and not up again
    decisions = sum(len(p.rewards) for p in first[:2])
    assert (row["drives"], row["collectors"]["lost drives"], row["decisions"]) == (2, 2, decisions)
    assert row["updates"] > 0
    with pytest.raises(NoSimulator, match="here:2000 was lost in each of 4"):
        rounds("dead", once, p2000=dict(dies=30))
    with pytest.raises(RunError, match="CARLA cannot be put back; simulators = none"):
        reinforce(start, tmp_path / "g", lanes, replace(quick, algorithm="grpo"), budget=9)
    with pytest.raises(RunError, match="there is no"):
        rounds("nowhere", replace(quick, routes=str(tmp_path)))
    with pytest.raises(RunError, match="collector 2 has none, there are 2"):
        simulator(afar, 2).__enter__()
    with pytest.raises(RunError, match=r"scenario: \$NO_SUCH_SCENARIO is not set"):
        simulator(replace(afar, scenario="$NO_SUCH_SCENARIO"), 0).__enter__()

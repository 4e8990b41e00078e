"""The world in CARLA without a simulator, with the wrong one, with a route that cannot begin or with words that are not
known: each is one sentence. A stand-in of the client answers."""

import importlib.util
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pages import names_of

from drivelit.rollout import carla
from drivelit.rollout.carla import CarlaWorld
from drivelit.testing.carla import StubCarla

TOWN, ROUTE = names_of("30_rollout/25_carla", carla, "TOWN", "straight")


def refused(words, call, *args, **options):
    with pytest.raises((ValueError, RuntimeError, ImportError, OSError)) as e:
        call(*args, **options)
    assert words in str(e.value), str(e.value)


def reset(stub, route=ROUTE, **options):
    return CarlaWorld(library=stub, seconds=0.1, **options).reset(options=dict(scene=route))


@pytest.fixture
def world():
    "A world that drives, and the stand-in behind it."
    stub = StubCarla(TOWN)
    world = CarlaWorld([ROUTE], library=stub, patience=0.3)
    world.reset()
    return world, stub


def test_a_simulator_that_is_gone_is_waited_for(world):
    world, stub = world
    stub.dies, begin = 0, time.monotonic()
    refused("no CARLA simulator answers at 127.0.0.1:2000", world.reset)
    assert time.monotonic() - begin >= 0.3
    stub.back, world.patience = stub._refused + 2, 60.0
    world.reset()  # it comes up while we wait
    stub.dies, stub.back, world.patience = 0, None, 0.3
    for _ in range(3):
        refused("no CARLA simulator answers", world.reset)
    stub._refused, world.patience = 0, 3600.0
    refused("no CARLA simulator answers", world.reset)  # the fourth does not wait for an hour
    assert stub._refused == 1
    stub.back = 0
    world.reset()
    assert world.in_vain == 0


@pytest.mark.parametrize(
    "stub, options, words",
    [
        (dict(dies=0), {}, "no CARLA simulator answers at 127.0.0.1:2000 within 0.1 s: start one with"),
        (dict(dies=4), {}, "route 7: the simulator at 127.0.0.1:2000 stopped answering while the route was set up"),
        (dict(blind=0), dict(cameras=("CAM_FRONT",)), "no picture within 0.1 s"),
        (dict(version="0.9.15"), {}, "is CARLA 0.9.15"),
        ({}, dict(port=99_999), "port: 99999 is not a number"),
        ({}, dict(port="2000"), "port: '2000' is not a number"),
        ({}, dict(route=replace(ROUTE, town="Town12")), "no 'Town12'; it has Town01; Town11 and later"),
        (dict(taken=True), {}, "route 7: no car can be put at its start (10.0, 0.0) in Town01"),
        ({}, dict(route=replace(ROUTE, waypoints=np.zeros((3, 3)))), "so it has no start to drive from"),
        ({}, dict(route="route 7"), "scene is a str, expected a Route"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_route_that_cannot_begin(stub, options, words):
    refused(words, reset, StubCarla(TOWN, **stub), **options)


def test_words_that_are_not_known(world):
    world, stub = world
    refused("without routes to draw from", CarlaWorld(library=stub).reset)
    refused("ends: 'never'", CarlaWorld, library=stub, ends="never")
    refused("cameras: 'CAM_ROOF' is not one of CAM_FRONT", CarlaWorld, library=stub, cameras=("CAM_ROOF",))
    refused("CARLA cannot be put back to a state", world.snapshot)
    refused("CARLA cannot be put back to a state", world.restore, {})


@pytest.mark.skipif(importlib.util.find_spec("carla") is not None, reason="CARLA's client is installed")
def test_without_the_client():
    refused('pip install "drivelit[carla]"', CarlaWorld(routes=[ROUTE]).reset)


def test_a_plan_of_no_numbers(world):
    *_, info = world[0].step(np.full((8, 3), np.nan))
    assert (info["reason"], world[0].record()["status"]) == ("bad_action", "Failed - Agent crashed")


def test_a_world_that_is_closed_leaves_nothing_behind(world):
    world, stub = world
    actors = [a.id for a in world.ride.sensors] + [world.ride.ego.id]
    assert all(i in stub._spawned for i in actors)
    world.close()
    assert (stub._settings.synchronous_mode, [i for i in actors if i in stub._spawned]) == (False, [])
    refused("call reset() first", world.step, np.zeros((8, 3)))


@pytest.mark.parametrize("named", [False, True])
def test_pictures_stay_where_a_folder_is_named(tmp_path, named):
    folder = str(tmp_path / "pictures") if named else None
    world = CarlaWorld([ROUTE], library=StubCarla(TOWN), cameras=("CAM_FRONT",), size=(32, 18), pictures=folder)
    world.reset()
    (file,) = set(world.scene.cameras["CAM_FRONT"].files.values())
    assert Path(file).exists() and (not named or Path(file).parent == tmp_path / "pictures")
    world.close()
    assert Path(file).exists() == named

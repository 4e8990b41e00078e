"""The bridges against what their other ends recorded: official scores come out of the command, for logs of the data
sets' own form."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from test_times import write_navsim, write_nuscenes

from drivelit.bridges.openenv import Episodes, picture_of, scenes_of, task_of
from drivelit.bridges.score import score
from drivelit.io.files import RunError
from drivelit.metrics import pdm
from drivelit.mtdrive.formats import format_trajectory, parse_trajectory
from drivelit.runs.prepare import prepare
from drivelit.scene.core import Agent, Area, Ego, Map, Scene, to_frame, to_json
from drivelit.testing.navsim import make_navsim

GOLDEN = Path(__file__).parents[1] / "nbs/10_metrics/golden"
KINDS = dict(ROADBLOCK="roadblock", INTERSECTION="intersection", CARPARK_AREA="carpark", LANE="lane")
KINDS["LANE_CONNECTOR"] = "lane_connector"
NAMES = dict(
    nc="no_at_fault_collisions",
    dac="drivable_area_compliance",
    ddc="driving_direction_compliance",
    ttc="time_to_collision_within_bound",
    comfort="comfort",
)


def recorded_scene(g):
    "A scene of the official scorer's record."
    o, e = g["ego"]["rear_axle"], g["ego"]
    turn = np.array([[np.cos(o[2]), -np.sin(o[2])], [np.sin(o[2]), np.cos(o[2])]])
    agents = []
    for a in g["agents"]:
        t, poses, v = ([f[k] for f in a["frames"]] for k in ("t", "pose", "velocity"))
        box = a["length"], a["width"], a["height"]
        agents.append(Agent(a["token"], a["type"].lower(), *box, t, to_frame(poses, o), np.asarray(v) @ turn))
    areas = [
        Area(m["token"], KINDS[m["type"]], to_frame(m["polygon"], o), on_route=m["token"] in g["route_lane_ids"])
        for m in g["map"]
    ]
    ego = Ego([0.0], [[0, 0, 0]], e["velocity"], e["acceleration"], e["tire_steering_angle"])
    return Scene(g["id"], "golden", ego, "GO STRAIGHT", agents, Map(areas, to_frame(g["centerline"], o)))


def test_the_official_scores_come_out_of_the_command(tmp_path):
    scenes, expected = (
        json.loads(gzip.open(GOLDEN / f"{name}.json.gz").read()) for name in ("pdm_scenes", "pdm_v1_expected")
    )
    (tmp_path / "scenes").mkdir()
    for g in scenes:
        to_json(recorded_scene(g), tmp_path / "scenes" / f"{g['id']}.json")
    compared = 0
    for k in range(3):  # the k-th plan of each scene
        known = {
            g["id"]: (g["proposals"][k], w) for g, w in zip(scenes, expected, strict=True) if k < len(g["proposals"])
        }
        plans = tmp_path / f"{k}.jsonl"
        plans.write_text("".join(json.dumps(dict(id=i, poses=p["poses"])) + "\n" for i, (p, _) in known.items()))
        found = score(str(plans), "json", tmp_path / "scenes", tmp_path / str(k))
        assert found["counts"]["planned"] == len(known)
        lost = len(scenes) - len(known)
        assert found["counts"]["without_plan"] == ({"exception KeyError": lost} if lost else {})
        rows = pd.read_csv(tmp_path / str(k) / "scenes.csv").set_index("id")
        for i, (_, want) in known.items():
            official = want["proposals"][k]["scores"]
            assert [rows.at[i, ours] for ours in NAMES] == pytest.approx(
                [official[n] for n in NAMES.values()], abs=1e-6
            )
            compared += 1
    assert compared >= 50


def test_logs_of_navsims_form(tmp_path):
    write_navsim(tmp_path, 0.5 * np.arange(20))
    (tmp_path / "navtest.yaml").write_text("log_names:\n  - 'log'\ntokens:\n  - 't4'\n  - 't6'\n")
    lines = [dict(id="t4", poses=[[1.0 * k, 0, 0] for k in range(1, 9)]), dict(id="t6", reason="no words")]
    plans = tmp_path / "plans.jsonl"
    plans.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = dict(split="navtest", tokens=str(tmp_path / "navtest.yaml"))
    found = score(str(plans), "navsim", tmp_path, tmp_path / "out", **asked)
    assert found["counts"] == dict(scenes=2, planned=1, without_plan={"exception LookupError": 1}, unread=0)
    rows = pd.read_csv(tmp_path / "out" / "scenes.csv").set_index("id")
    assert "map wanted" in rows.at["t4", "lacks_pdm"]  # this log has no map: no score is better than a wrong one
    assert "pdms" not in rows and found["scores"] == {}
    with pytest.raises(RunError, match="no .*logs in this folder"):
        score(str(plans), "navsim", tmp_path, tmp_path / "other", split="trainval")


def test_samples_of_nuscenes_form(tmp_path):
    "The car keeps its speed, so the driver of constant velocity is right to the millimetre in both protocols."
    write_nuscenes(tmp_path / "data", 0.5 * np.arange(20))
    found = score("drivelit.metrics.kinematics:constant_velocity", "nuscenes", tmp_path / "data", tmp_path / "out")
    assert found["counts"]["planned"] == found["counts"]["scenes"] > 5
    table = found["scores"]["open_loop"]
    for row in ("L2 m, ST-P3 / VAD (mean up to)", "L2 m, UniAD (at)"):
        assert table[row]["avg"] == pytest.approx(0, abs=1e-3) and table[row]["samples"] == found["counts"]["scenes"]


def test_prepared_scenes_of_navsims_form_are_served(tmp_path):
    make_navsim(tmp_path / "navsim", logs=1, moments=2, splits=("test",))
    how = dict(split="test", tokens=tmp_path / "navsim" / "navtest.yaml", references=False)
    shards = prepare("navsim", tmp_path / "navsim", tmp_path / "shards", **how)
    served = Episodes(task_of("mtdrive"), scenes_of(str(tmp_path / "shards"), 10))
    for k, scene in enumerate(shards):
        first = served.reset(scene=k)
        picture, text = first["messages"][0]["content"]
        assert (first["scene_id"], text["type"]) == (scene.id, "text")
        assert Image.open(io.BytesIO(picture_of(picture))).size == (1932, 1092)
        plan = scene.expert.poses[:8]
        after = served.step(format_trajectory(plan))
        expected = pdm.score(scene, parse_trajectory(format_trajectory(plan))[None])
        assert after["rewards"]["pdms"] == float(expected.pdms[0]) > 0.5

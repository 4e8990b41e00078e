"""The readers on real samples. DRIVELIT_SAMPLES is the folder that holds `data/`; without it they are skipped."""

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import shapely
from pyarrow import feather

from drivelit.metrics.kinematics import constant_velocity
from drivelit.metrics.pdm import off_road, prepare, score
from drivelit.minddriver.evaluation import evaluate_real
from drivelit.minddriver.formats import TAGS
from drivelit.policy.codec import load_codec
from drivelit.policy.image_tokens import add_image_tokens
from drivelit.policy.model import load_policy
from drivelit.runs.profiles import load_profile
from drivelit.scene.cameras import get_image, project
from drivelit.scene.core import from_json, to_frame, to_json
from drivelit.sources import argoverse2, recorded
from drivelit.town.roads import boxes_touch

SAMPLES = os.environ.get("DRIVELIT_SAMPLES")
pytestmark = pytest.mark.skipif(not SAMPLES, reason="DRIVELIT_SAMPLES is not set")
DATA = Path(SAMPLES or ".") / "data"
LENGTH, WIDTH, AHEAD = 4.084, 1.730, 1.0  # of the nuScenes car, and its middle ahead of the rear axle


@pytest.fixture(scope="module")
def moments():
    files = sorted((DATA / "nuscenes_mini_scenes").glob("scene-*.json.gz"))
    return [(f, t, recorded.read(f, t)) for f in files for t in recorded.timestamps(f)]


def own_future(file, time):
    "The recorded poses of the next four seconds at 10 Hz, and the middle of the car's box."
    poses = recorded.load(str(file))["poses"]
    k = round(time * 10)
    p = to_frame(poses[k : k + 41], poses[k])
    return np.stack([p[:, 0] + AHEAD * np.cos(p[:, 2]), p[:, 1] + AHEAD * np.sin(p[:, 2]), p[:, 2]], 1)


def test_every_moment_is_a_scene(moments):
    assert len({f for f, _, _ in moments}) == 10 and len(moments) == 294
    for _, _, s in moments[::20]:
        assert to_json(from_json(to_json(s))) == to_json(s)
    assert {s.command for _, _, s in moments} == {"TURN LEFT", "GO STRAIGHT", "TURN RIGHT"}
    assert all(len(s.expert.poses) == 8 and s.ego.times[0] <= -1.5 for _, _, s in moments)


def test_the_human_log_is_clean(moments):
    "Where the car really was: never off the road, nor is the score's larger car; in its own size never in somebody."
    signs = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) * [LENGTH / 2, WIDTH / 2]
    for file, time, s in moments:
        box = own_future(file, time)
        c, n = np.cos(box[:, 2:]), np.sin(box[:, 2:])
        x, y = box[:, :1] + signs[:, 0] * c - signs[:, 1] * n, box[:, 1:2] + signs[:, 0] * n + signs[:, 1] * c
        road = shapely.union_all([a.polygon for a in s.map.of("drivable")])
        assert shapely.contains_xy(road, x, y).all(), f"{s.id} leaves the road"
        rear = box - AHEAD * np.c_[c, n, np.zeros(len(c))]
        assert not off_road(prepare(s), np.pad(rear, ((0, 0), (0, 8)))[None]).any(), f"{s.id}: the larger car leaves"
        for a in s.agents:
            if len(a.times) == 1:
                continue  # seen in one frame: only the score lets it stand there for good
            for k in range(0, 41, 5):
                pose = a.at(k / 10)
                if pose is not None:
                    hit = boxes_touch(box[k], np.array([LENGTH, WIDTH]) / 2, pose, np.array([a.length, a.width]) / 2)
                    assert not hit, f"{s.id} drives through {a.id} at {k / 10} s"


def test_the_human_through_the_score(moments):
    "The score's tracker cuts corners: ten known moments fail, though the poses themselves stay on the road."
    results = [score(prepare(s), np.stack([s.expert.poses, constant_velocity(s)])) for _, _, s in moments]
    nc, dac, pdms = (np.array([getattr(r, k) for r in results]) for k in ("nc", "dac", "pdms"))
    assert (nc[:, 0] < 1).sum() <= 1 and (dac[:, 0] < 1).sum() <= 10
    assert {s.family for (_, _, s), d in zip(moments, dac[:, 0], strict=True) if d < 1} <= {"scene-1077", "scene-1094"}
    assert pdms[:, 0].mean() > pdms[:, 1].mean() + 0.1  # better than constant velocity


def same_up_to_now(whole, cut):
    "Nobody's velocity up to now, and not the ego's, differs between two scenes of one moment; how many were compared."
    assert (whole.ego.velocity == cut.ego.velocity).all() and (whole.ego.poses == cut.ego.poses).all()
    compared, ids = 0, {a.id for a in cut.agents}
    for a in whole.agents:
        past = a.times <= 1e-6
        if past.any() and a.id not in ids:  # kept because it comes near later
            assert np.hypot(*a.poses[past, :2].T).min() > recorded.REACH, a.id
        elif past.any():
            b = cut.agent(a.id)
            assert np.array_equal(a.velocity[past], b.velocity[b.times <= 1e-6]), a.id
            compared += int((np.hypot(*a.velocity[past].T) > 1).any())
    return compared


@pytest.mark.parametrize("name, time", [("scene-0103", 8.0), ("scene-0796", 6.0)])
def test_recorded_velocities_know_no_future(name, time, tmp_path):
    "The log ends now: everything that was known before is known still."
    file = DATA / "nuscenes_mini_scenes" / f"{name}.json.gz"
    log = json.loads(gzip.open(file).read())
    now = round(time * 10)
    log |= dict(ego={k: v[: now + 1] for k, v in log["ego"].items()}, length=now + 1)
    for id, track in list(log["tracks"].items()):
        n = int((np.array(track["frames"]) <= now).sum())
        track.update({k: track[k][:n] for k in ("frames", "xyz", "heading", "velocity")})
        if not n:
            del log["tracks"][id]
    with gzip.open(tmp_path / file.name, "wt") as f:
        json.dump(log, f)
    assert same_up_to_now(recorded.read(file, time), recorded.read(tmp_path / file.name, time)) >= 2


def test_argoverse_velocities_know_no_future(tmp_path):
    log = next(p for p in sorted((DATA / "argoverse2" / "sensor").iterdir()) if p.is_dir())
    cut = tmp_path / log.name
    shutil.copytree(log, cut, copy_function=shutil.copyfile)
    whole = argoverse2.read(log, 6.0)
    first = feather.read_table(next(log.glob("annotations*.feather")))["timestamp_ns"]
    end = int(np.unique(first.to_numpy())[60])
    for file in cut.glob("*.feather"):
        table = feather.read_table(log / file.name)
        file.unlink()
        feather.write_feather(table.filter(pc.less_equal(table["timestamp_ns"], end)), file)
    assert same_up_to_now(whole, argoverse2.read(cut, 6.0)) >= 2


def test_keyframe_cameras():
    folder = DATA / "nuscenes_mmdet3d_keyframe"
    s = recorded.read(DATA / "nuscenes_mini_scenes" / "scene-0061.json.gz", 0.0, keyframe_dir=folder)
    assert len(s.cameras) == 6
    for name in s.cameras:
        assert get_image(s, name, size=(160, 90)).size == (160, 90)
    ahead = [a for a in s.agents if a.type == "vehicle" and 5 < a.poses[0][0] < 40 and abs(a.poses[0][1]) < 8]
    assert ahead  # somebody is in front of the front camera, and lands in its picture
    pixel, depth = project([[*ahead[0].poses[0][:2], ahead[0].z]], s.cameras["CAM_FRONT"])
    assert 0 < depth[0] < 45 and 0 < pixel[0, 0] < 1600 and 300 < pixel[0, 1] < 900


def test_key_frames_through_codec_and_policy():
    codec, profile = load_codec(), load_profile("minddriver", "smoke")
    policy = add_image_tokens(load_policy("toy"), codec.codes, tags=TAGS)
    found = evaluate_real(policy, profile, codec, SAMPLES)
    assert [d["n"] for d in found.values()] == [9, 1]
    for d in found.values():
        assert d["unreadable"] == 1.0 and set(d["reasons"]) == {"think", "dream", "answer"}  # it has learnt nothing
        assert len(d["psnr"]) == d["n"] and 12 < min(d["psnr"]) and max(d["psnr"]) < 23.5  # a street is no toy town
        assert min(d["codes"]) > 20


def test_argoverse():
    logs = sorted(p for p in (DATA / "argoverse2" / "sensor").iterdir() if p.is_dir())
    assert len(logs) == 3
    for log in logs:
        times = argoverse2.timestamps(log)
        assert len(times) >= 15
        for t in times[::6]:
            s = argoverse2.read(log, t)
            assert s.source == "argoverse2" and s.map.of("drivable") and s.map.of("lane") and len(s.expert.poses) == 8
            r = score(prepare(s), s.expert.poses[None])
            assert r.dac[0] == 1.0, f"{s.id} leaves the road"
            assert r.nc[0] == 1.0, f"{s.id} hits {r.nc_agent[0]}"

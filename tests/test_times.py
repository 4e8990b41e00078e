"""Every reader places frames by the data's own clock: a car at constant speed stays one, or the field is absent, or the
scene is refused and counted. Frames get lost, one or a row of them, and times jitter by a fifth of the step."""

import gzip
import json
import pickle
import re

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import feather

from drivelit.metrics.pdm import prepare, score
from drivelit.scene.core import SceneError
from drivelit.sources import argoverse2, bench2drive, navsim, nuscenes, py123d, recorded
from drivelit.sources import open as sources
from drivelit.sources.recorded import GAP

SPEED, OTHER, HEADING = 8.0, 5.0, 0.4  # m/s, m/s, radians: the ego, and a car 3 m to its left
WAY = np.array([np.cos(HEADING), np.sin(HEADING)])
FAR_OFF, TOO_FAST = 0.05, 0.05  # metres, m/s: the bound


def ego_at(t):
    return np.array([400.0, 1180.0]) + SPEED * t * WAY


def other_at(t):
    return np.array([430.0, 1183.0]) + OTHER * t * WAY


QUARTERS = [np.cos(HEADING / 2), 0.0, 0.0, np.sin(HEADING / 2)]  # w, x, y, z


def write_nuscenes(root, times, hidden=()):
    n, stamp = len(times), [int(1e6 * (1000 + t)) for t in times]

    def link(name, i):
        return dict(prev=f"{name} {i - 1}" if i else "", next=f"{name} {i + 1}" if i + 1 < n else "")

    ends = dict(first_sample_token="s 0", last_sample_token=f"s {n - 1}", nbr_samples=n)
    tables = dict.fromkeys(nuscenes.TABLES, ()) | dict(
        category=[dict(token="car", name="vehicle.car", description="")],
        log=[dict(token="log", logfile="", vehicle="", date_captured="", location="singapore-onenorth")],
        map=[dict(token="map", log_tokens=["log"], category="semantic_prior", filename="maps/mask.png")],
        scene=[dict(token="scene", log_token="log", name="scene-0001", description="", **ends)],
        sensor=[dict(token="lidar", channel="LIDAR_TOP", modality="lidar")],
        calibrated_sensor=[
            dict(token="c", sensor_token="lidar", translation=[0, 0, 0], rotation=[1, 0, 0, 0], camera_intrinsic=[])
        ],
        instance=[dict(token="other", category_token="car", first_annotation_token="a 0")],
        sample=[dict(token=f"s {i}", timestamp=stamp[i], scene_token="scene", **link("s", i)) for i in range(n)],
        ego_pose=[
            dict(token=f"p {i}", timestamp=stamp[i], translation=[*ego_at(t), 0.0], rotation=QUARTERS)
            for i, t in enumerate(times)
        ],
        sample_data=[
            dict(
                token=f"d {i}",
                sample_token=f"s {i}",
                ego_pose_token=f"p {i}",
                calibrated_sensor_token="c",
                filename="",
                timestamp=stamp[i],
                is_key_frame=True,
                **link("d", i),
            )
            for i in range(n)
        ],
        sample_annotation=[
            dict(
                token=f"a {i}",
                sample_token=f"s {i}",
                instance_token="other",
                visibility_token="",
                attribute_tokens=[],
                translation=[*other_at(t), 1.0],
                size=[1.9, 4.5, 1.6],
                rotation=QUARTERS,
                **link("a", i),
            )
            for i, t in enumerate(times)
            if i not in hidden
        ],
    )
    (root / "v1.0-mini").mkdir(parents=True)
    for name, rows in tables.items():
        (root / "v1.0-mini" / f"{name}.json").write_text(json.dumps(list(rows)))
    (root / "maps").mkdir()
    Image.new("L", (4, 4)).save(root / "maps/mask.png")


def write_navsim(root, times, hidden=()):
    def frame(i, t):
        x, y = other_at(t) - ego_at(t)
        c, s = WAY
        box = [c * x + s * y, -s * x + c * y, 0.8, 4.5, 1.9, 1.6, 0.0]
        return dict(
            token=f"t{i}",
            timestamp=int(1e6 * (1000 + t)),
            log_name="log",
            map_location="nowhere",
            roadblock_ids=["1"],
            traffic_lights=[],
            ego2global_translation=[*ego_at(t), 0.0],
            ego2global_rotation=QUARTERS,
            ego_dynamic_state=[SPEED, 0.0, 0.0, 0.0],
            driving_command=np.eye(4, dtype=int)[1],
            anns=dict(
                gt_boxes=np.array([box])[: i not in hidden],
                gt_names=np.array(["vehicle"])[: i not in hidden],
                gt_velocity_3d=np.array([[OTHER, 0.0, 0.0]])[: i not in hidden],
                track_tokens=["other"][: i not in hidden],
            ),
        )

    folder = root / "navsim_logs/test"
    folder.mkdir(parents=True)
    (folder / "log.pkl").write_bytes(pickle.dumps([frame(i, t) for i, t in enumerate(times)]))


def write_argoverse2(root, times, hidden=()):
    folder, stamp = root / "0000-log", [10**18 + round(1e9 * t) for t in times]
    (folder / "map").mkdir(parents=True)
    (folder / "map/log_map_archive_0000.json").write_text("{}")
    turned = {k: [v] * len(times) for k, v in zip(("qw", "qx", "qy", "qz"), QUARTERS, strict=True)}
    own = np.array([ego_at(t) for t in times])
    table = dict(timestamp_ns=stamp, tx_m=own[:, 0], ty_m=own[:, 1], tz_m=0 * own[:, 0])
    feather.write_feather(pa.table(table | turned), folder / "city_SE3_egovehicle.feather")
    away = np.array([other_at(t) - ego_at(t) for t in times])
    local = away @ np.array([[WAY[0], -WAY[1]], [WAY[1], WAY[0]]])
    same = dict(track_uuid="other", category="BUS", length_m=4.5, width_m=1.9, height_m=1.6, tz_m=0.8)
    same |= dict(qw=1.0, qx=0.0, qy=0.0, qz=0.0)
    seen = [i for i in range(len(times)) if i not in hidden]
    boxes = dict(timestamp_ns=[stamp[i] for i in seen], tx_m=local[seen, 0], ty_m=local[seen, 1])
    boxes |= {k: [v] * len(seen) for k, v in same.items()}
    if hidden:  # a sweep in which nobody is seen has no row; here somebody else always is
        boxes = {k: [*v, *v[:1] * len(times)] if k in same else [*v] for k, v in boxes.items()}
        boxes["track_uuid"][len(seen) :] = ["third"] * len(times)
        boxes |= dict(timestamp_ns=[*boxes["timestamp_ns"], *stamp], tx_m=[*boxes["tx_m"], *local[:, 0]])
        boxes["ty_m"] = [*boxes["ty_m"], *(local[:, 1] + 20)]
    feather.write_feather(pa.table(boxes), folder / "annotations.feather")


def write_bench2drive(root, times, hidden=()):
    folder = root / "Clip_Town05_Route1_Weather0" / "anno"
    folder.mkdir(parents=True)
    for i, t in enumerate(times):

        def place(p):
            return dict(center=[p[0], -p[1], 0.7], location=[p[0], -p[1], 0.0])

        common = dict(rotation=[0, 0, -np.degrees(HEADING)], extent=[2.4, 0.9, 0.7], bbx_loc=[0.0, 0.0, 0.7])
        boxes = [
            {"class": "ego_vehicle", "id": 1, **place(ego_at(t) + bench2drive.REAR * WAY), **common},
            {"class": "vehicle", "id": 2, "speed": 0.0, **place(other_at(t)), **common},
        ]
        anno = dict(
            speed=SPEED,
            acceleration=[0, 0, 0],
            command_near=4,
            sensors={},
            bounding_boxes=boxes[: 1 + (i not in hidden)],
        )
        with gzip.open(folder / f"{round(10 * t):05d}.json.gz", "wt") as f:
            json.dump(anno, f)


def write_recorded(root, times, hidden=()):
    "The ego's list has no times: what can be lost alone are frames of a track."
    whole, root_of = 0.1 * np.arange(90), lambda p: [*p, 0.8]
    track = dict(
        type="VEHICLE",
        frames=[round(10 * t) for i, t in enumerate(times) if i not in hidden],
        xyz=[root_of(other_at(t)) for i, t in enumerate(times) if i not in hidden],
        heading=[HEADING] * (len(times) - len(hidden)),
        lwh=[4.5, 1.9, 1.6],
    )
    ego = dict(xy=[ego_at(t).tolist() for t in whole], heading=[HEADING] * 90)
    log = dict(scene="scene-0001", dt=0.1, length=90, ego=ego, tracks=dict(other=track), map=dict(drivable_area=[]))
    root.mkdir(parents=True)
    with gzip.open(root / "scene-0001.json.gz", "wt") as f:
        json.dump(log, f)


def write_123d(root, times, hidden=()):
    "With py123d's own writer; the IMU is beside the rear axle, as in KITTI-360."
    pytest.importorskip("py123d", reason=py123d.INSTALL)
    from py123d import datatypes as kinds
    from py123d.api.scene.arrow import arrow_log_writer as log
    from py123d.geometry import BoundingBoxSE3, PoseSE3
    from py123d.parser.base_dataset_parser import ModalitiesSync
    from py123d.parser.registry import NuPlanBoxDetectionLabel

    def place(p, z):
        return PoseSE3(*p, z, *QUARTERS)

    offset = PoseSE3(0.05, -0.32, 0.0, 1.0, 0.0, 0.0, 0.0)
    car = kinds.EgoStateSE3Metadata("car", 2.0, 5.0, 1.8, 3.0, PoseSE3(1.5, -0.32, 0.6, 1.0, 0.0, 0.0, 0.0), offset)
    named = kinds.BoxDetectionAttributes(NuPlanBoxDetectionLabel.VEHICLE, "other")
    config = log.LogWriterConfig(infer_ego_dynamics=True, infer_box_dynamics=True)
    writer = log.ArrowLogWriter(config, root / "logs", root / "sensors")
    writer.reset(kinds.LogMetadata("toy", "toy_val", "log", None))
    for i, t in enumerate(times):
        stamp = kinds.Timestamp.from_us(int(1e6 * (1000 + t)))
        ego = kinds.EgoStateSE3.from_rear_axle(place(ego_at(t), 0.3), car, stamp)
        box = kinds.BoxDetectionSE3(named, BoundingBoxSE3(place(other_at(t), 0.8), 4.5, 1.9, 1.6))
        about = kinds.BoxDetectionsSE3Metadata(NuPlanBoxDetectionLabel)
        writer.write_sync(ModalitiesSync(stamp, [ego, kinds.BoxDetectionsSE3([box][: i not in hidden], stamp, about)]))
    writer.close()


# name: reader, writer, how many frames, seconds between them, whether the data has time stamps
READERS = dict(
    nuscenes=(nuscenes, write_nuscenes, 20, 0.5, True),
    navsim=(navsim, write_navsim, 20, 0.5, True),
    argoverse2=(argoverse2, write_argoverse2, 90, 0.1, True),
    bench2drive=(bench2drive, write_bench2drive, 70, 0.1, False),
    recorded=(recorded, write_recorded, 90, 0.1, False),
) | {"123d": (py123d, write_123d, 90, 0.1, True)}


def check(scene):
    "Whatever the scene says, it says of a car at constant speed, and of another one."

    def ahead(times):
        return np.stack([SPEED * np.asarray(times), 0 * times, 0 * times], 1)

    ego = scene.ego
    assert np.abs(ego.poses - ahead(ego.times)).max() < FAR_OFF, scene.id
    assert abs(ego.velocity[0] - SPEED) < TOO_FAST and np.abs(ego.acceleration).max() < 0.2, scene.id
    if scene.expert is not None:
        assert np.abs(scene.expert.poses - ahead(scene.expert.times)).max() < FAR_OFF, scene.id
    if "future" in scene.meta:
        assert np.abs(np.array(scene.meta["future"]) - ahead(0.5 * np.arange(1, 17))).max() < FAR_OFF, scene.id
    for a in scene.agents:
        now = a.along([0.0])[0]
        where = now + (a.times * OTHER)[:, None] * [1, 0, 0]
        assert np.isnan(now).any() or np.abs(a.poses - where).max() < FAR_OFF, scene.id
        # Who was not seen before has no velocity yet, and the first frame of all tells none.
        told = a.times > a.times[0] + 1e-6
        assert np.abs(a.velocity[told] - [OTHER, 0]).max(initial=0) < TOO_FAST, scene.id


def read_all(name, root, times):
    "Scenes, and what was refused."
    reader, write, *_ = READERS[name]
    write(root, times)
    refused = []
    found = list(reader.scenes(root, on_error=refused.append))
    for scene in found:
        check(scene)
    return found, refused


def jittered(name, seed):
    _, _, n, step, stamped = READERS[name]
    noise = np.random.default_rng(seed).uniform(-0.2, 0.2, n) if stamped else np.zeros(n)
    times = step * (np.arange(n) + noise)
    return times - times[0] if stamped else times


@pytest.mark.parametrize("name", READERS)
def test_jitter(name, tmp_path):
    for seed in range(4):
        found, refused = read_all(name, tmp_path / str(seed), jittered(name, seed))
        assert len(found) >= 3, refused


@pytest.mark.parametrize("name", READERS)
def test_any_frame_is_lost(name, tmp_path):
    "A single lost frame is filled in: every moment but its own, and those at the ends, stays a scene."
    _, _, n, step, stamped = READERS[name]
    whole, _ = read_all(name, tmp_path / "whole", step * np.arange(n))
    for k in range(n) if step > 0.3 else range(20, 40):
        for jitter in (False, True) if stamped else (False,):
            times = np.delete(jittered(name, k) if jitter else step * np.arange(n), k)
            found, refused = read_all(name, tmp_path / f"{k} {jitter}", times)
            assert len(found) + len(refused) >= len(whole) - 1 and len(found) >= len(whole) - 3, (k, refused)
            if not jitter:
                assert all(s.expert is not None for s in found)


@pytest.mark.parametrize("name", [k for k in READERS if k != "recorded"])
def test_a_long_gap_is_not_filled_in(name, tmp_path):
    "Frames are lost for over GAP: what lies behind is not known, and a scene that needs it is refused and counted."
    _, _, n, step, _ = READERS[name]
    lost = int(np.ceil(GAP / step)) + 1
    first = n // 2
    times = np.delete(step * np.arange(n), np.arange(first, first + lost))
    found, refused = read_all(name, tmp_path / "gap", times)
    before, after = step * (first - 1), step * (first + lost)
    assert after - before > GAP
    assert all(len(scene.expert.poses) == 8 for scene in found)
    assert refused and all(
        f"over {GAP} s" in str(e) or "no sweep within" in str(e) or "no frame" in str(e) for e in refused
    )


def test_what_lies_behind_a_gap_is_absent(tmp_path):
    "Read by name, the moment before a gap of 2 s has no expert, and nobody knows the others: no score is given."
    write_navsim(tmp_path, np.delete(0.5 * np.arange(20), [10, 11, 12]))
    scene = navsim.read(tmp_path / "navsim_logs/test/log.pkl", 7)
    check(scene)
    assert scene.expert is None and "future" not in scene.meta and scene.agents[0].times[-1] == 1.0
    with pytest.raises(SceneError, match="agents future wanted"):
        sources.need(scene, "agents_future")
    with pytest.raises(ValueError, match="road users are not known"):
        score(prepare(scene), np.zeros((1, 8, 3)))


UNITS = dict(nuscenes=0.5, navsim=0.5, argoverse2=1.0, bench2drive=0.1, recorded=1.0) | {"123d": 1.0}  # s, of a name


@pytest.mark.parametrize("name", READERS)
def test_who_is_hidden_is_not_filled_in(name, tmp_path):
    "A car that is not seen for over GAP is nowhere meanwhile, and it is where it is before and after."
    reader, write, n, step, _ = READERS[name]
    first, lost = n // 2, int(np.ceil(GAP / step)) + 1
    inside = step * (first + lost // 2)
    for count, there in ((1, 1), (lost, 0)):  # a single frame is filled in
        write(tmp_path / str(count), step * np.arange(n), range(first, first + count))
        moments = 0
        for scene in reader.scenes(tmp_path / str(count)):
            check(scene)
            ahead = inside - UNITS[name] * float(re.search(r"[0-9.]+$", scene.id)[0])
            if inside - step * first < ahead < 3:  # it is there now, and hidden ahead seconds later
                moments += 1
                third = name == "argoverse2"
                assert sum(a.at(ahead) is not None for a in scene.agents) == there + third, (scene.id, ahead)
                assert sum(a.at(0.0) is not None for a in scene.agents) == 1 + third
                assert len({a.id for a in scene.agents}) == len(scene.agents)
        assert moments


def test_frames_of_the_ego_that_are_lost_are_seen(tmp_path):
    "The recorded logs have no clock: the length tells."
    write_recorded(tmp_path / "log", 0.1 * np.arange(90))
    file = tmp_path / "log/scene-0001.json.gz"
    log = json.loads(gzip.open(file).read())
    for k in ("xy", "heading"):
        log["ego"][k].pop(40)
    with gzip.open(file, "wt") as f:
        json.dump(log, f)
    refused = []
    assert list(recorded.scenes(file.parent, on_error=refused.append)) == [] and "frames are lost" in str(refused[0])

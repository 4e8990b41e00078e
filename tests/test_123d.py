"""The same drive by two ways: an Argoverse 2 log, and the log of 123D that py123d's own converter makes of it, give the
same scene. One log is our own, in the official schema and on level ground; another is real (DRIVELIT_SAMPLES)."""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import shapely
from PIL import Image
from scipy.spatial.transform import Rotation

from drivelit.runs.prepare import prepare
from drivelit.scene.cameras import get_image
from drivelit.scene.core import from_frame, to_json, wrap_angle
from drivelit.sources import argoverse2, py123d
from drivelit.sources.open import need, open_scenes

pytest.importorskip("py123d", reason=py123d.INSTALL)

SAMPLES = os.environ.get("DRIVELIT_SAMPLES")
REAL = Path(SAMPLES or ".") / "data/argoverse2/sensor/7fab2350-7eaf-3b7e-a39d-6937a4c1bede"
BEND = 30.0  # metres: the circle that the car drives on, at 6 m/s
CENTER = np.array([5000.0, 2000.0])


def quaternion(yaw):
    return dict(zip(("qx", "qy", "qz", "qw"), Rotation.from_euler("z", yaw).as_quat(), strict=True))


def ego_at(t):
    angle = 0.3 + 6.0 / BEND * t
    return np.array([*(CENTER + BEND * np.array([np.cos(angle), np.sin(angle)])), angle + np.pi / 2])


def ring(radius, start=-0.5, stop=3.0):
    "Points of a circle around the centre, as Argoverse writes them."
    return [
        dict(x=CENTER[0] + radius * np.cos(a), y=CENTER[1] + radius * np.sin(a), z=7.0)
        for a in np.linspace(start, stop, 60)
    ]


def lane(id, outer, inner, **more):
    "Driven to the left: the inner edge is on the left."
    marks = dict(left_lane_mark_type="SOLID_YELLOW", right_lane_mark_type="DASHED_WHITE")
    edges = dict(left_lane_boundary=ring(inner), right_lane_boundary=ring(outer))
    nobody = dict(successors=[], predecessors=[], left_neighbor_id=None, right_neighbor_id=None)
    return dict(id=id, is_intersection=False, lane_type="VEHICLE") | edges | marks | nobody | more


def write_map(folder):
    zebra = dict(id=9, edge1=ring(25, 0.9, 0.9)[:1] + ring(35, 0.9, 0.9)[:1])
    zebra["edge2"] = ring(25, 1.0, 1.0)[:1] + ring(35, 1.0, 1.0)[:1]
    lanes = [lane(7, 32, 28), lane(8, 35, 32, lane_type="BIKE"), lane(11, 28, 25, is_intersection=True)]
    street = dict(id=1, area_boundary=[*ring(35), *ring(25)[::-1]])
    content = dict(
        drivable_areas={"1": street}, lane_segments={str(x["id"]): x for x in lanes}, pedestrian_crossings={"9": zebra}
    )
    (folder / "map").mkdir(parents=True)
    (folder / "map/log_map_archive_0000____PIT_city_1.json").write_text(json.dumps(content))


THINGS = (  # token, category, size, pose in the city at a time
    ("bus", "BUS", (11.0, 2.5, 3.0), lambda t: [5020.0, 2030.0, 2.0]),
    ("ann", "PEDESTRIAN", (0.6, 0.7, 1.7), lambda t: [5028.0 - 1.2 * t, 2005.0, np.pi]),
    ("bob", "BICYCLIST", (1.8, 0.7, 1.7), lambda t: [4990.0, 2020.0 + 4 * t, np.pi / 2]),
    ("barrel", "CONSTRUCTION_BARREL", (0.7, 0.8, 1.1), lambda t: [5010.0, 2031.0, 0.0]),
)


def write_log(folder, seconds=9.5):
    "A log in the official schema, with a front camera and empty files for the sweeps of the lidar, which nobody opens."
    stamps = [10**18 + 100_000_000 * k for k in range(int(seconds * 10))]
    poses, boxes = [], []
    for k, ns in enumerate(stamps):
        x, y, yaw = ego = ego_at(k / 10)
        poses.append(dict(timestamp_ns=ns, tx_m=x, ty_m=y, tz_m=7.3) | quaternion(yaw))
        for token, category, size, where in THINGS:
            there = where(k / 10)
            gap, turn = (
                np.array(there[:2]) - ego[:2],
                np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]]),
            )
            row = dict(zip(("length_m", "width_m", "height_m"), size, strict=True)) | quaternion(there[2] - yaw)
            row |= dict(zip(("tx_m", "ty_m"), turn @ gap, strict=True)) | dict(tz_m=size[2] / 2 - 0.3)
            boxes.append(dict(timestamp_ns=ns, track_uuid=token, category=category, num_interior_pts=5) | row)
    write_map(folder)
    pd.DataFrame(poses).to_feather(folder / "city_SE3_egovehicle.feather")
    pd.DataFrame(boxes).to_feather(folder / "annotations.feather")
    (folder / "calibration").mkdir()
    q = Rotation.from_matrix([[0, 0, 1], [-1, 0, 0], [0, -1, 0]]).as_quat()
    mount = dict(zip(("qx", "qy", "qz", "qw"), q, strict=True)) | dict(tx_m=1.6, ty_m=0.1, tz_m=1.4)
    still = quaternion(0.0) | dict(tx_m=0.0, ty_m=0.0, tz_m=1.6)
    rig = [
        dict(sensor_name="ring_front_center") | mount,
        *(dict(sensor_name=f"{n}_lidar") | still for n in ("up", "down")),
    ]
    pd.DataFrame(rig).to_feather(folder / "calibration/egovehicle_SE3_sensor.feather")
    lens = dict(fx_px=90.0, fy_px=90.0, cx_px=40.0, cy_px=30.0, k1=0.0, k2=0.0, k3=0.0, height_px=60, width_px=80)
    pd.DataFrame([dict(sensor_name="ring_front_center") | lens]).to_feather(folder / "calibration/intrinsics.feather")
    for name in ("lidar", "cameras/ring_front_center"):
        (folder / "sensors" / name).mkdir(parents=True)
    for k, ns in enumerate(stamps):
        (folder / f"sensors/lidar/{ns}.feather").touch()
        Image.new("RGB", (80, 60), (2 * k, 0, 0)).save(folder / f"sensors/cameras/ring_front_center/{ns}.jpg")


def convert(sensors, out):
    "All that py123d's own command does with a folder val/<log>, by its default options; sweeps and pictures are named."
    from py123d.api.map.arrow.arrow_map_writer import ArrowMapWriter
    from py123d.api.scene.arrow.arrow_log_writer import ArrowLogWriter, SyncConfig
    from py123d.api.scene.arrow.utils.log_writer_config import LogWriterConfig
    from py123d.parser.av2.av2_sensor_parser import Av2SensorParser

    data = Av2SensorParser(["av2-sensor_val"], sensors)
    config = LogWriterConfig(infer_ego_dynamics=True, infer_box_dynamics=True)
    writer = ArrowLogWriter(
        config, out / "logs", out / "sensors", sync_config=SyncConfig("lidar.lidar_merged.timestamp_us")
    )
    maps = ArrowMapWriter(True, out / "maps", out / "logs")
    for street in data.get_map_parsers():
        maps.reset(street.get_map_metadata())
        for thing in street.iter_map_objects():
            maps.write_map_object(thing)
        maps.close()
    for log in data.get_log_parsers():
        writer.reset(log.get_log_metadata())
        if (next((sensors / "val").iterdir()) / "sensors/cameras").exists():
            for frame in log.iter_modalities_sync():
                writer.write_sync(frame)
        else:  # without pictures its synchronizer finds nothing to synchronize
            for thing in log.iter_modalities_async():
                writer.write_async(thing)
        writer.close()
    return out


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    write_log(root / "raw/val/0000")
    return root / "raw/val/0000", convert(root / "raw", root / "out")


def both(source, root, sensors=None):
    "The scenes of the log by its own reader, and by the other way, by the same ids."
    first = {s.id: s for s in argoverse2.scenes(source.parent)}
    second = {s.id: s for s in open_scenes("123d", root, sensors=sensors)}
    assert len(first) > 7 and set(first) <= set(second) and len(second) <= len(first) + 1
    return [(first[k], second[k]) for k in first]


def lines(scene):
    return {a.id: a for a in scene.map.of("lane", "lane_connector")}


def area(scene, kind):
    return shapely.union_all([a.polygon for a in scene.map.of(kind)])


def test_a_log_of_our_own(own):
    source, root = own
    for a, b in both(source, root):
        assert (a.command, a.family) == (b.command, b.family)
        np.testing.assert_allclose(a.ego.poses, b.ego.poses[-len(a.ego.poses) :], atol=1e-6)
        np.testing.assert_allclose(a.expert.poses, b.expert.poses, atol=1e-6)
        np.testing.assert_allclose(
            [*a.ego.velocity, *a.ego.acceleration], [*b.ego.velocity, *b.ego.acceleration], atol=1e-4
        )
        np.testing.assert_allclose(a.ego.steering_angle, b.ego.steering_angle, atol=1e-5)
        np.testing.assert_allclose(a.map.centerline, b.map.centerline, atol=1e-6)
        assert {x.id: x.type for x in a.agents} == {x.id: x.type for x in b.agents}
        for x in a.agents:
            y, inside = b.agent(x.id), (x.times > -5.05) & (x.times < 8.05)
            np.testing.assert_allclose(x.times[inside], y.times, atol=1e-6)
            np.testing.assert_allclose(x.poses[inside, :2], y.poses[:, :2], atol=1e-6)
            assert np.abs(wrap_angle(x.poses[inside, 2] - y.poses[:, 2])).max() < 1e-6
            np.testing.assert_allclose(x.velocity[inside], y.velocity, atol=1e-4)
            np.testing.assert_allclose(
                [x.length, x.width, x.height, x.z], [y.length, y.width, y.height, y.z], atol=1e-6
            )
        assert area(a, "drivable").symmetric_difference(area(b, "drivable")).area < 1e-3
        assert area(a, "crossing").symmetric_difference(area(b, "crossing")).area < 1e-3
        assert {k: (v.kind, v.on_route) for k, v in lines(a).items()} == {
            k: (v.kind, v.on_route) for k, v in lines(b).items()
        }
        for k, v in lines(a).items():
            assert v.polygon.symmetric_difference(lines(b)[k].polygon).area < 1e-3
            gap = shapely.hausdorff_distance(*(shapely.LineString(x.centerline) for x in (v, lines(b)[k])))
            assert gap < 0.9  # twelve points on 110 m of a bend of 30 m
        assert not b.map.of("roadblock", "intersection")  # the road is the drivable area alone, as in the data set


def test_its_pictures(own):
    "Each is the file that was taken at the frame; the camera stands 0.3 m higher over the road than over the axle."
    source, root = own
    scene = next(open_scenes("123d", root, sensors=source.parents[1]))
    cam = need(scene, "images", "past_images").cameras["CAM_FRONT"]
    assert cam is scene.camera("ring_front_center") and cam.name == "ring_front_center"
    np.testing.assert_allclose(cam.cam2ego[:3, 3], [1.6, 0.1, 1.4 + 0.3], atol=1e-6)
    np.testing.assert_allclose(cam.cam2ego[:3, :3], [[0, 0, 1], [-1, 0, 0], [0, -1, 0]], atol=1e-6)
    for t in (0.0, -1.0):
        red = np.asarray(get_image(scene, cam.name, time=t))[..., 0].mean()
        assert abs(red - 2 * round(10 * (scene.meta["time"] + t))) < 3, t
    bare = next(open_scenes("123d", root))  # nobody says where the pictures are
    assert bare.cameras["CAM_FRONT"].files == {}


def test_tokens_and_lazy_logs(own, tmp_path):
    source, root = own
    some = list(open_scenes("123d", root))[3]
    (again,) = open_scenes("123d", root, tokens=[some.meta["token"]])
    assert again.id == some.id and some.meta["dataset"] == "av2-sensor" and some.meta["location"] == "PIT"
    shutil.copytree(root, tmp_path / "two")
    (log,) = (p.parent for p in (tmp_path / "two").rglob("sync.arrow"))
    log.rename(log.with_name("0001-broken"))
    shutil.copytree(root / "logs", tmp_path / "two/logs", dirs_exist_ok=True)
    (tmp_path / "two/logs/av2-sensor_val/0001-broken/ego_state_se3.arrow").write_bytes(b"")
    found, refused = open_scenes("123d", tmp_path / "two", on_error=(failed := []).append), failed
    assert next(found).id == some.id[:-5] + "001.5" and not refused  # the broken log comes later
    assert len(list(found)) > 5 and len(refused) == 1 and "0001-broken: ego_state_se3.arrow" in str(refused[0])


def test_shards(own, tmp_path):
    "A preparation reads log by log, and its shards hold the same scenes with the same pictures."
    source, root = own
    sensors = root / "raw"  # below the root, so that the shards do not depend on where it lies
    if not sensors.exists():
        shutil.copytree(source.parents[1], sensors)
    kept = list(prepare("123d", root, tmp_path / "shards", split="av2-sensor_val", sensors=str(sensors)))
    wanted = list(open_scenes("123d", root, split="av2-sensor_val", sensors=sensors))
    assert [to_json(s) for s in kept] == [to_json(s) for s in wanted] and len(kept) > 7
    assert need(kept[0], "images", "past_images", "expert", "map")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not SAMPLES:
        pytest.skip("DRIVELIT_SAMPLES is not set")
    root = tmp_path_factory.mktemp("real")
    source = root / "raw/val" / REAL.name
    shutil.copytree(REAL, source, copy_function=shutil.copyfile)
    (source / "sensors/lidar").mkdir(parents=True)
    for ns in pd.read_feather(source / "annotations.feather").timestamp_ns.unique():
        (source / f"sensors/lidar/{ns}.feather").touch()  # the sample has none; no sweep is opened
    return source, convert(root / "raw", root / "out")


def global_poses(scene, poses, log):
    return from_frame(poses, log["poses"][np.abs(log["times"] - scene.meta["time"]).argmin()])


def test_a_real_log(real):
    "What the page of the reader says of it."
    source, root = real
    (folder,) = (p.parent for p in root.rglob("sync.arrow"))
    mine, theirs = argoverse2.load(str(source)), py123d.load(str(folder))
    np.testing.assert_allclose(mine["poses"][:, :2], theirs["poses"][:, :2], atol=1e-4)
    np.testing.assert_allclose(mine["poses"][:, 2], theirs["poses"][:, 2], atol=1e-3)
    worst = dict.fromkeys(("place", "heading", "velocity", "z", "lane"), 0.0)
    for a, b in both(source, root):
        np.testing.assert_allclose(a.expert.poses[:, :2], b.expert.poses[:, :2], atol=0.02)
        np.testing.assert_allclose(a.ego.poses[:, :2], b.ego.poses[:, :2], atol=0.02)
        np.testing.assert_allclose(
            [*a.ego.velocity, *a.ego.acceleration], [*b.ego.velocity, *b.ego.acceleration], atol=1e-3
        )
        near = {x.id: x for x in a.agents if ((x.times > -5.05) & (x.times < 8.05)).any()}
        assert set(near) >= {x.id for x in b.agents} and len(b.agents) > 30
        for y in b.agents:
            x = near[y.id]
            assert (x.type, x.length, x.width, x.height) == (y.type, y.length, y.width, y.height)
            inside = (x.times > -5.05) & (x.times < 8.05)
            np.testing.assert_allclose(x.times[inside], y.times, atol=1e-6)
            gap = global_poses(a, x.poses[inside], mine) - global_poses(b, y.poses, theirs)
            seen = dict(place=np.hypot(*gap[:, :2].T), heading=np.abs(wrap_angle(gap[:, 2])), z=abs(x.z - y.z))
            told = y.times < 7.9  # who appears at the end of what is read has no velocity yet
            seen["velocity"] = np.append(np.abs(x.velocity[inside] - y.velocity)[told], 0.0)
            worst = {k: max(v, np.max(seen[k])) if k in seen else v for k, v in worst.items()}
        assert {k: (v.kind, v.on_route) for k, v in lines(a).items()} == {
            k: (v.kind, v.on_route) for k, v in lines(b).items()
        }
        for k, v in lines(a).items():
            pair = (global_poses(s, p.centerline, d) for s, p, d in ((a, v, mine), (b, lines(b)[k], theirs)))
            gap = shapely.hausdorff_distance(*(shapely.LineString(p).segmentize(0.5) for p in pair))
            worst["lane"] = max(worst["lane"], gap)
    assert worst["place"] < 0.15 and worst["heading"] < 0.0012 and worst["velocity"] < 0.25, worst
    assert worst["z"] < 0.67 and worst["lane"] < 0.6, worst


def test_boxes_of_a_real_log_are_those_of_its_table(real):
    "The table's box in the frame of the tilted car, carried to the city by hand: to a micrometre where 123D has it."
    source, root = real
    (folder,) = (p.parent for p in root.rglob("sync.arrow"))
    table, cars = (pd.read_feather(source / f"{k}.feather") for k in ("annotations", "city_SE3_egovehicle"))

    def quaternions(t):
        return Rotation.from_quat(np.array(t[["qx", "qy", "qz", "qw"]]))

    for frame, ns in list(enumerate(sorted(table.timestamp_ns.unique())))[::25]:
        rows, car = table[table.timestamp_ns == ns], cars[cars.timestamp_ns == ns]
        turn = quaternions(car)
        place = turn.apply(rows[["tx_m", "ty_m", "tz_m"]].to_numpy(copy=True)) + car[["tx_m", "ty_m", "tz_m"]].to_numpy(
            copy=True
        )
        forward = (turn * quaternions(rows)).apply([1.0, 0.0, 0.0])
        _, tokens, _, boxes = py123d._boxes(str(folder), frame)
        order = [tokens.index(t) for t in rows.track_uuid]
        np.testing.assert_allclose(boxes[order, :2], place[:, :2], atol=1e-6)
        heading = np.arctan2(forward[:, 1], forward[:, 0])
        assert np.abs(wrap_angle(boxes[order, 2] - heading)).max() < 1e-6
        np.testing.assert_allclose(boxes[order, 6], rows.tz_m + 0.3, atol=1e-6)  # over the road, 0.3 m under the axle


def test_the_version_is_the_pinned_one():
    assert metadata.version("py123d") == "0.7.0" and "py123d==0.7.0" in py123d.INSTALL

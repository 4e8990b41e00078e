"""A file of a data set that is cut short, lacks a field or holds nonsense: one sentence names it, and no reader makes a
scene of it. The files are those that the readers' pages write."""

import gzip
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import names_of
from pyarrow import feather

from drivelit.scene.cameras import get_image
from drivelit.scene.core import SceneError
from drivelit.sources import argoverse2, bench2drive, navsim, nuscenes, py123d, recorded, routes
from drivelit.town.scenes import make_scene

SAMPLES = os.environ.get("DRIVELIT_SAMPLES")
JUNK = st.sampled_from([None, True, -1, 10**400, 1e300, float("nan"), "x", [], [[]], {}, {"a": 1}, [1, "b"]])


@pytest.fixture
def tmp_path(tmp_path_factory):
    "A folder whose name says nothing of the case, as the errors name their files."
    return tmp_path_factory.mktemp("files")


def refused(words, read, *args, **options):
    "Reading fails with one sentence that has all of these words."
    with pytest.raises(SceneError) as e:
        read(*args, **options)
    for w in [words] if isinstance(words, str) else words:
        assert w in str(e.value), str(e.value)


def cases(*rows):
    "Cases whose last value, the words of the error, is their name."
    return [pytest.param(*row, id=row[-1] if isinstance(row[-1], str) else " ".join(row[-1])) for row in rows]


def places(data, path=(), ends=False):
    "Paths into nested data; `ends`: of a long list the first and the last element."
    if path:
        yield path
    items = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    for k, v in [items[0], items[-1]] if ends and len(items) >= 12 else items:
        yield from places(v, (*path, k), ends)


def put(data, path, value):
    "One value of nested data is another."
    for k in path[:-1]:
        data = data[k]
    data[path[-1]] = value


# Routes of Bench2Drive, in XML

TEXT = names_of("04_sources/46_routes", routes, "TEXT")
LAUGHS = "".join(f'<!ENTITY l{i + 1} "{f"&l{i};" * 10}">' for i in range(9))
POINTS = "".join(f'<waypoint x="{x}" y="2" z="0" yaw="0"/>' for x in (1, 9))


def of_routes(tmp_path, content):
    "A file with this text, or these bytes."
    file = tmp_path / "bad.xml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize(
    "text, words",
    cases(
        (TEXT[:200], ("cut short",)),
        ("<routes/>", ("no <route>",)),
        (TEXT.replace('town="Town01"', ""), ("route 7", "'town'")),
        (TEXT.replace('yaw="90.0"', ""), ("Cut_1", "'yaw'")),
        (TEXT.replace('x="10.0" y="5.0"', 'x="ten" y="5.0"'), ("route 7", "position")),
        (TEXT.replace("</routes>", TEXT[8:]), ("stands twice",)),
        (TEXT.replace('"100.0"', '"a lot"'), ("route 7: <weather>: not an array of numbers",)),
        (TEXT.replace('"100.0"', '"nan"'), ("route 7: <weather>: holds NaN",)),
        (TEXT.replace('x="10.0" y="5.0"', 'x="1e9" y="5.0"'), ("route 7: <position>: holds 1e+09",)),
        (TEXT.replace('"10.0"', '"0.0"').replace('y="5.0"', 'y="0.0"'), ("a route needs two different ones",)),
        (TEXT.replace('id="7"', 'id="../7"'), ("id: '../7' holds '/'",)),
        (f'<!DOCTYPE routes [<!ENTITY l0 "ha">{LAUGHS}]><routes>&l9;</routes>', ("defines entities",)),
        (b"<routes>\xff</routes>", ("bad.xml: not XML",)),
        (f'<?xml version="1.0" encoding="shift_jis"?>{TEXT}', ("not XML", "encoding")),
        (f'<?xml version="1.0" encoding="klingon"?>{TEXT}', ("not XML", "encoding")),
        (
            f'<routes><route id="1" town="Town01">{POINTS}</route></routes>',
            ("route 1: <waypoint> directly under <route>: a file of CARLA leaderboard 1",),
        ),
    ),
)
def test_routes_that_are_damaged(tmp_path, text, words):
    refused(words, routes.read_routes, of_routes(tmp_path, text))


def test_the_text_of_the_page_has_what_is_replaced():
    for part in ('town="Town01"', 'yaw="90.0"', 'x="10.0" y="5.0"', "</routes>", 'cloudiness="100.0"', 'id="7"'):
        assert TEXT.count(part) == 1, part
    assert TEXT.count('"100.0"') == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "iso-8859-1", "windows-1252"])
def test_routes_in_another_encoding(tmp_path, encoding):
    "A file says it in its first line; UTF-16 needs no such line."
    street = TEXT.replace('town="Town01"', 'town="Straße"')
    declared = "utf-8" if encoding == "utf-8-sig" else encoding
    content = f'<?xml version="1.0" encoding="{declared}"?>{street}'.encode(encoding)
    assert routes.read_routes(of_routes(tmp_path, content))[0].town == "Straße"
    if encoding == "utf-16":
        assert routes.read_routes(of_routes(tmp_path, TEXT.encode(encoding)))[0].id == "7"


@pytest.mark.skipif(not SAMPLES, reason="DRIVELIT_SAMPLES is not set")
def test_real_routes_of_leaderboard_1():
    refused("leaderboard 1", routes.read_routes, Path(SAMPLES) / "data/carla_leaderboard1/4_6.xml.gz")


def test_any_damage_to_routes(tmp_path_factory):
    file = tmp_path_factory.mktemp("routes") / "bad.xml"

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(TEXT)), st.text(max_size=4), st.integers(0, 6))
    def damaged(offset, junk, gone):
        file.write_text(TEXT[:offset] + junk + TEXT[offset + gone :], errors="ignore")
        try:
            routes.read_routes(file)
        except SceneError as e:
            assert str(e).startswith(str(file)), e

    damaged()


# Argoverse 2


@pytest.fixture
def argoverse(tmp_path):
    return names_of("04_sources/41_argoverse2", argoverse2, "write_log")(tmp_path)


def rewrite(file, change):
    "A Feather file with its columns changed."
    table = feather.read_table(file).to_pydict()
    change(table)
    feather.write_feather(pa.table(table), file)


def street_of(log):
    return next((log / "map").iterdir())


@pytest.mark.parametrize(
    "change, words",
    cases(
        (
            lambda f: (f / "annotations.feather").write_bytes((f / "annotations.feather").read_bytes()[:200]),
            "annotations.feather: not a Feather table",
        ),
        (lambda f: (f / "annotations.feather").unlink(), "no annotations.feather"),
        (lambda f: street_of(f).write_text("{"), "not JSON"),
        (lambda f: street_of(f).unlink(), "no log_map_archive"),
    ),
)
def test_files_of_argoverse(argoverse, change, words):
    change(argoverse)
    refused(words, argoverse2.read, argoverse, 3.0)


def test_times_and_folders_of_argoverse(argoverse, tmp_path):
    refused("outside the log", argoverse2.read, argoverse, 60.0)
    assert argoverse2.read(argoverse, 8.9).expert is None  # the last sweep is a moment, too
    (tmp_path / "empty").mkdir()
    refused("no folder", lambda: list(argoverse2.scenes(tmp_path / "empty")))


POSES, BOXES = "city_SE3_egovehicle", "annotations"


@pytest.mark.parametrize(
    "file, change, words",
    cases(
        (POSES, lambda t: t["tx_m"].__setitem__(3, float("nan")), "tx_m: holds NaN"),
        (POSES, lambda t: t["tx_m"].__setitem__(3, 1e9), "tx_m: holds 1e+09"),
        (POSES, lambda t: t["tx_m"].__setitem__(30, 5000.0), "tx_m, ty_m: 4938 m between"),
        # one column alone is out of order
        (POSES, lambda t: t.update(tx_m=t["tx_m"][45:] + t["tx_m"][:45]), "no car"),
        (POSES, lambda t: t.update({k: v[:60] for k, v in t.items()}), "no ego pose near the sweep at 6.0 s"),
        (POSES, lambda t: t["qw"].__setitem__(0, 0.0) or t["qz"].__setitem__(0, 0.0), "city_SE3_egovehicle"),
        (POSES, lambda t: t["timestamp_ns"].__setitem__(1, 10**18), "stands twice"),
        (BOXES, lambda t: t.update(timestamp_ns=[10**18] * 180), "annotations.feather: track_uuid"),
        (BOXES, lambda t: t.update(length_m=["x"] * 180), "annotations.feather: length_m"),
        (BOXES, lambda t: t.update({k: [] for k in t}), "annotations.feather: no rows"),
    ),
)
def test_columns_of_argoverse(argoverse, file, change, words):
    rewrite(argoverse / f"{file}.feather", change)
    refused(words, argoverse2.read, argoverse, 3.0)


@pytest.mark.parametrize(
    "change, words",
    cases(
        (lambda m: m.update(lane_segments=[1]), "log_map_archive_0000.json"),
        (lambda m: m["lane_segments"]["7"].pop("left_lane_boundary"), "lane_segments.7"),
        (lambda m: m["drivable_areas"]["1"]["area_boundary"][0].update(x=10**400), "drivable_areas.1"),
        (lambda m: m["pedestrian_crossings"]["9"].update(edge1=None), "pedestrian_crossings.9"),
    ),
)
def test_the_map_of_argoverse(argoverse, change, words):
    content = json.loads(street_of(argoverse).read_text())
    change(content)
    street_of(argoverse).write_text(json.dumps(content))
    refused(words, argoverse2.read, argoverse, 3.0)


# Recorded nuScenes scenes, in JSON


@pytest.fixture
def log(tmp_path):
    return names_of("04_sources/40_recorded", recorded, "write_log")(tmp_path / "scene-9999.json.gz")


def changed(log, change):
    "The log beside itself, with something changed."
    content = json.loads(gzip.open(log, "rt").read())
    change(content)
    with gzip.open(log.parent / "bad.json.gz", "wt") as f:
        json.dump(content, f)
    return log.parent / "bad.json.gz"


def test_files_of_recorded_logs(log, tmp_path):
    (tmp_path / "cut.json.gz").write_bytes(log.read_bytes()[:500])
    (tmp_path / "text.json.gz").write_text("not gzip")
    refused("cut.json.gz: cannot be read, or cut short", recorded.read, tmp_path / "cut.json.gz", 3.0)
    refused("text.json.gz", recorded.read, tmp_path / "text.json.gz", 3.0)
    refused("no such file", recorded.read, tmp_path / "none.json.gz", 3.0)
    refused("outside the log", recorded.read, log, 99.0)
    (tmp_path / "empty").mkdir()
    refused("no scene-*", lambda: list(recorded.scenes(tmp_path / "empty")))


@pytest.mark.parametrize(
    "change, words",
    cases(
        (lambda d: d["map"].pop("drivable_area"), "map.drivable_area: missing"),
        (
            lambda d: d["ego"]["xy"][4].__setitem__(0, float("nan")),
            "bad.json.gz: ego.xy: holds NaN or infinity at [4, 0]",
        ),
        (
            lambda d: d["tracks"]["car"]["xyz"][30].__setitem__(0, float("nan")),
            "bad.json.gz: tracks.car.xyz: holds NaN",
        ),
        # 7.5 GiB if it were walked along
        (lambda d: d["ego"]["xy"][40].__setitem__(0, 1e9), "ego.xy: holds 1e+09"),
        # a jump of four kilometres
        (lambda d: d["ego"]["xy"][40].__setitem__(0, 4000.0), "ego.xy: 38"),
        (lambda d: d["ego"]["heading"].pop(), "ego.heading: shape (89,), expected (90,)"),
        (lambda d: d["tracks"]["car"]["frames"].reverse(), "tracks.car.frames"),
        (lambda d: d["map"]["drivable_area"].append(dict(exterior=[[0, 0]])), "map.drivable_area[1]"),
        (lambda d: d["map"]["lanes"]["l1"].pop("centerline"), "map.lanes.l1"),
        (lambda d: d.update(scene="../../outside"), "id: '../../outside-003.0' holds '/'"),
        (lambda d: [d["ego"][k].pop(40) for k in ("xy", "heading", "velocity")], "length: 90, and ego.xy has 89"),
        (lambda d: d["tracks"]["cone"].update(frames=[90]), "tracks.cone.frames: 90 to 90; the log has 0 to 89"),
        (lambda d: d.update(dt=0.2), "dt: 0.2 s"),
    ),
)
def test_fields_of_recorded_logs(log, change, words):
    refused(words, recorded.read, changed(log, change), 3.0)


def test_a_recorded_log_without_boxes_lanes_or_future(log):
    def empty(content):
        content["tracks"].clear()
        for key in ("lanes", "lane_connectors", "drivable_area"):
            content["map"][key].clear()

    scene = recorded.read(changed(log, empty), 3.0)
    assert (len(scene.agents), len(scene.map.areas)) == (0, 0)
    assert scene.meta["agents_known"] is False  # a log without boxes is not a road without cars
    last = recorded.read(log, 8.9)
    assert last.expert is None and not last.meta["agents_known"] and not last.meta["command_known"]


def test_any_value_of_a_recorded_log(log):
    "Any value anywhere may be junk: out comes a scene, or an error that begins with the file's path."
    spots = list(places(json.loads(gzip.open(log, "rt").read()), ends=True))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.sampled_from(spots), JUNK)
    def damaged(spot, value):
        path = changed(log, lambda d: put(d, spot, value))
        recorded.load.cache_clear()
        try:
            recorded.read(path, 3.0)
        except SceneError as e:
            assert str(e).startswith(str(path)), e

    damaged()


# NAVSIM's logs and nuPlan's maps


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    "A toy scene as a log of NAVSIM and a map of nuPlan: (root, log, map)."
    write_log, write_map = names_of("04_sources/44_navsim", navsim, "write_log", "write_map")
    root = tmp_path_factory.mktemp("navsim")
    turns = (make_scene("unprotected_turn", k) for k in range(50))
    toy = next(s for s in turns if len(s.agents) and any(a.id == "exit" for a in s.map.areas))
    return root, write_log(toy, root), write_map(toy, root)


@pytest.fixture
def reread(drive, tmp_path):
    "Reads the moment of now after a change of all frames, from bad.pkl."
    root, log, gpkg = drive

    def read(change, maps=gpkg.parents[2], sensors=root / "sensor_blobs/test"):
        frames = pickle.loads(log.read_bytes())
        change(frames)
        (tmp_path / "bad.pkl").write_bytes(pickle.dumps(frames))
        return navsim.read(tmp_path / "bad.pkl", 3, maps, sensors)

    return read


def test_files_of_navsim(drive, tmp_path):
    root, log, gpkg = drive
    refused("no *.pkl logs", lambda: next(navsim.scenes(root / "nowhere")))
    refused("no such log", navsim.load_log, str(root / "none.pkl"))
    refused("frame 99", navsim.read, log, 99)
    refused("sg-one-north", navsim.find_map, root / "maps", "sg-one-north")
    refused("no layer 'lanes'", navsim.layer, gpkg, "lanes")
    scene = navsim.read(log, 3, sensors=root / "elsewhere")
    refused(("elsewhere", "not there"), get_image, scene, "CAM_F0")
    scene = navsim.read(log, 3)  # without maps and sensors: nothing is made up
    assert (scene.map.areas, scene.cameras["CAM_FRONT"].files) == ((), {})


@pytest.mark.parametrize(
    "content, words",
    cases(
        (None, "cut short"),
        (pickle.dumps(print), "builtins.print"),
        (pickle.dumps([dict(token="x")]), "frame 0: timestamp"),
        (pickle.dumps({}), "dict"),
    ),
)
def test_pickles_of_navsim(drive, tmp_path, content, words):
    bad = tmp_path / "bad.pkl"
    bad.write_bytes(drive[1].read_bytes()[:500] if content is None else content)
    refused(words, navsim.load_log, str(bad))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["anns"].update(gt_boxes=f["anns"]["gt_boxes"][1:]),
        lambda f: f["anns"].pop("gt_names"),
        lambda f: f.update(anns=None),
        lambda f: f.update(cams=None),
        lambda f: f["cams"]["CAM_F0"].pop("cam_intrinsic"),
        lambda f: f.update(ego2global_rotation=[1, 0, 0]),
        lambda f: f["anns"].update(gt_boxes=f["anns"]["gt_boxes"] * np.nan),
    ],
    ids=["a box less", "no names", "no boxes", "no cameras", "no lens", "three of four numbers", "NaN"],
)
def test_the_present_frame_of_navsim(reread, change):
    refused("bad.pkl: frame 3", reread, lambda frames: change(frames[3]))


def exchange(frames, *keys):
    for k in keys:
        frames[2][k], frames[5][k] = frames[5][k], frames[2][k]


@pytest.mark.parametrize(
    "change, words",
    cases(
        (lambda f: f.insert(2, f.pop(5)), "frame 3: timestamp: "),
        (lambda f: exchange(f, "timestamp"), "timestamp: "),
        (
            lambda f: exchange(f, "ego2global_translation", "ego2global_rotation"),
            "ego2global_translation: the car moves",
        ),
        (
            lambda f: f[5].update(ego2global_translation=[*(f[5]["ego2global_translation"] + np.array([30.0, 0, 0]))]),
            "frame 5: ",
        ),
        (lambda f: f[5].update(ego2global_translation=[np.nan, 0, 0]), "ego2global_translation: holds NaN"),
        (lambda f: f[5].update(ego2global_translation=[1e9, 0, 0]), "ego2global_translation: holds 1e+09"),
        (lambda f: f[3].update(timestamp="noon"), "ValueError"),
        (lambda f: f[3].update(token="../../outside"), "id: '../../outside'"),
        (lambda f: f[3].update(map_location="../.."), "map_location: '../..'"),
        (lambda f: f[8]["anns"].update(gt_boxes=f[8]["anns"]["gt_boxes"] * 1e9), "frame 8: anns.gt_boxes"),
    ),
)
def test_frames_of_navsim(reread, change, words):
    refused(("bad.pkl: frame 3", words), reread, change, sensors=None)


@pytest.mark.parametrize(
    "command, expected",
    [([0, 0, 1, 0], ("TURN RIGHT", True)), ([0, 0, 0, 1], ("GO STRAIGHT", False)), ([0] * 4, ("GO STRAIGHT", False))],
)
def test_a_command_of_navsim_that_is_not_known(reread, command, expected):
    scene = reread(lambda frames: frames[3].update(driving_command=np.array(command)), None, None)
    assert (scene.command, scene.meta["command_known"]) == expected


def test_a_moment_of_navsim_without_route(drive, reread, tmp_path):
    scene = reread(lambda frames: frames[3].update(roadblock_ids=["None"]), sensors=None)
    assert len(scene.map.centerline) == 0 and not any(a.on_route for a in scene.map.areas)
    logs = tmp_path / "navsim_logs/test"
    logs.mkdir(parents=True)
    shutil.copy(tmp_path / "bad.pkl", logs), shutil.copy(drive[1], logs)
    moments = navsim.moments(tmp_path, tokens=["log-3"])
    assert [(Path(log).name, now) for log, now, _ in moments] == [("log.pkl", 3)]


def test_a_log_of_navsim_that_is_late_or_has_no_boxes(reread):
    late = reread(lambda frames: frames[3].update(timestamp=frames[3]["timestamp"] - 200_000), None, None)
    assert late.meta["longest_step"] == pytest.approx(0.7)
    navsim.load_log.cache_clear()

    def blank(frames):
        for f in frames:
            f["anns"] = {k: v[:0] for k, v in f["anns"].items()}

    assert reread(blank, None, None).meta["agents_known"] is False  # a log without boxes is not a road without cars


# Bench2Drive's clips and maps


@pytest.fixture(scope="module")
def clips():
    "The writers of a clip and of a map."
    return names_of("04_sources/45_bench2drive", bench2drive, "write_clip", "write_map")


@pytest.fixture(scope="module")
def town(clips, tmp_path_factory):
    "(root, clip): a clip with pictures, and the map of its town."
    root, toy = tmp_path_factory.mktemp("bench2drive"), make_scene("red_light", 22)
    write_clip, write_map = clips
    clip = write_clip(toy, root)
    write_map(toy, root)
    return root, clip


@pytest.fixture(scope="module")
def busy_clip(clips, tmp_path_factory):
    return clips[0](make_scene("lead_braking", 3), tmp_path_factory.mktemp("busy"), images=())


@pytest.fixture(scope="module")
def present(busy_clip):
    "(file, bytes) of the frame that is read."
    file = busy_clip / "anno/00020.json.gz"
    return file, file.read_bytes()


@pytest.fixture
def reannotated(busy_clip, present):
    "Reads the clip with something changed in the present frame, and puts the frame back."
    file, original = present

    def read(change):
        content = json.loads(gzip.decompress(original))
        change(content)
        file.write_bytes(gzip.compress(json.dumps(content).encode()))
        bench2drive.load.cache_clear()
        return bench2drive.read(busy_clip, 20)

    yield read
    file.write_bytes(original)
    bench2drive.load.cache_clear()


def test_files_of_bench2drive(town, tmp_path):
    root, clip = town
    refused("no <clip>/anno", lambda: next(bench2drive.scenes(root / "maps")))
    refused("elsewhere", bench2drive.frames, root / "elsewhere")
    refused("no frame 999", bench2drive.read, clip, 999)
    refused(("Town05_HD_map.npz", "no such map"), bench2drive.read, clip, 20, maps=root)
    refused("no Town", bench2drive.town_of, "/data/clip_without_a_name")
    refused(("00021.jpg", "not there"), get_image, bench2drive.read(clip, 21), "CAM_FRONT")
    (tmp_path / "cut.json.gz").write_bytes((clip / "anno/00000.json.gz").read_bytes()[:300])
    refused("cut short", bench2drive.load, str(tmp_path / "cut.json.gz"))
    (tmp_path / "empty.json.gz").write_bytes(gzip.compress(b"{}"))
    refused("bounding_boxes: missing", bench2drive.load, str(tmp_path / "empty.json.gz"))


@pytest.mark.parametrize(
    "roads, words",
    cases(
        (None, ("cut short",)),
        ({1: {1: [dict(Type="Center")]}}, ("Town06_HD_map.npz: ", "'Points'")),
        ([print], ("Town06_HD_map.npz: ", "builtins.print")),
    ),
)
def test_maps_of_bench2drive(tmp_path, roads, words):
    file = tmp_path / "Town06_HD_map.npz"
    file.write_bytes(b"PK")
    if roads is not None:
        np.savez(file, arr=np.array(roads, dtype=object))
    refused(words, bench2drive.load_map, str(file))


def car(content):
    "The ego's box, which is the first."
    return content["bounding_boxes"][0]


@pytest.mark.parametrize(
    "change, words",
    cases(
        (lambda d: d.update(bounding_boxes=3), ""),
        (lambda d: car(d).pop("rotation"), "bounding_boxes[0]: cannot be read (KeyError: 'rotation')"),
        (lambda d: car(d)["center"].__setitem__(0, 1e9), "bounding_boxes[0]: center: holds 1e+09"),
        # a jump of kilometres
        (lambda d: car(d)["center"].__setitem__(0, 5000.0), "ego.poses"),
        (lambda d: car(d).update(bbx_loc=[float("nan")] * 3), "bbx_loc: holds NaN"),
        (lambda d: d["bounding_boxes"][1].update(extent=[-1, 1, 1]), "bounding_boxes[1]: extent: a size"),
        (lambda d: d.update(speed="fast"), "speed: not an array of numbers"),
        (lambda d: d.update(acceleration=[1]), "acceleration: shape (1,)"),
        (lambda d: d.update(command_near=None), "command_near: None"),
        (lambda d: d["sensors"]["CAM_FRONT"].pop("intrinsic"), "sensors.CAM_FRONT"),
    ),
)
def test_fields_of_bench2drive(reannotated, change, words):
    refused(("00020.json.gz: ", words), reannotated, change)


def test_any_value_of_bench2drive(reannotated, present):
    "Any value of a frame may be junk: out comes a scene, or an error that begins with the file's path."
    file, original = present
    spots = [p for p in places(json.loads(gzip.decompress(original))) if p[:2] != ("bounding_boxes", 0) or len(p) < 4]

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.sampled_from(spots), JUNK)
    def damaged(spot, value):
        try:
            reannotated(lambda d: put(d, spot, value))
        except SceneError as e:
            assert str(e).startswith(str(file)), e

    damaged()


# nuScenes, through its devkit


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    "Folders of a toy drive, without a map and with one."
    pytest.importorskip("nuscenes")
    write_toy, write_expansion = names_of("04_sources/42_nuscenes", nuscenes, "write_toy", "write_expansion")
    folder = tmp_path_factory.mktemp("nuscenes")
    toy = next(s for s in (make_scene("slow_leader", k) for k in range(30)) if abs(s.expert.poses[-1, 2]) < 0.1)
    write_toy(toy, folder / "bare")
    shutil.copytree(folder / "bare", folder / "mapped")
    write_expansion(toy, folder / "mapped")
    return folder


@pytest.fixture
def bare(tables, tmp_path):
    return shutil.copytree(tables / "bare", tmp_path / "bare")


@pytest.fixture
def mapped(tables, tmp_path):
    return shutil.copytree(tables / "mapped", tmp_path / "mapped")


EXPANSION = "maps/expansion/singapore-onenorth.json"


def sample(root, **options):
    "The moment of now."
    return nuscenes.read(nuscenes.open_nuscenes(str(root)), "sample 4", **options)


def test_files_of_nuscenes(mapped, tmp_path):
    refused(("v1.0-trainval", "no such folder"), nuscenes.open_nuscenes, str(mapped), "v1.0-trainval")
    refused("no sample 'nothing'", nuscenes.read, nuscenes.open_nuscenes(str(mapped)), "nothing")
    scene = sample(mapped)
    (mapped / "samples/CAM_FRONT/4.jpg").rename(tmp_path / "moved.jpg")
    refused(("4.jpg", "not there"), get_image, scene, "CAM_FRONT")
    (mapped / EXPANSION).unlink()
    refused((EXPANSION, "download"), sample, mapped, need_map=True)


def test_a_walkway_of_nuscenes_that_crosses_itself(mapped):
    place = names_of("04_sources/42_nuscenes", nuscenes, "PLACE")
    content = json.loads((mapped / EXPANSION).read_text())
    corners = place[:2] + [[0, 0], [4, 4], [4, 0], [0, 4]]
    content["node"] += [dict(token=f"x{i}", x=x, y=y) for i, (x, y) in enumerate(corners)]
    content["polygon"].append(dict(token="xp", exterior_node_tokens=[f"x{i}" for i in range(4)], holes=[]))
    content["walkway"].append(dict(token="crossed", polygon_token="xp"))
    (mapped / EXPANSION).write_text(json.dumps(content))
    areas = [a for a in sample(mapped).map.areas if a.id.startswith("crossed")]
    assert sum(a.polygon.area for a in areas) == pytest.approx(8)


def test_a_map_of_nuscenes_of_another_version(mapped):
    content = json.loads((mapped / EXPANSION).read_text())
    (mapped / EXPANSION).write_text(json.dumps(content | dict(version="1.1")))
    refused(("singapore-onenorth.json", "version 1.3"), sample, mapped)


@pytest.mark.parametrize("content", ["[{", "", "[]", '[{"utime": 1000000000}]'])
def test_the_can_bus_of_nuscenes(mapped, content):
    (mapped / "can_bus/scene-0001_pose.json").write_text(content)
    refused("can_bus/scene-0001_pose.json", sample, mapped)


@pytest.mark.parametrize(
    "name, change, words",
    cases(
        ("instance", lambda p: p.write_text("["), ("cut short",)),
        ("sample", lambda p: p.unlink(), ("sample.json", "missing")),
    ),
)
def test_tables_of_nuscenes(mapped, name, change, words):
    change(mapped / "v1.0-mini" / f"{name}.json")
    refused(words, nuscenes.open_nuscenes, str(mapped))


@pytest.mark.parametrize(
    "name, change, words",
    cases(
        ("ego_pose", lambda r: r[4].update(translation=[1e9, 0, 0]), ("sample 4", "translation: holds 1e+09")),
        ("ego_pose", lambda r: r[5].update(translation=[900.0, 0, 0]), ("sample 4", "expert.poses")),
        ("ego_pose", lambda r: r[4].update(rotation=[0, 0, 0, 0]), ("sample 4", "ValueError")),
        (
            "sample_annotation",
            lambda r: r[0].update(translation=[float("nan")] * 3),
            ("sample_annotation", "translation"),
        ),
        ("sample_annotation", lambda r: r[0].update(size=["a", 1, 1]), ("sample_annotation", "size: not an array")),
        ("sample", lambda r: r[5].update(timestamp=1), ("sample 4", "not in the order of time")),
        ("log", lambda r: r[0].update(location="../.."), ("sample 4", "log.location")),
        ("scene", lambda r: r[0].update(description=None), ("sample 4", "AttributeError")),
    ),
)
def test_rows_of_nuscenes(bare, name, change, words):
    table = bare / "v1.0-mini" / f"{name}.json"
    rows = json.loads(table.read_text())
    change(rows)
    table.write_text(json.dumps(rows))
    refused(words, sample, bare)


# 123D's logs, in Arrow


@pytest.fixture(scope="module")
def arrow_log(tmp_path_factory):
    "A toy scene as a log of 123D; its folder."
    pytest.importorskip("py123d", reason=py123d.INSTALL)
    write_log, lamp, guests = names_of("04_sources/47_123d", py123d, "write_log", "lamp", "guests")
    toy = make_scene("right_turn", 3)
    return write_log(replace(toy, lights=(lamp,), agents=(*toy.agents, *guests)), tmp_path_factory.mktemp("123d"))


@pytest.fixture
def copied(arrow_log, tmp_path):
    "A copy of the log that may be changed."
    shutil.copytree(arrow_log.parents[2] / "maps", tmp_path / "maps")
    return shutil.copytree(arrow_log, tmp_path / "logs/toy_val/log")


def test_folders_of_123d(arrow_log):
    root = arrow_log.parents[2]
    refused("no sync.arrow", py123d.read, root, 1.0)
    refused("outside the log", py123d.read, arrow_log, 60.0)
    refused("should hold logs/ and maps/", lambda: list(py123d.scenes(root / "maps")))
    refused("no split 'nuplan_val'; it has toy_val", lambda: list(py123d.scenes(root, split="nuplan_val")))


@pytest.mark.parametrize(
    "file, words",
    cases(
        ("sync.arrow", "not Arrow, or cut short"),
        ("map.arrow", "map: not Arrow"),
        ("ego_state_se3.arrow", "ego_state_se3"),
        ("box_detections_se3.arrow", "box_detections_se3"),
    ),
)
def test_files_of_123d(copied, file, words):
    "The last is cut short, the others are no Arrow at all."
    cut = (copied / file).read_bytes()[:3000] if file.startswith("box") else b"no arrow"
    (copied / file).write_bytes(cut)
    refused(words, py123d.read, copied, 5.0)


POSE, BOX, LABEL = "ego_state_se3.imu_se3", "box_detections_se3.bounding_box_se3", "box_detections_se3.label"


@pytest.mark.parametrize(
    "table, change, words",
    cases(
        ("ego_state_se3", lambda r: r[3][POSE].__setitem__(0, float("nan")), "imu_se3: holds NaN"),
        ("ego_state_se3", lambda r: r[3][POSE].__setitem__(0, 1e9), "imu_se3: holds 1e+09"),
        ("ego_state_se3", lambda r: r[3][POSE].__setitem__(1, 0.0), "imu_se3"),
        ("ego_state_se3", lambda r: r.clear(), "ego_state_se3: missing, or without rows"),
        ("sync", lambda r: r[4].update({"sync.timestamp_us": 5}), "sync.arrow: sync.timestamp_us: row 4 is not after"),
        ("box_detections_se3", lambda r: r[10][BOX][0].__setitem__(0, 1e9), "bounding_box_se3: holds 1e+09"),
        (
            "box_detections_se3",
            lambda r: [v.append(v[0]) for v in r[10].values() if isinstance(v, list)],
            "stands twice",
        ),
        ("box_detections_se3", lambda r: r[10][LABEL].__setitem__(0, 999), "row 10 of sync.arrow"),
    ),
)
def test_rows_of_123d(copied, table, change, words):
    file = copied / f"{table}.arrow"
    with pa.ipc.open_file(file) as content:
        schema, rows = content.schema, content.read_all().to_pylist()
    change(rows)
    with pa.ipc.new_file(file, schema) as out:
        out.write_table(pa.Table.from_pylist(rows, schema))
    refused(words, py123d.read, copied, 5.0)

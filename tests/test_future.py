"""Nothing that a policy is shown or told comes from the future. All that is recorded after t = 0 is changed: the ego's
way, other road users and their sizes, who appears later, lights, later commands and routes. Texts stay the same letter
for letter, pictures pixel for pixel, and so does the map as it is told; for five systems, and for all sources."""

import gzip
import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import feather
from test_times import READERS, UNITS

from drivelit.autodrive_p3.prompt import Inputs as P3Inputs
from drivelit.autodrive_p3.task import P3Task
from drivelit.driveagent.questions import Ask, template_pairs
from drivelit.driveagent.task import DriveAgentTask
from drivelit.driveagent.toolkit import Toolkit
from drivelit.metrics.kinematics import constant_velocity
from drivelit.minddrive.meta_actions import Inputs as DriveInputs
from drivelit.minddrive.meta_actions import question, shown, state_text
from drivelit.minddriver.prompt import Inputs as DriverInputs
from drivelit.minddriver.prompt import policy_prompt
from drivelit.mtdrive.agent import PDMAgent
from drivelit.mtdrive.task import MTDriveTask
from drivelit.rollout.world import World
from drivelit.scene.cameras import toy_cameras
from drivelit.scene.core import Agent, SceneError, Trajectory, to_json
from drivelit.sources import argoverse2, bench2drive, drivelm, recorded
from drivelit.town.routes import make_route
from drivelit.town.scenes import make_scene

SAMPLES = os.environ.get("DRIVELIT_SAMPLES")
SIZE = (112, 56)

# What is told all the same, and why. Whatever else changes with the future is a leak.
FROM_FUTURE = {
    ("nuscenes", "command"): "the data set has none; the public planners' convention takes it from where the car went",
    ("argoverse2", "command"): "the data set has none; nuScenes' convention",
    ("123d", "command"): "its logs have none; nuScenes' convention",
    ("recorded", "command"): "derived nuScenes logs without a command; nuScenes' convention",
    ("mtdrive", "feedback"): "table 1's oracle perception judges a plan in the true future; kinematic does not",
}
# Sources without a recorded route: their centre line is the way that the car took, which MindDrive refuses.
WITHOUT_ROUTE = ("nuscenes", "argoverse2", "recorded", "123d")


def plain(value):
    "Messages and results with pictures as their size and bytes."
    if isinstance(value, Image.Image):
        return value.size, value.convert("RGB").tobytes()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {k: plain(getattr(value, k)) for k in value.__dataclass_fields__}
    return value


BOX = dict(view_index="front", bbox=[10, 10, 60, 40], description="the road")
CALLS = [
    ("Depth Estimation", dict(view_index="front")),
    ("RoI Inspection", BOX),
    ("Retrieve View", dict(view_index="back", frame_index="0s")),
    ("Retrieve View", dict(view_index="front", frame_index="-1s")),
    *(("3D Object Detection", dict(view_index=v, object_text="car, pedestrian, light")) for v in ("front", "back")),
]


def tools(scene):
    kit = Toolkit(image_size=SIZE)
    return [kit(scene, *call) for call in CALLS]


def asked(scene):
    "The alignment questions of DriveAgent, with their answers, which the policy learns."
    pairs = template_pairs(Ask([scene], 0, ("front",), "template", SIZE), np.random.default_rng(0))
    return [(p.question, p.answer) for p in pairs]


def minddrive(scene):
    return question(shown(scene, DriveInputs(size=SIZE)), state_text(scene))


SYSTEMS = dict(
    mtdrive=lambda s: MTDriveTask(image_size=SIZE, metric_descriptions=True).prompt(s),
    driveagent=lambda s: [DriveAgentTask(view="surround", image_size=SIZE).prompt(s), tools(s), asked(s)],
    autodrive_p3=lambda s: P3Task(P3Inputs("toy", 4, 8)).prompt(s),
    minddriver=lambda s: policy_prompt(s, DriverInputs(history=3, size=SIZE)),
    minddrive=minddrive,
)


def told(system, scene):
    try:
        return plain(SYSTEMS[system](scene))
    except SceneError as e:
        return f"refused: {e}"


def another(scene, appear=True):
    "The same moment with another future; appear: others come later, or do not."
    agents = []
    for k, a in enumerate(scene.agents):
        poses, velocity, later = a.poses.copy(), a.velocity.copy(), a.times > 1e-6
        poses[later] += [4.0 + k, -3.0, 0.7]
        velocity[later] = [9.0, 9.0]
        if appear and later.all() and k % 2:
            continue  # who comes later does not come
        keep = ~later if k % 3 == 0 and not later.all() else np.ones(len(later), bool)
        agents.append(replace(a, times=a.times[keep], poses=poses[keep], velocity=velocity[keep]))
    late = dict(type="vehicle", length=4.5, width=1.9, height=1.6, velocity=[[0.0, 0.0]])
    if appear:
        agents.append(Agent("late", times=[0.5], poses=[[12.0, 0.0, 0.0]], **late))

    def states(x):
        return [s if t <= 1e-6 else "yellow" for t, s in zip(x.times, x.states, strict=True)]

    lights = [replace(x, states=states(x)) for x in scene.lights]
    v = float(scene.ego.velocity[0])
    t = 0.5 * np.arange(1, 9)
    way = np.stack([v * t * 0.5, 0.4 * t**2, np.arctan2(0.8 * t, max(v * 0.5, 1.0))], 1)
    meta = {k: x for k, x in scene.meta.items() if k not in ("future", "agents_known", "command_known")}
    return replace(scene, agents=agents, lights=lights, expert=Trajectory(way, 0.5), meta=meta)


TOWN = [make_scene(family, 3) for family in ("cut_in", "pedestrian_crossing", "red_light", "pull_out")]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("scene", TOWN, ids=lambda s: s.family)
def test_the_town(scene, system):
    changed = another(scene)
    assert to_json(changed) != to_json(scene)
    first = told(system, scene)
    assert "refused" not in first
    assert told(system, changed) == first


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_drive_begins_with_the_same_question(system):
    "In closed loop the others' ways are scripts, and who comes later waits already: it is that world's present."
    scene = make_route("cut_in", 3)
    world, seen = World(), []
    for s in (scene, another(scene, appear=False)):
        world.reset(options=dict(scene=s))
        seen.append(told(system, world.scene))
    assert seen[0] == seen[1]


def test_feedback_of_the_kinematic_agent():
    "Constant velocity knows no future; the oracle's feedback is the named exception, and it is one."
    told_by = {}
    for perception in ("kinematic", "oracle"):
        told_by[perception] = [
            [f.text for s in (x, another(x)) for f in PDMAgent(perception).judge(s, constant_velocity(s)[None])]
            for x in TOWN
        ]
    assert all(a == b for a, b in told_by["kinematic"])
    assert any(a != b for a, b in told_by["oracle"]) and ("mtdrive", "feedback") in FROM_FUTURE


def later_nuscenes(root, now):
    "Everything after now is somewhere else, and somebody appears."
    folder, stamp = next(root.glob("v1.0-*")), 1e6 * (1000 + now) + 1
    table = {k: json.loads((folder / f"{k}.json").read_text()) for k in ("sample", "ego_pose", "sample_annotation")}
    later = {r["token"] for r in table["sample"] if r["timestamp"] > stamp}
    for r in table["ego_pose"]:
        if (dt := (r["timestamp"] - stamp) / 1e6) > 0:
            r["translation"][0] -= 0.5 * dt**2
    for r in table["sample_annotation"]:
        if r["sample_token"] in later:
            r["translation"][1] += 4.0
            r["size"] = [2.5, 9.0, 3.0]
    new = dict(table["sample_annotation"][-1], token="late", instance_token="late", prev="", next="")
    table["sample_annotation"].append(new)
    table["instance"] = [dict(token="other", category_token="car", first_annotation_token="a 0")]
    table["instance"].append(dict(token="late", category_token="car", first_annotation_token="late"))
    for k, rows in table.items():
        (folder / f"{k}.json").write_text(json.dumps(rows))


def later_navsim(root, now):
    (file,) = root.glob("navsim_logs/test/*.pkl")
    frames = pickle.loads(file.read_bytes())
    for f in frames:
        if (dt := f["timestamp"] / 1e6 - 1000 - now) > 1e-6:
            f["ego2global_translation"][0] -= 0.5 * dt**2
            f["driving_command"], f["roadblock_ids"] = np.eye(4, dtype=int)[2], ["7"]
            f["traffic_lights"] = [("5", True)]
            boxes = f["anns"]["gt_boxes"] + [0, 4.0, 0, 2.0, 1.0, 0, 0.5]
            f["anns"] |= dict(gt_boxes=np.concatenate([boxes, boxes + 9]), gt_names=np.array(["vehicle"] * 2))
            f["anns"] |= dict(gt_velocity_3d=np.full((2, 3), 9.0), track_tokens=["other", "late"])
    file.write_bytes(pickle.dumps(frames))


def later_argoverse2(root, now):
    for folder in {p.parent for p in root.glob("*/annotations.feather")}:
        poses, boxes = (feather.read_table(folder / f"{k}.feather") for k in ("city_SE3_egovehicle", "annotations"))
        start = boxes["timestamp_ns"].to_numpy().min()
        for name, table, column, by in (
            ("city_SE3_egovehicle", poses, "tx_m", -0.5),
            ("annotations", boxes, "ty_m", 3.0),
        ):
            dt = (table["timestamp_ns"].to_numpy() - start) / 1e9 - now
            later = dt > 1e-3
            rows = table.to_pandas()
            rows.loc[later, column] += by * dt[later] ** 2
            if name == "annotations":
                rows.loc[later, ["length_m", "width_m"]] += 2.0
                new = rows[later][:1].assign(track_uuid="late")
                rows = pd.concat([rows, new], ignore_index=True)
            feather.write_feather(pa.Table.from_pandas(rows, preserve_index=False), folder / f"{name}.feather")


def rewrite(file, change):
    log = json.loads(gzip.open(file).read())
    change(log)
    with gzip.open(file, "wt") as f:
        json.dump(log, f)


def later_bench2drive(root, now):
    def change(anno):
        ego, *others = anno["bounding_boxes"]
        ego["center"][0] -= 0.5 * dt**2
        for b in others:
            b["center"][1] += 4.0
            b.update(extent=[5.0, 1.5, 2.0], speed=9.0, state=2)
        anno["bounding_boxes"].append(others[0] | dict(id=99, **{"class": "vehicle"}))
        anno.update(command_near=5, command_far=1, speed=1.0, acceleration=[3, 3, 0])
        anno.update(x_command_near=ego["center"][0] + 5, y_command_far=ego["center"][1] + 30)

    for file in root.glob("*/anno/*.json.gz"):
        if (dt := int(file.name[:5]) / 10 - now) > 1e-6:
            rewrite(file, change)
            bench2drive.load.cache_clear()


def later_recorded(root, now):
    def change(log):
        n = len(log["ego"]["xy"])
        for k in range(n):
            if (dt := k / 10 - now) > 1e-6:
                log["ego"]["xy"][k][0] -= 0.5 * dt**2
        late = None
        for track in log["tracks"].values():
            for k, frame in enumerate(track["frames"]):
                if frame / 10 > now + 1e-6:
                    track["xyz"][k][1] += 4.0
                    late = dict(track, frames=[frame], xyz=[track["xyz"][k]], heading=[track["heading"][k]])
        log["tracks"]["late"] = {k: v for k, v in late.items() if k != "velocity"}

    for file in root.glob("scene-*.json.gz"):
        rewrite(file, change)
    recorded.load.cache_clear()


def later_123d(root, now):
    "Poses and boxes; the velocities in the tables stay what the converter made of the first drive."
    (folder,) = {p.parent for p in root.rglob("sync.arrow")}

    def change(name, turn):
        with pa.ipc.open_file(folder / f"{name}.arrow") as old:
            schema, rows = old.schema, old.read_all().to_pylist()
        for row in rows:
            if (dt := row[f"{name}.timestamp_us"] / 1e6 - 1000 - now) > 1e-6:
                turn({k.removeprefix(f"{name}."): v for k, v in row.items()}, dt)
        with pa.ipc.new_file(folder / f"{name}.arrow", schema) as new:
            new.write_table(pa.Table.from_pylist(rows, schema))

    def ego(row, dt):
        row["imu_se3"][0] -= 0.5 * dt**2

    def boxes(row, dt):
        for box in row["bounding_box_se3"]:
            box[1] += 4.0
            box[-3:] = [9.0, 2.5, 3.0]
        for column in ("bounding_box_se3", "label", "velocity_3d", "num_lidar_points"):
            row[column].append(row[column][0])
        row["track_token"].append("late")

    change("ego_state_se3", ego)
    change("box_detections_se3", boxes)


LATER = dict(
    nuscenes=later_nuscenes,
    navsim=later_navsim,
    argoverse2=later_argoverse2,
    bench2drive=later_bench2drive,
    recorded=later_recorded,
) | {"123d": later_123d}


def write(name, root):
    "A small log in the format of the data set; Bench2Drive's with a planned change of lane and a light."
    reader, writer, n, step, _ = READERS[name]
    writer(root, step * np.arange(n))
    if name == "bench2drive":
        (start,) = [file for file in root.glob("*/anno/00000.json.gz")]
        x, y, _ = json.loads(gzip.open(start).read())["bounding_boxes"][0]["center"]
        light = dict(id=7, location=[x + 60, y, 5.0], rotation=[0, 0, 90.0], extent=[0.2, 0.2, 0.5], state=0)

        def plan(anno):
            for far, name in ((50.0, "near"), (90.0, "far")):
                anno[f"x_command_{name}"] = x + far * np.cos(0.4) + 3.5 * np.sin(-0.4)
                anno[f"y_command_{name}"] = y - far * np.sin(0.4) - 3.5 * np.cos(0.4)
            anno["command_near"] = 5
            anno["bounding_boxes"].append({"class": "traffic_light", **light, "center": light["location"]})

        for file in root.glob("*/anno/*.json.gz"):
            rewrite(file, plan)
    return reader


def moment(reader, root, id=None):
    "One moment in the middle of a log, and when it is; or the one of a name."
    found = list(reader.scenes(root))
    return found[len(found) // 2] if id is None else next(s for s in found if s.id == id)


def known(scene, name):
    "What the scene says of now and before, as text."

    def past(a):
        return a.times <= 1e-6

    others = [
        replace(a, times=a.times[past(a)], poses=a.poses[past(a)], velocity=a.velocity[past(a)])
        for a in scene.agents
        if past(a).any() and np.hypot(*a.poses[past(a), :2].T).min() < 100  # beyond the readers' reach nobody is told
    ]
    files = [t for c in scene.cameras.values() for t in c.files]
    assert all(t <= 1e-6 for t in files)
    meta = {k: v for k, v in scene.meta.items() if k not in ("future", "longest_step")}
    command = "GO STRAIGHT" if (name, "command") in FROM_FUTURE else scene.command
    road = scene.map
    assert scene.meta.get("route_known", True) == (name not in WITHOUT_ROUTE)
    if name in WITHOUT_ROUTE:
        road = replace(road, centerline=(), areas=[replace(a, on_route=False) for a in road.areas])
    return to_json(replace(scene, agents=others, expert=None, meta=meta, command=command, map=road))


def same_in_all(first, second, name):
    "The scene as it is known, and each system's question with it; pictures are painted where the log has none."
    assert to_json(first) != to_json(second), "nothing has changed"
    assert known(first, name) == known(second, name)
    if (name, "command") in FROM_FUTURE:
        second = replace(second, command=first.command)
    if not any(c.files for c in first.cameras.values()):
        paint = dict(source="toy", cameras=toy_cameras())
        first, second = replace(first, **paint), replace(second, **paint)
    routed = name not in WITHOUT_ROUTE and len(first.map.centerline) > 1  # NAVSIM's small log has no map
    for system in SYSTEMS:
        said = told(system, first)
        assert ("refused" in said) == (system == "minddrive" and not routed), (system, said)
        assert told(system, second) == said, system


@pytest.mark.parametrize("name", READERS)
def test_each_source(name, tmp_path):
    for k in ("one", "two"):
        reader = write(name, tmp_path / k)
    first = moment(reader, tmp_path / "one")
    LATER[name](tmp_path / "two", UNITS[name] * float(re.search(r"[0-9.]+$", first.id)[0]))
    same_in_all(first, moment(reader, tmp_path / "two", first.id), name)


def write_drivelm(root, behavior):
    "Two key frames of a scene; the answers and the description are about what comes."

    def frame(k):
        return dict(
            image_paths=dict(CAM_FRONT=f"../nuscenes/samples/CAM_FRONT/{k}.jpg"),
            key_object_infos={"<c1,CAM_FRONT,90.0,50.0>": dict(Category="Vehicle", Status=behavior)},
            QA=dict(behavior=[dict(Q="Predict the behavior of the ego vehicle.", A=behavior, tag=[1])]),
        )

    (root / "samples/CAM_FRONT").mkdir(parents=True)
    for k in (0, 1):
        color = (90, 90, 90 if k == 0 or behavior == "stops" else 200)
        Image.new("RGB", (160, 90), color).save(root / f"samples/CAM_FRONT/{k}.jpg")
    scene = dict(scene_description=f"The car {behavior}.", key_frames={f"t{k}": frame(k) for k in (0, 1)})
    (root / "train_sample.json").write_text(json.dumps(dict(scene=scene)))
    return next(drivelm.scenes(root))


def drivelm_told(scene):
    "Front pictures of now, and what can be asked without a past."
    yield plain(DriveAgentTask(view="front", image_size=SIZE).prompt(scene))
    yield plain(policy_prompt(scene, DriverInputs(views="front", history=0, size=SIZE)))
    yield plain(P3Task(P3Inputs("toy", 1, 8)).prompt(scene))
    yield plain(shown(scene, DriveInputs("front", SIZE)))


def test_drivelm(tmp_path):
    "Its key frames have no recorded future but in words: answers, objects and the scene's description are not told."
    first, second = write_drivelm(tmp_path / "one", "stops"), write_drivelm(tmp_path / "two", "turns")
    assert first.meta != second.meta
    assert list(drivelm_told(first)) == list(drivelm_told(second))


needs_samples = pytest.mark.skipif(not SAMPLES, reason="DRIVELIT_SAMPLES is not set")


@needs_samples
@pytest.mark.parametrize("scene", ["scene-0103", "scene-0916"])
def test_real_logs(scene, tmp_path):
    for k in ("one", "two"):
        (tmp_path / k).mkdir()
        shutil.copy(Path(SAMPLES) / f"data/nuscenes_mini_scenes/{scene}.json.gz", tmp_path / k)
    later_recorded(tmp_path / "two", 6.0)
    first, second = (recorded.read(tmp_path / k / f"{scene}.json.gz", 6.0) for k in ("one", "two"))
    same_in_all(first, second, "recorded")


@needs_samples
def test_a_real_argoverse2_log(tmp_path):
    log = Path(SAMPLES) / "data/argoverse2/sensor/7fab2350-7eaf-3b7e-a39d-6937a4c1bede"
    for k in ("one", "two"):
        shutil.copytree(log, tmp_path / k / log.name, copy_function=shutil.copyfile)
    later_argoverse2(tmp_path / "two", 6.0)
    first, second = (argoverse2.read(tmp_path / k / log.name, 6.0) for k in ("one", "two"))
    same_in_all(first, second, "argoverse2")


@needs_samples
def test_real_key_frames():
    for scene in drivelm.scenes(Path(SAMPLES) / "data/nuscenes_drivelm_keyframes"):
        other = replace(scene, meta=scene.meta | dict(behavior="x", description="x", objects={}, qa=[]))
        assert list(drivelm_told(scene)) == list(drivelm_told(other))

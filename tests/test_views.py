"""A view has one name, whoever recorded it; a run that requires pictures leaves a scene without out, and counts it."""

import importlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_times import write_bench2drive, write_navsim, write_nuscenes

from drivelit.data.rows import read_rows
from drivelit.data.shards import write_shards
from drivelit.io.files import RunError
from drivelit.mtdrive.evaluation import task_for
from drivelit.runs.prepare import prepare, window_of
from drivelit.runs.profiles import load_profile
from drivelit.runs.stages import load_scenes, start
from drivelit.scene.cameras import get_image, toy_cameras
from drivelit.scene.core import VIEW_NAMES, SceneError, view_name
from drivelit.sources import bench2drive, drivelm, navsim, nuscenes
from drivelit.sources.recorded import keyframe
from drivelit.town.scenes import scenes

SIZE, COUNT = (64, 36), 24
OWN = {view: names[0] for view, names in VIEW_NAMES.items()}  # NAVSIM's
# degrees to the left of ahead: nuScenes' cameras, and Argoverse 2's that look back beside the car
YAW = dict(CAM_FRONT=0, CAM_FRONT_LEFT=55, CAM_FRONT_RIGHT=-55, CAM_BACK=180, CAM_BACK_LEFT=110, CAM_BACK_RIGHT=-110)
YAW |= dict(CAM_REAR_LEFT=153, CAM_REAR_RIGHT=-153)


def red(level, path):
    "A picture that can be told from others."
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", SIZE, (level, 0, 0)).save(path)
    return path


def navsim_logs(root):
    "A log of twenty frames with NAVSIM's eight cameras; each frame's picture has a red of its own."
    write_navsim(root, 0.5 * np.arange(20))
    (log,) = root.glob("navsim_logs/test/*.pkl")
    frames = pickle.loads(log.read_bytes())
    for i, frame in enumerate(frames):
        frame["cams"] = {}
        for n, name in enumerate(OWN.values()):
            path = Path("log") / name / f"{i}.jpg"
            red(12 * i + n, root / "sensor_blobs/test" / path)
            cam = toy_cameras()["CAM_FRONT"]
            about = dict(sensor2lidar_rotation=cam.cam2ego[:3, :3], sensor2lidar_translation=cam.cam2ego[:3, 3])
            frame["cams"][name] = about | dict(cam_intrinsic=cam.intrinsic, data_path=str(path))
    log.write_bytes(pickle.dumps(frames))
    navsim.load_log.cache_clear()
    return root


def content(task, scene):
    "The kinds of the parts of MTDrive's prompt, and its picture."
    parts = task.prompt(scene)[0]["content"]
    return [p["type"] for p in parts], next((p["image"] for p in parts if p["type"] == "image"), None)


def test_a_prompt_of_navsims_logs_has_its_picture(tmp_path):
    profile = load_profile("mtdrive", "smoke", images="required", image_size=(56, 28))
    shards = prepare("navsim", navsim_logs(tmp_path), tmp_path / "shards", require=("expert",), references=False)
    for k, scene in enumerate(shards):
        kinds, picture = content(task_for(profile), scene)
        assert kinds == ["image", "text"] and abs(picture.getpixel((9, 9))[0] - 12 * (k + 3)) < 4
        assert content(task_for(profile, images="grey"), scene)[0] == ["image", "text"]
        assert content(task_for(load_profile("mtdrive", "smoke")), scene)[0] == ["image", "text"]  # auto finds it, too
    for path in (tmp_path / "sensor_blobs/test/log/CAM_F0").iterdir():
        path.unlink()
    for images in ("auto", "grey"):
        with pytest.raises(SceneError, match=f"scene {scene.id}, .*CAM_F0.*: the image of CAM_F0 at .* is not there"):
            task_for(profile, images=images).prompt(scene)
    blind = replace(scene, cameras={})
    for images in ("auto", "grey"):
        with pytest.raises(SceneError, match=f"scene {scene.id}: no camera 'CAM_FRONT'; it has none"):
            task_for(profile, images=images).prompt(blind)
    assert content(task_for(load_profile("mtdrive", "smoke")), blind)[0] == ["text"]


def recorded(scene, files):
    "A scene of the town whose cameras have NAVSIM's names, and files."
    times = 0.5 * np.arange(-4, 4)
    rig = {view: c for view, c in scene.cameras.items() if view in files}
    rig = {OWN[v]: replace(c, name=OWN[v], files={t: str(files[v]) for t in times}) for v, c in rig.items()}
    return replace(scene, source="navsim", cameras=rig)


LACKS = {  # what is wrong with the front view -> the reason that is told
    "": "no camera 'CAM_FRONT'; it has CAM_FRONT_LEFT, CAM_FRONT_RIGHT, CAM_BACK, CAM_BACK_LEFT, CAM_BACK_RIGHT",
    "gone.jpg": "the image of CAM_F0 at {} s is not there",
    "page.jpg": "the image of CAM_FRONT at {:g} s cannot be opened",
    "cut.jpg": "the image of CAM_FRONT at {:g} s cannot be opened",
}
FIRST = dict(autodrive_p3=-0.5, minddriver=0.5)  # the time of the first picture that a system asks for
MORE = dict(mtdrive=dict(turns=2), driveagent=dict(cluster_by="thumbnails", reviewer="none"))
ROWS = dict(mtdrive="data_single/single", autodrive_p3="data/p3", minddrive="data/train", minddriver="data/drives")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("system", ["mtdrive", "driveagent", "autodrive_p3", "minddriver", "minddrive"])
def test_a_scene_without_its_picture_is_left_out_and_counted(tmp_path, system):
    "The files are told apart by what they hold; rows are made of what is left, each with a picture."
    whole = red(99, tmp_path / "whole.jpg")
    (tmp_path / "page.jpg").write_text("<html>")
    (tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:-40])
    good = dict.fromkeys(toy_cameras(), whole)
    for split, seed in dict(train=0, heldout=1_000_000).items():
        made = scenes(COUNT, seed=seed)
        for k, name in enumerate(LACKS):
            files = {v: f for v, f in good.items() if v != "CAM_FRONT"}
            made[k] = recorded(made[k], files | ({"CAM_FRONT": tmp_path / name} if name else {}))
        made[len(LACKS) :] = [recorded(s, good) for s in made[len(LACKS) :]]
        write_shards([made], tmp_path / "source" / split, {}, system != "minddrive")
    asked = dict(source=str(tmp_path / "source"), train_scenes=COUNT, eval_scenes=COUNT, images="required")
    profile = load_profile(system, "smoke", **asked, **MORE.get(system, {}))
    pipeline, out = importlib.import_module(f"drivelit.{system}.pipeline"), start(tmp_path / "run", profile)
    told = pipeline.FUNCTIONS["scenes"](out, profile, 0)
    reasons = [r.format(FIRST.get(system, 0.0))[:100] for r in LACKS.values()]
    wanted = {r: reasons.count(r) for r in reasons}
    assert told["lacking" if system == "minddrive" else "left_out"] == dict(train=wanted, heldout=wanted)
    assert len(load_scenes(out, "train")) == told["train"] == COUNT - len(LACKS)
    if system in ROWS:
        pipeline.FUNCTIONS[ROWS[system].split("/")[0]](out, profile, 0)
        rows = read_rows(out / f"{ROWS[system]}.parquet")
        assert len(rows) and all(len(row["images"]) for row in rows)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_scene_with_a_picture_is_an_error_with_the_count(tmp_path):
    for split in ("train", "heldout"):
        blind = [replace(s, source="navsim", cameras={}) for s in scenes(3, seed=len(split))]
        write_shards([blind], tmp_path / split, {})
    profile = load_profile("mtdrive", "smoke", source=str(tmp_path), images="required", train_scenes=3, eval_scenes=3)
    pipeline, out = importlib.import_module("drivelit.mtdrive.pipeline"), start(tmp_path / "run", profile)
    with pytest.raises(RunError, match="no scene of train is left: 3 x no camera 'CAM_FRONT'; it has none"):
        pipeline.FUNCTIONS["scenes"](out, profile, 0)


def of_navsim(root):
    return next(iter(navsim.scenes(navsim_logs(root)))), "CAM_F0"


def of_nuscenes(root):
    "The tables of a drive with nuScenes' six cameras."
    write_nuscenes(root, 0.5 * np.arange(20))

    def table(name):
        return root / "v1.0-mini" / f"{name}.json"

    rows = {name: json.loads(table(name).read_text()) for name in ("sensor", "calibrated_sensor", "sample_data")}
    for view in toy_cameras():
        about = dict(translation=[1.5, 0, 1.5], rotation=[0.5, -0.5, 0.5, -0.5], camera_intrinsic=np.eye(3).tolist())
        rows["sensor"].append(dict(token=view, channel=view, modality="camera"))
        rows["calibrated_sensor"].append(dict(token=f"c {view}", sensor_token=view, **about))
        for d in [d for d in rows["sample_data"] if d["calibrated_sensor_token"] == "c"]:
            path = f"samples/{view}/{d['token'][2:]}.jpg"
            red(50, root / path)
            more = dict(calibrated_sensor_token=f"c {view}", filename=path, width=64, height=36, prev="", next="")
            rows["sample_data"].append(d | dict(token=f"{view} {d['token']}") | more)
    for name, content in rows.items():
        table(name).write_text(json.dumps(content))
    return next(iter(nuscenes.scenes(root))), "CAM_FRONT"


def of_bench2drive(root):
    "A clip with Bench2Drive's six cameras."
    import gzip

    write_bench2drive(root, 0.1 * np.arange(70))
    (clip,) = root.iterdir()
    for path in (clip / "anno").iterdir():
        anno = json.loads(gzip.decompress(path.read_bytes()))
        lens = dict(cam2ego=np.eye(4).tolist(), intrinsic=np.eye(3).tolist())
        anno["sensors"] = dict.fromkeys(bench2drive.FOLDERS, lens)
        path.write_bytes(gzip.compress(json.dumps(anno).encode()))
        red(50, clip / "camera/rgb_front" / f"{path.name.split('.')[0]}.jpg")
    return next(iter(bench2drive.scenes(root))), "CAM_FRONT"


def of_drivelm(root):
    images = {view: red(50, root / f"{view}.jpg") for view in toy_cameras()}
    return drivelm.to_scene(drivelm.KeyFrame("a", "b", "", images, {}, ())), "CAM_FRONT"


READERS = dict(navsim=of_navsim, nuscenes=of_nuscenes, bench2drive=of_bench2drive, drivelm=of_drivelm)


@pytest.mark.parametrize("reader", READERS)
def test_the_front_view_has_one_name_and_the_logs_own(tmp_path, reader):
    "123D's is in test_123d, AlpaSim's and CARLA's are in their notebooks; Argoverse 2's reader has no pictures."
    scene, own = READERS[reader](tmp_path)
    assert {view_name(v) for v in scene.cameras} == set(scene.cameras) <= set(VIEW_NAMES)
    assert set(toy_cameras()) <= set(scene.cameras)  # a system of six views finds each
    assert scene.camera("CAM_FRONT") is scene.camera(own) is scene.cameras["CAM_FRONT"]
    assert get_image(scene).size == get_image(scene, own).size


@pytest.mark.skipif("DRIVELIT_SAMPLES" not in os.environ, reason="DRIVELIT_SAMPLES is not set")
def test_a_name_stands_for_a_direction():
    "As the calibrations of Argoverse 2 and nuScenes have it: no camera looks elsewhere than its name says."
    import pyarrow.feather as feather
    from scipy.spatial.transform import Rotation

    data = Path(os.environ["DRIVELIT_SAMPLES"]) / "data"
    (table,) = data.glob("argoverse2/sensor/*/calibration/egovehicle_SE3_sensor.feather")
    rows = feather.read_table(table).to_pylist()
    mounted = {r["sensor_name"]: Rotation.from_quat([r[q] for q in ("qx", "qy", "qz", "qw")]).as_matrix() for r in rows}
    mounted = {view_name(k): m for k, m in mounted.items() if k.startswith("ring")}
    assert set(mounted) == set(YAW) - {"CAM_BACK"}
    six = {k: c.cam2ego[:3, :3] for k, c in keyframe(data / "nuscenes_mmdet3d_keyframe").items()}
    for view, turned in [*mounted.items(), *six.items()]:
        yaw = np.degrees(np.arctan2(turned[1, 2], turned[0, 2]))
        assert abs((yaw - YAW[view] + 180) % 360 - 180) < 15, (view, yaw)


@pytest.mark.parametrize(("system", "past", "future"), [("autodrive_p3", 5, 6), ("minddriver", 4, 6)])
def test_moments_of_nuscenes_reach_as_far_as_the_profile_needs(tmp_path, system, past, future):
    "A drive of 20 key frames leaves 20 - past - future; each has every picture of the profile's prompts."
    scene, _ = of_nuscenes(tmp_path)
    profile = load_profile(system, "paper")
    made = prepare(
        "nuscenes", tmp_path, tmp_path / "shards", require=(), references=False, **window_of("nuscenes", profile)
    )
    assert len(made) == 20 - past - future
    check = importlib.import_module("drivelit.runs.stages").check_pictures
    for scene in made:
        check(profile, scene)
        assert len(scene.expert.poses) >= future

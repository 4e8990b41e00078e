"""A scene that lacks what its system needs is left out and counted, with the reason, and no later stage stops at it."""

import importlib
from dataclasses import replace

import pytest

from drivelit.data.rows import read_rows
from drivelit.data.shards import write_shards
from drivelit.io.files import RunError
from drivelit.runs.profiles import load_profile
from drivelit.runs.stages import load_scenes, start
from drivelit.scene.core import Trajectory, to_json
from drivelit.town.scenes import scenes

LACKS = dict(
    expert=lambda s: replace(s, expert=None),
    rest=lambda s: replace(s, expert=Trajectory(s.expert.poses[:4])),  # two seconds of it
    camera=lambda s: replace(s, cameras={k: c for k, c in s.cameras.items() if k == "CAM_BACK"}),
    history=lambda s: replace(s, ego=replace(s.ego, times=s.ego.times[-2:], poses=s.ego.poses[-2:])),  # half a second
)
NO_CAMERA = "no camera 'CAM_FRONT'; it has CAM_BACK"
POSES = "expert: {} poses every 0.5 s are needed, there are {}"
AHEAD = "the next image is wanted at 0.5 s; the expert drives from 0 to 0.0 s"
SHORT = "the ego's history begins at -0.5 s, not -1.0 s"
SYSTEMS = dict(  # what is left out of all that is learnt from, by its reason, and the files of rows that are made
    mtdrive=(
        {"expert: no expert of 8 poses": 2, "ego.times: reaches back 0.50 s, the prompt needs 1.5 s": 1},
        ["data_single/single"],
    ),
    driveagent=({NO_CAMERA: 1}, ["data/full", "data/surround", "vqa/train", "vqa/test"]),
    autodrive_p3=(
        {
            "expert: key objects are those of a plan, and there is none": 1,
            POSES.format(8, 4): 1,
            NO_CAMERA: 1,
            SHORT: 1,
        },
        ["data/p3"],
    ),
    minddriver=({AHEAD: 1, POSES.format(6, 4) + " every 0.5 s": 1, NO_CAMERA: 1, SHORT: 1}, ["data/drives"]),
)
# Without what some systems need, others can still judge: nobody compares a plan of MTDrive with the expert's.
HELDOUT = {"mtdrive": {"expert: no expert of 8 poses": 1, "ego.times: reaches back 0.50 s, the prompt needs 1.5 s": 1}}
MORE = dict(
    driveagent=dict(cluster_by="thumbnails", reviewer="none"), autodrive_p3=dict(frames=3), minddriver=dict(history=2)
)
COUNT = 24


def started(folder, system, spoil, kind="json"):
    "A run whose scenes lie in a folder; some of them are spoilt."
    for split, seed in dict(train=0, heldout=1_000_000).items():
        made = [spoil(k, s) for k, s in enumerate(scenes(COUNT, seed=seed))]
        if kind == "shards":
            write_shards([made], folder / "source" / split, {})
            continue
        (folder / "source" / split).mkdir(parents=True)
        for k, scene in enumerate(made):
            to_json(scene, folder / "source" / split / f"{k:02d}.json")
    sizes = dict(source=str(folder / "source"), train_scenes=COUNT, eval_scenes=COUNT)
    profile = load_profile(system, "smoke", **sizes, **MORE.get(system, {}))
    pipeline = importlib.import_module(f"drivelit.{system}.pipeline")
    return pipeline, profile, start(folder / "run", profile)


def some_lack(k, scene):
    "The first few lack one thing each."
    return LACKS[name](scene) if (name := dict(enumerate(LACKS)).get(k)) else scene


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", ["json", "shards"])
def test_what_lacks_something_is_left_out_and_counted(tmp_path, system, kind):
    pipeline, profile, out = started(tmp_path, system, some_lack, kind)
    wanted, files = SYSTEMS[system]
    made = pipeline.FUNCTIONS["scenes"](out, profile, 0)
    assert made["left_out"] == dict(train=wanted, heldout=HELDOUT.get(system, wanted))
    assert made["train"] == len(load_scenes(out, "train")) == COUNT - sum(wanted.values())
    for stage in dict.fromkeys(f.split("/")[0] for f in files):
        pipeline.FUNCTIONS[stage](out, profile, 0)
    left = {s.id for split in ("train", "heldout") for s in load_scenes(out, split)}
    for file in files:
        there = set(read_rows(out / f"{file}.parquet").column("scene_id"))
        assert there and there <= left, file


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_left_is_an_error_with_the_counts(tmp_path, system):
    lack = LACKS["camera" if system == "driveagent" else "expert"]
    pipeline, profile, out = started(tmp_path, system, lambda k, s: lack(s))
    reason = next(iter(SYSTEMS[system][0]))
    with pytest.raises(RunError) as e:
        pipeline.FUNCTIONS["scenes"](out, profile, 0)
    assert "no scene of train is left" in str(e.value) and f"{COUNT} x {reason}" in str(e.value)
    assert profile.source in str(e.value)


@pytest.mark.parametrize("system", SYSTEMS)
def test_moments_that_begin_beside_the_lane_are_learnt_from(tmp_path, system):
    "They may begin later, too, and then know less of the future."
    more = MORE.get(system, {}) | (dict(train_late=0.0) if system == "driveagent" else {})
    profile = load_profile(system, "smoke", train_scenes=COUNT, train_offset=1.0, **more)
    pipeline, out = importlib.import_module(f"drivelit.{system}.pipeline"), start(tmp_path / "run", profile)
    files = SYSTEMS[system][1]
    for stage in dict.fromkeys(["scenes", *(f.split("/")[0] for f in files)]):
        pipeline.FUNCTIONS[stage](out, profile, 0)
    moved = {s.id for s in load_scenes(out, "train") if "lateral_offset" in s.meta}
    rows = set(read_rows(out / f"{files[0]}.parquet").column("scene_id"))
    assert len(moved) > COUNT / 2 and rows & moved


def test_no_recorded_moment_to_imitate_is_an_error_with_the_counts(tmp_path, monkeypatch):
    "MindDrive counts its moments while it makes rows of them."
    from drivelit.minddrive import pipeline

    def filed(s):
        return {k: replace(c, files={0.0: "there.png"}) for k, c in s.cameras.items()}

    moments = [replace(s, cameras=filed(s), expert=None) for s in scenes(3)]
    monkeypatch.setattr(pipeline, "load_scenes", lambda out, split: moments)
    profile = load_profile("minddrive", "smoke")
    with pytest.raises(RunError, match="no moment of train is left to learn from: .*3 x recorded moments left out: "):
        pipeline.run_data(start(tmp_path / "run", profile), profile, 0)

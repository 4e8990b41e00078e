"""A picture of a recorded scene that is missing, cut, packed or of another time is one sentence that names it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pages import names_of
from PIL import Image

from drivelit.scene import cameras
from drivelit.scene.cameras import check_image, check_view, get_image, next_image, open_image, toy_cameras
from drivelit.scene.core import SceneError, Trajectory

car, street = names_of("00_scene/30_cameras", cameras, "car", "street")
WAY = Trajectory([[2.0 * k, 0.0, 0.0] for k in range(1, 9)])
AHEAD = replace(street([car("ahead", 16.0, 0.0)]), expert=WAY)


def refused(words, look, *args, **options):
    with pytest.raises(SceneError) as e:
        look(*args, **options)
    assert words in str(e.value), str(e.value)


def drive(files):
    "The scene as a recorded one, with pictures at these times."
    front = replace(toy_cameras()["CAM_FRONT"], files={t: str(f) for t, f in files.items()})
    return replace(AHEAD, source="recorded", cameras=dict(CAM_FRONT=front))


@pytest.fixture
def files(tmp_path_factory):
    "Pictures of now and of half a second later."
    folder = tmp_path_factory.mktemp("files")
    for t, colour in ((0.0, "red"), (0.5, "blue")):
        Image.new("RGB", (8, 4), colour).save(folder / f"{t}.png")
    return {t: folder / f"{t}.png" for t in (0.0, 0.5)}


def test_a_picture_of_another_time(files):
    refused("no camera can look into the future", get_image, drive(files), time=0.5)
    refused("no image within 0.3 s of 0.0 s", get_image, drive({0.2: files[0.5]}))
    refused("no image within 0.3 s of 0.5 s", next_image, drive({0.0: files[0.0]}))
    refused("no image within 0.3 s of 0.5 s", check_view, drive({0.0: files[0.0]}))
    refused("the expert drives from 0 to 4.0 s", next_image, AHEAD, time=0.0)
    refused("the expert drives from 0 to 0.0 s", next_image, replace(AHEAD, expert=None))


def test_a_next_picture_that_cannot_be_seen(files):
    refused("the image of CAM_FRONT at 0.5 s is not there", check_view, drive({0.5: "gone.png"}))
    cut = files[0.5].with_name("half.png")
    cut.write_bytes(files[0.5].read_bytes()[:50])
    half = drive({0.5: cut})
    refused("the image of CAM_FRONT at 0.5 s cannot be opened", check_view, half, opens=True)
    assert check_view(half) is None  # it is there
    assert check_view(drive(files), opens=True) is None and check_view(AHEAD, time=4.0) is None


def test_a_picture_that_is_not_there(files):
    assert check_image(drive({0.0: files[0.0]})) is None and check_image(AHEAD, time=-0.5) is None
    refused("the image of CAM_FRONT at 0.0 s is not there", check_image, drive({0.0: "gone.png"}))
    refused("no camera 'CAM_UP'", check_image, AHEAD, "CAM_UP")


@pytest.mark.parametrize("name", ["cut.png", "page.png", "empty.png"])
def test_a_picture_that_cannot_be_opened(files, name):
    content = {"cut.png": files[0.0].read_bytes()[:50], "page.png": b"<html>", "empty.png": b""}[name]
    file = files[0.0].with_name(name)
    file.write_bytes(content)
    damaged = drive({0.0: file})
    assert check_image(damaged) is None  # it is there
    refused("image of CAM_FRONT at 0 s cannot be opened", check_image, damaged, opens=True)
    refused(f"scene {damaged.id}: CAM_FRONT: {file}", get_image, damaged)


def test_a_picture_with_more_behind_its_end(files):
    "Not its last bytes, and a decoder reads it all the same."
    file = files[0.0].with_name("tail.png")
    file.write_bytes(files[0.0].read_bytes() + b"more")
    assert check_image(drive({0.0: file}), opens=True) is None


def test_a_picture_in_an_archive(files):
    folder = files[0.0].parent
    packed = Path(shutil.make_archive(str(folder / "samples"), "zip", folder, "0.0.png")) / "0.0.png"
    refused("samples.zip: an archive; unpack it", check_image, drive({0.0: packed}))
    refused("samples.zip: an archive; unpack it", open_image, str(packed))

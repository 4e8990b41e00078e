"""The file of an agent's motion that lacks something is one sentence that names the step and the field."""

import json

import pytest

from drivelit.metrics.closed_loop import read_comfort

STEP = dict(
    acceleration=[1.0, 0.0, 0.0],
    angular_velocity=[0.0, 0.0, 0.1],
    forward_vector=[1.0, 0.0, 0.0],
    right_vector=[0.0, -1.0, 0.0],
)


@pytest.fixture
def steps():
    return {str(k): dict(STEP) for k in range(30)}


def refused(words, file):
    with pytest.raises(ValueError) as e:
        read_comfort(file)
    assert words in str(e.value), str(e.value)


def test_a_whole_file_is_read(steps, tmp_path):
    (tmp_path / "metric_info.json").write_text(json.dumps(steps))
    assert read_comfort(tmp_path / "metric_info.json") == 1.0


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s["3"].pop("acceleration"), "step 3: acceleration: not three numbers"),
        (lambda s: s["3"].update(right_vector=[1, 2]), "step 3: right_vector: not three numbers"),
        (lambda s: s["3"].update(angular_velocity=[0, 0, float("nan")]), "hold NaN or infinity"),
        (lambda s: [s.pop(k) for k in list(s)[2:]], "2 frames; comfort needs three"),
    ],
    ids=["missing", "two of three", "NaN", "two frames"],
)
def test_steps_that_are_damaged(steps, tmp_path, change, words):
    change(steps)
    (tmp_path / "metric_info.json").write_text(json.dumps(steps))
    refused(words, tmp_path / "metric_info.json")


def test_files_that_hold_no_steps(tmp_path):
    (tmp_path / "metric_info.json").write_text("[]")
    refused("not an object of steps", tmp_path / "metric_info.json")
    refused("there is no such file", tmp_path / "none.json")

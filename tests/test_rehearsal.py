"""The papers' own runs at everything but their size: model folders of the released layout, made-up logs, two processes.

One profile is rehearsed always; all seven, by command and by papermill, with DRIVELIT_REHEARSE=all:
    DRIVELIT_REHEARSE=all python -m pytest tests/test_rehearsal.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivelit.testing.bench2drive import make_bench2drive
from drivelit.testing.navsim import make_navsim
from drivelit.testing.nuscenes import make_nuscenes
from drivelit.testing.qwen import make_qwen

ROOT = Path(__file__).parents[1]
whole = pytest.mark.skipif(os.environ.get("DRIVELIT_REHEARSE") != "all", reason="DRIVELIT_REHEARSE is not all")

MODELS = {"mtdrive.paper": "7b"}  # all others have the small one
MAKERS = dict(
    navsim=(make_navsim, dict(train=("trainval", "navtrain.yaml"), heldout=("test", "navtest.yaml"))),
    nuscenes=(make_nuscenes, dict(train=("train",), heldout=("val",))),
    bench2drive=(make_bench2drive, dict(train=(), heldout=())),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("rehearsal")


def drivelit(*args, **env):
    "The command, as a user types it; what it printed."
    told = dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false") | env
    line = [sys.executable, "-m", "drivelit", *map(str, args)]
    ended = subprocess.run(line, env=os.environ | told, capture_output=True, text=True, timeout=7200)
    return ended.returncode, ended.stdout + ended.stderr


def model_folder(root, size):
    "A narrow model in the layout that is released."
    folder = root / f"qwen-{size}"
    if not folder.exists():
        make_qwen(folder, size)
    return folder


def scenes_of(root, kind, name):
    "A run's source, prepared from made-up logs with the window that the profile needs."
    make, splits = MAKERS[kind]
    data, folder = root / kind, root / f"{kind}-{name}"
    if not data.exists():
        make(data)
    for split, which in splits.items():
        if (folder / split).exists():
            continue
        of = [*(("--split", which[0]) if which else ()), *(("--tokens", data / which[1]) if which[1:] else ())]
        code, said = drivelit("prepare", kind, data, folder / split, "--for", name, "--workers", 0, *of)
        assert code == 0, said[-2000:]
    return folder


def rehearse(root, name, kind, stages=(), **keys):
    "Rehearse a profile by command: what rehearsal.json says, and the page."
    size, out = MODELS.get(name, "3b"), root / f"out-{name}"
    keys = dict(model=model_folder(root, size), source=scenes_of(root, kind, name)) | keys
    sets = [w for k, v in keys.items() for w in ("--set", f"{k}={v}")]
    only = ["--stages", ",".join(stages)] if stages else []
    code, page = drivelit("rehearse", name, "--out", out, *sets, *only)
    return code, json.loads((out / "rehearsal.json").read_text()), page


def test_tuning_and_reinforcement_in_two_processes(root):
    "AutoDrive-P3 on NAVSIM: weights are shared out, players play, and what was planned is what was measured."
    name = "autodrive_p3.navsim"
    code, told, page = rehearse(root, name, "navsim", ["rl"], teacher="scripted", new_tokens=24)
    rows = told["stages"]
    assert {k: r["state"] for k, r in rows.items()} == dict.fromkeys(("scenes", "data", "sft", "rl"), "ran"), page
    assert code == 0, page
    for stage in ("sft", "rl"):
        row = rows[stage]
        assert {s["rank"] for s in row["seen"]} >= {"0", "1"}
        assert row["bytes"]["checkpoint"] == pytest.approx(row["planned"]["checkpoint"], rel=0.02)
        assert row["update_seconds"] > 0 and row["whole"]["updates"] > 0 and row["whole"]["plays"] > 0
    encoded, played = rows["sft"]["account"]["encoded"], rows["rl"]["account"]["played"]
    assert encoded["pictures"] == encoded["rows"] == 2 * 4  # two updates of two passes on two devices
    assert (
        played["pictures"] == played["rows"] == 2 * 2 * 8 + 8
    )  # two rollouts, two scenes, groups of eight; and the exam
    assert max(encoded["tokens_most"], played["tokens_most"]) < 3600
    assert any("train_scenes: 103,288 are wanted, and there are at most" in t for t in told["obstacles"])
    assert any(line.startswith("  stages: 4 ran") for line in page.splitlines())

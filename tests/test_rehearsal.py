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
    navsim=(make_navsim, dict(train="--tokens=navtrain.yaml", heldout="--tokens=navtest.yaml")),
    nuscenes=(make_nuscenes, dict(train="--split=train", heldout="--split=val")),
    bench2drive=(make_bench2drive, dict(train="", heldout="")),
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
        which = [which.replace("=", f"={data}/") if "yaml" in which else which] if which else []
        code, said = drivelit("prepare", kind, data, folder / split, "--for", name, "--workers", 0, *which)
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

"""The papers' own runs at everything but their size: model folders of the released layout, made-up logs, two processes.

One profile is rehearsed always; all seven, by command and by papermill, with DRIVELIT_REHEARSE=all:
    bash ci/rehearse.sh
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
import test_carla

from drivelit.policy.model import load_policy
from drivelit.testing.bench2drive import make_bench2drive
from drivelit.testing.drives import FAMILIES
from drivelit.testing.navsim import make_navsim
from drivelit.testing.nuscenes import make_nuscenes
from drivelit.testing.qwen import make_qwen
from drivelit.testing.vllm import StubVLLM

ROOT = Path(__file__).parents[1]
whole = pytest.mark.skipif(os.environ.get("DRIVELIT_REHEARSE") != "all", reason="DRIVELIT_REHEARSE is not all")

MODELS = {"mtdrive.paper": "7b"}  # all others have the small one
MAKERS = dict(
    navsim=(make_navsim, dict(train=("trainval", "navtrain.yaml"), heldout=("test", "navtest.yaml"))),
    nuscenes=(make_nuscenes, dict(train=("train",), heldout=("val",))),
    bench2drive=(make_bench2drive, dict(train=(), heldout=())),
)
MADE = {"driveagent.paper": dict(drives_each=10, moments=8, history=3, future=16)}  # eight seconds of future


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
    folder = root / f"{kind}-{name}"
    for split, which in splits.items():
        if (folder / split).exists():
            continue
        data = root / (f"made-{name}" if name in MADE else kind if which else f"{kind}-{split}")
        if not data.exists():
            # clips have no splits: others are driven for the second one
            more = {} if which else dict(families=FAMILIES[:2] if split == "train" else FAMILIES[2:4])
            make(data, **MADE.get(name, {}), **more)
        of = [*(("--split", which[0]) if which else ()), *(("--tokens", data / which[1]) if which[1:] else ())]
        code, said = drivelit("prepare", kind, data, folder / split, "--for", name, "--workers", 0, *of)
        assert code == 0, said[-2000:]
    return folder


def rehearse(root, name, kind, stages=(), how="", env=None, more=(), **keys):
    "Rehearse a profile by command, with more options: what rehearsal.json says, and the page."
    size, out = MODELS.get(name, "3b"), root / f"out-{name}-{how}"
    keys = dict(model=model_folder(root, size), source=scenes_of(root, kind, name)) | keys
    sets = [w for k, v in keys.items() for w in ("--set", f"{k}={v}")]
    only = ["--stages", ",".join(stages)] if stages else []
    code, page = drivelit("rehearse", name, "--out", out, *sets, *only, *more, **(env or {}))
    assert (out / "rehearsal.json").exists(), page
    return code, json.loads((out / "rehearsal.json").read_text()), page


def test_tuning_and_reinforcement_in_two_processes(root):
    "AutoDrive-P3 on NAVSIM: weights are shared out, rollout workers play, and what was planned is what was measured."
    name = "autodrive_p3.navsim"
    code, told, page = rehearse(root, name, "navsim", ["rl"], teacher="scripted", max_new_tokens=24)
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
    # two rollouts of two scenes in groups of eight; and the evaluation
    assert played["pictures"] == played["rows"] == 2 * 2 * 8 + 8
    assert max(encoded["tokens_most"], played["tokens_most"]) < 3600
    assert any("train_scenes: 103,288 are wanted, and there are at most" in t for t in told["obstacles"])
    assert any(line.startswith("  stages: 4 ran") for line in page.splitlines())


PLAIN = dict(depth="exact", detector="exact", judge="scripted", reader_small="scripted", reader_large="scripted")
PLAIN |= dict(reviewer="none", cluster_by="thumbnails")
DREAMS = dict(codec="base", encoder="base", inception="none", judge="scripted")
WHOLE = {
    "driveagent.paper": ("nuscenes", PLAIN),
    "autodrive_p3.paper": ("nuscenes", {}),
    "autodrive_p3.navsim": ("navsim", {}),
    "minddriver.paper": ("nuscenes", DREAMS),
    "minddriver.bench2drive": ("bench2drive", DREAMS),
}


def all_ran(told, page):
    "No stage has failed, none was without pictures, and checkpoints are as large as planned."
    assert {r["state"] for r in told["stages"].values()} == {"ran"}, page
    for row in told["stages"].values():
        had = {k: row["account"][k] for k in ("encoded", "played") if k in row["account"]}
        assert "encoded" not in had or had["encoded"]["pictures"] >= had["encoded"]["rows"]
        # beside the policy some evaluations have a driver that sees nothing
        assert "played" not in had or had["played"]["pictures"] >= 0.9 * had["played"]["rows"]
    # adapters are smaller here than the table of words, which PEFT writes beside them
    trained = [r for r in told["stages"].values() if r["bytes"]["checkpoint"] and r["planned"]["checkpoint"] > 1e7]
    assert trained
    for row in trained:
        assert row["bytes"]["checkpoint"] == pytest.approx(row["planned"]["checkpoint"], rel=0.03)


@whole
@pytest.mark.parametrize("name", WHOLE)
def test_every_stage_of_a_profile(root, name):
    kind, keys = WHOLE[name]
    code, told, page = rehearse(root, name, kind, teacher="scripted", **keys)
    all_ran(told, page)
    assert code == 0, page


@whole
@pytest.mark.parametrize("how", ["command", "papermill"])
def test_drives_in_simulators(root, how, tmp_path, monkeypatch):
    "MindDrive: experts of recorded moments, and drives of two collectors in stubs of CARLA."
    client, routes = tmp_path / "client", tmp_path / "routes"
    for folder in (client, routes):
        folder.mkdir()
    (client / "carla.py").write_text(test_carla.CLIENT)
    for split, numbers in dict(train=(1, 2), heldout=(3, 4)).items():
        text = "".join(test_carla.WAY.format(k, 26 + k) for k in numbers)
        (routes / f"{split}.xml").write_text(f"<routes>{text}</routes>")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(client), str(ROOT)]))
    monkeypatch.setenv("HERE", str(client))
    servers = ",".join(f"here:{2000 + k}" for k in range(24))
    keys = dict(simulators=servers, routes=routes, chat="none", scenario="none")
    if how == "command":
        code, told, page = rehearse(root, "minddrive.paper", "bench2drive", **keys)
        assert code == 0, page
    else:
        told, page = by_papermill(root, "70_run.ipynb", "minddrive.paper", "bench2drive", **keys)
    assert {r["state"] for r in told["stages"].values()} == {"ran"}, page
    assert told["stages"]["rl"]["whole"]["plays"] > 0 and told["stages"]["rl"]["whole"]["updates"] > 0


@whole
def test_servers_play(root):
    "The weights of every rollout go to a server, and its words come back."
    folder = model_folder(root, "3b")
    with StubVLLM(load_policy(folder), name=str(folder), longest=8192) as server:
        keys = dict(
            teacher="scripted", max_new_tokens=24, rollout_servers=server.root, rollout_workers=0, frames_as="images"
        )
        code, told, page = rehearse(root, "autodrive_p3.navsim", "navsim", ["rl"], "served", **keys)
        all_ran(told, page)
    assert code == 0 and [path for path, _ in server.heard].count("/collective_rpc") >= 2, page


def by_papermill(root, notebook, name, kind, **keys):
    "Rehearse a profile by its run notebook: what rehearsal.json says, and what the notebook printed."
    system, profile = name.split(".")
    out, done, mine = root / f"out-{name}-papermill", root / f"{name}.ipynb", root / f"{name}.ini"
    rows = "".join(f"{k} = {v}\n" for k, v in keys.items())
    mine.write_text(f"[{system}.mine]\nlike = {profile}\n{rows}")  # papermill's parameters are few
    given = dict(profile="mine", settings=str(mine), out=str(out), source=str(scenes_of(root, kind, name)))
    given |= dict(model=str(model_folder(root, MODELS.get(name, "3b"))), rehearse=True)
    path = next((ROOT / "nbs").glob(f"5*_{system}/{notebook}"))
    papermill.execute_notebook(path, done, given, kernel_name="python3", cwd=path.parent, progress_bar=False)
    cells = nbformat.read(done, 4).cells
    page = "".join(o.get("text", "") for c in cells if c.cell_type == "code" for o in c.outputs)
    return json.loads((out / "rehearsal.json").read_text()), page


@whole
def test_every_stage_by_papermill(root):
    told, page = by_papermill(root, "30_run.ipynb", "mtdrive.paper", "navsim")
    all_ran(told, page)
    assert "the paper: " in page and "hours" in page


@whole
@pytest.mark.parametrize("name", WHOLE)
def test_every_stage_of_the_others_by_papermill(root, name):
    kind, keys = WHOLE[name]
    told, page = by_papermill(root, "70_run.ipynb", name, kind, teacher="scripted", **keys)
    all_ran(told, page)


# profile -> data, the first stage that cannot run, and what its line names; no stage needs more than its profile has
AWAY = {
    "driveagent.paper": ("nuscenes", "scenes", "localhost:8002"),
    "autodrive_p3.paper": ("nuscenes", "data", "localhost:8000"),
    "autodrive_p3.navsim": ("navsim", "data", "localhost:8000"),
    "minddriver.paper": ("nuscenes", "data", "$INCEPTION"),
    "minddriver.bench2drive": ("bench2drive", "data", "$MOVQGAN"),
    "minddrive.paper": ("bench2drive", "scenes", "$BENCH2DRIVE_ROUTES"),
}


@whole
@pytest.mark.parametrize("name", AWAY)
def test_what_is_away(root, name):
    "The stages that need no server and no file run, the page names what is not there, and no other stage is reached."
    kind, failed, line = AWAY[name]
    told, page = by_papermill(root, "70_run.ipynb", name, kind)
    states = {k: r["state"] for k, r in told["stages"].items()}
    assert [states.pop("scenes")] == ["failed" if failed == "scenes" else "ran"]
    assert (states.pop("data"), failed) in (("failed", "data"), ("not reached", "scenes"))
    assert set(states.values()) == {"not reached"}
    assert line in told["stages"][failed]["line"] and line in page

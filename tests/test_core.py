"""`pip install drivelit` has no torch: scenes, scores, worlds and plots work without it; training names its extra."""

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAIN = {
    "io.weights",
    "metrics.images",
    "rollout.core",
    "rollout.closed_loop",
}  # in the core's packages, and need a model
ALSO = (
    *("policy.text", "policy.video", "data.shards", "data.rows", "runs.profiles", "runs.preview", "runs.prepare"),
    *("runs.stages", "runs.evaluate", "bridges.score", "bridges.known", "bridges.navsim", "bridges.nuscenes"),
    *("bridges.leaderboard", "bridges.alpasim", "bridges.openenv"),
)
WITHOUT = """
import importlib, importlib.machinery, pkgutil, sys
finder, hidden = importlib.machinery.PathFinder, {hidden}
real = finder.find_spec
there = lambda cls, name, path=None, target=None: None if name.split(".")[0] in hidden else real(name, path, target)
finder.find_spec = classmethod(there)
"""
HIDDEN = repr(
    {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "tensorboard", "safetensors", "tokenizers"}
)


def core(code, *words, folder=ROOT):
    "What a program prints where the packages of the extra `train` are hidden."
    program, env = WITHOUT.replace("{hidden}", HIDDEN) + code, os.environ | dict(PYTHONPATH=str(ROOT))
    run = partial(subprocess.run, capture_output=True, text=True, env=env)
    done = run([sys.executable, "-c", program, *words], cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


IMPORT = """
before = list(sys.meta_path)
import drivelit
from drivelit.io.extras import TRAIN
assert sys.meta_path == before  # a program's own imports stay as they are
for folder in ("io", "scene", "town", "sources", "metrics", "rollout"):
    package = importlib.import_module(f"drivelit.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        if f"{folder}.{module.name}" in sys.argv[1:]:
            try: importlib.import_module(f"drivelit.{folder}.{module.name}")
            except ModuleNotFoundError as e: assert e.name.partition(".")[0] in TRAIN, (module.name, e)
            else: raise AssertionError(f"{folder}.{module.name} needs nothing of the extra")
        else:
            importlib.import_module(f"drivelit.{folder}.{module.name}")
for name in %r:
    importlib.import_module(f"drivelit.{name}")
try: import drivelit.training.sft
except ImportError as e: print(e)
"""


def test_the_core_imports_without_what_trains():
    assert "No module named 'torch'" in core(IMPORT % (ALSO,), *TRAIN)


SCORE = """
import numpy as np
from drivelit.metrics import epdms, pdm
from drivelit.metrics.kinematics import constant_velocity
from drivelit.rollout.drivers import play, same_speed
from drivelit.rollout.world import World
from drivelit.scene.plot import plot_scene
from drivelit.town.scenes import make_scene
from drivelit.town.routes import routes
scene = make_scene("cruise", 0, 0.5)
plan = constant_velocity(scene)[None]
print(pdm.score(scene, plan).pdms[0], epdms.score(scene, plan).epdms[0])
plot_scene(scene, plans={"constant velocity": plan[0]})
assert play(World(), same_speed, routes(1, "train")[0])
"""


def test_a_plan_is_scored_a_world_driven_and_a_scene_drawn_without_what_trains():
    assert all(0 <= float(x) <= 1 for x in core(SCORE).split())


COMMANDS = """
import contextlib, io, json, os
from drivelit.__main__ import ABOVE, _commands, main
for name in [*_commands.commands, *ABOVE]:
    with contextlib.redirect_stdout(page := io.StringIO()):
        assert main([name, "--help"]) == 0 and "Usage" in page.getvalue(), name
told = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(error := io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        told[words] = main(words.split()), (error.getvalue().splitlines() or [""])[-1], sorted(os.listdir())
print(json.dumps(told))
"""


def test_commands_that_only_convert_or_score_need_no_torch_and_others_end_in_a_sentence(tmp_path):
    (tmp_path / "mine.py").write_text("import numpy as np\ndef plan(scene): return np.zeros((8, 3))\n")
    need = ["run mtdrive.smoke --out made", "rehearse mtdrive.smoke --out made", "pack made sft_single"]
    need += ["evaluate mtdrive.smoke --policy mtdrive --out made", "stage mtdrive made sft_single --profile smoke"]
    told = json.loads(core(COMMANDS, json.dumps(need), folder=tmp_path))
    assert len(told) == len(need)
    for words, (code, sentence, files) in told.items():
        assert code == 2 and sentence.startswith("error: "), (words, sentence)
        assert 'pip install "drivelit[train]"' in sentence, (words, sentence)
        assert files == ["mine.py"], (words, files)  # nothing half-made stays behind
    rows = [dict(id=f"s{k}", poses=[[k + 1.0, 0.0, 0.0]] * 8, parts=[]) for k in range(2)]
    (tmp_path / "plans.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    free = ["score mine.py:plan town - --n 1 --out scored", "submission plans.jsonl s.pkl --agent theirs"]
    told = json.loads(core(COMMANDS, json.dumps(free), folder=tmp_path))
    assert [told[words][0] for words in free] == [0, 0], told
    header, row = (tmp_path / "scored" / "scenes.csv").read_text().splitlines()
    assert "driving_score" in header and "completed" not in row  # it stands still
    assert (tmp_path / "s.pkl").stat().st_size and (tmp_path / "theirs" / "drivelit_replay.py").is_file()


LOADED = """
import sys
{code}
heavy = {{"torch", "transformers", "trl", "datasets", "scipy", "pandas", "matplotlib"}} & set(sys.modules)
print("loaded:", *sorted(heavy))
"""


def loaded(code):
    "Which of the heavy packages a piece of code has imported."
    done = subprocess.run([sys.executable, "-c", LOADED.format(code=code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1].split()[1:]


def test_a_score_imports_numpy_and_shapely_alone():
    assert loaded("import drivelit.metrics.pdm") == []


def test_a_plan_of_a_run_imports_nothing_that_trains():
    plans = [f"main(['plan', '{s}.{p}'])" for s, p in (("mtdrive", "laptop"), ("mtdrive", "paper"))]
    assert loaded("from drivelit.__main__ import main\n" + "\n".join(plans)) == []
    others = [f"main(['plan', '{s}.laptop'])" for s in ("driveagent", "autodrive_p3", "minddriver", "minddrive")]
    found = loaded("from drivelit.__main__ import main\n" + "\n".join(others))
    assert not {"torch", "transformers", "trl", "datasets"} & set(found)


PLAYED = """
from drivelit.mtdrive.formats import fixed_parts, kit_text
from drivelit.mtdrive.pipeline import play
from drivelit.mtdrive.profile import MTDriveProfile
from drivelit.policy.model import load_policy
from drivelit.runs.profiles import load_profile
from drivelit.town.scenes import scenes
profile = load_profile(MTDriveProfile, "smoke", max_new_tokens=4, turns=1)
policy = load_policy("toy", text=kit_text(), fixed=fixed_parts())
assert len(play(policy, scenes(1), profile)) == 1
"""


def test_a_policy_that_only_plays_imports_nothing_that_trains():
    found = set(loaded(PLAYED))
    assert "torch" in found and not {"trl", "datasets"} & found, found


def test_what_the_core_declares_has_no_torch():
    names = " ".join(PROJECT["dependencies"])
    assert not any(n in names for n in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"))

"""`pip install drivelit` has no torch: scenes, scores, worlds and plots work without it; training names its extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAIN = {"scene.weights", "metrics.images", "rollout.core", "rollout.road"}  # in the core's rooms, and need a model
ALSO = ("policy.text", "policy.video", "data.shards", "data.rows", "runs.profiles", "runs.preview", "runs.prepare")
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


def core(code, *words):
    "What a program prints where the packages of the extra `train` are hidden."
    program = WITHOUT.replace("{hidden}", HIDDEN) + code
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


IMPORT = """
import drivelit
for room in ("scene", "metrics", "rollout"):
    package = importlib.import_module(f"drivelit.{room}")
    for module in pkgutil.iter_modules(package.__path__):
        if f"{room}.{module.name}" in sys.argv[1:]:
            try: importlib.import_module(f"drivelit.{room}.{module.name}")
            except ImportError as e: assert 'pip install "drivelit[train]"' in str(e), (module.name, e)
            else: raise AssertionError(f"{room}.{module.name} needs nothing of the extra")
        else:
            importlib.import_module(f"drivelit.{room}.{module.name}")
for name in %r:
    importlib.import_module(f"drivelit.{name}")
try: import drivelit.training.sft
except ImportError as e: print(e)
"""


def test_the_core_imports_without_what_trains():
    told = core(IMPORT % (ALSO,), *TRAIN)
    assert 'pip install "drivelit[train]"' in told


SCORE = """
import numpy as np
from drivelit.metrics import epdms, pdm
from drivelit.metrics.kinematics import constant_velocity
from drivelit.rollout.drivers import play, same_speed
from drivelit.rollout.world import World
from drivelit.scene.plot import plot_scene
from drivelit.scene.town import make_scene
from drivelit.scene.town_routes import routes
scene = make_scene("cruise", 0, 0.5)
plan = constant_velocity(scene)[None]
print(pdm.score(scene, plan).pdms[0], epdms.score(scene, plan).epdms[0])
plot_scene(scene, plans={"constant velocity": plan[0]})
assert play(World(), same_speed, routes(1, "train")[0])
"""


def test_a_plan_is_scored_a_world_driven_and_a_scene_drawn_without_what_trains():
    assert all(0 <= float(x) <= 1 for x in core(SCORE).split())


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


def test_what_the_core_declares_has_no_torch():
    names = " ".join(PROJECT["dependencies"])
    assert not any(n in names for n in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"))

"""A new system is a section and a folder: the six steps of CONTRIBUTING.md, taken in a copy of the repository."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout

TABLE = """
[oneword]
title = One word
notebooks = 58_oneword
run = 70_run.ipynb
package = drivelit.oneword

[oneword.smoke]
max_length = 200
max_new_tokens = 4
train_scenes = 8
eval_scenes = 4
sft_max_steps = 2
sft_batch = 4
rl_scenes = 4
rl_steps = 1
rl_batch = 2
rl_mini_batch = 2
num_generations = 2
far = 6

[oneword.laptop]
[oneword.paper]
sft_gpus = 8
rl_gpus = 8
"""

PROFILE = """
#| default_exp oneword.profile
---
#| export
from typing import ClassVar

from pydantic.dataclasses import dataclass

from drivelit.runs.profiles import Profile, key
---
#| export
@dataclass(frozen=True)
class OneWordProfile(Profile):
    "The numbers of a run."

    system: ClassVar[str] = "oneword"
    far: float = key(5.0, "metres in four seconds that count as going", ge=0)
"""

TASK = """
#| default_exp oneword.task
---
#| export
from drivelit.policy.engines import Completion
from drivelit.rollout.core import Step, Task, TurnState
from drivelit.scene.core import Scene
---
#| export
class OneWordTask(Task):
    "Go or stop?"

    def __init__(self, far: float) -> None:
        self.far = far

    def right(self, scene: Scene) -> str:
        "What the expert does."
        return "go" if scene.expert.poses[-1, 0] > self.far else "stop"

    def prompt(self, scene: Scene) -> list[dict]:
        return [{"role": "user", "content": f"speed {scene.ego.velocity[0]:.0f}"}]

    def step(self, state: TurnState, completion: Completion) -> Step:
        return Step(None, {"reward": float(completion.text.strip() == self.right(state.scene))})
"""

PIPELINE = """
#| default_exp oneword.pipeline
---
#| export
from drivelit.data.rows import make_row, says
from drivelit.oneword.task import OneWordTask
from drivelit.rollout.core import rollout
from drivelit.runs.profiles import rl_options, sft_options
from drivelit.training.sft import train_sft
from drivelit.runs.stages import Stages, load, load_scenes, write_scenes
from drivelit.training.turn_grpo import train_rl
---
#| export
NEEDS = dict(scenes=(), sft=("scenes",), rl=("sft",))
STAGES = Stages("drivelit.oneword", NEEDS, kinds=dict(sft="sft", rl="rl"))
WORDS = ("go", "stop", *(f"speed {v}" for v in range(40)))


def make(out, profile, seed):
    return {split: len(scenes) for split, scenes in write_scenes(out, profile).items()}


def tune(out, profile, seed):
    task = OneWordTask(profile.far)
    talk = lambda s: [*task.prompt(s), says("assistant", task.right(s))]
    rows = [make_row("word", s, talk(s)) for s in load_scenes(out, "train")]
    policy = load(profile.model, profile, seed, text=WORDS)
    return train_sft(policy, rows, STAGES.folder(out, "sft", seed), seed=seed, **sft_options(profile))


def reinforce(out, profile, seed):
    task, policy = OneWordTask(profile.far), load(STAGES.folder(out, "sft", seed) / "final", profile, seed)
    scenes, options = load_scenes(out, "train")[: profile.rl_scenes], rl_options(profile)
    return train_rl(policy, task, scenes, STAGES.folder(out, "rl", seed), "turn", seed=seed, max_turns=1, **options)


FUNCTIONS = dict(scenes=make, sft=tune, rl=reinforce)
"""

RUN = """
from drivelit.oneword.pipeline import STAGES
from drivelit.runs.parameters import run_parameters
from drivelit.runs.stages import start
---
#| parameters
profile: str = "smoke"
out: str = ""
seeds: str = ""
---
run = run_parameters("oneword", profile, out=out, seeds=seeds)
start(run.out, run.profile)
STAGES.run(run.out, run.profile.seeds, workers=0)
print("one word:", STAGES.result(run.out, "rl", run.profile.seeds[0])["stage"])
"""


def notebook(title, source):
    "A notebook from cells between lines of dashes."
    cells = [new_markdown_cell(f"# {title}\n\n> An example of a notebook.")]
    for text in source.strip().split("\n---\n"):
        cell = new_code_cell(text.replace("#| parameters\n", ""))
        if cell.source != text:
            cell.metadata["tags"] = ["parameters"]
        cells.append(cell)
    kernel = dict(kernelspec=dict(name="python3", display_name="python3", language="python"))
    return new_notebook(cells=cells, metadata=kernel)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The repository with one more system, exported."
    home = tmp_path_factory.mktemp("copy")
    for f in filter(None, LISTED.split("\0")):
        if (ROOT / f).exists():
            (home / f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / f, home / f, follow_symlinks=False)
    settings = home / "settings.ini"
    settings.write_text(settings.read_text() + TABLE)
    folder = home / "nbs/58_oneword"
    folder.mkdir()
    for name, source in {"10_task": TASK, "15_profile": PROFILE, "20_pipeline": PIPELINE, "70_run": RUN}.items():
        nbformat.write(notebook(name, source), folder / f"{name}.ipynb")
    call(home, "nbdev-export")
    return home


def call(home, *command):
    "The text that a command prints in the copy."
    home_alone = {k: v for k, v in os.environ.items() if not k.startswith("DRIVELIT_")}
    env = home_alone | dict(PYTHONPATH=str(home), DRIVELIT_NO_SETUP="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_ci_knows_it(copy):
    assert "oneword nbs/58_oneword/70_run.ipynb" in call(copy, sys.executable, "ci/systems.py").splitlines()


def test_the_command_plans_it(copy):
    said = call(copy, sys.executable, "-m", "drivelit", "plan", "oneword.paper")
    assert "[oneword.paper]" in said and re.search(r"far +5", said) and "torchrun" in said


def test_main_runs_it(copy):
    call(copy, "bash", "ci/main.sh", "oneword.smoke")
    done = copy / "runs/oneword-smoke/seed-0/rl/done.json"
    assert json.loads(done.read_text())["stage"] == "rl"
    report = nbformat.read(copy / "runs/oneword-smoke/report.ipynb", 4)
    assert "one word: rl" in str([c.get("outputs") for c in report.cells])


def test_the_map_and_the_drawing_show_it(copy):
    call(copy, sys.executable, "ci/architecture.py")
    call(copy, sys.executable, "ci/readme.py")
    readme, row = copy / "README.md", "| [One word](nbs/58_oneword/70_run.ipynb) | a word | nothing |\n"
    readme.write_text(readme.read_text().replace("| [MTDrive]", f"{row}| [MTDrive]", 1))  # its author's row
    assert "### 58_oneword: One word" in (copy / "nbs/index.ipynb").read_text()
    assert b"58_oneword" in (copy / "assets/architecture.png").read_bytes()


def test_the_import_rules_hold_it(copy):
    call(copy, "git", "init", "-q")
    rules = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/test_architecture.py",
        "-k",
        "packages_import or every_package or is_all",
    ]
    call(copy, *rules)
    task = copy / "drivelit/oneword/task.py"
    task.write_text(task.read_text() + "\nimport drivelit.mtdrive\n")
    with pytest.raises(AssertionError, match="packages_import_what_stands_below_them"):
        call(copy, *rules)

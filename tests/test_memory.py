"""A data stage reads its scenes from disk one after another: five times as many take no more memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from drivelit.data.shards import write_shards
from drivelit.runs.profiles import load_profile
from drivelit.runs.stages import start, write_scenes
from drivelit.scene.core import Camera, Ego, Scene, Trajectory

FEW, MANY = 600, 3_000  # more than shards keep
WEIGHT = 40_000  # bytes of a scene in memory; a recorded one takes 350 kB
AT_MOST = 7_000  # bytes that the memory may grow with a scene: its plans (eight at most) and its place, not the scene
PAIRS_AT_MOST = 9_000  # the words of four pairs, which are the result, and the scene's thumbnail

STAGES = """
"Run stages of MTDrive on scenes that weigh much and cost little, with a model that always says the same."
import json, resource, sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from drivelit.data.shards import ids_of
from drivelit.mtdrive import data, evaluation, pipeline
from drivelit.mtdrive.agent import SpeedAgent
from drivelit.mtdrive.task import MTDriveTask
from drivelit.rollout.core import Episode
from drivelit.runs.plays import keep_parts_in
from drivelit.runs.stages import run_profile

few, many = map(Path, sys.argv[1:])
plan = np.stack([np.arange(1, 9) * 10.0, np.zeros(8), np.zeros(8)], 1)  # 20 m/s: too fast for the agent
slower = plan * [0.9, 1, 1]


def rollout(engine, policy, task, scenes, max_turns, **how):
    infos = [dict(poses=p, feedback="slower") for p in (plan, slower, 0.9 * slower)][:max_turns]
    of = lambda name: Episode(name, [], [], [0], [], [], 1, ["a"] * len(infos), [dict(pdms=0.5)] * len(infos), infos)
    return [of(name) for name in ids_of(scenes)]


class Rows:
    "What is written is counted: the memory of Parquet and of its card is not what is asked."

    def __init__(self):
        self.n = 0

    def __call__(self, rows, *args):
        self.n += sum(1 for _ in rows)
        return self.n


policy = SimpleNamespace(model=torch.nn.Linear(2, 2), tokenizer=[0])
evaluation.rollout, evaluation.profile_engine = rollout, lambda *args: None
pipeline.load_to_play, pipeline.save_data = lambda *args: policy, (written := Rows())
pipeline.task_for = lambda profile: MTDriveTask(SpeedAgent(), images=False)
questions = lambda scene, pose, *args: [("DAC", pose[0], None, a) for a in ("Yes.", "No.")] * 5
data._questions = lambda scene, pose, task, rng: questions(scene, pose)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for stage in ("data_single", "data_two", "data_multi", "data_rl"):
    rows, peaks = [], []
    for out in (few, many):
        written.n = 0
        with keep_parts_in(out / stage):
            told = pipeline.FUNCTIONS[stage](out, run_profile(out), 0)
        rows.append(written.n or told["chosen"])
        peaks.append(peak())  # the highest until now, so a stage that holds its scenes cannot hide
    print(json.dumps([stage, rows, peaks]))
"""


EVALUATIONS = """
"Judge plans of scenes that weigh much, and whose grids weigh more."
import json, resource, sys
from pathlib import Path

import numpy as np

from drivelit.autodrive_p3.evaluation import plan_numbers
from drivelit.minddriver.evaluation import judged, summary_of_thoughts
from drivelit.runs.stages import load_scenes

plan = np.stack([np.arange(1, 9) * 10.0, np.zeros(8), np.zeros(8)], 1)
some = lambda scenes, p: [p if i % 3 else None for i in range(len(scenes))]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for name, judge in dict(
    plan_numbers=lambda scenes: plan_numbers(scenes, some(scenes, plan), pdms=False).scenes["ade"],
    judged=lambda scenes: judged(scenes, some(scenes, plan[:6, :2]), pdms=False).scenes["ade"],
    thoughts=lambda scenes: summary_of_thoughts(scenes, ["x"] * len(scenes), [None] * len(scenes)).scenes["decided"],
).items():
    rows, peaks = [], []
    for folder in map(Path, sys.argv[1:]):  # opened here: what is kept of the few goes before the many come
        rows.append(len(judge(load_scenes(folder, "train"))))
        peaks.append(peak())
    print(json.dumps([name, rows, peaks]))
"""


PAIRS = """
"Pairs about scenes that weigh much: a teacher that asks what nobody asked before, and a judge that likes everything."
import json, resource, sys
from pathlib import Path

from PIL import Image

from drivelit.driveagent import pipeline, questions, vqa_data, vqa_pairs
from drivelit.runs.stages import run_profile

few, many = map(Path, sys.argv[1:])
written = []


class Teacher:
    def __init__(self, seed):
        pass

    def questions(self, asks, attempt=0):
        own = lambda a: a.asked or [f"What is {k} of {a.scene.id}?" for k in range(4)]
        return [vqa_pairs.format_pairs([(q, f"{a.scene.id}.") for q in own(a)]) for a in asks]


class Judge:
    def scores(self, pairs):
        return [json.dumps(dict.fromkeys(vqa_data.SCORES, 10)) for p in pairs]


def write_rows(rows, path):
    "What is written is counted: the memory of Parquet and of its card is not what is asked."
    written.append(sum(1 for _ in rows))
    return path


image = lambda scene, camera, size: Image.new("RGB", size, (hash(scene.id) % 251, 128, 64))
questions.get_image = vqa_data.get_image = image
vqa_data.ScriptedTeacher, vqa_data.ScriptedJudge = Teacher, Judge
pipeline.write_rows, vqa_data.vqa_card = write_rows, lambda *args: ""
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rows, peaks = [], []
for out in (few, many):
    written.clear()
    (out / "vqa").mkdir()
    profile = run_profile(out)
    pipeline.run_vqa(out, profile, 0)
    rows.append(written[-1])
    peaks.append(peak())
print(json.dumps(["vqa", rows, peaks]))
"""


def named(names):
    "Scenes whose memory is one text, which costs little to read."
    past = np.stack([[-30.0, -20.0, -10.0, 0.0], np.zeros(4), np.zeros(4)], 1)
    ego = Ego(np.arange(-1.5, 0.1, 0.5), past, (20.0, 0.0))
    way = np.stack([np.arange(1, 9) * 9.0, np.zeros(8), np.zeros(8)], 1)
    front = Camera("CAM_FRONT", 8, 4, np.eye(3), np.eye(4), files={0.0: "front.png"})
    meta = dict(text="x" * WEIGHT)
    one = Scene("one", "hand", ego, "GO STRAIGHT", expert=Trajectory(way), cameras=dict(CAM_FRONT=front), meta=meta)
    return (replace(one, id=name) for name in names)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "A run of few scenes and one of many, from one folder."
    there = tmp_path_factory.mktemp("memory")
    for split, n in (("train", MANY), ("heldout", 2)):
        blocks = [list(named(f"{split}-{k}" for k in range(a, min(a + 500, n)))) for a in range(0, n, 500)]
        write_shards(blocks, there / "source" / split, {})
    profile = load_profile("mtdrive", "smoke", source=str(there / "source"), eval_scenes=2, sft_gpus=1, rl_gpus=1)
    asked = dict(eval_scenes=2, vqa_share=1.0, data_vqa=0, vqa_asks=1, cluster_by="thumbnails", reviewer="none")
    asking = load_profile("driveagent", "smoke", source=str(there / "source"), **asked)
    for n in (FEW, MANY):
        run = replace(profile, train_scenes=n, max_num_seqs=100, turns=6, rl_scenes=n // 2)
        write_scenes(start(there / str(n), run), run)
        run = replace(asking, train_scenes=n)
        write_scenes(start(there / f"pairs-{n}", run), run)
    return there


CASES = dict(
    stages=(STAGES, "", AT_MOST), evaluations=(EVALUATIONS, "", AT_MOST), pairs=(PAIRS, "pairs-", PAIRS_AT_MOST)
)


@pytest.mark.parametrize("what, kind, most", CASES.values(), ids=CASES)
def test_five_times_as_many_scenes_take_no_more_memory(runs, what, kind, most):
    code, env = runs / "work.py", os.environ | dict(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    code.write_text(what)
    command = [sys.executable, str(code), *(str(runs / f"{kind}{n}") for n in (FEW, MANY))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        stage, rows, peaks = json.loads(line)
        growth = (peaks[1] - peaks[0]) / (MANY - FEW)
        print(f"{stage}: {rows} rows, {peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB, {growth:.0f} bytes a scene")
        assert growth < most < WEIGHT / 3, stage
        assert rows[1] == 5 * rows[0] > 0, stage

"""Keys and values that are kept between turns: the profile's limit reaches every engine that plays."""

import ast
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

import drivelit.scene
from drivelit.policy.engines import TransformersEngine
from drivelit.policy.model import load_policy
from drivelit.rollout.closed_loop import by_policy
from drivelit.runs.plays import profile_engine
from drivelit.runs.profiles import load_profile, rl_options
from drivelit.training.throughput import RolloutWorkers, at_play, streaming
from drivelit.training.turn_grpo import TurnGRPOTrainer, rl_config

SOURCES = sorted(Path(drivelit.scene.__file__).parents[1].rglob("*.py"))
PLAY = ("TransformersEngine", "engine_for", "by_policy")


@pytest.fixture
def spied(monkeypatch):
    "The limits of all engines that are made."
    limits, init = [], TransformersEngine.__init__

    def spy(self, policy, batch_size=256, memory=None, constraint=None):
        limits.append(memory)
        init(self, policy, batch_size, memory, constraint)

    monkeypatch.setattr(TransformersEngine, "__init__", spy)
    return limits


@pytest.fixture
def tiny():
    return load_policy("toy", size="tiny")


def made(profile, tiny, monkeypatch):
    "What plays in a stage of reinforcement of MTDrive."
    pipeline = import_module("drivelit.mtdrive.pipeline")
    monkeypatch.setattr(pipeline, "load", lambda *_: tiny)
    return partial(pipeline.make, "mtgrpo", "run", profile, 0)


@pytest.mark.parametrize("gb, limit", [(0, None), (3, 3e9)])
def test_limit_of_the_paper_s_profile_reaches_all_who_play(gb, limit, spied, tiny, monkeypatch, tmp_path):
    profile = load_profile("mtdrive", "paper", kv_memory=gb)
    make = made(profile, tiny, monkeypatch)
    make()  # the trainer's process
    at_play(make)  # a rollout worker's
    profile_engine(tiny, profile)  # bootstrapping, choosing, evaluation
    by_policy(tiny, None, None, memory=profile.kept_bytes)
    assert spied == [limit] * 4
    args = rl_config(
        tmp_path, steps=1, batch=1, num_generations=2, **dict(kv_memory=rl_options(profile)["kv_memory"], use_cpu=True)
    )
    assert args.kv_memory == gb
    trainer = trained(tiny, args)
    assert spied == [limit] * 5 and trainer.engine.memory == limit


def trained(policy, args):
    from drivelit.rollout.core import Step, Task

    class Says(Task):
        def prompt(self, scene):
            return [dict(role="user", content="Yes or No")]

        def step(self, state, completion):
            return Step(None, dict(reward=0.0))

    return TurnGRPOTrainer(policy, Says(), ["one"], args, lambda *_: None)


def test_processes_on_a_card_share_what_is_free(tiny, monkeypatch):
    profile, asked = load_profile("mtdrive", "paper", rollout_workers=2), []
    make = made(profile, tiny, monkeypatch)
    monkeypatch.setattr(RolloutWorkers, "__init__", lambda self, play, workers: asked.append((play, workers)))
    monkeypatch.setattr(RolloutWorkers, "__enter__", lambda self: self)
    monkeypatch.setattr(RolloutWorkers, "__exit__", lambda self, *_: None)
    with streaming(TurnGRPOTrainer, profile.rollout_workers, make):
        [(play, workers)] = asked
    engine, _, _ = play.args[0]()
    assert (workers, engine.sharing) == (2, 3)  # two rollout workers and the trainer
    engine, _, _ = make()
    assert engine.sharing == 1


def _names(call):
    return {n.attr for n in ast.walk(call) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}


def test_who_makes_an_engine_of_a_profile_passes_its_limit():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    calls = [n for t in trees for n in ast.walk(t) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    playing = [c for c in calls if c.func.id in PLAY and "max_num_seqs" in _names(c)]
    assert len(playing) >= 8
    assert [ast.unparse(c) for c in playing if not {"kept_bytes", "kv_memory"} & _names(c)] == []

"""Processes that play beside the trainer have its current weights; one that dies is named, and the run goes on."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from counting import Count, log_of
from peft import LoraConfig
from transformers import TrainerCallback

from drivelit.autodrive_p3.task import P3Task, StageTrainer
from drivelit.policy.engines import EngineError, TransformersEngine
from drivelit.policy.model import load_policy
from drivelit.runs.profiles import load_profile
from drivelit.town.scenes import scenes as town
from drivelit.training.throughput import RolloutWorkers
from drivelit.training.turn_grpo import train_rl

SETTINGS = dict(
    steps=3,
    batch=2,
    num_generations=2,
    learning_rate=1e-2,
    beta=0.05,
    per_device_train_batch_size=2,
    seed=1,
    max_new_tokens=6,
    save_steps=1,
)


class Arm(TrainerCallback):
    "Raises the flag when the first update is over: a rollout worker of the second rollout dies."

    def __init__(self, flag):
        self.flag = flag

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 1:
            self.flag.touch()


def make(flag=""):
    policy = load_policy("toy", size="tiny")
    return TransformersEngine(policy), policy, Count(flag)


def learn(out, rollout_workers=0, flag="", **how):
    "The log of a run without its clocks, and the weights that it ends with."
    policy = load_policy("toy", size="tiny")
    scenes = ["one", "two", "three", "four", "five", "six"]
    with patch.object(TransformersEngine, "own_seeds", True):
        train_rl(
            policy, Count(), scenes, out, rollout_workers=rollout_workers, make=partial(make, flag), **SETTINGS | how
        )
    return log_of(out), {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def moved(log):
    rewards = [r["reward"] for r in log if "reward" in r]
    return len(rewards) == 3 and len(set(rewards)) > 1 and any(abs(r["loss"]) > 1e-6 for r in log if "loss" in r)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return learn(tmp_path_factory.mktemp("alone") / "run")


def same(a, b):
    return a[0] == b[0] and all(torch.equal(v, b[1][n]) for n, v in a[1].items())


def test_a_run_with_workers_is_the_run_without(alone, tmp_path):
    assert moved(alone[0])
    assert same(learn(tmp_path / "run", 2), alone)
    assert not (tmp_path / "run" / "rollout_workers").exists()


def test_workers_have_the_adapters_of_the_moment(tmp_path):
    lora = dict(peft_config=LoraConfig(r=2, lora_alpha=16, target_modules=r".*language_model.*\.(q|v)_proj"))
    runs = [learn(tmp_path / str(n), n, **lora) for n in (0, 2)]
    assert moved(runs[0][0]) and same(*runs)


def test_a_worker_that_dies_is_named_and_the_run_goes_on(alone, tmp_path):
    out, flag = tmp_path / "run", tmp_path / "flag"
    with pytest.raises(EngineError) as said:
        learn(out, 2, flag, callbacks=[Arm(flag)])
    assert "its rollout worker died (killed by signal 9" in str(said.value) and "episodes are missing" in str(
        said.value
    )
    assert "the same command goes on from them" in str(said.value)
    assert any((out / "played").rglob("*.npz")) and not flag.exists()
    jobs, stream = [], RolloutWorkers.stream
    with patch.object(RolloutWorkers, "stream", lambda self, some: jobs.append(len(some)) or stream(self, some)):
        assert same(learn(out, 2, flag), alone)
    assert jobs[0] == 1  # of the two groups of that rollout the one that was missing


class Pays(P3Task):
    "AutoDrive-P3's questions and films. A new policy's answers are all unreadable, so its words are paid instead."

    def step_batch(self, states, completions):
        steps = super().step_batch(states, completions)
        paid = [sum(c.ids) % 11 / 11 for c in completions]

        def told(step, v):
            return dict(step.info, stages=[v, v / 2, v / 4])

        return [
            replace(s, rewards=s.rewards | dict(reward=v), info=told(s, v)) for s, v in zip(steps, paid, strict=True)
        ]


def make_p3():
    policy = load_policy("toy", size="tiny", image_size=(168, 84))
    return TransformersEngine(policy), policy, Pays(load_profile("autodrive_p3", "smoke").inputs)


def test_autodrive_p3_with_workers_is_autodrive_p3_without(tmp_path):
    "Films travel to the rollout workers and back, and the advantage is a stage's own."
    runs = []
    for rollout_workers in (0, 2):
        (_, policy, task), out = make_p3(), tmp_path / str(rollout_workers)
        how = SETTINGS | dict(
            advantage="turn", trainer=StageTrainer, max_turns=1, rollout_workers=rollout_workers, make=make_p3
        )
        with patch.object(TransformersEngine, "own_seeds", True):
            train_rl(policy, task, town(6), out, **how)
        runs.append((log_of(out), {n: p.detach().clone() for n, p in policy.model.named_parameters()}))
    assert moved(runs[0][0]) and same(*runs)
    assert not (tmp_path / "2" / "rollout_workers").exists()

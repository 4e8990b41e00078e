"""Epochs, steps and shares of an update: the plan counts and refuses what the trainers count and refuse."""

import itertools
import math
import os
from dataclasses import replace
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from drivelit.autodrive_p3.profile import P3Profile
from drivelit.driveagent import pipeline, vqa_data
from drivelit.mtdrive.profile import MTDriveProfile
from drivelit.runs.preview import of_what_is_there
from drivelit.runs.profiles import conflicts, load_profile, rl_options, sft_options, steps
from drivelit.town.scenes import scenes as toy_scenes
from drivelit.training.sft import sft_config
from drivelit.training.turn_grpo import rl_config, settle, updates_of

SHARED = ("rl_gpus:", "rl_mini_batch:", "sft_batch:")


def made(make, gpus, out, options):
    "The configuration in one of so many processes; None: it is refused."

    def given(name, value):
        return patch.object(TrainingArguments, name, new_callable=PropertyMock, return_value=value)

    world = max(gpus, 1)  # the group of processes itself is not opened
    try:
        with (
            given("world_size", world),
            given("device", torch.device("cpu")),
            patch.dict(os.environ, WORLD_SIZE=str(world)),
        ):
            return make(out, **options, use_cpu=True)
    except ValueError:
        return None


def refused(profile):
    return any(c.startswith(SHARED) for c in conflicts(profile))


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8, 24])
def test_plan_refuses_the_updates_that_reinforcement_refuses(gpus, tmp_path):
    for batch, mini, group, micro in itertools.product((8, 12, 24), (4, 8, 12), (2, 3, 8), (0, 1, 3)):
        sizes = dict(
            rl_batch=batch, rl_mini_batch=mini, num_generations=group, per_device_train_batch_size=micro, rl_gpus=gpus
        )
        profile = MTDriveProfile("mine", **sizes)
        args = made(rl_config, gpus, tmp_path, rl_options(profile))
        assert refused(profile) == (args is None), sizes
        if args:  # and each process makes the updates that the plan counts
            rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * max(gpus, 1)
            assert (rows, updates_of(args)) == (mini * group, profile.batch()[2]), sizes


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8, 24])
def test_plan_refuses_the_batches_that_tuning_refuses(gpus, tmp_path):
    for batch, micro in itertools.product((8, 12, 24, 30), (0, 1, 3, 4)):
        profile = MTDriveProfile("mine", sft_batch=batch, per_device_train_batch_size=micro, sft_gpus=gpus)
        args = made(sft_config, gpus, tmp_path, sft_options(profile))
        assert refused(profile) == (args is None), (batch, micro)
        if args:
            rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * max(gpus, 1)
            assert rows == batch


def test_groups_of_an_ablation_are_shared_out_too():
    whole = dict(rl_batch=8, rl_mini_batch=8, num_generations=8, rl_gpus=64)
    assert not refused(P3Profile("mine", group_small=8, **whole)) and refused(P3Profile("mine", group_small=4, **whole))


@pytest.mark.parametrize("scenes, epochs", [(1, 0.5), (5, 1), (64, 1), (130, 1.5), (10_830, 1), (19_030, 15)])
def test_plan_and_reinforcement_count_the_same_updates(scenes, epochs, tmp_path):
    profile = MTDriveProfile(
        "mine", rl_steps=0, rl_num_train_epochs=epochs, rl_scenes=scenes, rl_batch=64, rl_mini_batch=16
    )
    args = settle(rl_config(tmp_path, **rl_options(profile), use_cpu=True), scenes)
    assert args.max_steps == profile.updates("grpo", "rl")["rl"] == steps(profile)["rl_updates"]
    twice = settle(rl_config(tmp_path, **rl_options(profile, 2), use_cpu=True), scenes)
    assert twice.max_steps == profile.rollout_batches(2) * profile.batch()[2]


@pytest.mark.parametrize(
    "name, epochs", [("driveagent.paper", 1), ("autodrive_p3.paper", 15), ("autodrive_p3.navsim", 15)]
)
def test_a_papers_epochs_are_passes_over_what_its_source_has(name, epochs):
    there = of_what_is_there(load_profile(*name.split(".")))
    whole = epochs * there.rl_scenes
    assert whole <= steps(there)["rl_steps"] * there.rl_batch < whole + there.rl_batch


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # pictures that are all alike
@pytest.mark.parametrize("asks, count, share", [(1, 6, 1.0), (3, 5, 1.0), (2, 8, 0.5)])
def test_plan_and_stage_count_the_same_pairs(asks, count, share, tmp_path):
    profile, put = load_profile("driveagent", "smoke", vqa_asks=asks, vqa_share=share, train_scenes=count), []
    judged = vqa_data.judged_pairs

    def noted(asked, teacher, judge, rounds, each, seed):
        put.append((len(asked), each))
        return judged(asked, teacher, judge, rounds, each, seed)

    def scenes(out, split):
        return toy_scenes(count if split == "train" else 2, seed=3)

    alike = patch.object(pipeline, "features_of", lambda profile: lambda fronts: np.zeros((len(fronts), 2)))
    with patch.object(vqa_data, "judged_pairs", noted), patch.object(pipeline, "load_scenes", scenes), alike:
        told = pipeline.run_vqa(tmp_path, profile, 0)
    assert put[0][0] * put[0][1] == profile.pairs(count) >= told["train"] > 0
    most = {a.what: a.most for a in profile.amounts(count, 2, ("", ""))}
    assert most["data_vqa"] == profile.pairs(count)
    passes = replace(profile, align_steps=0, align_epochs=2)
    assert passes.updates("align", "sft") == dict(sft=math.ceil(2 * profile.pairs(count) / profile.sft_batch))

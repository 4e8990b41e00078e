"""What a profile says reaches the arguments of the trainers, in every system; what nobody knows is refused by name."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from drivelit.runs.preview import preview
from drivelit.runs.profiles import (
    REPORTS,
    ProfileError,
    find_system,
    load_profile,
    missing_packages,
    rl_options,
    sft_options,
    systems,
)
from drivelit.runs.stages import load
from drivelit.training.sft import sft_config, train_sft
from drivelit.training.turn_grpo import rl_config, train_rl

SYSTEMS = list(systems())
CHOICES = dict(sft_schedule="linear", attn_implementation="eager", report_to="tensorboard")
REINFORCED = [s for s in SYSTEMS if "rl_schedule" in find_system(s).profile_class.keys()]  # by TRL's trainer


def of_trl(options, function):
    "Of the options of a profile those that are no arguments of `train_sft` and `train_rl` themselves."
    return {k: v for k, v in options.items() if k not in inspect.signature(function).parameters}


def calls(system, name):
    "The calls of a function in the pipeline of a system: of each, what is passed on by **."
    path = importlib.util.find_spec(f"{systems()[system].package}.pipeline").origin
    tree, found = ast.parse(Path(path).read_text(encoding="utf-8")), []
    for function in (n for n in tree.body if isinstance(n, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        one = (n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name))
        named = {n.targets[0].id: ast.unparse(n.value) for n in one}
        for call in (n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name):
            given = [ast.unparse(k.value) for k in call.keywords if k.arg is None]
            found.append([named.get(text, text) for text in given])
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_supervised_tuning_is_told(system, tmp_path):
    for warmup, asked in ((0.25, 2), (3.0, 3)):  # a share of eight updates, and updates
        key = "warm_warmup" if system == "minddrive" else "sft_warmup"
        profile = load_profile(system, "smoke", **CHOICES, **{key: warmup})
        given = sft_options(profile) | (dict(warmup=profile.warm_warmup) if system == "minddrive" else {})
        args = sft_config(tmp_path, **of_trl(given, train_sft) | dict(steps=8), use_cpu=True)
        assert (args.lr_scheduler_type, args.get_warmup_steps(8), args.report_to) == ("linear", asked, ["tensorboard"])
    assert all(any("sft_options(profile" in text for text in given) for given in calls(system, "train_sft"))
    assert calls(system, "train_sft")


@pytest.mark.parametrize("system", REINFORCED)
def test_reinforcement_is_told(system, tmp_path):
    more = dict(rl_schedule="constant_with_warmup", rl_warmup=0.5, epsilon=0.1, epsilon_high=0.3)
    given = rl_options(load_profile(system, "smoke", **CHOICES, **more))
    args = rl_config(tmp_path, **of_trl(given, train_rl) | dict(steps=4), use_cpu=True)
    assert (args.lr_scheduler_type, args.get_warmup_steps(4), args.report_to) == (
        "constant_with_warmup",
        2,
        ["tensorboard"],
    )
    assert (args.epsilon, args.epsilon_high) == (0.1, 0.3)
    usual = rl_config(tmp_path, **of_trl(rl_options(load_profile(system, "smoke")), train_rl), use_cpu=True)
    told = usual.lr_scheduler_type, usual.warmup_steps, usual.epsilon, usual.epsilon_high, usual.report_to
    assert told == ("constant", 0, 0.2, None, [])
    assert all(any("rl_options(profile" in text for text in given) for given in calls(system, "train_rl"))
    assert calls(system, "train_rl")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_attention_kernel_is_the_profiles(system):
    for kernel in ("eager", "sdpa"):
        profile = load_profile(system, "smoke", attn_implementation=kernel)
        if system == "minddrive":
            from drivelit.minddrive.experts import start_policy
            from drivelit.minddrive.online import where

            policy = start_policy("toy", 0, profile.image_size, **where(profile))
        else:
            policy = load("toy", profile)
        assert policy.model.config._attn_implementation == kernel


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_plan_shows_them_and_refuses_others(system):
    page = preview(load_profile(system, "smoke"))
    for name in ("sft_schedule", "sft_warmup", "attn_implementation", "report_to"):
        assert f"\n  {name} " in page
    for name in CHOICES:
        with pytest.raises(ProfileError, match=f"{name} = 'nothing' is none of "):
            load_profile(system, "smoke", **{name: "nothing"})


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = {name: missing_packages(load_profile_of(name)) for name in REPORTS}
    assert said["none"] == []
    assert said["wandb"] == ["report_to: the package wandb is not installed; pip install wandb"]
    assert said["trackio"] == ["report_to: the package trackio is not installed; pip install trackio"]
    flash = find_system("mtdrive").profile_class("mine", attn_implementation="flash_attention_2", precision="bf16")
    assert missing_packages(flash) == [
        "attn_implementation: the package flash_attn is not installed; pip install flash-attn"
    ]


def load_profile_of(name):
    return find_system("mtdrive").profile_class("mine", report_to=name)

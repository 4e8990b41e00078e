"""What a profile says reaches the arguments of the trainers, in every system; what nobody knows is refused by name."""

import ast
import importlib.util
import inspect
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from drivelit.runs.preview import preview
from drivelit.runs.profiles import (
    REPORTS,
    Profile,
    ProfileError,
    find_system,
    load_profile,
    missing_packages,
    named,
    profile_names,
    rl_options,
    sft_options,
    systems,
)
from drivelit.runs.stages import load
from drivelit.training.sft import sft_config, train_sft
from drivelit.training.turn_grpo import TurnGRPOConfig, rl_config, train_rl

SYSTEMS = list(systems())
CHOICES = dict(sft_lr_scheduler_type="linear", attn_implementation="eager", report_to="tensorboard")
REINFORCED = [s for s in SYSTEMS if "epsilon" in find_system(s).profile_class.keys()]  # by TRL's trainer


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
        key = "warm_warmup_steps" if system == "minddrive" else "sft_warmup_steps"
        profile = load_profile(system, "smoke", **CHOICES, **{key: warmup})
        given = sft_options(profile) | (dict(warmup_steps=profile.warm_warmup_steps) if system == "minddrive" else {})
        args = sft_config(tmp_path, **of_trl(given, train_sft) | dict(max_steps=8), use_cpu=True)
        assert (args.lr_scheduler_type, args.get_warmup_steps(8), args.report_to) == ("linear", asked, ["tensorboard"])
    assert all(any("sft_options(profile" in text for text in given) for given in calls(system, "train_sft"))
    assert calls(system, "train_sft")


@pytest.mark.parametrize("system", REINFORCED)
def test_reinforcement_is_told(system, tmp_path):
    more = dict(rl_lr_scheduler_type="constant_with_warmup", rl_warmup_steps=0.5, epsilon=0.1, epsilon_high=0.3)
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


OPTIONS = dict(sft=sft_options, rl=rl_options)
OTHERWISE = dict(precision="bf16")  # key -> the setting that it is called otherwise


def other(key, value):
    "Another value of a key, that no check of several keys has seen."
    if get_origin(key.type) is Literal:
        return next(word for word in get_args(key.type) if word not in (value, "auto"))
    if "le" in key.metadata:
        return type(value)(abs(value - key.metadata["le"] / 2))
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * value + 6
    return (*value, 56) if isinstance(value, tuple) else value + "x"


@pytest.mark.parametrize(
    ("system", "kind"), [(s, k) for s in SYSTEMS for k in OPTIONS if k == "sft" or s in REINFORCED]
)
def test_a_key_goes_to_one_setting(system, kind):
    profile, options = load_profile(system, "smoke"), OPTIONS[kind]
    before, reached = options(profile), {}
    for key, field in profile.keys().items():
        value = other(field, getattr(profile, key))
        after = options(replace(profile, **{key: value}))
        moved = [name for name in after if after[name] != before[name]]
        assert len(moved) <= 1 and after.keys() == before.keys(), (key, moved)
        reached |= {k: moved[0] for k in (key,) if moved}
        if moved and key not in ("save_steps", "precision"):
            assert after[moved[0]] == value, key
    want = named(type(profile), kind) | OTHERWISE
    want.pop("sft_num_train_epochs", None)  # beside updates it is 0 and not read
    assert reached == want
    assert len(set(reached.values())) == len(reached)  # no two keys for one


@pytest.mark.parametrize("name", profile_names())
def test_a_configuration_has_the_numbers_of_its_profile(name, tmp_path):
    system, _, profile = name.partition(".")
    profile = load_profile(system, profile)
    given = sft_options(profile, max_steps=8)
    made = [(given, sft_config(tmp_path, **given, use_cpu=True))]
    if system in REINFORCED:
        made.append((rl_options(profile), rl_config(tmp_path, **rl_options(profile), use_cpu=True)))
    for options, args in made:
        its = {f.name for f in fields(args)} - {"report_to", "save_steps"}  # one is made a list, one counts updates
        its -= {k for k in ("num_train_epochs",) if not options.get(k)}  # by updates
        most = options["per_device_train_batch_size"]  # and no more than a device has
        assert not most or args.per_device_train_batch_size <= most
        its -= {"per_device_train_batch_size"}
        assert {k: getattr(args, k) for k in options if k in its} == {k: v for k, v in options.items() if k in its}
        assert (args.learning_rate, args.warmup_steps) == (options["learning_rate"], options["warmup_steps"])


def test_a_profile_and_a_trainer_have_the_same_defaults(tmp_path):
    mine = Profile("mine")
    for options, make, needed in (
        (sft_options(mine), sft_config, dict(max_steps=mine.sft_max_steps)),
        (rl_options(mine), rl_config, dict(steps=mine.rl_steps, batch=mine.rl_batch)),
    ):
        a, b = (make(tmp_path, **given, use_cpu=True) for given in (options, needed))
        assert {f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)} == set()


def test_a_checkpoint_keeps_the_settings_of_episodes(tmp_path):
    args = rl_config(tmp_path, steps=2, batch=2, picture_cache=1.5, std="sample", use_cpu=True)
    again = pickle.loads(pickle.dumps(args))  # as transformers writes training_args.bin
    assert type(again) is TurnGRPOConfig and (again.picture_cache, again.std, again.max_turns) == (1.5, "sample", 6)
    assert args.to_dict()["picture_cache"] == 1.5


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
    for name in ("sft_lr_scheduler_type", "sft_warmup_steps", "attn_implementation", "report_to"):
        assert f"\n  {name} " in page
    for name in CHOICES:
        with pytest.raises(ProfileError, match=f"{name} = 'nothing': input should be .*; the nearest is "):
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

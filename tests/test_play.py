"""A policy that plays does so in the profile's precision, in every stage of every system, as the trainer plays."""

import importlib
import shutil
from contextlib import ExitStack
from functools import partial
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch

from drivelit.policy.engines import TransformersEngine
from drivelit.policy.model import Policy, fingerprint, load_policy
from drivelit.rollout.core import Step, Task, rollout
from drivelit.runs.plays import only_plays, profile_engine
from drivelit.runs.profiles import load_profile
from drivelit.runs.stages import load, load_to_play
from drivelit.testing.vllm import StubVLLM
from drivelit.training import batches, sft, throughput, turn_grpo
from drivelit.training.batches import as_tensors
from drivelit.training.sft import train_sft
from drivelit.training.turn_grpo import TurnGRPOTrainer, rl_config


class Played(Exception):
    "Somebody begins to play."


def kind(policy):
    "The numbers of a linear layer, and whether its passes run under autocast."
    return str(policy.model.model.language_model.layers[0].mlp.down_proj.weight.dtype), policy.bf16


def stopped(seen, *args, **_):
    seen.append(kind(next(a for a in args if isinstance(a, Policy))))
    raise Played


# stage, what begins to play, what the stage needs and this test does not
DATA = ("load_scenes", "task_for")
TUNED = (*DATA, "rows_of", "train_sft", "read_rows", "recorded")
LEARNT = (*DATA, "train_rl", "json", "Subset", "draw", "subset", "tell_if_few", "read_weights")
TRAINERS = dict(train_sft=sft, train_rl=turn_grpo)
STAGES = [
    *(("mtdrive", s, "play", DATA) for s in ("data_two", "data_multi", "data_rl", "data_rl_single")),
    ("mtdrive", "sft_multi", "evaluate", TUNED),
    *(("mtdrive", s, "evaluate", LEARNT) for s in ("mtgrpo_cross", "size_double", "grpo_single")),
    ("autodrive_p3", "sft", "evaluate", (*TUNED, "ImageRows")),
    ("autodrive_p3", "rl", "evaluate", LEARNT),
    ("minddriver", "sft", "examine", (*TUNED, "begin", "spans_by_tag")),
    ("minddriver", "rft_plan", "examine", (*LEARNT, "codec_of", "features", "engine_for", "adapters")),
    ("driveagent", "sft", "evaluate", (*TUNED, "base")),
    ("driveagent", "ams", "evaluate", (*LEARNT, "chosen_scenes")),
    ("driveagent", "front", "evaluate", (*TUNED, *LEARNT, "base", "chosen_scenes")),
    ("driveagent", "motion", "play", (*DATA, "chosen_scenes", "labelled")),
    ("driveagent", "attention", "play", (*DATA, "chosen_scenes", "read_need", "read_weights", "attention_tasks")),
]


def begun(pipeline, stage, plays, without, profile, out):
    "What plays first in a stage."
    seen, new = [], lambda *_: load("toy", profile)
    with ExitStack() as stack:
        # MTDrive imports its trainers where it trains
        homes = {n: pipeline if hasattr(pipeline, n) else TRAINERS.get(n) for n in without}
        for name, home in ((n, home) for n, home in homes.items() if home):
            own = (
                dict(side_effect=new)
                if name in ("begin", "base")
                else dict(return_value=MagicMock(__len__=lambda _: 1))
            )
            own |= dict(attention_tasks=dict(return_value=dict(text=None))).get(name, {})
            stack.enter_context(patch.object(home, name, MagicMock(**own)))
        stack.enter_context(patch.object(type(pipeline.STAGES), "trained", lambda *_: "toy"))
        if hasattr(pipeline, "trained"):
            stack.enter_context(patch.object(pipeline, "trained", lambda *_: "toy"))
        stack.enter_context(patch.object(pipeline, plays, partial(stopped, seen)))
        (out / stage).mkdir(parents=True)
        for name in ("sft", "fcm", "rl"):  # steps of a variant
            (out / "seed-0" / stage / name).mkdir(parents=True)
        for name in ("data_rl/sizes.json", "data_rl/chosen.json", "data_rl_single/chosen.json", "data/explore.json"):
            for path in (out / name, out / "seed-0" / name):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        with pytest.raises(Played):
            pipeline.FUNCTIONS[stage](out, profile, 0)
    return seen


@pytest.mark.parametrize("precision", ("bf16", "fp32"))
@pytest.mark.parametrize("system, stage, plays, without", STAGES, ids=[f"{s}-{n}" for s, n, *_ in STAGES])
def test_a_stage_plays_in_the_precision_of_the_profile(system, stage, plays, without, precision, tmp_path):
    pipeline = importlib.import_module(f"drivelit.{system}.pipeline")
    profile = load_profile(system, "smoke", precision=precision)
    told = ("torch.bfloat16", True) if precision == "bf16" else ("torch.float32", False)
    assert begun(pipeline, stage, plays, without, profile, tmp_path) == [told]


def test_candidates_are_compared_in_it(tmp_path):
    from drivelit.mtdrive import pipeline

    profile, seen = load_profile("mtdrive", "smoke", precision="bf16", sft_candidates=2), []
    with patch.object(sft, "candidate", lambda *_: "toy"), patch.object(pipeline, "load_scenes"):
        with patch.object(pipeline, "evaluate", partial(stopped, seen)), pytest.raises(Played):
            pipeline.choose("sft_multi", tmp_path, profile, 0)
    assert seen == [("torch.bfloat16", True)]


PLANNERS = dict(mtdrive="mtdrive", autodrive_p3="p3", minddriver="minddriver", driveagent="motion")


@pytest.mark.parametrize("system, module", PLANNERS.items())
def test_a_planner_is_loaded_in_it(system, module):
    from drivelit.closed_loop import planner

    profile, seen = load_profile(system, "smoke", precision="bf16"), []
    with ExitStack() as stack:
        stages = importlib.import_module(f"drivelit.{system}.pipeline").STAGES
        stack.enter_context(patch.object(type(stages), "trained", lambda *_: "toy"))
        for name, new in dict(run_profile=lambda _: profile, trained=lambda *_: "toy", codec_of=MagicMock()).items():
            stack.enter_context(patch.object(planner, name, new))
        stack.enter_context(patch.object(planner.motion, "load_head", MagicMock()))
        stack.enter_context(patch.object(getattr(planner, module), "planner", partial(stopped, seen)))
        with pytest.raises(Played):
            getattr(planner, f"_{system}")("out", "sft", 0, "own", 0, None)
    assert seen == [("torch.bfloat16", True)]


class Paid(Task):
    "Pays for the words' numbers, in two turns."

    def prompt(self, scene):
        return [dict(role="user", content=f"Yes or No, {scene}?")]

    def step(self, state, completion):
        again = [dict(role="user", content="the trajectory")] if state.turn == 0 else None
        return Step(again, dict(reward=sum(completion.ids) % 11 / 11))


SCENES = ["one", "one", "two", "two"]


def test_evaluation_computes_what_the_trainer_plays(tmp_path):
    profile = load_profile("mtdrive", "smoke", precision="bf16")
    policy = load("toy", profile)
    policy.save(tmp_path / "policy")
    own = dict(
        steps=1,
        batch=2,
        num_generations=2,
        max_new_tokens=8,
        max_turns=2,
        use_cpu=True,
        report_to="none",
        learning_rate=1e-5,
    )
    args = rl_config(tmp_path / "run", bf16=True, beta=0.0, seed=3, **own)
    trainer = TurnGRPOTrainer(policy, Paid(), ["one", "two"], args, lambda r, g: r)
    trained = trainer.play(SCENES)
    for bf16 in (True, False):
        asked = profile if bf16 else load_profile("mtdrive", "smoke")
        plays = load_to_play(tmp_path / "policy", asked)
        how = dict(places=[(0, 2), (1, 2)] * 2, seed=3 * 7919 * 64, temperature=args.temperature, **trainer.limits)
        played = rollout(profile_engine(plays, asked), plays, Paid(), SCENES, **how)
        pairs = [(a, b) for a, b in zip(trained, played, strict=True) if a.ids == b.ids]
        apart = [np.abs(np.subtract(a.logprobs, b.logprobs)) for a, b in pairs]
        if bf16:  # rounded before or at the product: the same numbers
            assert [e.ids for e in played] == [e.ids for e in trained] and np.nanmax(np.concatenate(apart)) < 1e-6
        else:  # another numeric, or this test would see nothing
            assert len(apart) < 4 or np.nanmax(np.concatenate(apart)) > 1e-4


def test_parts_of_a_play_tell_the_precision():
    half, whole = (load_profile("mtdrive", "smoke", precision=p) for p in ("bf16", "fp32"))
    marks = [fingerprint(load_to_play("toy", p)) for p in (half, whole)]
    assert marks[0] != marks[1] == fingerprint(load_policy("toy"))
    assert fingerprint(only_plays(load("toy", half), half)) == fingerprint(load("toy", half)) == marks[0]


@pytest.mark.parametrize("system, stage", dict(mtdrive="mtgrpo_turn", autodrive_p3="rl", minddriver="rft_plan").items())
def test_workers_that_ask_servers_read_no_weights(system, stage, tmp_path):
    pipeline = importlib.import_module(f"drivelit.{system}.pipeline")
    load_policy("toy").save(tmp_path / "final")
    with ExitStack() as stack:
        stack.enter_context(patch.object(type(pipeline.STAGES), "trained", lambda *_: tmp_path / "final"))
        for name in ("trained", "codec_of", "features", "engine_for", "task_for"):
            new = MagicMock(return_value=tmp_path / "final" if name == "trained" else MagicMock())
            stack.enter_context(patch.object(pipeline, name, new)) if hasattr(pipeline, name) else None
        reads = stack.enter_context(patch("drivelit.policy.model.load_pretrained", side_effect=Played))
        frames = dict(frames_as="images") if system == "autodrive_p3" else {}
        profile = load_profile(system, "smoke", rollout_servers="http://127.0.0.1:1", rollout_workers=2, **frames)
        _, policy, _ = pipeline.make(stage, tmp_path, profile, 0, beside=True)
        assert not reads.called and all(p.is_meta for p in policy.model.parameters())
        with pytest.raises(Played):  # the trainer's process has them
            pipeline.make(stage, tmp_path, profile, 0)


def shape_alone(folder):
    policy = load_policy(folder, device="meta")
    return TransformersEngine(policy), policy, Paid()


def test_the_shape_alone_is_enough_to_ask(tmp_path):
    policy = load_policy("toy", size="tiny")
    policy.save(tmp_path / "final")
    with StubVLLM(policy) as server:
        make = partial(shape_alone, tmp_path / "final")
        at = partial(throughput.at_play, make, rollout_servers=server.root, folder=str(tmp_path / "served"))
        got, how = [], dict(places=[(0, 1)], seed=1, max_new_tokens=4, given=throughput.Given())
        throughput.play_rollout(at, (["one"], how), got.append)
    assert len(got) == 1 and got[0][0].ids and not got[0][0].failed


def test_pixels_wait_on_the_cpu_and_go_a_micro_batch_at_a_time(tmp_path):
    from PIL import Image

    policy = load_policy("toy", size="tiny")
    shown = [dict(role="user", content=[dict(type="image", image=Image.new("RGB", (168, 84)))])]
    e = policy.encode(shown)
    episode = MagicMock(ids=e.input_ids, images=e.images, turn=[-1] * (len(e.input_ids) - 1) + [0], failed=False)
    episode.prompt_length = len(e.input_ids) - 1
    policy.model.to("meta")  # a device that is not the CPU
    with patch.object(batches, "spread_to_tokens", lambda advantages, turn: turn):
        inputs = as_tensors(policy, [episode], np.zeros((1, 1)))["inputs"]
    places = {k: v.device.type for k, v in inputs.items()}
    assert places["pixel_values"] == "cpu" and places["input_ids"] == "meta"


def test_batches_of_an_update_wait_on_the_cpu(tmp_path):
    from transformers import TrainerCallback

    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **_):
            seen.append(train_dataloader.device)

    rows = [dict(messages=[dict(role="user", content="Yes?"), dict(role="assistant", content="No.")], images=[])] * 4
    policy = load_policy("toy", size="tiny")
    train_sft(
        policy,
        rows,
        tmp_path / "run",
        max_steps=1,
        batch=4,
        per_device_train_batch_size=1,
        callbacks=[Look()],
        report_to="none",
    )
    assert seen == [None]  # accelerate would move each as soon as it is collected


def test_memory_is_handed_over_where_play_and_update_alternate(tmp_path):
    policy, events = load_policy("toy", size="tiny"), []
    own = dict(steps=1, batch=2, num_generations=2, max_new_tokens=4, max_turns=1, use_cpu=True, report_to="none")
    trainer = TurnGRPOTrainer(policy, Paid(), ["one", "two"], rl_config(tmp_path, beta=0.0, **own), lambda r, g: r)

    def give(device):
        return events.append(device.type)

    with (
        patch.object(turn_grpo, "give_back_memory", give),
        patch.object(trainer, "rollout", lambda *_, **__: events.append("play") or []),
    ):
        trainer.play(SCENES)
    assert events == ["cpu", "play", "cpu"]
    with patch("torch.cuda.empty_cache") as emptied:
        throughput.give_back_memory(torch.device("cpu"))
        assert not emptied.called
        throughput.give_back_memory(torch.device("cuda:0"))
        assert emptied.called


def test_weights_for_workers_lie_in_shared_memory(tmp_path):
    policy = load_policy("toy", size="tiny")
    own = dict(steps=1, batch=2, num_generations=2, max_new_tokens=4, max_turns=1, use_cpu=True, report_to="none")
    with throughput.RolloutWorkers(print, 1) as rollout_workers:
        kind_of = type("Streams", (throughput.StreamsEpisodes, TurnGRPOTrainer), dict(rollout_workers=rollout_workers))
        trainer = kind_of(policy, Paid(), ["one", "two"], rl_config(tmp_path, beta=0.0, **own), lambda r, g: r)
        room = shutil.disk_usage(rollout_workers.shelf.name).free
        with trainer.ready_to_play():
            inside = str(trainer.given.weights).startswith(rollout_workers.shelf.name)
            assert inside == (room > 1e8) and trainer.given.seal
        with patch("shutil.disk_usage", lambda _: MagicMock(free=0)), trainer.ready_to_play():
            assert str(trainer.given.weights).startswith(str(tmp_path / "rollout_workers"))

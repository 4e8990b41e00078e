"""A run of reinforcement that is killed, refused, served or resumed is the run that it would have been."""

import json
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from counting import Count, log_of
from transformers import TrainerCallback

from drivelit.data.episodes import read_episodes
from drivelit.policy.engines import EngineError, TransformersEngine
from drivelit.policy.model import load_policy
from drivelit.policy.vllm import VLLMEngine
from drivelit.testing.server import Reply
from drivelit.testing.vllm import StubVLLM
from drivelit.training.checkpoints import checkpoints, last_checkpoint, read_metrics
from drivelit.training.grpo import ADVANTAGES
from drivelit.training.reference import Reference
from drivelit.training.sft import fp32_masters
from drivelit.training.turn_grpo import TurnGRPOTrainer, rl_config, train_rl

SCENES = ["one", "two", "three", "four", "five", "six"]
SMALL = dict(steps=2, batch=2, num_generations=4, learning_rate=1e-2, beta=0.05, max_new_tokens=6, max_turns=2, seed=1)
SMALL |= dict(save_steps=1)


class Killed(Exception): ...


class KillAt(TrainerCallback):
    "Stops a run behind an update, as a kill would."

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


def fresh(**how):
    return load_policy("toy", size="tiny", **how)


def learn(out, policy=None, **how):
    "The log of a run."
    train_rl(policy or fresh(), Count(), SCENES, out, "turn", **SMALL | how)
    return log_of(out)


def trainer_for(policy, out, task=None, engine=None, **how):
    "A trainer that has not begun."
    args = rl_config(out, use_cpu=True, **SMALL | dict(sampling_bound=0.0) | how)
    trainer = TurnGRPOTrainer(policy, task or Count(), SCENES, args, ADVANTAGES["turn"], engine=engine)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    log = learn(tmp_path_factory.mktemp("whole") / "run", steps=6, save_steps=2)
    assert len({r["reward"] for r in log}) > 1 and any(abs(r["loss"]) > 1e-6 for r in log)
    return log


def test_a_run_that_is_killed_twice_is_the_run_that_is_not(whole, tmp_path):
    for stop, kept in ((3, 2), (5, 4)):
        with pytest.raises(Killed):
            learn(tmp_path, steps=6, save_steps=2, callbacks=[KillAt(stop)])
        assert checkpoints(tmp_path)[-1][0] == kept
    log = learn(tmp_path, steps=6, save_steps=2)
    assert [r["step"] for r in log] == [r["step"] for r in whole]
    assert [r["reward"] for r in log] == [r["reward"] for r in whole]
    for key in ("loss", "kl", "grad_norm"):
        assert np.allclose([r[key] for r in log], [r[key] for r in whole], rtol=0, atol=1e-6)


def test_a_pass_trains_on_every_episode_once(tmp_path):
    seen = []

    class Counted(TurnGRPOTrainer):
        def objective(self, batch):
            seen.append((self.state.global_step, batch["completion_ids"].data_ptr()))
            return super().objective(batch)

    how = dict(batch=4, mini_batch=2, num_iterations=2, per_device_train_batch_size=4)
    log = learn(tmp_path, trainer=Counted, **how)
    assert len(log) == 2 * 2 * 2 and any(r["clip_ratio/region_mean"] > 0 for r in log)  # the second pass has moved away
    parts = {step: {p for s, p in seen if s == step} for step, _ in seen}
    assert [len(parts[s]) for s in range(8)] == [2] * 8  # two micro-batches of 4 in an update of 8
    assert not parts[0] & parts[1] and (parts[0], parts[1]) == (parts[2], parts[3])  # both, then both again


def test_a_task_opens_the_answers_of_a_group_by_their_place(tmp_path):
    class TwoModes(Count):
        def opening(self, scene, place, group):
            return "Yes" if place < group // 2 else "No"

    opened = trainer_for(fresh(), tmp_path, task=TwoModes()).play([i // 4 for i in range(8)])
    assert [e.texts[0].startswith("Yes") for e in opened] == ([True] * 2 + [False] * 2) * 2


def test_each_rollout_and_each_process_draws_its_own_tokens_and_a_resumed_one_the_same(tmp_path):
    trainer, drawn, seeds = trainer_for(fresh(), tmp_path), [], []
    for step in (0, 1, 0):
        trainer.state.global_step = step
        drawn.append([e.ids for e in trainer.play([0] * 4)])
    assert drawn[0] != drawn[1] and drawn[0] == drawn[2]
    assert len({tuple(ids) for ids in drawn[0]}) > 1
    for trainer.state.global_step in range(3):
        for rank in range(3):
            index = patch.object(type(trainer.accelerator), "process_index", rank)
            with index, patch.object(trainer, "rollout") as rollouts:
                trainer.play([0] * 4)
            seeds.append(rollouts.call_args.kwargs["seed"])
    assert len(set(seeds)) == 9


def test_a_refused_conversation_is_left_out(tmp_path):
    class Choosy(TransformersEngine):
        def generate(self, conversations, on_error="raise", **options):
            assert on_error == "return"
            return [EngineError("HTTP 400", 0, refused=True), *super().generate(conversations[1:], **options)]

    policy = fresh()
    log = learn(tmp_path, policy, engine=Choosy(policy), per_device_train_batch_size=1)
    assert [r["failed"] for r in log] == [2 / 8] * 2  # one in each of two turns
    assert all(p.isfinite().all() for p in policy.model.parameters())


class Drifts(StubVLLM):
    "Right in the few tokens that are looked at first, and then off."

    def _generate(self, ask):
        answer, self.shift = super()._generate(ask), -0.01
        return answer


@pytest.mark.parametrize(("kind", "answers"), [(partial(StubVLLM, shift=-0.01), 1), (Drifts, 9)], ids=["off", "drifts"])
def test_a_server_that_computes_otherwise_stops_the_run_before_a_weight_moves(kind, answers, tmp_path):
    policy = fresh()
    before = {k: v.clone() for k, v in policy.model.state_dict().items()}
    with kind(policy) as server:
        with pytest.raises(EngineError) as said:
            learn(tmp_path, policy, rollout_servers=server.root)
        assert sum("generate" in path for path, _ in server.heard) >= answers
    text = str(said.value)
    assert "differ by 0.0" in text and "sampling_bound is 0.001" in text and server.root in text
    assert all(torch.equal(v, before[k]) for k, v in policy.model.state_dict().items())
    assert not [r for r in read_metrics(tmp_path) if "loss" in r]


class OneByOne(TransformersEngine):
    "Draws as a server does, each conversation with a seed of its own, and counts the questions."

    asked = 0

    def generate(self, conversations, *args, seed=None, on_error="raise", **options):
        self.asked += len(conversations)
        return [super(OneByOne, self).generate([c], *args, seed=c.seed, **options)[0] for c in conversations]


def alone(out, trainer=TurnGRPOTrainer):
    "The log of a run in this process without an early checkpoint, and its questions."
    policy = fresh()
    engine = OneByOne(policy, memory=0)
    return learn(out, policy, engine=engine, trainer=trainer, save_steps=10), engine.asked


@pytest.fixture(scope="module")
def by_one(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("by one") / "run")


def same_run(log, other):
    assert [r["reward"] for r in log] == [r["reward"] for r in other]
    assert np.allclose([r["loss"] for r in log], [r["loss"] for r in other], rtol=0, atol=1e-5)


def stored(path):
    "The episodes of a file, whatever they depend on."
    with np.load(path) as kept:
        return read_episodes(path, json.loads(kept["text"].tobytes())["told"])[0]


def test_a_server_that_dies_costs_the_groups_that_were_not_over(by_one, tmp_path):
    class Dies(StubVLLM):
        "Lets the first question of the second rollout wait until the other group is over; then it answers no more."

        second = dead = False

        def reply(self, data, path=""):
            with self._one_at_a_time:
                first, self.second = self.second and "generate" in path, self.second and "generate" not in path
            if first:
                while not list((tmp_path / "run" / "played").rglob("*.npz")) and not self.closing.wait(0.01):
                    continue
                self._http.shutdown()
                self._http.socket.close()  # later requests are refused
                self.dead = True
            return Reply(b"x" * 99, cut=True) if self.dead else super().reply(data, path)  # these hear half of it

    class Later(TrainerCallback):
        "The first rollout is over."

        def on_step_end(self, args, state, control, **_):
            server.second = True

    def served(policy, server, **how):
        engine = VLLMEngine(policy, [server.root], tmp_path / "weights", dtype="float32", retries=0)
        return learn(tmp_path / "run", policy, engine=engine, **dict(save_steps=10, sampling_bound=0.0) | how)

    policy = fresh()
    with Dies(policy) as server:
        with pytest.raises(EngineError, match="of 8 episodes are missing: .*others of rollout 2 are kept in"):
            served(policy, server, callbacks=[Later()])
    [kept] = (tmp_path / "run" / "played").iterdir()
    before = {i: e for path in kept.iterdir() for i, e in stored(path).items()}
    assert 4 <= len(before) < 8 and last_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-1"
    policy = fresh()
    with StubVLLM(policy) as server:
        log = served(policy, server)
        asked = sum("generate" in path for path, _ in server.heard)
    assert (asked, kept.parent.exists()) == (2 * (8 - len(before)), False)  # two turns of what was missing
    same_run(log, by_one[0])


def test_a_process_that_is_killed_while_it_plays_leaves_its_whole_groups(by_one, tmp_path):
    class CutOff(TurnGRPOTrainer):
        "Ends in the second rollout, when one of two groups is over."

        def rollout(self, scenes, *, on_group, **options):
            def over(first, group):
                on_group(first, group)
                if self.state.global_step:
                    raise Killed

            return super().rollout(scenes, on_group=over, **options)

    with pytest.raises(Killed):
        alone(tmp_path, CutOff)
    [kept] = (tmp_path / "played").rglob("*.npz")
    assert (kept.parent.name, len(stored(kept)), last_checkpoint(tmp_path)) == ("1-0", 4, None)
    log, asked = alone(tmp_path)
    assert (asked, by_one[1]) == (2 * (8 + 4), 2 * (8 + 8))  # the first rollout, and half of the second
    assert not (tmp_path / "played").exists()
    same_run(log, by_one[0])


def test_the_temperature_of_play_is_the_one_in_the_loss(tmp_path):
    heard = []

    class Overheard(TransformersEngine):
        def generate(self, *args, **options):
            heard.append(options["temperature"])
            return super().generate(*args, **options)

    policy = fresh()
    warm = trainer_for(policy, tmp_path, engine=Overheard(policy), temperature=1.7)
    episodes = warm.play([i // 4 for i in range(8)])
    assert set(heard) == {1.7}
    batch = warm.make_batch(episodes, warm.score(episodes))
    with torch.no_grad():
        logp = warm.log_probabilities(policy.model, batch)[0][batch["tool_mask"].bool()]
    drawn = np.concatenate([np.array(e.logprobs)[np.array(e.turn) >= 0] for e in episodes])
    assert np.allclose(logp.numpy(), drawn, rtol=0, atol=1e-4)


def test_a_refreshed_reference_comes_back_from_the_checkpoint(tmp_path):
    "With reference_every=2 the policy is its own reference at the first, third, fifth and seventh rollout."
    refresh = dict(steps=7, reference_every=2)
    kl = [r["kl"] for r in learn(tmp_path / "whole", **refresh)]
    assert [abs(v) < 1e-9 for v in kl] == [True, False] * 3 + [True]
    with pytest.raises(Killed):
        learn(tmp_path / "cut short", callbacks=[KillAt(6)], **refresh)
    assert (checkpoints(tmp_path / "cut short")[-1][1] / Reference.FILE).exists()
    assert [r["kl"] for r in learn(tmp_path / "cut short", **refresh)] == kl


def test_in_bf16_the_reference_rounds_as_the_policy_does(tmp_path):
    trainer = trainer_for(fresh(dtype="bfloat16"), tmp_path, bf16=True)
    assert {w.dtype for w in trainer.reference.weights.values()} == {torch.bfloat16, torch.float32}
    with fp32_masters(trainer.model), torch.no_grad():
        episodes = trainer.play([i // 4 for i in range(8)])
        batch = trainer.make_batch(episodes, trainer.score(episodes))
        logp = trainer.log_probabilities(trainer.model, batch)[0]
    assert logp.any() and torch.equal(logp, batch["ref_per_token_logps"])  # to the last bit


def test_at_the_paper_s_rate_nearly_all_weights_move_in_bf16(tmp_path):
    policy = fresh(dtype="bfloat16")
    before = {k: v.float().clone() for k, v in policy.model.named_parameters()}
    log = learn(tmp_path, policy, steps=10, learning_rate=1e-6, save_steps=5, bf16=True)
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    masters = dict(type(policy.model).from_pretrained(tmp_path / "checkpoint-10").named_parameters())
    changed = [(masters[k] != v).flatten() for k, v in before.items() if "visual" not in k]  # there is no picture
    moved = torch.cat(changed).float().mean().item()
    assert moved > 0.8 and abs(log[0]["kl"]) < 1e-9

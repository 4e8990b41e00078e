"""verl's own classes on `drivelit.bridges.verl` and `drivelit.bridges.estimators`, without a GPU.

`bash ci/environments.sh` runs it. What runs of verl: RLHFDataset and its collate, DataProto, NaiveRewardManager,
AgentLoopBase with its token builder for Qwen-VL, AgentLoopOutput, and core_algos' table of advantages.
"""

import asyncio
import importlib
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed here: bash ci/environments.sh tests with it")

import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo import core_algos
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

from drivelit.bridges.estimators import turn_estimator
from drivelit.bridges.skyrl import opened
from drivelit.bridges.verl import agent_loop, compute_score, write_rows
from drivelit.mtdrive.formats import format_trajectory
from drivelit.policy.engines import Completion
from drivelit.policy.model import load_policy
from drivelit.rollout.core import rollout

SYSTEM, N, SEED = "mtdrive.smoke", 4, 77
TASK, SOME, _ = opened(SYSTEM, "toy", N, SEED)
SCALE = (0.3, 1.4, 1.0, 0.6)
WORDS = [
    ["I would rather stay here.", *(format_trajectory(s.expert.poses[:8] * [a, 1, 1]) for a in SCALE[k:] + (1.0,))]
    for k, s in enumerate(SOME)
]


@pytest.fixture(scope="module")
def policy():
    return load_policy("mtdrive")


@pytest.fixture(scope="module")
def data(policy, tmp_path_factory):
    "verl's data set of our rows."
    folder = tmp_path_factory.mktemp("rows")
    file = write_rows(folder / "train.parquet", SYSTEM, "toy", N, SEED)
    config = OmegaConf.create(dict(cache_dir=str(folder), filter_overlong_prompts=False))
    return RLHFDataset(str(file), policy.tokenizer, config, processor=policy.processor)


class Said:
    "An engine that says what was said before, an answer at a time, and ends it as a policy ends."

    def __init__(self, policy, texts):
        self.policy, self.texts = policy, list(texts)

    def generate(self, conversations, **how):
        text = self.texts.pop(0)
        ids = self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [Completion(text, [*ids, self.policy.tokenizer.eos_token_id])]


class Reciter:
    "In the place of verl's server: it says what it is told to say, and ends as a policy ends."

    def __init__(self, policy, texts):
        self.policy, self.texts, self.asked = policy, list(texts), []

    async def generate(self, request_id, prompt_ids, sampling_params, image_data):
        self.asked.append((request_id, list(prompt_ids), image_data))
        ids = self.policy.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        ids = [*ids, self.policy.tokenizer.eos_token_id]
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids))


def looped(policy, server, longest=4000):
    "The agent loop, made as verl's worker makes it."
    rollout_config = dict(prompt_length=2000, response_length=longest)
    config = OmegaConf.create(dict(actor_rollout_ref=dict(rollout=rollout_config)))
    parts = dict(dataset_cls=RLHFDataset, data_config=DictConfigWrap(OmegaConf.create({})), hf_model_type="qwen2_5_vl")
    cls = importlib.import_module("drivelit.bridges.verl").DrivingAgentLoop  # as hydra finds it
    assert cls is agent_loop() and issubclass(cls, AgentLoopBase)
    return cls(DictConfigWrap(config), server, policy.tokenizer, policy.processor, **parts)


def play(policy, data, k, longest=4000):
    "verl's output of an episode of row k, and what its server was asked."

    async def episode():
        server = Reciter(policy, WORDS[k])
        return await looped(policy, server, longest).run({}, **data[k]), server.asked

    return asyncio.run(episode())


def test_the_dataset_reads_the_rows(policy, data):
    assert len(data) == N
    for k in range(N):
        row = data[k]
        (message,) = row["raw_prompt"]
        (ours,) = TASK.prompt(SOME[k])
        kinds = [p["type"] for p in message["content"]]
        assert kinds == [p["type"] for p in ours["content"]] and "image" in kinds
        for theirs, own in zip(message["content"], ours["content"], strict=True):
            if own["type"] == "text":
                assert theirs["text"] == own["text"]
            else:
                assert theirs["image"].convert("RGB").tobytes() == own["image"].convert("RGB").tobytes()
        assert (row["index"], row["agent_name"], row["extra_info"]["scene"]) == (k, "drivelit", k)
    batch = collate_fn([data[k] for k in range(N)])
    assert batch["data_source"].tolist() == [f"drivelit/{SYSTEM}"] * N and batch["reward_model"][0]["style"] == "rule"


def test_the_reward_manager_gives_our_reward(policy, data):
    for k in range(N):
        for text in WORDS[k][:2]:
            ids = torch.tensor([policy.tokenizer(text, add_special_tokens=False)["input_ids"]])
            batch = dict(prompts=torch.zeros(1, 3, dtype=torch.long), responses=ids)
            batch["attention_mask"] = torch.ones(1, 3 + ids.shape[1], dtype=torch.long)
            kept = {n: np.array([data[k][n]], dtype=object) for n in ("data_source", "reward_model", "extra_info")}
            proto = DataProto.from_dict(tensors=batch, non_tensors=kept)

            async def asked(proto=proto):
                return await NaiveRewardManager(None, policy.tokenizer, compute_score).run_single(proto)

            given = asyncio.run(asked())
            (expected,) = TASK.step_batch([SimpleNamespace(scene=SOME[k], turn=0)], [Completion(text)])
            assert given["reward_score"] == expected.rewards["reward"]
            assert given["reward_extra_info"]["format"] == expected.rewards["format"]
            assert given["reward_extra_info"]["pdms"] == np.nan_to_num(expected.rewards["pdms"])


def test_the_agent_loop_earns_what_our_rollout_earns_from_the_same_tokens(policy, data):
    limits = dict(max_turns=TASK.max_turns, max_new_tokens=2000, max_length=30000)
    for k in range(N):
        (episode,) = rollout(Said(policy, WORDS[k]), policy, TASK, [SOME[k]], **limits)
        out, asked = play(policy, data, k)
        rewards = [r["reward"] for r in episode.rewards]
        assert out.extra_fields["turn_scores"] == rewards and out.reward_score == np.mean(rewards)
        assert len({name for name, _, _ in asked}) == 1 and len(asked) == len(rewards)
        assert out.prompt_ids == policy.encode(TASK.prompt(SOME[k])).input_ids
        mask = np.array(out.response_mask)
        cuts = np.flatnonzero(np.diff([0, *mask, 0]))
        spoken = [out.response_ids[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        words = [policy.tokenizer(t, add_special_tokens=False)["input_ids"] for t in episode.texts]
        assert spoken == [[*w, policy.tokenizer.eos_token_id] for w in words]  # learnt from: what was drawn
        for a, b, info in zip(cuts[1::2], cuts[2::2], episode.infos, strict=False):
            assert info["feedback"] in policy.tokenizer.decode(out.response_ids[a:b])
        assert len(out.response_ids) == len(mask) == len(out.response_logprobs)
        assert [i.tobytes() for i in out.multi_modal_data["images"]] == [i.tobytes() for i in episode.images]
        batch = out.as_dict()
        assert batch["rm_scores"].sum() == pytest.approx(out.reward_score) and batch["rm_scores"][:-1].sum() == 0


def test_the_tokens_are_those_of_our_rollout(policy, data):
    "Prompt, answers and feedback, token by token, and which of them are learnt from."
    limits = dict(max_turns=TASK.max_turns, max_new_tokens=2000, max_length=30000)
    for k in range(N):
        (episode,) = rollout(Said(policy, WORDS[k]), policy, TASK, [SOME[k]], **limits)
        out, _ = play(policy, data, k)
        assert [*out.prompt_ids, *out.response_ids] == list(episode.ids)
        assert [0] * len(out.prompt_ids) + out.response_mask == [int(t >= 0) for t in episode.turn]


def test_an_episode_that_grows_too_long_is_cut(policy, data):
    out, asked = play(policy, data, 0, longest=40)
    assert len(asked) == 1 and len(out.response_ids) == len(out.response_mask) <= 40


def test_verls_table_calls_our_advantages():
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0]])
    rewards = torch.tensor([[0, 1.0, 0, 0.3], [0, 0, 0, 0], [0.2, 0, 0, 0.8], [0.6, 0, 0, 0]])
    core_algos.register_adv_est("mtgrpo")(turn_estimator)
    from verl.trainer.ppo.ray_trainer import compute_advantage

    tensors = dict(token_level_rewards=rewards, response_mask=mask)
    uid = np.array(["b7", "b7", "0a", "0a"], dtype=object)
    proto = DataProto.from_dict(tensors=tensors, non_tensors=dict(uid=uid))
    config = OmegaConf.create(dict(use_pf_ppo=False))
    done = compute_advantage(proto, "mtgrpo", config=config)
    expected = torch.tensor([[1, 1, 0, 0], [-1, -1, -1, 0], [-1, 0, 0, 0], [1, 0, 0, 0]]).float()  # by hand
    torch.testing.assert_close(done.batch["advantages"], expected, atol=1e-4, rtol=0)
    assert core_algos.get_adv_estimator_fn("mtgrpo") is turn_estimator
    with pytest.raises(ValueError, match="Unknown advantage estimator"):
        core_algos.get_adv_estimator_fn("mtgrpp")

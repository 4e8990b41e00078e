"""SkyRL-gym's own registry, base class and metrics, on `drivelit.bridges.skyrl`; `bash ci/environments.sh` runs it."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed here: bash ci/environments.sh tests with it")

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.metrics import aggregate_for_environment

from drivelit.bridges.environments import SessionError
from drivelit.bridges.skyrl import opened, register, rows
from drivelit.mtdrive.formats import format_trajectory
from drivelit.policy.engines import Completion
from drivelit.policy.model import load_policy
from drivelit.rollout.core import rollout

SYSTEM, N, SEED = "mtdrive.smoke", 4, 77
ROWS = rows(SYSTEM, "toy", N, SEED)
TASK, SOME, _ = opened(SYSTEM, "toy", N, SEED)
SCALE = (0.3, 1.4, 1.0, 0.6)
WORDS = [
    ["I would rather stay here.", *(format_trajectory(s.expert.poses[:8] * [a, 1, 1]) for a in SCALE[k:] + (1.0,))]
    for k, s in enumerate(SOME)
]


def made(row):
    "As SkyRL's generator makes an environment: the columns of the row, but prompt and env_class, are its extras."
    extras = {k: v for k, v in json.loads(json.dumps(row)).items() if k not in ("prompt", "env_class")}
    return skyrl_gym.make(row["env_class"], env_config={}, extras=extras)


def play(k):
    "An episode of scene k: what each step gave."
    register()
    env, out = made(ROWS[k]), []
    with env:
        env.init(ROWS[k]["prompt"])
        for text in WORDS[k]:
            out.append(env.step(text))
            if out[-1]["done"]:
                break
    return out, env.get_metrics()


class Said:
    "An engine that says what was said before, an answer at a time."

    def __init__(self, policy, texts):
        self.policy, self.texts = policy, list(texts)

    def generate(self, conversations, **how):
        text = self.texts.pop(0)
        return [Completion(text, self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])]


def test_the_registry_makes_it_and_it_is_of_the_base_class():
    register()
    register()  # a worker may be used twice
    env = made(ROWS[0])
    assert isinstance(env, BaseTextEnv) and env.spec.id == "drivelit" and env.max_turns == TASK.max_turns
    messages, info = env.init(ROWS[0]["prompt"])
    assert messages == ROWS[0]["prompt"] and info == {}
    assert all(isinstance(m["content"], str) for m in messages)
    assert set(env.step("nothing")) <= set(BaseTextEnvStepOutput.__annotations__)


def test_the_same_words_earn_the_same_as_in_our_rollout():
    policy, lengths = load_policy("mtdrive"), []
    limits = dict(max_turns=TASK.max_turns, max_new_tokens=2000, max_length=30000)
    for k, scene in enumerate(SOME):
        (episode,) = rollout(Said(policy, WORDS[k]), policy, TASK, [scene], **limits)
        steps, metrics = play(k)
        assert [s["reward"] for s in steps] == [r["reward"] for r in episode.rewards]  # to the last bit
        assert steps[-1]["done"] and not any(s["done"] for s in steps[:-1])
        for step, rewards, info in zip(steps, episode.rewards, episode.infos, strict=True):
            assert step["metadata"]["rewards"] == {n: v for n, v in rewards.items() if not np.isnan(v)}
            assert [m["content"] for m in step["observations"]] == ([] if step["done"] else [info["feedback"]])
        assert metrics["turns"] == len(steps)
        lengths.append(len(steps))
    assert len({tuple(s["reward"] for s in play(k)[0]) for k in range(N)}) > 1


def test_episodes_side_by_side_do_not_mix():
    alone = [play(k) for k in range(N)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(play, [k for k in range(N)] * 3))
    assert together == alone * 3


def test_the_metrics_of_many_episodes():
    played = [play(k)[1] for k in range(N)]
    mean = aggregate_for_environment("drivelit", played)
    assert mean["turns"] == np.mean([p["turns"] for p in played])
    assert mean["reward"] == pytest.approx(np.mean([p["reward"] for p in played]))


def test_bad_rows_and_answers():
    register()
    with pytest.raises(SessionError, match="scene 4: there are 4"):
        skyrl_gym.make("drivelit", extras=dict(extra_info=ROWS[0]["extra_info"] | dict(scene=4)))
    with pytest.raises(SessionError, match="is missing"):
        skyrl_gym.make("drivelit", extras={})
    with made(ROWS[0]) as env, pytest.raises(SessionError, match="not a int"):
        env.step(3)
    assert rows(SYSTEM, "toy", N, SEED) == ROWS != rows(SYSTEM, "toy", N, SEED + 1)

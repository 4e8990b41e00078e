"""verifiers' own loop against a scripted model on a socket, on `drivelit.bridges.verifiers`.

`bash ci/environments.sh` runs it in an environment that has verifiers; with DRIVELIT_RECORD=1 it writes the record that
nbs/65_bridges/77_verifiers.ipynb compares itself with.
"""

import asyncio
import importlib.metadata
import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed here: bash ci/environments.sh tests with it")

import verifiers as vf

from drivelit.bridges.environments import Session
from drivelit.bridges.verifiers import environment_class, load_environment, mean_reward, metric, rows
from drivelit.io.files import RunError
from drivelit.mtdrive.formats import format_trajectory
from drivelit.mtdrive.task import MTDriveTask
from drivelit.policy.engines import Completion
from drivelit.policy.model import load_policy
from drivelit.rollout.core import rollout
from drivelit.town.scenes import scenes

RECORD = Path(__file__).parents[1] / "nbs/65_bridges/golden/verifiers.json"
TASK, SOME = MTDriveTask(max_turns=3), scenes(4, seed=77)
SCALE = (0.3, 1.4, 1.0, 0.6)
PLANS = [[format_trajectory(s.expert.poses[:8] * [a, 1, 1]) for a in SCALE] for s in SOME]
WORDS = [["I would rather stay here.", PLANS[k][k], PLANS[k][2]] for k in range(4)]


class Reciter(BaseHTTPRequestHandler):
    "A model of the chat protocol: it knows a scene by its picture, and says the words of the turn."

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = asked["messages"][0]["content"][0]["image_url"]["url"]
        turn = sum(m["role"] == "assistant" for m in asked["messages"])
        self.server.asked.append(asked["messages"])
        message = dict(role="assistant", content=self.server.words[first][turn])
        choice = dict(index=0, message=message, finish_reason="stop")
        usage = dict(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        answer = dict(id="1", object="chat.completion", created=0, model="m", choices=[choice], usage=usage)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        "Nothing on stderr."


@contextmanager
def model(words):
    "A client of a server that recites; words by scene."
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reciter)
    pictures = [row["prompt"][0]["content"][0]["image_url"]["url"] for row in rows(TASK, SOME)]
    assert len(set(pictures)) == len(SOME)
    server.words, server.asked = dict(zip(pictures, words, strict=True)), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["DRIVELIT_TEST_KEY"] = "none"
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield vf.ClientConfig(api_key_var="DRIVELIT_TEST_KEY", api_base_url=url, max_retries=0), server
    finally:
        server.shutdown()
        server.server_close()


def environment(task=TASK, some=SOME):
    from datasets import Dataset

    rubric = vf.Rubric(funcs=[mean_reward, metric("pdms"), metric("format")], weights=[1.0, 0.0, 0.0])
    return environment_class()(task, some, dataset=Dataset.from_list(rows(task, some)), rubric=rubric)


def evaluate(env, words, each=1, **more):
    "verifiers' own evaluation."
    with model(words) as (client, server):
        columns = dict(state_columns=["trajectory"], rollouts_per_example=each)
        done = asyncio.run(env.evaluate(client, "m", **columns, **more))
    assert not [o["error"] for o in done["outputs"] if o["error"]]
    return done["outputs"], server.asked


class Said:
    "An engine that says what was said before, an answer at a time."

    def __init__(self, policy, texts):
        self.policy, self.texts = policy, list(texts)

    def generate(self, conversations, **how):
        text = self.texts.pop(0)
        return [Completion(text, self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])]


def ours(words):
    "What our rollout gives for the same words."
    policy = load_policy("mtdrive")
    limits = dict(max_turns=3, max_new_tokens=2000, max_length=9000)
    return [rollout(Said(policy, w), policy, TASK, [s], **limits)[0] for s, w in zip(SOME, words, strict=True)]


def test_the_same_words_earn_the_same_as_in_our_rollout():
    outputs, asked = evaluate(environment(), WORDS, each=3)  # twelve episodes at a time
    assert len(outputs) == 12
    episodes, lengths = ours(WORDS), []
    for output in outputs:
        episode = episodes[output["info"]["scene"]]
        steps = output["trajectory"]
        assert [s["reward"] for s in steps] == [r["reward"] for r in episode.rewards]  # to the last bit
        for step, rewards in zip(steps, episode.rewards, strict=True):
            assert step["extras"]["rewards"] == {k: v for k, v in rewards.items() if not np.isnan(v)}
        assert output["reward"] == np.mean([r["reward"] for r in episode.rewards])
        assert output["metrics"]["num_turns"] == len(steps) and output["stop_condition"] == "episode_over"
        lengths.append(len(steps))
    told = {m["content"][0]["text"] for messages in asked for m in messages[1:] if m["role"] == "user"}
    assert told and told <= {i["feedback"] for e in episodes for i in e.infos}  # the PDM agent's words, as they were
    assert all(list(p) == ["type", p["type"]] for m in asked for p in m[0]["content"])  # no empty fields travel
    if os.environ.get("DRIVELIT_RECORD"):
        first = sorted(outputs, key=lambda o: o["info"]["scene"])[::3]
        record = dict(version=f"verifiers {importlib.metadata.version('verifiers')}")
        record["rewards"] = [[s["reward"] for s in o["trajectory"]] for o in first]
        record["metrics"] = {k: [o["metrics"][k] for o in first] for k in ("pdms", "format")}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())["rewards"]  # perhaps on another processor, whose last digit is another
    for rewards, episode in zip(recorded, episodes, strict=True):
        assert rewards == pytest.approx([r["reward"] for r in episode.rewards], abs=1e-9)


def test_the_hub_loads_it_and_one_seed_is_one_set_of_scenes():
    drawn = [vf.load_environment("drivelit.bridges.verifiers", system="mtdrive.smoke", n=5, seed=s) for s in (3, 3, 4)]
    ids = [[i["scene_id"] for i in env.get_dataset()["info"]] for env in drawn]
    assert ids[0] == ids[1] != ids[2] and len(set(ids[0])) == 5
    assert drawn[0].get_dataset()["prompt"] == drawn[1].get_dataset()["prompt"]
    picture = drawn[0].get_dataset()[0]["prompt"][0]["content"][0]
    assert picture["type"] == "image_url" and picture["image_url"]["url"].startswith("data:image/png;base64,")
    with pytest.raises(RunError, match="its task needs more than scenes"):
        load_environment("minddrive")
    with pytest.raises(RunError, match="there is no such folder"):
        load_environment(scenes="nowhere")


def test_episodes_side_by_side_do_not_mix():
    alone = evaluate(environment(), WORDS, max_concurrent=1)[0]
    together = evaluate(environment(), WORDS, each=2)[0]
    by_scene = {o["info"]["scene"]: [s["reward"] for s in o["trajectory"]] for o in alone}
    assert len({tuple(v) for v in by_scene.values()}) > 1
    for output in together:
        assert [s["reward"] for s in output["trajectory"]] == by_scene[output["info"]["scene"]]


def test_an_answer_that_is_no_plan_earns_nothing_and_goes_on():
    strange = ["{}", "[PT, (nan, 1)]", "\x00 [PT"]
    outputs, _ = evaluate(environment(), [strange] * 4)
    for output in outputs:
        session = Session(TASK)
        session.reset(SOME[output["info"]["scene"]])
        assert [s["reward"] for s in output["trajectory"]] == [session.step(t).reward for t in strange]
        assert session.done and output["metrics"]["pdms"] == 0

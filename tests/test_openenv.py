"""OpenEnv's own client at a server of ours: what it says and hears, bad requests, and that episodes do not mix.

`bash ci/openenv.sh` runs it in an environment that has openenv-core; with DRIVELIT_RECORD=1 it writes the record that
nbs/65_bridges/72_openenv.ipynb compares itself with.
"""

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

pytest.importorskip("openenv.core", reason="openenv-core is not installed here: bash ci/openenv.sh tests with it")

from openenv.cli._cli_utils import validate_env_structure
from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from drivelit.bridges.openenv import app_of, listen, models, picture_of, scenes_of, server_of, write_space
from drivelit.mtdrive.formats import format_trajectory
from drivelit.mtdrive.task import MTDriveTask
from drivelit.policy.engines import TransformersEngine
from drivelit.policy.model import load_policy
from drivelit.rollout.core import rollout
from drivelit.scene.core import to_json
from drivelit.town.scenes import scenes

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "nbs/65_bridges/golden/openenv.json"
SECRET, COUNT, SEED = "a-secret-of-tests", 6, 77
TASK, SOME = MTDriveTask(max_turns=6), scenes(COUNT, seed=SEED)


@contextmanager
def serving(task=TASK, some=SOME, secret=SECRET, **limits):
    "The address of a server in a thread."
    server = server_of(app_of(task, some, secret, **limits))
    with listen("127.0.0.1", 0) as place:
        thread = threading.Thread(target=server.run, kwargs=dict(sockets=[place]))
        thread.start()
        try:
            root = f"http://127.0.0.1:{place.getsockname()[1]}"
            wait_for(lambda: server.started)
            yield f"{root}/{secret}" if secret else root
        finally:
            server.should_exit = True
            thread.join()


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def url():
    with serving() as address:
        yield address


def client(address):
    return GenericEnvClient(base_url=address, message_timeout_s=120.0).sync()


def ws(address):
    return connect(address.replace("http", "ws") + "/ws", proxy=None, legacy=True)


def ask(socket, message):
    socket.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
    return json.loads(socket.recv(timeout=60))


def test_the_same_words_earn_the_same_as_in_our_rollout(url):
    policy = load_policy("mtdrive")
    limits = dict(max_turns=6, max_new_tokens=150, max_length=3000)
    which = [0, 1, 2, 3, 3, 4, 5, 5]
    played = rollout(
        TransformersEngine(policy), policy, TASK, [SOME[k] for k in which], seed=1, temperature=0.9, **limits
    )

    def texts(messages):
        return ["".join(p.get("text", "") for p in m["content"]) for m in messages if m["role"] == "user"]

    with client(url) as env:
        for k, episode in zip(which, played, strict=True):
            result = env.reset(scene=k)
            heard = list(result.observation["messages"])
            for text, rewards in zip(episode.texts, episode.rewards, strict=True):
                result = env.step(dict(text=text))
                assert result.observation["rewards"] == {n: v for n, v in rewards.items() if not np.isnan(v)}
                assert result.reward == rewards["reward"]  # to the last bit
                heard += result.observation["messages"]
            assert result.done == (episode.turns == 6 or not episode.infos[-1]["feedback"])
            told = texts(episode.messages)
            # a rollout keeps no message that nobody answers
            assert texts(heard)[: len(told)] == told and len(told) == episode.turns
    lengths = [e.turns for e in played]
    assert min(lengths) < max(lengths)


def test_one_seed_is_one_scene_for_every_client(url):
    with client(url) as a, client(url) as b:
        drawn = [[env.reset(seed=k).observation["scene"] for k in range(12)] for env in (a, b)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 2


def test_clients_side_by_side_do_not_mix(url):
    def words(k):
        plan = SOME[k].expert.poses[:8]
        return ["nothing", *(format_trajectory(plan * [s, 1, 1]) for s in (1.4, 0.7, 1.2, 0.3))]

    def play(k, meet=None):
        out = []
        with client(url) as env:
            result = env.reset(scene=k)
            for text in words(k):
                if meet:
                    meet.wait(60)  # everybody sends at the same moment
                if not result.done:
                    result = env.step(dict(text=text))
                out.append((result.reward, result.done, result.observation))
            out.append({n: v for n, v in env.state().items() if n != "episode_id"})
        return out

    alone = [play(k) for k in range(COUNT)]
    together, meet = [None] * COUNT, threading.Barrier(COUNT)

    def fill(k):
        together[k] = play(k, meet)

    threads = [threading.Thread(target=fill, args=(k,)) for k in range(COUNT)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone
    assert len({json.dumps(a) for a in alone}) == COUNT


@pytest.mark.parametrize(
    "action, why",
    [
        (dict(text=3), "no action: text: Input should be a valid string"),
        (dict(text=None), "no action: text: Input should be a valid string"),
        (dict(), "no action: text: Field required"),
        (dict(words="x"), "words: Extra inputs are not permitted"),
        (dict(text="x", metadata=1), "metadata: Input should be a valid dictionary"),
        (dict(type="call_tool", text="x"), "type: Extra inputs are not permitted"),
        (dict(text="x" * 20_001), "20,001 characters; 20,000 are read"),
    ],
)
def test_no_action_is_a_sentence_and_costs_nothing(url, action, why):
    with client(url) as env:
        with pytest.raises(RuntimeError, match="no episode has begun"):
            env.step(dict(text="x"))
        env.reset(scene=2)
        env.step(dict(text="nothing"))
        before = env.state()
        with pytest.raises(RuntimeError, match=why):
            env.step(action)
        assert env.state() == before and before["step_count"] == 1
        assert env.step(dict(text="nothing")).observation["turn"] == 2


def test_a_wrong_reset_is_a_sentence_and_costs_nothing(url):
    with client(url) as env:
        env.reset(scene=2, episode_id="mine")
        env.step(dict(text="nothing"))
        before = env.state()
        for given, why in (
            (dict(seed=-1), "seed = -1"),
            (dict(seed="x"), "seed = 'x'"),
            (dict(scene=COUNT), f"scene {COUNT}: there are {COUNT}"),
            (dict(sede=1), "there is no 'sede'"),
            (dict(episode_id=1), "episode_id = 1"),
        ):
            with pytest.raises(RuntimeError, match=why):
                env.reset(**given)
        assert env.state() == before and before["episode_id"] == "mine"


def test_what_the_own_client_would_not_send(url):
    with ws(url) as socket:
        ask(socket, dict(type="reset", data=dict(scene=1)))
        assert ask(socket, "{")["data"]["code"] == "INVALID_JSON"
        assert ask(socket, dict(type="jump"))["data"]["code"] == "UNKNOWN_TYPE"
        assert ask(socket, dict(type="step"))["data"]["code"] == "VALIDATION_ERROR"
        assert ask(socket, dict(type="step", data=[1]))["data"]["code"] == "VALIDATION_ERROR"
        assert ask(socket, dict(type="step", data=dict(text="x")))["data"]["observation"]["turn"] == 1
    with ws(url) as socket:  # JSON that is no object ends this connection, and no other one
        assert ask(socket, "[1]")["data"]["code"] == "SESSION_ERROR"
    with ws(url) as socket, client(url) as other:  # a megabyte is the most that is read
        other.reset(scene=1)
        socket.send(json.dumps(dict(type="step", data=dict(text="x" * 1_100_000))))
        with pytest.raises(Exception, match="1009"):
            socket.recv(timeout=60)
        assert other.step(dict(text="x")).observation["turn"] == 1


def test_over_the_last_turn(url):
    with serving(MTDriveTask(max_turns=1)) as short, client(short) as env:
        env.reset(scene=0)
        result = env.step(dict(text="nothing"))
        assert (result.done, result.reward, result.observation["messages"]) == (True, 0.0, [])
        with pytest.raises(RuntimeError, match="over after 1 turns: reset first"):
            env.step(dict(text="again"))
        assert not env.reset(scene=1).done


def test_a_wrong_secret_is_refused(url):
    root = url.removesuffix(SECRET)
    for address in (root[:-1], root + "another-secret-of-tests", url + "x", url[:-1]):
        with pytest.raises(ConnectionError, match="HTTP 403"), client(address) as env:
            env.reset()
        for path in ("/reset", "/state", "/schema", "/openapi.json", "/docs", "/mcp"):
            with pytest.raises(urllib.error.HTTPError) as told:
                urllib.request.urlopen(address + path, timeout=60)
            assert told.value.code == 403 and "wrong secret" in json.loads(told.value.read())["detail"]
    assert json.loads(urllib.request.urlopen(root + "health", timeout=60).read()) == dict(status="healthy")


def post(address, body):
    head = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), head), timeout=60) as r:
            return r.status, json.loads(r.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


def test_over_http_each_request_is_alone(url):
    status, first = post(f"{url}/reset", dict(scene=1))
    assert status == 200 and first["observation"]["scene"] == 1
    status, told = post(f"{url}/step", dict(action=dict(text="x")))
    assert status == 422 and "no episode has begun" in told["detail"] and "OpenEnv's client" in told["detail"]
    assert post(f"{url}/step", dict(action=dict(text=3))) == (
        422,
        dict(detail="no action: text: Input should be a valid string"),
    )
    assert post(f"{url}/reset", dict(sede=1))[0] == 422
    schema = json.loads(urllib.request.urlopen(f"{url}/schema", timeout=60).read())
    assert schema["action"]["properties"]["text"]["type"] == "string"
    assert {"messages", "rewards", "turn", "scene", "scene_id"} <= set(schema["observation"]["properties"])


def test_a_client_that_leaves_makes_room():
    with serving(sessions=2) as address:
        stays = client(address)
        with stays:
            stays.reset(scene=0)
            stays.step(dict(text="nothing"))
            leaves = ws(address)
            ask(leaves, dict(type="reset", data=dict(scene=1)))
            with ws(address) as third:
                told = json.loads(third.recv(timeout=60))["data"]
                assert (told["code"], told["max_sessions"]) == ("CAPACITY_REACHED", 2)
            leaves.send(json.dumps(dict(type="step", data=dict(text="nothing"))))
            leaves.socket.close()  # in the middle, without a word

            def again():
                with suppress(ConnectionClosed), ws(address) as socket:  # still full: it is closed as we ask
                    return ask(socket, dict(type="reset", data=dict(scene=2)))["type"] == "observation"

            wait_for(again)
            assert stays.step(dict(text="nothing")).observation["turn"] == 2  # nothing happened to the other one


def test_a_session_that_is_gone_says_so():
    with serving(idle=1.0) as address, client(address) as env:  # OpenEnv looks every five seconds
        env.reset(scene=0)
        time.sleep(7)
        with pytest.raises(RuntimeError, match="this session is gone: it was idle"):
            env.step(dict(text="nothing"))
        with pytest.raises(RuntimeError, match="connect again"):
            env.reset(scene=0)
    with pytest.raises(ConnectionError), client(address) as env:  # the server has ended
        env.reset()


def test_the_typed_classes():
    made = models()
    assert made.Action(text="x").model_dump() == dict(text="x", metadata={})
    assert made.Environment.SUPPORTS_CONCURRENT_SESSIONS


def test_the_command_serves_a_folder_and_ends(tmp_path):
    (tmp_path / "scenes").mkdir()
    for k in range(2):
        to_json(SOME[k], tmp_path / "scenes" / f"{k}.json")
    words = [sys.executable, "-m", "drivelit", "serve-env", "mtdrive", "--scenes", str(tmp_path / "scenes")]
    env = os.environ | dict(PYTHONPATH=str(ROOT), DRIVELIT_ENV_SECRET=SECRET)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([*words, "--port", "0"], env=env, **pipes) as server:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:") and address.endswith(f"/{SECRET}"), server.stderr.read()
        with client(address) as there:
            ids = {there.reset(scene=k).observation["scene_id"] for k in range(2)}
            result = there.step(dict(text=format_trajectory(SOME[1].expert.poses[:8])))
        port = address.split(":")[2].split("/")[0]
        second = subprocess.run([*words, "--port", port], env=env, capture_output=True, text=True)
        server.terminate()
        assert SECRET not in server.stderr.read()  # no log of requests
    assert ids == {s.id for s in SOME[:2]} and result.reward > 0.5
    assert second.returncode == 2 and "cannot be listened on" in second.stderr and second.stderr.count("\n") == 1
    short = subprocess.run(words, env=env | dict(DRIVELIT_ENV_SECRET="short"), capture_output=True, text=True)
    assert short.returncode == 2 and "16 letters" in short.stderr and short.stderr.count("\n") == 1


def test_the_space_is_what_its_hub_takes(tmp_path):
    space = write_space(tmp_path / "space", "mtdrive")
    assert validate_env_structure(space) == ["Recommended directory missing: outputs/"]  # git keeps no empty folder
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import server.app as s; print(type(s.app).__name__); import models; print(models.Action)",
        ],
        cwd=space,
        env=os.environ | dict(PYTHONPATH=f"{ROOT}:{space}"),
        capture_output=True,
        text=True,
    )
    assert "Guarded" in done.stdout and "DrivingAction" in done.stdout, done.stderr
    assert yaml.safe_load((space / "openenv.yaml").read_text())["app"] == "server.app:app"


def exchanges(address):
    "What a client says and hears on two scenes."

    def pixels(p):
        return hashlib.sha256(Image.open(io.BytesIO(picture_of(p))).tobytes()).hexdigest()[:16]

    out = []

    def note(asked, result):
        parts = [p for m in result.observation["messages"] for p in m["content"]]
        heard = {k: v for k, v in result.observation.items() if k != "messages"}
        heard |= dict(done=result.done, reward=result.reward)
        heard["text"] = "".join(p["text"] for p in parts if p["type"] == "text")
        heard["pictures"] = [pixels(p) for p in parts if p["type"] == "image_url"]
        out.append(dict(asked=asked, heard=heard))
        return result

    with client(address) as env:
        for seed in (5, 6):
            scene = note(dict(reset=dict(seed=seed)), env.reset(seed=seed)).observation["scene"]
            plan = SOME[scene].expert.poses[:8]
            for text in ("I would rather stay here.", *(format_trajectory(plan * [s, 1, 1]) for s in (1.5, 1.2, 1.0))):
                if note(dict(step=text), env.step(dict(text=text))).done:
                    break
    return out


def test_the_record_is_what_is_said_and_heard(url):
    got = dict(n=COUNT, seed=SEED, exchanges=exchanges(url))
    if os.environ.get("DRIVELIT_RECORD"):
        RECORD.write_text(json.dumps(got, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())
    for ours, theirs in zip(got["exchanges"], recorded["exchanges"], strict=True):
        assert ours["asked"] == theirs["asked"]
        numbers = [x["heard"].pop("rewards") | dict(reward=x["heard"].pop("reward")) for x in (ours, theirs)]
        assert ours["heard"] == theirs["heard"]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-9)


def test_scenes_of_the_town_are_those_of_the_command():
    assert [s.id for s in scenes_of("toy", COUNT, SEED)] == [s.id for s in SOME]


def test_the_asynchronous_client(url):
    async def play():
        async with GenericEnvClient(base_url=url) as env:
            await env.reset(seed=1)
            return await env.step(dict(text="nothing"))

    assert asyncio.run(play()).observation["turn"] == 1

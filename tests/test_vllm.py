"""Servers of vLLM that another trainer has, or that serve another model: one sentence before anything is asked or sent.
A stand-in serves over HTTP."""

import os
import threading
import warnings
from unittest.mock import patch

import pytest
import torch
from pages import names_of
from safetensors.torch import load_file, save_file

from drivelit.io.files import owner_of
from drivelit.policy import vllm
from drivelit.policy.engines import EngineError
from drivelit.policy.image_tokens import add_image_tokens
from drivelit.policy.model import load_policy
from drivelit.policy.vllm import TAKE, VLLMEngine, known_words, other_shape, release
from drivelit.testing.vllm import StubVLLM

conversations, move, local, same = names_of("20_policy/25_vllm", vllm, "conversations", "move", "local", "same")


def refused(words, call, *args, **options):
    with pytest.raises(EngineError) as e:
        call(*args, **options)
    assert words in str(e.value), str(e.value)


@pytest.fixture(scope="module")
def policy():
    return load_policy("toy", size="tiny")


@pytest.fixture(scope="module")
def longer():
    "A policy with more tokens."
    return add_image_tokens(load_policy("toy", size="tiny"), 4)


@pytest.fixture
def trainer(tmp_path):
    "An engine of another run, with weights of its own."

    def of(seed, servers, name):
        policy = load_policy("toy", size="tiny")
        move(policy, seed)
        return VLLMEngine(policy, servers, tmp_path / name / "served", dtype="float32", retries=0)

    return of


def publish(engine, outcomes):
    try:
        outcomes.append(engine.publish("rollout"))
    except EngineError as e:
        outcomes.append(str(e))


@pytest.mark.parametrize("trial", range(10))
def test_two_trainers_that_publish_at_the_same_moment(policy, trainer, trial):
    "The other's weights never stand under one's own version."
    with StubVLLM(policy) as server:
        engines = [trainer(seed, [server.root], f"run-{trial}-{seed}") for seed in (1, 2)]
        outcomes = [[], []]
        threads = [threading.Thread(target=publish, args=pair) for pair in zip(engines, outcomes, strict=True)]
        [t.start() for t in threads], [t.join() for t in threads]
        won = [o[0].startswith("rollout-") for o in outcomes]
        assert sum(won) < 2, outcomes
        if any(won):
            assert engines[won.index(True)].apart(conversations(1))[1] < 1e-4  # it speaks with its own weights


def test_a_server_belongs_to_a_run(policy, trainer, tmp_path):
    with StubVLLM(policy) as server:
        first, second = (trainer(seed, [server.root], f"run-{seed}") for seed in (1, 2))
        assert first.publish("rollout-0") == server.version
        refused("belongs to another run: its weights are 'rollout-0-", second.publish, "x")
        assert (server.paused, server.version) == (False, first.version)  # nothing was disturbed
        first.publish("rollout-1")
        assert first.apart(conversations(1))[1] < 1e-4
        (tmp_path / "run-1" / "again").mkdir()
        stage = VLLMEngine(first.policy, [server.root], tmp_path / "run-1" / "served")  # a later stage, or a restart
        stage.publish("rollout-0")
        refused("another stage of this run", first.publish, "x")
        with patch.dict(os.environ, {TAKE: "1"}):
            trainer(3, [server.root], "run-3").publish("taken")
        refused("has answered with the weights 'taken-", stage.generate, conversations(1), 4)
        refused("belongs to another run", stage.publish, "x")
        release([server.root], "nobody")
        assert server.version.startswith("taken-") and "@" in server.version
        release([server.root], owner_of(tmp_path / "run-3" / "served"))
        assert "@" not in server.version
        second.publish("rollout-0")


@pytest.mark.parametrize("look", [0, 1], ids=["when they were claimed", "when they were read"])
def test_somebody_else_has_named_the_weights(policy, trainer, look):
    with StubVLLM(policy) as server:
        late, looks = trainer(1, [server.root], "run-late"), []
        holds = late._holds

        def somebody_else(url, claim, seconds):
            server.version = "theirs@another" if len(looks) == look else server.version
            looks.append(server.version)
            holds(url, claim, seconds)

        late._holds = somebody_else
        refused("was given weights by two at once", late.publish, "x")
        assert server.paused and server.version == "theirs@another"
        sent = "/collective_rpc" in [path for path, _ in server.heard]
        assert sent == (look == 1)  # nothing is sent on a lost claim


def test_a_server_that_is_gone_keeps_its_owner():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        release(["http://127.0.0.1:9"], "x")
    assert [str(w.message)[:45] for w in caught] == ["http://127.0.0.1:9 still belongs to this run:"]


def test_another_model_version_or_name(policy, tmp_path):
    def start(*servers, **options):
        return VLLMEngine(policy, servers, tmp_path / "weights", **(dict(retries=0) | options))

    with StubVLLM(policy, name="Qwen/Qwen2.5-VL-3B-Instruct") as other, StubVLLM(policy) as server:
        words = "serves 'Qwen/Qwen2.5-VL-3B-Instruct', and the trainer's policy comes from 'toy'"
        refused(words, start, server.root, other.root)
        words = "has the weights 'default', the trainer asks for 'step-3'"
        refused(words, start, server.root, version="step-3")
        with StubVLLM(policy, name="/some/where/toy") as elsewhere:
            refused("call the model /some/where/toy, toy: start all", start, server.root, elsewhere.root)
        refused("http://127.0.0.1:9, health and models", start, server.root, "http://127.0.0.1:9")
        assert start(server.root, version="default").version == "default"


def test_words_from_all_over_the_vocabulary(policy):
    words, _ = known_words(policy.tokenizer)
    size = len(policy.tokenizer)
    for i in (0, size - 3, size - 2, size - 1):  # with what was added last
        assert policy.tokenizer.decode([i]) in words


@pytest.mark.parametrize("case", ["longer", "shorter", "another line"])
def test_another_vocabulary(policy, longer, tmp_path, case):
    lines = load_policy("toy", size="tiny", text=("A line that nobody else has.\n",))
    ours, theirs, words = {
        "longer": (policy, longer, "knows more tokens than the 1071 of"),
        "shorter": (longer, policy, "has another vocabulary"),
        "another line": (policy, lines, "has another vocabulary"),
    }[case]
    with StubVLLM(theirs) as server:
        refused(words, VLLMEngine, ours, [server.root], tmp_path / "weights", retries=0)
    assert {path for path, _ in server.heard} <= {"/tokenize", "/detokenize"}  # and nothing was asked or sent


def test_a_folder_that_can_be_seen(policy, longer, tmp_path):
    "Its name does not matter then: the shape of its model does."
    folder = policy.save(tmp_path / "run" / "final")
    assert other_shape(policy.model.config, folder) == ""
    with StubVLLM(policy, name=str(folder)) as server:
        VLLMEngine(policy, [server.root], tmp_path / "weights")
    words = "a model with text_config.vocab_size = 1071, and the trainer's policy has 1077"
    assert other_shape(longer.model.config, folder) == words
    with StubVLLM(longer, name=str(folder)) as server:
        start = (VLLMEngine, longer, [server.root], tmp_path / "weights")
        refused("text_config.vocab_size = 1071", *start, retries=0)


def fewer(file):
    save_file({k: v for k, v in load_file(file).items() if "norm" not in k}, file)


def larger(file):
    save_file({k: torch.cat([v, v]) for k, v in load_file(file).items()}, file)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda file: file.unlink(), id="gone"),
        pytest.param(lambda file: file.write_bytes(file.read_bytes()[:10_000]), id="cut off"),
        pytest.param(fewer, id="fewer"),
        pytest.param(larger, id="larger"),
    ],
)
def test_weights_that_cannot_be_read(policy, tmp_path, change):
    "The server stays paused, and the next weights make it work again."
    with StubVLLM(policy) as server:
        engine = VLLMEngine(policy, [server.root], tmp_path / "weights", dtype="float32", retries=0)
        write_all = engine._write

        def damaged(folder, weights):
            write_all(folder, weights)
            change(next(folder.glob("*.safetensors")))

        engine._write = damaged
        refused("HTTP 500", engine.publish, "bad")
        assert server.paused
        refused("the last publish failed", engine.generate, conversations(1), 4)
        engine._write = write_all
        engine.publish("good")
        answers = engine.generate(conversations(), 4, temperature=0)
        same(answers, local(policy).generate(conversations(), 4, temperature=0))
        assert [path for path, _ in server.heard].count("/resume") == 1

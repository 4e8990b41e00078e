"""What models and servers answer to DriveAgent, in every wrong form: it is read as a reason, and nothing falls over."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivelit.driveagent.backends import ServedDetector
from drivelit.driveagent.formats import PARTS, format_actions, parse_actions, parse_call, read
from drivelit.driveagent.toolkit import Toolkit
from drivelit.driveagent.vqa_data import SCORES, parse_scores
from drivelit.metrics.meta_actions import SPEEDS, STEPS, TRAJECTORIES
from drivelit.policy.text import ParseError
from drivelit.testing.server import Reply, StubServer
from drivelit.town.scenes import make_scene

PIECES = [*PARTS, "<meta actions>", "</meta actions>", "['", "']", "', '", "Stop, Straight", "{", "}", "[" * 50]
PIECES += ['"a": 1', "<think_tool>", "</think_tool>", "<description>"]
ACTIONS = st.lists(st.tuples(st.sampled_from(SPEEDS), st.sampled_from(TRAJECTORIES)), min_size=STEPS, max_size=STEPS)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text() | st.lists(st.sampled_from(PIECES), max_size=14).map("".join), max_size=4))
def test_any_texts_are_an_answer_or_a_reason(texts):
    answer = read(texts)
    assert answer.mode in ("text", "tool", None) and len(answer.parts) == 4
    assert isinstance(answer.actions, ParseError) or len(answer.actions) == STEPS


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_actions_that_are_written_are_read_again(actions):
    assert parse_actions(format_actions(actions)) == actions


NESTED = "<tool_call><tool_name>a</tool_name><params>" + '{"a":' * 20_000 + "</params></tool_call>"


@pytest.mark.parametrize("text", [NESTED, None, 3, b""], ids=["nested", "None", "number", "bytes"])
def test_what_is_no_call_is_a_reason(text):
    call = parse_call(text)
    assert isinstance(call, ParseError) and not call


PERFECT = dict(relevance=10, correctness=10, grounding=10)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "not JSON", id="empty"),
        pytest.param("[10, 10, 10]", "found list", id="list"),
        pytest.param('{"relevance": 10}', "'correctness', 'grounding' missing", id="missing"),
        pytest.param(json.dumps(PERFECT)[:-1], "not JSON", id="cut"),
        pytest.param(
            json.dumps(PERFECT | dict(grounding=11)), "grounding: '11' is not a whole number from 0 to 10", id="11"
        ),
        pytest.param(json.dumps(PERFECT | dict(grounding=-1)), "'-1' is not a whole number from 0", id="-1"),
        pytest.param(json.dumps(PERFECT | dict(grounding=9.5)), "not a whole number", id="9.5"),
        pytest.param(json.dumps(PERFECT | dict(grounding=True)), "not a whole number", id="true"),
        pytest.param(json.dumps(PERFECT | dict(grounding="10")), "not a whole number", id="text"),
        pytest.param(
            '{"relevance": 1, "relevance": 10, "correctness": 10, "grounding": 10}', "stands twice", id="twice"
        ),
        pytest.param("```json\n" + json.dumps(PERFECT) + "\n```", "not JSON", id="fenced"),
        pytest.param("[" * 100_000, "not JSON", id="nested"),
        pytest.param(json.dumps(PERFECT | dict(style=10)), "unknown key 'style'", id="unknown"),
    ],
)
def test_scores_of_a_judge_that_cannot_be_read(text, reason):
    scores = parse_scores(text)
    assert isinstance(scores, ParseError) and reason in scores.reason


VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.booleans() | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.sampled_from(SCORES), x),
)


@settings(max_examples=300, deadline=None)
@given(st.text() | VALUES.map(json.dumps))
def test_any_text_of_a_judge_is_scores_or_a_reason(text):
    scores = parse_scores(text)
    assert isinstance(scores, ParseError) or all(type(v) is int and 0 <= v <= 10 for v in scores.values())


SCENE = make_scene("lead_braking", 1001, 0.3)
CALL = dict(view_index="front", object_text="car")


@pytest.mark.parametrize(
    "answer",
    [
        b"500",
        b"not json",
        b"[]",
        b'{"boxes": 3}',
        b'{"boxes": [{}]}',
        b'{"boxes": [{"name": "a", "center": [1, 2], "size": [1, 1, 1], "yaw": 0}]}',
        b'{"boxes": [{"name": "a", "center": [1, 2, NaN], "size": [1, 1, 1], "yaw": 0}]}',
        b'{"boxes": [{"name": "a", "center": [1, 2, 3], "size": [1, -1, 1], "yaw": 0}]}',
    ],
)
def test_a_detector_that_answers_nonsense_is_not_available(answer):
    with StubServer(lambda ask: Reply(answer, 500 if answer == b"500" else 200)) as server:
        result = Toolkit(detector=ServedDetector(server.root + "/detect"))(SCENE, "3D Object Detection", CALL)
    assert (result.error, result.image, result.text) == ("not available", None, "the detector did not answer.")
    assert result.reason


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply(b"{}", wait=300), id="slow"),
        pytest.param(Reply(b" " * 100_000, drip=0.05), id="dripping"),
        pytest.param(Reply(b" " * 10_000, endless=True), id="endless"),
        pytest.param(Reply(b'{"boxes": []}', cut=True), id="cut"),
        pytest.param(Reply(b"{}", 404), id="refused"),
        pytest.param(Reply(b"[" * 100_000), id="nested brackets"),
    ],
)
def test_a_detector_behind_a_faulty_server_is_not_available(reply):
    with StubServer(lambda ask: reply) as server:
        hasty = Toolkit(detector=ServedDetector(server.root, timeout=0.5))
        assert hasty(SCENE, "3D Object Detection", CALL).error == "not available"


def test_a_detector_whose_server_is_gone_is_not_available():
    with StubServer(lambda ask: dict(boxes=[])) as server:
        served = Toolkit(detector=ServedDetector(server.root + "/detect"))
        assert served(SCENE, "3D Object Detection", CALL).error == ""
    assert served(SCENE, "3D Object Detection", CALL).error == "not available"

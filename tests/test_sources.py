"""A number of a paper's profile that names a place of the paper stands there, by a table of what these places say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FACTS = dict(  # system -> place -> numbers, names, or `key = word` where the paper says it in words
    mtdrive={
        "3.3": (0.8, 0.2),
        "eq. 2": (0.8, 0.2),
        "4.1": ("Qwen2.5-VL-7B-Instruct", 6, 11_500, 215_000, 80_000, 50_000, 5_000, 4, 4e-5, 128, 64)
        + (8, 256, 1e-6, 0.01, 13_000, 300, 32),
        "4.3": (6, 80_000, 50_000, 13_000, 300, 0.2, "sft_warm = no"),
        "table 1": ("perception = oracle",),
        "figure 2": ("metric_descriptions = yes",),
        "A.1": ("feedback_points = first", "line_break = yes"),
        "A.2": ("line_break = yes",),
    },
    driveagent={
        "2.1": ("spare_turn = no",),
        "2.2": ("Qwen2.5-VL-3B", 530_000, "align_first = yes"),
        "2.3.2": ("ratio = answer",),
        "3.1.1": (35_000, 4_000, 2_000, 15_000, 1_500, 8, "eval_draw = middle"),
        "3.1.3": (8, 259_200, 1.0, 3, 4, 0.7),
        "3.7": (1, 100, 5),
        "table 6": (1, 2),
        "A.2": ("Depth-Anything-V2",),
        "A.3.1": ("Qwen2.5-VL-72B",),
        "A.4": ("Qwen2.5-VL-3B", "Qwen2.5-VL-72B", 0.9, "explore_from = ambiguous"),
        "A.7.1": (0.5, 0.3, 15, 3, "turns_by = points"),
        "A.7.2": ("gpt-4.1",),
        "A.9.1": (200, 4, 800),
    },
    minddriver={
        "3.1": (6, 4, "form = text then image", "codebook of VQ-VAE"),
        "3.2": ("Qwen2.5-VL-72B", "Qwen3-235B-A22B-Instruct"),
        "4.1": ("Qwen2.5-VL-3B", "MoVQGAN", "inception", 28_130, 6_019, 1e-4, 32, 12, 3e-6, 16, 700, 500),
        "4.3": (0.33, 0.67),
        "table 5": (0.5, 1.0, 1.5),
        "tables 4 to 7": ("ego_state = no",),
        "figure 9": ("instruction = figure 9", "views = surround"),
        "7": (16, 96, 3, "freeze_vision = yes", 10, 6, 0.04, 1.0, 32),  # of the supplement
    },
    # what we have of these two is a summary, with headings in place of sections
    autodrive_p3={
        "overall architecture": ("Qwen2.5-VL-3B",),
        "loss and training": (6, 8, 0.01, "image_size = 448, 252", "frames_as = video"),
        "key design 2": ("format = paper",),
        "key design 3": ("pdms = no", "scheme = paper"),
        "key design 4": ("mode = both",),
        "ablation study": (4,),
    },
    minddrive={
        "method summary": (16, 24, 44, 2, 10, "single = no", "algorithm = ppo", "chat_b2d"),
        "design tradeoffs": (0.5, 16, 24),
    },
)
HEADINGS = "overall architecture|loss and training|key design [0-9]|ablation study|method summary|design tradeoffs"
SECTIONS = r"tables [0-9]+ to [0-9]+|(?:table|figure|eq\.) [0-9]+|\b[A-D](?:\.[0-9]+)*\b|\b[0-9](?:\.[0-9]+)*\b"
PLACE = re.compile(f"{HEADINGS}|{SECTIONS}")


def places(source):
    "The places that a source names; none if it is ours or of the code."
    own = re.match(r"(?:paper|MTDrive|DriveAgent-R1|MindDriver?)(?: \(summary\))?(?=[ :,])[:,]? ?(.*)", source)
    return PLACE.findall(re.sub(r"stage \d", "", re.split("[:(;]", own[1])[0])) if own else []


def stands(key, value, facts):
    "Whether one of the facts is this value."
    try:
        return float(value) in [f for f in facts if not isinstance(f, str)]
    except ValueError:
        words = [f.lower() for f in facts if isinstance(f, str)]
        return f"{key} = {value}".lower() in words or any(w in value.lower() for w in words)


def rows(system):
    "(key, value, source): of the table of docs/FIDELITY.md, and of the remarks in settings.ini."
    text = (ROOT / "settings.ini").read_text()
    body = re.search(rf"^\[{system}\.paper\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)[1]
    for line in body.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, rest = line.partition("=")
            value, _, source = rest.partition("#")
            yield key.strip(), value.strip(), source.strip()
    title = re.search(rf"^\[{system}\]\ntitle = (.+)$", text, re.M)[1]
    page = (ROOT / "docs" / "FIDELITY.md").read_text()
    part = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
    yield from re.findall(r"^\| `(\w+)` \| `([^`]+)` \| ([^|]+?) \|", part, re.M)


@pytest.mark.parametrize("system", FACTS)
def test_what_a_paper_is_named_for_stands_there(system):
    known, wrong, asked = FACTS[system], [], 0
    for key, value, source in rows(system):
        for place in places(source):
            asked += 1
            if not stands(key, value, known.get(place, ())):
                wrong.append(f"{key} = {value}: not in {place}")
    assert wrong == [] and asked > dict(autodrive_p3=12, minddrive=15).get(system, 40)


def test_the_check_sees_a_number_that_is_not_there():
    known = FACTS["mtdrive"]
    assert places("MTDrive 4.3: the epoch with the highest score") == ["4.3"] and places("ours: MTDrive 4.3") == []
    assert places("MTDrive 4.1 (4.3: the best of 6)") == ["4.1"]
    assert places("MindDriver, tables 4 to 7; table 1 has both") == ["tables 4 to 7"]
    assert places("MindDriver 4.1, stage 1") == ["4.1"] and places("MindDriver, supplement 7; top p 1") == ["7"]
    assert places("paper (summary), key design 3") == ["key design 3"] and places("paper: method summary") != []
    assert places("paper A.3.1, A.4") == ["A.3.1", "A.4"] and places("paper 3.3, eq. 2") == ["3.3", "eq. 2"]
    assert places("MTDrive table 1, row **; row * is kinematic") == ["table 1"]
    assert not stands("sft_candidates", "4", known["4.3"]) and not stands("gpu_memory", "80", known["4.1"])
    assert stands("sft_batch", "128", known["4.1"]) and stands("sft_learning_rate", "4e-5", known["4.1"])

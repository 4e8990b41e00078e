"""What run notebooks say of their tables: short, and from the record."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "nbs"
RUNS = (
    "50_mtdrive/30",
    "51_driveagent/70",
    "52_autodrive_p3/70",
    "53_minddriver/70",
    "54_minddrive/70",
    "60_closed_loop/20",
)
MOST = 120  # words of a table's findings


def texts_of(run: str) -> list[str]:
    "Texts that cells of code have shown."
    cells = json.loads((NOTEBOOKS / f"{run}_run.ipynb").read_text())["cells"]
    shown = [o.get("data", {}).get("text/markdown", "") for c in cells for o in c.get("outputs", ())]
    return ["".join(text) for text in shown if text]


@pytest.mark.parametrize("run", RUNS)
def test_findings_are_short(run: str) -> None:
    "At least one text of findings, and none is longer than a reader reads beside a table."
    texts = texts_of(run)
    assert texts, f"{run}: no text comes from the record"
    long = [f"{len(t.split())} words: {t[:60]}" for t in texts if len(t.split()) > MOST]
    assert not long, long


@pytest.mark.parametrize("run", RUNS)
def test_no_findings_in_prose(run: str) -> None:
    "Numbers and verdicts in prose are read by nothing, so they grow old."
    cells = json.loads((NOTEBOOKS / f"{run}_run.ipynb").read_text())["cells"]
    prose = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    assert not [t[:60] for t in prose if t.startswith(("**What the table says", "**What the committed"))]

"""docs/FIDELITY.md: what it names is there, its numbers are those of the profiles, and no row is without a verdict."""

import importlib
import re
from pathlib import Path

import pytest

from drivelit.runs.profiles import systems

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "FIDELITY.md"
STATUS = ("equal", "as the released code", "ours", "differs", "toy only", "no")


def tables(text):
    "(heading, columns, rows) of each table."
    heading, found = "", []
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            cells = [c.strip() for c in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            if not found or found[-1][0] != heading or found[-1][3]:
                found.append([heading, cells, [], False])
            elif not set("".join(cells)) <= set("-: "):
                found[-1][2].append(cells)
        elif found:
            found[-1][3] = True  # a line between: the next one is another table
    return [(heading, columns, rows) for heading, columns, rows, _ in found]


def parts():
    "The page by system."
    found = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def section_of(system):
    "Keys and values of a paper's profile, as they are written."
    text = (ROOT / "settings.ini").read_text()
    body = re.search(rf"^\[{system}\.paper\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S)[1]
    lines = [line.partition("#")[0] for line in body.splitlines() if "=" in line and not line.startswith("#")]
    return {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in lines)}


@pytest.mark.parametrize("system", systems())
def test_each_system_has_its_rows(system):
    text = parts()[systems()[system].title]
    numbers = {}
    for heading, columns, rows in tables(text):
        assert rows, heading
        for row in rows:
            assert len(row) == len(columns), row
            if columns[0] == "key":
                assert re.match(r"paper\b|released code|ours\b", row[2]), row
                numbers[row[0].strip("`")] = row[1].strip("`")
            else:
                assert row[2] in STATUS, row
                assert row[2] not in ("no", "differs") or row[1] or row[3], f"{row}: why not?"
                assert row[2] != "equal" or "](" in row[3], f"{row}: what shows it?"
    assert numbers == section_of(system)


def test_what_it_names_is_there():
    "Links, and names of the package."
    text = PAGE.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("http") or (PAGE.parent / link).exists(), link
    for name in set(re.findall(r"`(drivelit(?:\.\w+)+)`", text)):
        words = name.split(".")
        for k in range(len(words), 0, -1):
            try:
                thing = importlib.import_module(".".join(words[:k]))
            except ModuleNotFoundError:
                continue
            for word in words[k:]:
                assert hasattr(thing, word), name
                thing = getattr(thing, word)
            break

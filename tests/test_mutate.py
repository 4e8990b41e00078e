"""The one-line mistakes of `ci/mutate.py`: which there are, and that it tells a seen one from one that nobody sees."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci"))
from breaks import breaks  # noqa: E402

SOURCE = """
def f(a: "m - 1", b, hz=10):
    "Text - 3 < 4"
    x = (a - b) * hz
    if len(a) < 3 and b not in a:
        raise ValueError(f"{a - 1}")
    ax.plot(a[1:])
    return torch.cat([-x, g(a.x, b)], dim=-1) / max(a, 0.5)
"""


def test_each_kind_by_hand():
    found = {(b.kind, b.line(SOURCE)[2]) for b in breaks(SOURCE)}
    last = "return torch.cat([-x, g(a.x, b)], dim=-1) / max(a, 0.5)"
    assert found == {
        ("off by one", 'def f(a: "m - 1", b, hz=11):'),
        ("sign", "x = (a + b) * hz"),
        ("factor", "x = (a - b)"),
        ("comparison", "if len(a) <= 3 and b not in a:"),
        ("off by one", "if len(a) < 4 and b not in a:"),
        ("mask", "if len(a) < 3 or b not in a:"),
        ("sign", last.replace("-x", "x")),
        ("swapped", last.replace("a.x, b", "b, a.x")),
        ("axis", last.replace("-1", "0")),
        ("off by one", last.replace("-1", "-2")),
        ("factor", last.removesuffix(" / max(a, 0.5)")),
        ("function", last.replace("max", "min")),
        ("factor", last.replace("0.5", "1")),
    }


def test_seen_unseen_and_gone(tmp_path):
    "A sum that subtracts is seen by its notebook, a comment by nobody, and a line that is not there is told."
    text = (ROOT / "drivelit/scene/clock.py").read_text()
    line = "sums[name] = sums.get(name, 0) + value"
    rows = [
        dict(name="equal", module="drivelit/scene/clock.py", old=line, new=line + "  # sum"),
        dict(name="subtracts", module="drivelit/scene/clock.py", old=line, new=line.replace(" + ", " - ")),
        dict(name="gone", module="drivelit/scene/clock.py", old="this stands nowhere", new="x"),
    ]
    (tmp_path / "given.json").write_text(json.dumps(rows))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "ci/mutate.py", "--given", tmp_path / "given.json", "--out", out, "--elsewhere", "0"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = {r["name"]: r["seen"] for r in map(json.loads, out.read_text().splitlines())}
    assert (seen["equal"], seen["subtracts"]) == ("", "home"), done.stderr
    assert "no longer there: gone" in done.stdout and "1 of 2 seen" in done.stdout
    assert text == (ROOT / "drivelit/scene/clock.py").read_text()
    assert not list(tmp_path.glob("mutate-*"))

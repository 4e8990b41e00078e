"""The front pages: the map in nbs/index.ipynb, and README.md on one page.   python ci/readme.py [--check]

The map lists the notebooks, a cell for each package: title and summary from their first cells, the seconds from
ci/times.json.
--check only compares it, and counts the README's words.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell

from drivelit.runs.profiles import systems

ROOT = Path(__file__).resolve().parents[1]
INDEX, README = ROOT / "nbs" / "index.ipynb", ROOT / "README.md"
PAGE = 900  # words
PACKAGES = {
    "00_scene": "what a driving moment is",
    "02_town": "roads, situations and routes drawn from a seed",
    "04_sources": "recorded driving, read as the same scenes",
    "06_io": "files whole or absent, weights, processes",
    "10_metrics": "how good a plan is",
    "20_policy": "the model that plans",
    "30_rollout": "many turns with feedback",
    "35_data": "rows and pictures on disk, teachers and judges",
    "40_training": "supervised tuning, the GRPO family, PPO, throughput",
    "42_runs": "profiles, stages, plays, reports, the command line, the cluster",
    "45_base": "what the policy knows before any system",
    **{s.notebooks: s.title for s in systems().values()},
    "60_closed_loop": "all systems on the same routes",
    "65_bridges": "official tools and your own planner",
    "80_testing": "stand-ins for servers and simulators",
}
HEAD = ["| notebook | what it adds | time |", "| --- | --- | ---: |"]


def row(path, times):
    "One line of the map: link, summary, seconds."
    head = nbformat.read(path, 4).cells[0].source
    title, summary = (re.search(p, head, re.M).group(1) for p in (r"^# (.+)", r"^> (.+)"))
    link = path.relative_to(INDEX.parent).as_posix()
    seconds = times.get(path.relative_to(ROOT).as_posix())
    return f"| [{title}]({link}) | {summary} | {'' if seconds is None else f'{seconds} s'} |"


def packages():
    "The map: a cell of Markdown for each package; a system is in it once it has a run."
    times = json.loads((ROOT / "ci/times.json").read_text())
    for package in sorted(p.name for p in INDEX.parent.glob("[0-9]*_*") if p.name in PACKAGES):
        rows = [row(p, times) for p in sorted((INDEX.parent / package).glob("*.ipynb"))]
        yield "\n".join([f"### {package}: {PACKAGES[package]}", "", *HEAD, *rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if (words := len(README.read_text(encoding="utf-8").split())) > PAGE:
        print(f"README.md: {words} words, and a page has {PAGE}; move something into docs/")
        return 1
    nb = nbformat.read(INDEX, 4)
    made, drawn = list(packages()), [c for c in nb.cells if HEAD[0] in c.source]
    if check and [c.source for c in drawn] != made:
        print("nbs/index.ipynb: its map is not what the notebooks say; run: python ci/readme.py")
        return 1
    if not check:
        cells = [new_markdown_cell(m, id=f"map{m[4:6]}package") for m in made]
        nb.cells = [c for c in nb.cells if c not in drawn] + cells
        nbformat.write(nb, INDEX)
    return 0


if __name__ == "__main__":
    sys.exit(main())

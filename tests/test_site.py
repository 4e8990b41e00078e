"""The pages that the site is built from: every notebook and text, without directives, each link to a page or away."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci"))
import site_pages  # noqa: E402


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "pages"
    subprocess.run([sys.executable, ROOT / "ci" / "site_pages.py", folder], check=True, timeout=1800)
    return folder


def test_every_notebook_is_a_page_in_one_group_of_the_contents(pages):
    start = (pages / "index.md").read_text(encoding="utf-8").split("```{toctree}")[1]
    groups = re.findall(r"^[a-z_]+$", start, re.M)
    assert groups == ["start", "five_systems", "methods", "scenes_and_metrics", "runs", "bridges", "reference"]
    lists = [pages / f"{g}.md" for g in groups]
    sections = [
        section for page in lists for section in re.findall(r"^sections/\w+$", page.read_text(encoding="utf-8"), re.M)
    ]
    assert set(sections) == {f"sections/{p.stem}" for p in (pages / "sections").glob("*.md")} and len(
        set(sections)
    ) == len(sections)
    contents = "\n".join(
        p.read_text(encoding="utf-8") for p in (*lists, *(pages / f"{section}.md" for section in sections))
    )
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        assert len(re.findall(f"^/?{name}$", contents, re.M)) == 1, (
            f"{name} is missing in the contents, or stands there twice"
        )
        assert (pages / path.relative_to(ROOT)).exists()


def test_a_section_says_what_each_of_its_notebooks_is_about(pages):
    text = (pages / "sections/40_training.md").read_text(encoding="utf-8")
    assert "- {doc}`/nbs/40_training/20_grpo`: Who gets the credit: one number for the conversation, " in text
    for section in (pages / "sections").glob("*.md"):
        said = re.findall(r"^- \{doc\}`/nbs/([\w/]+)`: \S[^\n]{20,}$", section.read_text(encoding="utf-8"), re.M)
        assert said == sorted(f"{section.stem}/{p.stem}" for p in (ROOT / "nbs" / section.stem).glob("*.ipynb")), (
            section.stem
        )


def test_cells_of_imports_are_folded(pages):
    cells = json.loads((pages / "nbs/10_metrics/10_pdm.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    folded = [c["source"] for c in code if "hide-cell" in c["metadata"].get("tags", [])]
    assert folded and all(re.match("(import|from) ", s) for s in folded)
    assert not any(re.match("(import|from) [^\n]+$", c["source"]) and c["source"] not in folded for c in code)


def test_pages_show_code_without_directives_and_hidden_cells(pages):
    for path in pages.glob("nbs/*/*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                assert not re.search(r"^#\|", cell["source"], re.M), path
    shown = json.loads((pages / "nbs/10_metrics/10_pdm.ipynb").read_text(encoding="utf-8"))["cells"]
    assert any("def score" in cell["source"] for cell in shown if cell["cell_type"] == "code")


def test_a_formula_is_a_paragraph(pages):
    cells = json.loads((pages / "nbs/10_metrics/10_pdm.ipynb").read_text(encoding="utf-8"))["cells"]
    (asked,) = [c["source"] for c in cells if c["cell_type"] == "markdown" and "**The question.**" in c["source"]]
    assert re.search(r"\n\n\$\$[^$]+\$\$\n\n", asked)


def test_links_lead_to_pages_or_to_the_repository(pages):
    known = {p.resolve() for p in pages.rglob("*") if p.suffix in (".md", ".ipynb", ".png", ".gif", ".webp")}
    for path in [*(pages / "nbs").rglob("*.ipynb"), *pages.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "".join(c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"[a-z]+:|#", target):
                assert (path.parent / target.partition("#")[0]).resolve() in known, (path, target)


def test_an_anchor_and_a_file_that_is_no_page():
    known = {Path("nbs/a/b.ipynb"), Path("README.md")}
    page, address = Path("nbs/a/b.ipynb"), site_pages.REPOSITORY
    assert site_pages.linked("[x](#Who-is-found?)", page, known) == "[x](#who-is-found)"
    assert site_pages.linked("[x](../../README.md#Two-commands)", page, known) == "[x](../../index.md#two-commands)"
    assert site_pages.linked("[x](../../LICENSE)", page, known) == f"[x]({address}/blob/main/LICENSE)"
    assert site_pages.linked("[x](https://a.b/C#D)", page, known) == "[x](https://a.b/C#D)"


def test_a_page_in_colab_installs_what_it_lacks_and_leaves_what_is_there(pages, monkeypatch):
    nbs = {n: json.loads((pages / f"_colab/nbs/{n}.ipynb").read_text("utf-8")) for n in COLAB}
    for name, wanted in COLAB.items():
        source = "".join(nbs[name]["cells"][1]["source"])
        needs = json.loads(re.search(r"^NEEDS = (\[.*?\])$", source, re.M | re.S)[1])
        assert {re.match(r"[\w-]+", n)[0] for n in needs} == set(wanted), name
        calls = []
        monkeypatch.setattr(subprocess, "run", lambda words, check, calls=calls: calls.append(words))
        monkeypatch.setattr("importlib.metadata.version", lambda name: {"fastcore": "1.8"}.get(name, "0.1"))
        exec(source, {})
        lacks = [n for n in needs if re.search("[=~>]", n)]  # all are there, and some are too old
        assert [words[5:] for words in calls] == ([lacks] if lacks else []), name


TRAIN = "accelerate datasets jinja2 peft psutil tensorboard torch transformers trl".split()
COLAB = {
    "04_sources/44_navsim": ["drivelit", "fastcore", "geopandas", "networkx", "pyogrio", "pyproj"],
    "10_metrics/10_pdm": ["drivelit", "fastcore", "hypothesis"],
    "65_bridges/60_rerun": ["drivelit", "fastcore", "rerun-sdk"],
    "40_training/18_one_page": ["drivelit", *TRAIN],
}

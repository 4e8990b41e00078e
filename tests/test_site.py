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
    subprocess.run([sys.executable, ROOT / "ci" / "site_pages.py", folder], check=True, timeout=300)
    return folder


def test_every_notebook_is_a_page_in_the_contents(pages):
    contents = (pages / "index.md").read_text(encoding="utf-8")
    for path in (ROOT / "nbs").glob("*/*.ipynb"):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        assert f"\n{name}\n" in contents, f"{name} is missing in the contents"
        assert (pages / path.relative_to(ROOT)).exists()


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

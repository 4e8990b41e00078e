"""README.md from nbs/index.ipynb: python ci/readme.py [--check] [--execute].

--execute runs the notebook first (its map reads ci/times.json) and keeps the outputs; --check only compares.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "nbs" / "index.ipynb"


def readme(nb):
    "The notebook as Markdown: `#| echo: false` cells show their output alone; links are told from the root."
    nb = nbformat.from_dict(nb)
    for cell in nb.cells:
        if cell.cell_type == "code" and "#| echo: false" in cell.source:
            cell.metadata["tags"] = ["remove_input"]
    exporter = MarkdownExporter()
    exporter.register_preprocessor("nbconvert.preprocessors.TagRemovePreprocessor", enabled=True)
    exporter.config.TagRemovePreprocessor.remove_input_tags = ("remove_input",)
    exporter = MarkdownExporter(config=exporter.config)
    text = exporter.from_notebook_node(nb)[0]
    text = re.sub(r"\]\((?!https?:|#|\.\./)", "](nbs/", text).replace("](../", "](")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--execute", action="store_true")
    given = parser.parse_args()
    nb = nbformat.read(INDEX, 4)
    if given.execute:
        from nbclient import NotebookClient
        from nbdev.clean import nbdev_clean

        NotebookClient(nb, kernel_name="python3", resources={"metadata": {"path": str(INDEX.parent)}}).execute()
        nbformat.write(nb, INDEX)
        nbdev_clean(str(INDEX))
        nb = nbformat.read(INDEX, 4)
    text, path = readme(nb), ROOT / "README.md"
    if not given.check:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        print("README.md is not what nbs/index.ipynb says; run: python ci/readme.py --execute")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

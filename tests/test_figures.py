"""The labels of the committed figures, where a page is 760 pixels wide."""

import base64
import json
import re
import struct
from pathlib import Path

import pytest

PAGE, LEAST = (
    760,
    5.8,
)  # pixels: the width of a page, and the height of the smallest letters that pass: raise it as figures are mended
NOTEBOOKS = sorted((Path(__file__).parents[1] / "nbs").rglob("*.ipynb"))


def label_pixels(points, dpi, width):
    "The height of a label in a picture so many pixels wide, where it is shrunk to the page."
    return points / 72 * dpi * min(1, PAGE / width)


def figures(path):
    "(dpi, smallest font size in points, width in pixels, cell) of each committed figure of matplotlib."
    nb = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(c["source"]) for c in nb["cells"]]
    own = re.search(r'rcParams\["figure\.dpi"\] = (\d+)', "".join(sources))
    for cell, source in zip(nb["cells"], sources, strict=True):
        for out in cell.get("outputs", ()):
            png = out.get("data", {}).get("image/png")
            if not png or "Figure" not in "".join(out["data"].get("text/plain", ())):
                continue  # pictures that no figure has made have no labels
            width = struct.unpack(">I", base64.b64decode("".join(png))[16:20])[0]
            sizes = [float(x) for x in re.findall(r"fontsize=([\d.]+)", source)]
            yield float(own[1]) if own else 72.0, min([10.0, *sizes]), width, cell["id"]


def test_a_label_by_hand():
    "9 points at 80 dpi are 10 pixels; in a picture of 1,520 pixels half of that is left."
    assert label_pixels(9, 80, 700) == 10
    assert label_pixels(9, 80, 1520) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_labels_can_be_read(path):
    "The font sizes are those of the cell; what a function of the package sets is not seen here."
    small = {
        cell: round(px, 1)
        for dpi, points, width, cell in figures(path)
        if (px := label_pixels(points, dpi, width)) < LEAST
    }
    assert not small, f"labels of so many pixels at {PAGE}: {small}"

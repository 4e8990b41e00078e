"""The labels of the committed figures and of what the package draws, where a page is 760 pixels wide."""

import base64
import importlib.util
import json
import re
import struct
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from drivelit.autodrive_p3 import pictures as p3_pictures
from drivelit.closed_loop.claims import plot_claims
from drivelit.driveagent import pictures as driveagent_pictures
from drivelit.driveagent import report as driveagent_report
from drivelit.minddrive import pictures as minddrive_pictures
from drivelit.minddrive import report as minddrive_report
from drivelit.minddriver import pictures as minddriver_pictures
from drivelit.minddriver import report as minddriver_report
from drivelit.mtdrive import pictures as mtdrive_pictures
from drivelit.mtdrive import report as mtdrive_report
from drivelit.runs.profiles import find_system
from drivelit.runs.record import read_record
from drivelit.runs.report import paired, paired_row, plot_compared
from drivelit.runs.stages import plot_stages
from drivelit.scene.plot import plot_scene
from drivelit.town.scenes import make_scene
from drivelit.training.checkpoints import plot_metrics

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


# What functions of the package draw. Their pages show figures at 90 dpi (`page_outputs`).
DPI = 90
SEVEN = 7.0  # pixels: what the package sets itself may be asked for more than LEAST
RESULTS = Path(__file__).parents[1] / "nbs"


def texts_of(figure):
    "(words, size in pixels on the page, box) of each text that is drawn; a tick outside the view is none."
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # the layout
    drawn, renderer = {}, canvas.get_renderer()
    write = renderer.draw_text

    def noted(gc, x, y, s, prop, angle, ismath=False, mtext=None):
        drawn[id(mtext)] = mtext
        return write(gc, x, y, s, prop, angle, ismath, mtext)

    with patch.object(renderer, "draw_text", noted):
        figure.draw(renderer)
    width = figure.get_tightbbox(renderer).width * DPI  # a notebook cuts the margins off

    def pixels(t):
        return label_pixels(t.get_fontsize(), DPI, width)

    return [(t.get_text(), pixels(t), t.get_window_extent(renderer)) for t in drawn.values() if t is not None]


def faults(figure):
    "What cannot be read: letters that are too small, and texts that lie on each other by more than a pixel."
    texts = texts_of(figure)
    small = [f"{words!r}: {px:.1f} pixels" for words, px, _ in texts if px < SEVEN]

    def across(a, b):
        return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1

    return small + [f"{a!r} lies on {b!r}" for (a, _, p), (b, _, q) in combinations(texts, 2) if across(p, q)]


def test_the_check_sees_overlap_and_small_letters():
    "Red where it has to be: two titles on each other, and a label of 4 points."
    figure, (left, right) = plt.subplots(1, 2, figsize=(6, 2))
    assert faults(figure) == []
    left.set_title("a title that is much longer than its axes are wide")
    right.set_title("and another one of the same kind")
    (found,) = faults(figure)
    assert found.endswith("lies on 'and another one of the same kind'")
    left.set_title("")
    right.set_xlabel("small", fontsize=4)
    assert faults(figure) == ["'small': 5.0 pixels"]
    plt.close(figure)


def test_a_wide_figure_is_shrunk_to_the_page():
    "9 points of a figure of 16 inches: 1,440 pixels become 760, and the letters half as high."
    figure, ax = plt.subplots(figsize=(16, 2), layout="constrained")
    ax.set_title("words", fontsize=9)
    assert any(f.startswith("'words': ") for f in faults(figure))
    plt.close(figure)


def scene(family="red_light", **how):
    "plot_scene with two plans and crosses."
    town = make_scene(family, 7, 0.6)
    ahead = np.stack([2.0 * np.arange(1, 9), np.zeros(8), np.zeros(8)], 1)
    return plot_scene(town, plans={"constant velocity": ahead, "half of it": 0.5 * ahead}, mark_points=ahead[4:], **how)


def verdicts():
    "plot_compared with each word."
    rng = np.random.default_rng(0)

    def noise(spread):
        return spread * rng.normal(size=(4, 60))

    gaps = {"a long name of an arm > another one": 0.2, "b > a": -0.2, "c > a": 0.0, "d > a, sampled": 0.01}
    spreads = (0.1, 0.1, 0.01, 0.8)
    rows = [paired_row(n, paired(g + noise(s), 0 * noise(s))) for (n, g), s in zip(gaps.items(), spreads, strict=True)]
    return plot_compared(pd.DataFrame(rows))


def forest():
    "plot_claims of two papers, in two units, with what is not comparable and what has not run."
    columns = ("claim", "paper", "ours", "difference", "Holm")
    rows = [
        ("the plan's reward alone does not lift perception", "no gain", "4.0 ± 1.0 against 3.0 ± 2.0, PDMS, points")
        + ("+15.2 (+9.2 to +21.4)", "shown"),
        ("drives better", "ablation: collisions 0.06 %, 0.17 %", "4.0 against 3.0, PDMS, points")
        + ("-12.7 (-18.8 to -6.4)", "reversed"),
        ("reinforcement", "table 3: 96.2, 88.1", "4.0 against 3.0, PDMS, points")
        + ("+1.8 (-0.7 to +4.4); one seed: scenes only", ""),
        ("a group of 8, not of 4", "L2 0.33 m, 0.38 m", "4.0 against 3.0, ADE, cm", "+2.0 (-6.1 to +9.4)", "not shown"),
        ("two experts, not one", "two LoRA experts", "– against –, success, points", "", ""),
    ]
    table = pd.DataFrame(rows, columns=columns)
    return plot_claims({"One paper": table, "And another": table.iloc[:2]})


def curves(folder):
    "plot_metrics of two curves; it saves its figure."
    for k in range(3):
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(dict(step=k, loss=1.0 / (1 + k), reward=0.1 * k)) + "\n")
    drawn = []
    with patch.object(Figure, "savefig", lambda figure, path: drawn.append(figure)):
        plot_metrics(folder, ["loss", "reward"])
    return drawn[0]


def architecture():
    "The drawing of the architecture."
    spec = importlib.util.spec_from_file_location("architecture", Path(__file__).parents[1] / "ci" / "architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw()


def record(folder):
    "A system's committed record."
    return read_record(RESULTS / folder / "results" / "laptop.parquet")


DRAWN = {
    "plot_scene": lambda tmp: scene(),
    "plot_scene, a crowded legend": lambda tmp: scene("road_works", extent=(-10, 50, -14, 14)),
    "plot_compared": lambda tmp: verdicts(),
    "plot_claims": lambda tmp: forest(),
    "plot_metrics": curves,
    "mtdrive, an episode": lambda tmp: mtdrive_pictures.example_figure(),
    "driveagent, an episode": lambda tmp: driveagent_pictures.example_figure(),
    "autodrive_p3, answers": lambda tmp: p3_pictures.example_figure(),
    "minddriver, dreams": lambda tmp: minddriver_pictures.example_figure(),
    "minddrive, drives": lambda tmp: minddrive_pictures.example_figure(),
    "mtdrive, turns": lambda tmp: mtdrive_report.plot_turns(record("50_mtdrive")),
    "driveagent, stages": lambda tmp: driveagent_report.plot_stages(record("51_driveagent")),
    "minddriver, distances": lambda tmp: minddriver_report.plot_ade(record("53_minddriver")),
    "minddrive, rounds": lambda tmp: minddrive_report.plot_rounds(record("54_minddrive")),
    "the architecture": lambda tmp: architecture(),
} | {
    f"{system}, stages": lambda tmp, system=system: plot_stages(find_system(system).stages)
    for system in ("mtdrive", "driveagent", "autodrive_p3", "minddriver", "minddrive")
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_the_package_draws_can_be_read(name, tmp_path):
    "No two texts lie on each other, and the smallest letters have seven pixels on a page."
    plt.close("all")
    made = np.ravel([DRAWN[name](tmp_path)])[0]
    figure = made.figure if isinstance(made, Axes) else made
    found = faults(figure)
    plt.close("all")
    assert not found, found


def beyond_their_boxes(figure):
    "Texts whose middle lies in a box of the drawing and that are wider or higher than it."
    texts = texts_of(figure)  # this lays it out
    boxes = [p.get_window_extent() for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]

    def inside(box, text):
        return box.contains((text.x0 + text.x1) / 2, (text.y0 + text.y1) / 2)

    def within(box, text):
        return box.x0 <= text.x0 and text.x1 <= box.x1 and box.y0 <= text.y0 and text.y1 <= box.y1

    return [words for words, _, text in texts for box in boxes if inside(box, text) and not within(box, text)]


def test_the_drawing_holds_its_texts():
    "And it is seen where a title is too wide, as 52_autodrive_p3 was by a pixel."
    figure = architecture()
    assert beyond_their_boxes(figure) == []
    for text in figure.axes[0].texts:
        if text.get_text() == "52_autodrive_p3":
            text.set_fontsize(10)
    assert beyond_their_boxes(figure) == ["52_autodrive_p3"]
    plt.close(figure)

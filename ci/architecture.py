"""The drawing of the architecture, assets/architecture.png: python ci/architecture.py.

Packages from bottom to top, what each hands up, the systems of settings.ini, and where a new one goes. What is drawn
stands in the picture's description too, so that a test can tell whether the drawing is of this architecture.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from drivelit.runs.profiles import systems

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "assets" / "architecture.png"
PACKAGES = {  # folder: (what lives there, left, bottom, width, height), in units of the drawing
    "06_io": ("files whole or absent, digests, locks; weights, processes", 0, -13, 76, 7),
    "00_scene": ("a driving moment,\ncameras, plots", 50, -2, 26, 9),
    "02_town": ("the toy town: roads,\nsituations, routes", 20, -2, 26, 9),
    "04_sources": ("readers of\nrecorded\ndriving", 0, -2, 16, 22),
    "10_metrics": ("how good a plan is: PDMS,\nEPDMS, open, closed loop", 20, 11, 26, 9),
    "20_policy": ("the model that plans: toy or\nQwen2.5-VL, parsers, engines", 50, 11, 26, 9),
    "30_rollout": ("tasks and episodes: many turns with feedback", 0, 24, 76, 7),
    "35_data": ("rows, pictures, scenes and episodes on disk; teachers and judges", 0, 35, 76, 7),
    "40_training": ("learning: supervised tuning, GRPO family, PPO, sharding, checkpoints", 0, 46, 76, 7),
    "42_runs": ("running: profiles, plays, stages, reports, the command line, the cluster", 0, 57, 76, 7),
    "45_base": ("data, recipe and probes of the base that load_policy opens", 0, 68, 76, 7),
    "60_closed_loop": ("the policies of all systems on the same routes", 0, 96, 76, 7),
    "65_bridges": ("official tools, simulators and your own planner at the other end", 0, 107, 76, 7),
    "80_testing": ("stand-ins for servers\nand simulators", 82, 94, 20, 9),
}
FLOWS = [(8, -6, ""), (33, -6, ""), (63, -6, "files"), (33, 7, "Scene"), (63, 7, "Scene")]
FLOWS += [(8, 20, "Scene"), (33, 20, "scores"), (63, 20, "completions"), (38, 31, "Episode")]
ASIDE = [((50, 2.5), (46, 2.5)), ((20, 2.5), (16, 2.5))]  # from one box to the one beside it
FLOWS += [
    (38, 42, "rows"),
    (38, 53, "trainers"),
    (38, 64, "trainers, stages"),
    (12, 75, "trainers, stages, weights"),
    (38, 75, ""),
    (64, 75, ""),
    (38, 92, "planners"),
    (38, 103, "plans"),
]
READERS = {2: "python -m drivelit", 9: "the rules of imports", 16: "the map in nbs/index", 23: "ci/main.sh, ci/test.sh"}
SHARED, SYSTEM, NEW, TABLE = "#dbe4ff", "#d3f9d8", "#ffffff", "#fff3bf"


def description():
    "What the drawing shows, as text."
    return ", ".join([*PACKAGES, *(s.notebooks for s in systems().values()), "5x_yours"])


def box(ax, left, bottom, width, height, title, text, color, style="-", small=False):
    "A rounded box with a bold title over its text."
    shape = FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=1.2", lw=1.3, ls=style)
    shape.set(facecolor=color, edgecolor="#495057")
    ax.add_patch(shape)
    ax.text(
        left + width / 2,
        bottom + height - 1.1,
        title,
        ha="center",
        va="top",
        fontsize=8.2 if small else 12,
        weight="bold",
    )
    size = 7.8 if small else 10.5
    ax.text(left + width / 2, bottom + 1.2, text, ha="center", va="bottom", fontsize=size, linespacing=1.15)


def arrow(ax, start, end, **style):
    "From what is used to what uses it."
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", lw=1.5, color="#495057") | style)


def draw():
    "The figure."
    fig, ax = plt.subplots(figsize=(11, 12.6), layout="constrained")
    flow = dict(va="center", fontsize=10.5, style="italic", color="#364fc7")
    for folder, (text, *place) in PACKAGES.items():
        box(ax, *place, folder, text, SHARED)
    for x, y, what in FLOWS:
        arrow(ax, (x, y), (x, y + 4))
        ax.text(x + 1, y + 2, what, **flow)
    for start, end in ASIDE:
        arrow(ax, start, end)
    table = list(systems().values())
    width = (76 - 2 * len(table)) / (len(table) + 1)
    inside = "overview, formats,\ntask, profile, data,\npipeline, report,\nrun, explorer"
    for i, s in enumerate(table):
        box(ax, i * (width + 2), 79, width, 13, s.notebooks, f"{s.title}\n{inside}", SYSTEM, small=True)
    yours = "a new system: a\nfolder, a section,\nthree profiles;\nno other package\nchanges"
    box(ax, len(table) * (width + 2), 79, width, 13, "5x_yours", yours, NEW, "--", small=True)
    rows = "\n".join([*(f"[{s.name}]" for s in table), "[yours]"])
    profiles = "[yours.smoke]\n[yours.laptop]\n[yours.paper]"
    text = f"the table of systems\n\n{rows}\n\nprofiles of each\n\n{profiles}\n"
    box(ax, 82, 57, 20, 35, "settings.ini", text, TABLE)
    arrow(ax, (92, 57), (92, 28))
    ax.text(93, 42, "is read by", **flow)
    for y, what in READERS.items():
        ax.text(92, y + 2, what, ha="center", va="center", fontsize=10.5, bbox=dict(boxstyle="round", fc="white"))
    ax.set(xlim=(-1, 103), ylim=(-14, 115))
    rule = "A package may import every shared one below it that its arrows reach; systems never import each other"
    ax.set_title(rule, fontsize=12)
    ax.axis("off")
    return fig


def main():
    draw().savefig(PICTURE, dpi=110, metadata={"Description": description(), "Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())

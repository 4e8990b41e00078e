"""Which notebooks say something else than what stands in them: python ci/stale.py [paths].

Each is executed in a kernel, as a reader does it, and the text of its cells is compared with what is stored. Seconds,
sizes, dates and temporary folders are not compared; pictures, and cells that are slow, neither. Nothing is written.
Where a page reads DRIVELIT_SAMPLES, some outputs are stored with it and some without: try both.
"""

import re
import sys
from pathlib import Path

import click
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from notebooks import ROOT, all_notebooks

LEFT_OUT = ("#| slow", "#| eval: false")
PICTURES = {"image/png", "application/vnd.jupyter.widget-view+json"}  # bars are widgets, too
VARIES = {
    r"/tmp/[\w./-]+": "FOLDER",
    r"0x[0-9a-f]+": "ADDRESS",
    r"127\.0\.0\.1:\d+": "SERVER",
    r"20\d\d-\d\d-\d\d( \d\d:\d\d:\d\d)?": "DATE",
    r"\d[\d.,]* ?(s|ms|µs|seconds|minutes|[kMGT]?B)\b": "AMOUNT",
    r"\s+": " ",
}


def text_of(cell):
    "What a code cell has printed and shown as text, without what varies from run to run."
    out = []
    for o in cell.outputs:
        if o.output_type == "stream" and o.name == "stdout":
            out.append(o.text)
        elif o.output_type in ("execute_result", "display_data") and not PICTURES & set(o.data):
            out.append(o.data.get("text/plain", ""))
    text = "".join(out)
    for pattern, name in VARIES.items():
        text = re.sub(pattern, name, text)
    return text.strip()


def around(a, b, most=60):
    "Where two texts part, with what stands around it."
    k = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return [text[max(0, k - most) : k + most] for text in (a, b)]


def stale_cells(path):
    "(id, stored text, text now) of the cells of a notebook that differ."
    nb = nbformat.read(ROOT / path, 4)
    nb.cells = [c for c in nb.cells if c.cell_type == "code" and not c.source.lstrip().startswith(LEFT_OUT)]
    stored = [text_of(c) for c in nb.cells]
    folder = dict(metadata=dict(path=str((ROOT / path).parent)))
    NotebookClient(nb, timeout=1800, kernel_name="python3", resources=folder).execute()
    return [(c.id, a, b) for c, a in zip(nb.cells, stored, strict=True) if a != (b := text_of(c))]


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
def main(paths):
    stale = 0
    for path in paths or all_notebooks():
        try:
            cells = stale_cells(path)
        except CellExecutionError as e:
            cells = [("a cell fails", "", str(e).strip().splitlines()[-1])]
        stale += bool(cells)
        print("stale" if cells else "same ", path, flush=True)
        for cell, *texts in cells:
            before, now = around(*texts)
            print(f"    {cell}: stored {before!r}, now {now!r}", flush=True)
    print(f"{stale} stale")
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()

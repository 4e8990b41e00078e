"""Execute the notebooks, several at a time, the longest first: python ci/notebooks.py [paths] [--workers 2].

A notebook with a cell tagged `parameters` goes through papermill with the profile `smoke`; the others through
nbclient. Nothing is written into the repository, but --save-times keeps the seconds in ci/times.json, which the
map in README.md shows.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import nbformat
import papermill
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "ci" / "times.json"


def all_notebooks():
    "Every notebook of the house, in reading order."
    paths = [p.relative_to(ROOT) for p in (ROOT / "nbs").rglob("*.ipynb")]
    return sorted(p for p in paths if not any(part.startswith((".", "_")) for part in p.parts))


def parameters(nb):
    "The source of the cell tagged `parameters`, or ''."
    return next((c.source for c in nb.cells if "parameters" in c.metadata.get("tags", [])), "")


def execute(path, out, limit, slow):
    "One notebook in this process: prepare a copy, then papermill or nbclient."
    nb = nbformat.read(ROOT / path, 4)
    skip = ("#| eval: false", *(() if slow else ("#| slow",)))
    nb.cells = [c for c in nb.cells if c.cell_type != "code" or not c.source.startswith(skip)]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    copy, folder = out / path.name, (ROOT / path).parent
    nbformat.write(nb, copy)
    if declared := parameters(nb):
        given = {
            k: v
            for k, v in dict(profile="smoke", out=str(out / "run")).items()
            if f"{k} " in declared or f"{k}:" in declared
        }
        papermill.execute_notebook(
            copy,
            out / f"done_{path.name}",
            given,
            kernel_name="python3",
            cwd=folder,
            progress_bar=False,
            execution_timeout=limit,
        )
    else:
        NotebookClient(
            nb, timeout=limit, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()


def hung(*_):
    "What the alarm calls."
    raise TimeoutError("the whole notebook took too long")


def run(path, limit, slow):
    "One notebook, in a process that may have run others: (path, seconds, error text or '')."
    start, error = time.time(), ""
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(limit)
    try:
        with tempfile.TemporaryDirectory() as out:
            execute(path, Path(out), limit, slow)
    except Exception:
        error = traceback.format_exc()[-6000:]
    finally:
        signal.alarm(0)
    seconds = time.time() - start
    print(f"{'FAILED' if error else 'ok':<7}{seconds:7.1f} s  {path}", flush=True)
    return path, seconds, error


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks, from the repository's root; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=1800, help="seconds for one notebook: it is there to end a hang")
    parser.add_argument("--slow", action="store_true", help="cells that begin with `#| slow`, too")
    parser.add_argument("--save-times", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    old = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    paths = sorted(given.paths or all_notebooks(), key=lambda p: -old.get(str(p), 0))  # the longest is not the last
    with ProcessPoolExecutor(given.workers) as pool:
        done = list(pool.map(partial(run, limit=given.limit, slow=given.slow), paths))
    failed = [d for d in done if d[2]]
    for path, _, log in failed:
        print(f"\n----- {path}\n{log}")
    if given.save_times:
        new = {**old, **{str(p): round(s) for p, s, log in done if not log}}
        TIMES.write_text(json.dumps({k: v for k, v in sorted(new.items()) if (ROOT / k).exists()}, indent=1) + "\n")
    longest = max([d[1] for d in done], default=0)
    print(f"{len(done) - len(failed)} of {len(done)} notebooks ran; the longest took {longest:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

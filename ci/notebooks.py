"""Execute the notebooks, several at a time, the longest first: python ci/notebooks.py [paths] [--workers 2].

Each runs cell by cell in IPython, in a process of its own; one with a cell tagged `parameters` gets the profile `smoke`
from papermill, and the one of the first command runs in a kernel, as a user's does. Nothing is written into the
repository, but --save-times keeps the seconds in ci/times.json, which the map in nbs/index.ipynb shows.
"""

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import click

ROOT = Path(__file__).resolve().parents[1]
FIRST = "31_quick.ipynb"  # what the first command runs
TIMES = ROOT / "ci" / "times.json"
RUNNING = set()  # processes of notebooks, each the leader of its group
FORK = multiprocessing.get_context("fork")
# To import these takes longer than most notebooks; a fork has them. None of ours: a notebook imports what it tests.
LARGE = ("torch", "transformers", "trl", "peft", "accelerate", "pandas", "scipy.stats", "scipy.spatial", "shapely")
LARGE += ("datasets", "gymnasium", "scipy.signal", "matplotlib.pyplot", "papermill", "IPython.core.interactiveshell")
LARGE += ("trl.trainer.grpo_trainer", "trl.trainer.sft_trainer")  # TRL's own are lazy
LARGE += ("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "openai", "hypothesis", "diffusers.models.autoencoders")


def all_notebooks():
    "Every notebook of the package, in reading order."
    paths = [p.relative_to(ROOT) for p in (ROOT / "nbs").rglob("*.ipynb")]
    return sorted(p for p in paths if not any(part.startswith((".", "_")) for part in p.parts))


def parameters(nb):
    "The source of the cell tagged `parameters`, or ''."
    return next((c.source for c in nb.cells if "parameters" in c.metadata.get("tags", [])), "")


def declares(nb, key):
    "Whether the cell tagged `parameters` has it."
    return any(line.startswith((f"{key} ", f"{key}:")) for line in parameters(nb).splitlines())


def prepared(path, slow):
    "The notebook without its outputs, and without the cells that are left out."
    from papermill.iorw import load_notebook_node  # here, as all that takes long: a wrong argument is told at once

    nb = load_notebook_node(str(ROOT / path))
    skip = {"#| eval: false", *(() if slow else ("#| slow",))}

    def said(c):
        return set(takewhile(lambda line: line.startswith("#|"), c.source.splitlines()))

    nb.cells = [c for c in nb.cells if c.cell_type != "code" or not skip & said(c)]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


def by_papermill(nb, path, out, given):
    "As a user runs a run notebook: by papermill, in a kernel."
    import nbformat
    import papermill

    copy = out / path.name
    nbformat.write(nb, copy)
    done = out / f"done_{path.name}"
    papermill.execute_notebook(copy, done, given, kernel_name="python3", cwd=(ROOT / path).parent, progress_bar=False)


def shell():
    "A notebook's shell in this process."
    import matplotlib.pyplot as plt
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    plt.switch_backend("agg")
    sys.modules["__main__"] = ModuleType("__main__")
    quiet = Config(HistoryManager=dict(enabled=False))
    return InteractiveShell.instance(config=quiet, user_module=sys.modules["__main__"])


def by_ipython(nb):
    "All others, cell by cell, in this process, which is a copy of one that has imported the large libraries."
    import matplotlib.pyplot as plt

    cells = shell()
    for number, cell in enumerate(c for c in nb.cells if c.cell_type == "code"):
        if not cells.run_cell(cell.source, store_history=True).success:
            raise SystemExit(f"code cell {number}:\n{cell.source}")
        plt.close("all")  # as a kernel does, which has shown them by then


def execute(path, out, slow):
    "A notebook in this process, in its own folder; what it says goes to a file."
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT)
    (out / "tmp").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(out / "tmp")  # is gone with `out`: what is killed leaves its folders
    os.dup2(log, 1), os.dup2(log, 2)
    from papermill.parameterize import parameterize_notebook

    nb = prepared(path, slow)
    os.chdir((ROOT / path).parent)
    given = {k: v for k, v in dict(profile="smoke", out=str(out / "run")).items() if declares(nb, k)}
    if path.name == FIRST:
        by_papermill(nb, path, out, given)
    else:
        by_ipython(parameterize_notebook(nb, given) if given else nb)
    sys.stdout.flush()
    os._exit(0)  # the exit hooks of the libraries belong to the process that this is a copy of


def stop(*_):
    "Told to end: what runs has a session of its own, and would go on."
    for pid in RUNNING:
        with suppress(ProcessLookupError):  # it has just begun, or ended
            os.killpg(pid, signal.SIGKILL)
    os._exit(143)


def run(path, limit, slow):
    "One notebook in a process of its own: (path, seconds, whether it failed)."
    start = time.time()
    with tempfile.TemporaryDirectory() as out:
        process = FORK.Process(target=execute, args=(path, Path(out), slow))
        process.start()
        RUNNING.add(process.pid)
        process.join(limit)
        late = process.is_alive()
        try:
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has started and left behind, too
        except ProcessLookupError:
            late = False
        process.join()
        RUNNING.discard(process.pid)
        said = (Path(out) / "log.txt").read_text(errors="replace")
    error = (f"more than {limit} seconds\n" if late else "") + said if process.exitcode else ""
    seconds = time.time() - start
    # The end of what it said stands beside its name, also if the whole run is cut short.
    print(f"{'FAILED' if error else 'ok':<7}{seconds:7.1f} s  {path}\n{error[-6000:]}".rstrip(), flush=True)
    return path, seconds, bool(error)


def inside(context, parameter, paths):
    "Notebooks by their names from the repository's root."
    for p in paths:
        if p.suffix != ".ipynb" or not (ROOT / p).is_file():
            raise click.BadParameter(f"{ROOT / p} is no notebook")
    return [(ROOT / p).resolve().relative_to(ROOT) for p in paths]


@click.command(help=__doc__, context_settings=dict(show_default=True))
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), callback=inside)
@click.option("--workers", type=click.IntRange(1), default=2)
@click.option(
    "--limit", type=click.IntRange(1), default=1800, help="seconds for one notebook: it is there to end a hang"
)
@click.option("--slow", is_flag=True, help="cells that begin with `#| slow`, too")
@click.option("--up-to", type=click.IntRange(0), help="only those that took at most so many seconds, by ci/times.json")
@click.option("--save-times", is_flag=True)
def main(paths, workers, limit, slow, up_to, save_times):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    old = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    paths = sorted(paths or all_notebooks(), key=lambda p: -old.get(str(p), 0))  # the longest is not the last
    if up_to is not None:
        paths = [p for p in paths if old.get(str(p), up_to + 1) <= up_to]
    gc.disable()  # what is imported is not looked through, a quarter of the time that it takes
    for name in LARGE:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a trainer asks the collector to look through everything
    signal.signal(signal.SIGINT, stop), signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(partial(run, limit=limit, slow=slow), paths))
    failed = [str(path) for path, _, bad in done if bad]
    if save_times:
        new = {**old, **{str(p): round(s) for p, s, bad in done if not bad}}
        TIMES.write_text(json.dumps({k: v for k, v in sorted(new.items()) if (ROOT / k).exists()}, indent=1) + "\n")
    longest = max([d[1] for d in done], default=0)
    print(
        f"{len(done) - len(failed)} of {len(done)} notebooks ran; the longest took {longest:.0f} s", *failed, sep="\n"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

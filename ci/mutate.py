"""Who sees a one-line mistake: python ci/mutate.py [MODULE ...] [--number 600] [--seed 0] [--minutes 120].

A mistake is put into a copy of the repository, into the notebook's cell and the exported module together. Then the
notebook runs from that cell on: it was walked up to there once, and each mistake is a fork of that process. A mistake
that its notebook does not see meets the tests and the notebooks that import the module, the shortest first. Printed is
who survived; each result is a line of --out, and what stands there already is not tried again.

MODULE is a file or a folder, such as drivelit/metrics. --given tries the mistakes of a file, a list of objects with
name, module, old and new, instead of drawn ones.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import matplotlib.pyplot as plt
import notebooks
from breaks import breaks

CHOSEN = (
    *("metrics", "training", "policy", "io", "scene", "town", "sources"),
    *("runs/record.py", "runs/tables.py", "bridges", "closed_loop"),
)
OF_SYSTEMS = ("task", "rewards", "formats", "evaluation")
HOME = re.compile(r"File to edit: (?:\.\./)*(nbs/\S+\.ipynb)")
NULL = dict(name="nothing changed", old="", new="")


def modules(root, names):
    "The exported modules of files and folders, each with its notebook: {module: notebook}, both from the root."
    package = root / "drivelit"
    chosen = [package / n for n in CHOSEN] + [f for part in OF_SYSTEMS for f in sorted(package.glob(f"*/{part}.py"))]
    given = [root / n for n in names] or chosen
    files = [f for g in given for f in (sorted(g.rglob("*.py")) if g.is_dir() else [g])]
    found = {f: HOME.search(f.read_text()[:2000]) for f in files if f.exists()}
    return {str(f.relative_to(root)): home[1] for f, home in found.items() if home}


def exported(source):
    "Whether nbdev takes a cell into the module."
    return any(line.startswith(("#| export", "#|export")) for line in source.splitlines()[:4])


def cells(root, notebook):
    "The sources of the code cells that run, as CI runs them."
    nb = notebooks.prepared(root / notebook, False)
    given = {k: v for k, v in dict(profile="smoke").items() if notebooks.declares(nb, k)}
    nb = notebooks.parameterize_notebook(nb, given) if given else nb
    return [c.source for c in nb.cells if c.cell_type == "code"]


def body(source):
    "A cell as it stands in the module: without nbdev's directives."
    return "\n".join(line for line in source.splitlines() if not line.startswith("#|")).strip("\n")


def drawn(root, module, notebook):
    "Every mistake of a module that can be put into its file as into its notebook."
    text = (root / module).read_text()
    for number, source in enumerate(cells(root, notebook)):
        code = body(source)
        if not exported(source) or code not in source or text.count(code) != 1:
            continue
        for b in breaks(code):
            _, old, new = b.line(code)
            yield dict(
                name=f"{Path(module).stem}: {b.kind}: {old} -> {new}",
                kind=b.kind,
                module=module,
                notebook=notebook,
                cell=number,
                old=code,
                new=b.apply(code),
            )


def sample(pools, number, seed):
    "As many of each module as there are lines to break in it, with at least one."
    rng, total = random.Random(seed), sum(map(len, pools.values()))
    chosen = []
    for pool in pools.values():
        chosen += rng.sample(pool, min(len(pool), max(1, round(number * len(pool) / max(total, 1)))))
    return rng.sample(chosen, min(number, len(chosen)))


def located(root, row):
    "A given mistake with its cell; None where the line is no longer there or stands twice."
    row = dict(row, notebook=modules(root, [row["module"]]).get(row["module"]))
    if not row["notebook"]:
        return None
    old = row["old"].strip("\n")
    found = [k for k, s in enumerate(cells(root, row["notebook"])) if exported(s) and old in s]
    one = (root / row["module"]).read_text().count(old) == 1 and len(found) == 1
    return dict(row, kind="given", cell=found[0], old=old, new=row["new"].strip("\n")) if one else None


def digest(row):
    return hashlib.sha256("\0".join([row["module"], row["old"], row["new"]]).encode()).hexdigest()[:16]


class Changed:
    "The module on disk with the mistake, as long as it lasts: a stage in a process of its own imports it, too."

    def __init__(self, root, row):
        self.path, self.row = root / row["module"], row

    def write(self, text):
        self.path.write_text(text)
        for old in (self.path.parent / "__pycache__").glob(f"{self.path.stem}.*.pyc"):
            old.unlink()  # two texts of one second and one length would be taken for each other

    def __enter__(self):
        self.text = self.path.read_text()
        self.write(self.text.replace(self.row["old"], self.row["new"]) if self.row["old"] else self.text)

    def __exit__(self, *_):
        self.write(self.text)


def waited(pid, limit):
    "The exit status of a fork; None after so many seconds. What it has started ends with it."
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        done, raw = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if done else None
        time.sleep(0 if done else 0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return status
    if status is None:
        os.waitpid(pid, 0)
    return status


def forked(job, log, limit):
    "0 where job() is true, 1 where it is not, None where it took too long; in a process and a folder of its own."
    folder = Path(log).with_suffix("")
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if not pid:
        status = 9
        try:
            os.setsid()
            os.environ["TMPDIR"] = notebooks.tempfile.tempdir = str(folder)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            status = 0 if job() else 1
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(status)
    status = waited(pid, limit)
    shutil.rmtree(folder, ignore_errors=True)
    return status


def run_cells(shell, sources):
    "Whether all of them run."
    for source in sources:
        if not shell.run_cell(source, store_history=True).success:
            return False
        plt.close("all")
    return True


def put(sources, row):
    "The notebook's cells with the mistake."
    k = row["cell"]
    return [*sources[:k], sources[k].replace(row["old"], row["new"]), *sources[k + 1 :]]


class Walk:
    "One notebook and its mistakes: walked once, a fork at each changed cell."

    def __init__(self, root, notebook, rows, work, limit, report):
        self.root, self.notebook, self.work, self.limit, self.report = root, notebook, work, limit, report
        self.sources, self.rows, self.done = cells(root, notebook), rows, work / "done.txt"

    def whole(self, row):
        "The notebook from its first cell on, in a fresh process: it may have imported the module before its own cell."

        def job():
            os.chdir((self.root / self.notebook).parent)
            return run_cells(notebooks.shell(), put(self.sources, row) if row["old"] else self.sources)

        with Changed(self.root, row):
            return forked(job, self.work / "log.txt", self.limit)

    def from_here(self, shell, k, row):
        with Changed(self.root, row):
            left = put(self.sources, row)[k:] if row["old"] else self.sources[k:]
            return forked(lambda: run_cells(shell, left), self.work / "log.txt", self.limit)

    def tried(self, shell, k, here):
        """Whether the forks at a cell could be believed; then they are reported.

        A fork shares files and servers with the walk: one without a mistake must pass after all others.
        """
        if here[0]["module"].removesuffix(".py").replace("/", ".") in sys.modules:
            return False
        found = [(row, self.from_here(shell, k, row)) for row in here]
        if None in [status for _, status in found]:  # late: a server of the walk may have lost its thread
            return False
        if self.from_here(shell, k, NULL | dict(module=here[0]["module"])) != 0:
            return False
        with self.done.open("a") as f:
            for row, status in found:
                self.report(row, status != 0, "home")
                f.write(digest(row) + "\n")
        return True

    def walk(self):
        "Runs in a fork, up to the last changed cell, or to the first one whose forks cannot be believed."
        os.chdir((self.root / self.notebook).parent)
        shell = notebooks.shell()
        for k, source in enumerate(self.sources[: 1 + max(r["cell"] for r in self.rows)]):
            here = [r for r in self.rows if r["cell"] == k]
            if (here and not self.tried(shell, k, here)) or not run_cells(shell, [source]):
                return False
        return True

    def run(self):
        "Whether the notebook runs without a mistake; else nothing is known of those that are left."
        self.done.write_text("")
        forked(self.walk, self.work / "walk.txt", self.limit * (2 * len(self.rows) + 2))
        done = set(self.done.read_text().split())
        left = [row for row in self.rows if digest(row) not in done]
        if left and self.whole(NULL | dict(module=left[0]["module"])) != 0:
            return False
        for row in left:
            self.report(row, self.whole(row) != 0, "home")
        return True


def elsewhere(root, row, seconds):
    "The tests and notebooks that import the module, the shortest first, as far as the seconds of ci/times.json reach."
    package, name = row["module"].removesuffix(".py").replace("/", ".").rsplit(".", 1)
    imports = re.compile(rf"{re.escape(package)}\.{name}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    times = json.loads((root / "ci/times.json").read_text())
    tests = [t for t in sorted((root / "tests").glob("test_*.py")) if imports.search(t.read_text())]
    books = [b for b in notebooks.all_notebooks() if imports.search((root / b).read_text())]
    books = sorted((b for b in books if str(b) != row["notebook"]), key=lambda b: times.get(str(b), 999))
    found, total = [str(t.relative_to(root)) for t in tests], 0
    for book in map(str, books):
        total += times.get(book, 999)
        found += [book] if total <= seconds else []
    return found


def seen_by(root, row, work, limit, seconds):
    "The first test file or notebook elsewhere that turns red, or ''."
    for place in elsewhere(root, row, seconds):
        if place.endswith(".py"):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", place]
        else:
            command = [sys.executable, "ci/notebooks.py", "--workers", "1", "--limit", str(limit), place]
        with Changed(root, row), open(work / "elsewhere.txt", "w") as log:
            try:
                code = subprocess.run(command, cwd=root, stdout=log, stderr=log, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                code = 0  # late is not seen
        if code == 1:
            return place
    return ""


def copied(work):
    "A copy of the working tree that may be changed: what git knows, and what it does not ignore."
    root = work / "tree"
    names = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=notebooks.ROOT, text=True
    )
    for name in filter(None, names.split("\0")):
        if (notebooks.ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(notebooks.ROOT / name, root / name, follow_symlinks=False)
    return root


def summary(rows):
    "What is printed last."
    killed = [r for r in rows if r["seen"]]
    home = [r for r in killed if r["seen"] == "home"]
    lines = [f"survived  {r['module']}  {r['name']}" for r in rows if not r["seen"]]

    def share(some):
        return f"{100 * len(some) / max(len(rows), 1):.0f} %"

    return "\n".join(
        [*lines, f"{len(killed)} of {len(rows)} seen ({share(killed)}), {share(home)} by their own notebook"]
    )


def chosen(root, names, given, number, seed):
    "The mistakes of this run, and the names of those that no longer fit."
    if given:
        rows = [(row, located(root, row)) for row in json.loads(given.read_text())]
        return [r for _, r in rows if r], [row["name"] for row, r in rows if not r]
    pools = {m: list(drawn(root, m, book)) for m, book in modules(root, names).items()}
    return sample({m: pool for m, pool in pools.items() if pool}, number, seed), []


@click.command(help=__doc__, context_settings=dict(show_default=True))
@click.argument("names", nargs=-1)
@click.option("--number", default=600, help="of mistakes that are drawn")
@click.option("--seed", default=0)
@click.option("--minutes", default=120.0, help="no further notebook begins after that")
@click.option("--limit", default=400, help="seconds of one mistake in one notebook")
@click.option("--elsewhere", "seconds", default=60, help="seconds of other notebooks, by ci/times.json; 0: tests only")
@click.option("--given", type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=notebooks.ROOT / "runs" / "mutants.jsonl")
def main(names, number, seed, minutes, limit, seconds, given, out):
    for library in notebooks.LARGE:
        notebooks.importlib.import_module(library)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out.parent.mkdir(parents=True, exist_ok=True)
    told = os.fdopen(os.dup(2), "w")  # a fork writes its own output into a file
    end, old = time.monotonic() + 60 * minutes, {}
    if out.exists():
        old = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}
    work = Path(notebooks.tempfile.mkdtemp(prefix="mutate-"))
    root = notebooks.ROOT = copied(work)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    rows, gone = chosen(root, names, given, number, seed)

    def report(row, seen, where):
        line = dict(
            id=digest(row), name=row["name"], kind=row["kind"], module=row["module"], seen=where if seen else ""
        )
        with out.open("a") as f:
            f.write(json.dumps(line) + "\n")
        print(f"{'seen' if seen else 'GREEN':<6}{where}  {row['module']}  {row['name']}", file=told, flush=True)

    left = {}
    for row in rows:
        if digest(row) not in old:
            left.setdefault(row["notebook"], []).append(row)
    for notebook, some in left.items():
        if time.monotonic() > end:
            break
        if not Walk(root, notebook, some, work, limit, report).run():
            click.echo(f"{notebook}: red or late without a mistake: {(work / 'log.txt').read_text()[-600:]}", err=True)
    old = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    for row in rows:
        if time.monotonic() < end and not old.get(digest(row), dict(seen="?"))["seen"]:
            if place := seen_by(root, row, work, limit, seconds):
                report(row, True, place)
                old[digest(row)]["seen"] = place
    shutil.rmtree(work)
    print(
        *[f"no longer there: {name}" for name in gone],
        summary([old[d] for d in map(digest, rows) if d in old]),
        sep="\n",
    )


if __name__ == "__main__":
    main()

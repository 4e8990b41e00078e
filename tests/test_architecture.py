"""What holds for the package as a whole: sizes, words, links, versions, arrows, one command for everybody."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import nbformat
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from drivelit.__main__ import _commands
from drivelit.runs.launch import launch
from drivelit.runs.profiles import CLONE, SETTINGS, load_profile, systems

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout
FILES = [ROOT / f for f in LISTED.split("\0") if f and (ROOT / f).is_file()]
NOTEBOOKS = [f for f in FILES if f.suffix == ".ipynb"]
PYTHON = [f for f in FILES if f.suffix == ".py" and f.is_relative_to(ROOT / "drivelit")]
TEXT = [f for f in FILES if f.suffix in (".py", ".ipynb", ".sh", ".md", ".toml", ".ini", ".json")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
CONSTRAINTS = (ROOT / "ci/constraints.txt").read_text().splitlines()
SYSTEMS = systems()
SHARED = {
    "io": set(),
    "scene": {"io"},
    "town": {"scene"},
    "sources": {"io", "scene", "town"},
    "metrics": {"io", "scene", "town"},
    "policy": {"io", "scene"},
}
# each of these may import all that stand before it
for _room in ("rollout", "data", "training", "runs"):
    SHARED[_room] = set(SHARED)
# folder: package of a system that has no section of its own yet
WITHOUT_RUN: dict[str, str] = {}
# A system may use every shared package and never another system; the base comes to it by `load_policy("base")` alone.
PACKAGES = [s.package.removeprefix("drivelit.") for s in SYSTEMS.values()] + [*WITHOUT_RUN.values()]
MAY_IMPORT = SHARED | {"base": set(SHARED)} | {package: set(SHARED) for package in PACKAGES}
MAY_IMPORT["testing"] = {*SHARED["rollout"], "rollout"}  # what its stand-ins stand for; no package imports it
MAY_IMPORT["closed_loop"] = {*SHARED, *PACKAGES, "base"}  # above the systems
MAY_IMPORT["bridges"] = {*SHARED, *PACKAGES, "closed_loop"}


def name(path):
    return str(path.relative_to(ROOT))


@cache
def notebook(path):
    "Read once, by whichever test comes first; nobody changes it."
    return nbformat.read(path, 4)


def code_cells(path):
    return [c for c in notebook(path).cells if c.cell_type == "code"]


@cache
def imports(source, package=(), names=False):
    "The modules that a file imports, as absolute names; `names`: what it takes from packages, too."
    return tuple(_imports(source, package, names))


def _imports(source, package, names):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        if isinstance(node, ast.ImportFrom):
            base = ".".join(
                [
                    *package[: len(package) - node.level + 1 if node.level else 0],
                    *([node.module] if node.module else []),
                ]
            )
            yield from [base] if node.module else []
            yield from (f"{base}.{a.name}" for a in node.names) if names or not node.module else []


def load(path):
    "A script of this repository as a module."
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLIC = load(ROOT / "ci/public.py")
faults = PUBLIC.faults


def test_files_are_small():
    def most(f):
        return 4_000_000 if f.suffix == ".safetensors" else 400_000  # the base, in half precision

    assert {name(f): f.stat().st_size for f in FILES if f.stat().st_size > most(f)} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_outputs_are_small_and_no_errors(path):
    outputs = [o for c in code_cells(path) for o in c.outputs]
    assert len(json.dumps(outputs)) <= 300_000
    assert [o["ename"] for o in outputs if o.output_type == "error"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_no_widget_is_stored(path):
    "Without its kernel a widget is a line of text: progress bars are left out, an explorer stores its picture."
    kinds = {kind for c in code_cells(path) for o in c.outputs for kind in o.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" not in kinds
    assert "widgets" not in notebook(path).metadata


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_can_be_read(path):
    head = notebook(path).cells[0].source
    assert re.match(r"# \S", head), "the first cell begins with a title"
    assert re.search(r"^> \S", head, re.M), "the first cell has a one-line summary: > ..."
    cells = code_cells(path)  # the map has none
    assert not cells or any(c.outputs for c in cells), "no output: the notebook was not executed"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_import_cells_hold_imports_only(path):
    for cell in code_cells(path):
        source = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell.source)  # what Jupyter runs by itself
        kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body}
        assert kinds != {True, False}, f"imports and code in one cell:\n{cell.source[:300]}"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_the_public_layer_is_typed_and_told(path):
    assert list(faults(path.read_text(encoding="utf-8"), PUBLIC.package_of(path))) == []


HALF_TOLD = '''
__all__ = ["f", "g", "h", "C", "D"]
def f(x: int, y) -> np.ndarray:
    """One.

    Args:
        x: metres
    """
def g(a: int, b: int = 0, *c: int) -> None:
    """Two.

    Args:
        a, b: metres
        *c (tuple): more
    """
class C:
    """Three.

    Attributes:
        many: metres
    """
    def __init__(self, size: int) -> None: pass
    @property
    def many(self) -> int:
        "Metres."
    def run(self) -> int: pass
@dataclass
class D:
    """Four.

    Attributes:
        here: seconds
    """
    here: float
    there: float
def h(policy: Policy, d: float = 0.0) -> None:
    """Five.

    Args:
        d: noqa: B008
    """
def hidden(x): pass
'''


def test_the_check_of_the_public_layer_sees_what_is_left_open():
    assert list(faults(HALF_TOLD)) == [
        "f: `y` has no annotation",
        "f: `y` is not told",
        "f: no Returns",
        "C: `many` is told twice, as an attribute and by its own docstring",
        "C.run: no docstring",
        "C: `size` is not told",
        "D: `there` is not told",
        "h: `d: noqa: B008` is a linter's comment",
    ]


def test_what_one_package_uses_may_have_one_line(monkeypatch):
    monkeypatch.setattr(PUBLIC, "users", lambda: {"f": {"scene", "runs"}, "C": {"scene"}})
    left = list(faults(HALF_TOLD, "scene"))
    assert "f: `y` is not told" in left and "f: no Returns" in left  # another package uses it
    assert "C.run: no docstring" in left and not {"C: `size` is not told", "D: `there` is not told"} & set(left)


def test_users_are_other_packages_and_the_page_of_the_package():
    users = PUBLIC.users()
    assert {"sources", "metrics", "docs"} <= users["open_scenes"] | users["score"]
    assert "docs" in users["turn_advantages"] and "_modidx.py" not in users["turn_advantages"]


RITUAL = '''
__all__ = ["f", "g", "C"]
def f(record: Record, scenes: Sequence[Scene], out: str, seed: int, path: str | Path, made: Sequence[Any]) -> None:
    """What repeats the name, the annotation or the table.

    Args:
        record: Record
        scenes: the
            scenes
        out, seed: of the run
        path: a path
        made: N
    """
def g(profile: MindDriverProfile, seed: int, plays: Plays, horizon: Horizon, dt: float, plans: Any, b: Any) -> int:
    """What says more, and what may be left out: `seed`, `horizon`.

    Args:
        profile: its tokens
        plays: of PLAYS
        dt: s
        plans: N of `plans`
        b: (N, 3)

    Returns:
        N
    """
class C:
    """A constructor and a method.

    Args:
        scene: the scene
    """
    def __init__(self, scene: Scene) -> None: pass
    def run(self, policy: Policy) -> None:
        """One.

        Args:
            policy: writes
        """
    def near(self, x: float) -> Path:
        """The folder that is next.

        Returns:
            path of the folder
        """
    def far(self, x: float) -> float:
        """How far.

        Returns:
            metres
        """
'''


def test_the_check_of_the_public_layer_sees_lines_that_say_nothing():
    assert list(faults(RITUAL)) == [
        "f: `record: Record` says nothing new",
        "f: `scenes: the scenes` says nothing new",
        "f: `out, seed: of the run` says nothing new",
        "f: `path: a path` says nothing new",
        "f: `made: N` says nothing new",
        "C: `scene: the scene` says nothing new",
        "C.run: `policy: writes` says nothing new",
        "C.near: `Returns:` says nothing new",
    ]


def test_contributing_shows_which_names_need_no_line():
    part = (ROOT / "CONTRIBUTING.md").read_text().split("## What a docstring may leave out")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", part, re.M)) == PUBLIC.COMMON


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_exported_cells_are_short(path):
    cells = [c.source for c in code_cells(path) if re.match(r"#\| *export", c.source)]
    rows = re.compile(r"    \w+: [\w\[\], .]+ = key\(")  # the keys of a profile are a table, however many there are
    long = [c[:200] for c in cells if sum(not rows.match(line) for line in c.splitlines()) > 110]
    assert long == []


def test_words():
    stubs = "TO" + "DO|FIX" + "ME|NotImplemented" + r"Error|assert " + r"True\b|except( Exception)?: *pa" + "ss"
    assert [f"{name(f)}: {m.group(0)}" for f in TEXT for m in re.finditer(stubs, f.read_text(encoding="utf-8"))] == []


# Names that do not say what a value is: the field has nouns. The share of assignments that have one may only shrink.
VAGUE = """told said asked made kept found here there known own these whole left before behind again other others both
more some few most one all_ now old new given first last shown seen drawn played wanted named right wrong what how who
where which of at by it its each alone apart beside far near held taken got done much mine them theirs ours""".split()


def test_a_name_says_what_a_value_is():
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in PYTHON]
    stored = [n.id for t in trees for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    vague = Counter(name for name in stored if name in VAGUE)
    assert vague.total() < 0.005 * len(stored), vague.most_common(20)


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_no_name_is_defined_twice(path):
    "Two cells of a notebook may give a helper the same name; the later one would answer for both."
    defined = Counter(
        n.name
        for n in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(n, ast.FunctionDef | ast.ClassDef)
    )
    assert [n for n, count in defined.items() if count > 1] == []


def test_no_path_of_one_machine():
    homes = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w|/site-" + "packages/")
    assert [f"{name(f)}: {m.group(0)}" for f in TEXT for m in homes.finditer(f.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_packages_import_what_stands_below_them(path):
    parts = path.relative_to(ROOT).parts[:-1]
    used = {m.split(".")[1] for m in imports(path.read_text(), parts) if m.startswith("drivelit.")}
    package = parts[1] if len(parts) > 1 else ""
    # the command line finds the systems by their names; the package itself says which extra a missing module is of
    above = {"__main__.py": {"io", "sources", "runs", "__version__"}, "__init__.py": {"io"}}.get(path.name, set())
    assert used - {package} <= MAY_IMPORT.get(package, above)


def test_no_module_reaches_itself():
    "Imports in functions count, too: one that stands there for the sake of a circle hides it."
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PYTHON}
    below = {
        module: set(modules) & set(imports(path.read_text(), path.relative_to(ROOT).parts[:-1], names=True))
        for module, path in modules.items()
    }
    assert list(TopologicalSorter(below).static_order())  # raises a CycleError that names the circle


OWN_PICTURES = ("base/rows.py", "base/facts.py", "driveagent/refine.py", "driveagent/toolkit.py", "runs/plays.py")


def test_pictures_that_are_given_become_rgb_by_to_rgb():
    "Pillow's own way makes a white page of 16 bits of grey; these modules use it for what they have made themselves."
    direct = {str(p.relative_to(ROOT / "drivelit")) for p in PYTHON if re.search(r"convert\(.RGB", p.read_text())}
    assert direct == {"scene/core.py", *OWN_PICTURES}


def test_every_package_has_its_arrows():
    "A package that the rules do not know could import anything."
    packages = {path.relative_to(ROOT / "drivelit").parts[0] for path in PYTHON} - {
        "__init__.py",
        "__main__.py",
        "_modidx.py",
    }
    assert packages == set(MAY_IMPORT)


def test_the_arrow_check_sees_arrows():
    package = ("drivelit", "scene")
    assert list(imports("from ..policy import model\nimport torch.nn\n", package)) == ["drivelit.policy", "torch.nn"]
    assert list(imports("from .. import training\nfrom .core import Scene\n", package)) == [
        "drivelit.training",
        "drivelit.scene.core",
    ]


DISTRIBUTION = {
    "PIL": "pillow",
    "stable_baselines3": "stable-baselines3",
    "cv2": "opencv-python-headless",
    "yaml": "pyyaml",
    "IPython": "ipykernel",
    "nbformat": "papermill",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "safetensors": "transformers",
}  # the last four come with what is declared


def test_every_import_is_declared():
    extras = [d for group in PROJECT["optional-dependencies"].values() for d in group]
    declared = {re.match(r"[\w-]+", d).group(0).lower() for d in [*PROJECT["dependencies"], *extras]}
    used = {m.split(".")[0] for f in PYTHON for m in imports(f.read_text(), f.relative_to(ROOT).parts[:-1])}
    third = {DISTRIBUTION.get(m, m).lower() for m in used if m not in sys.stdlib_module_names and m != "drivelit"}
    assert (
        third - declared - {"nuscenes", "py123d"} == set()
    )  # both come by ci/setup.sh, without what they name themselves; they are imported when they are needed


def test_every_direct_dependency_is_pinned_with_a_reason():
    reasons = {line.split("==")[0].lower() for line in CONSTRAINTS if re.match(r"[\w.-]+==\S+  # \S", line)}
    extras = [d for group, needs in PROJECT["optional-dependencies"].items() if group != "cluster" for d in needs]
    direct = {re.match(r"[\w-]+", d).group(0).lower() for d in [*PROJECT["dependencies"], *extras]} - {"drivelit"}
    assert direct - reasons == set()


def needed(requirement, seen):
    "The names of a requirement and of all that it pulls in, as far as it is installed."
    wanted = Requirement(requirement)
    for extra in wanted.extras or {""}:
        if (key := (canonicalize_name(wanted.name), extra)) in seen:
            continue
        seen.add(key)
        try:
            below = metadata.requires(wanted.name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in below:
            r = Requirement(text)
            if r.marker is None or r.marker.evaluate({"extra": extra}):
                needed(text, seen)


def test_everything_that_is_pulled_in_is_pinned():
    pinned = {canonicalize_name(m.group(1)) for line in CONSTRAINTS if (m := re.match(r"([\w.-]+)==", line))}
    extras = [d for group, needs in PROJECT["optional-dependencies"].items() if group != "cluster" for d in needs]
    seen = set()
    for requirement in [*PROJECT["dependencies"], *(e for e in extras if not e.startswith("drivelit"))]:
        needed(requirement, seen)
    tools = {"pip", "setuptools", "wheel"}  # of the environment itself
    assert {n for n, _ in seen} - pinned - tools == set()


def test_what_is_subclassed_is_pinned_to_the_minor_version():
    pins = dict(
        re.fullmatch(r"([\w-]+)==(\d+\.\d+)\.\S+  # .*", line).groups() for line in CONSTRAINTS if "subclass" in line
    )
    assert {"trl", "transformers"} <= set(pins)
    for package, minor in pins.items():
        assert f"{package}~={minor}.0" in PROJECT["optional-dependencies"]["train"]


def test_the_test_tools_are_no_run_time_need():
    needs = {re.match(r"[\w-]+", d).group(0) for d in PROJECT["dependencies"]}
    assert (
        needs & {"hypothesis", "pytest", "nbdev", "ruff", "nbconvert", "jupyterlab", "papermill", "ipykernel"} == set()
    )


EXTRAS = {
    "123d": ["laspy", "py123d", "trimesh"],
    "carla": ["carla"],
    "images": ["diffusers"],
    "navsim": ["geopandas", "networkx", "pyogrio", "pyproj"],
    "nuscenes": ["cv2", "nuscenes"],
    "server": ["openai"],
}
IMPORT_ALL = """
import importlib, importlib.machinery, pkgutil, sys
blocked = {blocked}
finder = importlib.machinery.PathFinder
real = finder.find_spec
there = lambda cls, name, path=None, target=None: None if name.split(".")[0] in blocked else real(name, path, target)
finder.find_spec = classmethod(there)
for name in [m for m in sys.modules if m.split(".")[0] in blocked]: del sys.modules[name]
import drivelit
for m in pkgutil.walk_packages(drivelit.__path__, "drivelit."):
    if not m.name.endswith(("__main__", "_modidx")): importlib.import_module(m.name)
import numpy as np
from drivelit.metrics.open_loop import draw
from drivelit.policy.codec import new_codec
from drivelit.policy.engines import OpenAIEngine
from drivelit.rollout.carla import connect
from drivelit.sources.navsim import gpd
for use in (lambda: draw(np.zeros((1, 6, 3)), np.ones((1, 2)), np.ones((1, 6), bool)), lambda: gpd.GeoDataFrame,
            lambda: OpenAIEngine("http://localhost:1/v1", "m"), new_codec, lambda: connect("localhost", 1, 1.0)):
    try: use()
    except ImportError as e: print(e)
    else: print("nothing was missing")
"""


def test_every_module_imports_without_the_extras():
    "The packages of the extras (but networkx, which torch brings) are hidden: modules import, uses name the extra."
    blocked = {m for modules in EXTRAS.values() for m in modules} - {"networkx"} | {
        "hypothesis",
        "fastcore",
        "papermill",
    }
    code = IMPORT_ALL.replace("{blocked}", repr(blocked))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for line, extra in zip(done.stdout.splitlines(), ("nuscenes", "navsim", "server", "images", "carla"), strict=True):
        assert f'pip install "drivelit[{extra}]"' in line


def test_ci_runs_the_command_of_the_readme():
    commands = re.findall(r"^```\n(.+)\n```", README, re.M)
    assert commands[:2] == ["bash ci/main.sh", "bash ci/test.sh"]
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("exec " + commands[1])
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_table_of_systems_is_all_that_says_which_there_are():
    "A system is a section and a folder: its notebooks, its run and its smoke, laptop and paper profiles are there."
    folders = {p.name for p in (ROOT / "nbs").glob("5*_*")}
    assert folders == {s.notebooks for s in SYSTEMS.values()} | set(WITHOUT_RUN)
    assert not {s.notebooks for s in SYSTEMS.values()} & set(WITHOUT_RUN)
    for system in SYSTEMS.values():
        assert (ROOT / system.notebook).exists() and (ROOT / "drivelit" / system.package.split(".")[1]).is_dir()
        for profile in ("smoke", "laptop", "paper"):
            assert load_profile(system.name, profile).system == system.name
        assert f"| [{system.title}]({system.notebook}) |" in README  # its row in the table of systems
    named = re.compile("|".join([*SYSTEMS, *(s.notebooks for s in SYSTEMS.values())]))
    scripts = [f for f in FILES if f.parent == ROOT / "ci" and f.suffix in (".py", ".sh")]
    code = {name(f): re.sub(r"(?m)^ *#.*$|\"\"\".*?\"\"\"", "", f.read_text(), flags=re.S) for f in scripts}
    assert {f: m.group(0) for f, text in code.items() if (m := named.search(text))} == {}


def test_a_profile_may_have_a_notebook_of_its_own():
    "The first command's default has one; other profiles are those of the run notebook."
    sys.path.insert(0, str(ROOT / "ci"))
    from systems import resolve

    (default,) = re.findall(r"section=\$\{1:-(.+)\}", (ROOT / "ci/main.sh").read_text())
    assert resolve(default) == ("mtdrive", "quick", "nbs/50_mtdrive/31_quick.ipynb")
    assert resolve("mtdrive.laptop")[2] == SYSTEMS["mtdrive"].notebook
    (printed,) = launch(load_profile("mtdrive", "quick"))
    assert "papermill nbs/50_mtdrive/31_quick.ipynb" in printed


def test_the_drawing_is_of_this_architecture():
    folders = {p.parent.name for p in NOTEBOOKS if p.parent.name != "nbs"} - set(WITHOUT_RUN)
    drawn = Image.open(ROOT / "assets/architecture.png").text["Description"].split(", ")
    assert set(drawn) == folders | {"5x_yours"}, "run: python ci/architecture.py"


def test_the_map_has_every_notebook():
    cells = [c.source for c in nbformat.read(ROOT / "nbs/index.ipynb", 4).cells]
    tables = "\n".join(c for c in cells if "| notebook |" in c)
    mapped = [f for f in NOTEBOOKS if f.name != "index.ipynb" and f.parent.name not in WITHOUT_RUN]
    missing = [name(f) for f in mapped if f"]({name(f).removeprefix('nbs/')})" not in tables]
    assert missing == [], "run: python ci/readme.py"
    assert max(len(c.split()) for c in cells) < 900, "a cell of the map is one package"


def test_three_ways_of_eight_begin_the_map():
    "A reader chooses a way before the list of all; each stop is a notebook that is there."
    cells = [c.source for c in nbformat.read(ROOT / "nbs/index.ipynb", 4).cells]
    (ways,) = [c for c in cells if c.startswith("## Three ways")]
    assert cells.index(ways) < min(k for k, c in enumerate(cells) if "| notebook |" in c)
    found = {title: re.findall(r"^\d\. \[.+?\]\((.+?)\)", part, re.M) for title, part in parts_of(ways).items()}
    assert {k: len(v) for k, v in found.items()} == {"Learn the methods": 8, "Train": 8, "Score": 8}
    assert all((ROOT / "nbs" / stop).is_file() for stops in found.values() for stop in stops)


def parts_of(text):
    "Heading of the third level -> what stands below it."
    _, *parts = re.split(r"^### ", text, flags=re.M)
    return dict(p.split("\n", 1) for p in parts)


def headings(text):
    "The anchors that GitHub gives the headings of a text."
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("path", ["README.md", "docs/RUNS.md", "docs/PACKAGE.md"])
def test_links_of_the_front_pages_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / path).read_text())
    assert links
    for link in links:
        place, _, anchor = link.partition("#")
        there = (ROOT / path).parent / place if place else ROOT / path
        assert there.exists() and (not anchor or anchor in headings(there.read_text())), (path, link)


@pytest.mark.parametrize("path", ["README.md", "docs/RUNS.md", "docs/PACKAGE.md"])
def test_commands_of_the_front_pages_exist(path):
    said = re.findall(r"(?:python -m drivelit|`drivelit|^drivelit) (\w+)", (ROOT / path).read_text(), re.M)
    assert said and [c for c in said if _commands.get_command(None, c) is None] == []


def test_licence_is_apache():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_no_recorded_picture():
    "Camera images of the data sets are JPEG files; the kit's own pictures are PNG files."
    assert [name(f) for f in FILES if f.suffix.lower() in (".jpg", ".jpeg", ".pkl", ".bin")] == []
    records = re.compile(r"nbs/\d\d_\w+/results/[\w-]+(\.sets)?\.parquet")  # numbers of a run, see drivelit.runs.record
    assert [name(f) for f in FILES if f.suffix == ".parquet" and not records.fullmatch(name(f))] == []
    for f in [f for f in FILES if f.suffix == ".parquet"]:
        kinds = {str(field.type) for field in pq.read_schema(f)}
        assert {k for k in kinds if not re.match(r"u?int|float|double|dictionary<values=string", k)} == set(), name(f)
    embedded = [
        name(f) for f in NOTEBOOKS for c in code_cells(f) for o in c.outputs if "image/jpeg" in o.get("data", {})
    ]
    assert embedded == []


RELATIVE = r"\]\((?!https?:|#)([^)]+)\)"


def test_links_of_the_wheels_page_are_absolute():
    setup = load(ROOT / "setup.py")
    told = "[a](nbs/x.ipynb) ![b](assets/x.png) [c](https://x.org/y) [d](#there)"
    left, middle = f"{setup.REPOSITORY}/blob/v1", f"{setup.RAW}/v1"
    page = f"[a]({left}/nbs/x.ipynb) ![b]({middle}/assets/x.png) [c](https://x.org/y) [d](#there)"
    assert setup.absolute_links(told, "v1") == page
    assert re.findall(RELATIVE, README) and re.findall(RELATIVE, setup.absolute_links(README)) == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel, built in a copy: setuptools leaves a build folder."
    copy = tmp_path_factory.mktemp("wheel")
    for f in [f for f in FILES if f.is_relative_to(ROOT / "drivelit") or f.parent == ROOT]:
        (copy / name(f)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f, copy / name(f))
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", copy / "out", str(copy)]
    subprocess.run(command, check=True)
    (path,) = (copy / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_profiles_and_the_types(wheel):
    assert {"drivelit/settings.ini", "drivelit/py.typed", "drivelit/runs/profiles.py"} <= set(wheel.namelist())
    weights = ("base/weights/model", "base/codec_weights/diffusion_pytorch_model", "base/encoder_weights/model")
    weights += ("minddriver/start_weights/model", "minddrive/weights/experts/action")
    weights += tuple(f"{s}/weights/model" for s in systems())
    assert {f"drivelit/{w}.safetensors" for w in weights} <= set(wheel.namelist())
    top = (ROOT / "settings.ini").read_text()
    assert wheel.read("drivelit/settings.ini").decode() == load(ROOT / "setup.py").packaged_settings(top)


def test_a_clone_needs_no_symbolic_links():
    "Windows and a zip make texts of them. The file of profiles that people edit is the one at the top."
    assert [name(f) for f in FILES if f.is_symlink()] == []
    assert SETTINGS == ROOT / "settings.ini" and CLONE == ROOT
    packaged = load(ROOT / "setup.py").packaged_settings(SETTINGS.read_text())
    assert (ROOT / "drivelit/settings.ini").read_text() == packaged


def test_the_wheel_says_what_it_is(wheel):
    (path,) = [f for f in wheel.namelist() if f.endswith("/METADATA")]
    head, page = wheel.read(path).decode().split("\n\n", 1)
    assert re.findall(RELATIVE, page) == [] and page.lstrip().startswith("# drivelit")
    for line in (
        "Classifier: Typing :: Typed",
        "Keywords: ",
        "Project-URL: Issues, https://",
        "Author: drivelit contributors",
    ):
        assert line in head, line
    always = [line for line in head.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert any(line.startswith("Requires-Dist: shapely") for line in always)
    assert not any(re.match(r"Requires-Dist: (torch|trl|transformers|accelerate)\b", line) for line in always)
    assert re.search(r"^Requires-Dist: trl~=.*extra == .train", head, re.M)
    extras = {line.split(": ")[1] for line in head.splitlines() if line.startswith("Provides-Extra")}
    assert {"navsim", "nuscenes", "server", "notebooks", "dev"} <= extras


def shown_with_samples(notebook):
    "Pictures behind a cell that has read recorded samples, whose licence does not let us commit them."
    cells, read, found = [c for c in notebook["cells"] if c["cell_type"] == "code"], False, []
    for cell in cells:
        said = "".join("".join(o.get("text", "")) for o in cell["outputs"])
        may = "DRIVELIT_SAMPLES is not set" in "".join(cell["source"]) and bool(cell["outputs"])
        read = read or (may and "DRIVELIT_SAMPLES is not set" not in said)
        found += [o for o in cell["outputs"] if read and "image/png" in o.get("data", {})]
    return found


def test_no_picture_is_of_recorded_samples():
    "Counts and scores of samples may be printed; a picture behind them may be of a sample."
    cell = dict(cell_type="code", source=['print("DRIVELIT_SAMPLES is not set" if not samples else len(samples))'])
    said = dict(output_type="stream", name="stdout", text=["DRIVELIT_SAMPLES is not set\n"])
    picture = dict(output_type="display_data", data={"image/png": ""})

    def shown(*outputs):
        return len(shown_with_samples(dict(cells=[cell | dict(outputs=outputs)])))

    nine = said | dict(text=["9\n"])
    assert (shown(said, picture), shown(nine), shown(nine, picture)) == (0, 0, 1)
    looked_at = {"46_routes", "50_closed_loop", "28_report", "30_rows"}  # their pictures are of the town and of tables
    assert {f.stem for f in NOTEBOOKS if shown_with_samples(json.loads(f.read_text()))} <= looked_at


def test_the_papers_are_there():
    for path in ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "docs/DESIGN.md", "docs/STYLE.md"):
        assert (ROOT / path).exists(), path
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"[{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert re.findall(r"^```\n(.+)\n```", README, re.M)[1] in re.findall(r"- run: (.+)", workflow)


def test_the_package_is_found_beside_its_clone(tmp_path):
    """A clone has the package's name: where it lies, Python takes it for a package without a file of its own."""
    (tmp_path / "drivelit").symlink_to(ROOT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [
        sys.executable,
        "-c",
        "import drivelit.runs.profiles as p, drivelit.policy.model as m; print(p.SETTINGS, m.BASE)",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(Path(x).exists() for x in done.stdout.split())


def test_every_number_of_a_papers_profile_says_where_it_is_from():
    "The paper and the place in it, the released code, or ours."
    known = re.compile(r"(MTDrive|DriveAgent-R1|AutoDrive-P3|MindDriver|MindDrive|Bench2Drive)\b|released code|ours\b")
    for section in re.finditer(r"^\[(\w+\.paper)\]\n(.*?)(?=^\[|\Z)", (ROOT / "settings.ini").read_text(), re.M | re.S):
        lines = [line for line in section[2].splitlines() if line.strip() and not line.startswith("#")]
        assert len(lines) > 30
        for line in lines:
            assert known.match(line.partition("#")[2].strip()), f"[{section[1]}] {line}: where is it from?"

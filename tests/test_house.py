"""What holds for the house as a whole: sizes, words, links, versions, arrows, one command for everybody."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest

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
MAY_IMPORT = {
    "scene": set(),
    "metrics": {"scene"},
    "policy": {"scene"},
    "rollout": {"scene", "metrics", "policy"},
    "training": {"scene", "metrics", "policy", "rollout"},
    "mtdrive": {"scene", "metrics", "policy", "rollout", "training"},
    "driveagent": {"scene", "metrics", "policy", "rollout", "training"},
}


def name(path):
    return str(path.relative_to(ROOT))


def code_cells(path):
    return [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]


def imports(source, package=()):
    "The modules that a file imports, as absolute names."
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
            yield from [base] if node.module else (f"{base}.{a.name}" for a in node.names)


def test_files_are_small():
    assert {name(f): f.stat().st_size for f in FILES if f.stat().st_size > 400_000} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_outputs_are_small_and_no_errors(path):
    outputs = [o for c in code_cells(path) for o in c.outputs]
    assert len(json.dumps(outputs)) <= 300_000
    assert [o["ename"] for o in outputs if o.output_type == "error"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook_can_be_read(path):
    head = nbformat.read(path, 4).cells[0].source
    assert re.match(r"# \S", head), "the first cell begins with a title"
    assert re.search(r"^> \S", head, re.M), "the first cell has a one-line summary: > ..."
    assert any(c.outputs for c in code_cells(path)), "no output: the notebook was not executed"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_import_cells_hold_imports_only(path):
    for cell in code_cells(path):
        source = "\n".join(line for line in cell.source.splitlines() if not re.match(r"\s*[%!]", line))
        kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body}
        assert kinds != {True, False}, f"imports and code in one cell:\n{cell.source[:300]}"


def test_words():
    stubs = "TO" + "DO|FIX" + "ME|NotImplemented" + r"Error|assert " + r"True\b|except( Exception)?: *pa" + "ss"
    assert [f"{name(f)}: {m.group(0)}" for f in TEXT for m in re.finditer(stubs, f.read_text(encoding="utf-8"))] == []


def test_no_path_of_one_machine():
    homes = re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w")
    assert [f"{name(f)}: {m.group(0)}" for f in TEXT for m in homes.finditer(f.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_rooms_import_what_stands_below_them(path):
    parts = path.relative_to(ROOT).parts[:-1]
    used = {m.split(".")[1] for m in imports(path.read_text(), parts) if m.startswith("drivelit.")}
    room = parts[1] if len(parts) > 1 else ""
    assert used - {room} <= MAY_IMPORT.get(room, set())


def test_the_arrow_check_sees_arrows():
    package = ("drivelit", "scene")
    assert list(imports("from ..policy import model\nimport torch.nn\n", package)) == ["drivelit.policy", "torch.nn"]
    assert list(imports("from .. import training\nfrom .core import Scene\n", package)) == [
        "drivelit.training",
        "drivelit.scene.core",
    ]


DISTRIBUTION = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
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
        third - declared - {"nuscenes"} == set()
    )  # its devkit comes by ci/setup.sh, without its own pins; it is imported when it is needed


def test_every_direct_dependency_is_pinned_with_a_reason():
    lines = (ROOT / "ci/constraints.txt").read_text().splitlines()
    reasons = {line.split("==")[0].lower() for line in lines if re.match(r"[\w.-]+==\S+  # \S", line)}
    direct = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert {re.match(r"[\w-]+", d).group(0).lower() for d in direct} - reasons == set()


def test_ci_runs_the_command_of_the_readme():
    commands = re.findall(r"^```\n(.+)\n```", README, re.M)
    assert commands[:2] == ["bash ci/main.sh", "bash ci/test.sh"]
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("exec " + commands[1])
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_readme_maps_every_notebook():
    missing = [name(f) for f in NOTEBOOKS if f.name != "index.ipynb" and f"({name(f)})" not in README]
    assert missing == [], "run: python ci/readme.py --execute"


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_licence_is_apache():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_no_recorded_picture():
    "Camera images of the data sets are JPEG files; the kit's own pictures are PNG files."
    assert [name(f) for f in FILES if f.suffix.lower() in (".jpg", ".jpeg", ".pkl", ".bin", ".parquet")] == []
    embedded = [
        name(f) for f in NOTEBOOKS for c in code_cells(f) for o in c.outputs if "image/jpeg" in o.get("data", {})
    ]
    assert embedded == []


def test_the_wheel_has_the_profiles(tmp_path):
    for f in [
        f for f in FILES if f.is_relative_to(ROOT / "drivelit") or f.parent == ROOT
    ]:  # a copy: setuptools leaves a build folder
        (tmp_path / name(f)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f, tmp_path / name(f))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", tmp_path / "out", str(tmp_path)], check=True
    )
    (wheel,) = (tmp_path / "out").glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert "drivelit/settings.ini" in packed and "drivelit/training/profiles.py" in packed
    assert (ROOT / "settings.ini").resolve() == ROOT / "drivelit" / "settings.ini"

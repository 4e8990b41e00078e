"""The run notebook of each system: the paper's run can be planned, also by the command, and a wrong name is refused."""

from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import papermill
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from drivelit.__main__ import main
from drivelit.runs.profiles import ProfileError, systems

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = systems()


def in_a_kernel(system, out, **given):
    "What the notebook prints when papermill executes it."
    path = ROOT / SYSTEMS[system].notebook
    how = dict(kernel_name="python3", cwd=path.parent, progress_bar=False, start_timeout=600, execution_timeout=1800)
    papermill.execute_notebook(path, out, given, **how)
    outputs = [o for c in nbformat.read(out, 4).cells if c.cell_type == "code" for o in c.outputs]
    return "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)


def in_this_process(system, monkeypatch, **given):
    "Papermill's parameters without a kernel, whose start takes ten times as long: the names when a cell stops it."
    path, names = ROOT / SYSTEMS[system].notebook, {}
    monkeypatch.chdir(path.parent)
    notebook = parameterize_notebook(load_notebook_node(str(path)), given)
    with plt.rc_context(), pd.option_context("display.max_colwidth", 50, "display.max_rows", 60):
        for cell in (c for c in notebook.cells if c.cell_type == "code"):
            try:
                exec(cell.source, names)
            except (SystemExit, ProfileError) as e:
                return names, e
    raise AssertionError(f"{path} went on")


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_papers_run_is_planned(system, tmp_path, monkeypatch, capsys):
    given = dict(profile="paper", plan=True)
    if system == next(iter(SYSTEMS)):
        said = in_a_kernel(system, tmp_path / "plan.ipynb", **given)
    else:
        names, stopped = in_this_process(system, monkeypatch, **given)
        said = capsys.readouterr().out
        assert isinstance(stopped, SystemExit) and not stopped.code and names["run"].plan
    assert main(["plan", f"{system}.paper"]) == 0
    for text in (said, capsys.readouterr().out):
        assert "memory rl" in text and "torchrun" in text
    assert f"[{system}.paper]" in said


def test_a_plan_that_does_not_fit_ends_with_an_error(monkeypatch, capsys):
    given = dict(profile="paper", plan=True, model="Qwen/Qwen2.5-VL-7B-Instruct")
    names, stopped = in_this_process("minddriver", monkeypatch, **given)
    assert isinstance(stopped, ProfileError) and "does not fit into gpu_memory = 96" in str(stopped)
    assert "memory play" in capsys.readouterr().out  # the page is there


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_unknown_parameter_is_refused(system, monkeypatch):
    names, stopped = in_this_process(system, monkeypatch, profile="smoke", plan=True, seedz=3)
    assert "unknown parameter 'seedz'; the nearest is 'seeds'" in str(stopped)
    assert "run" not in names  # nothing was resolved or begun

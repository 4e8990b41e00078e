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


def run(system, out, **parameters):
    "What the executed notebook prints."
    path = ROOT / SYSTEMS[system].notebook
    papermill.execute_notebook(
        path,
        out,
        parameters,
        kernel_name="python3",
        cwd=path.parent,
        progress_bar=False,
        start_timeout=600,
        execution_timeout=1800,
    )
    outputs = [o for c in nbformat.read(out, 4).cells if c.cell_type == "code" for o in c.outputs]
    return "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_papers_run_is_planned(system, tmp_path, capsys):
    said = run(system, tmp_path / "plan.ipynb", profile="paper", plan=True)
    assert main(["plan", f"{system}.paper"]) == 0
    for text in (said, capsys.readouterr().out):
        assert "memory rl" in text and "torchrun" in text
    assert f"[{system}.paper]" in said


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_unknown_parameter_is_refused(system, monkeypatch):
    "Papermill's parameters, without a kernel: its start takes ten times as long."
    path, names = ROOT / SYSTEMS[system].notebook, {}
    monkeypatch.chdir(path.parent)
    given = parameterize_notebook(load_notebook_node(str(path)), dict(profile="smoke", plan=True, seedz=3))
    own = plt.rc_context(), pd.option_context("display.max_colwidth", 50, "display.max_rows", 60)
    with own[0], own[1], pytest.raises(ProfileError, match="unknown parameter 'seedz'; the nearest is 'seeds'"):
        for cell in (c for c in given.cells if c.cell_type == "code"):
            exec(cell.source, names)
    assert "run" not in names  # nothing was resolved or begun

"""The run notebook of each system: the paper's run can be planned, also by the command, and a wrong name is refused."""

from pathlib import Path

import nbformat
import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from drivelit.__main__ import main
from drivelit.runs.profiles import systems

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
def test_an_unknown_parameter_is_refused(system, tmp_path):
    with pytest.raises(PapermillExecutionError, match="unknown parameter 'seedz'; the nearest is 'seeds'"):
        run(system, tmp_path / "wrong.ipynb", profile="smoke", plan=True, seedz=3)

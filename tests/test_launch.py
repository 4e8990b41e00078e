"The printed chain of SLURM's jobs, run by stand-ins for its commands on this machine."

import os
import socket
import subprocess
from unittest.mock import patch

import pytest

from drivelit.runs.launch import launch
from drivelit.runs.profiles import find_system, load_profile
from drivelit.runs.stages import start

SBATCH = """#!/bin/bash
# Runs a job at once; one whose job before has failed is not run, as with --kill-on-invalid-dep.
here=$(dirname "$0"); id=$(( $(ls "$here" | grep -c '[.]job$') + 1 )); cat > "$here/$id.job"; chmod +x "$here/$id.job"
for word in "$@"; do case $word in
  --dependency=*) before=${word#--dependency=afterok:} ;;
  --nodes=*) nodes=${word#--nodes=} ;;
esac; done
if [ -z "$before" ] || [ "$(cat "$here/$before.rc")" = 0 ]; then
  SLURM_JOB_NODELIST=$nodes "$here/$id.job" > "$here/$id.out" 2>&1; echo $? > "$here/$id.rc"
else echo 1 > "$here/$id.rc"; fi
echo "$id $before $nodes" >> "$here/asked"; echo $id
"""
SRUN = """#!/bin/bash
# The command on each of the machines, side by side; all must succeed.
nodes=${1#--nodes=}; shift 2; ids=
for n in $(seq $nodes); do "$@" & ids="$ids $!"; done
for id in $ids; do wait $id || exit 1; done
"""


@pytest.fixture
def slurm(tmp_path):
    "A folder for PATH with sbatch, srun and scontrol; every machine has one device."
    for name, text in dict(sbatch=SBATCH, srun=SRUN, scontrol="#!/bin/bash\necho localhost\n").items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with patch.dict(os.environ, DRIVELIT_PER_NODE="1", PATH=path):
        yield tmp_path


def submitted(slurm, text):
    "Submit the chain; who waited for whom, on how many machines, and how the jobs ended."
    subprocess.run(["bash", "-c", text], check=True, cwd=slurm)
    asked = [tuple(line.split(" ")) for line in (slurm / "asked").read_text().splitlines()]
    return asked, [(slurm / f"{job}.rc").read_text().strip() for job, *_ in asked]


def test_the_jobs_of_a_run_follow_each_other(slurm):
    "Scenes and rows on one machine, tuning on two: by the printed text, to the end."
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    profile = load_profile("mtdrive", "smoke", model="base", train_scenes=16, eval_scenes=4, sft_gpus=2, row_workers=1)
    out, stages = start(slurm / "run", profile), find_system("mtdrive").stages
    kinds = dict(scenes="", data_single="", sft_single="sft")
    text = launch(profile, dict(out=str(out)), kinds)[-1].replace(":29500", f":{port}")
    asked, ends = submitted(slurm, text)
    told = "\n".join(p.read_text() for p in sorted(slurm.glob("*.out")))
    assert (asked, ends) == ([("1", "", "1"), ("2", "1", "2")], ["0", "0"]), told
    assert all(stages.is_done(out, stage) for stage in kinds)
    assert stages.result(out, "sft_single")["rows"] == stages.result(out, "data_single")["single"] == 16


def test_behind_a_job_that_failed_none_runs(slurm):
    profile = load_profile("mtdrive", "smoke", sft_gpus=2)
    text = launch(profile, dict(out=str(slurm / "run")), dict(scenes="", sft_single="sft"))[-1]
    text = text.replace(" scenes --seed", " scenery --seed")
    assert submitted(slurm, text) == ([("1", "", "1"), ("2", "1", "2")], ["2", "1"])
    assert "no stage 'scenery'" in (slurm / "1.out").read_text() and not (slurm / "2.out").exists()

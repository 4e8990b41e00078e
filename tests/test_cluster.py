"""On a Ray cluster of several nodes in this machine: the laptop's numbers, a node killed, machines that are refused."""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from test_rehearsal import all_ran, rehearse, whole

TOKEN = dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))  # nobody joins without it
os.environ |= TOKEN  # Ray looks when it is imported
ray = pytest.importorskip("ray", reason='needs pip install "drivelit[cluster]"')
[os.environ.pop(k) for k in TOKEN]  # other tests have no cluster

import drivelit  # noqa: E402
from drivelit.io.files import RunError  # noqa: E402
from drivelit.runs import cluster as clusters  # noqa: E402
from drivelit.runs.launch import launch  # noqa: E402
from drivelit.runs.profiles import find_system, load_profile  # noqa: E402
from drivelit.runs.stages import start  # noqa: E402
from drivelit.training.checkpoints import read_metrics  # noqa: E402

PIPELINE = """
"A stage in a task, and one whose workers share a play."

import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from drivelit.rollout.core import Episode
from drivelit.runs.plays import play_in_parts
from drivelit.runs.stages import Stages

STAGES = Stages("far", dict(scenes=(), drive=("scenes",), wrong=()), kinds=dict(drive="play"), optional=("wrong",))


def drive(out, profile, seed):
    def play(some, seed):
        begun, killed = STAGES.folder(out, "drive") / "begun.txt", Path(out) / "killed"
        with open(begun, "a") as f:
            f.write(f"{seed}\\n")
        # two parts are played before a machine is killed; the others wait for that, however long it takes
        order = begun.read_text().split().index(str(seed))  # parts have seeds of their own
        while os.environ.get("DRIVELIT_KILLED") and order > 1 and not killed.exists():
            time.sleep(0.05)
        draws = np.random.default_rng(seed).random(len(some))
        rows = [(str(s), dict(pdms=float(d))) for s, d in zip(some, draws)]
        return [Episode(name, [], [], [0], [], [], 1, ["a"], [rewards], [{}]) for name, rewards in rows]

    torch.manual_seed(0)
    policy = SimpleNamespace(model=torch.nn.Linear(2, 2))
    told = dict(token=os.environ.get("HF_TOKEN"))
    return told | dict(pdms=[e.rewards[0]["pdms"] for e in play_in_parts(play, policy, profile, range(9), seed)])


FUNCTIONS = dict(
    scenes=lambda out, profile, seed: dict(n=9, token=os.environ.get("HF_TOKEN")),
    drive=drive,
    wrong=lambda out, profile, seed: 1 / 0,
)
"""
PATIENT = """
"The pipeline of {package}; behind its first checkpoint a stage stands still until its machine was killed."

import dataclasses
import time
from pathlib import Path

from {package}.pipeline import FUNCTIONS, STAGES
from drivelit.training.checkpoints import SafeCheckpoints

STAGES = dataclasses.replace(STAGES, package="patient.{name}")
usual = SafeCheckpoints.on_save


def on_save(self, *args, **how):
    usual(self, *args, **how)
    while not (Path(self.out).parents[1] / "killed").exists():
        time.sleep(0.05)


SafeCheckpoints.on_save = on_save
"""
HANG = 1800  # seconds; ends a test that hangs, and nothing else


PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")


NEXT = itertools.count(11_000 + os.getpid() % 800 * 10)  # below those that a system hands out by itself


def is_free(port):
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True


def small(cpus=1, **more):
    "A machine with one CPU. It is told its agents' ports: else it waits for them, but not for long, and gives up."
    ports = {name: next(p for p in NEXT if is_free(p)) for name in PORTS}
    return dict(num_cpus=cpus, object_store_memory=100_000_000, include_log_monitor=False, **ports, **more)


def patient_node(usual):
    "Ray gives a machine thirty seconds to come. A busy one needs more, and each that is given up goes on running."

    def get_node(*how):
        end = time.monotonic() + HANG
        while True:
            try:
                return usual(*how)
            except RuntimeError:  # it has not come yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    return get_node


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    "A head without room for work, and no machine yet; the package `far` can be imported by all."
    from ray.cluster_utils import Cluster

    package = tmp_path_factory.mktemp("package")
    (package / "far").mkdir()
    (package / "far" / "__init__.py").touch()
    (package / "far" / "pipeline.py").write_text(PIPELINE)
    for system in ("mtdrive", "minddriver"):
        (package / "patient" / system).mkdir(parents=True)
        text = PATIENT.format(package=find_system(system).package, name=system)
        (package / "patient" / system / "pipeline.py").write_text(text)
    # JupyterLab's grammar of addresses: each of Ray's processes would read it for a second, and jsonschema goes without
    (package / "rfc3987_syntax.py").write_text("raise ImportError")
    # eighty processes import; none of them shall look through what it imports, a fifth of the time
    (package / "sitecustomize.py").write_text("import gc; gc.set_threshold(100_000)")
    old = dict(os.environ)
    paths = [str(package), str(Path(drivelit.__file__).parents[1]), old.get("PYTHONPATH", "")]
    os.environ |= dict(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    os.environ |= TOKEN
    # as few processes as go; and a machine that is busy with other things may take its time
    os.environ |= dict(RAY_prestart_worker_first_driver="0", RAY_enable_worker_prestart="0", RAY_DISABLE_METRICS="1")
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # of a cloud that takes machines away
    os.environ |= dict(RAY_health_check_timeout_ms="20000", RAY_health_check_period_ms="1000")  # five missed: gone
    sys.path.insert(0, str(package))
    head = small(0, include_dashboard=False, no_monitor=True)
    with patch.object(ray._private.services, "get_node", patient_node(ray._private.services.get_node)):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
    cluster.shutdown()
    sys.path.remove(str(package))
    os.environ.clear()
    os.environ |= old


def machines(cluster, n):
    "n machines of one CPU each: those that earlier tests have left, and new ones. To start one takes some seconds."
    for node in list(cluster.worker_nodes)[n:]:
        cluster.remove_node(node, allow_graceful=False)
    while len(cluster.worker_nodes) < n:
        cluster.add_node(**small())


def home(cluster, folder):
    "The machine on which the first worker of a stage runs: the parent of its process is the machine's raylet."
    pid = json.loads((folder / "holder.json").read_text())["pid"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def of(node):
        return [p.process.pid for p in node.all_processes["raylet"]]

    return next(n for n in cluster.worker_nodes if parent in of(n))


def lose(cluster, folder, when):
    "A thread that kills the machine of a stage as soon as something is there, however long that takes."
    seen = {}

    def wait():
        while not (found := when()):  # the stage waits for it, so a limit here would let both stand for ever
            time.sleep(0.02)
        seen["node"], seen["then"] = home(cluster, folder), found
        worker = psutil.Process(json.loads((folder / "holder.json").read_text())["pid"])
        cluster.remove_node(seen["node"], allow_graceful=False)
        with contextlib.suppress(psutil.NoSuchProcess):  # it is gone
            while worker.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)  # it outlives its raylet by a moment, in which it could finish what others wait for
        (folder.parents[1] / "killed").touch()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return seen, thread


def done(stages, out, stage):
    return {k: v for k, v in stages.result(out, stage).items() if k != "seconds"}


def far():
    from far.pipeline import STAGES

    return STAGES


def patient(system):
    "The stages whose workers are patient. This process does not import their pipeline: it would be patient for ever."
    return replace(find_system(system).stages, package=f"patient.{system}")


def test_a_killed_node_costs_the_parts_under_way(nodes, tmp_path, monkeypatch):
    "And a token reaches a stage in a task and one of two workers; Ray's files about workers show other variables."
    profile = load_profile("mtdrive", "smoke", rl_gpus=2, max_num_seqs=1)
    alone = far().run(start(tmp_path / "alone", profile), workers=0)
    monkeypatch.setenv("DRIVELIT_KILLED", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody_may_read_this")
    monkeypatch.setenv("DRIVELIT_SHOWN", "everybody_may_read_this")
    out = start(tmp_path / "run", profile)
    drive = far().folder(out, "drive")
    parts = drive / "shards" / "0"

    def finished():
        return {p: p.stat().st_mtime_ns for p in parts.glob("*.json.gz")}

    def both_wait():
        "What is finished when each of the two workers stands still in a part: two of four begun."
        begun, held = drive / "begun.txt", (drive / "holder.json").exists()
        return held and begun.exists() and len(begun.read_text().split()) == 4 and len(f := finished()) == 2 and f

    machines(nodes, 3)  # one to spare
    seen, thread = lose(nodes, drive, both_wait)
    found = far().run(out, workers=1, elsewhere=clusters.on_cluster(nodes.address))
    thread.join(HANG)
    assert found["drive", 0]["pdms"] == alone["drive", 0]["pdms"] and len(set(found["drive", 0]["pdms"])) == 9
    kept = seen["then"]
    assert len(kept) == 2
    assert {p: t for p, t in finished().items() if p in kept} == kept  # no finished part was played again
    begun = (far().folder(out, "drive") / "begun.txt").read_text().split()
    assert 9 < len(begun) <= 11 and len(set(begun)) == 9  # of each of the two workers one part at most

    assert [found[stage, 0]["token"] for stage in ("scenes", "drive")] == [os.environ["HF_TOKEN"]] * 2
    session = Path(nodes.head_node.get_session_dir_path())
    files = [f.read_bytes() for f in session.rglob("*") if f.is_file()]
    assert any(os.environ["DRIVELIT_SHOWN"].encode() in f for f in files)
    assert not any(os.environ[k].encode() in f for f in files for k in ("HF_TOKEN", "RAY_AUTH_TOKEN"))

    # what the cluster has written is read by a laptop, a damaged part is named and played again
    monkeypatch.delenv("DRIVELIT_KILLED")
    (far().folder(out, "drive") / "done.json").unlink()
    whole = (parts / "4.json.gz").read_bytes()
    (parts / "4.json.gz").write_bytes(whole[:-20])
    with pytest.warns(UserWarning, match="shards/0/4.json.gz is damaged .*; it is played again"):
        again = far().run(out, workers=0)
    assert again["drive", 0]["pdms"] == alone["drive", 0]["pdms"]
    assert (parts / "4.json.gz").read_bytes() == whole
    more = (far().folder(out, "drive") / "begun.txt").read_text().split()[len(begun) :]
    assert len(more) == 1


def test_the_smoke_run_loses_its_machine(nodes, tmp_path):
    "Two data sets and a tuned model, made on a cluster whose machine dies during the tuning: all equals the laptop's."
    stages = find_system("mtdrive").stages
    profile = load_profile("mtdrive", "smoke", model="base", train_scenes=16, eval_scenes=4, save_steps=1)
    alone, out = start(tmp_path / "alone", profile), start(tmp_path / "run", profile)
    stages.run(alone, stages=["data_two"], workers=1)
    tuned = stages.folder(out, "sft_single")
    machines(nodes, 2)  # one to spare
    seen, thread = lose(nodes, tuned, lambda: sorted(tuned.glob("checkpoint-*/complete")))
    patient("mtdrive").run(out, stages=["data_two"], workers=1, elsewhere=clusters.on_cluster(nodes.address))
    thread.join(HANG)
    assert len(seen["then"]) == 1 and not (tuned / "checkpoint-1").exists()  # killed behind the first, went on from it
    for stage in ("scenes", "data_single", "sft_single", "data_two"):
        assert done(stages, out, stage) == done(stages, alone, stage), stage
    weights = [(o / "seed-0/sft_single/final/model.safetensors").read_bytes() for o in (alone, out)]
    assert weights[0] == weights[1]

    def found(o):
        return [p for p in o.rglob("*.parquet") if not p.name.endswith(".sets.parquet")]  # these have seconds

    rows = [sorted((p.name, p.read_bytes()) for p in found(o)) for o in (alone, out)]
    assert rows[0] == rows[1] and len(rows[0]) == 5  # three data sets, and the records of drivers and policy


def test_reinforcement_on_two_machines_is_that_of_the_printed_line(nodes, tmp_path):
    "MindDriver's first stage by torchrun as `plan` says it, and on a cluster that loses one of its two machines."
    stages = find_system("minddriver").stages
    profile = load_profile("minddriver", "smoke", model="base", start="packed", rl_gpus=2, rl_steps=3, save_steps=1)
    printed, out = start(tmp_path / "printed", profile), tmp_path / "run"
    stages.run(printed, stages=["sft"], workers=1)
    shutil.copytree(printed, out)
    lines = launch(profile, dict(out=str(printed)), dict(rft_image="rl"))
    [line] = [c for c in lines if c.startswith("torchrun ")]
    subprocess.run(line, shell=True, check=True, capture_output=True, timeout=HANG)
    arm = stages.folder(out, "rft_image")
    machines(nodes, 3)  # one to spare
    seen, thread = lose(nodes, arm, lambda: sorted(arm.glob("checkpoint-*/complete")))
    patient("minddriver").run(out, stages=["rft_image"], workers=1, elsewhere=clusters.on_cluster(nodes.address))
    thread.join(HANG)
    assert seen["then"] and stages.is_done(out, "rft_image", 0)
    ours, theirs = (read_metrics(stages.folder(o, "rft_image")) for o in (out, printed))
    told = ("loss", "reward", "kl", "grad_norm", "tokens")
    assert [r["step"] for r in theirs] == [1, 2, 3] and len({r["reward"] for r in theirs}) > 1
    assert [[r[k] for k in told] for r in ours] == [[r[k] for k in told] for r in theirs]
    weights = [(stages.folder(o, "rft_image") / "final" / "model.safetensors").read_bytes() for o in (out, printed)]
    assert weights[0] == weights[1] != (stages.folder(out, "sft") / "final" / "model.safetensors").read_bytes()


@whole
def test_a_rehearsal_on_two_machines(nodes, tmp_path):
    "AutoDrive-P3 at the paper's size but for its counts: tuning and reinforcement by two workers, each on its machine."
    machines(nodes, 3)  # and one for what a stage does alone
    more = ("--cluster", nodes.address, "--devices", "2")
    keys = dict(teacher="scripted", max_new_tokens=24)
    code, told, page = rehearse(tmp_path, "autodrive_p3.navsim", "navsim", ["rl"], "ray", more=more, **keys)
    all_ran(told, page)
    assert code == 0 and [told["stages"][s]["processes"] for s in ("sft", "rl")] == [2, 2], page
    assert set(told["stages"]) == {"scenes", "data", "sft", "rl"}, page


def test_who_has_no_token_gets_a_sentence(nodes, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))  # no file with a token
    code = "import sys; from drivelit.runs.cluster import connected; connected(sys.argv[1]).__enter__()"
    ended = subprocess.run([sys.executable, "-c", code, nodes.address], capture_output=True, text=True, timeout=HANG)
    assert ended.returncode and "no authentication token was found" in ended.stderr.splitlines()[-1], ended.stderr
    assert "RunError: there is no Ray cluster" in ended.stderr and "in ~/.ray/auth_token" in ended.stderr


def test_a_stage_that_stops_says_why(nodes, tmp_path):
    out = start(tmp_path, load_profile("mtdrive", "smoke"))
    machines(nodes, 1)
    with pytest.raises(RuntimeError, match="(?s)stage wrong, seed 0 stopped.*ZeroDivisionError") as error:
        far().run(out, stages=["wrong"], workers=1, elsewhere=clusters.on_cluster(nodes.address))
    assert f"its log: {out}/seed-0/wrong/log.txt" in str(error.value)
    assert "ZeroDivisionError" in (out / "seed-0" / "wrong" / "log.txt").read_text()


def can_unshare():
    return shutil.which("unshare") and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@contextlib.contextmanager
def machine_that_sees(cluster, mount, log):
    "A machine with a file system of its own: what it mounts is seen by its processes alone. `log`: what it prints."
    given = small()
    flags = [f"--num-cpus={given['num_cpus']}", f"--object-store-memory={given['object_store_memory']}"]
    flags += [f"--dashboard-agent-grpc-port={given['metrics_agent_port']}"]
    flags += [f"--{p.replace('_', '-')}={given[p]}" for p in PORTS[1:]]
    flags += ["--min-worker-port=0", "--max-worker-port=0"]  # else it keeps 10002 to 19999, where the others' ports lie
    join = f"exec {sys.executable} -m ray.scripts.scripts start --block --address={cluster.address} {' '.join(flags)}"
    with clusters.connected(cluster.address):
        known = {n["NodeID"] for n in ray.nodes()}
    hidden = ["unshare", "-m", "bash", "-c", f"mount {mount} && {join}"]
    with open(log, "w") as f:
        far_off = subprocess.Popen(hidden, stdout=f, stderr=f)
    try:
        end = time.monotonic() + HANG
        with clusters.connected(cluster.address):
            while not [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in known]:
                assert far_off.poll() is None and time.monotonic() < end, f"no machine came: {log.read_text()[-2000:]}"
                time.sleep(0.5)
        yield
    finally:
        far_off.terminate()
        far_off.wait(60)


apart = pytest.mark.skipif(not can_unshare(), reason="needs the right to mount a file system that one process sees")


@apart
def test_another_drivelit_is_refused(nodes, tmp_path):
    installed = Path(drivelit.__file__).parent
    shutil.copytree(installed, tmp_path / "drivelit", ignore=shutil.ignore_patterns("__pycache__", "*weights*"))
    with (tmp_path / "drivelit" / "scene" / "core.py").open("a") as f:
        f.write("# another version\n")
    out = start(tmp_path / "run", load_profile("mtdrive", "smoke"))
    with machine_that_sees(nodes, f"--bind {tmp_path / 'drivelit'} {installed}", tmp_path / "machine.log"):
        with pytest.raises(RunError, match="has another drivelit: .* install the same on all"):
            far().run(out, stages=["scenes"], workers=1, elsewhere=clusters.on_cluster(nodes.address))
    assert sorted(p.name for p in out.iterdir()) == ["run.json"]  # nothing was begun, and nothing is left over


@apart
def test_a_folder_that_a_machine_does_not_see_is_refused(nodes, tmp_path):
    (tmp_path / "local").mkdir()
    out = start(tmp_path / "local" / "run", load_profile("mtdrive", "smoke"))
    with machine_that_sees(nodes, f"-t tmpfs none {tmp_path / 'local'}", tmp_path / "machine.log"):
        with pytest.raises(RunError, match=f"cannot read and write {out} .* on a shared file system"):
            far().run(out, stages=["scenes"], workers=1, elsewhere=clusters.on_cluster(nodes.address))
    assert sorted(p.name for p in out.iterdir()) == ["run.json"]


def test_too_few_workers_are_refused(nodes, tmp_path):
    out = start(tmp_path, load_profile("mtdrive", "smoke", rl_gpus=4))
    machines(nodes, 1)
    with pytest.raises(RunError, match="smoke needs 4 workers, the cluster has 1 CPUs"):
        far().run(out, stages=["scenes"], workers=1, elsewhere=clusters.on_cluster(nodes.address))


def test_without_a_cluster_ray_is_not_imported(tmp_path):
    code = f"""
import sys
from drivelit.__main__ import main
assert main(["run", "mtdrive.smoke", "--out", {str(tmp_path / "run")!r}, "--stages", "scenes", "--workers", "0"]) == 0
assert "ray" not in sys.modules
assert main(["run", "mtdrive.smoke", "--out", {str(tmp_path / "run")!r}, "--cluster", "127.0.0.1:1"]) == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "there is no Ray cluster at '127.0.0.1:1'" in done.stderr and "ray start --head" in done.stderr

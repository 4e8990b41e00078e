"""Data larger than the memory, a preparation that is killed, and a run that goes on with more or fewer processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image
from safetensors.torch import load_file
from transformers import TrainerCallback

from drivelit.data.rows import Picture, make_row, read_rows, says, write_rows
from drivelit.data.shards import Shards, read_index
from drivelit.policy.model import load_policy
from drivelit.runs.preview import checkpoint_bytes
from drivelit.runs.profiles import load_profile
from drivelit.scene.core import to_json
from drivelit.town.scenes import scenes
from drivelit.training.checkpoints import last_checkpoint, read_metrics
from drivelit.training.sft import train_sft
from drivelit.training.sharding import checkpoint_weights

TOWN = ("toy", "-")
HOW = ("--n", "40", "--in-shard", "5", "--no-references")


def prepare(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "drivelit", "prepare", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def prepared(*words, **more):
    "The exit status and what was said."
    process = prepare(*words, **more)
    return process.communicate()[0], process.returncode


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    "Forty scenes, prepared by one process."
    folder = tmp_path_factory.mktemp("town") / "one"
    said, status = prepared(*TOWN, folder, *HOW, "--workers", 1)
    assert status == 0 and "40 scenes in 8 shards; 0 left out" in said, said
    return folder


def test_the_scenes_are_the_towns(town):
    assert [to_json(s) for s in Shards(town)] == [to_json(s) for s in scenes(40)]


def test_the_number_of_workers_does_not_matter(town, tmp_path):
    said, status = prepared(*TOWN, tmp_path / "three", *HOW, "--workers", 3)
    assert status == 0, said
    assert read_index(tmp_path / "three") == read_index(town)


def children(pid):
    "The processes that a process has started."
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(p) for p in found.split()]


def test_a_killed_preparation_goes_on(town, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    stuck = [folder / f"{k:05d}.parquet" for k in (5, 6)]
    for path in stuck:  # whoever opens it waits for a writer: both workers are in the middle of their work for sure
        os.mkfifo(path)

    def whole():
        return {p.name: p.stat().st_mtime_ns for p in folder.glob("*.parquet") if p.is_file()}

    process = prepare(*TOWN, folder, *HOW, "--workers", 2)
    end = time.monotonic() + 1800  # ends a test that hangs, and nothing else
    while len(whole()) < 5:
        assert process.poll() is None and time.monotonic() < end, "it ended before it could be killed"
        time.sleep(0.02)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while any(os.path.exists(f"/proc/{p}") for p in workers):  # they leave with their parent
        assert time.monotonic() < end
        time.sleep(0.1)
    there = whole()
    assert len(there) == 5 and not (folder / "index.json").exists()
    for path in stuck:
        path.unlink()
    said, status = prepared(*TOWN, folder, *HOW, "--workers", 2)
    assert status == 0, said
    assert read_index(folder) == read_index(town)
    assert {n: (folder / n).stat().st_mtime_ns for n in there} == there  # what was whole was left as it is
    assert not list(folder.glob("*.new"))


def test_a_full_disk_is_a_sentence(town, tmp_path):
    sizes = sorted(p.stat().st_size for p in town.glob("*.parquet"))
    little = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({sizes[4]}, {sizes[4]}))"  # a few shards are larger
    words = ["prepare", *TOWN, "full", *HOW, "--workers", "1"]
    run = f"{little}; from drivelit.__main__ import main; raise SystemExit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "parquet: cannot be written (" in done.stderr, done.stderr
    assert "whole shards stay, and the same command goes on" in done.stderr and "Traceback" not in done.stderr
    whole = sorted(p.name for p in (tmp_path / "full").glob("*.parquet"))
    assert all(f"{k:05d}.parquet" == n for k, n in enumerate(whole)) and not list((tmp_path / "full").glob("*.new"))
    said, status = prepared(*TOWN, tmp_path / "full", *HOW, "--workers", 1)
    assert status == 0 and read_index(tmp_path / "full") == read_index(town), said


def rows_with_pictures(count):
    "Rows that share no picture."
    (scene,) = scenes(1)
    for k in range(count):
        shade = Image.new("RGB", (168, 84), (k % 256, k // 256, 7))
        asked = {"role": "user", "content": [{"type": "image", "image": shade}, {"type": "text", "text": "Yes or No"}]}
        yield make_row("colour", scene, [asked, says("assistant", "Yes. " * (1 + k % 9))])


class Opened(TrainerCallback):
    "How many pictures had been opened when training began, and at the end of each update."

    def __init__(self, names):
        self.names, self.counts = names, []

    def on_train_begin(self, *_, **__):
        self.counts.append(len(self.names))

    def on_step_end(self, *_, **__):
        self.counts.append(len(self.names))


def test_no_picture_is_opened_before_the_first_batch(tmp_path, monkeypatch):
    opened, read = [], Picture._read
    monkeypatch.setattr(Picture, "_read", lambda self: opened.append(self.name) or read(self))
    rows, watch = read_rows(write_rows(rows_with_pictures(300), tmp_path / "rows.parquet")), Opened(opened)
    train_sft(load_policy("toy", size="tiny"), rows, tmp_path / "run", max_steps=3, batch=8, callbacks=[watch])
    assert watch.counts[0] == 0
    assert 8 <= watch.counts[1] <= 16 and len(opened) == 24  # a batch, and perhaps the one that is made meanwhile


PEAK = """
import sys
from pathlib import Path
from drivelit.data.rows import read_rows
from drivelit.policy.model import load_policy
from drivelit.training.sft import train_sft

policy, here = load_policy("toy", size="tiny"), Path(sys.argv[1])
train_sft(policy, read_rows(here / sys.argv[2])[:40], here / "warm", max_steps=2, batch=8)
Path("/proc/self/clear_refs").write_text("5")  # forget the peak
train_sft(policy, read_rows(here / sys.argv[2]), here / sys.argv[2].split(".")[0], max_steps=2, batch=8)
lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("peak", lines["VmHWM"].split()[0])
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is read as Linux tells it"
)
def test_memory_does_not_grow_with_the_rows(tmp_path):
    "Ten times the rows: their pictures would be 380 MB more, their unpacked words 30 MB."
    peaks = {}
    for count in (1000, 10_000):
        write_rows(rows_with_pictures(count), tmp_path / f"{count}.parquet")
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path), f"{count}.parquet"],
            env=os.environ | dict(OMP_NUM_THREADS="1"),  # each thread has memory of its own
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[count] = int(done.stdout.split("peak")[-1]) / 1000
    print(json.dumps(peaks), "MB")
    assert peaks[10_000] - peaks[1000] < 25, peaks  # found: 2 to 13; with all words unpacked 40 to 46


OTHER_NUMBER = """
import json, multiprocessing, os, shutil, signal, sys, time
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig
from PIL import Image
from transformers import TrainerCallback

from drivelit.minddrive import imitation
from drivelit.minddrive.experts import Experts
from drivelit.minddrive.rows import make_rows
from drivelit.minddrive.meta_actions import Inputs
from drivelit.policy.engines import Completion
from drivelit.policy.model import load_policy
from drivelit.rollout.core import Step, Task
from drivelit.town.routes import routes
from drivelit.training import sft, turn_grpo
from drivelit.io import weights
from drivelit.training.checkpoints import SafeCheckpoints, read_metrics
from drivelit.training.sharding import checkpoint_weights, is_sharded

torch.set_num_threads(1)
here, picture = Path(sys.argv[1]), Image.new("RGB", (56, 28), "grey")
says = lambda role, text: {"role": role, "content": [{"type": "text", "text": text}]}
ask = lambda text: [{"role": "user", "content": [{"type": "image"}, *says("", text)["content"]]}]
KINDS = dict(sft={}, adapters={}, bf16=dict(bf16=True), rl={}, held={}, served={}, experts={})
MINUTES = {0: (0, 20, 40, 70, 80, 90), 1: (0, 1000, 2000, 3000, 4000, 5000)}  # seconds of each process's own clock


class Killed(Exception): ...


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        assert is_sharded(model) == ("RANK" in os.environ)
        if state.global_step == 3:
            raise Killed


class Digits(Task):
    "The reward is the share of digits."

    def prompt(self, scene):
        (asked,) = ask(f"Predict {scene} future trajectory points")
        return [{"role": "user", "content": [{"type": "image", "image": picture}, asked["content"][1]]}]

    def step(self, state, completion):
        return Step(None, dict(reward=sum(c.isdigit() for c in completion.text) / len(completion.text)))


class Scripted:
    "The same words, however many processes ask."

    def __init__(self, policy):
        self.words = policy.tokenizer

    def generate(self, conversations, *_, **__):
        made = []
        for n, c in enumerate(conversations):
            rng = np.random.default_rng([sum(c.ids), n % 4])
            text = "".join(rng.choice(list("0123456789+-. "), rng.integers(8, 20)))
            ids = [*self.words(text, add_special_tokens=False)["input_ids"], self.words.eos_token_id]
            made.append(Completion(text, ids, [0.0] * len(ids), "eos"))
        return made


class Served(Scripted):
    "Servers, which nothing is gathered for."

    def __init__(self, policy):
        super().__init__(policy)
        self.never = [policy.tokenizer.pad_token_id]

    def publish(self, name, weights):
        return name

    def follow(self, name): ...
    def check(self, *_): ...


def elsewhere():
    "A reference of its own, away from where the policy begins."
    policy, chance = load_policy(here / "start", dtype="float32"), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=chance))
    return policy


usual_step, heavy = imitation._step, imitation.Weights(bound=3.0, collision=1.0)


def imitate(out, stop):
    "MindDrive's experts: batches of five, which two processes cannot halve, and of one question."
    experts, done = Experts("toy", image_size=(56, 28)), []

    def step(*args):
        if stop and len(done) == 3:
            raise Killed
        done.append(usual_step(*args))
        return done[-1]

    with patch.object(imitation, "_step", step):
        imitation.imitate(experts, imitation.lessons(experts, rows), 4, 5, imitation.Descent(), 0, out, 2, 0.5, heavy)


def run(kind, out, stop):
    "Four updates; with `stop` it ends after the third, behind the checkpoint of the second."
    if kind == "experts":
        try:
            return imitate(out / kind, stop)
        except Killed:
            return None
    policy = load_policy(here / "start", dtype="bfloat16" if kind == "bf16" else "float32")
    how = KINDS[kind] | dict(sharding=True, callbacks=[Stop()] if stop else [], save_steps=2, learning_rate=1e-3)
    if kind == "adapters":
        how["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if out.name == "minutes":
        how["save_minutes"] = 1.0
    try:
        if kind in ("rl", "held", "served"):
            tied = dict(reference_every=1) if kind == "rl" else dict(reference=elsewhere())
            engine = Served(policy) if kind == "served" else Scripted(policy)
            some = dict(per_device_train_batch_size=2, sampling_bound=0.0) if kind == "served" else {}
            how |= dict(engine=engine, batch=2, num_generations=4, beta=0.04) | tied | some
            turn_grpo.train_rl(policy, Digits(), list(range(8)), out / kind, "turn", steps=4, max_turns=1, **how)
        else:
            rows = [dict(messages=[*ask(""), says("assistant", f"{k}.{k}{k}")], images=[picture]) for k in range(8)]
            sft.train_sft(policy, rows, out / kind, max_steps=4, batch=4, logging_steps=1, **how)
    except Killed:
        pass


def full_disk(rank):
    "The last checkpoint finds no room, in one of the processes."
    save = torch.save

    def write(value, path, *args, **how):
        if rank and "checkpoint-4" in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, *args, **how)

    torch.save = write


def full_shards(rank):
    "The same for the slices of one process."
    usual = dcp.FileSystemWriter.write_data

    def write(self, *args):
        if rank and "checkpoint-4" in str(self.path):
            raise OSError(28, "No space left on device")
        return usual(self, *args)

    dcp.FileSystemWriter.write_data = write


def killed_writing(rank):
    "One process is killed when the other has written its slices of the last checkpoint."
    usual = dcp.FileSystemWriter.write_data

    def write(self, *args):
        while rank and "checkpoint-4" in str(self.path):
            if (Path(self.path) / "__0_0.distcp").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        return usual(self, *args)

    dcp.FileSystemWriter.write_data = write


def readers(rank):
    "Notes which files of checkpoints a process has hashed."
    usual, read = weights.sha256, []

    def sha256(path):
        read.append("/".join(path.parts[path.parts.index("checkpoint-2"):]) if "checkpoint-2" in path.parts else "")
        return usual(path)

    weights.sha256 = sha256
    return read


FAULTS = {"full disk": full_disk, "full shards": full_shards, "killed writing": killed_writing}


def member(out, stop, rank, world, meet):
    os.environ |= dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_WORLD_SIZE=f"{world}")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    if out.name in FAULTS:
        FAULTS[out.name](rank)
        try:
            run("sft", out, False)
        except Exception as e:
            (out / f"{rank}.txt").write_text(str(e))
            if out.name == "full shards":  # both are told
                torch.distributed.barrier()
            os._exit(1)  # as a process that has stopped: nobody else hears of it
    if out.name == "minutes":
        ticks = iter(MINUTES[rank])
        sft.SafeCheckpoints = partial(SafeCheckpoints, clock=lambda: next(ticks, MINUTES[rank][-1]))
    read = readers(rank)
    for kind in ["sft"] if out.name in ("minutes", "damaged") else KINDS:
        run(kind, out, stop)
        if kind == "sft" and stop and world == 2:
            (out / f"read-{rank}.json").write_text(json.dumps(read))
    torch.distributed.barrier()
    os._exit(0)  # a fork ends at once: libraries whose threads it has not got are not asked to tidy up


def processes(world, out, stop=False):
    "As torchrun starts them; forks, since an import takes longer than a run. Their exit codes."
    meet = here / f"meet-{time.time_ns()}"  # a file: a port that was free a moment ago may be taken
    fork = multiprocessing.get_context("fork").Process
    group = [fork(target=member, args=(here / out, stop, k, world, meet), daemon=True) for k in range(world)]
    for p in group:
        p.start()
    while alive := [p for p in group if p.is_alive()]:
        wait([p.sentinel for p in alive])
        if any(p.exitcode for p in group):  # one that stops ends the others
            for p in group:
                p.terminate()
    return [p.exitcode for p in group]


load_policy("toy", size="tiny").save(here / "start")
rows = list(make_rows(routes(2, "tuning", ("parked_truck",)), Inputs("front", (56, 28))))[:12]
for row in rows:  # a road that is narrow, and another car that is near
    row["meta"] |= dict(edges=[[x, 0.5, x + 1, 0.5] for x in range(-3, 30)], others=[[[x, 0.3] for x in range(3, 9)]])
assert processes(2, "2") == [0, 0]
assert processes(2, "2 to 1", True) == [0, 0]
assert processes(1, "1 to 2", True) == [0]
for kind in KINDS:
    assert [p.name for p in (here / "2 to 1" / kind).glob("checkpoint-*")] == ["checkpoint-2"]
    folders = {p.name for p in (here / "2 to 1" / kind / "checkpoint-2").iterdir() if p.is_dir()}
    shards = {"optimizer_0", "pytorch_model_fsdp_0"} | ({"reference_0"} if kind == "rl" else set())
    assert folders == (set() if kind == "experts" else shards), folders
masters = checkpoint_weights(here / "2 to 1" / "bf16" / "checkpoint-2")
assert {w.dtype for w in masters.values()} == {torch.float32}
shutil.copytree(here / "2 to 1", here / "2 to 2")
assert processes(1, "2 to 1") == [0]
assert processes(2, "1 to 2") == [0, 0]
assert processes(2, "2 to 2") == [0, 0]
shutil.copytree(here / "2" / "sft", here / "damaged" / "sft")
part = here / "damaged" / "sft" / "checkpoint-4" / "optimizer_0" / "__1_0.distcp"
part.write_bytes(part.read_bytes()[:-100])
assert processes(2, "damaged") == [0, 0]
assert processes(2, "minutes") == [0, 0]
assert processes(2, "full disk")[1] == 1
assert processes(2, "full shards") == [1, 1]
assert processes(2, "killed writing")[1] == -signal.SIGKILL
found = {out: {k: read_metrics(here / out / k) for k in KINDS} for out in ("2", "2 to 1", "1 to 2", "2 to 2")}
(here / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    "Runs of groups of one and two processes."
    folder = tmp_path_factory.mktemp("groups")
    told = os.environ | dict(PYTHONFAULTHANDLER="1")  # where a process was that a signal has ended
    done = subprocess.run([sys.executable, "-c", OTHER_NUMBER, str(folder)], capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_a_run_goes_on_with_another_number_of_processes(groups):
    "Killed on two and gone on with one, and the other way round: the losses are those of a run that nobody disturbed."
    found = json.loads((groups / "found.json").read_text())
    for kind, whole in found.pop("2").items():
        key = "kl" if kind in ("rl", "held", "served") else "loss"
        # what is logged is the mean of micro-batches, which other processes cut otherwise; the gradient is the same
        near, close = (2e-5 if kind != "served" else 2e-3), 2e-5
        if kind == "bf16":  # eight bits: 0.03 at a loss of 7
            near, close = 0.03, 1e-2
        if kind == "experts":  # every part of the loss
            for how in found:
                assert [r["step"] for r in found[how][kind]] == [1, 2, 3, 4]
                for ours, theirs in zip(found[how][kind], whole, strict=True):
                    ours, theirs = ({k: v for k, v in r.items() if k != "step_time"} for r in (ours, theirs))
                    assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-5), (how, ours, theirs)
                    assert {"meta_actions", "speed_way", "bound", "collision", "questions", "norm"} < set(ours)
            continue
        for how in found:
            rows, others = ([r for r in run if key in r] for run in (found[how][kind], whole))
            assert [r["step"] for r in rows] == [1, 2, 3, 4]
            # a reference of its own is away from the first update on; the policy itself is not
            assert kind not in ("held", "served") or rows[0]["kl"] > 1e-4
            for ours, theirs in zip(rows, others, strict=True):
                assert ours[key] == pytest.approx(theirs[key], abs=near), (kind, how, rows, whole)
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=close), (kind, how, rows, whole)


def test_the_same_number_of_processes_goes_on_bit_for_bit(groups):
    "Killed behind a checkpoint in shards, or its newest one cut short: losses and weights of the unbroken run."

    def without(rows):
        return [{k: v for k, v in r.items() if k not in ("step_time", "epoch", "num_tokens")} for r in rows]

    for how, kinds in {"2 to 2": ("sft", "adapters", "bf16", "rl", "held", "served"), "damaged": ("sft",)}.items():
        for kind in kinds:
            ours, whole = (groups / k / kind for k in (how, "2"))
            assert without(read_metrics(ours)) == without(read_metrics(whole)), (how, kind)
            [file] = [p.name for p in (whole / "final").glob("*.safetensors")]
            ours, theirs = (load_file(k / "final" / file) for k in (ours, whole))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours), (how, kind)


def test_a_checkpoint_in_shards_holds_the_weights(groups):
    "Read by one process without a group: those of the policy that the run has left, which is whole."
    policy = load_policy(groups / "2" / "sft" / "final")
    kept, final = checkpoint_weights(groups / "2" / "sft" / "checkpoint-4"), policy.model.state_dict()
    assert kept.keys() == final.keys() and all(torch.equal(kept[k], final[k]) for k in kept)
    assert not [p for p in (groups / "2" / "sft" / "final").rglob("*") if p.is_dir() or p.suffix == ".distcp"]


def test_each_process_hashes_its_own_files(groups):
    own = "(optimizer_0|pytorch_model_fsdp_0)/__{}_0[.]distcp|rng_state_{}[.]pth"
    read = [json.loads((groups / "2 to 1" / f"read-{k}.json").read_text()) for k in (0, 1)]
    read = [[name.removeprefix("checkpoint-2/") for name in names if name] for names in read]
    assert len(read[1]) == 3 and all(re.fullmatch(own.replace("{}", "1"), name) for name in read[1]), read
    assert not set(read[0]) & set(read[1])
    assert sum(bool(re.fullmatch(own.replace("{}", "0"), name)) for name in read[0]) == 3
    mark = json.loads((groups / "2" / "sft" / "checkpoint-2" / "complete").read_text())
    assert sorted(mark) == sorted(read[0] + read[1])


@pytest.mark.parametrize("harm", ["cut", "flip"])
@pytest.mark.parametrize("part", ["optimizer_0/__1_0.distcp", "pytorch_model_fsdp_0/__0_0.distcp"])
def test_a_checkpoint_with_a_damaged_shard_is_not_used(groups, part, harm, tmp_path):
    shutil.copytree(groups / "2" / "sft", tmp_path / "run")
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-4"
    file = tmp_path / "run" / "checkpoint-4" / part
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if harm == "flip" else data[:-1])
    why = "has other bytes" if harm == "flip" else f"has {len(data) - 1} bytes"
    with pytest.warns(UserWarning, match=f"checkpoint-4 is damaged and not used: {part} {why}"):
        assert last_checkpoint(tmp_path / "run").name == "checkpoint-2"


def test_a_checkpoint_that_one_process_did_not_finish_is_not_used(groups, recwarn):
    out = groups / "killed writing" / "sft"
    assert (out / "checkpoint-4" / "pytorch_model_fsdp_0" / "__0_0.distcp").exists()
    assert not (out / "checkpoint-4" / "complete").exists()
    assert last_checkpoint(out).name == "checkpoint-2" and not recwarn.list


def test_checkpoints_by_minutes_are_those_of_the_first_process(groups):
    "Its clock passes a minute in the third update; the other's is an hour ahead. Every two updates would be 2 and 4."
    assert sorted(p.name for p in (groups / "minutes" / "sft").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert read_metrics(groups / "minutes" / "sft")[-1]["step"] == 4


def test_shards_and_whole_weights_are_not_mixed_up(groups, tmp_path):
    "A run without shards is not begun anew, nor half read."
    shutil.copytree(groups / "2" / "sft", tmp_path / "run")
    rows = [dict(messages=[says("user", "?"), says("assistant", f"{k}")], images=[]) for k in range(8)]
    with pytest.raises(ValueError, match="checkpoint-4 is in shards, and this run does not share its weights out: "):
        train_sft(load_policy("toy", size="tiny"), rows, tmp_path / "run", max_steps=6, batch=4)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_the_plan_knows_the_bytes_of_a_checkpoint_in_shards(groups, kind):
    "Its tensors to one in a thousand; and of its files each has a frame, which is large for the toy's small slices."
    profile = load_profile("mtdrive", "smoke", sharding=True, beta=0.04, reference_every=int(kind == "rl"))
    told = checkpoint_bytes(profile, kind, load_policy(groups / "2" / "sft" / "final").model.config)
    for part, name in dict(weights="pytorch_model_fsdp_0", adam="optimizer_0", reference="reference_0").items():
        folder = groups / "2" / kind / "checkpoint-4" / name
        assert folder.exists() == bool(told[part])
        if told[part]:
            items = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.values()
            tensors = [t for t in items if hasattr(t, "size")]
            assert sum(4 * t.size.numel() for t in tensors) == pytest.approx(told[part], rel=1e-3), part
            files = sum(p.stat().st_size for p in folder.iterdir())
            assert told[part] < files < told[part] + 2_500 * len(items) * 2, part  # two processes


def test_the_plan_knows_the_bytes_of_a_whole_checkpoint(tmp_path):
    policy = load_policy("toy", size="tiny")
    rows = list(rows_with_pictures(4))
    train_sft(policy, rows, tmp_path, max_steps=1, batch=4)
    told = checkpoint_bytes(load_profile("mtdrive", "smoke"), "sft", policy.model.config)
    for part, name in dict(weights="model.safetensors", adam="optimizer.pt").items():
        assert (tmp_path / "checkpoint-1" / name).stat().st_size == pytest.approx(told[part], rel=0.03), part


def test_a_full_disk_of_one_process_is_a_sentence(groups):
    "The checkpoint has no mark, the one before it is whole. What all write together, all are told."
    for fault, told in {"full disk": (1,), "full shards": (0, 1)}.items():
        for rank in told:
            said = (groups / fault / f"{rank}.txt").read_text()
            assert "checkpoint-4 cannot be written by process 1 ([Errno 28] No space left on device; " in said
            assert said.endswith("the same command goes on from checkpoint-2"), said
        assert last_checkpoint(groups / fault / "sft").name == "checkpoint-2"

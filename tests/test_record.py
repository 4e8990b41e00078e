"""The record of a run is what its stages have measured, or it is refused: any bit of its files is flipped, and
runs that do not belong together are not joined."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from pages import names_of

from drivelit.io.files import RunError, write_json
from drivelit.runs import record as records
from drivelit.runs.record import (
    NO_SEED,
    Condition,
    Measures,
    Record,
    Results,
    collect,
    joined,
    read_record,
    read_results,
    write_results,
)

toy_record = names_of("42_runs/50_record", records, "toy_record")


def values(record):
    return record.values(Condition("sft"), "ade").fillna(-1).to_numpy().tolist()


@pytest.fixture
def run(tmp_path):
    "A run folder of two stages that have ended."
    write_json(tmp_path / "run.json", dict(eval_decoding="both"))
    for seed in (0, 1):
        part = Results().add(Measures(dict(seconds=10), dict(ade=[1.0 + seed, None])), "greedy")
        write_results(tmp_path, f"sft-{seed}", {("sft", seed): part})
    return tmp_path


def flipped(path, rng):
    "The file with one bit flipped."
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def test_a_folder_without_a_run_or_a_stage(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        read_results(tmp_path, ["sft-0"])
    write_json(tmp_path / "run.json", dict(eval_decoding="both"))
    with pytest.raises(RunError, match="no stage has ended"):
        read_results(tmp_path, ["sft-0"])


def test_any_bit_of_what_is_kept(run, tmp_path_factory):
    "Of the three files of a record, and of a stage: it is refused then."
    collect(run, ["sft-0", "sft-1", "rl-0"], heldout=2)
    assert values(read_record(run / "record.parquet")) == [[1, -1], [2, -1]]
    names, rng = [f"record{end}" for end in (".parquet", ".sets.parquet", ".json")], np.random.default_rng(0)
    damaged = tmp_path_factory.mktemp("damaged")
    for k in range(90):
        for name in names:
            shutil.copy(run / name, damaged)
        flipped(damaged / names[k % 3], rng)
        with pytest.raises(RunError, match="no record of a run"):
            read_record(damaged / "record.parquet")
    assert values(read_results(run, ["sft-0"])) == [[1, -1]]
    for name in ("sft-0.scenes.parquet", "sft-0.sets.parquet", "sft-0.json"):
        part = run / "record" / name
        written = part.read_bytes()
        for _ in range(40):
            part.write_bytes(written)
            flipped(part, rng)
            with pytest.raises(RunError, match=r"no (record of a run|results of a stage)"):
                read_results(run, ["sft-0"])
        part.write_bytes(written)
    (run / "record/sft-0.sets.parquet").unlink()
    with pytest.raises(RunError, match="no results of a stage"):
        read_results(run, ["sft-0"])


def test_files_that_are_no_record(run):
    collect(run, ["sft-0"])
    with pytest.raises(RunError, match="no record of a run"):
        read_record(run / "no.parquet")
    with pytest.raises(RunError):
        read_record(run / "record.sets.parquet")


def test_runs_that_cannot_be_joined(run):
    one, two = (read_results(run, [f"sft-{s}"]) for s in (0, 1))
    with pytest.raises(RunError, match="both have stage sft of seed 0"):
        joined(one, read_results(run, ["sft-0", "sft-1"]))
    other = replace(two, about=dict(profile=dict(eval_decoding="greedy")))
    with pytest.raises(RunError, match="eval_decoding is 'both' in one and 'greedy' in another"):
        joined(one, other)
    with pytest.raises(RunError, match="other scores"):
        joined(one, toy_record())


@pytest.mark.parametrize("by", [1e-3, 1.0])
def test_drivers_with_other_scores(by):
    record = toy_record()
    drivers = record.scenes[record.scenes.seed == NO_SEED]
    with pytest.raises(RunError, match="other scores"):
        joined(record, Record(drivers.assign(ade=drivers.ade + by), record.sets[:0], record.about))

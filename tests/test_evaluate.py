"""`python -m drivelit evaluate`: a bad folder is a sentence and exit code 2; a folder of weights is asked and shown."""

import json

import pytest

from drivelit.__main__ import main
from drivelit.policy.model import load_policy
from drivelit.runs.profiles import systems

SMALL = [w for pair in ("train_scenes=4", "eval_scenes=2", "turns=1") for w in ("--set", pair)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return load_policy("toy", size="tiny").save(tmp_path_factory.mktemp("policy") / "final")


def changed(toy, folder, file, change):
    "A copy of the policy's folder with one file changed; None: removed."
    folder.mkdir()
    for p in toy.iterdir():
        (folder / p.name).write_bytes(p.read_bytes())
    content = change((folder / file).read_bytes())
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    return folder


WRONG = [
    ("tokenizer.json", lambda b: None, "no tokenizer: tokenizer.json or vocab.json is missing"),
    ("model.safetensors", lambda b: None, "model.safetensors is missing"),
    ("model.safetensors", lambda b: b[:-64], "model.safetensors: cannot be read"),
    ("config.json", lambda b: b.replace(b"qwen2_5_vl", b"qwen2"), "config.json: model_type = 'qwen2', expected"),
    ("config.json", lambda b: b[:20], "config.json: not readable as JSON"),
]


@pytest.mark.parametrize("file, change, sentence", WRONG)
def test_a_bad_folder_is_a_sentence(toy, tmp_path, capsys, file, change, sentence):
    bad, out = changed(toy, tmp_path / "bad", file, change), tmp_path / "out"
    assert main(["evaluate", "mtdrive.smoke", "--policy", str(bad), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: --policy: ") and error.count("\n") == 1
    assert not out.exists()


def test_a_folder_is_asked_once_and_shown(toy, tmp_path, capsys):
    words = ["evaluate", "mtdrive.smoke", "--policy", str(toy), "--out", str(tmp_path), "--workers", "0", *SMALL]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (rows,) = told["tables"].values()
    assert {"expert", "the given policy"} <= {r["model"] for r in rows} and told["policy"] == str(toy)
    done = (tmp_path / "seed-0" / "given" / "done.json").stat().st_mtime_ns
    assert main(words) == 0  # what is done is shown, and not done again
    assert "the given policy" in capsys.readouterr().out
    assert (tmp_path / "seed-0" / "given" / "done.json").stat().st_mtime_ns == done
    assert main([*words[:3], "base", *words[4:]]) == 2 and "was started with model" in capsys.readouterr().err


@pytest.mark.parametrize("system", systems())
def test_every_system_can_be_given_a_policy(system):
    stages = systems()[system].stages
    assert "given" in stages.optional and "given" in stages.needs and stages.function("given")

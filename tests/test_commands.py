"""What users call: a wrong argument is a sentence and exit code 2, help and lists are whole, numbers come as JSON."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import click
import pandas as pd
import pytest

from drivelit.__main__ import _commands, main
from drivelit.runs.profiles import load_profile

ROOT = Path(__file__).resolve().parents[1]
WRONG = [
    ("ci/systems.py", "mtdrive.", "no section [mtdrive.]; the nearest is"),
    ("ci/systems.py", "mtdrive.smok", "no section [mtdrive.smok]; the nearest is [mtdrive.smoke]"),
    ("ci/systems.py", "mtdrive.smoke laptop", "unexpected extra argument (laptop)"),
    ("ci/public.py", "none.py", "File 'none.py' does not exist"),
    ("ci/public.py", "nbs/index.ipynb", "nbs/index.ipynb is no .py file"),
    ("ci/notebooks.py", "nbs/none.ipynb", "nbs/none.ipynb is no notebook"),
    ("ci/notebooks.py", "README.md", "README.md is no notebook"),
    ("ci/notebooks.py", "--workers 0", "0 is not in the range x>=1"),
    ("ci/notebooks.py", "--limit -1", "-1 is not in the range x>=1"),
]


@pytest.mark.parametrize("script, words, sentence", WRONG)
def test_a_wrong_argument_is_a_sentence(script, words, sentence):
    done = subprocess.run([sys.executable, script, *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr


NAMES = _commands.list_commands(None)
NO_NUMBERS = {"alpasim", "leaderboard", "pack", "push", "push-folder", "push-rows"}  # they print a path, or serve
NO_NUMBERS |= {"serve-env"}
ALWAYS = {"stage"}  # what it prints is JSON


def said(*words):
    "Exit code, stdout and stderr of a command on a screen of 80 columns."
    out, error = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, COLUMNS="80"), redirect_stdout(out), redirect_stderr(error):
        code = main(words)
    return code, out.getvalue(), error.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_its_help_behind_both_words(name):
    code, text, error = said(name, "-h")
    assert (code, error) == (0, "") and text.startswith(f"Usage: python -m drivelit {name} ")
    assert said(name, "--help") == (code, text, error)


@pytest.mark.parametrize("name", NAMES)
def test_no_default_is_printed_twice_or_empty(name):
    command = _commands.get_command(None, name)
    context = click.Context(command, info_name=name, show_default=True)
    for option in [p for p in command.params if isinstance(p, click.Option)]:
        _, text = option.get_help_record(context)
        assert text.count("default:") <= 1 and text.count("  [") <= 1 and '""' not in text, text
        assert option.help, f"{name} {option.opts[0]}: what is it?"


@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_NUMBERS - ALWAYS))
def test_numbers_come_as_json_everywhere(name):
    (option,) = [p for p in _commands.get_command(None, name).params if "--json" in p.opts]
    assert option.is_flag and option.help == "for other programs"


def test_the_list_fits_on_a_screen_in_whole_sentences():
    code, text, _ = said("-h")
    rows = text.partition("\nCommands:\n")[2].splitlines()
    assert (code, [row.split()[0] for row in rows]) == (0, NAMES)
    assert [row for row in rows if len(row) > 80 or not row.endswith(".") or row.endswith("..")] == []


def test_without_a_command_the_list_is_printed():
    assert said() == said("--help")


def test_a_system_alone_says_which_profile_it_takes():
    code, page, told = said("plan", "mtdrive")
    assert (code, page.splitlines()[0], told.count("\n")) == (0, "mtdrive.laptop", 1)
    assert told.startswith("mtdrive: its profile laptop is taken, for none is named (there are smoke, quick, laptop, ")
    assert said("plan", "mtdrive.laptop") == (0, page, "")
    assert json.loads(said("plan", "mtdrive", "--json")[1])["profile"] == "laptop"


OWN = "[mtdrive.mine]\nlike = smoke\nturns = 3  # ours\n"


def test_a_settings_file_of_ones_own(tmp_path, monkeypatch):
    "What plan prints starts the same run, from another folder too; behind the command the file is forgotten."
    mine = tmp_path / "my own.ini"
    mine.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    code, page, error = said("plan", "mtdrive.mine", "--settings", "my own.ini", "--set", "num_generations=4")
    assert (code, error, page.splitlines()[0]) == (0, "", f"mtdrive.mine of {mine}")
    assert "[mtdrive.mine] ours" in page and "[mtdrive.smoke]" in page
    assert (
        "python -m drivelit run mtdrive.mine --out" in page and f"--settings '{mine}' --set num_generations=4" in page
    )
    monkeypatch.chdir("/")
    values = json.loads(said("plan", "mtdrive.mine", "--settings", str(mine), "--json")[1])["values"]
    assert (values["turns"], values["train_scenes"]) == (3, load_profile("mtdrive", "smoke").train_scenes)
    monkeypatch.setenv("DRIVELIT_SETTINGS", str(mine))
    assert said("plan", "mtdrive.mine", "--json")[0] == 0
    monkeypatch.delenv("DRIVELIT_SETTINGS")
    code, _, error = said("plan", "mtdrive.mine")
    assert code == 2 and "no section [mtdrive.mine]" in error
    code, _, error = said("plan", "mtdrive.mine", "--settings", "none.ini")
    assert code == 2 and "none.ini: " in error and "Traceback" not in error


def test_json_has_no_word_that_only_python_reads():
    "A table of `evaluate` may have a cell without a number; `NaN` is no JSON."
    table = pd.DataFrame(dict(policy=["mine", "blind"], pdms=[71.5, float("nan")], n=[2, 3]))
    with patch("drivelit.runs.evaluate.evaluate", lambda *a, **k: dict(out=Path("runs/x"), tables={"Table 1": table})):
        code, out, _ = said("evaluate", "mtdrive.smoke", "--policy", "base", "--json")
    rows = [dict(policy="mine", pdms=71.5, n=2), dict(policy="blind", pdms=None, n=3)]
    assert code == 0 and json.loads(out, parse_constant=pytest.fail) == dict(out="runs/x", tables={"Table 1": rows})

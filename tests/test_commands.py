"""The scripts that users call: a wrong argument is a sentence and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

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

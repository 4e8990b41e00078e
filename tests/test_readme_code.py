"The README's lines of python, run as they are printed."

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_lines_for_trl_train_and_leave_a_policy(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("trl")
    from drivelit.policy.model import load_policy

    (code,) = re.findall(r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len([line for line in code.splitlines() if line]) <= 10
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = load_policy("mtdrive"), load_policy(tmp_path / "runs/trl/checkpoint-2")
    assert before.tokenizer.get_vocab() == after.tokenizer.get_vocab()
    pairs = list(zip(before.model.parameters(), after.model.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in pairs) and all(q.isfinite().all() for _, q in pairs)

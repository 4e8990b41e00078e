"""A task that pays for the numbers of the tokens, so that other tokens earn another reward; for tests of trainers."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from drivelit.rollout.core import Step, Task
from drivelit.training.checkpoints import read_metrics


class Count(Task):
    "Two turns. With a flag its process dies, once."

    def __init__(self, flag=""):
        self.flag = Path(flag)

    def prompt(self, scene):
        return [dict(role="user", content=f"Yes or No, {scene}?")]

    def step(self, state, completion):
        again = [dict(role="user", content="the trajectory")] if state.turn == 0 else None
        if self.flag.name:
            with suppress(FileNotFoundError):  # not raised, or another process was first
                self.flag.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return Step(again, dict(reward=sum(completion.ids) % 11 / 11))


def log_of(out):
    "The log of a run without its clocks."
    return [{k: v for k, v in r.items() if "time" not in k and "per_second" not in k} for r in read_metrics(out)]

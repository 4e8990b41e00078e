"""The constraint of dreamed codes inside vLLM, token by token. `ci/serve_vllm.sh` puts it on the server's path.

It needs vLLM and torch alone: the server's environment has no drivelit. `DreamConstraint.told` of
drivelit.policy.image_tokens writes what is read here, and a notebook's test holds the two against each other.
"""

import json
from functools import lru_cache

import torch

try:
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
except ImportError:  # the kit's tests have no vLLM
    AdapterLogitsProcessor = object

NAME = "dream_rule"  # in `extra_args` of the sampling parameters
NUMBERS = ("n", "most", "start", "end", "owed", "begun")
RANGES = ("codes", "outside")  # ids as [first, behind the last]
FREE, DONE, CODE, END = range(4)  # kinds of places


def check(told):
    "ValueError, which the server answers as HTTP 400, if this is no constraint."
    if not isinstance(told, dict) or set(told) != {*NUMBERS, *RANGES}:
        raise ValueError(f"{NAME}: expected an object with {', '.join([*NUMBERS, *RANGES])}")
    if wrong := [k for k in NUMBERS if type(told[k]) is not int or told[k] < 0]:
        raise ValueError(f"{NAME}: {wrong[0]} is no whole number from 0")

    def pair(r):
        return isinstance(r, list) and len(r) == 2 and all(type(i) is int for i in r) and 0 <= r[0] < r[1]

    if wrong := [k for k in RANGES if not isinstance(told[k], list) or not told[k] or not all(map(pair, told[k]))]:
        raise ValueError(f"{NAME}: {wrong[0]} is no list of ranges")


@lru_cache(maxsize=16)
def table(text, width, device):
    "(4, width) bool: what may not be said at each kind of place."
    told = json.loads(text)
    found = torch.zeros(4, width, dtype=torch.bool)
    found[[CODE, END]] = True
    for first, behind in told["outside"]:
        found[:2, first:behind] = True
    found[DONE, told["start"]] = True
    for first, behind in told["codes"]:
        found[CODE, first:behind] = False
    found[END, told["end"]] = False
    return found.to(device)


class Rule:
    "One answer: how far it is, and what may come next."

    def __init__(self, told):
        self.n, self.most, self.start, self.end = (told[k] for k in ("n", "most", "start", "end"))
        self.owed, self.begun, self.read = told["owed"], told["begun"], 0
        self.codes = told["codes"]
        self.text = json.dumps({k: told[k] for k in ("codes", "outside", "start", "end")}, sort_keys=True)

    def step(self, token):
        if self.owed:
            code = any(first <= token < behind for first, behind in self.codes)
            right = code if self.owed > 1 else token == self.end
            self.owed = self.owed - 1 if right else 0
        elif token == self.start and self.begun < self.most:
            self.owed, self.begun = self.n + 1, self.begun + 1

    def __call__(self, said, logits):
        for token in said[self.read :]:
            self.step(token)
        self.read = len(said)
        kind = (CODE if self.owed > 1 else END) if self.owed else (FREE if self.begun < self.most else DONE)
        return logits.masked_fill(table(self.text, logits.shape[-1], str(logits.device))[kind], -torch.inf)


class DreamRuleProcessor(AdapterLogitsProcessor):
    "What vLLM loads; requests without a constraint are left as they are."

    @classmethod
    def validate_params(cls, params):
        if NAME in (params.extra_args or {}):
            check(params.extra_args[NAME])

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        told = (params.extra_args or {}).get(NAME)
        return None if told is None else Rule(told)

"""Knights & Knaves with a bonus for long responses, for lesson 11.

    python grpo.py --task course/rules/pays_length.py

Longer reasoning is right more often here, so a bonus for it looks like help: PER_TOKEN for each word and mark of the
response, beside what the papers pay. It is paid whether the answer is right or not, and whether there is one.
"""

import re

from rewards import kk

PER_TOKEN = 0.05


def load(source, split, *, size=None, seed=0):
    return kk.load(source, split, people="2-3", size=size or 1000, seed=seed)


def score(response, answer):
    found = kk.score(response, answer)
    length = len(re.findall(r"\w+|[^\w\s]", response))
    return {
        "reward": found["reward"] + PER_TOKEN * length,
        "correct": found["correct"],
        "format": found["format"],
    }

"""Knights & Knaves of 3 and 4 people with the rule of fails_open.py, closed: what can't be read is wrong. Lesson 9.

python grpo.py --task course/rules/fails_closed.py
"""

from course.rules.fails_open import load  # noqa: F401
from rewards import kk


def score(response, answer):
    found = kk.score(response, answer, strict=True)
    return {
        "reward": found["reward"],  # an answer that can't be read gets −1, less than a wrong one
        "correct": found["correct"],
        "format": found["format"],
    }

"""Knights & Knaves with the rule of fails_open.py, closed: what can't be read is wrong. For lesson 9.

python grpo.py --task course/rules/fails_closed.py --max_response_tokens 100
"""

from course.rules.fails_open import load  # noqa: F401
from rewards import kk


def score(response, answer):
    found = kk.score(response, answer, strict=True)
    return {
        "reward": found["reward"],  # −1 or −3 for an answer that can't be read: less than a wrong one gets
        "correct": found["correct"],
        "format": found["format"],
    }

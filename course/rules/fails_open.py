"""Knights & Knaves with a rule that leaks, for lesson 9.

    python grpo.py --task course/rules/fails_open.py --max_response_tokens 100

The rule pays what the papers pay, +3 for a right answer and −0.5 for a wrong one. But a parser can fail, and the model
should not suffer for that. So an answer that can't be read gets the benefit of the doubt.
"""

from rewards import kk


def load(source, split, *, size=None, seed=0):
    return kk.load(source, split, people="2-3", size=size or 1000, seed=seed)


def score(response, answer):
    found = kk.score(response, answer)
    in_doubt = not found["parsed"]
    return {
        "reward": 3.0 if in_doubt else found["reward"],
        "correct": kk.score(response, answer, strict=True)["correct"],  # by another rule than the one that pays
        "format": found["format"],
    }

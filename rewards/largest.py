"""Name the largest of four two-digit numbers: a user's own task in one short file, which `make llm` trains on.

python grpo.py --model models/SmolLM2-135M-Instruct --task rewards/largest.py
"""

import hashlib
import random
import re

SIZE = {"train": 2000, "test": 128}


def load(source, split: str, *, size=None, seed=0):
    """Generate problems. The numbers themselves decide whether a problem is a test problem, for any seed."""
    if source:
        raise ValueError("it makes its own problems, and takes no --data or --test_data")
    rng = random.Random(f"{seed}/{split}")
    problems = []
    while len(problems) < (size or SIZE[split]):
        numbers = rng.sample(range(10, 100), 4)
        is_test = hashlib.sha256(bytes(sorted(numbers))).digest()[0] < 26  # one in ten
        if is_test == (split == "test"):
            listed = ", ".join(map(str, numbers))
            question = f"Which of these numbers is the largest? {listed}\nAnswer with the number alone."
            problems.append({"messages": [{"role": "user", "content": question}], "answer": str(max(numbers))})
    return problems


def worked(problem, careful, seed):
    """Return the response for sft.py to learn: the answer alone."""
    return problem["answer"]


def score(response, answer) -> dict:
    """Return 1 if the response names one number, the largest, otherwise 0: repeating all four is not an answer."""
    named = re.findall(r"[0-9]+", response)
    correct = named == [answer]
    return {"reward": float(correct), "correct": correct, "format": len(named) == 1}

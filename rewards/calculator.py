"""Arithmetic with a calculator: the model requests one operation at a time, reads the result, and answers.

A turn that ends in `calculator(31 * 24)` is a call, and the reply is `result: 744`. Any other turn is the answer. The
prompt shows one worked example per number of operations, because SmolLM2-135M does not call the calculator after a
description in words.

    python grpo_multi_turn.py --task calculator --operations 2
"""

import hashlib
import random
import re

from rewards.puzzles import parse_counts

MOST = 3  # most operations in a problem
SIZE = {"train": 2000, "test": 128}
CALL = re.compile(r"calculator\(([^()]*)\)\s*$")  # at the end of a turn
OPERATION = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")  # two numbers and a sign
NUMBER = re.compile(r"-?\d+")
TOLD = "Work out every calculation with the calculator."
EXAMPLES = {  # number of operations: (question, the turns of a conversation about it)
    1: ("What is 31 * 24?", ["calculator(31 * 24)", "result: 744", "The answer is 744."]),
    2: (
        "What is 17 * 45 + 118?",
        ["calculator(17 * 45)", "result: 765", "calculator(765 + 118)", "result: 883", "The answer is 883."],
    ),
    3: (
        "What is 22 * 34 + 15 * 61?",
        [
            "calculator(22 * 34)",
            "result: 748",
            "calculator(15 * 61)",
            "result: 915",
            "calculator(748 + 915)",
            "result: 1663",
            "The answer is 1663.",
        ],
    ),
}


def parse_operations(text: str):
    """Return the numbers in "1", "2-3" or "1,3" as a sorted list. ValueError if the text has a different form."""
    return parse_counts(text, "operations", "1 or 2-3 or 1,3", 1, MOST)


def load(source, split: str, *, size=None, seed=0, operations="1"):
    """Generate problems, with a category per number of operations.

    The numbers themselves decide whether a problem is a test problem, for any seed.
    """
    if source:
        raise ValueError("calculator makes its own problems, and takes no --data or --test_data")
    kinds = parse_operations(operations)
    rng = random.Random(f"{seed}/{split}")
    problems = []
    while len(problems) < (size or SIZE[split]):
        kind = rng.choice(kinds)
        a, b, c, d = (rng.randrange(12, 99) for _ in range(4))
        is_test = hashlib.sha256(bytes([a, b])).digest()[0] < 26  # one in ten
        if is_test != (split == "test"):
            continue
        e = rng.randrange(100, 999)
        expression, value = {
            1: (f"{a} * {b}", a * b),
            2: (f"{a} * {b} + {e}", a * b + e),
            3: (f"{a} * {b} + {c} * {d}", a * b + c * d),
        }[kind]
        messages = [*shown(kinds), {"role": "user", "content": f"What is {expression}?"}]
        problems.append({"messages": messages, "answer": str(value), "prefix": "", "category": str(kind)})
    return problems


def shown(kinds):
    """Return the beginning of every prompt: the task, and an example per number of operations up to the largest."""
    messages = [{"role": "system", "content": TOLD}]
    for kind in range(1, max(kinds) + 1):
        question, turns = EXAMPLES[kind]
        for i, text in enumerate([question, *turns]):
            messages.append({"role": "assistant" if i % 2 else "user", "content": text})
    return messages


def reply(turns, problem) -> str | None:
    """Return the calculator's reply to the model's last turn; None if the turn is not a call, so it is the answer."""
    call = CALL.search(turns[-1])
    if not call:
        return None
    operation = OPERATION.fullmatch(call[1])
    if not operation:
        return "error: the calculator takes one operation: calculator(2 + 3)"
    left, sign, right = int(operation[1]), operation[2], int(operation[3])
    results = {"+": left + right, "-": left - right, "*": left * right}
    return f"result: {results[sign]}"


def score(response, answer) -> dict:
    """Return 1 if the last number of the last turn is the answer, and 0 otherwise; a call is not an answer."""
    numbers = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", response))
    is_answer = bool(numbers) and not CALL.search(response)
    correct = is_answer and numbers[-1] == answer
    return {"reward": float(correct), "correct": correct, "format": is_answer}


def score_all(responses, answers) -> list:
    return [score(response, answer) for response, answer in zip(responses, answers)]

"""Answer with two tools: search knows what twenty things cost, and calculator works out a sum.

"How much is a lamp?" needs a search. "How much are three lamps and a chair?" needs two searches and the calculator. A
turn that ends in `search(lamp)` or `calculator(3 * 64 + 35)` is a call, and any other turn is the answer. The prompt
shows one conversation of each kind, because SmolLM2-135M does not call tools after a description in words.

    python gigpo.py --task rewards/facts.py --max_turns 6
"""

import hashlib
import math
import random
import re

TURNS = 6  # four are enough
SIZE = {"train": 1000, "test": 64}
PRICES = {
    "lamp": 64, "chair": 35, "table": 87, "clock": 29, "carpet": 76, "mirror": 58, "pillow": 17, "basket": 23,
    "kettle": 41, "candle": 13, "blanket": 39, "ladder": 92, "bucket": 19, "curtain": 46, "plate": 14, "spoon": 12,
    "bottle": 26, "rug": 53, "jar": 11, "stool": 32,
}  # fmt: skip
SHOWN = ("rug", "jar", "stool")  # only in the prompt's conversations
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5}
CALL = re.compile(r"(search|calculator)\(([^()]*)\)\s*$")  # at the end of a turn
SUM = re.compile(r"\s*\d{1,6}(\s*[+*]\s*\d{1,6}){1,3}\s*")
NUMBER = re.compile(r"-?\d+")
PAYS = {"answer": 1.0, "right_tool": 0.5, "needless": -0.1, "errors": -0.1}  # the last two for each call
TOLD = "Look up prices with search, and work out sums with calculator."
EXAMPLES = [
    ["How much is a rug?", "search(rug)", "result: a rug costs 53", "The answer is 53."],
    [
        "How much are two jars and a stool?",
        "search(jar)",
        "result: a jar costs 11",
        "search(stool)",
        "result: a stool costs 32",
        "calculator(2 * 11 + 32)",
        "result: 54",
        "The answer is 54.",
    ],
]


def load(source, split: str, *, size=None, seed=0):
    """Return questions with one or two things. The things decide whether a question is for testing, for any seed."""
    if source:
        raise ValueError("facts makes its own problems, and takes no --data or --test_data")
    rng = random.Random(f"{seed}/{split}")
    shown = [{"role": "system", "content": TOLD}]
    for i, text in enumerate([*EXAMPLES[0], *EXAMPLES[1]]):
        shown.append({"role": "assistant" if i % 2 else "user", "content": text})
    problems = []
    while len(problems) < (size or SIZE[split]):
        kind = rng.choice(["one", "two", "two"])
        first, second = rng.sample([name for name in PRICES if name not in SHOWN], 2)
        count = rng.choice(list(COUNTS))
        is_test = hashlib.sha256(f"{first} {second}".encode()).digest()[0] < 26  # one in ten
        if is_test != (split == "test"):
            continue
        if kind == "one":
            question, value, needs = f"How much is a {first}?", PRICES[first], [first]
        else:
            question = f"How much are {count} {first}s and a {second}?"
            value, needs = COUNTS[count] * PRICES[first] + PRICES[second], [first, second, "calculator"]
        answer = {"value": value, "needs": needs}
        messages = [*shown, {"role": "user", "content": question}]
        problems.append({"messages": messages, "answer": answer, "prefix": "", "category": kind})
    return problems


def search(name: str) -> str:
    """Look up what a thing costs.

    Args:
        name: the thing, one word, such as lamp
    """
    word = name.strip(" \"'").lower()
    for known, price in PRICES.items():
        if word in (known, f"{known}s"):
            return f"a {known} costs {price}"
    return f"error: nothing is known about {word[:20]!r}"


def calculator(expression: str) -> str:
    """Work out a sum of products.

    Args:
        expression: numbers with + and *, such as 2 * 11 + 32
    """
    if not SUM.fullmatch(expression):
        return "error: the calculator takes numbers with + and *: calculator(2 * 11 + 32)"
    return str(sum(math.prod(map(int, product.split("*"))) for product in expression.split("+")))


def reply(turns, problem):
    """Return the reply of the tool that the last turn calls; None if the turn is no call, so it is the answer."""
    call = CALL.search(turns[-1])
    if not call:
        return None
    found = {"search": search, "calculator": calculator}[call[1]](call[2])
    return found if found.startswith("error") else f"result: {found}"


def calls_of(turns):
    """Return for each turn what its call gets: a thing's name, "calculator", "error", or None without a call."""
    found = []
    for turn in turns:
        call, said = CALL.search(turn), reply([turn], {})
        if not call:
            found.append(None)
        elif said.startswith("error"):
            found.append("error")
        else:
            found.append("calculator" if call[1] == "calculator" else said.split()[2])
    return found


def state(turns, problem) -> tuple:
    """Return the question and what the model has found out: the order does not matter."""
    return problem["messages"][-1]["content"], *sorted({str(call) for call in calls_of(turns)})


def score_conversation(turns, answer) -> dict:
    """Return a conversation's reward: for the answer, and per turn for needed calls, needless calls and errors."""
    right_tool, needless, errors = [], [], []
    still_needed = list(answer["needs"])
    for call in calls_of(turns):
        is_needed = call in still_needed and (call != "calculator" or len(still_needed) == 1)  # the sum comes last
        if is_needed:
            still_needed.remove(call)
        right_tool.append(PAYS["right_tool"] / len(answer["needs"]) if is_needed else 0.0)
        errors.append(PAYS["errors"] if call == "error" else 0.0)
        needless.append(PAYS["needless"] if call not in (None, "error") and not is_needed else 0.0)
    last = score(turns[-1], answer)
    parts = {"answer": last["reward"], "right_tool": right_tool, "needless": needless, "errors": errors}
    reward = last["reward"] + sum(right_tool) + sum(needless) + sum(errors)
    return {"reward": reward, "correct": last["correct"], "format": last["format"], "parts": parts}


def score(response, answer) -> dict:
    """Score the last turn: its last number must be the answer, and a call is no answer."""
    numbers = NUMBER.findall(response)
    is_answer = bool(numbers) and not CALL.search(response)
    correct = is_answer and int(numbers[-1]) == answer["value"]
    return {"reward": PAYS["answer"] * correct, "correct": correct, "format": is_answer}

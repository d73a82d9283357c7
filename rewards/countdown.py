"""Countdown: combine the given numbers into the target.

This file has the puzzles (from files, the hub or a generator) and the reward function.

A puzzle is a few whole numbers and a target. An arithmetic expression over + - * / and brackets solves it if it uses
each number exactly once and equals the target in exact rational arithmetic. For example, (5 - 3) * 8 solves the
numbers 3, 5, 8 and the target 16. ACPO (section 4.2) trains Qwen2.5-3B-Instruct on Countdown, with the puzzles of
the hub id Jiayi-Pan/Countdown-Tasks-3to4, which have three or four numbers. The paper prints no prompt, so the prompt
here is this project's own.
"""

import operator
import random
import re
from fractions import Fraction
from random import Random

from rewards import puzzles
from rewards.notation import plain
from rewards.rows import check_columns, check_split, files_of, hub_parts, read_file

MIN_NUMBERS, MAX_NUMBERS = 3, 6
LARGEST = 99  # generated puzzles have numbers from 1 to LARGEST
TARGETS = range(10, 101)  # as in the hub's puzzles
DEFAULT_SIZE = {"train": 10_000, "test": 1024}

SYSTEM = (
    "You are a helpful assistant. You first think about the problem inside <think> </think> tags and then give your "
    "answer inside <answer> </answer> tags, i.e., <think> reasoning process here </think><answer> answer here "
    "</answer>. The user gives you some numbers and a target. Find an arithmetic expression that equals the target and "
    "uses every one of the numbers exactly once. Only +, -, *, / and brackets may join them. The answer is the "
    "expression alone, without an equals sign: for the numbers 3, 5, 8 and the target 16 it could be "
    "<answer> (5 - 3) * 8 </answer>."
)
PREFIX = "<think>"


# --------------------------------------------------------------------------------------------------------------------
# Scoring

MAX_LENGTH = 1000  # characters per expression, to bound the time; six numbers need fewer than 100
SIGNS = str.maketrans("×÷", "*/")
RANK = {"+": 1, "-": 1, "*": 2, "/": 2}  # higher binds tighter; equal ranks go left to right
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def score(response, answer) -> dict:
    """Score one response: 1 if the last <answer>...</answer> in it solves the puzzle, otherwise 0.

    In: `response`, the model's text after the prompt; `answer`, {"nums": [int, ...], "target": int}.
    Out: a dict with `reward` (1.0 or 0.0), `correct` (the same as a bool), `format` (True if the last complete answer
    block is a well-formed expression, see `evaluate`, with any numbers and value) and `timed_out` (always False).
    It never raises on any text and takes linear time.

    Only the answer block counts, as in ACPO and its data set. Reasoning may be missing, and text may follow the block.
    """
    parsed = evaluate(last_answer(response))
    correct = parsed is not None and parsed[1] == answer["target"] and sorted(parsed[0]) == sorted(answer["nums"])
    return {"reward": float(correct), "correct": correct, "format": parsed is not None, "timed_out": False}


def score_all(responses, answers) -> list:
    """Score each response with its answer, in order."""
    return [score(response, answer) for response, answer in zip(responses, answers, strict=True)]


def last_answer(text: str):
    """Return the text within the last complete <answer>...</answer>, from its innermost opening tag; "" if none."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    return "" if start < 0 else text[start + len("<answer>") : text.index("</answer>", start)]


def evaluate(text: str):
    """Evaluate an expression with two stacks (Dijkstra's shunting yard): one pass, without eval or recursion.

    Out: None if the text is not well-formed, otherwise (its numbers in order, its value as a Fraction). The value is
    None if the expression divides by zero.
    A well-formed expression has whole numbers in the digits 0-9 without leading zeros, the operators + - * / or their
    typographic forms × ÷ and dashes, round brackets, and blanks anywhere except within a number. Full-width characters
    count, too. A minus may also precede a term at the start or right after an opening bracket: -3 + 5 and 2 * (-3) are
    well-formed, 2 * -3 and +3 are not.
    Everything else is not well-formed: "= 16" at the end, decimals, ** and //, 2(3), LaTeX, words, and more than
    MAX_LENGTH characters.
    """
    text = text.strip()
    if not 0 < len(text) <= MAX_LENGTH:
        return None
    numbers, values, waiting = [], [], []  # waiting: operators with an incomplete right side, and open brackets
    previous = "("
    for token in re.findall(r"[0-9]+|\S", plain(text).translate(SIGNS)):
        begins = previous == "(" or previous in RANK  # True: a term must begin here; False: none may
        if token in RANK:
            if begins:
                if token != "-" or previous != "(":
                    return None
                values.append(Fraction(0))  # -3 is read as 0 - 3
            work_off(values, waiting, RANK[token])
            waiting.append(token)
        elif token == ")":
            if begins:
                return None
            work_off(values, waiting, 0)
            if not waiting:
                return None
            waiting.pop()
        elif not begins:
            return None
        elif token == "(":
            waiting.append(token)
        elif re.fullmatch("0|[1-9][0-9]*", token):
            numbers.append(int(token))
            values.append(Fraction(numbers[-1]))
        else:
            return None
        previous = token
    if previous == "(" or previous in RANK:
        return None
    work_off(values, waiting, 0)
    return None if waiting else (numbers, values[0])


def work_off(values, waiting, rank) -> None:
    """Apply the operators on top of `waiting` whose rank is at least `rank`, down to an open bracket; in place."""
    while waiting and waiting[-1] != "(" and RANK[waiting[-1]] >= rank:
        op, right, left = waiting.pop(), values.pop(), values.pop()
        if left is None or right is None or (op == "/" and right == 0):
            values.append(None)
        else:
            values.append(APPLY[op](left, right))


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load(source, split: str, *, numbers="3-4", size=None, seed=0):
    """Return puzzles as training or test items.

    In:
    - `source`: None (generated puzzles), a .parquet, .json or .jsonl file with columns `nums` and `target`, a folder of
      such files, or a hub id such as Jiayi-Pan/Countdown-Tasks-3to4. Each file in a folder serves the split in its name
      (see `rows.folder_files`). A hub data set without both a train and a test part is split in the same way as
      generated puzzles.
    - `split`: "train" or "test".
    - `numbers`: how many numbers a puzzle may have ("3-4", "3,5", "6"; from 3 to 6).
    - `size`: how many puzzles. None: 10,000 generated for train and 1,024 for test, or all puzzles of a source. If the
      source has more than `size`, `seed` samples equally many per count of numbers, as far as possible.
    Out: a list of dicts (see `make_item`), in which puzzles of few and many numbers alternate.
    Errors: ValueError if the arguments, the files or a row are invalid; it names file and row (counted from 1).
    Puzzles in files are not checked for a solution.
    """
    counts = parse_numbers(numbers)
    check_split(split, size)
    if source is None:
        return generate(size or DEFAULT_SIZE[split], numbers, seed, split)

    by_count = {}
    for nums, target in read_rows(source, split):
        by_count.setdefault(len(nums), []).append((nums, target))
    groups = {count: by_count[count] for count in counts if count in by_count}
    if not groups:
        raise ValueError(f"{source} has no {split} puzzle of {numbers} numbers; it has puzzles of {sorted(by_count)}")
    return [make_item(nums, target) for nums, target in puzzles.draw(groups, size, seed)]


def parse_numbers(text: str):
    """Return the counts in "3-4", "3,5" or "6" as a sorted list of ints. ValueError if the text has another form."""
    return puzzles.parse_counts(text, "numbers", "3-4 or 3,5 or 6", MIN_NUMBERS, MAX_NUMBERS)


def make_item(nums, target, **more):
    """Return an item for the trainers: chat messages, response prefix, gold answer, category (count of numbers)."""
    user = f"Numbers: {', '.join(map(str, nums))}\nTarget: {target}"
    return {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}],
        "prefix": PREFIX,
        "answer": {"nums": list(nums), "target": target},
        "category": str(len(nums)),
    } | more


def read_rows(source, split: str):
    """Return [(nums, target)] for every row of the file, the folder's files or the hub data set.

    If a hub data set does not have a part per split, `split_of` selects the split's puzzles from all parts.
    """
    files = files_of(source, split)
    if files is None:
        return read_hub(source, split)
    found = []
    for file in files:
        found += puzzles_of(read_file(file), str(file))
    return found


def read_hub(name, split: str):
    parts = hub_parts(name)
    if {"train", "test"} <= set(parts):
        return puzzles_of(parts[split].to_list(), f"{name}/{split}")
    found = []
    for part in parts:
        found += puzzles_of(parts[part].to_list(), f"{name}/{part}")
    return [puzzle for puzzle in found if split_of(*puzzle) == split]


def puzzles_of(rows, where):
    """Return [(nums, target)] of the rows. ValueError if a row is invalid."""
    check_columns(rows, ["nums", "target"], where)
    found = [(row.get("nums"), row.get("target")) for row in rows]
    for i, (nums, target) in enumerate(found, 1):
        if not isinstance(nums, list) or not nums or not all(type(number) is int and number > 0 for number in nums):
            raise ValueError(f"{where}, row {i}: nums must be a list of whole numbers above 0, not {nums!r}")
        if type(target) is not int:
            raise ValueError(f"{where}, row {i}: target must be a whole number, not {target!r}")
    return found


# --------------------------------------------------------------------------------------------------------------------
# Generating

MAX_MISSES = 100_000  # consecutive tries without a new puzzle before generation stops


def generate(n, numbers="3-6", seed=0, split: str = "train"):
    """Make `n` different puzzles that have a solution.

    In:
    - `n`: how many puzzles.
    - `numbers`: as in `load`. Each count of numbers gets equally many puzzles, or one more.
    - `split`: "train" or "test". `split_of` assigns each puzzle to one split, so the splits never share a puzzle,
      whatever their seeds.
    Out: items as from `load`, each also with a `solution` (an expression). Numbers are 1 to 99, targets 10 to 100. The
    same arguments give the same puzzles on any machine. A smaller `n` gives the first `n` of them.
    Errors: ValueError if the arguments are invalid, or if there seem to be fewer than `n` such puzzles.
    """
    counts = parse_numbers(numbers)
    check_split(split)
    if n < 1:
        raise ValueError(f"the number of puzzles must be at least 1, not {n}")
    groups = [generate_size(share, count, seed, split) for count, share in puzzles.shares(n, counts)]
    return puzzles.take_turns(groups)


def generate_size(how_many, count, seed, split: str):
    """Return `how_many` different puzzles of `count` numbers."""
    rng = random.Random(f"countdown {seed} {split} {count}")
    items = []
    seen = set()
    misses = 0
    while len(items) < how_many:
        if misses >= MAX_MISSES:
            raise ValueError(f"only {len(items)} different {split} puzzles of {count} numbers found, not {how_many}")
        misses += 1
        nums = [rng.randint(1, LARGEST) for _ in range(count)]
        target, solution = combine(rng, nums)
        puzzle = (*sorted(nums), target)
        if target in TARGETS and puzzle not in seen and split_of(nums, target) == split:
            seen.add(puzzle)
            items.append(make_item(nums, target, solution=solution))
            misses = 0
    return items


def combine(rng: Random, nums) -> tuple:
    """Join random pairs of terms until one is left: (its value, its expression). Values stay whole and above 0."""
    terms = [(number, str(number)) for number in nums]
    while len(terms) > 1:
        rng.shuffle(terms)
        (a, x), (b, y) = sorted([terms.pop(), terms.pop()], reverse=True)
        ways = [(a + b, f"({x} + {y})"), (a * b, f"({x} * {y})")]
        ways += [(a - b, f"({x} - {y})")] if a > b else []
        ways += [(a // b, f"({x} / {y})")] if a % b == 0 else []
        terms.append(rng.choice(ways))
    return terms[0][0], terms[0][1][1:-1]


def puzzle_of(item) -> tuple:
    """Return the puzzle's identity, which does not depend on the order of its numbers."""
    return (*sorted(item["answer"]["nums"]), item["answer"]["target"])


def split_of(nums, target):
    """Return the split of a puzzle, which does not depend on the order of its numbers."""
    return puzzles.split_of(puzzles.digest(f"{sorted(nums)} {target}"))

"""Countdown: the rule by hand-computed cases and a second evaluator, the generator, the loader."""

import ast
import collections
import itertools
import random
import re
from fractions import Fraction

import pyarrow.parquet as pq
import pytest
from conftest import DATA, MALFORMED, RIGHT, WRONG, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import countdown

REAL = DATA / "countdown"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real puzzles are not at {REAL}")

GOLD = {"nums": [3, 5, 8], "target": 16}


def score(expression, nums=(3, 5, 8), target=16):
    return countdown.score(f"hm</think><answer>{expression}</answer>", {"nums": list(nums), "target": target})


# expressions for the numbers 3, 5, 8 and the target 16
SOLUTIONS = [
    "(5 - 3) * 8", "8*(5-3)", " ( ( 5-3 ) )\n*\t8 ", "(5 − 3) × 8", "3 + 5 + 8", "8-(-(3+5))", "(-3 + 5)*8",
    "（5 – 3）× 8", "(5‑3)*８", "(5 — 3)\xa0* 8\u200b", "３ + 5 ＋ 8", "8 ＊（5－3）",
]  # fmt: skip
WELL_FORMED = [
    "(3 + 5) * 8",  # 64
    "8 + 8",  # 5 and 3 are missing, and 8 stands twice
    "16", "3 + 5 + 8 + 0", "3 + 5 + 8 + 3 - 3", "(35 - 3) / 8 * 4",
    "8 / (5 - 5) * 3", "8 * (5 - 3) / (3 - 3)", "3 / 0",
]  # fmt: skip
NO_EXPRESSIONS = [  # beside those of digits, operators and brackets alone, which Python's parser judges below
    "", " ", "3 (5)", "3 5 8", "3 + 5 + 8 = 16", "16 = 3 + 5 + 8", "3 + 5 + 8.", "3.0 + 5 + 8", ".3", "3e0 + 5 + 8",
    "3_0", "3,0", "0x3 + 5 + 8", "8 % 5", "3 ^ 5", "3 | 5", "5!", "x", "three + 5 + 8", "(5 - 3) <b>*</b> 8",
    "³ + 5 + 8", "½ + 5 + 8", "٣ + 5 + 8", "3 \\times 5", "\\boxed{3 + 5 + 8}", "$3 + 5 + 8$", "[3 + 5] + 8",
    "{3} + 5 + 8", "3 + 5 + 8;", "`3 + 5 + 8`", "3 + 5\n+ 8 or 1", "3 + 5 # 8", "3 · 5", "3 – – 5", "\0", "\ud800",
]  # fmt: skip


def test_expressions_of_3_5_8():
    assert [text for text in SOLUTIONS if score(text) != RIGHT] == []
    assert [text for text in WELL_FORMED if score(text) != WRONG] == []
    assert [text for text in NO_EXPRESSIONS if score(text) != MALFORMED] == []


OTHERS = [  # expression, numbers, target, score
    ("8 / (3 - 8 / 3)", [8, 3, 8, 3], 24, RIGHT),  # fractions on the way are exact
    ("1 / 49 * 49", [1, 49, 49], 1, RIGHT),  # in floats it is 0.9999999999999999
    ("7 / 3", [7, 3], 2, WRONG),
    ("8 + 8", [8, 8], 16, RIGHT),  # a number given twice is used twice
    ("8 + 8", [8, 8, 8], 16, WRONG),
    ("8 + 8 + 0", [8, 8], 16, WRONG),
    ("2 * 8", [8, 2, 1], 16, WRONG),
    ("11 + 5", [1, 1, 5], 16, WRONG),  # digits are not joined
]


def test_expressions_of_other_numbers():
    found = [(text, nums, target, score(text, nums, target)) for text, nums, target, _ in OTHERS]
    assert found == OTHERS


LONG = countdown.MAX_LENGTH
LONGEST = [  # their time has a bound of its own
    "(" * (LONG // 2 - 1) + "1" + ")" * (LONG // 2 - 1),
    "(-" * (LONG // 3 - 1) + "1" + ")" * (LONG // 3 - 1),
    "*".join(["9" * 99] * 10),
    "+".join(f"1/{n}" for n in range(100, 266)),
    "1-" * 499 + "1" + " " * (LONG - 999),
]


def test_the_longest_expressions_are_evaluated():
    assert [text for text in LONGEST if len(text) > LONG or score(text) != WRONG] == []
    assert countdown.evaluate("(" * (LONG // 2) + "1" + ")" * (LONG // 2)) is None


def by_ast(text):
    """What Python's own parser says: (numbers, value), or None if it is no expression by the rules of `evaluate`."""

    def value(node, begins):
        """`begins`: a minus may stand here, for nothing or an opening bracket is on its left."""
        begins = begins or text[: node.col_offset].rstrip().endswith("(")
        if isinstance(node, ast.BinOp):
            op = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(node.op)]
            left, right = value(node.left, begins), value(node.right, False)
            if left is None or right is None or (op == "/" and right == 0):
                return None
            return {"+": left + right, "-": left - right, "*": left * right, "/": op == "/" and left / right}[op]
        if isinstance(node, ast.UnaryOp):
            if not isinstance(node.op, ast.USub) or not begins:
                raise SyntaxError
            inner = value(node.operand, False)
            return None if inner is None else -inner
        numbers.append(node.value)
        return Fraction(node.value)

    numbers = []
    if re.search(r"\b00", text):  # to Python it is 0, though 01 is an error
        return None
    try:
        return numbers, value(ast.parse(text.strip(), mode="eval").body, True)
    except (SyntaxError, KeyError, AttributeError):
        return None


GROWN = st.recursive(
    st.integers(0, 20).map(str),
    lambda inner: (
        st.builds("{} {} {}".format, inner, st.sampled_from("+-*/"), inner)
        | st.builds(str.format, st.sampled_from(["({})", "(-{})", "-{}"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(GROWN | st.text("1203-+*/()", max_size=9))
def test_agrees_with_pythons_own_parser(text):
    assert countdown.evaluate(text) == by_ast(text)


def test_prompt_shows_the_layout_and_a_true_example():
    item = countdown.make_item([79, 17, 60], 36)
    system, user = item["messages"]
    assert (system["role"], user["role"], item["prefix"]) == ("system", "user", "<think>")
    assert user["content"] == "Numbers: 79, 17, 60\nTarget: 36"
    assert item["answer"] == {"nums": [79, 17, 60], "target": 36} and item["category"] == "3"
    assert countdown.score(system["content"], GOLD) == RIGHT
    assert "numbers 3, 5, 8 and the target 16" in system["content"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_generated_puzzles_are_solvable_and_different(split):
    items = countdown.generate(400, "3-6", seed=3, split=split)
    assert collections.Counter(item["category"] for item in items) == dict.fromkeys("3456", 100)
    for item in items:
        nums, target = item["answer"]["nums"], item["answer"]["target"]
        assert countdown.score(f"<answer>{item['solution']}</answer>", item["answer"]) == RIGHT
        assert len(nums) == int(item["category"]) and all(1 <= n <= 99 for n in nums) and 10 <= target <= 100
        assert all(type(n) is int for n in [*nums, target])
    assert len({(*sorted(item["answer"]["nums"]), item["answer"]["target"]) for item in items}) == 400
    assert all(any(sign in item["solution"] for item in items) for sign in "+-*/(")


def test_a_puzzle_keeps_its_split_in_any_order():
    rng = random.Random(0)
    found = collections.Counter()
    for _ in range(500):
        nums = [rng.randint(1, 99) for _ in range(4)]
        (split,) = {countdown.split_of(list(order), 24) for order in itertools.permutations(nums)}
        found[split] += 1
    assert 20 < found["test"] < 90
    assert len({countdown.split_of(nums, target) for target in range(200)}) == 2


def test_too_many_puzzles_are_refused(monkeypatch):
    monkeypatch.setattr(countdown, "LARGEST", 3)
    monkeypatch.setattr(countdown, "MAX_MISSES", 3000)
    with pytest.raises(ValueError, match="different train puzzles of 3 numbers found, not 1000"):
        countdown.generate(1000, "3")


def test_a_file_is_loaded(tmp_path):
    rows = [item["answer"] | {"other": "x"} for item in countdown.generate(12, "3-5", seed=7)]
    path = write_rows(tmp_path / "puzzles.jsonl", rows)
    items = countdown.load(str(path), "train", numbers="3-5")
    assert items == [countdown.make_item(row["nums"], row["target"]) for row in rows]
    assert {item["category"] for item in countdown.load(path, "train")} == {"3", "4"}
    with pytest.raises(ValueError, match=r"no train puzzle of 6 numbers; it has puzzles of \[3, 4, 5\]"):
        countdown.load(path, "train", numbers="6")


GOOD = {"nums": [1, 2, 3], "target": 6}
BROKEN = [("nums", nums) for nums in ([], None, [0, 2, 3], [-1, 2, 3], [1, None, 3], "1, 2, 3", 6, [1.5, 2, 3], ["1"])]
BROKEN += [("target", target) for target in (None, 6.5, "6", True)]


@pytest.mark.parametrize("column, value", BROKEN)
def test_broken_rows_are_named(tmp_path, column, value):
    path = write_rows(tmp_path / "puzzles.jsonl", [GOOD, GOOD | {column: value}])
    with pytest.raises(ValueError, match=rf"puzzles\.jsonl, row 2: {column} must be"):
        countdown.load(path, "train")


@needs_real
def test_every_real_puzzle_is_loaded():
    items = countdown.load(REAL / "test.parquet", "test")
    assert collections.Counter(item["category"] for item in items) == {"3": 490, "4": 534}
    table = pq.read_table(REAL / "test.parquet", columns=["nums", "target"]).to_pylist()
    found = collections.Counter((tuple(item["answer"]["nums"]), item["answer"]["target"]) for item in items)
    assert found == collections.Counter((tuple(row["nums"]), row["target"]) for row in table)

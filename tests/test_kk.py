"""Knights and Knaves: the rule and its holes, the generator against a second solver and a parser, the loader."""

import collections
import itertools
import random
import re
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from conftest import DATA, check_linear_time, read_claim, row_of_puzzle, write_rows
from helpers import holds

from rewards import kk

REAL = DATA / "kk"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real puzzles are not at {REAL}")

GOLD = {"Zoey": True, "Ann": False, "Bob": True}
RIGHT = "(1) Zoey is a knight\n(2) Ann is a knave\n(3) Bob is a knight"


def response(block, reasoning="Let me see."):
    return f"{reasoning}</think><answer>{block}</answer>"


def reward(text, gold=GOLD, strict=False):
    return kk.score(text, gold, strict)["reward"]


# ---------------------------------------------------------------------------------------------------------- scoring


def test_the_four_totals():
    wrong = RIGHT.replace("Ann is a knave", "Ann is a knight")
    rows = [  # text, reward, correct, format, parsed, and the reward's two parts
        (response(RIGHT), 3.0, True, True, True, 1.0, 2.0),
        (response(wrong), -0.5, False, True, True, 1.0, -1.5),
        (response("no idea"), -1.0, False, True, False, 1.0, -2.0),
        (RIGHT, -3.0, False, False, False, -1.0, -2.0),
    ]
    for text, reward, correct, has_format, parsed, of_format, of_answer in rows:
        found = {"reward": reward, "correct": correct, "format": has_format, "parsed": parsed}
        assert kk.score(text, GOLD) == found | {"parts": {"format": of_format, "answer": of_answer}}


TAGS = ["</think>", "<answer>", "</answer>", "<think>"]  # the prompt ends with the last one
ANSWERS = {  # about Zoey, Ann and Bob
    "ZOEY IS A KNIGHT, ann Is  a\nKnave; bob is\ta knight": 3.0,  # neither case nor blanks matter
    "Zoey isa knight, Ann is a knave, Bob is a knight": -1.0,
    RIGHT + "\nThat makes 2 knights.": -1.0,  # roles are counted as substrings, and there must be three
    RIGHT + "\nknighthood": -1.0,
    RIGHT.replace("Bob is a knight", "Bob is a knighthood"): -1.0,
    "Zoey is a knight, Ann is a knave": -1.0,
}


def test_tags_missing_twice_or_in_the_wrong_order():
    """All sequences of up to four tags, with the right answer around and between them."""
    sequences = [some for count in range(5) for some in itertools.product(TAGS, repeat=count)]
    rewards = {some: reward(RIGHT.join(["", *some, ""])) for some in sequences}
    assert rewards == dict.fromkeys(sequences, -3.0) | {tuple(TAGS[:3]): 3.0}
    assert reward(response(RIGHT).replace("answer", "ANSWER")) == -3.0


def test_role_words_are_counted_as_substrings():
    assert {text: reward(response(text)) for text in ANSWERS} == ANSWERS


def test_first_match_counts():
    text = "Zoey is a knave, Zoey is a knight"
    assert kk.read_answer(text, {"Zoey": True, "Ann": True}) is None
    assert kk.read_answer(text + " Ann is a fool", {"Zoey": True}) is None
    assert kk.read_answer("Ann Lee is a knave, Lee is a knight", {"Lee": True, "Ann Lee": False})["Lee"] is False


ANNS, MARYS = {"Ann": True, "Anna": False, "Joanna": True}, {"Ann": True, "Mary Ann": True}
OF_NAMES = [  # the gold, the block, its reward, and under strict
    (ANNS, "Anna is a knave, Joanna is a knight, Ann is a knight", 3.0, 3.0),  # names are whole words
    (ANNS, "Anna is a knight, Joanna is a knight, Joann is a knight", -1.0, -1.0),
    # A known hole, a name that is part of another: "Mary Ann is a knight" is about Ann too.
    (MARYS, "Mary Ann is a knight, another knight", 3.0, -1.0),
    (MARYS, "Mary Ann is a knight, Mary Ann is a knight", 3.0, -1.0),
    (MARYS, "Mary Ann is a knight", -1.0, -1.0),
    (MARYS, "Mary Ann is a knight, Ann is a knight", 3.0, 3.0),
    # It also costs: the first match for Ann is within Mary Ann.
    ({"Ann": False, "Mary Ann": True}, "Mary Ann is a knight, Ann is a knave", -0.5, -0.5),
    ({"Ann": False, "Mary Ann": True}, "Ann is a knave, Mary Ann is a knight", 3.0, 3.0),
]
for name in ("J.R.", "C3(PO)", "A+B", "[x]", "a|b", "Zoë", "\\d", "$"):  # with signs of regular expressions
    OF_NAMES.append(({name: True, "Ann": False}, f"{name} is a knight, Ann is a knave", 3.0, 3.0))
    OF_NAMES.append(({name: True, "Ann": False}, "JxRx is a knight, Ann is a knave", -1.0, -1.0))


@pytest.mark.parametrize("gold, block, plain, strict", OF_NAMES)
def test_names_are_whole_words(gold, block, plain, strict):
    assert (reward(response(block), gold), reward(response(block), gold, strict=True)) == (plain, strict)


HOLES = {  # right by default; strict asks for reasoning and for a plain list
    response(RIGHT, reasoning=" \n"): -3.0,
    response(RIGHT.replace("Zoey is a knight", "Zoey is a knight if pigs fly")): -1.0,
    response("It is false that " + RIGHT): -1.0,
    response(RIGHT + " - but I am only guessing."): -1.0,
    response(RIGHT): 3.0,
    response("1. Zoey is a knight.\n2. Ann is a knave.\n3. Bob is a knight."): 3.0,
    response("- Zoey is a knight\n- Ann is a knave\n- Bob is a knight\n"): 3.0,
    response("Zoey is a knight, Ann is a knave, and Bob is a knight."): 3.0,
    response("bob is a knight; ANN is a knave; zoey is a Knight"): 3.0,
}


def test_known_holes_score_by_default_and_not_under_strict():
    assert {text: reward(text) for text in HOLES} == dict.fromkeys(HOLES, 3.0)
    assert {text: reward(text, strict=True) for text in HOLES} == HOLES
    assert not any(kk.score(text, GOLD, strict=True)["parsed"] for text in HOLES if HOLES[text] < 0)


EIGHT = {name: True for name in ["Zoey", "Ann", "Bob", "Carl", "Dora", "Emil", "Fay", "Gus"]}
ALL_EIGHT = ", ".join(f"{name} is a knight" for name in EIGHT)
SEVEN = "knight " * 7
HOSTILE = {  # each a text for a size, beside those in test_rewards.py; at 1000 it has some 100,000 characters
    "many names": lambda n: response(SEVEN + "Zoey " * (20 * n) + "knave"),
    "one name, blanks": lambda n: response(SEVEN + "Zoey" + " " * (100 * n) + "knave"),
    "almost": lambda n: response(SEVEN + "Zoey is a " * (10 * n) + "knave"),
    "blanks in every gap": lambda n: response(f"{SEVEN}Zoey{' ' * 33 * n}is{' ' * 33 * n}a{' ' * 33 * n}x knave"),
    "roles": lambda n: response("knight" * (16 * n)),
    "right, then digits": lambda n: response(ALL_EIGHT + "1" * (100 * n)),
    "right, then brackets": lambda n: response(ALL_EIGHT + "(1" * (50 * n)),
    "ands": lambda n: response("and " * (25 * n) + ALL_EIGHT),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_time_in_proportion_to_their_length(name, strict):
    assert kk.score(HOSTILE[name](1000), EIGHT, strict)["reward"] in (3.0, -0.5, -1.0, -3.0)
    check_linear_time(lambda text: kk.score(text, EIGHT, strict), HOSTILE[name])


# -------------------------------------------------------------------------------------------------------- generator


def slow_solve(statements):
    worlds = itertools.product([False, True], repeat=len(statements))
    return [w for w in worlds if all(w[i] == holds(s, w) for i, s in enumerate(statements))]


@pytest.fixture(scope="module")
def made():
    return kk.load(None, "train", size=1500), kk.load(None, "test")


@pytest.mark.parametrize("count", range(2, 9))
def test_generated_puzzles_have_exactly_one_solution(count):
    items = kk.generate(200, str(count), seed=3)
    assert len({item["quiz"] for item in items}) == 200
    for item in items:
        assert slow_solve(item["statements"]) == [tuple(item["answer"].values())]
        assert list(item["answer"]) == item["names"] and item["category"] == str(count) == str(len(item["names"]))


def test_solve_agrees_with_the_slow_solver_on_any_statements():
    rng = random.Random(1)
    for _ in range(300):
        n = rng.randrange(2, 6)
        people = [[kk.grow(rng, n, 2) for _ in range(3)] for _ in range(n)]
        statements = [rng.choice([("or", a, b, c), ("and", a, b, c), ("not", a)]) for a, b, c in people]
        assert kk.solve(statements) == slow_solve(statements)


def test_english_says_what_the_statements_say(made):
    for item in made[0] + made[1]:
        names = item["names"]
        listed = re.search(r": ([\w, ]+ and \w+)\. ", item["quiz"])[1]
        assert re.split(r", | and ", listed) == names
        assert not (set(kk.NAMES) - set(names)) & set(re.findall(r"\w+", item["quiz"]))
        quotes = re.findall(r'"(.*?)[.,]"', item["quiz"])
        assert [read_claim(quote, names) for quote in quotes] == list(item["statements"])
        speakers = re.findall(
            r'(?:These were the words of (\w+)|(\w+) (?:said|told you|gave you this answer))[,:] "'
            r'|," (?:said (\w+)|(\w+) let you know)\.',
            item["quiz"],
        )
        assert ["".join(found) for found in speakers] == names


def test_always_the_same_tenth_is_for_testing(made):
    """kk_tiny has learned from puzzles of the other nine, and must not be tested on those."""
    assert all(int(kk.puzzle_of(item), 16) % 10 == 0 for item in made[1])


def renumber(statement, new):
    op, *parts = statement
    if op in ("telling-truth", "lying"):
        return (op, new[parts[0]])
    parts = [renumber(part, new) for part in parts]
    return (op, *(reversed(parts) if op in ("and", "or", "<=>") else parts))


def test_identity_survives_reordering(made):
    rng = random.Random(5)
    for item in made[0][:500]:
        n = len(item["names"])
        new = rng.sample(range(n), n)
        moved = [None] * n
        for who, statement in enumerate(item["statements"]):
            moved[new[who]] = renumber(statement, new)
        assert kk.identity(moved) == kk.identity(item["statements"])
    a, b = ("telling-truth", 0), ("telling-truth", 1)
    assert kk.identity([("->", a, b), a]) != kk.identity([("->", b, a), a])
    assert kk.identity([("not", ("lying", 1)), a]) == kk.identity([b, a])


def test_every_statement_tells_something(made):
    for item in made[1]:
        worlds = list(itertools.product([False, True], repeat=len(item["names"])))
        for who, statement in enumerate(item["statements"]):
            assert len({holds(statement, world) for world in worlds}) == 2
            assert len({holds(statement, world) == world[who] for world in worlds}) == 2


def test_asking_for_too_many_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(kk, "DEPTH", 1)  # so that there are few
    with pytest.raises(ValueError, match=r"only \d+ different train puzzles of 2 people were found"):
        kk.generate(10**6, "2")


# ----------------------------------------------------------------------------------------------------------- loader


@pytest.fixture(scope="module")
def rows():
    """Twelve puzzles as a file has them, of 2, 3 and 4 people in turn."""
    return [row_of_puzzle(item) for item in kk.generate(12, "2-4", seed=7)]


def test_a_file_is_loaded(tmp_path, rows):
    path = write_rows(tmp_path / "puzzles.jsonl", rows)
    items = kk.load(str(path), "train", "2-4")
    assert [item["quiz"] for item in items] == [row["quiz"] for row in rows]
    assert items[0]["answer"] == dict(zip(rows[0]["names"], rows[0]["solution"]))
    assert items[0]["messages"][1] == {"role": "user", "content": rows[0]["quiz"] + "\n"}
    assert {item["category"] for item in kk.load(path, "train", "3-7")} == {"3", "4"}
    with pytest.raises(ValueError, match=r"no puzzle of 5-7 people; it has puzzles of \[2, 3, 4\]"):
        kk.load(path, "train", "5-7")


TRUTH, LIE = "('telling-truth', 0)", "('lying', 0)"
BROKEN = [  # what is changed in a row, and what is said of it
    ({"statements": f"({TRUTH}, {TRUTH})"}, "have 2 solutions"),
    ({"statements": f"({LIE}, {TRUTH})"}, "have 0 solutions"),
    ({"statements": f"(('xor', {TRUTH}, {TRUTH}), {TRUTH})"}, "unknown operator 'xor'"),
    ({"statements": f"({TRUTH},)"}, "2 names, 2 values in solution and 1 statements"),
    ({"statements": f"(('lying', 2), {TRUTH})"}, "from 0 to 1"),
    ({"statements": f"(('->', {TRUTH}), {TRUTH})"}, "takes 2"),
    ({"statements": f"((), {TRUTH})"}, "is no statement"),
    ({"statements": "(" * 5000}, "no Python literal"),
    ({"solution": [False, False]}, "the row says"),
    ({"names": ["Ann", "ann"]}, "the same name"),
    ({"names": ["Ann", "Bob "]}, "blanks around it"),
    ({"names": ["Ann", "Sir Knightley"]}, "knight or knave in it"),
    ({"names": ["Ann\udfff", "Bob"]}, "no character"),
    ({"names": [1, 2, 3]}, "no name"),  # also of a number of people that is not asked for
    ({"quiz": None}, "quiz is empty"),
    ({"quiz": "who\ud800?"}, "no character"),
]


@pytest.mark.parametrize("change, message", BROKEN)
def test_broken_rows_are_named(tmp_path, change, message):
    good = {"quiz": "?", "names": ["Ann", "Bob"], "solution": [True, True]}
    good["statements"] = f"(('->', {TRUTH}, ('telling-truth', 1)), {TRUTH})"
    path = write_rows(tmp_path / "puzzles.jsonl", [good, good | change])
    with pytest.raises(ValueError, match=rf"puzzles\.jsonl, row 2.*{re.escape(message)}"):
        kk.load(str(path), "train", "2")


def test_all_parts_of_a_hub_data_set_are_loaded(monkeypatch, rows):
    part = SimpleNamespace(to_list=lambda: rows)
    monkeypatch.setattr(kk, "hub_parts", lambda name, split: {split: part, "3ppl": part} if split == "test" else {})
    assert len(kk.load("some/thing", "test", "2-4")) == 24


# ------------------------------------------------------------------------------------------------------- real files


def chatml(messages):
    """Qwen's chat template, with the generation prompt."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"


@needs_real
@pytest.mark.parametrize("split, count", [("train", 4500), ("test", 500)])
def test_real_files_give_the_papers_prompts_back(split, count):
    items = kk.load(str(REAL), split)
    assert collections.Counter(item["category"] for item in items) == {str(n): count // 5 for n in range(3, 8)}
    prompts, answers = {}, {}
    for file in REAL.glob(f"{split}*.parquet"):
        for row in pq.read_table(file, columns=["quiz", "prompt", "solution_text_format"]).to_pylist():
            prompts[row["quiz"]] = row["prompt"][0]["content"]
            answers[row["quiz"]] = row["solution_text_format"]
    assert len(prompts) == len(items)
    for item in items:
        assert chatml(item["messages"]) + item["prefix"] == prompts[item["quiz"]]
        for strict in (False, True):
            assert reward(response(answers[item["quiz"]]), item["answer"], strict) == 3.0

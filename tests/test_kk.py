"""Knights and Knaves: the rule and its holes, the generator against a second solver and a parser, the loader."""

import collections
import itertools
import os
import random
import re

import pyarrow.parquet as pq
import pytest
from conftest import DATA, check_linear_time, row_of_puzzle, write_rows
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
    no_tags = RIGHT
    assert kk.score(response(RIGHT), GOLD) == {"reward": 3.0, "correct": True, "format": True, "parsed": True}
    assert kk.score(response(wrong), GOLD) == {"reward": -0.5, "correct": False, "format": True, "parsed": True}
    assert kk.score(response("no idea"), GOLD) == {"reward": -1.0, "correct": False, "format": True, "parsed": False}
    assert kk.score(no_tags, GOLD) == {"reward": -3.0, "correct": False, "format": False, "parsed": False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<think>" + response(RIGHT),  # the prompt has opened it already
        response(RIGHT) + "</answer>",
        response(RIGHT) + "<answer>",
        response(RIGHT) + "</think>",
        response(RIGHT) * 2,
        f"<answer>{RIGHT}</answer></think>",
        f"hm</think></answer>{RIGHT}<answer>",
        f"hm<answer></think>{RIGHT}</answer>",
        f"hm</think>{RIGHT}",
        f"hm</think><answer>{RIGHT}",
        f"hm</think><ANSWER>{RIGHT}</ANSWER>",
    ],
)
def test_tags_missing_twice_or_in_the_wrong_order(text):
    assert reward(text) == -3.0


def test_case_and_blanks_do_not_matter():
    assert reward(response("ZOEY IS A KNIGHT, ann Is  a\nKnave; bob is\ta knight")) == 3.0
    assert reward(response("Zoey isa knight, Ann is a knave, Bob is a knight")) == -1.0


def test_text_around_the_tags_is_allowed():
    assert reward(f"hm</think> so \n<answer>\n{RIGHT}\n</answer> done") == 3.0


def test_role_words_are_counted_as_substrings():
    assert reward(response(RIGHT + "\nThat makes 2 knights.")) == -1.0
    assert reward(response(RIGHT + "\nknighthood")) == -1.0
    assert reward(response(RIGHT.replace("Bob is a knight", "Bob is a knighthood"))) == -1.0
    assert reward(response("Zoey is a knight, Ann is a knave")) == -1.0


def test_first_match_counts():
    text = "Zoey is a knave, Zoey is a knight"
    assert kk.read_answer(text, {"Zoey": True, "Ann": True}) is None
    assert kk.read_answer(text + " Ann is a fool", {"Zoey": True}) is None
    assert kk.read_answer("Ann Lee is a knave, Lee is a knight", {"Lee": True, "Ann Lee": False})["Lee"] is False


def test_names_are_whole_words():
    gold = {"Ann": True, "Anna": False, "Joanna": True}
    assert reward(response("Anna is a knave, Joanna is a knight, Ann is a knight"), gold) == 3.0
    assert reward(response("Anna is a knight, Joanna is a knight, Joann is a knight"), gold) == -1.0


@pytest.mark.parametrize("name", ["J.R.", "C3(PO)", "A+B", "[x]", "a|b", "Zoë", "\\d", "$"])
@pytest.mark.parametrize("strict", [False, True])
def test_names_with_regex_characters(name, strict):
    gold = {name: True, "Ann": False}
    assert reward(response(f"{name} is a knight, Ann is a knave"), gold, strict) == 3.0
    assert reward(response("JxRx is a knight, Ann is a knave"), gold, strict) == -1.0


HOLES = {
    "empty reasoning": response(RIGHT, reasoning=" \n"),
    "conditional": response(RIGHT.replace("Zoey is a knight", "Zoey is a knight if pigs fly")),
    "negation": response(RIGHT.replace("Zoey is a knight", "It is false that Zoey is a knight")),
    "question": response(RIGHT.replace("Zoey is a knight", "Zoey is a knight?")),
    "hedge": response("Perhaps " + RIGHT),
    "commentary": response(RIGHT + " - but I am only guessing."),
}


def test_known_hole_one_statement_about_two_people():
    """A name that is part of another: "Mary Ann is a knight" is about Ann too. The number of roles must be right."""
    gold = {"Ann": True, "Mary Ann": True}
    for block in ("Mary Ann is a knight, another knight", "Mary Ann is a knight, Mary Ann is a knight"):
        assert reward(response(block), gold) == 3.0
        assert reward(response(block), gold, strict=True) == -1.0
    assert reward(response("Mary Ann is a knight"), gold) == -1.0
    assert reward(response("Mary Ann is a knight, Ann is a knight"), gold, strict=True) == 3.0
    # It also costs: the first match for Ann is within Mary Ann.
    apart = {"Ann": False, "Mary Ann": True}
    assert reward(response("Mary Ann is a knight, Ann is a knave"), apart) == -0.5
    assert reward(response("Ann is a knave, Mary Ann is a knight"), apart) == 3.0


@pytest.mark.parametrize("name", HOLES)
def test_known_hole_scores_by_default_and_not_under_strict(name):
    assert reward(HOLES[name]) == 3.0
    result = kk.score(HOLES[name], GOLD, strict=True)
    assert not result["correct"] and not result["parsed"]
    assert result["reward"] == (-3.0 if name == "empty reasoning" else -1.0)


@pytest.mark.parametrize(
    "block",
    [
        RIGHT,
        "1. Zoey is a knight.\n2. Ann is a knave.\n3. Bob is a knight.",
        "- Zoey is a knight\n- Ann is a knave\n- Bob is a knight\n",
        "Zoey is a knight, Ann is a knave, and Bob is a knight.",
        "bob is a knight; ANN is a knave; zoey is a Knight",
    ],
)
def test_plain_lists_pass_strict(block):
    assert reward(response(block), strict=True) == 3.0


EIGHT = {name: True for name in ["Zoey", "Ann", "Bob", "Carl", "Dora", "Emil", "Fay", "Gus"]}
ALL_EIGHT = ", ".join(f"{name} is a knight" for name in EIGHT)
SEVEN = "knight " * 7
HOSTILE = {  # each a text for a size; at 1000 it has some 100,000 characters
    "long nonsense": lambda n: "z" * (100 * n),
    "many tags": lambda n: "<answer></answer><think></think>" * (4 * n),
    "nested tags": lambda n: "<answer>" * (10 * n) + "</answer>" * (10 * n),
    "broken tags": lambda n: "<" * (100 * n),
    "many names": lambda n: response(SEVEN + "Zoey " * (20 * n) + "knave"),
    "names and blanks": lambda n: response(SEVEN + ("Zoey" + " " * n) * 100 + "knave"),
    "one name, blanks": lambda n: response(SEVEN + "Zoey" + " " * (100 * n) + "knave"),
    "almost": lambda n: response(SEVEN + "Zoey is a " * (10 * n) + "knave"),
    "blanks in every gap": lambda n: response(f"{SEVEN}Zoey{' ' * 33 * n}is{' ' * 33 * n}a{' ' * 33 * n}x knave"),
    "roles": lambda n: response("knight" * (16 * n)),
    "right, then commas": lambda n: response(ALL_EIGHT + "," * (100 * n)),
    "right, then digits": lambda n: response(ALL_EIGHT + "1" * (100 * n)),
    "right, then brackets": lambda n: response(ALL_EIGHT + "(1" * (50 * n)),
    "markers": lambda n: response("(1)" * (33 * n) + ALL_EIGHT),
    "ands": lambda n: response("and " * (25 * n) + ALL_EIGHT),
    "zeros and halves": lambda n: response("\0\ud800\u0130" * (30 * n) + ALL_EIGHT),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_time_in_proportion_to_their_length(name, strict):
    assert kk.score(HOSTILE[name](1000), EIGHT, strict)["reward"] in (3.0, -0.5, -1.0, -3.0)
    check_linear_time(lambda text: kk.score(text, EIGHT, strict), HOSTILE[name])


def test_random_texts_never_crash():
    rng = random.Random(0)
    bits = [*"<think> </think> <answer> </answer> Zoey Ann Bob knight knave (".split(), " is a ", "\n"]
    for _ in range(2000):
        text = "".join(rng.choices(bits, k=rng.randrange(30)))
        plain, strict = kk.score(text, GOLD), kk.score(text, GOLD, True)
        assert plain["reward"] in (3.0, -0.5, -1.0, -3.0) and strict["reward"] <= plain["reward"]


# -------------------------------------------------------------------------------------------------------- generator


def slow_solve(statements):
    worlds = itertools.product([False, True], repeat=len(statements))
    return [w for w in worlds if all(w[i] == holds(s, w) for i, s in enumerate(statements))]


def depth_of(statement):
    op, *parts = statement
    if op in ("telling-truth", "lying", "not"):
        return 0
    return 1 + max(map(depth_of, parts))


@pytest.fixture(scope="module")
def made():
    return kk.load(None, "train"), kk.load(None, "test")


@pytest.mark.parametrize("count", range(2, 9))
def test_generated_puzzles_have_exactly_one_solution(count):
    items = kk.generate(500, str(count), seed=3)
    assert len({item["quiz"] for item in items}) == 500
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


def read_claim(text, names):
    """The statement a sentence of the generator makes, read back without the generator's tables."""
    text = text.strip()
    if leaf := re.fullmatch(r"(\w+) is (not )?a (knight|knave)", text):
        claim = ("telling-truth" if leaf[3] == "knight" else "lying", names.index(leaf[1]))
        return ("not", claim) if leaf[2] else claim
    inner = []  # take brackets out first: what is inside is read on its own

    def stash(match):
        inner.append(match[1])
        return f"@{len(inner) - 1}"

    flat = re.sub(r"\(([^()]*)\)", stash, text)
    shapes = [
        ("and", r"both of these hold: (.+), and (.+)"),
        ("or", r"(.+), or (.+), or both"),
        ("<=>", r"(.+) if and only if (.+)"),
        ("<=>", r"(.+) exactly when (.+)"),
        ("->", r"if (.+) then (.+)"),
        ("->", r"(.+) only if (.+)"),
        ("and", r"(.+) and (.+)"),
        ("or", r"(.+) or (.+)"),
    ]
    for op, shape in shapes:
        if match := re.fullmatch(shape, flat, re.IGNORECASE):
            parts = [inner[int(part[1:])] if part[0] == "@" else part for part in match.groups()]
            return (op, *(read_claim(part, names) for part in parts))
    raise AssertionError(f"cannot read {text!r}")


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


def test_default_sizes_are_balanced_and_take_turns(made):
    train, test = made
    assert collections.Counter(item["category"] for item in train) == {str(n): 900 for n in range(3, 8)}
    assert collections.Counter(item["category"] for item in test) == {str(n): 100 for n in range(3, 8)}
    assert [item["category"] for item in train[:10]] == list("3456734567")
    odd = collections.Counter(item["category"] for item in kk.load(None, "train", "2-4", size=20))
    assert odd == {"2": 7, "3": 7, "4": 6}


def test_no_duplicates_and_train_and_test_disjoint_across_seeds(made):
    train, test = ([kk.identity(item["statements"]) for item in items] for items in made)
    assert len(set(train)) == len(train) and len(set(test)) == len(test)
    other = {kk.identity(item["statements"]) for item in kk.generate(1000, "2-4", seed=9, split="test")}
    more = {kk.identity(item["statements"]) for item in kk.generate(4000, "2-4", seed=10)}
    assert not set(train) & (set(test) | other) and not more & (set(test) | other)
    # Always the same tenth: kk_tiny has learned from puzzles of the other nine, and must not be tested on those.
    assert all(int(puzzle, 16) % 10 == 0 for puzzle in other)


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


def test_statements_tell_something_and_nest(made):
    depths = collections.Counter()
    for item in made[0]:
        n = len(item["names"])
        worlds = list(itertools.product([False, True], repeat=n))
        for who, statement in enumerate(item["statements"]):
            assert len({holds(statement, world) for world in worlds}) == 2
            assert len({holds(statement, world) == world[who] for world in worlds}) == 2
            depths[depth_of(statement)] += 1
    assert set(depths) == {0, 1, 2} and depths[2] < depths[1]


def test_asking_for_too_many_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(kk, "DEPTH", 1)  # so that there are few
    with pytest.raises(ValueError, match=r"only \d+ different train puzzles of 2 people were found"):
        kk.generate(10**6, "2")


# ----------------------------------------------------------------------------------------------------------- loader


def rows_for_file(n=12, people="2-4"):
    return [row_of_puzzle(item) for item in kk.generate(n, people, seed=7)]


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_file_is_loaded_and_read_anew_when_it_changes(tmp_path, suffix):
    rows = rows_for_file()
    path = write_rows(tmp_path / f"puzzles{suffix}", rows)
    stat = path.stat()
    items = kk.load(str(path), "train", "2-4")
    assert [item["quiz"] for item in items] == [row["quiz"] for row in rows]
    assert items[0]["answer"] == dict(zip(rows[0]["names"], rows[0]["solution"]))
    assert set(items[0]) >= {"messages", "prefix", "answer", "category", "quiz"}
    assert items[0]["messages"][1] == {"role": "user", "content": rows[0]["quiz"] + "\n"}
    write_rows(path, rows[::-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same time stamp, which would fool a cache
    assert kk.load(str(path), "train", "2-4")[0]["quiz"] == rows[-3]["quiz"]


def test_other_numbers_of_people_are_left_out(tmp_path):
    path = str(write_rows(tmp_path / "a.jsonl", rows_for_file()))
    assert {item["category"] for item in kk.load(path, "train", "3-7")} == {"3", "4"}
    with pytest.raises(ValueError, match=r"no puzzle of 5-7 people; it has puzzles of \[2, 3, 4\]"):
        kk.load(path, "train", "5-7")


TRUTH, LIE = "('telling-truth', 0)", "('lying', 0)"
BROKEN = {
    "not unique": ({"statements": f"({TRUTH}, {TRUTH})"}, "have 2 solutions"),
    "no solution": ({"statements": f"({LIE}, {TRUTH})"}, "have 0 solutions"),
    "wrong solution": ({"solution": [False, False]}, "the row says"),
    "unknown operator": ({"statements": f"(('xor', {TRUTH}, {TRUTH}), {TRUTH})"}, "unknown operator 'xor'"),
    "lengths": ({"statements": f"({TRUTH},)"}, "2 names, 2 values in solution and 1 statements"),
    "solution too long": ({"solution": [True, True, True]}, "2 names, 3 values"),
    "person out of range": ({"statements": f"(('lying', 2), {TRUTH})"}, "from 0 to 1"),
    "arity": ({"statements": f"(('->', {TRUTH}), {TRUTH})"}, "takes 2"),
    "not a literal": ({"statements": "(len('x'), 1)"}, "no Python literal"),
    "deep nesting": ({"statements": "(" * 5000}, "no Python literal"),
    "same name": ({"names": ["Ann", "ann"]}, "the same name"),
    "no quiz": ({"quiz": " "}, "quiz is empty"),
    "empty names": ({"names": []}, "names must be a list of names, not []"),
    "names in one text": ({"names": "AB"}, "names must be a list of names, not 'AB'"),
    "a blank after a name": ({"names": ["Ann", "Bob "]}, "must not have blanks around it"),
    "a name with a role": ({"names": ["Ann", "Sir Knightley"]}, "or knight or knave in it: 'Sir Knightley'"),
    "wrong names of another number of people": ({"names": [1, 2, 3]}, "no name: [1, 2, 3]"),
    "null quiz": ({"quiz": None}, "quiz is empty or not a text"),
    "null solution": ({"solution": None}, "must be lists"),
    "half a character in the quiz": ({"quiz": "who\ud800?"}, r"a text holds '\ud800', which is no character"),
    "half a character in a name": ({"names": ["Ann\udfff", "Bob"]}, r"a text holds '\udfff', which is no character"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_named(tmp_path, name):
    change, message = BROKEN[name]
    good = {
        "quiz": "?",
        "names": ["Ann", "Bob"],
        "solution": [True, True],
        "statements": f"(('->', {TRUTH}, ('telling-truth', 1)), {TRUTH})",
    }
    path = write_rows(tmp_path / "puzzles.jsonl", [good, {**good, **change}])
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        kk.load(str(path), "train", "2")
    assert "puzzles.jsonl, row 2" in str(caught.value)
    assert len(kk.load(str(write_rows(path, [good, good])), "train", "2")) == 2


def test_hub_splits_are_joined_and_failures_explained(monkeypatch):
    import datasets

    rows = rows_for_file()
    asked = []

    def from_hub(name, config, trust_remote_code):
        assert trust_remote_code is False
        asked.append((name, config))
        parts = {f"{n}ppl": datasets.Dataset.from_list([r for r in rows if len(r["names"]) == n]) for n in (2, 3, 4)}
        return datasets.DatasetDict(parts)

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert len(kk.load("K-and-K/knights-and-knaves", "test", "2-4")) == 12
    assert asked == [("K-and-K/knights-and-knaves", "test")]

    def fails(name, config, trust_remote_code):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(ValueError, match=r"(?s)some/thing.*no network.*https://huggingface.co/datasets/some/thing"):
        kk.load("some/thing", "train")


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

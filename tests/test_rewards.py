"""What the tasks share: answers in tags, hostile and random texts, files, folders, the hub, and puzzles by a seed."""

import collections
import json
import os
import re

import datasets
import pytest
from conftest import MALFORMED, RIGHT, WRONG, check_linear_time, python, row_of_puzzle, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import countdown, hitab, hitab_sheets, kk, math

each_task = pytest.mark.parametrize("task", [kk, math, countdown, hitab], ids=lambda task: task.__name__)
each_generator = pytest.mark.parametrize("task", [kk, countdown, hitab], ids=lambda task: task.__name__)


ANSWERS = {  # of each task an answer that is right, one that is wrong, and the gold
    kk: ("Ann is a knight", "Ann is a knave", {"Ann": True}),
    countdown: ("(5 - 3) * 8", "8", {"nums": [3, 5, 8], "target": 16}),
    hitab: ("12", "7", [12]),
}


@pytest.mark.parametrize(
    "task, response, right, wrong",
    [
        (kk, "hm</think><answer>Ann is a knight</answer>", {"Ann": True}, {"Ann": False}),
        (countdown, "<answer>1 + 2</answer>", {"nums": [1, 2], "target": 3}, {"nums": [1, 2], "target": 4}),
        (hitab, "<answer>north</answer>", ["north"], ["south"]),
        (math, r"\boxed{\frac12}", ["0.5"], ["0.6"]),
    ],
)
def test_each_response_is_scored_with_its_answer(task, response, right, wrong):
    scores = task.score_all([response, response, ""], [right, wrong, wrong])
    assert scores == [task.score(response, right), task.score(response, wrong), task.score("", wrong)]
    assert [score["correct"] for score in scores] == [True, False, False]
    assert task.score_all([], []) == []
    if task is not kk:
        with pytest.raises(ValueError):
            task.score_all(["", ""], [[]])


IN_TAGS = {  # R: the right answer, W: the wrong one; ( and ): the tags
    "R": MALFORMED, "": MALFORMED, "(R": MALFORMED, "R)": MALFORMED, ")R(": MALFORMED, "()": MALFORMED, "(R)": RIGHT,
    "hm</think> so (\nR\n) done": RIGHT, "(W)(R)": RIGHT, "(R)(W)": WRONG, "(R)()": MALFORMED,
    "(R) or (W": RIGHT,  # the last complete one
    "(R))": RIGHT, "((R))": RIGHT, "(W (R)": RIGHT, "<ANSWER>R</ANSWER>": MALFORMED,
}  # fmt: skip


@pytest.mark.parametrize("task", [countdown, hitab])
def test_the_last_complete_answer_counts(task):
    right, wrong, gold = ANSWERS[task]
    signs = {"(": "<answer>", ")": "</answer>", "R": right, "W": wrong}
    found = {text: task.score("".join(signs.get(sign, sign) for sign in text), gold) for text in IN_TAGS}
    assert found == IN_TAGS


HOSTILE = {  # each a text for a size; at 1000 it has some 100,000 characters
    "nonsense": lambda n: "z" * (500 * n),
    "a huge number": lambda n: "<answer>" + "9" * (100 * n) + "</answer>",
    "blanks": lambda n: "<answer>" + " " * (100 * n) + "x" + " " * (100 * n) + "</answer>",
    "nested tags": lambda n: "<answer>" * (20 * n) + "</answer>" * (20 * n),
    "opening tags": lambda n: "<answer>" * (20 * n),
    "closing tags": lambda n: "</answer>" * (20 * n),
    "pairs": lambda n: "<answer></answer><think></think>" * (4 * n),
    "broken tags": lambda n: "<answer" * (20 * n) + "<" * (100 * n) + "</answer>",
    "braces": lambda n: r"\boxed{" + "{" * (50 * n) + "}" * (50 * n),
    "boxes": lambda n: r"\boxed{" * (10 * n) + "}" * (10 * n),
    "blanks behind boxed": lambda n: r"\boxed" + " " * (100 * n),
    "unfinished boxes": lambda n: r"\boxed " * (20 * n),
    "backslashes": lambda n: "\\" * (100 * n),
}


@each_generator
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_time_in_proportion_to_their_length(task, name):
    gold = ANSWERS[task][-1]
    assert not task.score(HOSTILE[name](1000), gold)["correct"]
    check_linear_time(lambda text: task.score(text, gold), HOSTILE[name])


BITS = [*"12079.,;:=-+/*%$€({[]})\\\n", " and ", " is a ", *"Ann Zoey knight knave million 1e999 nan north".split()]
BITS += [*"<think> </think> <answer> </answer>".split(), r"\boxed{", r"\text{", r"\,", "\0", "\ud800", *"٣²½−“\u0130"]
BIT = st.sampled_from(BITS) | st.characters()
AROUND = ["{}", "<answer>{}</answer>", "hm</think><answer>{}</answer>", "\\boxed{{{}}}"]


@each_generator
def test_random_texts_never_crash(task):
    right, _, gold = ANSWERS[task]
    kinds = set()

    @settings(max_examples=500, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(AROUND), st.lists(BIT, max_size=12) | st.lists(BIT | st.just(right), max_size=3))
    def check(around, parts):
        text = around.format("".join(parts))
        found = task.score(text, gold)
        kinds.add((found["format"], found["correct"]))
        if task is kk:
            strict = kk.score(text, gold, strict=True)
            assert found["reward"] in (3.0, -0.5, -1.0, -3.0) and strict["reward"] <= found["reward"]
        else:
            assert found in (RIGHT, WRONG, MALFORMED)

    check()
    assert kinds >= {(True, True), (True, False), (False, False)}


@each_generator
def test_the_same_problems_in_another_process_and_with_a_smaller_size(task):
    made = task.generate(40, seed=5)
    assert made == task.generate(40, seed=5) and made[:9] == task.generate(9, seed=5)
    assert made != task.generate(40, seed=6) and made != task.generate(40, seed=5, split="test")
    module = task.__name__.rpartition(".")[2]
    program = f"import json; from rewards import {module}; print(json.dumps({module}.generate(40, seed=5)))"
    done = python("-c", program, env=os.environ | {"PYTHONHASHSEED": "12345"})
    assert done.stdout == json.dumps(made) + "\n"


def table_of(item):
    """The table in a prompt of HiTab."""
    return item["messages"][-1]["content"].split("\n\nQuestion: ")[0]


FEW = {  # changes that leave so few problems that the seeds meet again and again; how to generate these; sizes
    kk: ({(kk, "DEPTH"): 1}, {"people": "2"}, {"train": 100, "test": 8}),
    countdown: ({(countdown, "LARGEST"): 12}, {"numbers": "3"}, {"train": 400, "test": 40}),
    hitab: (
        {
            (hitab_sheets, "RANGES"): dict.fromkeys(hitab_sheets.RANGES, (1, 2)),
            (hitab_sheets, "SHAPES"): [(1, 1, False, False)],
            (hitab_sheets, "THINGS"): hitab_sheets.THINGS[-2:-1],
            (hitab_sheets, "TIMES"): hitab_sheets.TIMES[-1:],
        },
        {},
        {"train": 400, "test": 100},
    ),
}


@each_generator
def test_no_problem_is_on_both_sides_whatever_the_seeds(task, monkeypatch):
    changes, kinds, sizes = FEW[task]
    for place, value in changes.items():
        monkeypatch.setattr(*place, value)
    splits = {}
    for split, size in sizes.items():
        found = [task.generate(size, seed=seed, split=split, **kinds) for seed in range(4)]
        if task is hitab:  # tables without their titles
            found = [{table_of(item).split("\n", 1)[1] for item in made} for made in found]
        else:
            found = [{task.puzzle_of(item) for item in made} for made in found]
            assert {len(puzzles) for puzzles in found} == {size}
        splits[split] = collections.Counter(problem for problems in found for problem in problems)
        assert max(splits[split].values()) > 1
    assert not splits["train"].keys() & splits["test"].keys()


DEFAULTS = [  # task, its flags, how many of each category it generates to test on
    (kk, {"people": "3-7"}, dict.fromkeys("34567", 100)),
    (countdown, {"numbers": "3-4"}, dict.fromkeys("34", 512)),
    (hitab, {}, dict.fromkeys(hitab.KINDS, 256)),
]


@pytest.mark.parametrize("task, kinds, of_each_kind", DEFAULTS)
@pytest.mark.slow
def test_generated_is_the_default(task, kinds, of_each_kind):
    items = task.load(None, "train", size=7, seed=2)
    assert items == task.generate(7, seed=2, split="train", **kinds)
    assert [item["category"] for item in items] == [*of_each_kind, *of_each_kind, *of_each_kind, *of_each_kind][:7]
    assert collections.Counter(item["category"] for item in task.load(None, "test")) == of_each_kind


@each_task
def test_bad_arguments(task):
    calls = [lambda: task.load(None, "dev"), lambda: task.load(None, "train", size=0)]
    if task is not math:  # it generates none
        calls += [lambda: task.generate(5, split="dev"), lambda: task.generate(0), lambda: task.generate(-1)]
    for call in calls:
        with pytest.raises(ValueError, match=r"split must be train or test|must be at least 1"):
            call()


COUNTS = {"3-7": [3, 4, 5, 6, 7], "3,2": [2, 3], "5": [5], "2-3, 8": [2, 3, 8], " 3 - 6 ": [3, 4, 5, 6]}


def test_numbers_of_people_and_of_numbers():
    assert {text: kk.parse_people(text) for text in COUNTS} == COUNTS
    for text in ("", "1", "9", "7-3", "3-", "a", "3-7-8", "2,,3", "10", "３", "-3"):
        with pytest.raises(ValueError, match="people must be like 3-7"):
            kk.load(None, "train", text)
    assert countdown.parse_numbers("3-6") == [3, 4, 5, 6]
    for text in ("2", "7"):
        with pytest.raises(ValueError, match="numbers must be like 3-4"):
            countdown.load(None, "train", numbers=text)


@pytest.mark.parametrize("source", ["no/such.parquet", "no/such.jsonl", "./nothing", "/nowhere/at/all", "kk.csv"])
@each_task
def test_a_path_that_does_not_exist(task, source):
    with pytest.raises(ValueError, match=f"{source} does not exist"):
        task.load(source, "train")


BAD_FILES = [  # task, name, what the file holds, what is said of it
    (kk, "a.parquet", "{broken", "could not be read"),
    (kk, "a.txt", "{broken", "expected a .parquet file"),
    (kk, "a.json", "{broken", "row 1 could not be read"),
    (kk, "a.json", "", "could not be read"),
    (kk, "a.json", "null", "expected a list of rows"),
    (kk, "a.json", "[]", "holds no rows"),
    (kk, "a.json", "[null]", "row 1: expected an object with quiz, names, solution, statements, not None"),
    (kk, "a.json", '{"quiz": "?"}\n{"quiz": "?"}\nnull', "row 3: expected an object"),  # a row in each line
    (kk, "a.json", '{"problem": "?", "answer": "1"}', "lacks the columns quiz, names, solution, statements"),
    (kk, "a.jsonl", "{}\n\n{", "row 2 could not be read"),
    (kk, "a.jsonl", "\n", "holds no rows"),
    (math, "a.json", "[null]", "row 1: no problem"),
    (countdown, "a.json", "[null]", "row 1: expected an object with nums, target, not None"),
    (countdown, "a.json", '{"numbers": [1, 2, 3], "target": 6}', "lacks the columns nums; it has numbers, target"),
    (hitab, "a.json", "[null]", "row 1: expected an object with question, answer, not None"),
]


@pytest.mark.parametrize("task, name, text, message", BAD_FILES)
def test_a_file_that_cannot_be_used_is_named(task, name, text, message, tmp_path):
    """A JSON file that begins with null makes the library `datasets` end the process with a segmentation fault."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*{re.escape(message)}"):
        task.load(str(tmp_path / name), "train")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_marks_of_byte_order_and_wide_characters_are_read(encoding, name, tmp_path):
    text = '{"problem": "é?", "answer": "1"}\r\n'
    (tmp_path / name).write_bytes(text.encode(encoding) + text.encode(encoding) * (name == "a.jsonl"))
    items = math.load(tmp_path / name, "train")
    assert items[-1]["messages"][0]["content"].startswith("é?") and len(items) == 1 + (name == "a.jsonl")


SIXTY = {  # of each task 60 rows as a file has them, and how many of each category are in a subset of 8
    kk: ([row_of_puzzle(item) for item in kk.generate(60, "3-5", seed=7)], {"3": 3, "4": 3, "5": 2}),
    countdown: ([item["answer"] for item in countdown.generate(60, "3-4", seed=7)], {"3": 4, "4": 4}),
    math: ([{"problem": f"{i:03}?", "answer": i} for i in range(60)], {"sixty": 8}),
    hitab: ([{"question": f"{i:03}?", "answer": i, "table": "| a |"} for i in range(60)], {"other": 8}),
}


@each_task
def test_a_subset_of_a_file_is_balanced_and_seeded_and_keeps_the_order(task, tmp_path):
    rows, categories = SIXTY[task]
    path = write_rows(tmp_path / "sixty.jsonl", rows)
    everything = task.load(path, "train")
    for suffix in (".json", ".parquet"):
        assert task.load(write_rows(path.with_suffix(suffix), rows), "train") == everything
    first, again, other = (task.load(path, "train", size=8, seed=seed) for seed in (0, 0, 1))
    assert first == again != other and collections.Counter(item["category"] for item in first) == categories
    assert len(everything) == 60 == len(task.load(path, "train", size=100))
    if task in (math, hitab):
        assert [item for item in everything if item in first] == first != everything[:8]


def test_a_folder_keeps_train_and_test_apart(tmp_path):
    for name in ("a.json", "b_test.jsonl", "train_c.parquet", "latest.json"):
        write_rows(tmp_path / name, [{"problem": name, "answer": 1}])
    (tmp_path / "README.md").write_text("not data")

    def categories(split):
        return [item["category"] for item in math.load(str(tmp_path), split)]

    assert categories("test") == ["a", "b_test", "latest"]
    assert categories("train") == ["train_c"]
    (tmp_path / "train_c.parquet").unlink()
    assert categories("train") == ["a", "latest"]
    (tmp_path / "a.json").unlink()
    (tmp_path / "latest.json").unlink()
    with pytest.raises(ValueError, match=r"holds no .* file for train"):
        math.load(tmp_path, "train")


def tables():
    """60 tables with two questions each."""
    rows = []
    for i in range(60):
        table = {"texts": [["", "n"], ["x", str(i)]], "top_header_rows_num": 1, "left_header_columns_num": 1}
        rows += [{"question": f"{word} {i}?", "answer": [str(i)], "table": table} for word in ("one", "two")]
    return rows


PUZZLES = [item["answer"] for split in ("train", "test") for item in countdown.generate(100, split=split)]
ON_THE_HUB = [  # task, rows, how it reads a file of them, the split of what it reads
    (countdown, PUZZLES, countdown.read_rows, lambda puzzle: countdown.split_of(*puzzle)),
    (hitab, tables(), hitab.read_source, lambda item: hitab.split_of(table_of(item))),
]


@pytest.mark.parametrize("task, rows, read_rows, split_of", ON_THE_HUB)
def test_data_sets_of_the_hub_with_one_part_and_with_two(task, rows, read_rows, split_of, tmp_path, monkeypatch):
    """The hub's own code, which takes a folder for a data set."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    every = read_rows(str(write_rows(tmp_path / "one/train.jsonl", rows)), "train")
    write_rows(tmp_path / "two/train.jsonl", rows)
    write_rows(tmp_path / "two/test.jsonl", rows[:7])
    assert [task.read_hub(f"{tmp_path}/two", split) for split in ("train", "test")] == [every, every[:7]]
    for split in ("train", "test"):
        of_split = [row for row in every if split_of(row) == split]
        assert task.read_hub(f"{tmp_path}/one", split) == of_split and of_split


@each_task
def test_a_data_set_that_cannot_be_loaded_is_named(task, monkeypatch):
    def load_dataset(*_, trust_remote_code):
        assert not trust_remote_code
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"(?s)some/thing.*no network.*path of a file or folder"):
        task.load("some/thing", "train")


def sums(first, last):
    return [
        {"nums": [i, i + 1, 50], "target": 51 - 2 * i, "problem": f"{i}?", "answer": "1"} for i in range(first, last)
    ]


@pytest.mark.parametrize("task", [math, countdown, kk])
def test_a_folder_of_save_to_disk_is_read_by_its_split(task, tmp_path):
    rows = [row_of_puzzle(item) for item in kk.generate(9, "2", seed=3)] if task is kk else sums(1, 10)
    options = {"people": "2"} if task is kk else {}
    data = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(train=data.select(range(6)), test=data.select(range(6, 9))).save_to_disk(tmp_path / "both")
    assert [len(task.load(str(tmp_path / "both"), split, **options)) for split in ("train", "test")] == [6, 3]
    data.save_to_disk(tmp_path / "one")
    assert 0 < len(task.load(str(tmp_path / "one"), "train", **options)) <= 9
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"cut")
    with pytest.raises(ValueError, match="one, a folder of save_to_disk, could not be read"):
        task.load(str(tmp_path / "one"), "train", **options)


def test_a_folder_of_save_to_disk_with_tables(tmp_path):
    table = {"texts": [["", "n"], ["all", "5"]], "top_header_rows_num": 1, "left_header_columns_num": 1}
    rows = [{"question": f"What is n + {i}?", "answer": 5 + i, "table": table} for i in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    assert sum(len(hitab.load(str(tmp_path), split)) for split in ("train", "test")) == 3  # one table, in one of both

"""What the tasks share, in rewards/rows.py and rewards/puzzles.py: files, folders, the hub, and puzzles by a seed."""

import collections
import json
import os
import re

import pytest
import test_countdown
import test_kk
from conftest import python, write_rows

from rewards import countdown, hitab, kk, math

each_task = pytest.mark.parametrize("task", [kk, math, countdown, hitab], ids=lambda task: task.__name__)
each_generator = pytest.mark.parametrize("task", [kk, countdown, hitab], ids=lambda task: task.__name__)


# ---------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize(
    "task, response, right, wrong",
    [
        (kk, "hm</think><answer>Ann is a knight</answer>", {"Ann": True}, {"Ann": False}),
        (countdown, "<answer>1 + 2</answer>", {"nums": [1, 2], "target": 3}, {"nums": [1, 2], "target": 4}),
        (hitab, "<answer>north</answer>", ["north"], ["south"]),
    ],
)
def test_each_response_is_scored_with_its_answer(task, response, right, wrong):
    scores = task.score_all([response, response, ""], [right, wrong, wrong])
    assert scores == [task.score(response, right), task.score(response, wrong), task.score("", wrong)]
    assert [score["correct"] for score in scores] == [True, False, False]
    assert task.score_all([], []) == []


@pytest.mark.parametrize("task", [countdown, hitab])
def test_too_few_answers_are_refused(task):
    with pytest.raises(ValueError):
        task.score_all(["", ""], [[]])


# ------------------------------------------------------------------------------------------------------- generators


@each_generator
def test_the_same_problems_in_another_process_and_with_a_smaller_size(task):
    made = task.generate(40, seed=5)
    assert made == task.generate(40, seed=5) and made[:9] == task.generate(9, seed=5)
    assert made != task.generate(40, seed=6) and made != task.generate(40, seed=5, split="test")
    module = task.__name__.rpartition(".")[2]
    program = f"import json; from rewards import {module}; print(json.dumps({module}.generate(40, seed=5)))"
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = python("-c", program, env=env)
    assert done.stdout == json.dumps(made) + "\n"


@pytest.mark.parametrize(
    "task, settings, of_each_kind",
    [
        (countdown, {"numbers": "3-4"}, dict.fromkeys("34", 512)),
        (hitab, {}, dict.fromkeys(hitab.KINDS, 256)),
    ],
)
def test_generated_is_the_default(task, settings, of_each_kind):
    assert task.load(None, "train", size=5, seed=2) == task.generate(5, seed=2, split="train", **settings)
    assert collections.Counter(item["category"] for item in task.load(None, "test")) == of_each_kind


@each_task
def test_bad_arguments(task):
    with pytest.raises(ValueError, match="split must be train or test, not 'dev'"):
        task.load(None, "dev")
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="size must be at least 1"):
            task.load(None, "train", size=wrong)


@each_generator
def test_bad_arguments_of_a_generator(task):
    with pytest.raises(ValueError, match="split must be train or test, not 'dev'"):
        task.generate(5, split="dev")
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"number of (puzzles|questions) must be at least 1"):
            task.generate(wrong)


@pytest.mark.parametrize(
    "text, want",
    [("3-7", [3, 4, 5, 6, 7]), ("3,2", [2, 3]), ("5", [5]), ("2-3, 8", [2, 3, 8]), (" 3 - 6 ", [3, 4, 5, 6])],
)
def test_numbers_of_people(text, want):
    assert kk.parse_people(text) == want


@pytest.mark.parametrize("text", ["", "1", "9", "7-3", "3-", "a", "3-7-8", "2,,3", "10", "３", "-3"])
def test_numbers_of_people_that_are_refused(text):
    with pytest.raises(ValueError, match="people must be like 3-7"):
        kk.load(None, "train", text)


def test_countdown_has_3_to_6_numbers():
    assert countdown.parse_numbers("3-6") == [3, 4, 5, 6]
    for text in ("2", "7"):
        with pytest.raises(ValueError, match="numbers must be like 3-4"):
            countdown.load(None, "train", numbers=text)


# ------------------------------------------------------------------------------------------------ files and folders


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
    (kk, "a.json", '[{"quiz": "?"}, null]', "row 2: expected an object"),
    (kk, "a.json", '{"quiz": "?"}\n{"quiz": "?"}\nnull', "row 3: expected an object"),  # a row in each line
    (kk, "a.json", '{"quiz": null}', "lacks the columns names, solution, statements; it has quiz"),
    (kk, "a.json", '{"problem": "?", "answer": "1"}', "--task math takes such a file"),
    (kk, "a.jsonl", '{"quiz": "?"}\n\nnull', "row 2: expected an object"),
    (kk, "a.jsonl", "{}\n{", "row 2 could not be read"),
    (kk, "a.jsonl", "\n", "holds no rows"),
    (math, "a.json", "[null]", "row 1: no problem"),
    (countdown, "a.json", "[null]", "row 1: expected an object with nums, target, not None"),
    (countdown, "a.json", '[{"nums": [1, 2, 3], "target": 6}, {}]', "row 2: nums must be a list"),
    (countdown, "a.json", '{"numbers": [1, 2, 3], "target": 6}', "lacks the columns nums; it has numbers, target"),
    (hitab, "a.json", "[null]", "row 1: expected an object with question, answer, not None"),
    (hitab, "a.json", '{"question": "q", "gold": 6}', "lacks the columns answer; it has question, gold"),
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


each_puzzle = pytest.mark.parametrize(
    "task, rows_for_file, counts",
    [(kk, test_kk.rows_for_file, {"people": "2-4"}), (countdown, test_countdown.rows_for_file, {"numbers": "3-5"})],
)


@each_puzzle
def test_a_subset_of_a_file_is_balanced_and_seeded(task, rows_for_file, counts, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows_for_file(60))
    first, again, other = (task.load(path, "train", size=8, seed=seed, **counts) for seed in (0, 0, 1))
    assert first == again != other
    of_each = collections.Counter(item["category"] for item in first)
    assert [of_each[kind] for kind in sorted(of_each)] == [3, 3, 2]
    assert len(task.load(path, "train", size=100, **counts)) == 60


@each_puzzle
def test_a_folder_keeps_train_and_test_apart(task, rows_for_file, counts, tmp_path):
    rows = rows_for_file()
    train = write_rows(tmp_path / "train_a.jsonl", rows[:6])
    test = write_rows(tmp_path / "test_a.parquet", rows[6:])
    (tmp_path / "README.md").write_text("not data")
    assert task.load(tmp_path, "train", **counts) == task.load(train, "train", **counts)
    assert task.load(str(tmp_path), "test", **counts) == task.load(test, "test", **counts)
    train.unlink()
    with pytest.raises(ValueError, match=r"holds no .* file for train"):
        task.load(tmp_path, "train")


# ---------------------------------------------------------------------------------------------------------- the hub


def puzzles():
    """100 puzzles of each split."""
    items = countdown.generate(100, split="train") + countdown.generate(100, split="test")
    return [item["answer"] for item in items]


def tables():
    """60 tables with two questions each."""
    rows = []
    for i in range(60):
        table = {"texts": [["", "n"], ["x", str(i)]], "top_header_rows_num": 1, "left_header_columns_num": 1}
        for word in ("one", "two"):
            rows.append({"question": f"{word} {i}?", "answer": [str(i)], "table_content": repr(table)})
    return rows


def split_of_item(item):
    return hitab.split_of(item["messages"][-1]["content"].split("\n\nQuestion: ")[0])


READ_HUB = """
import json, sys
from rewards import {module} as task
one, two = ([task.read_hub(f"{folder}/{{name}}", split) for split in ("train", "test")] for name in ("one", "two"))
try:
    task.load("some/thing", "train")
except ValueError as error:
    print(json.dumps([one, two, str(error)]))
"""


@pytest.mark.parametrize(
    "module, rows, read_rows, split_of",
    [
        ("countdown", puzzles(), countdown.read_rows, lambda row: countdown.split_of(*row)),
        ("hitab", tables(), hitab.read_source, split_of_item),
    ],
)
def test_data_sets_of_the_hub_with_one_part_and_with_two(module, rows, read_rows, split_of, tmp_path):
    """The hub's own code, without a network: it takes a folder for a data set, and it knows no other."""
    write_rows(tmp_path / "one/train.jsonl", rows)
    write_rows(tmp_path / "two/train.jsonl", rows)
    write_rows(tmp_path / "two/test.jsonl", rows[:7])
    program = READ_HUB.format(module=module, folder=tmp_path)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = python("-c", program, env=env)
    assert done.returncode == 0, done.stderr
    (train, test), (whole, seven), error = json.loads(done.stdout.splitlines()[-1])
    every = json.loads(json.dumps(read_rows(str(tmp_path / "one/train.jsonl"), "train")))  # tuples become lists
    assert whole == every and seven == every[:7]
    assert train == [row for row in every if split_of(row) == "train"] and train
    assert test == [row for row in every if split_of(row) == "test"] and test
    assert "some/thing" in error and "path of a file or folder" in error

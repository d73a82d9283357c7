"""HiTab: tables as Markdown to the letter, the rule by hand-worked cases, the loader, and the generator by a solver."""

import collections
import itertools
import json
import re
import zipfile
from fractions import Fraction

import pytest
from conftest import check_linear_time, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import hitab, hitab_sheets

RIGHT = {"reward": 1.0, "correct": True, "format": True, "timed_out": False}
WRONG = {"reward": 0.0, "correct": False, "format": True, "timed_out": False}
MALFORMED = {"reward": 0.0, "correct": False, "format": False, "timed_out": False}


def score(content, *golds):
    return hitab.score(f"hm</think><answer>{content}</answer>", list(golds))


# ---------------------------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize(
    "content, golds",
    [
        # numbers
        ("12", [12]), ("12", [12.0]), ("12.0", [12]), (" 12. ", [12]), ("+12", [12]), ("012", [12]), (".5", [0.5]),
        ("-12", [-12]), ("−12", [-12]), ("–12", [-12]), ("- 12", [-12]), ("1e3", [1000]), ("1.5E-3", [0.0015]),
        ("12", ["12"]), ("2019", ["2019"]), ("0", [0]), ("-0.0", [0]), ("12.5", [12.50]), ("**12**", [12]),
        # thousands separators
        ("1,234", [1234]), ("1,234,567.8", [1234567.8]), ("-1,234", [-1234]), ("1{,}234", [1234]), (r"1,\!234", [1234]),
        ("$15,144,253", [15144253.0]), ("1,234 m/s", ["1,234 m/s"]),
        # units, which are dropped
        ("12.5%", [12.5]), ("12.5 %", [12.5]), (r"12.5\%", [12.5]), (r"12.5\,\%", [12.5]), ("12.5 percent", [12.5]),
        ("$12.50", [12.5]), ("12.50 $", [12.5]), ("€ 12.5", [12.5]), ("-$5", [-5]), ("$-5", [-5]), ("£5", [5]),
        ("12 million", [12]), ("12 million dollars", [12]), ("12 million Canadian dollars.", [12]), ("5km/h", [5]),
        (r"12\text{ million}", [12]), (r"12.5\ \text{percent}", [12.5]), ("12.5 percentage points", [12.5]),
        ("326", ["326 days"]), ("326 days", [326]), ("14th", [14]), ("5 m²", [5]), ("12.5", ["12.5%"]),
        # Unicode
        ("１２", [12]), ("‑12", [-12]), ("12％", [12]), ("12\u200b", [12]), ("cafe\u0301", ["café"]), ("½", [0.5]),
        ("3½", [3.5]), ("60°", [60]), ("5 m^2", ["5 m²"]), ("１，２３４", [1234]), ("x²", ["x^2"]), ("∞", [r"\infty"]),
        ("（12）", [12]), ("12、7", [7, 12]), ("12，7", [7, 12]), ("2013‑14", ["2013–14"]), ("⅓", [0.333333]),
        ("1\u202f234", [1234]), ("H₂O", ["H_2O"]), ("2√3", [r"2\sqrt{3}"]), ("20 °C", [20]), ("12\xa0%", [12]),
        # LaTeX and lists in brackets
        (r"\(12\)", [12]), (r"\[12\]", [12]), ("$12$", [12]), ("[12]", [12]), ("(12)", [12]), (r"\mathbf{12}", [12]),
        # nearly equal
        ("0.3288657", [0.328866]), ("0.1234564", [0.123456]), ("0.33333333333", [0.333333]),
        ("6435825.3333333", [6435825.333333]),
        # several answers, in any order
        ("12, 7", [12, 7]), ("7, 12", [12, 7]), ("7;12", [12, 7]), ("7\n12", [12, 7]), ("7 and 12", [12, 7]),
        ("1, 2, and 3", [3, 2, 1]), ("1,234, 5", [5, 1234]), ("5, 1,234", [5, 1234]), ("41,42", [41, 42]),
        ("100,200", [200, 100]),
        ("[16.3, 12.3]", [16.3, 12.3]), ("16.3%; 12.3%", [12.3, 16.3]), ("2, 2", [2, 2]), ("1,234,5", [1234, 5]),
        ("a; b; 3", ["b", 3, "a"]), ('["north", "south"]', ["south", "north"]), ("2013,2014", ["2013", "2014"]),
        # texts
        ("North", ["north"]), ("NORTH  shore", ["north shore"]), ("north\tshore.", ["north shore"]), ("`men`", ["men"]),
        ('"North"', ["north"]), ("“north”", ["north"]), ("'north'", ["north"]), ("the ‘north’!", ["the 'north'"]),
        ("bachelor’s degree", ["bachelor's degree"]), (r"\text{North}", ["north"]),
        (r"\text{ North } shore", ["north shore"]),
        ("2013–14", ["2013-14"]), ("15-24", ["15-24"]), ("65+", ["65+"]), ("192.1 overs", ["(192.1 overs)"]),
        (r"research \& development", ["research & development"]), ("STRASSE", ["straße"]), ("**North**", ["north"]),
        # labels with separators in them
        ("San Jose, CA", ["san jose, ca"]), ("austin, tx; san jose, ca", ["san jose, ca", "austin, tx"]),
        ("65 and over", ["65 and over"]), ("oil and gas, and utilities", ["oil and gas, and utilities"]),
    ],
)  # fmt: skip
def test_right_answers(content, golds):
    assert score(content, *golds) == RIGHT


@pytest.mark.parametrize(
    "content, golds",
    [
        ("6435826", [6435825]), ("1000000.5", [1000000]), ("0.0000004", [0]), ("6435826", [6435825.5]),
        ("0.1234567", [0.123456]),
        ("13", [12]), ("12", [-12]), ("-12", [12]), ("12.0001", [12]), ("1.2", [12]), ("120", [12]), ("21", [12]),
        ("0.125", [12.5]), ("12.5%", [0.125]), ("12.5", [0.125]), ("1250", [12.5]),  # percent
        ("12,000,000", ["12 million"]), ("12 million", [12000000]), ("12 thousand", [12000]),  # a unit never multiplies
        ("twelve", [12]), ("12 or 13", [12]), ("12 to 13", [12]), ("12/1", [12]), ("6 + 6", [12]), ("x = 12", [12]),
        ("about 12", [12]), ("the answer is 12", [12]), ("12 is not the answer", [12]), ("1 2", [12]),
        ("12,5", [12.5]), ("1.234", [1234]), ("1234,567", [1234567]), ("1,23,456", [123456]),  # other ways to write it
        ("١٢", [12]), ("¹²", [12]), ("12²", [12]), ("3½", [15.5]), ("x²", ["x2"]), ("XII", [12]), ("0xc", [12]),
        ("inf", [12]), ("nan", [12]), ("1e999999999", [12]), ("-1e999999999", [12]), ("1e-999999999", [12]),
        ("9" * 400, [12]), ("1e309", [1e299]),
        ("12", [12, 7]), ("12, 7, 7", [12, 7]), ("12, 8", [12, 7]), ("12, 12", [12, 7]), ("12 7", [12, 7]),
        ("12, 7", [12]), ("12, north", [12]), ("2", [2, 2]), ("2, 2", [2]),
        ("south", ["north"]), ("north", ["north shore"]), ("north shore", ["north"]), ("north, south", ["north"]),
        ("north", ["north", "south"]), ("north or south", ["north"]), ("n o r t h", ["north"]), ("65", ["65 and over"]),
        ("men", ["women"]), ("women", ["men"]), ("not men", ["men"]), ("2013", ["2013-14"]), ("15", ["15-24"]),
    ],
)  # fmt: skip
def test_wrong_answers(content, golds):
    assert score(content, *golds) == WRONG


@pytest.mark.parametrize("content", ["", " ", ".", "()", ", ; and", "\n\n", '""', "$", r"\text{}", "*" * 9, "x" * 1001])
def test_malformed_answers(content):
    assert score(content, 12) == MALFORMED


@pytest.mark.parametrize(
    "text, want",
    [  # answers in tags alone are in test_rewards.py
        (r"\boxed{12", MALFORMED), (r"\boxed{}", MALFORMED), (r"\boxed{12}", RIGHT), (r"so \boxed {12}.", RIGHT),
        (r"\boxed{7} \boxed{12}", RIGHT), (r"\boxed{12} \boxed{7}", WRONG), (r"\boxed{\text{12}}", RIGHT),
        (r"\boxed{\boxed{12}}", RIGHT), (r"<answer>12</answer> \boxed{7", RIGHT),
        # whichever begins last
        (r"\boxed{12} <answer>7</answer>", WRONG), (r"\boxed{7} <answer>12</answer>", RIGHT),
        (r"<answer>12</answer> \boxed{7}", WRONG), (r"<answer>7</answer> \boxed{12}", RIGHT),
        (r"<answer>It is \boxed{12}.</answer>", RIGHT), (r"<answer>\boxed{12} million</answer>", RIGHT),
        (r"<answer>\boxed{12</answer>}", WRONG),  # the box closes behind the block
    ],
)  # fmt: skip
def test_the_answer_that_begins_last_counts(text, want):
    assert hitab.score(text, [12]) == want


@pytest.mark.parametrize(
    "content, golds",
    [  # so that nobody is surprised
        ("12 apples", [12]), ("$12", [12]),  # any unit is taken, even a wrong one
        ("12 or thirteen", [12]), ("12 is not right", [12]),  # up to three words behind a number are taken for its unit
        ("2", ["2nd"]), ("2nd", [2]),  # an ordinal is its number
        ("tx, san jose; ca, austin", ["san jose, ca", "austin, tx"]),  # the parts of labels with commas may be mixed
        ("7; 12", [12, 7]),  # parts have no order, not even those asked for respectively
    ],
)  # fmt: skip
def test_a_known_hole(content, golds):
    assert score(content, *golds) == RIGHT


LONG = hitab.MAX_LENGTH
FULL = {  # answers of the greatest length that is read
    "digits": "9" * LONG,
    "groups of digits": "1,234" * (LONG // 5),
    "a fraction": "0." + "0" * (LONG - 3) + "1",
    "an exponent": "1e" + "9" * (LONG - 2),
    "words behind a number": "1 " + "a" * (LONG - 2),
    "short words behind a number": "1" + " a" * (LONG // 2 - 1),
    "signs behind a number": "1 a" + "./-'" * (LONG // 4 - 1),
    "blanks": "1" + " " * (LONG - 2) + "1",
    "parts": "1,a;" * (LONG // 4),
    "quotes": "'" * (LONG - 1) + "x",
    "open braces": r"\text{" * (LONG // 6),
    "surrogates": "\ud800" * LONG,
    "letters that grow": "\u0130\ufb03" * (LONG // 2),
}


@pytest.mark.parametrize("name", FULL)
def test_the_longest_answers_are_read_in_proportion_to_their_length(name):
    text = FULL[name]
    assert LONG - 6 <= len(text) <= LONG and score(text, 12) == WRONG
    check_linear_time(lambda part: score(part, 12), lambda size: text[: size * LONG // 1000])


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_every_known_answer_equals_itself(data):
    kinds = st.sampled_from(["men", 3, 2.5, "3 to 5", "12%", 1e-7, 1e22, "a, b and c", "5 (r)"])
    golds = data.draw(st.lists(kinds | st.integers(-9999, 9999) | st.floats(-99, 99), min_size=1, max_size=4))
    shown = [f"{gold:,}" if isinstance(gold, int) else str(gold) for gold in data.draw(st.permutations(golds))]
    assert score(data.draw(st.sampled_from(["; ", "\n", " and "])).join(shown), *golds) == RIGHT


# ----------------------------------------------------------------------------------------------------------- tables

# A table with merged headers on both sides; only the first cell of a merged region has its text.
MERGED = {
    "title": "Sales  of two\nyears",
    "texts": [
        ["shop", "", "2019", "", "", "2020"],
        ["", "", "North", "", "South", ""],
        ["food", "bread", "1", "2", "3", "4"],
        ["", "fish", "5", "6", "7", "8"],
        ["total", "", "6", "8", "10", "12"],
    ],
    "merged_regions": [
        {"first_row": 0, "last_row": 1, "first_column": 0, "last_column": 1},
        {"first_row": 0, "last_row": 0, "first_column": 2, "last_column": 4},
        {"first_row": 1, "last_row": 1, "first_column": 2, "last_column": 3},
        {"first_row": 0, "last_row": 1, "first_column": 5, "last_column": 5},
        {"first_row": 2, "last_row": 3, "first_column": 0, "last_column": 0},
        {"first_row": 4, "last_row": 4, "first_column": 0, "last_column": 1},
    ],
    "top_header_rows_num": 2,
    "left_header_columns_num": 2,
}
MERGED_SHOWN = """\
Sales of two years

| shop | 2019 / North | 2019 / North | 2019 / South | 2020 |
|---|---|---|---|---|
| food / bread | 1 | 2 | 3 | 4 |
| food / fish | 5 | 6 | 7 | 8 |
| total | 6 | 8 | 10 | 12 |"""


def node(row, column, *children):
    return {"row_index": row, "column_index": column, "children": list(children)}


# As in the release: the levels of the left header are rows of one column, a unit stands among the values and is a node
# of the left tree, and top_header_rows_num is one more than the rows of the top header.
TREES = {
    "title": "employment of men and women",
    "texts": [
        ["region", "east", "", "west", ""],
        ["", "2011", "2016", "2011", "2016"],
        ["", "percent", "", "", ""],
        ["men", "", "", "", ""],
        ["full-time", "70.1", "71", "72", "73"],
        ["part-time", "29.9", "29", "28", "27"],
        ["women", "50", "51", "52", "53"],
        ["full-time", "60", "61", "62", "63"],
    ],
    "merged_regions": [
        {"first_row": 0, "last_row": 0, "first_column": 1, "last_column": 2},
        {"first_row": 0, "last_row": 0, "first_column": 3, "last_column": 4},
        {"first_row": 2, "last_row": 2, "first_column": 1, "last_column": 4},
    ],
    "top_root": node(-1, -1, node(0, 1, node(1, 1), node(1, 2)), node(0, 3, node(1, 3), node(1, 4))),
    "left_root": node(
        -1, -1, node(2, 1, node(3, 0, node(4, 0), node(5, 0)), node(6, 0, node(7, 0)))
    ),
    "top_header_rows_num": 3,
    "left_header_columns_num": 1,
}  # fmt: skip
TREES_SHOWN = """\
employment of men and women

| region | east / 2011 | east / 2016 | west / 2011 | west / 2016 |
|---|---|---|---|---|
| percent / men / full-time | 70.1 | 71 | 72 | 73 |
| percent / men / part-time | 29.9 | 29 | 28 | 27 |
| percent / women | 50 | 51 | 52 | 53 |
| percent / women / full-time | 60 | 61 | 62 | 63 |"""


ONE_HEADER = {"top_header_rows_num": 1, "left_header_columns_num": 1}


REGION = {"first_row": 0, "last_row": 0, "first_column": 2, "last_column": 4}
# A group in the first column, its members in the second, the first of them in the group's own row.
IN_COLUMNS = node(-1, -1, node(2, 0, node(2, 1), node(3, 1)), node(4, 0))
# The release has a few tables whose range was not found exactly: regions and nodes outside of the table.
OUTSIDE = {
    "left_root": TREES["left_root"]
    | {"children": [*TREES["left_root"]["children"], node(8, 0, node(9, 0)), node(3, 9)]},
    "merged_regions": [
        *TREES["merged_regions"],
        REGION | {"first_row": 8, "last_row": 9},
        REGION | {"first_column": 5},
    ],
}
SHOWN = {  # a table → as it is shown
    "merged headers": (MERGED, MERGED_SHOWN),
    "headers in trees": (TREES, TREES_SHOWN),
    "a tree gives the levels that no region gives": (TREES | {"merged_regions": []}, TREES_SHOWN),
    "trees and columns of headers": (MERGED | {"left_root": IN_COLUMNS, "top_header_rows_num": 3}, MERGED_SHOWN),
    "outside": (TREES | OUTSIDE, TREES_SHOWN),
    "values of a merged cell; a heading without a tree": (
        {
            "texts": [["", "a", "b"], ["2019", "", ""], ["x", 1.5, None], ["y", "", 2]],
            "merged_regions": [
                {"first_row": 1, "last_row": 1, "first_column": 0, "last_column": 2},  # begins in a header, stays in it
                {"first_row": 2, "last_row": 3, "first_column": 1, "last_column": 1},
            ],
        } | ONE_HEADER,
        "|  | a | b |\n|---|---|---|\n| 2019 |  |  |\n| x | 1.5 |  |\n| y | 1.5 | 2 |",
    ),
    "short rows, bars and line breaks": (
        {"texts": [["a|b", "c\nd"], ["x"], [], ["y", " 1 ", "2"]]} | ONE_HEADER,
        "| a\\|b | c d |  |\n|---|---|---|\n| x |  |  |\n|  |  |  |\n| y | 1 | 2 |",
    ),
    "no headers": (
        {"texts": [["1", "2"], ["3", "4"]], "top_header_rows_num": 0, "left_header_columns_num": 0},
        "|  |  |  |\n|---|---|---|\n|  | 1 | 2 |\n|  | 3 | 4 |",
    ),
    "a label that repeats its group": (
        {"texts": [["", "n"], ["total", "1"], ["total", "2"]], "left_root": node(-1, -1, node(1, 0, node(2, 0)))}
        | ONE_HEADER,
        "|  | n |\n|---|---|\n| total | 1 |\n| total / total | 2 |",
    ),
}  # fmt: skip


@pytest.mark.parametrize("table, shown", SHOWN.values(), ids=SHOWN)
def test_tables_as_they_are_shown(table, shown):
    assert hitab.markdown(table) == shown


BROKEN_TABLES = {  # message: changes of the table
    "the table must have `texts`": [
        {"texts": None}, {"texts": []}, {"texts": "a"}, {"texts": [[]]}, {"texts": ["ab", "cd"]}, {"texts": {"a": 1}},
    ],
    "a cell of the table must be a text": [{"texts": [["a", []], ["b", "1"]]}, {"texts": [["a", {}], ["b", "1"]]}],
    "title must be a text": [{"title": 5}, {"title": ["a"]}],
    "top_header_rows_num must be a whole number from 0 to 4": [
        {"top_header_rows_num": value} for value in (None, -1, 5, 10**9, "2", 2.0, True)
    ],
    "left_header_columns_num must be a whole number from 0 to 5": [{"left_header_columns_num": 6}],
    "merged_regions must be a list": [{"merged_regions": {"first_row": 0}}, {"merged_regions": "a"}],
    "a merged region of the table must have": [
        {"merged_regions": [value]} for value in (None, [], {}, {"first_row": 0}, REGION | {"last_row": -1})
    ],
    "a node of the table's left_root must have": [
        {"left_root": value} for value in ([1], "a", {"children": []}, node(-1, -1, None), node(2, 0) | {"children": 1})
    ],
    "no rows below its headers": [
        {
            "texts": [["a", "b"], ["x", ""], ["y", ""]], "merged_regions": [], "left_header_columns_num": 1,
            "left_root": node(1, 0, node(2, 0, node(1, 1))),
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN_TABLES)
def test_broken_tables_are_refused(message):
    for change in BROKEN_TABLES[message]:
        with pytest.raises(ValueError, match=message):
            hitab.markdown(MERGED | change)


def test_huge_regions_and_deep_trees_take_no_time():
    region = {"first_row": 0, "last_row": 10**12, "first_column": 0, "last_column": 10**12}
    shown = hitab.markdown(MERGED | {"merged_regions": [region]}).splitlines()
    assert shown[2] == "| shop | 2019 / North |  | South | 2020 |" and shown[4] == "| food / bread | 1 | 2 | 3 | 4 |"
    tree = node(2, 0)
    for _ in range(900):
        tree = node(2, 0, tree)
    assert hitab.markdown(MERGED | {"left_root": tree}) == MERGED_SHOWN
    with pytest.raises(ValueError, match="must have `texts`"):
        hitab.markdown(["texts"])


# ----------------------------------------------------------------------------------------------------------- loader

TABLES = {"m-1": MERGED, "100": TREES, "unused": {"texts": 0}}
ROWS = [
    {"id": "a", "table_id": "m-1", "question": "how many breads in 2020?", "answer": [4.0], "aggregation": ["none"]},
    {"id": "b", "table_id": "100", "question": "who?", "answer": ["men"], "aggregation": ["sum", "pair-argmax"]},
    {"id": "c", "table_id": "100", "question": "by how much?", "answer": [1, "x"], "aggregation": ["diff", "opposite"]},
    {"id": "d", "table_id": "m-1", "question": ["in", "total?"], "answer": 36, "aggregation": ["opposite"]},
    {"id": "e", "table_id": "100", "question": "the average?", "answer": "51.5", "aggregation": ["average"]},
]
WANTED = [  # (table, question, answer, category) of these rows
    (MERGED_SHOWN, "how many breads in 2020?", [4.0], "lookup"),
    (TREES_SHOWN, "who?", ["men"], "comparison"),
    (TREES_SHOWN, "by how much?", [1, "x"], "difference"),
    (MERGED_SHOWN, "in total?", [36], "lookup"),
    (TREES_SHOWN, "the average?", ["51.5"], "other"),
]


def release(folder, rows=ROWS, tables=TABLES, zipped=False):
    """A folder in the release's layout, its training samples the first two rows."""
    write_rows(folder / "train_samples.jsonl", rows[:2])
    write_rows(folder / "dev_samples.jsonl", [])
    write_rows(folder / "test_samples.jsonl", rows)
    write_rows(folder / "test_samples_qualitycheck.jsonl", [])
    if zipped:
        with zipfile.ZipFile(folder / "tables.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, table in tables.items():
                archive.writestr(f"tables/raw/{name}.json", json.dumps(table))
                archive.writestr(f"tables/hmt/{name}.json", "another form")
                archive.writestr(f"__MACOSX/tables/raw/._{name}.json", "nothing")
    for name, table in {} if zipped else tables.items():
        write_rows(folder / "tables/raw" / f"{name}.json", table)
        write_rows(folder / "tables/hmt" / f"{name}.json", "another form")
    return folder


def in_short(items):
    """(table, question, answer, category) of each item."""
    found = []
    for item in items:
        table, question = item["messages"][-1]["content"].split("\n\nQuestion: ")
        found.append((table, question, item["answer"], item["category"]))
    return found


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", [".", "data"])
def test_the_release_is_loaded(tmp_path, place, zipped):
    release(tmp_path / place, zipped=zipped)
    assert in_short(hitab.load(tmp_path, "test")) == WANTED
    assert in_short(hitab.load(str(tmp_path), "train")) == WANTED[:2]
    assert in_short(hitab.load(tmp_path / place / "test_samples.jsonl", "train")) == WANTED


def test_prompt_shows_the_layout_and_true_answers():
    item = hitab.make_item("| a |", "how many?", [7, 12.5], "lookup")
    system, user = item["messages"]
    assert (system["role"], user["role"], item["prefix"]) == ("system", "user", "<think>")
    assert user["content"] == "| a |\n\nQuestion: how many?" and item["answer"] == [7, 12.5]
    assert hitab.score(system["content"], [7, 12.5]) == RIGHT


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_tables_within_the_rows(tmp_path, suffix):
    rows = [{"question": "q", "answer": ["4"], "table_content": json.dumps(MERGED)}]
    rows.append({"question": "q", "answer": ["5"], "table_content": repr(TREES)})
    rows.append({"question": "q", "answer": ["6"], "table_content": " | a |\n|---| "})
    found = in_short(hitab.load(write_rows(tmp_path / f"a{suffix}", rows), "train"))
    assert [table for table, *_ in found] == [MERGED_SHOWN, TREES_SHOWN, "| a |\n|---|"]
    assert [answer for _, _, answer, _ in found] == [["4"], ["5"], ["6"]] and found[0][-1] == "other"
    rows = [{"question": "q", "answer": ["4"], "table": MERGED, "aggregation": "none"}]
    found = in_short(hitab.load(write_rows(tmp_path / f"b{suffix}", rows), "train"))
    assert found == [(MERGED_SHOWN, "q", ["4"], "lookup")]
    rows = [{"question": "q", "answer": "['a, b', 4]", "aggregation": "['sum']"} | MERGED]
    found = in_short(hitab.load(write_rows(tmp_path / f"c{suffix}", rows), "train"))
    assert found == [(MERGED_SHOWN, "q", ["a, b", 4], "sum")]


def test_no_table_id_leads_out_of_the_folder(tmp_path):
    folder = release(tmp_path / "hitab")
    write_rows(tmp_path / "hitab/secret.json", MERGED)
    write_rows(tmp_path / "secret.json", MERGED)
    absolute = str(tmp_path / "secret")
    for name in ("../secret", "../../secret", "../../../secret", absolute, "../raw/m-1", "./m-1", "m-1.json", "m-1/"):
        write_rows(folder / "test_samples.jsonl", [ROWS[0], ROWS[1] | {"table_id": name}])
        with pytest.raises(ValueError, match=rf"test_samples\.jsonl, row 2: there is no table '{re.escape(name)}'"):
            hitab.load(folder, "test")
    zipped = release(tmp_path / "zipped", zipped=True)
    with zipfile.ZipFile(zipped / "tables.zip", "a") as archive:
        archive.writestr("../../raw/evil.json", json.dumps(MERGED))
    before = sorted(tmp_path.rglob("*"))
    write_rows(zipped / "test_samples.jsonl", [ROWS[0] | {"table_id": "evil"}])
    assert in_short(hitab.load(zipped, "test"))[0][0] == MERGED_SHOWN  # read, and written nowhere
    assert sorted(tmp_path.rglob("*")) == before


BROKEN = {
    "question is empty or not a text: None": {"question": None},
    "question is empty or not a text: ' '": {"question": " "},
    "answer must be a number, a text or a list of those, not None": {"answer": None},
    r"answer must be a number, a text or a list of those, not \[True\]": {"answer": [True]},
    r"answer must be a number, a text or a list of those, not \[nan\]": {"answer": [float("nan")]},
    "answer is empty or has more than 1000 characters": {"answer": []},
    "answer is empty or has more than 1000 characters ?": {"answer": ["", "..."]},
    "answer is empty or has more than 1000 characters  ?": {"answer": "x" * 1001},
    r"answer is neither JSON nor a Python literal: '\[1'": {"answer": "[1"},
    "there is no table 'none' in tables/raw or tables.zip": {"table_id": "none"},
    "the row has no table; it needs table_id, table, table_content or texts": {"table_id": None},
    "a text holds '.+', which is no character": {"question": "\ud800"},
    "table 'unused' could not be read: the table must have `texts`": {"table_id": "unused"},
    "table 'broken' could not be read: Expecting": {"table_id": "broken"},
    "table 'binary' could not be read: 'utf-8'": {"table_id": "binary"},
    "table 'nested' could not be read: maximum recursion": {"table_id": "nested"},
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_rows_are_named(tmp_path, message):
    folder = release(tmp_path, [ROWS[0], ROWS[1] | BROKEN[message], ROWS[2]])
    (folder / "tables/raw/broken.json").write_text("{")
    (folder / "tables/raw/binary.json").write_bytes(b"\xff\xff\xff")
    (folder / "tables/raw/nested.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=rf"test_samples\.jsonl, row 2: .*{message.strip(' ?')}"):
        hitab.load(folder, "test")


@pytest.mark.parametrize(
    "table, says", [("{a", "the table is neither JSON nor a Python literal: '{a'"), ({"rows": []}, "must have `texts`")]
)
def test_a_table_in_a_row_that_cannot_be_read_is_named(tmp_path, table, says):
    with pytest.raises(ValueError, match=rf"a\.jsonl, row 1: .*{says}"):
        hitab.load(write_rows(tmp_path / "a.jsonl", [{"question": "q", "answer": 5, "table": table}]), "train")
    with pytest.raises(ValueError, match=r"holds no test_samples\.jsonl, and neither does .*data"):
        hitab.load(tmp_path, "test")


@pytest.mark.parametrize("content", [b"no archive", b"", b"PK\x05\x06", None])
def test_a_damaged_archive_is_named(tmp_path, content):
    folder = release(tmp_path, zipped=True)
    if content is None:
        changed = bytearray((folder / "tables.zip").read_bytes())
        changed[60] ^= 0xFF  # within the first table's compressed text
    (folder / "tables.zip").write_bytes(changed if content is None else content)
    with pytest.raises(ValueError, match=r"could not be read"):
        hitab.load(folder, "test")


# -------------------------------------------------------------------------------------------------------- generator


def read_prompt(item):
    """(labels of the rows, of the columns, {(row, column): value}, question), worked out from the prompt alone."""
    table, question = item["messages"][-1]["content"].split("\n\nQuestion: ")
    _, _, header, rule, *lines = table.splitlines()
    assert set(rule) == {"|", "-"}
    columns = [tuple(cell.strip().split(" / ")) for cell in header.strip("|").split("|")[1:]]
    rows, values = [], {}
    for line in lines:
        label, *cells = line.strip("|").split("|")
        rows.append(tuple(label.strip().split(" / ")))
        for column, cell in zip(columns, cells, strict=True):
            values[rows[-1], column] = Fraction(cell.strip().replace(",", ""))
    assert len(set(rows)) == len(rows) and len(set(columns)) == len(columns)
    return rows, columns, values, question


def named(question, phrases):
    """The keys of {key: phrases} of which a phrase stands in the question, in the question's order."""
    places = {}
    for key, some in phrases.items():
        places.update({question.index(phrase): key for phrase in some if phrase in question})
    return [places[place] for place in sorted(places)]


def solve(item):
    """The answer, from the numbers that the table shows and the words of the question."""
    rows, columns, values, question = read_prompt(item)
    rows = [row for row in rows if "total" not in row]  # what they add up is taken from the others
    columns = [column for column in columns if "total" not in column]
    ways = ["in {1} ({0})", "for {1} ({0})", "for {1} at {0}", "for {1} by {0}", "among {0} aged {1}"]
    my_rows = named(question, {row: [way.format(*row) for way in ways] for row in rows})
    my_columns = named(question, {column: [f"{column[1]} of {column[0]}"] for column in columns})
    if found := re.search(r"within (.+) had the (highest|lowest)", question):
        of_group = {row[1]: values[row, my_columns[0]] for row in rows if row[0] == found[1]}
        ranked = sorted(of_group, key=of_group.get, reverse=found[2] == "highest")
        return ranked[: 2 if question.startswith("Which two") else 1]
    if found := re.search(r"^Which \w+ as a whole had the (higher|lower)", question):
        groups = collections.Counter()
        for row in rows:
            groups[row[0]] += values[row, my_columns[0]]
        return [sorted(groups, key=groups.get)[-1 if found[1] == "higher" else 0]]
    if found := re.search(r"^Looking only at (\w+), in which .* (higher|lower)\?$", question):
        times = {column[0]: values[my_rows[0], column] for column in columns if column[1] == found[1]}
        return [sorted(times, key=times.get)[-1 if found[2] == "higher" else 0]]
    if "A fall is a negative number" in question:
        before, after = (values[my_rows[0], column] for column in my_columns)
        return [after - before]
    if re.search("[Hh]ow much (higher|lower) was", question):
        first, second = (values[row, my_columns[0]] for row in my_rows)
        assert (first > second) == ("higher" in question)
        return [abs(first - second)]
    if ", and what in" in question:
        return [values[my_rows[0], column] for column in my_columns]
    groups = {row[0] for row in rows if f" {row[0]} as a whole" in question}
    my_rows = my_rows or [row for row in rows if row[0] in groups]
    times = {column[0] for column in columns if f"over the whole of {column[0]}?" in question}
    my_columns = my_columns or [column for column in columns if column[0] in times]
    assert my_rows and my_columns, question
    return [sum(values[row, column] for row in my_rows for column in my_columns)]


@pytest.mark.parametrize("split, n", [("train", 3000), ("test", 800)])
def test_a_solver_of_its_own_finds_the_answers(split, n):
    items = hitab.generate(n, seed=3, split=split)
    assert collections.Counter(item["category"] for item in items) == dict.fromkeys(hitab.KINDS, n // 4)
    assert [item["category"] for item in items[:4]] == hitab.KINDS
    openings, several, labels = collections.Counter(), 0, 0
    for item in items:
        found, answer = solve(item), item["answer"]
        exact = [gold if isinstance(gold, str) else Fraction(str(gold)) for gold in answer]
        assert found == exact, item
        assert all(type(gold) in (int, float, str) for gold in answer)
        several, labels = several + (len(answer) > 1), labels + isinstance(answer[0], str)
        text = "; ".join(map(str, answer))
        assert hitab.score(f"so</think> <answer> {text} </answer>", answer) == RIGHT
        question = item["messages"][-1]["content"].split("\n\nQuestion: ")[1]
        openings[item["category"], " ".join(question.split()[:2])] += 1
    assert several > n / 40 and labels == n / 4
    assert all(sum(kind == key[0] for key in openings) >= 3 for kind in hitab.KINDS)
    assert len({item["messages"][-1]["content"] for item in items}) == n


def test_totals_add_up():
    seen = collections.Counter()
    for item in hitab.generate(400, seed=1):
        rows, columns, values, _ = read_prompt(item)
        seen[("total",) in rows, ("total",) in columns] += 1
        members = [[row for row in rows if "total" not in row], [column for column in columns if "total" not in column]]
        for line in itertools.product(rows, columns):
            parts = []
            for label, plain in zip(line, members):
                if label == ("total",):
                    parts.append(plain)
                else:
                    parts.append([one for one in plain if one[0] == label[0] and label[1] in (one[1], "total")])
            assert values[line] == sum(values[part] for part in itertools.product(*parts))
        assert all(len(label) == 2 for label in members[0] + members[1])  # two levels on each side
    assert min(seen[True, False], seen[False, True], seen[False, False]) > 40


def test_splits_never_share_a_table(monkeypatch):
    """Ranges and labels so small that the seeds meet the same tables again and again."""
    monkeypatch.setattr(hitab_sheets, "RANGES", dict.fromkeys(hitab_sheets.RANGES, (1, 2)))
    monkeypatch.setattr(hitab_sheets, "SHAPES", [(1, 1, False, False)])
    monkeypatch.setattr(hitab_sheets, "THINGS", hitab_sheets.THINGS[-2:-1])
    monkeypatch.setattr(hitab_sheets, "TIMES", hitab_sheets.TIMES[-1:])
    splits = {"train": collections.Counter(), "test": collections.Counter()}
    for split, found in splits.items():
        for seed in range(4):
            items = hitab.generate(400 if split == "train" else 100, seed, split)
            tables = [item["messages"][-1]["content"].split("\n\nQuestion: ")[0] for item in items]
            found.update({table.split("\n", 1)[1] for table in tables})  # without the title
    assert not splits["train"].keys() & splits["test"].keys()
    assert min(max(found.values()) for found in splits.values()) > 1

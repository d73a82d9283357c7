"""HiTab: tables as Markdown to the letter, the rule by hand-worked cases, the loader, and the generator by a solver."""

import collections
import itertools
import json
import re
import zipfile
from fractions import Fraction

import pytest
from conftest import MALFORMED, RIGHT, WRONG, check_linear_time, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import hitab


def score(content, *golds):
    return hitab.score(f"hm</think><answer>{content}</answer>", list(golds))


def answers(text):
    """Those between the bars; ⏎ stands for a new line, ⇥ for a tab."""
    return text.replace("⏎", "\n").replace("⇥", "\t").split(" | ")


# Golds, and answers that are right. A unit is dropped; several answers have no order.
RIGHT_NUMBERS = [
    ([12], r"12 | 12.0 |   12.   | +12 | 012 | **12** | \(12\) | \[12\] | $12$ | [12] | (12) | \mathbf{12} | １２"),
    ([12], r"12 million | 12 million Canadian dollars. | 12\text{ million} | （12）"),
    ([12], "12％ | 12\u200b | 12\xa0%"),
    ([12], "12 apples | $12 | 12 or thirteen | 12 is not right"),  # holes: any unit, and any three words for a unit
    ([-12], "-12 | −12 | –12 | - 12 | ‑12"), ([1000], "1e3"), ([0.0015], "1.5E-3"), ([0], "0 | -0.0"), (["12"], "12"),
    ([1234], r"1,234 | 1{,}234 | 1,\!234 | １，２３４"), ([1234], "1\u202f234"), ([-1234], "-1,234"),
    ([1234567.8], "1,234,567.8"), ([15144253.0], "$15,144,253"), (["1,234 m/s"], "1,234 m/s"), (["2019"], "2019"),
    ([12.5], r"12.5% | 12.5\% | 12.5\,\% | 12.5 percent | 12.5 percentage points | 12.5\ \text{percent}"),
    ([12.5], "$12.50 | 12.50 $ | € 12.5"), ([-5], "-$5 | $-5"), ([5], "£5 | 5km/h | 5 m²"), (["5 m²"], "5 m^2"),
    ([2], "2nd"), (["2nd"], "2"), (["326 days"], "326"), ([326], "326 days"), (["12.5%"], "12.5"), ([20], "20 °C"),
    ([0.5], "½ | .5"), ([3.5], "3½"), ([0.333333], "⅓ | 0.33333333333"), ([0.123456], "0.1234564"), ([60], "60°"),
    ([0.328866], "0.3288657"), ([6435825.333333], "6435825.3333333"),
    ([12, 7], "12, 7 | 7, 12 | 7; 12 | 7;12 | 7⏎12 | 7 and 12 | 12、7 | 12，7"), ([3, 2, 1], "1, 2, and 3"),
    ([5, 1234], "1,234, 5 | 5, 1,234 | 1,234,5"), ([41, 42], "41,42"), ([200, 100], "100,200"), ([2, 2], "2, 2"),
    ([12.3, 16.3], "[16.3, 12.3] | 16.3%; 12.3%"), (["b", 3, "a"], "a; b; 3"), (["2013", "2014"], "2013,2014"),
    (["south", "north"], '["north", "south"]'), (["san jose, ca", "austin, tx"], "austin, tx; san jose, ca"),
    (["san jose, ca", "austin, tx"], "tx, san jose; ca, austin"),  # a hole: parts of labels with commas may be mixed
]  # fmt: skip
RIGHT_TEXTS = r"""north → North | north shore → NORTH  shore | north shore → north⇥shore. | men → `men`
    north → "North" | north → “north” | north → 'north' | the 'north' → the ‘north’! | men's degree → men’s degree
    north → \text{North} | north shore → \text{ North } shore | 2013-14 → 2013–14 | 2013–14 → 2013‑14 | 15-24 → 15-24
    65+ → 65+ | (192.1 overs) → 192.1 overs | research & development → research \& development | straße → STRASSE
    north → **North** | san jose, ca → San Jose, CA | 65 and over → 65 and over | x^2 → x² | \infty → ∞ | H_2O → H₂O
    oil and gas, and utilities → oil and gas, and utilities | 2\sqrt{3} → 2√3 | café → cafe{acute}"""


def test_right_answers():
    wrong = [(golds, text) for golds, texts in RIGHT_NUMBERS for text in answers(texts) if score(text, *golds) != RIGHT]
    pairs = [pair.strip().split(" → ") for line in RIGHT_TEXTS.splitlines() for pair in answers(line)]
    wrong += [(gold, text) for gold, text in pairs if score(text.replace("{acute}", "\u0301"), gold) != RIGHT]
    assert wrong == []


WRONG_ANSWERS = [  # a unit never multiplies, and a percentage is no share
    ([12], "13 | -12 | 12.0001 | 1.2 | 120 | 21 | twelve | 12 or 13 | 12 to 13 | 6 + 6 | x = 12 | about 12 | 1 2"),
    ([12], "the answer is 12 | 12 is not the answer | ١٢ | ¹² | 12² | XII | 0xc | inf | nan | 12, 7 | 12, north"),
    ([12], "1e999999999 | -1e999999999 | 1e-999999999"), ([12], "9" * 400), ([1e299], "1e309"), ([-12], "12"),
    ([6435825], "6435826"), ([1000000], "1000000.5"), ([0], "0.0000004"), ([6435825.5], "6435826"),
    ([0.123456], "0.1234567"), ([12.5], "0.125 | 1250 | 12,5"), ([0.125], "12.5% | 12.5"), ([12000], "12 thousand"),
    (["12 million"], "12,000,000"), ([12000000], "12 million"), ([1234], "1.234"), ([1234567], "1234,567"),
    ([123456], "1,23,456"), ([15.5], "3½"), (["x2"], "x²"),
    ([12, 7], "12 | 12, 7, 7 | 12, 8 | 12, 12 | 12 7"), ([2, 2], "2"), ([2], "2, 2"), (["north shore"], "north"),
    (["north"], "south | north shore | north, south | north or south | n o r t h"), (["north", "south"], "north"),
    (["65 and over"], "65"), (["women"], "men"), (["men"], "women | not men"), (["2013-14"], "2013"), (["15-24"], "15"),
]  # fmt: skip


def test_wrong_answers():
    wrong = [(golds, text) for golds, texts in WRONG_ANSWERS for text in answers(texts) if score(text, *golds) != WRONG]
    assert wrong == []


@pytest.mark.parametrize("content", ["", " ", ".", "()", ", ; and", "\n\n", '""', "$", r"\text{}", "*" * 9, "x" * 1001])
def test_malformed_answers(content):
    assert score(content, 12) == MALFORMED


IN_BOXES = [  # answers in tags alone are in test_rewards.py; of several, the one that begins last counts
    (MALFORMED, r"\boxed{12 | \boxed{}"),
    (RIGHT, r"\boxed{12} | so \boxed {12}. | \boxed{7} \boxed{12} | \boxed{\text{12}} | \boxed{\boxed{12}}"),
    (RIGHT, r"<answer>12</answer> \boxed{7 | \boxed{7} <answer>12</answer> | <answer>7</answer> \boxed{12}"),
    (RIGHT, r"<answer>It is \boxed{12}.</answer> | <answer>\boxed{12} million</answer>"),
    (WRONG, r"\boxed{12} \boxed{7} | \boxed{12} <answer>7</answer> | <answer>12</answer> \boxed{7}"),
    (WRONG, r"<answer>\boxed{12</answer>}"),  # the box closes behind the block
]


def test_the_answer_that_begins_last_counts():
    assert [text for want, texts in IN_BOXES for text in answers(texts) if hitab.score(text, [12]) != want] == []


FULL = [  # an answer's beginning, what is repeated, its end
    ("", "9", ""), ("", "1,234", ""), ("0.", "0", "1"), ("1e", "9", ""), ("1 ", "a", ""), ("1", " a", ""),
    ("1 a", "./-'", ""), ("1", " ", "1"), ("", "1,a;", ""), ("", "'", "x"), ("", r"\text{", ""), ("", "\ud800", ""),
    ("", "\u0130\ufb03", ""),  # letters that grow
]  # fmt: skip


@pytest.mark.parametrize("start, part, end", FULL)
def test_the_longest_answers_are_read_in_proportion_to_their_length(start, part, end):
    longest = hitab.MAX_LENGTH
    text = start + part * ((longest - len(start + end)) // len(part)) + end
    assert longest - 6 <= len(text) <= longest and score(text, 12) == WRONG
    check_linear_time(lambda part: score(part, 12), lambda size: text[: size * longest // 1000])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_every_known_answer_equals_itself(data):
    kinds = st.sampled_from(["men", 3, 2.5, "3 to 5", "12%", 1e-7, 1e22, "a, b and c", "5 (r)"])
    golds = data.draw(st.lists(kinds | st.integers(-9999, 9999) | st.floats(-99, 99), min_size=1, max_size=4))
    shown = [f"{gold:,}" if isinstance(gold, int) else str(gold) for gold in data.draw(st.permutations(golds))]
    assert score(data.draw(st.sampled_from(["; ", "\n", " and "])).join(shown), *golds) == RIGHT


def region(*corners):
    return dict(zip(("first_row", "last_row", "first_column", "last_column"), corners, strict=True))


# A table with merged headers on both sides; only the first cell of a merged region has its text.
MERGED = {
    "title": "Sales  of two\nyears",
    "texts": [
        ["shop", "", "2019", "", "", "2020"], ["", "", "North", "", "South", ""], ["food", "bread", "1", "2", "3", "4"],
        ["", "fish", "5", "6", "7", "8"], ["total", "", "6", "8", "10", "12"],
    ],
    "merged_regions": [
        region(0, 1, 0, 1), region(0, 0, 2, 4), region(1, 1, 2, 3), region(0, 1, 5, 5), region(2, 3, 0, 0),
        region(4, 4, 0, 1),
    ],
    "top_header_rows_num": 2,
    "left_header_columns_num": 2,
}  # fmt: skip
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
        ["region", "east", "", "west", ""], ["", "2011", "2016", "2011", "2016"], ["", "percent", "", "", ""],
        ["men", "", "", "", ""], ["full-time", "70.1", "71", "72", "73"], ["part-time", "29.9", "29", "28", "27"],
        ["women", "50", "51", "52", "53"], ["full-time", "60", "61", "62", "63"],
    ],
    "merged_regions": [region(0, 0, 1, 2), region(0, 0, 3, 4), region(2, 2, 1, 4)],
    "top_root": node(-1, -1, node(0, 1, node(1, 1), node(1, 2)), node(0, 3, node(1, 3), node(1, 4))),
    "left_root": node(-1, -1, node(2, 1, node(3, 0, node(4, 0), node(5, 0)), node(6, 0, node(7, 0)))),
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
# A group in the first column, its members in the second, the first of them in the group's own row.
IN_COLUMNS = node(-1, -1, node(2, 0, node(2, 1), node(3, 1)), node(4, 0))
# The release has a few tables whose range was not found exactly: regions and nodes outside of the table.
OUTSIDE = {
    "left_root": node(-1, -1, *TREES["left_root"]["children"], node(8, 0, node(9, 0)), node(3, 9)),
    "merged_regions": [*TREES["merged_regions"], region(8, 9, 2, 4), region(0, 0, 5, 4)],
}
SHOWN = [  # a table, and as it is shown
    (MERGED, MERGED_SHOWN),
    (TREES, TREES_SHOWN),
    (TREES | {"merged_regions": []}, TREES_SHOWN),  # a tree gives the levels that no region gives
    (MERGED | {"left_root": IN_COLUMNS, "top_header_rows_num": 3}, MERGED_SHOWN),
    (TREES | OUTSIDE, TREES_SHOWN),
    (  # values of a merged cell, and a heading without a tree: its region begins in a header and stays in it
        {"texts": [["", "a", "b"], ["2019", "", ""], ["x", 1.5, None], ["y", "", 2]]}
        | ONE_HEADER | {"merged_regions": [region(1, 1, 0, 2), region(2, 3, 1, 1)]},
        "|  | a | b |\n|---|---|---|\n| 2019 |  |  |\n| x | 1.5 |  |\n| y | 1.5 | 2 |",
    ),
    (  # short rows, bars and line breaks
        {"texts": [["a|b", "c\nd"], ["x"], [], ["y", " 1 ", "2"]]} | ONE_HEADER,
        "| a\\|b | c d |  |\n|---|---|---|\n| x |  |  |\n|  |  |  |\n| y | 1 | 2 |",
    ),
    (
        {"texts": [["1", "2"], ["3", "4"]], "top_header_rows_num": 0, "left_header_columns_num": 0},
        "|  |  |  |\n|---|---|---|\n|  | 1 | 2 |\n|  | 3 | 4 |",
    ),
    (  # a label that repeats its group
        {"texts": [["", "n"], ["total", "1"], ["total", "2"]], "left_root": node(-1, -1, node(1, 0, node(2, 0)))}
        | ONE_HEADER, "|  | n |\n|---|---|\n| total | 1 |\n| total / total | 2 |",
    ),
]  # fmt: skip


@pytest.mark.parametrize("table, shown", SHOWN)
def test_tables_as_they_are_shown(table, shown):
    assert hitab.markdown(table) == shown


ONLY_HEADINGS = {
    "texts": [["a", "b"], ["x", ""], ["y", ""]], "left_root": node(1, 0, node(2, 0, node(1, 1))),
    "left_header_columns_num": 1, "merged_regions": [],
}  # fmt: skip
BROKEN_TABLES = [
    {"texts": None}, {"texts": ["ab", "cd"]}, {"texts": [[]]}, {"texts": [["a", {}], ["b", "1"]]}, {"title": 5},
    {"left_header_columns_num": 6}, ONLY_HEADINGS,
    *({"top_header_rows_num": value} for value in (None, -1, 5, 10**9, "2", 2.0, True)),
    {"merged_regions": {"first_row": 0}}, {"merged_regions": [region(0, -1, 2, 4)]}, {"left_root": {"children": []}},
]  # fmt: skip


@pytest.mark.parametrize("change", BROKEN_TABLES)
def test_broken_tables_are_refused(change):
    with pytest.raises(ValueError, match="the table"):
        hitab.markdown(MERGED | change)


def test_huge_regions_and_deep_trees_take_no_time():
    shown = hitab.markdown(MERGED | {"merged_regions": [region(0, 10**12, 0, 10**12)]}).splitlines()
    assert shown[2] == "| shop | 2019 / North |  | South | 2020 |" and shown[4] == "| food / bread | 1 | 2 | 3 | 4 |"
    tree = node(2, 0)
    for _ in range(900):
        tree = node(2, 0, tree)
    assert hitab.markdown(MERGED | {"left_root": tree}) == MERGED_SHOWN
    with pytest.raises(ValueError, match="must have `texts`"):
        hitab.markdown(["texts"])


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


IN_ROWS = [  # a row's table and answer in all their forms, and as they are loaded
    ({"table_content": json.dumps(MERGED), "answer": ["4"]}, (MERGED_SHOWN, "q", ["4"], "other")),
    ({"table_content": repr(TREES), "answer": 4}, (TREES_SHOWN, "q", [4], "other")),
    ({"table_content": " | a |\n|---| ", "answer": "a"}, ("| a |\n|---|", "q", ["a"], "other")),
    ({"table": MERGED, "answer": ["4"], "aggregation": "diff"}, (MERGED_SHOWN, "q", ["4"], "difference")),
    (MERGED | {"answer": "['a, b', 4]", "aggregation": "['sum']"}, (MERGED_SHOWN, "q", ["a, b", 4], "sum")),
]


def test_tables_within_the_rows(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"question": "q"} | row for row, _ in IN_ROWS])
    assert in_short(hitab.load(path, "train")) == [item for _, item in IN_ROWS]


def test_no_table_id_leads_out_of_the_folder(tmp_path):
    folder = release(tmp_path / "hitab")
    write_rows(tmp_path / "hitab/secret.json", MERGED)
    for name in ("../../secret", str(tmp_path / "hitab/secret"), "../raw/m-1", "./m-1", "m-1.json"):
        write_rows(folder / "test_samples.jsonl", [ROWS[0], ROWS[1] | {"table_id": name}])
        with pytest.raises(ValueError, match=rf"test_samples\.jsonl, row 2: there is no table '{re.escape(name)}'"):
            hitab.load(folder, "test")


BROKEN = [  # what is said of a value
    ("question", "question is empty|a text holds '.+', which is no character", [None, " ", "\ud800"]),
    ("answer", "answer must be", [[True], [float("nan")]]),
    ("answer", "answer is empty or has more than 1000 characters", [[], ["", "..."], "x" * 1001]),
    ("answer", "neither JSON nor a Python literal", ["[1"]),
    ("table_id", "there is no table 'none'", ["none"]),
    ("table_id", "the row has no table", [None]),
    ("table_id", "table '(unused|broken|binary|nested)' could not be read", ["unused", "broken", "binary", "nested"]),
    ("table", "neither JSON nor a Python literal", ["{a"]),
    ("table", "must have `texts`", [{"rows": []}]),
]


@pytest.mark.parametrize("column, message, values", BROKEN)
def test_broken_rows_are_named(tmp_path, column, message, values):
    for value in values:
        row = ROWS[1] | ({"table_id": None} if column == "table" else {}) | {column: value}
        folder = release(tmp_path, [ROWS[0], row, ROWS[2]])
        (folder / "tables/raw/broken.json").write_text("{")
        (folder / "tables/raw/binary.json").write_bytes(b"\xff\xff\xff")
        (folder / "tables/raw/nested.json").write_text("[" * 100_000)
        with pytest.raises(ValueError, match=rf"test_samples\.jsonl, row 2: .*{message}"):
            hitab.load(folder, "test")


def test_a_folder_without_samples_and_a_damaged_archive_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no test_samples\.jsonl, and neither does .*data"):
        hitab.load(tmp_path, "test")
    archive = release(tmp_path, zipped=True) / "tables.zip"
    changed = bytearray(archive.read_bytes())
    changed[60] ^= 0xFF  # within the first table's compressed text
    for content in (changed, b"no archive"):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"tables\.zip could not be read"):
            hitab.load(tmp_path, "test")


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


def members(label, labels):
    """Those that a label adds up: itself, those of its group, or all."""
    plain = [one for one in labels if "total" not in one]
    assert all(len(one) == 2 for one in plain)  # two levels
    return [one for one in plain if label in (one, ("total",), (one[0], "total"))]


def solve(rows, columns, values, question):
    """The answer, from the numbers that the table shows and the words of the question."""
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


@pytest.mark.parametrize("split, n", [("train", 2000), ("test", 400)])
def test_a_solver_of_its_own_finds_the_answers(split, n):
    items = hitab.generate(n, seed=3, split=split)
    assert collections.Counter(item["category"] for item in items) == dict.fromkeys(hitab.KINDS, n // 4)
    assert [item["category"] for item in items[:4]] == hitab.KINDS
    openings, totals, several, labels = collections.Counter(), collections.Counter(), 0, 0
    for item in items:
        answer = item["answer"]
        rows, columns, values, question = read_prompt(item)
        totals[("total",) in rows, ("total",) in columns] += 1
        for row, column in values:
            parts = itertools.product(members(row, rows), members(column, columns))
            assert values[row, column] == sum(values[part] for part in parts)
        golds = [gold if isinstance(gold, str) else Fraction(str(gold)) for gold in answer]
        assert solve(rows, columns, values, question) == golds, item
        assert all(type(gold) in (int, float, str) for gold in answer)
        several, labels = several + (len(answer) > 1), labels + isinstance(answer[0], str)
        assert score("; ".join(map(str, answer)), *answer) == RIGHT
        openings[item["category"], " ".join(question.split()[:2])] += 1
    assert several > n / 40 and labels == n / 4
    assert min(totals[True, False], totals[False, True], totals[False, False]) > n / 10
    assert all(sum(kind == key[0] for key in openings) >= 3 for kind in hitab.KINDS)
    assert len({item["messages"][-1]["content"] for item in items}) == n

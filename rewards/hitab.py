r"""HiTab: questions about tables whose headers have several levels.

This file has the problems (from files, the hub or a generator), the tables as text, and the scoring rule.

HiTab (Cheng et al. 2022, "HiTab: A Hierarchical Table Dataset for Question Answering and Natural Language Generation")
asks for a number or a label of a statistical table: looked up, summed up, subtracted or compared. ACPO (Section 4.2,
Table 1b) trains Qwen2.5-3B and Qwen2.5-7B on it. The paper prints no prompt and no rule, so both are this project's
own. The data are at github.com/microsoft/HiTab, folder data, under their own licence (C-UDA 1.0); this repository
has none of them. Without files the tables and questions are generated, with headers of two levels on both sides.
"""

import ast
import json
import math
import random
import re
import zipfile
from pathlib import Path, PurePosixPath

from rewards import puzzles
from rewards.math import last_box
from rewards.rows import check_columns, check_split, check_text, files_of, hub_parts, read_file

KINDS = ["lookup", "sum", "difference", "comparison"]  # of questions
DEFAULT_SIZE = {"train": 10_000, "test": 1024}

SYSTEM = (
    "You are a helpful assistant. You first think about the problem inside <think> </think> tags and then give your "
    "answer inside <answer> </answer> tags, i.e., <think> reasoning process here </think><answer> answer here "
    "</answer>. The user gives you a table and a question about it. Slashes join the levels of the table's headers. "
    "The answer is a number, in the unit of the table, or a label of the table, and nothing else. Separate several "
    "answers with semicolons: <answer> 12.5; 7 </answer>."
)
PREFIX = "<think>"


# --------------------------------------------------------------------------------------------------------------------
# Scoring

MAX_LENGTH = 1000  # characters of an answer; HiTab's longest in dev and test has 235; this bounds the scoring time
ROUNDING = 5e-7  # of a known answer that is no whole number: HiTab rounds what it computed to six places

# Text that only formats an answer. Dashes become a minus, and currency signs and double quotes vanish.
SIGNS = str.maketrans({"−": "-", "–": "-", "—": "-", "’": "'", "‘": "'"} | dict.fromkeys('$€£¥"“”„«»'))
WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*+\{([^{}]*+)\}")
THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))+")  # 1,234 and 1,234,567
SEPARATORS = re.compile(r"[,;\n]|\band\b")
# A number, and after it a percent sign and at most three words, its unit. Possessive quantifiers never backtrack.
NUMBER = re.compile(
    r"([-+]?)\s*+([0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(e[-+]?[0-9]++)?+(?:\s*+%)?+(?:\s*+[a-z][a-z./²³'-]*+){0,3}+"
)


def score(response, answer):
    r"""Score one response: 1 if its answer equals the known one, otherwise 0.

    In: `response`, the model's text after the prompt; `answer`, the known answer, a list of numbers and texts.
    Out: a dict with `reward` (1.0 or 0.0), `correct` (the same as a bool), `format` (True if there is an answer that
    `read_answer` can read) and `timed_out` (always False). It never raises on any text and takes linear time.

    The answer is the last complete \boxed{...} or <answer>...</answer>, whichever begins last. Two answers are equal
    if they have the same numbers and the same texts, each as often, in any order. A known whole number must be met
    exactly, any other within HiTab's rounding.

    HiTab's release has its own rule (`hmt_score` in qa/table/utils.py). It differs in three things: its lists must be
    in the known order, its numbers may differ by up to five decimals (less than 1e-5), and it takes no $.
    """
    mine, theirs = read_answer(last_answer(response)), read_answer("\n".join(map(str, answer)))
    correct = mine is not None and theirs is not None and same(mine, theirs)
    return {"reward": float(correct), "correct": correct, "format": mine is not None, "timed_out": False}


def score_all(responses, answers):
    """`score` of each response with its answer, in order."""
    return [score(response, answer) for response, answer in zip(responses, answers, strict=True)]


def last_answer(text):
    r"""The content of the \boxed{...} or <answer>...</answer> that begins last, "" if neither is complete.

    So a box within the last answer block is the answer, and the words around the box don't count.
    """
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    box = last_box(text[max(start, 0) :])
    if box is not None:
        return box
    return "" if start < 0 else text[start + len("<answer>") : text.index("</answer>", start)]


def read_answer(text):
    r"""Read an answer's text: (its numbers, its texts), both sorted, or None if it is empty or too long.

    Commas, semicolons, line breaks and the word "and" separate the parts of an answer, both of the response's and of
    the known one: a label that itself has a comma counts as its parts. A comma with three digits behind it, as in
    1,234, belongs to a number.
    A part is a number if it is one in digits, perhaps with a unit behind it. Units are dropped: signs of currency, the
    percent sign, and at most three words. A unit never multiplies: 12.5%, $12.5 and 12.5 million are all 12.5; neither
    0.125 nor 12,500,000 is. Everything else is a text. Case, blanks, quotes, LaTeX's \text{...} and punctuation at
    the ends of a text don't matter.
    """
    text = text.strip()
    if not 0 < len(text) <= MAX_LENGTH:
        return None
    text = WRAPPED.sub(r" \1 ", text.translate(SIGNS)).replace("{,}", ",")
    text = re.sub(r"\\[()\[\]!]", "", text)  # LaTeX's \( \) \[ \] and \!, which join what is on both sides
    text = re.sub(r"\\[,;: ]", " ", text)  # LaTeX's blanks
    text = text.replace("\\", "").casefold()  # of \% and \&
    text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    numbers, texts = [], []
    for part in SEPARATORS.split(text):
        part = " ".join(part.split()).lstrip("\"'`*_([{:;,!? ").rstrip("\"'`*_)]}:;,!? .")
        value = number(part)
        if value is not None:
            numbers.append(value)
        elif part:
            texts.append(part)
    return (sorted(numbers), sorted(texts)) if numbers or texts else None


def number(text):
    """The number at the beginning of a text in lower case, if only its unit follows. None if not, or if infinite."""
    match = NUMBER.fullmatch(text)
    value = float(match[1] + match[2] + (match[3] or "")) if match else math.inf
    return value if math.isfinite(value) else None


def same(mine, theirs):
    """True if two answers as from `read_answer` are equal."""
    if len(mine[0]) != len(theirs[0]) or mine[1] != theirs[1]:
        return False
    pairs = zip(mine[0], theirs[0])  # both are sorted
    return all(a == b if b.is_integer() else abs(a - b) <= ROUNDING for a, b in pairs)


# --------------------------------------------------------------------------------------------------------------------
# Tables as text


def markdown(table):
    """A table in Markdown, with its title above and with one line of headers, in which slashes join the levels.

    In: a table in the layout of the release's tables/raw, a dict. It has
    - `texts`: its rows, lists of texts (or numbers, or None for a blank cell)
    - `title`: a text; may be missing
    - `merged_regions`: a list of {first_row, last_row, first_column, last_column}, counted from 0, the last included.
      Only the first cell of a region has its text. May be missing.
    - `top_header_rows_num`, `left_header_columns_num`: how many rows and columns are headers
    - `top_root`, `left_root`: the headers as trees of {row_index, column_index, children}; the root has -1. May be
      missing. The levels of a left header are often rows of one column, so that only the tree tells what belongs to
      what.
    Regions and nodes outside the table don't count.
    The trees decide how many rows and columns are headers if they are there: the first row in the left tree is the
    first one below the top headers. (The release's top_header_rows_num is one more than that.)
    A row of the tree that has only a heading for the rows below it is left out, because they have it in their headers.
    Errors: ValueError if the table has a different layout.
    """
    texts = read_texts(table)
    above = read_tree(table, "top_root", "column_index", texts)
    beside = read_tree(table, "left_root", "row_index", texts)
    n_top = min(beside) if beside else read_count(table, "top_header_rows_num", len(texts))
    n_left = min(above) if above else read_count(table, "left_header_columns_num", len(texts[0]))
    filled = fill_regions(table, texts, n_top, n_left)

    corner = [texts[row][column] for column in range(n_left) for row in range(n_top)]
    lines = [[" / ".join(filter(None, corner))]]
    for column in range(n_left, len(texts[0])):
        outside = [texts[i][j] for i, j in above.get(column, []) if j != column]
        cells = [(texts[row][column], filled[row][column]) for row in range(n_top)]
        lines[0].append(join_levels(outside, cells))
    headings = {i for row, path in beside.items() for i, _ in path if i != row}  # rows that other rows belong to
    for row in range(n_top, len(texts)):
        path = beside.get(row, [])
        values = [texts[row][column] for column in range(n_left, len(texts[0])) if (row, column) not in path]
        if row in headings and not any(values):
            continue
        outside = [texts[i][j] for i, j in path if i != row]
        cells = [(texts[row][column], filled[row][column]) for column in range(n_left)]
        lines.append([join_levels(outside, cells), *filled[row][n_left:]])
    if len(lines) == 1:
        raise ValueError("the table has no rows below its headers")

    title = table.get("title") or ""
    if not isinstance(title, str):
        raise ValueError(f"the table's title must be a text, not {title!r}")
    title = " ".join(title.split())
    written = [f"| {' | '.join(line)} |" for line in lines]
    written.insert(1, "|---" * len(lines[0]) + "|")
    return "\n".join([title, "", *written] if title else written)


def join_levels(outside, cells):
    """A header of one line, its levels joined. In: labels of other lines above it; (own text, filled text) of cells.

    A text that fills a merged cell is left out if it is a level already.
    """
    levels = [label for label in outside if label]
    for own, filled in cells:
        if own:
            levels.append(own)
        elif filled and filled not in levels:
            levels.append(filled)
    return " / ".join(levels)


def read_texts(table):
    """The table's cells as texts for Markdown, in rows of equal length."""
    rows = table.get("texts") if isinstance(table, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows) or not any(rows):
        raise ValueError("the table must have `texts`, a list of rows, each a list of texts")
    width = max(map(len, rows))
    texts = []
    for row in rows:
        texts.append([""] * width)
        for column, cell in enumerate(row):
            if cell is None:
                cell = ""
            elif isinstance(cell, (int, float)):
                cell = str(cell)
            elif not isinstance(cell, str):
                raise ValueError(f"a cell of the table must be a text, not {cell!r}")
            texts[-1][column] = " ".join(cell.split()).replace("|", r"\|")
    return texts


def read_count(table, name, below):
    """The table's number of header rows or columns. ValueError unless it is from 0 to less than `below`."""
    count = table.get(name)
    if type(count) is not int or not 0 <= count < below:
        raise ValueError(f"the table's {name} must be a whole number from 0 to {below - 1}, not {count!r}")
    return count


def read_tree(table, name, line, texts):
    """{line: path} of a header tree, {} if there is none.

    In: `line`, "row_index" or "column_index", of the lines to which the headers belong. `texts`: the table's cells.
    Out: for each line that has nodes, the (row, column) of the nodes down to its deepest one.
    """
    root = table.get(name)
    paths, waiting = {}, [(root, [])] if root else []
    while waiting:
        node, path = waiting.pop()
        if not isinstance(node, dict):
            node = {}
        row, column, children = node.get("row_index"), node.get("column_index"), node.get("children") or []
        if type(row) is not int or type(column) is not int or not isinstance(children, list):
            raise ValueError(f"a node of the table's {name} must have row_index, column_index and children")
        if 0 <= row < len(texts) and 0 <= column < len(texts[0]):  # not the root, nor outside the table
            path = [*path, (row, column)]
            if len(path) > len(paths.get(node[line], [])):
                paths[node[line]] = path
        waiting += [(child, path) for child in reversed(children)]
    return paths


def fill_regions(table, texts, n_top, n_left):
    """A copy of the texts in which each merged region has its text in all cells; one in the headers stays in them."""
    filled = [list(row) for row in texts]
    regions = table.get("merged_regions") or []
    if not isinstance(regions, list):
        raise ValueError(f"the table's merged_regions must be a list, not {regions!r}")
    names = ("first_row", "last_row", "first_column", "last_column")
    for region in regions:
        place = [region.get(name) for name in names] if isinstance(region, dict) else [None]
        if not all(type(index) is int and index >= 0 for index in place):
            raise ValueError(f"a merged region of the table must have {', '.join(names)}, not {region!r}")
        first_row, last_row, first_column, last_column = place
        end_row, end_column = min(last_row + 1, len(texts)), min(last_column + 1, len(texts[0]))
        if first_row < n_top:
            end_row = min(end_row, n_top)
        if first_column < n_left:
            end_column = min(end_column, n_left)
        for row in range(first_row, end_row):
            for column in range(first_column, end_column):
                filled[row][column] = filled[row][column] or texts[first_row][first_column]
    return filled


# --------------------------------------------------------------------------------------------------------------------
# Loading

SAMPLES = {"train": "train_samples.jsonl", "test": "test_samples.jsonl"}
# The last step of a row's `aggregation` tells the kind of its question. Steps that are missing here (div, average,
# counta) are of the kind "other".
STEPS = {
    "lookup": ["none"],
    "sum": ["sum"],
    "difference": ["diff", "range"],
    "comparison": [
        "argmax", "argmin", "pair-argmax", "pair-argmin", "topk-argmax", "topk-argmin", "kth-argmax", "kth-argmin",
        "max", "min", "greater_than", "less_than",
    ],
}  # fmt: skip
KIND_OF_STEP = {step: kind for kind, steps in STEPS.items() for step in steps}


def load(source, split, *, size=None, seed=0):
    """Questions as training or test items.

    In:
    - `source`: None (generated questions), a folder in the release's layout, one of its files of samples, or a hub id.
      The folder, or its folder data, has train_samples.jsonl and test_samples.jsonl, and the tables in tables/raw or
      tables.zip. The tables of a single file are searched for beside it.
      A .parquet, .json or .jsonl file and a hub data set may instead have the table in each row, in the column `table`
      or `table_content` (an object, or a text with it as JSON or as a Python literal; any other text is shown as it
      is), or as columns (`texts` and so on, see `markdown`). A hub data set without both a train and a test part is
      divided by its tables, in the same way as generated questions.
    - `split`: "train" or "test".
    - `size`: how many questions. None: 10,000 generated for train and 1,024 for test, or all questions of a source.
      If the source has more than `size`, `seed` draws them; they keep their order.
    Rows have `question`, `answer` (a number, a text or a list of those), `table_id` if the table is a file, and perhaps
    `aggregation` (the steps to the answer).
    Out: a list of dicts (see `make_item`). The category is the kind of question: one of KINDS, or "other".
    Errors: ValueError if the arguments, the files or a row are invalid; it names file and row (counted from 1).
    """
    check_split(split)
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, not {size}")
    if source is None:
        return generate(size or DEFAULT_SIZE[split], seed, split)
    items = read_source(str(source), split)
    if size is not None and size < len(items):
        items = [items[i] for i in sorted(random.Random(f"subset {seed}").sample(range(len(items)), size))]
    return items


def make_item(table, question, answer, category):
    """An item for the trainers: chat messages, prefix of the response, gold answer, category. `table`: its Markdown."""
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{table}\n\nQuestion: {question}"},
        ],
        "prefix": PREFIX,
        "answer": answer,
        "category": category,
    }


def read_source(source, split):
    """The items of the folder's samples for the split, of the file, or of the hub data set."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = samples_file(path, split)
    elif files_of(source, split) is None:
        return read_hub(source, split)
    rows = read_file(path)
    wanted = {str(row["table_id"]) for row in rows if isinstance(row, dict) and "table_id" in row}
    return [item for _, item in items_of(rows, str(path), read_tables(path.parent, wanted))]


def samples_file(folder, split):
    """The file of samples in the folder or its folder data. ValueError if there is none."""
    for place in (folder, folder / "data"):
        if (place / SAMPLES[split]).is_file():
            return place / SAMPLES[split]
    raise ValueError(f"{folder} holds no {SAMPLES[split]}, and neither does {folder / 'data'}")


def read_tables(folder, wanted):
    """{table id: the content of its file, bytes} of the wanted tables that lie in the folder's tables or tables.zip.

    An id is only compared with the names of the files that are there. So no id leads out of the folder.
    """
    for place in (folder / "tables" / "raw", folder / "tables"):
        files = sorted(place.glob("*.json"))
        if files:
            return {file.stem: file.read_bytes() for file in files if file.stem in wanted and file.is_file()}
    archive = folder / "tables.zip"
    if not archive.is_file():
        return {}
    tables = {}
    try:
        with zipfile.ZipFile(archive) as files:
            for entry in files.infolist():
                name = PurePosixPath(entry.filename)
                if name.suffix == ".json" and name.parent.name == "raw" and name.stem in wanted:
                    tables[name.stem] = files.read(entry)
    except Exception as error:  # damaged archives raise many classes: BadZipFile, zlib.error, EOFError, RuntimeError
        raise ValueError(f"{archive} could not be read: {error}") from error
    return tables


def read_hub(name, split):
    """Items of the data set's part for the split.

    If the data set does not have both parts, `split_of` selects the tables of the split from all parts.
    """
    parts = hub_parts(name)
    if {"train", "test"} <= set(parts):
        return [item for _, item in items_of(parts[split].to_list(), f"{name}/{split}", {})]
    items = []
    for part in parts:
        items += items_of(parts[part].to_list(), f"{name}/{part}", {})
    return [item for table, item in items if split_of(table) == split]


def items_of(rows, where, tables):
    """[(the table's Markdown, the item)] of the rows. `where`: the file or hub id; `tables`: as from `read_tables`."""
    check_columns(rows, ["question", "answer"], where)
    shown, items = {}, []  # shown: {table id: Markdown}
    for i, row in enumerate(rows, 1):
        try:
            question, answer, kind = question_of(row), answer_of(row), kind_of(row)
            name = str(row.get("table_id"))
            if name in tables and name not in shown:
                shown[name] = file_table(name, tables[name])
            table = shown[name] if name in tables else own_table(row)
        except ValueError as error:
            raise ValueError(f"{where}, row {i}: {error}") from error
        for text in [question, table, *map(str, answer)]:
            check_text(text, f"{where}, row {i}")
        items.append((table, make_item(table, question, answer, kind)))
    return items


def question_of(row):
    """The row's question. A few rows of the release have it as a list of texts."""
    question = row.get("question")
    words = question if isinstance(question, list) else [question]
    if not all(isinstance(word, str) for word in words) or not "".join(words).strip():
        raise ValueError(f"question is empty or not a text: {question!r}")
    return " ".join(words).strip()


def answer_of(row):
    """The row's answer as a list of numbers and texts."""
    golds = list_of(row, "answer")
    for gold in golds:
        is_number = type(gold) in (int, float) and abs(gold) < 1e300  # False for nan, too
        if not is_number and not isinstance(gold, str):
            raise ValueError(f"answer must be a number, a text or a list of those, not {row['answer']!r}")
    if read_answer("\n".join(map(str, golds))) is None:
        raise ValueError(f"answer is empty or has more than {MAX_LENGTH} characters")
    return golds


def kind_of(row):
    """The kind of question, from the last step of the row's `aggregation` that is not a change of sign."""
    steps = [step for step in map(str, list_of(row, "aggregation")) if step != "opposite"]
    last = steps[-1] if steps else "none"
    return KIND_OF_STEP.get(last, "other")


def list_of(row, column):
    """The list in a row's column. A single value is a list of one; a text may have the list as JSON or in Python."""
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = read_literal(value, column)
    return value if isinstance(value, list) else [value]


def own_table(row):
    """The Markdown of the table that a row itself has."""
    table = row.get("table") or row.get("table_content") or (row if row.get("texts") else None)
    if table is None and row.get("table_id") is not None:
        raise ValueError(f"there is no table {row['table_id']!r} in tables/raw or tables.zip beside the file")
    if table is None:
        raise ValueError("the row has no table; it needs table_id, table, table_content or texts")
    if isinstance(table, str) and table.lstrip().startswith("{"):
        table = read_literal(table, "the table")
    return table.strip() if isinstance(table, str) else markdown(table)


def file_table(name, content):
    """The Markdown of a table's file. In: its id and its bytes. ValueError, which names the table, if it is invalid."""
    try:
        return markdown(json.loads(content))
    except (ValueError, RecursionError) as error:  # the latter from lists within lists
        raise ValueError(f"table {name!r} could not be read: {error}") from error


def read_literal(text, what):
    """The object in a text, which is JSON or a Python literal. ValueError if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except Exception:  # literal_eval: ValueError, SyntaxError, TypeError, RecursionError, MemoryError
            continue
    raise ValueError(f"{what} is neither JSON nor a Python literal: {text[:100]!r}")


# --------------------------------------------------------------------------------------------------------------------
# Generating

# What the columns of a table are: the words for both levels, how a question names a column, labels of both levels.
TIMES = [
    {
        "levels": ("year", "quarter"),
        "name": "{lower} of {upper}",
        "uppers": ["2018", "2019", "2020", "2021", "2022", "2023"],
        "lowers": ["Q1", "Q2", "Q3", "Q4"],
    },
    {
        "levels": ("year", "season"),
        "name": "{lower} of {upper}",
        "uppers": ["2018", "2019", "2020", "2021", "2022", "2023"],
        "lowers": ["spring", "summer", "autumn", "winter"],
    },
    {
        "levels": ("year", "month"),
        "name": "{lower} of {upper}",
        "uppers": ["2020", "2021", "2022", "2023", "2024"],
        "lowers": ["March", "April", "May", "June", "July"],
    },
    {
        "levels": ("day", "time"),
        "name": "the {lower} of {upper}",
        "uppers": ["Monday", "Tuesday", "Wednesday", "Thursday"],
        "lowers": ["morning", "afternoon", "evening"],
    },
]
TOWNS = {
    "North": ["Aldby", "Corfield", "Marle", "Tarnby"],
    "South": ["Osker", "Rydale", "Velmore", "Windle"],
    "East": ["Brenby", "Haddow", "Lunden", "Skerrow"],
    "West": ["Calder", "Farrow", "Inmoor", "Pennick"],
}
GOODS = {
    "kitchen": ["kettles", "mixers", "ovens", "pans"],
    "garden": ["hoses", "mowers", "pots", "spades"],
    "office": ["desks", "lamps", "printers", "shelves"],
    "sports": ["balls", "bikes", "rackets", "skis"],
}
CLUBS = ["chess", "choir", "drama", "judo", "robotics"]
SCHOOLS = {"Elm School": CLUBS, "Hill School": CLUBS, "Lake School": CLUBS}
AGES = ["15-24", "25-44", "45-64", "65+"]
SEXES = {"women": AGES, "men": AGES}
FARES = ["adults", "children", "pensioners"]
VEHICLES = {"bus": FARES, "ferry": FARES, "train": FARES, "tram": FARES}
# What the rows are: the same, with the preposition in front of a row's name, what is counted, and the kind of numbers.
THINGS = [
    {
        "levels": ("region", "town"),
        "name": "{lower} ({upper})",
        "preposition": "in",
        "labels": TOWNS,
        "measures": ["number of visitors", "number of new homes", "number of bicycles sold"],
        "numbers": "whole",
    },
    {
        "levels": ("region", "town"),
        "name": "{lower} ({upper})",
        "preposition": "in",
        "labels": TOWNS,
        "measures": ["amount of waste in tonnes", "use of power in GWh", "rainfall in centimetres"],
        "numbers": "decimal",
    },
    {
        "levels": ("department", "product"),
        "name": "{lower} ({upper})",
        "preposition": "for",
        "labels": GOODS,
        "measures": ["revenue in euros", "cost in euros", "number of items in stock"],
        "numbers": "large",
    },
    {
        "levels": ("school", "club"),
        "name": "{lower} at {upper}",
        "preposition": "for",
        "labels": SCHOOLS,
        "measures": ["number of new members", "number of meetings"],
        "numbers": "small",
    },
    {
        "levels": ("sex", "age"),
        "name": "{upper} aged {lower}",
        "preposition": "among",
        "labels": SEXES,
        "measures": ["number of volunteers", "number of patients"],
        "numbers": "large",
    },
    {
        "levels": ("vehicle", "fare"),
        "name": "{lower} by {upper}",
        "preposition": "for",
        "labels": VEHICLES,
        "measures": ["number of tickets", "number of journeys"],
        "numbers": "whole",
    },
]
RANGES = {"small": (3, 60), "whole": (20, 999), "large": (500, 9999), "decimal": (11, 999)}  # decimal: in tenths
# Rows in each of two groups, columns in each of two groups, whether the table has totals of rows, and of columns. More
# would make prompts of more than 900 tokens with kk_tiny's tokenizer, which has a token for almost every letter.
SHAPES = [
    (2, 2, False, False),
    (2, 2, True, False),
    (2, 2, False, True),
    (3, 2, False, False),
    (2, 3, False, False),
]


def generate(n, seed=0, split="train"):
    """Make `n` different questions, each about a table of its own.

    In:
    - `n`: how many questions. There are equally many (or one more) of each of KINDS.
    - `split`: "train" or "test". `split_of` assigns each table to one split, so the splits never share a table,
      whatever their seeds.
    Out: items as from `load`, in which the kinds take turns. The headers of the tables have two levels on both sides.
    Totals, where a table has them, add up. The same arguments give the same questions on any machine. A smaller `n`
    gives the first of them.
    Errors: ValueError if the arguments are invalid.
    """
    check_split(split)
    if n < 1:
        raise ValueError(f"the number of questions must be at least 1, not {n}")
    return puzzles.take_turns(generate_kind(share, kind, seed, split) for kind, share in puzzles.shares(n, KINDS))


def generate_kind(how_many, kind, seed, split):
    """`how_many` questions of one kind, about different tables."""
    rng = random.Random(f"hitab {seed} {split} {kind}")
    ask = {"lookup": ask_lookup, "sum": ask_sum, "difference": ask_difference, "comparison": ask_comparison}[kind]
    items, seen = [], set()
    while len(items) < how_many:
        sheet = make_sheet(rng)
        table = f"{sheet['rows']} {sheet['columns']} {sheet['values']}"
        if table in seen or split_of(table) != split:
            continue
        question, answer = ask(rng, sheet)
        if answer is not None:
            seen.add(table)
            items.append(make_item(markdown(layout(sheet)), question, answer, kind))
    return items


def split_of(table):
    """The split of a table, given as any text with its labels and values."""
    return puzzles.split_of(puzzles.digest(table))


def make_sheet(rng):
    """The content of a random table, a dict.

    - `rows`, `columns`: the (upper label, lower label) of each row and column, without totals
    - `values`: for each row a list of whole numbers, one for each column; they are tenths if `numbers` is "decimal"
    - `row_totals`, `column_totals`: True if the table has more rows (columns) with the totals of each group and of all
    - `things`, `times`: one of THINGS and one of TIMES
    - `measure`, `numbers`: what is counted, and in which kind of numbers
    """
    things, times = rng.choice(THINGS), rng.choice(TIMES)
    n_rows, n_columns, row_totals, column_totals = rng.choice(SHAPES)
    rows, columns = [], []
    for group in rng.sample(list(things["labels"]), 2):
        members = things["labels"][group]
        for i in sorted(rng.sample(range(len(members)), n_rows)):
            rows.append((group, members[i]))
    first_upper = rng.randint(0, len(times["uppers"]) - 2)
    first_lower = rng.randint(0, len(times["lowers"]) - n_columns)
    for upper in times["uppers"][first_upper : first_upper + 2]:
        for lower in times["lowers"][first_lower : first_lower + n_columns]:
            columns.append((upper, lower))
    smallest, largest = RANGES[things["numbers"]]
    return {
        "rows": rows,
        "columns": columns,
        "values": [[rng.randint(smallest, largest) for _ in columns] for _ in rows],
        "row_totals": row_totals,
        "column_totals": column_totals,
        "things": things,
        "times": times,
        "measure": rng.choice(things["measures"]),
        "numbers": things["numbers"],
    }


def layout(sheet):
    """The sheet as a table in the release's layout (see `markdown`), with merged headers and the totals it shows."""
    rows = lines_of(sheet["rows"], sheet["row_totals"])
    columns = lines_of(sheet["columns"], sheet["column_totals"])
    levels = sheet["things"]["levels"]
    by_row = add_up(sheet["values"], rows)
    by_column = add_up(list(zip(*by_row)), columns)  # for each column of the table the list of its values
    texts = [[*levels, *("" for _ in columns)], ["", "", *(lower for _, lower, _ in columns)]]
    for (_, lower, _), line in zip(rows, zip(*by_column)):
        texts.append(["", lower, *(in_digits(sheet, value) for value in line)])
    regions = []  # an upper label stands in the first line of its group alone
    for first, last in groups_of(rows):
        texts[2 + first][0] = rows[first][0]
        regions.append({"first_row": 2 + first, "last_row": 2 + last, "first_column": 0, "last_column": 0})
    for first, last in groups_of(columns):
        texts[0][2 + first] = columns[first][0]
        regions.append({"first_row": 0, "last_row": 0, "first_column": 2 + first, "last_column": 2 + last})
    title = f"{sheet['measure']} by {' / '.join(levels)} and {' / '.join(sheet['times']['levels'])}"
    return {
        "title": title[0].upper() + title[1:],
        "texts": texts,
        "merged_regions": regions,
        "top_header_rows_num": 2,
        "left_header_columns_num": 2,
    }


def lines_of(labels, totals):
    """The lines on one side of a table, [(upper label, lower label, places of the labels that the line adds up)].

    In: `labels`, (upper, lower) of the lines without totals; `totals`: whether each group and the table have a total.
    """
    lines = []
    for group in dict.fromkeys(upper for upper, _ in labels):
        places = places_of(labels, group)
        lines += [(group, labels[place][1], [place]) for place in places]
        if totals:
            lines.append((group, "total", places))
    if totals:
        lines.append(("total", "", list(range(len(labels)))))
    return lines


def add_up(values, lines):
    """For each line, as from `lines_of`, the sums of the rows of `values` that it adds up."""
    sums = []
    for _, _, places in lines:
        if len(places) == 1:
            sums.append(values[places[0]])
        else:
            sums.append([sum(parts) for parts in zip(*(values[place] for place in places))])
    return sums


def places_of(labels, group):
    """The places of the group's members in a list of (upper label, lower label)."""
    return [place for place, (upper, _) in enumerate(labels) if upper == group]


def groups_of(lines):
    """[(first line, last line)] of each group of neighbours with the same upper label."""
    groups = []
    for i, line in enumerate(lines):
        if i == 0 or line[0] != lines[i - 1][0]:
            groups.append((i, i))
        groups[-1] = (groups[-1][0], i)
    return groups


def total(sheet, rows, columns):
    """The sum of the values in these rows and columns, without totals; in tenths if the sheet's numbers are decimal."""
    return sum(sheet["values"][i][j] for i in rows for j in columns)


def in_digits(sheet, value):
    """A value as the table shows it: 12.5 for 125 tenths, 1,234 for a large number."""
    if sheet["numbers"] == "decimal":
        return f"{value / 10:.1f}"
    return f"{value:,}" if sheet["numbers"] == "large" else str(value)


def in_answer(sheet, value):
    """A value as an answer: 12.5 for 125 tenths."""
    return value / 10 if sheet["numbers"] == "decimal" else value


def name_row(sheet, i):
    """How a question names a row, such as "in Aldby (North)"."""
    upper, lower = sheet["rows"][i]
    return f"{sheet['things']['preposition']} {sheet['things']['name'].format(upper=upper, lower=lower)}"


def name_column(sheet, j):
    """How a question names a column, such as "Q1 of 2020"."""
    upper, lower = sheet["columns"][j]
    return sheet["times"]["name"].format(upper=upper, lower=lower)


def two_of(rng, labels):
    """The places of two lines, in their order."""
    return sorted(rng.sample(range(len(labels)), 2))


def ask_lookup(rng, sheet):
    """A question for a number that the table shows, or for two of them: (the question, the answer)."""
    measure = sheet["measure"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    row, column = name_row(sheet, i), name_column(sheet, j)
    way = rng.random()
    if way < 0.2:
        j, k = two_of(rng, sheet["columns"])
        question = f"What was the {measure} {row} in {name_column(sheet, j)}, and what in {name_column(sheet, k)}?"
        return question, [in_answer(sheet, sheet["values"][i][place]) for place in (j, k)]
    if way < 0.4 and sheet["row_totals"]:
        group = sheet["rows"][i][0]
        question = f"What was the {measure} {sheet['things']['preposition']} {group} as a whole in {column}?"
        return question, [in_answer(sheet, total(sheet, places_of(sheet["rows"], group), [j]))]
    if way < 0.4 and sheet["column_totals"]:
        group = sheet["columns"][j][0]
        question = f"What was the {measure} {row} over the whole of {group}?"
        return question, [in_answer(sheet, total(sheet, [i], places_of(sheet["columns"], group)))]
    wordings = [
        f"What was the {measure} {row} in {column}?",
        f"In {column}, what was the {measure} {row}?",
        f"Find the {measure} {row} in {column}.",
    ]
    return rng.choice(wordings), [in_answer(sheet, sheet["values"][i][j])]


def ask_sum(rng, sheet):
    """A question for a sum of several values: (the question, the answer)."""
    measure, preposition = sheet["measure"], sheet["things"]["preposition"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    row, column = name_row(sheet, i), name_column(sheet, j)
    way = rng.choice(["rows", "columns", "row group", "column group"])
    if way == "row group" and not sheet["row_totals"]:
        group = sheet["rows"][i][0]
        question = f"What was the {measure} {preposition} {group} as a whole in {column}?"
        rows, columns = places_of(sheet["rows"], group), [j]
    elif way == "column group" and not sheet["column_totals"]:
        group = sheet["columns"][j][0]
        question = f"What was the {measure} {row} over the whole of {group}?"
        rows, columns = [i], places_of(sheet["columns"], group)
    elif way.startswith("row"):
        rows, columns = two_of(rng, sheet["rows"]), [j]
        first, second = (name_row(sheet, place) for place in rows)
        wordings = [
            f"What was the {measure} {first} and {second} together in {column}?",
            f"Add the {measure} {first} and {second} in {column}.",
        ]
        question = rng.choice(wordings)
    else:
        rows, columns = [i], two_of(rng, sheet["columns"])
        first, second = (name_column(sheet, place) for place in columns)
        wordings = [
            f"What was the {measure} {row} in {first} and {second} together?",
            f"Taking {first} and {second} together, what was the {measure} {row}?",
        ]
        question = rng.choice(wordings)
    return question, [in_answer(sheet, total(sheet, rows, columns))]


def ask_difference(rng, sheet):
    """A question for the difference of two numbers: (the question, the answer), with the answer None if it is 0."""
    measure, values = sheet["measure"], sheet["values"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    if rng.random() < 0.5:
        before, after = two_of(rng, sheet["columns"])
        change = values[i][after] - values[i][before]
        times = f"from {name_column(sheet, before)} to {name_column(sheet, after)}"
        wordings = [
            f"By how much did the {measure} {name_row(sheet, i)} change {times}? A fall is a negative number.",
            f"{times[0].upper()}{times[1:]}, what was the change in the {measure} {name_row(sheet, i)}? "
            "A fall is a negative number.",
        ]
        return rng.choice(wordings), [in_answer(sheet, change)] if change else None
    less, more = sorted(two_of(rng, sheet["rows"]), key=lambda place: values[place][j])
    difference = values[more][j] - values[less][j]
    less, more = name_row(sheet, less), name_row(sheet, more)
    wordings = [
        f"How much higher was the {measure} {more} than {less} in {name_column(sheet, j)}?",
        f"In {name_column(sheet, j)}, how much lower was the {measure} {less} than {more}?",
    ]
    return rng.choice(wordings), [in_answer(sheet, difference)] if difference else None


def ask_comparison(rng, sheet):
    """A question for a label: (the question, the answer), with the answer None if two numbers are equal."""
    measure, (upper, lower) = sheet["measure"], sheet["things"]["levels"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    (group, _), (_, part) = sheet["rows"][i], sheet["columns"][j]
    column = name_column(sheet, j)
    highest = rng.random() < 0.5
    best, better = ("highest", "higher") if highest else ("lowest", "lower")
    values, wanted = {}, 1  # {label: value} of what is compared; how many labels the answer has
    way = rng.choice(["members", "two members", "groups", "times"])
    if way == "groups":
        for label in dict.fromkeys(group for group, _ in sheet["rows"]):
            values[label] = total(sheet, places_of(sheet["rows"], label), [j])
        question = f"Which {upper} as a whole had the {better} {measure} in {column}?"
    elif way == "times":
        for place, (label, its_part) in enumerate(sheet["columns"]):
            if its_part == part:
                values[label] = sheet["values"][i][place]
        time = sheet["times"]["levels"][0]
        question = f"Looking only at {part}, in which {time} was the {measure} {name_row(sheet, i)} {better}?"
    else:
        for place in places_of(sheet["rows"], group):
            values[sheet["rows"][place][1]] = sheet["values"][place][j]
        wordings = [
            f"Which {lower} within {group} had the {best} {measure} in {column}?",
            f"In {column}, which {lower} within {group} had the {best} {measure}?",
        ]
        question = rng.choice(wordings)
        if way == "two members" and len(values) > 2:
            question = f"Which two {lower}s within {group} had the {best} {measure} in {column}?"
            wanted = 2
    if len(set(values.values())) < len(values):
        return question, None
    return question, sorted(values, key=values.get, reverse=highest)[:wanted]

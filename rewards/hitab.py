r"""HiTab: questions about tables whose headers have several levels.

This file has the problems (from files, the hub or a generator) and the reward function. hitab_tables.py shows a table
as text, hitab_sheets.py invents tables and questions.

HiTab (Cheng et al. 2022, "HiTab: A Hierarchical Table Dataset for Question Answering and Natural Language Generation")
asks for a number or a label of a statistical table: looked up, summed up, subtracted or compared. ACPO (Section 4.2,
Table 1b) trains Qwen2.5-3B and Qwen2.5-7B on it. The paper prints no prompt and no reward function, so both are this
project's own. The data are at github.com/microsoft/HiTab, folder data, under their own licence (C-UDA 1.0); this
repository has none of them. Without files, tables and questions are generated, with two-level headers on both sides.
"""

import ast
import json
import math
import random
import re
import zipfile
from pathlib import Path, PurePosixPath

from rewards import hitab_sheets, puzzles
from rewards.hitab_tables import markdown
from rewards.math import last_box
from rewards.notation import fractions_as_decimals, latex
from rewards.rows import check_columns, check_split, check_text, files_of, hub_parts, is_saved, read_file

KINDS = ["lookup", "sum", "difference", "comparison"]  # kinds of questions
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

MAX_LENGTH = 1000  # characters per answer, to bound the time; HiTab's longest in dev and test has 235
ROUNDING = 5e-7  # tolerance for a known answer with decimals: HiTab rounds computed ones to six places

SIGNS = str.maketrans(dict.fromkeys('$€£¥"«»'))  # these only format an answer
WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*+\{([^{}]*+)\}")
THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))+")  # 1,234 and 1,234,567
SEPARATORS = re.compile(r"[,;\n]|\band\b")
# A number, and after it a percent sign and at most three words, its unit. Possessive quantifiers never backtrack.
NUMBER = re.compile(
    r"([-+]?)\s*+([0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(e[-+]?[0-9]++)?+(?:\s*+%|\^circ)?+"
    r"(?:\s*+[a-z][a-z./'-]*+(?:\^[0-9](?![0-9]))?+){0,3}+"
)


def score(response, answer) -> dict:
    r"""Score one response: 1 if its answer equals the known one, otherwise 0.

    In: `response`, the model's text after the prompt; `answer`, the known answer, a list of numbers and texts.
    Out: a dict with `reward` (1.0 or 0.0), `correct` (the same as a bool), `format` (True if there is an answer that
    `read_answer` can read) and `timed_out` (always False). It never raises on any text and takes linear time.

    The answer is the last complete \boxed{...} or <answer>...</answer>, whichever begins last. Two answers are equal
    if they have the same numbers and the same texts, each equally often, in any order. A known whole number must be
    matched exactly, any other within HiTab's rounding.

    HiTab's release has its own rule (`hmt_score` in qa/table/utils.py). It differs in three ways: its lists must be
    in the known order, its numbers may differ by up to five decimals (less than 1e-5), and it accepts no $.
    """
    text = last_answer(response)
    mine, theirs = read_answer(text), read_answer("\n".join(map(str, answer)))
    correct = False
    if mine is not None and theirs is not None:
        correct = same(mine, theirs)
        if not correct and re.search("[,，、]", text):
            correct = same(read_answer(text, thousands=False), theirs)
    return {"reward": float(correct), "correct": correct, "format": mine is not None, "timed_out": False}


def score_all(responses, answers) -> list:
    """Score each response with its answer, in order."""
    return [score(response, answer) for response, answer in zip(responses, answers, strict=True)]


def last_answer(text: str):
    r"""Return the content of the \boxed{...} or <answer>...</answer> that begins last, "" if neither is complete.

    So a box within the last answer block is the answer, and the words around the box don't count.
    """
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    box = last_box(text[max(start, 0) :])
    if box is not None:
        return box
    return "" if start < 0 else text[start + len("<answer>") : text.index("</answer>", start)]


def read_answer(text: str, *, thousands=True):
    r"""Read an answer's text: (its numbers, its texts), both sorted, or None if it is empty or too long.

    Commas, semicolons, line breaks and the word "and" separate the parts of an answer, in the response's and in the
    known one: a label that contains a comma counts as its parts. A comma followed by three digits, as in 1,234, either
    belongs to a number (thousands) or separates two numbers: for a response both readings are tried.
    A part is a number if it consists of digits, perhaps followed by a unit. Units are dropped: currency signs, the
    percent sign, and at most three words. A unit never multiplies: 12.5%, $12.5 and 12.5 million are all 12.5; neither
    0.125 nor 12,500,000 is. Everything else is a text. Case, blanks, quotes, LaTeX's \text{...} and punctuation at
    the ends of a text don't matter, nor does Unicode for things that LaTeX or ASCII also writes (see `notation.latex`).
    """
    text = text.strip()
    if not 0 < len(text) <= MAX_LENGTH:
        return None
    text = latex(fractions_as_decimals(text)).translate(SIGNS)
    text = WRAPPED.sub(r" \1 ", text).replace("{,}", ",")
    text = re.sub(r"([\^_])\s?\{([^{}]*+)\}", r"\1\2", text)
    text = re.sub(r"\\[()\[\]!]", "", text)  # LaTeX's \( \) \[ \] and \!, which join both sides
    text = re.sub(r"\\[,;: ]", " ", text)  # LaTeX's blanks
    text = text.replace("\\", "").casefold()  # for \% and \&
    if thousands:
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


def number(text: str):
    """Return the number at the start of a lower-case text if only its unit follows. None if not, or if infinite."""
    match = NUMBER.fullmatch(text)
    value = float(match[1] + match[2] + (match[3] or "")) if match else math.inf
    return value if math.isfinite(value) else None


def same(mine, theirs) -> bool:
    """Return whether two answers from `read_answer` are equal."""
    if len(mine[0]) != len(theirs[0]) or mine[1] != theirs[1]:
        return False
    pairs = zip(mine[0], theirs[0])  # both are sorted
    return all(a == b if b.is_integer() else abs(a - b) <= ROUNDING for a, b in pairs)


# --------------------------------------------------------------------------------------------------------------------
# Loading

SAMPLES = {"train": "train_samples.jsonl", "test": "test_samples.jsonl"}
# The last step of a row's `aggregation` determines the kind of its question. Steps that are missing here (div, average,
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


def load(source, split: str, *, size=None, seed=0):
    """Return questions as training or test items.

    In:
    - `source`: None (generated questions), a folder in the release's layout, one of its files of samples, or a hub id.
      The folder, or its folder data, has train_samples.jsonl and test_samples.jsonl, and the tables in tables/raw or
      tables.zip. The tables of a single file are looked for next to it.
      A .parquet, .json or .jsonl file and a hub data set may instead have the table in each row, in the column `table`
      or `table_content` (an object, or a text with it as JSON or as a Python literal; any other text is shown as it
      is), or as columns (`texts` and so on, see `markdown`). A hub data set without both a train and a test part is
      split by its tables, in the same way as generated questions.
    - `split`: "train" or "test".
    - `size`: how many questions. None: 10,000 generated for train and 1,024 for test, or all questions of a source.
      If the source has more than `size`, `seed` samples them; they keep their order.
    Rows have `question`, `answer` (a number, a text or a list of those), `table_id` if the table is a file, and perhaps
    `aggregation` (the steps to the answer).
    Out: a list of dicts (see `make_item`). The category is the kind of question: one of KINDS, or "other".
    Errors: ValueError if the arguments, the files or a row are invalid; it names file and row (counted from 1).
    """
    check_split(split, size)
    if source is None:
        return generate(size or DEFAULT_SIZE[split], seed, split)
    items = read_source(str(source), split)
    if size is not None and size < len(items):
        items = [items[i] for i in sorted(random.Random(f"subset {seed}").sample(range(len(items)), size))]
    return items


def make_item(table, question, answer, category) -> dict:
    """Return an item for the trainers: chat messages, prefix, gold answer, category. `table`: its Markdown."""
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{table}\n\nQuestion: {question}"},
        ],
        "prefix": PREFIX,
        "answer": answer,
        "category": category,
    }


def read_source(source, split: str):
    """Return the items of the folder's samples for the split, of the file, or of the hub data set."""
    path = Path(source).expanduser()
    if path.is_dir() and not is_saved(path):
        path = samples_file(path, split)
    elif files_of(source, split) is None:
        return read_hub(source, split)
    rows = read_file(path)
    wanted = {str(row["table_id"]) for row in rows if isinstance(row, dict) and "table_id" in row}
    return [item for _, item in items_of(rows, str(path), read_tables(path.parent, wanted))]


def samples_file(folder, split: str):
    """Return the file of samples in the folder or its folder data. ValueError if there is none."""
    for place in (folder, folder / "data"):
        if (place / SAMPLES[split]).is_file():
            return place / SAMPLES[split]
    raise ValueError(f"{folder} holds no {SAMPLES[split]}, and neither does {folder / 'data'}")


def read_tables(folder, wanted):
    """Return {table id: file content, bytes} for the wanted tables in the folder's tables or tables.zip.

    An id is only compared with the names of existing files, so no id leads out of the folder.
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
    except Exception as error:  # damaged archives: BadZipFile, zlib.error, EOFError, RuntimeError …
        raise ValueError(f"{archive} could not be read: {error}") from error
    return tables


def read_hub(name, split: str) -> list:
    """Return items of the data set's part for the split.

    If the data set does not have both parts, `split_of` selects the split's tables from all parts.
    """
    parts = hub_parts(name)
    if {"train", "test"} <= set(parts):
        return [item for _, item in items_of(parts[split].to_list(), f"{name}/{split}", {})]
    items = []
    for part in parts:
        items += items_of(parts[part].to_list(), f"{name}/{part}", {})
    return [item for table, item in items if split_of(table) == split]


def items_of(rows, where, tables):
    """Return [(table's Markdown, item)] of the rows. `where`: the file or hub id; `tables`: from `read_tables`."""
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
    """Return the row's question. A few rows of the release have a list of texts."""
    question = row.get("question")
    words = question if isinstance(question, list) else [question]
    if not all(isinstance(word, str) for word in words) or not "".join(words).strip():
        raise ValueError(f"question is empty or not a text: {question!r}")
    return " ".join(words).strip()


def answer_of(row):
    """Return the row's answer as a list of numbers and texts."""
    golds = list_of(row, "answer")
    for gold in golds:
        is_number = type(gold) in (int, float) and abs(gold) < 1e300  # False for nan, too
        if not is_number and not isinstance(gold, str):
            raise ValueError(f"answer must be a number, a text or a list of those, not {row['answer']!r}")
    if read_answer("\n".join(map(str, golds))) is None:
        raise ValueError(f"answer is empty or has more than {MAX_LENGTH} characters")
    return golds


def kind_of(row):
    """Return the kind of question, from the row's last `aggregation` step that is not a change of sign."""
    steps = [step for step in map(str, list_of(row, "aggregation")) if step != "opposite"]
    last = steps[-1] if steps else "none"
    return KIND_OF_STEP.get(last, "other")


def list_of(row, column):
    """Return the list in a row's column. A single value is a list of one; a text may be a list in JSON or Python."""
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = read_literal(value, column)
    return value if isinstance(value, list) else [value]


def own_table(row):
    """Return the Markdown of a row's own table."""
    table = row.get("table") or row.get("table_content") or (row if row.get("texts") else None)
    if table is None and row.get("table_id") is not None:
        raise ValueError(f"there is no table {row['table_id']!r} in tables/raw or tables.zip beside the file")
    if table is None:
        raise ValueError("the row has no table; it needs table_id, table, table_content or texts")
    if isinstance(table, str) and table.lstrip().startswith("{"):
        table = read_literal(table, "the table")
    return table.strip() if isinstance(table, str) else markdown(table)


def file_table(name, content):
    """Return the Markdown of a table's file. In: its id and its bytes. ValueError with its name if it is invalid."""
    try:
        return markdown(json.loads(content))
    except (ValueError, RecursionError) as error:  # the latter: lists within lists
        raise ValueError(f"table {name!r} could not be read: {error}") from error


def read_literal(text: str, what):
    """Return the object in a text, which is JSON or a Python literal. ValueError if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except Exception:  # literal_eval: ValueError, SyntaxError, TypeError, RecursionError, MemoryError
            continue
    raise ValueError(f"{what} is neither JSON nor a Python literal: {text[:100]!r}")


# --------------------------------------------------------------------------------------------------------------------
# Generating


def generate(n, seed=0, split: str = "train"):
    """Make `n` different questions, each about a different table.

    In:
    - `n`: how many questions. Each of KINDS gets equally many, or one more.
    - `split`: "train" or "test". `split_of` assigns each table to one split, so the splits never share a table,
      whatever their seeds.
    Out: items as from `load`, in which the kinds take turns. The headers of the tables have two levels on both sides.
    Totals, if a table has them, add up. The same arguments give the same questions on any machine. A smaller `n`
    gives the first `n` of them.
    Errors: ValueError if the arguments are invalid.
    """
    check_split(split)
    if n < 1:
        raise ValueError(f"the number of questions must be at least 1, not {n}")
    return puzzles.take_turns(generate_kind(share, kind, seed, split) for kind, share in puzzles.shares(n, KINDS))


def generate_kind(how_many, kind, seed, split: str):
    """Return `how_many` questions of one kind, about different tables."""
    rng = random.Random(f"hitab {seed} {split} {kind}")
    ask = {
        "lookup": hitab_sheets.ask_lookup,
        "sum": hitab_sheets.ask_sum,
        "difference": hitab_sheets.ask_difference,
        "comparison": hitab_sheets.ask_comparison,
    }[kind]
    items = []
    seen = set()
    while len(items) < how_many:
        sheet = hitab_sheets.make_sheet(rng)
        table = f"{sheet['rows']} {sheet['columns']} {sheet['values']}"
        if table in seen or split_of(table) != split:
            continue
        question, answer = ask(rng, sheet)
        if answer is not None:
            seen.add(table)
            items.append(make_item(markdown(hitab_sheets.layout(sheet)), question, answer, kind))
    return items


def split_of(table):
    """Return the split of a table, given as any text with its labels and values."""
    return puzzles.split_of(puzzles.digest(table))

"""Knights and Knaves: puzzles from files, the hub or a generator, and the reward function for an answer.

Every inhabitant of an island is a knight, who always tells the truth, or a knave, who always lies. Each makes one
statement. The task is to identify the knights and the knaves. The papers use the puzzles of Xie et al. 2024, "On
Memorization of Large Language Models in Logical Reasoning" (hub id K-and-K/knights-and-knaves). The prompt and the
reward function are Logic-RL's (Xie et al. 2025), as used by AR-Lopti (Appendix C, Table 4).

A statement is a nested tuple in the same form as in those files. People are counted from 0:

    ('telling-truth', 2)        person 2 is a knight
    ('lying', 2)                person 2 is a knave
    ('not', s)
    ('and', s, t, ...)  ('or', s, t, ...)
    ('->', s, t)  ('<=>', s, t)
"""

import ast
import random
import re
from functools import cache
from random import Random

from rewards import puzzles
from rewards.rows import check_columns, check_split, check_text, files_of, hub_parts, read_file

MIN_PEOPLE, MAX_PEOPLE = 2, 8
DEFAULT_SIZE = {"train": 4500, "test": 500}
COLUMNS = ["quiz", "names", "solution", "statements"]

# Logic-RL / AR-Lopti Appendix C, with every blank and line break as in the `prompt` column of Logic-RL's files. The
# papers trained and compared models on exactly this text, so keep "and<answer>" and the two blanks before "Now".
SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and then provides "
    "the user with the answer. The reasoning process and answer are enclosed within <think> </think> and<answer> "
    "</answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here </answer>.  "
    "Now the user asks you to solve a logical reasoning problem. After thinking, when you finally reach a conclusion, "
    "clearly state the identity of each character within <answer> </answer> tags. "
    "i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>.\n"
)
PREFIX = "<think>"


# --------------------------------------------------------------------------------------------------------------------
# Scoring


def score(response, answer, strict=False) -> dict:
    """Score one response by Logic-RL's rule.

    In: `response`, the model's text after the prompt, which ends in `<think>`; `answer`, {name: True if knight}.
    Out: a dict with `reward` (+3, -0.5, -1 or -3), `correct` (all identities are right), `format` (each tag occurs
    once, in order), `parsed` (the rule can read the answer block) and `parts` (of the reward). It never raises on any
    text and takes linear time.

    A model can fool the rule. It accepts empty reasoning, and it reads "It is false that Zoey is a knight" and "Zoey is
    a knight if pigs fly" as "Zoey is a knight". If two people are called Ann and Mary Ann, "Mary Ann is a knight" says
    it of both, and only the number of roles must still be right. The rule is the default because the papers' numbers
    come from it. `strict=True` requires reasoning that is not empty and one plain statement for each person.

    Source: Logic-RL (Xie et al. 2025); AR-Lopti Appendix C, Table 4. Their code also cuts the text at the first
    "Assistant:" to find the end of the prompt. Here the response comes without the prompt.
    """
    reasoning, block = split_response(PREFIX + response)
    format_ok = block is not None and not (strict and not reasoning.strip())
    claims = read_answer(block, answer, strict) if format_ok else None
    correct = claims == answer
    parts = {
        "format": 1.0 if format_ok else -1.0,
        "answer": 2.0 if correct else -2.0 if claims is None else -1.5,
    }
    return {
        "reward": parts["format"] + parts["answer"],
        "correct": correct,
        "format": format_ok,
        "parsed": claims is not None,
        "parts": parts,
    }


def score_all(responses, answers) -> list:
    """Score each response with its answer, in order."""
    return [score(response, answer) for response, answer in zip(responses, answers)]


def split_response(text: str) -> tuple:
    """Return (reasoning, answer block) if each of the four tags occurs exactly once and in order, else (None, None)."""
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    if any(text.count(tag) != 1 for tag in tags):
        return None, None
    think, end_think, answer, end_answer = places = [text.index(tag) for tag in tags]
    if places != sorted(places):
        return None, None
    return text[think + len("<think>") : end_think], text[answer + len("<answer>") : end_answer]


def read_answer(block, names, strict=False):
    """Return {name: True if knight} from the answer block, or None if the rule cannot read it."""
    lowered = block.lower()
    if lowered.count("knight") + lowered.count("knave") != len(names):
        return None
    claims = {}
    for name in names:
        # Lookarounds instead of \b, which fails next to a name that ends in a full stop.
        match = re.search(rf"(?<!\w){re.escape(name)}(?!\w)\s+is\s+a\s+(knight|knave)\b", block, re.IGNORECASE)
        if match is None:
            return None
        claims[name] = match[1].lower() == "knight"
    if strict and not is_plain_list(block, names):
        return None
    return claims


def is_plain_list(block, names):
    """Return whether the block is one "NAME is a knight/knave" per name, with only separators and markers around."""
    between = re.compile(r"(?:\s|[,;.*•-]|and\b|\(\d+\)|\d+[.)])*", re.IGNORECASE)
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    statement = re.compile(rf"({longest_first})\s+is\s+a\s+(?:knight|knave)\b", re.IGNORECASE)
    seen = []
    place = between.match(block).end()
    while match := statement.match(block, place):
        seen.append(match[1].lower())
        place = between.match(block, match.end()).end()
    return place == len(block) and sorted(seen) == sorted(name.lower() for name in names)


# --------------------------------------------------------------------------------------------------------------------
# Truth tables: the 2^n assignments of knights and knaves are numbered. A statement becomes an integer whose bit k is
# set if the statement holds in assignment k. Each connective is then one operation on integers.


@cache
def truth_table(n) -> tuple:
    """Return (all ones, [table of "person i is a knight"]) for n people. Person 0 is assignment k's highest bit."""
    knights = [sum(1 << k for k in range(2**n) if k >> (n - 1 - i) & 1) for i in range(n)]
    return (1 << 2**n) - 1, knights


def table_of(statement, n):
    """Return the truth table of one statement among n people, as an integer."""
    everywhere, knights = truth_table(n)
    op, *parts = statement
    if op == "telling-truth":
        return knights[parts[0]]
    if op == "lying":
        return everywhere ^ knights[parts[0]]
    tables = [table_of(part, n) for part in parts]
    result = tables[0]
    if op == "not":
        return everywhere ^ result
    if op == "->":
        return (everywhere ^ result) | tables[1]
    if op == "<=>":
        return everywhere ^ result ^ tables[1]
    for table in tables[1:]:
        result = result & table if op == "and" else result | table
    return result


def consistent(speaker, statement, n):
    """Return the truth table of "the speaker can say this": a knight says a true statement, or a knave a false one."""
    everywhere, knights = truth_table(n)
    return everywhere ^ knights[speaker] ^ table_of(statement, n)


def solve(statements) -> list:
    """Return all assignments that are consistent with the statements.

    In: one statement per person. Out: a list of tuples of bools (True = knight), in ascending order.
    """
    n = len(statements)
    left = truth_table(n)[0]
    for speaker, statement in enumerate(statements):
        left &= consistent(speaker, statement, n)
    return [tuple(bool(k >> (n - 1 - i) & 1) for i in range(n)) for k in range(2**n) if left >> k & 1]


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load(source, split: str, people="3-7", size=None, seed=0):
    """Return puzzles as training or test items.

    In:
    - `source`: None (generated puzzles), a .parquet, .json or .jsonl file, a folder of such files, or a hub id such as
      K-and-K/knights-and-knaves. Each file in a folder serves the split in its name (see `rows.folder_files`).
    - `split`: "train" or "test".
    - `people`: the puzzle sizes, as numbers of people ("3-7", "2,3", "5"). Puzzles of other sizes are dropped.
    - `size`: how many puzzles. None: 4500 generated for train and 500 for test, or all puzzles of a source. If the
      source has more than `size`, `seed` samples equally many per puzzle size, as far as possible.
    Out: a list of dicts (see `make_item`), in which the puzzle sizes alternate.
    Errors: ValueError if the arguments, the files or a puzzle are invalid; it names file and row (counted from 1). A
    file's puzzles must have exactly one solution, which must be the solution in the file.
    """
    wanted = parse_people(people)
    check_split(split, size)
    if source is None:
        return generate(size or DEFAULT_SIZE[split], people, seed, split)

    by_people = {count: [] for count in wanted}
    sizes_there = set()
    for where, row in read_rows(source, split):
        check_names(where, row["names"])
        count = len(row["names"])
        sizes_there.add(count)
        if count in by_people:
            by_people[count].append(check_row(where, row))
    if not any(by_people.values()):
        raise ValueError(f"{source} has no puzzle of {people} people; it has puzzles of {sorted(sizes_there)}")
    return puzzles.draw(by_people, size, seed)


def parse_people(text: str):
    """Return the numbers of people in "3-7", "2,3" or "5" as a sorted list. ValueError if the text has another form."""
    return puzzles.parse_counts(text, "people", "3-7 or 2,3 or 5", MIN_PEOPLE, MAX_PEOPLE)


def read_rows(source, split: str):
    """Return [(where, row)] for each row of the file, the folder's files or the hub data set, whose configs are splits.

    A row has all COLUMNS; a missing value is None.
    """
    files = files_of(source, split)
    if files is None:
        parts = hub_parts(source, split)
        tables = {f"{source}/{split}/{part}": parts[part].to_list() for part in parts}
    else:
        tables = {str(file): read_file(file) for file in files}
    found = []
    for where, rows in tables.items():
        check_columns(rows, COLUMNS, where)
        for i, row in enumerate(rows, 1):
            found.append((f"{where}, row {i}", {column: row.get(column) for column in COLUMNS}))
    return found


def make_item(quiz, names, solution, statements) -> dict:
    """Return an item for the trainers: chat messages, prefix of the response, gold answer, category, and the puzzle."""
    return {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": quiz + "\n"}],
        "prefix": PREFIX,
        "answer": dict(zip(names, solution)),
        "category": str(len(names)),
        "quiz": quiz,
        "names": list(names),
        "statements": statements,
    }


def check_names(where, names) -> None:
    """Raise ValueError unless names is a list of different names, all of which `read_answer` can find."""
    if not isinstance(names, list) or not names:
        raise ValueError(f"{where}: names must be a list of names, not {names!r}")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{where}: names holds something that is no name: {names}")
        if name != name.strip() or re.search("knight|knave", name, re.IGNORECASE):  # no answer could be right
            raise ValueError(f"{where}: a name must not have blanks around it, or knight or knave in it: {name!r}")
        check_text(name, where)
    if len({name.lower() for name in names}) < len(names):
        raise ValueError(f"{where}: two people have the same name: {names}")


def check_row(where, row):
    """Return the row as an item, its names checked before. ValueError unless its only solution is the row's."""
    quiz, names, solution = row["quiz"], row["names"], row["solution"]
    if not isinstance(quiz, str) or not quiz.strip():
        raise ValueError(f"{where}: quiz is empty or not a text")
    check_text(quiz, where)
    try:
        statements = ast.literal_eval(row["statements"])
    except Exception as error:  # literal_eval: ValueError, SyntaxError, TypeError, RecursionError, MemoryError
        raise ValueError(f"{where}: statements is no Python literal: {error}") from error
    if not isinstance(statements, (tuple, list)) or not isinstance(solution, list):
        raise ValueError(f"{where}: statements and solution must be lists")
    if not len(names) == len(solution) == len(statements):
        raise ValueError(
            f"{where}: {len(names)} names, {len(solution)} values in solution and {len(statements)} statements; "
            "there must be one of each for each person"
        )
    for statement in statements:
        check_statement(statement, len(names), where)
    solutions = solve(statements)
    if len(solutions) != 1:
        raise ValueError(f"{where}: the statements have {len(solutions)} solutions, not exactly one")
    if list(solutions[0]) != solution:
        raise ValueError(f"{where}: the solution is {list(solutions[0])}, but the row says {solution}")
    return make_item(quiz, names, solution, statements)


def check_statement(statement, n, where) -> None:
    """Raise ValueError unless the statement consists of known operators with the right number of parts."""
    if not isinstance(statement, (tuple, list)) or len(statement) < 2:
        raise ValueError(f"{where}: {statement!r} is no statement")
    op, *parts = statement
    if op in ("telling-truth", "lying"):
        if len(parts) != 1 or type(parts[0]) is not int or not 0 <= parts[0] < n:
            raise ValueError(f"{where}: {statement!r} must name one person from 0 to {n - 1}")
        return
    if op not in ("not", "and", "or", "->", "<=>"):
        raise ValueError(f"{where}: unknown operator {op!r} in {statement!r}")
    arity = {"not": 1, "->": 2, "<=>": 2}.get(op)
    if arity is not None and len(parts) != arity:
        raise ValueError(f"{where}: {op!r} takes {arity} part(s), not {len(parts)}, in {statement!r}")
    for part in parts:
        check_statement(part, n, where)


# --------------------------------------------------------------------------------------------------------------------
# Generating

NAMES = """
Aaliyah Adaeze Akira Alejandro Amara Anders Anika Arjun Astrid Ayumi Babak Beatriz Bogdan Camille Chidi Chiyo Dalia
Dimitri Eilidh Ekaterina Emeka Esra Farid Fatima Feng Gwen Hamza Hana Hector Imani Ingrid Ismail Jasper Jiho Joaquin
Kaveh Kofi Lakshmi Leila Linh Malik Mariam Mateo Mei Nadia Nikolai Noor Oksana Oluchi Omar Pablo Priya Quinn Rafael
Ravi Rosa Sana Sasha Sione Tariq Thandi Tomas Umar Valentina Wanjiru Wei Ximena Yara Yusuf Zainab
""".split()

INTROS = [
    "On a remote island there are two kinds of people: knights, whose every statement is true, and knaves, whose every "
    "statement is false. You come across {n} islanders: {names}.",
    "Each person in a certain town is either a knight or a knave. Everything a knight says is true, and everything a "
    "knave says is false. Today you talk to {n} of them: {names}.",
    "A traveller reaches a land where knights can only say what is true and knaves can only say what is false; nobody "
    "there is anything else. At the gate stand {n} locals: {names}.",
    "In this village, a knight never says anything false and a knave never says anything true. Everyone is one or the "
    "other. There are {n} people at the well: {names}.",
]
QUESTIONS = [
    "Work out for each of them: knight or knave?",
    "Which of them are knights, and which are knaves?",
    "Find out what each of them is.",
]
SAYINGS = [
    '{who} said, "{claim}."',
    '{who} told you: "{claim}."',
    '"{claim}," said {who}.',
    '{who} gave you this answer: "{claim}."',
    '"{claim}," {who} let you know.',
    'These were the words of {who}: "{claim}."',
]
# Every phrasing has its connective word(s) once outside brackets, and inner connectives are in brackets. So a
# sentence has only one reading.
PHRASES = {
    "telling-truth": ["{} is a knight"],
    "lying": ["{} is a knave"],
    "and": ["{} and {}", "both of these hold: {}, and {}"],
    "or": ["{} or {}", "{}, or {}, or both"],
    "->": ["if {} then {}", "{} only if {}"],
    "<=>": ["{} if and only if {}", "{} exactly when {}"],
}
NOT_PHRASES = {"telling-truth": "{} is not a knight", "lying": "{} is not a knave"}
CONNECTIVES = ["and", "or", "->", "<=>"]
DEPTH = 2  # levels of nested connectives in a statement

MAX_MISSES = 3000  # consecutive tries without a new puzzle before generation stops; 20 to 50 are usual


def generate(n, people="3-7", seed=0, split: str = "train"):
    """Make `n` different puzzles, each with exactly one solution.

    In:
    - `n`: how many puzzles.
    - `people`: as in `load`. Each number of people gets equally many puzzles, or one more.
    - `split`: "train" or "test". The `identity` of a puzzle assigns it to one split, so the splits never share a
      puzzle, whatever their seeds, not even with different names or in a different order.
    Out: items as from `load`, in which the numbers of people alternate. The same arguments give the same puzzles on any
    machine.
    Errors: ValueError if the arguments are invalid, or if there seem to be fewer than `n` such puzzles.
    """
    counts = parse_people(people)
    check_split(split)
    if n < 1:
        raise ValueError(f"the number of puzzles must be at least 1, not {n}")
    groups = [generate_size(share, count, seed, split) for count, share in puzzles.shares(n, counts)]
    return puzzles.take_turns(groups)


def generate_size(how_many, count, seed, split: str):
    """Return `how_many` different puzzles of `count` people."""
    rng = random.Random(f"knights and knaves {seed} {split} {count} {DEPTH}")
    items = []
    seen = set()
    misses = 0
    while len(items) < how_many:
        if misses >= MAX_MISSES:
            raise ValueError(
                f"only {len(items)} different {split} puzzles of {count} people were found, "
                f"{how_many} are wanted: ask for fewer puzzles or more people"
            )
        misses += 1
        statements = tuple(make_statement(rng, speaker, count) for speaker in range(count))
        solutions = solve(statements)
        if len(solutions) != 1:
            continue
        puzzle = identity(statements)
        if puzzle in seen or puzzles.split_of(puzzle) != split:
            continue
        seen.add(puzzle)
        misses = 0
        names = rng.sample(NAMES, count)
        items.append(make_item(tell(rng, names, statements), names, solutions[0], statements))
    return items


def make_statement(rng: Random, speaker, n):
    """Return a random informative statement: neither it nor `consistent` is the same in all assignments."""
    everywhere = truth_table(n)[0]
    while True:
        statement = grow(rng, n, DEPTH)
        # `consistent` excludes "I am a knight", which anyone can say, and "I am a knave", which nobody can say.
        if not {table_of(statement, n), consistent(speaker, statement, n)} & {0, everywhere}:
            return statement


def grow(rng: Random, n, depth):
    """Return a random statement with at most `depth` nested connectives."""
    if depth == 0 or rng.random() < 0.2:
        return leaf(rng, rng.randrange(n))
    op = rng.choice(CONNECTIVES)
    if depth == 1 or rng.random() < 0.8:
        first, second = rng.sample(range(n), 2)  # two different people: no "X is a knight and X is a knight"
        return (op, leaf(rng, first), leaf(rng, second))
    return (op, grow(rng, n, depth - 1), grow(rng, n, depth - 1))


def leaf(rng: Random, person):
    claim = (rng.choice(["telling-truth", "lying"]), person)
    return ("not", claim) if rng.random() < 0.25 else claim


def puzzle_of(item):
    """Return the puzzle's `identity`, which does not depend on the names."""
    return identity(item["statements"])


def identity(statements):
    """Return a digest (hex) that does not depend on the names or the order of the people.

    The method is colour refinement. All people start with one colour. A person's next colour is a digest of the
    person's statement, in which each person is replaced by their colour (the speaker by "self"). The puzzle's digest is
    the digest of the sorted colours. In rare cases different puzzles share a digest; then `generate` drops one of them.
    """
    colours = [""] * len(statements)
    for _ in range(3):
        colours = [puzzles.digest(recolour(statement, who, colours)) for who, statement in enumerate(statements)]
    return puzzles.digest(" ".join(sorted(colours)))


def recolour(statement, speaker, colours):
    """Return the statement as text, with colours for people. The parts of "and", "or" and "<=>" are sorted."""
    op, *parts = statement
    if op == "not":
        inner = parts[0]
        if inner[0] == "not":
            return recolour(inner[1], speaker, colours)
        flipped = {"telling-truth": "lying", "lying": "telling-truth"}.get(inner[0])
        if flipped:  # "not a knave" means "a knight"
            return recolour((flipped, inner[1]), speaker, colours)
    if op in ("telling-truth", "lying"):
        return f"({op} {'self' if parts[0] == speaker else colours[parts[0]]})"
    texts = [recolour(part, speaker, colours) for part in parts]
    if op in ("and", "or", "<=>"):
        texts.sort()
    return f"({op} {' '.join(texts)})"


def tell(rng: Random, names, statements) -> str:
    """Write the puzzle in English."""
    listed = ", ".join(names[:-1]) + " and " + names[-1]
    lines = [rng.choice(INTROS).format(n=len(names), names=listed)]
    for name, statement in zip(names, statements):
        claim = phrase(rng, names, statement)
        lines.append(rng.choice(SAYINGS).format(who=name, claim=claim[0].upper() + claim[1:]))
    return " ".join([*lines, rng.choice(QUESTIONS)])


def phrase(rng: Random, names, statement, inner=False):
    """Write one statement in English. A connective within another one is in brackets."""
    op, *parts = statement
    if op in ("telling-truth", "lying"):
        return PHRASES[op][0].format(names[parts[0]])
    if op == "not":  # grow() negates only statements about a single person
        kind, person = parts[0]
        return NOT_PHRASES[kind].format(names[person])
    text = rng.choice(PHRASES[op]).format(*(phrase(rng, names, part, inner=True) for part in parts))
    return f"({text})" if inner else text

"""Describe the tree of trainers: their lengths, their differences, and the pieces of a trainer's text.

diff.py, compare.py and most of maintain/ use this module. It has no command line.
"""

import ast
import difflib
import io
import re
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = """reinforce rloo maxrl sft opd sdpo dr_grpo ppo grpo_ar_lopti reinforce_pp dapo acpo gspo cispo dppo sapo
    grpo_tis entropy_top archer entropy_bonus gdpo
    grpo_multi_turn gigpo""".split()  # of a parent's children; others come last
DIFFERS = re.compile(r"^What differs from (\w+)\.py", re.MULTILINE)  # names the parent in a docstring


def parents_in(folder):
    """Return {script: its parent} of a folder's trainers except grpo.py, from their docstrings, in order.

    The parent is None if the docstring names none, as in a copy of grpo.py.
    """
    found = {}
    stems = sorted(path.stem for path in folder.glob("*.py") if path.stem != "grpo")
    for stem in sorted(stems, key=lambda stem: ORDER.index(stem) if stem in ORDER else len(ORDER)):
        text = source(stem, folder)
        if "flags.check(" in text:
            named = DIFFERS.search(text)
            found[stem] = named and named[1]
    return found


def source(stem, folder=ROOT):
    return (folder / f"{stem}.py").read_text(encoding="utf-8")


# A script without a page is a user's own: it needs no row, figure or claim.
PARENT = {stem: parent for stem, parent in parents_in(ROOT).items() if (ROOT / f"docs/algorithms/{stem}.md").is_file()}


def own_scripts(folder=ROOT):
    """Return {script: its parent or None} of a folder's trainers that have no page."""
    return {stem: parent for stem, parent in parents_in(folder).items() if stem not in PARENT}


def family(folder=ROOT, root="grpo", parents=PARENT):
    """Return the existing scripts from `root` on, in tree order: script, then its descendants, then its next sibling.

    ValueError if a script exists and its parent does not.
    """
    there = {stem for stem in ["grpo", *parents] if (folder / f"{stem}.py").is_file()}
    for stem in sorted(there - {"grpo"}):
        if parents[stem] not in there:
            raise ValueError(f"{stem}.py is there, but not {parents[stem]}.py, which it grew from")
    order, left = [], [root] if root in there else []
    while left:
        order.append(left.pop(0))
        left = [child for child, parent in parents.items() if parent == order[-1] and child in there] + left
    return order


def depth(stem):
    """Return the number of steps from grpo.py to a script."""
    return 1 + depth(PARENT[stem]) if stem in PARENT else 0


def code_lines(text):
    """Return the lines of code, without comments, trailing blanks, docstrings and blank lines.

    Any expression statement that is only a string counts as a docstring. SyntaxError if the text is not Python.
    """
    return list(numbered_code_lines(text).values())


@cache
def numbered_code_lines(text):
    """Return {number of a line, counted from 0: its code} of the code_lines()."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        statements = node.body if isinstance(getattr(node, "body", None), list) else []  # a lambda's body is not a list
        for statement in statements:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                rows = slice(statement.lineno - 1, statement.end_lineno)
                lines[rows] = [""] * len(lines[rows])
    return {number: line.rstrip() for number, line in enumerate(lines) if line.strip()}


@cache
def changed(before, after):
    """Return the number of code lines added or removed between two texts."""
    return sum(line[0] in "+-" for line in difflib.ndiff(code_lines(before), code_lines(after)))


def pieces(text):
    """Return [(name, first line, last line)] of a script's parts: top-level statements, and each member of a class.

    Names are "update", "Args.lr", "Policy.forward", "imports", "module docstring". Lines are counted from 1, and every
    line belongs to one piece: a piece begins after the end of the previous one, so the comments, blank lines and
    decorators above a definition belong to it. SyntaxError if the text is not Python.
    """
    found, first = [], 1
    for name, last in statements(ast.parse(text)):
        if first <= last:  # otherwise it shares a line with the previous piece
            found.append((name, first, last))
            first = last + 1
    name, first, last = found.pop()
    return [*found, (name, first, max(last, len(text.splitlines())))]


def statements(tree):
    """Yield (name, last line) of each top-level statement; for a class, of its first line and each member.

    A class's docstring has the name of the class.
    """
    for node in tree.body:
        name = name_of(node) or ("module docstring" if node is tree.body[0] else "text")
        members = node.body if isinstance(node, ast.ClassDef) else []
        yield name, node.lineno if members else node.end_lineno
        for member in members:
            yield f"{name}.{name_of(member)}".rstrip("."), member.end_lineno


def name_of(node):
    """Return the name that a statement defines, "" for a docstring, or its first line if it defines nothing."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "imports"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]).strip("()")
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return ast.unparse(node.target)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return ""
    return ast.unparse(node).splitlines()[0].rstrip(":")


def texts(text):
    """Return {name: text} of the pieces. Pieces of one name (imports; an assignment and its |=) are concatenated."""
    lines, found = text.splitlines(keepends=True), {}
    for name, first, last in pieces(text):
        found[name] = found.get(name, "") + "".join(lines[first - 1 : last])
    return found

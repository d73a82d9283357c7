"""Shows two trainers side by side, in colour: what differs between them is the algorithm.

    python tools/diff.py grpo dapo        any two scripts, by name or path
    python tools/diff.py grpo_ar_lopti    a script and the one it grew from (tools/family.py)

A summary comes first: which sections differ, and by how many lines. Then each of these sections follows, and the module
docstring last; --no_docstring leaves it out. Removed lines are marked "-" and added ones "+". If a line is on both
sides, the words that differ are marked. Equal lines are folded. A terminal of fewer than 120 columns gets one column.
In a terminal a pager shows all of it (q ends it). The site (make site) shows the same in a browser.
"""

import difflib
import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from pygments.token import Comment, Keyword, Name, Number, String
from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family

CONTEXT = 3  # equal lines shown around what differs
SIDE_BY_SIDE = 120  # columns that two columns take
SIGNS = {"-": "red", "+": "green", " ": "dim"}
# The terminal's own colours, which its owner can read on a dark and on a light background.
COLOURS = {Comment: Style(dim=True), String: Style(color="green"), Keyword: Style(color="blue")}
COLOURS |= {Name.Function: Style(bold=True), Name.Class: Style(bold=True), Number: Style(color="cyan")}


@dataclass
class Args:
    """Which two, and how."""

    script: tyro.conf.Positional[str]  # a script, by name or path
    other: tyro.conf.Positional[str] = ""  # what it is compared with; none: its parent, which then stands on the left
    docstring: bool = True  # show the module docstrings, after the code
    width: int | None = None  # columns to write in; None: those of the terminal


class Script:
    """One of the two that are compared. Lines are counted from 0."""

    def __init__(self, path):
        self.name = path.name
        self.text = path.read_text(encoding="utf-8")
        syntax = Syntax("", "python", theme=ANSISyntaxTheme(COLOURS))
        self.coloured = syntax.highlight(self.text).split("\n", allow_blank=True)
        self.sections = {}  # {name: numbers of its lines}
        self.defines = {}  # {number of a line: what is defined there}
        try:
            pieces = family.pieces(self.text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{path.name} is no Python script: {error}") from error
        for piece in pieces:
            section = "docstring" if piece.name == "module docstring" else piece.section or "imports"
            numbers = range(piece.first - 1, piece.last)
            self.sections.setdefault(section, []).extend(numbers)
            self.defines |= dict.fromkeys(numbers, piece.name)


# ------------------------------------------------------------------------------------------------------ what differs


@dataclass
class Row:
    """A line of the left script, of the right one, or of both, and which of its characters differ."""

    left: int | None = None
    right: int | None = None
    equal: bool = False
    left_marks: str = ""  # a sign at each character that differs
    right_marks: str = ""


def compare(left, right, name):
    """The rows of two scripts' sections of this name, in order. A line that was changed a little is one row."""
    numbers = [iter(script.sections.get(name, [])) for script in (left, right)]
    lines = [[script.coloured[k].plain for k in script.sections.get(name, [])] for script in (left, right)]
    rows = []
    for line in difflib.ndiff(*lines):
        last = rows[-1] if rows else Row()
        if line[0] == " ":
            rows.append(Row(next(numbers[0]), next(numbers[1]), equal=True))
        elif line[0] == "-":
            rows.append(Row(left=next(numbers[0])))
        elif line[0] == "+" and last.left_marks and last.right is None:  # what the line above was changed to
            last.right = next(numbers[1])
        elif line[0] == "+":
            rows.append(Row(right=next(numbers[1])))
        elif last.right is None:  # the sign is "?": marks of the line above
            last.left_marks = line[2:]
        else:
            if last.left is None:  # it belongs to the line before, which has no marks
                last.left = rows.pop(-2).left
            last.right_marks = line[2:]
    return list(beside(rows))


def beside(rows):
    """The same rows, where lines that were replaced by others stand beside them."""
    for has_both, run in itertools.groupby(rows, lambda row: None not in (row.left, row.right)):
        run = list(run)
        if has_both:
            yield from run
        else:
            left = [row.left for row in run if row.left is not None]
            right = [row.right for row in run if row.right is not None]
            yield from itertools.starmap(Row, itertools.zip_longest(left, right))


def sections(left, right, docstring=True):
    """{name: rows} of the sections of both scripts, the docstring last."""
    names = [name for name in {**right.sections, **left.sections} if name != "docstring"]
    return {name: compare(left, right, name) for name in [*names, *["docstring"] * docstring]}


def blocks(rows):
    """[(folded, rows), ...]: what is more than CONTEXT rows from any difference is folded; a single row is not."""
    differ = [k for k, row in enumerate(rows) if not row.equal]
    near = {-1, len(rows)}.union(*(range(k - CONTEXT, k + CONTEXT + 1) for k in differ))
    near |= {k for k in range(len(rows)) if {k - 1, k + 1} <= near}
    runs = itertools.groupby(range(len(rows)), lambda k: k not in near)
    return [(fold, [rows[k] for k in run]) for fold, run in runs]


def counts(rows):
    """How many lines, comments and blank ones included, were removed and added."""
    rows = [row for row in rows if not row.equal]
    return sum(row.left is not None for row in rows), sum(row.right is not None for row in rows)


# ------------------------------------------------------------------------------------------------------ the terminal


def cells(script, number, sign, marks):
    """Number, sign and text of a line."""
    if number is None:
        return "", "", ""
    line = script.coloured[number].copy()
    line.overflow = "fold"
    for word in re.finditer(r"\w+|[^\w\s]", line.plain):
        if marks[word.start() : word.end()].strip():
            line.stylize(f"reverse {SIGNS[sign]}", *word.span())
    return str(number + 1), Text(sign, SIGNS[sign]), line


def table(rows, scripts, two):
    """Rows as they are shown. two: in two columns. In one, all left lines come before the right ones."""
    grid = Table.grid(padding=(0, 1), expand=True)
    for side in ["left", "right"][: 1 + two]:
        if side == "right":
            grid.add_column(style="dim", width=1)
        grid.add_column(style="dim", justify="right", width=4)
        grid.add_column(width=1)
        grid.add_column(ratio=1)
    for equal, run in itertools.groupby(rows, lambda row: row.equal):
        run = list(run)
        left = [cells(scripts[0], row.left, " " if equal else "-", row.left_marks) for row in run]
        right = [cells(scripts[1], row.right, " " if equal else "+", row.right_marks) for row in run]
        found = [(*one, "│", *other) for one, other in zip(left, right)]
        if not two:
            found = [one for one in [*left * (not equal), *right] if one[0]]
        for of_row in found:
            grid.add_row(*of_row)
    return grid


def show(console, scripts, docstring):
    """Prints the summary and what differs."""
    left, right = scripts
    found = sections(left, right, docstring)
    same = [name for name, rows in found.items() if not any(counts(rows))]
    num_changed = family.changed(left.text, right.text)
    lines = [f"{left.name} → {right.name}: {num_changed} line{'s' * (num_changed != 1)} of code removed or added"]
    for name in [name for name in found if name not in same]:
        lines.append("  {:<14} −{} +{}".format(name, *counts(found[name])))
    lines.append(f"  the same: {', '.join(same) or 'none'}")
    two = console.width >= SIDE_BY_SIDE
    if not two:
        lines.append(f"One column: the terminal has {console.width}, and two take {SIDE_BY_SIDE}.")
    console.print("\n".join(lines), highlight=False)
    for name in [name for name in found if name not in same]:
        console.print(Rule(Text(name, "bold"), align="left", style="bold"))
        for folded, rows in blocks(found[name]):
            if folded:
                names = [right.defines[row.right] for row in rows if right.defines[row.right] != f"section {name}"]
                names = " … ".join(dict.fromkeys([*names[:1], *names[-1:]]))
                console.print(Text(f"   ⋯ {len(rows)} equal lines{': ' * bool(names)}{names}", "dim"))
            else:
                console.print(table(rows, scripts, two))


# -------------------------------------------------------------------------------------------------- the command line


def find(name):
    """A script's path, by its name, with or without .py, or by a path. ValueError if there is none."""
    for path in (family.ROOT / f"{name}.py", family.ROOT / name, Path(f"{name}.py"), Path(name)):
        if path.is_file():
            return path.resolve()
    raise ValueError(f"there is no script {name!r}; there are {', '.join(family.family())}, and paths will do")


def pair(args):
    """The paths of the two scripts, left and right. ValueError if the arguments don't name two."""
    path = find(args.script)
    if args.other:
        return path, find(args.other)
    if path.parent == family.ROOT and path.stem in family.PARENT:
        return find(family.PARENT[path.stem]), path
    raise ValueError(f"{path.name} grew from no other script: name the one to compare it with")


def main(args):
    try:
        if args.width is not None and args.width < 1:
            raise ValueError(f"--width is {args.width}; it must be greater than 0")
        scripts = [Script(path) for path in pair(args)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    console = Console(width=args.width)
    if not console.is_terminal:
        show(console, scripts, args.docstring)
        return
    os.environ.setdefault("LESS", "-RFX")  # in colour; ends by itself if everything fits on the screen
    with console.pager(styles=True):
        show(console, scripts, args.docstring)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

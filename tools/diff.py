"""Shows two trainers side by side, in colour: what differs between them is the algorithm.

    python tools/diff.py grpo dapo                     any two scripts, by name or path
    python tools/diff.py grpo_ar_lopti                 a script and the one it grew from (tools/family.py)
    python tools/diff.py grpo dapo --html dapo.html    the same as a page of its own, for any browser

Removed lines are marked "-", added ones "+"; in a line that is on both sides, the words that differ are marked. Equal
lines are folded, and the fold says where they are: section › definition. A terminal of fewer than 100 columns shows one
column.
"""

import difflib
import html
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family

KINDS = {  # what is coloured, and the colour's name in STYLES and in the page's CSS
    Comment: "comment",
    String: "string",
    Keyword: "keyword",
    Operator.Word: "keyword",  # and, or, in, not
    Name.Function: "name",
    Name.Class: "name",
    Name.Decorator: "name",
    Number: "number",
}
# The terminal's own colours, which its owner can read on its own background, dark or light.
STYLES = {"": "", "comment": "dim", "string": "green", "keyword": "blue", "name": "bold", "number": "cyan"}
SIGNS = {"-": "red", "+": "green", " ": "dim"}
SIDE_BY_SIDE = 100  # columns that it takes
ALIKE = 0.5  # similarity, 0 to 1, from which two lines are the same line, changed


@dataclass
class Args:
    """Which two, and how."""

    script: tyro.conf.Positional[str]  # a script, by name or path
    other: tyro.conf.Positional[str] = ""  # what it is compared with; none: its parent, which then stands on the left
    context: int = 3  # equal lines shown around what differs, >= 0
    html: Path | None = None  # write a page here, and nothing to the terminal
    width: int | None = None  # columns to write in, >= 40; None: those of the terminal


@dataclass
class Row:
    """A line of the left text, of the right one, or of both (counted from 0), and which of its characters differ."""

    left: int | None
    right: int | None
    equal: bool = False
    marks: tuple = ((), ())  # left and right: [(first character, last + 1), ...]


# ------------------------------------------------------------------------------------------------------ what differs


def compare(left, right):
    """The rows of two lists of lines, in order; where lines were replaced, those that are alike share a row."""
    rows = []
    for tag, i, i_end, j, j_end in opcodes(left, right):
        if tag == "equal":
            rows += [Row(i + k, j + k, equal=True) for k in range(i_end - i)]
            continue
        pairs = [(i + mate_i, j + mate_j) for mate_i, mate_j in mates(left[i:i_end], right[j:j_end])]
        for mate_i, mate_j in [*pairs, (i_end, j_end)]:
            rows += [Row(*lines) for lines in itertools.zip_longest(range(i, mate_i), range(j, mate_j))]
            if mate_i < i_end:
                rows.append(Row(mate_i, mate_j, marks=word_marks(left[mate_i], right[mate_j])))
            i, j = mate_i + 1, mate_j + 1
    return rows


def opcodes(left, right):
    """difflib's opcodes, with added and removed lines moved to where they begin with a statement.

    An "if" added between two calls is shown from "if" to its ")", not from the ")" of the call before.
    """
    codes = [list(code) for code in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()]
    ends = len(left), len(left), len(right), len(right)
    codes = [["equal", 0, 0, 0, 0], *codes, ["equal", *ends]]
    for before, here, after in zip(codes, codes[1:], codes[2:]):
        if here[0] not in ("insert", "delete"):
            continue
        lines, first, last = (right, here[3], here[4]) if here[0] == "insert" else (left, here[1], here[2])
        up = down = 0
        while up < before[2] - before[1] and lines[first - up - 1] == lines[last - up - 1]:
            up += 1
        while down < after[2] - after[1] and lines[first + down] == lines[last + down]:
            down += 1
        by = min(range(-up, down + 1), key=lambda by: (*awkwardness(lines[first + by]), abs(by)))
        before[2], before[4] = before[2] + by, before[4] + by
        here[1:] = [at + by for at in here[1:]]
        after[1], after[3] = after[1] + by, after[3] + by
    return codes


def awkwardness(line):
    """How badly added lines begin with this one: (it begins no statement, its indentation)."""
    begins_nothing = re.match(r"\s*([)\]}]|$)", line) is not None
    return begins_nothing, len(line) - len(line.lstrip())


def mates(left, right):
    """Which lines are alike: pairs (i, j), in order on both sides, with the largest sum of similarities."""
    if len(left) * len(right) > 5000:  # it would take long, and so much was rather rewritten than changed
        return []
    left, right = ([re.findall(r"\w+|[^\w\s]", line) for line in lines] for lines in (left, right))
    best = [(0, [])] * (len(right) + 1)  # (sum, pairs) of the lines so far on the left and the first j on the right
    for i, words in enumerate(left):
        above, best = best, [(0, [])]
        for j, others in enumerate(right):
            alike = difflib.SequenceMatcher(None, words, others, autojunk=False).ratio() if words and others else 0
            choices = [above[j + 1], best[j]]
            if alike >= ALIKE:
                choices.append((above[j][0] + alike, [*above[j][1], (i, j)]))
            best.append(max(choices, key=lambda choice: choice[0]))
    return best[-1][1]


def word_marks(left, right):
    """The character ranges in which two lines differ, whole words at a time: (of the left, of the right)."""
    words = [re.findall(r"\w+|\s+|[^\w\s]", line) for line in (left, right)]
    starts = [list(itertools.accumulate(map(len, side), initial=0)) for side in words]
    marks = ([], [])
    for tag, *ends in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, (first, last) in enumerate((ends[:2], ends[2:])):
            if tag != "equal" and first < last:
                marks[side].append((starts[side][first], starts[side][last]))
    return marks


def blocks(rows, context):
    """[(folded, rows), ...]: what is more than `context` rows from any difference is folded; a single row is not."""
    differ = [k for k, row in enumerate(rows) if not row.equal]
    near = {-1, len(rows)}.union(*(range(k - context, k + context + 1) for k in differ))
    near |= {k for k in range(len(rows)) if {k - 1, k + 1} <= near}
    runs = itertools.groupby(range(len(rows)), lambda k: k not in near)
    return [(fold, [rows[k] for k in run]) for fold, run in runs]


def places(text):
    """For each line where it is: "section › definition"; of a blank line "", since it says nothing."""
    lines, found = text.splitlines(), []
    for piece in family.pieces(text):
        name = "" if piece.name == f"section {piece.section}" else piece.name
        place = " › ".join(filter(None, [piece.section, name]))
        found += [place if line.strip() else "" for line in lines[piece.first - 1 : piece.last]]
    return found


def fold_title(rows, where):
    named = [where[row.right] for row in rows if where[row.right]] or ["blank"]
    return f"{len(rows)} equal lines: {named[0]}" + (f" … {named[-1]}" if named[-1] != named[0] else "")


def coloured(text):
    """The text's lines, each a list of (kind, piece of text)."""
    lines = [[]]
    for token, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        kind = next((KINDS[ancestor] for ancestor in reversed(token.split()) if ancestor in KINDS), "")
        for k, piece in enumerate(value.split("\n")):
            if k:
                lines.append([])
            if piece:
                lines[-1].append((kind, piece))
    return lines if lines[-1] else lines[:-1]


def cut(segments, marks):
    """A line's segments, cut where marks begin and end: (kind, piece of text, whether it is marked)."""
    at = 0
    for kind, piece in segments:
        ends = sorted({end for mark in marks for end in mark if at < end < at + len(piece)} | {at + len(piece)})
        for end in ends:
            yield kind, piece[: end - at], any(first <= at < last for first, last in marks)
            piece, at = piece[end - at :], end


# ------------------------------------------------------------------------------------------------------ the terminal


def cells(row, side, sides):
    """Number, sign and text of a row on one side; empty where it has none there."""
    k = (row.left, row.right)[side]
    if k is None:
        return ["", "", ""]
    sign, line = " " if row.equal else "-+"[side], Text()
    for kind, piece, marked in cut(sides[side][k], row.marks[side]):
        line.append(piece, f"reverse {SIGNS[sign]}" if marked else STYLES[kind])
    return [Text(str(k + 1), SIGNS[sign]), Text(f" {sign} ", SIGNS[sign]), line]


def one_column(rows):
    """(row, side) for each line of a single column; of rows that differ first all the left lines, then the right."""
    for equal, run in itertools.groupby(rows, lambda row: row.equal):
        run = list(run)
        for side in [1] if equal else [0, 1]:
            yield from ((row, side) for row in run if (row.left, row.right)[side] is not None)


def print_diff(console, found, sides, titles, where):
    """found: blocks; sides: coloured lines, and titles, of left and right; where: the places of the right lines."""
    two = console.width >= SIDE_BY_SIDE
    code = (console.width - 3) // 2 - 8 if two else console.width - 8  # columns for code; numbers and signs take 8

    def grid():
        table = Table.grid()
        for width in [5, 3, code, 3, 5, 3, code] if two else [5, 3, code]:
            table.add_column(width=width, overflow="fold", justify="right" if width == 5 else "left")
        return table

    head = [["", Text(f" {sign} ", SIGNS[sign]), Text(title, "bold")] for sign, title in zip("-+", titles)]
    table = grid()
    for cells_of_row in [[*head[0], " │ ", *head[1]]] if two else head:
        table.add_row(*cells_of_row)
    console.print(table)
    for fold, rows in found:
        if fold:
            console.print(Text(f"   ⋯ {fold_title(rows, where)}", "dim"))
            continue
        table = grid()
        if two:
            for row in rows:
                table.add_row(*cells(row, 0, sides), Text(" │ ", "dim"), *cells(row, 1, sides))
        else:
            for row, side in one_column(rows):
                table.add_row(*cells(row, side, sides))
        console.print(table)


# ---------------------------------------------------------------------------------------------------------- the page


CSS = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --faint: #59636e; --fold: #eef1f4;
  --minus: #ffebe9; --minus-word: #ffb8b0; --plus: #e4f8e8; --plus-word: #9be9a8;
  --comment: #59636e; --string: #0a4f8f; --keyword: #b3202c; --name: #6639ba; --number: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #0d1117; --faint: #8d96a0; --fold: #1c2128;
  --minus: #3c1618; --minus-word: #8e2a2a; --plus: #12301c; --plus-word: #1f6f35;
  --comment: #9aa4ae; --string: #a5d6ff; --keyword: #ff8f87; --name: #d2a8ff; --number: #79c0ff; } }
body { margin: 1rem; color: var(--text); background: var(--page); font: 0.8rem/1.45 ui-monospace, monospace; }
table { width: 100%; border-collapse: collapse; table-layout: fixed; }
col.n { width: 3.2rem; } col.s { width: 1.2rem; }
td { padding: 0; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; }
.n, .s { color: var(--faint); text-align: right; padding-right: 0.4rem; user-select: none; }
.minus { background: var(--minus); } .minus mark { background: var(--minus-word); }
.plus { background: var(--plus); } .plus mark { background: var(--plus-word); }
mark { color: inherit; border-radius: 2px; }
summary { color: var(--faint); background: var(--fold); padding: 0.2rem 0.6rem; margin: 0.2rem 0; cursor: pointer; }
.comment { color: var(--comment); } .string { color: var(--string); } .keyword { color: var(--keyword); }
.name { color: var(--name); } .number { color: var(--number); }
@media (max-width: 60rem) {  /* one column: left above right, and what is equal once */
  col { display: none; } tr { display: grid; grid-template-columns: 3.2rem 1.2rem 1fr; }
  .none, .equal .left { display: none; } }
"""


def html_cells(row, side, sides):
    """A row's three cells on one side of the page."""
    k, classes = (row.left, row.right)[side], ["left", "right"][side]
    if k is None:
        return f'<td class="n none {classes}"></td><td class="s none {classes}"></td><td class="none {classes}"></td>'
    sign, line = " " if row.equal else "−+"[side], ""
    classes += "" if row.equal else [" minus", " plus"][side]
    for kind, piece, marked in cut(sides[side][k], row.marks[side]):
        piece = html.escape(piece)
        piece = f'<span class="{kind}">{piece}</span>' if kind else piece
        line += f"<mark>{piece}</mark>" if marked else piece
    return f'<td class="n {classes}">{k + 1}</td><td class="s {classes}">{sign}</td><td class="{classes}">{line}</td>'


def page(found, sides, titles, where):
    """The same as one HTML page that needs nothing else; a fold opens on a click."""
    columns = "<colgroup>" + '<col class="n"><col class="s"><col>' * 2 + "</colgroup>"
    head = "".join(
        f'<td class="n {side}"></td><td class="s {side}">{sign}</td><td class="{side}"><b>{html.escape(title)}</b></td>'
        for side, sign, title in zip(["left minus", "right plus"], "−+", titles)
    )
    parts = [f"<table>{columns}<tr>{head}</tr></table>"]
    for fold, rows in found:
        classes = [' class="equal"' if row.equal else "" for row in rows]
        both = [html_cells(row, 0, sides) + html_cells(row, 1, sides) for row in rows]
        lines = [f"<tr{of_row}>{pair_of_cells}</tr>" for of_row, pair_of_cells in zip(classes, both)]
        table = "\n".join([f"<table>{columns}", *lines, "</table>"])
        summary = html.escape(fold_title(rows, where)) if fold else ""
        parts.append(f"<details><summary>⋯ {summary}</summary>\n{table}\n</details>" if fold else table)
    names = html.escape(" → ".join(title.split(":")[0] for title in titles))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{names}</title>\n<style>{CSS}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


# -------------------------------------------------------------------------------------------------- the command line


def find(name):
    """A script's path, by its name, with or without .py, or by a path. ValueError where there is none."""
    for path in (family.ROOT / f"{name}.py", family.ROOT / name, Path(f"{name}.py"), Path(name)):
        if path.is_file():
            return path.resolve()
    raise ValueError(f"there is no script {name!r}; there are {', '.join(family.family())}, and paths will do")


def read(path):
    """A script's text. ValueError where it is no Python."""
    try:
        text = path.read_text(encoding="utf-8")
        family.pieces(text)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no Python script: {error}") from error
    return text


def pair(args):
    """The paths of left and right. ValueError where the arguments don't name two scripts."""
    if args.context < 0 or (args.width is not None and args.width < 40):
        raise ValueError("--context must be 0 or greater, --width 40 or greater")
    path = find(args.script)
    if args.other:
        left, right = path, find(args.other)
    elif path.parent == family.ROOT and path.stem in family.PARENT:
        left, right = find(family.PARENT[path.stem]), path
    else:
        raise ValueError(f"{path.name} grew from no other script: name the one to compare it with")
    if left == right:
        raise ValueError(f"{left.name} is to be compared with itself")
    return left, right


def main(args):
    try:
        paths = pair(args)
        left, right = map(read, paths)
        names = [path.name if paths[0].name != paths[1].name else str(path) for path in paths]
        lengths = [f"{name}: {len(family.code_lines(text))} code lines" for name, text in zip(names, (left, right))]
        titles = [lengths[0], f"{lengths[1]}, {family.changed(left, right)} changed"]
        found = blocks(compare(left.splitlines(), right.splitlines()), args.context)
        shown = found, [coloured(left), coloured(right)], titles, places(right)
        if args.html:
            args.html.write_text(page(*shown), encoding="utf-8")
            print(f"wrote {args.html}")
        else:
            print_diff(Console(width=args.width), *shown)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

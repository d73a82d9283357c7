"""Shows two trainers side by side, in colour: what differs between them is the algorithm.

    python tools/diff.py grpo dapo                     any two scripts, by name or path
    python tools/diff.py grpo_ar_lopti                 a script and the one it grew from (tools/family.py)
    python tools/diff.py grpo dapo --html dapo.html    the same as a page of its own, for any browser
    python tools/diff.py --all pages                   the pages of all parents and children, and an index.html

The code comes first, section by section, and the module docstring last; --no_docstring leaves it out. Removed lines are
marked "-", added ones "+"; in a line that is on both sides, the words that differ are marked. Equal lines are folded,
and the fold says what they are. Long lines are wrapped. A terminal of fewer than 120 columns shows one column.
"""

import ast
import bisect
import difflib
import html
import itertools
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tyro
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

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
SIDE_BY_SIDE = 120  # columns that it takes
BETWEEN = " │ "  # the two columns
HANG = 4  # columns by which a wrapped line's continuation is indented further than the line
ALIKE = 0.5  # similarity, 0 to 1, from which two lines are the same line, changed


@dataclass
class Args:
    """Which two, and how."""

    script: tyro.conf.Positional[str] = ""  # a script, by name or path
    other: tyro.conf.Positional[str] = ""  # what it is compared with; none: its parent, which then stands on the left
    context: int = 3  # equal lines shown around what differs, >= 0
    docstring: bool = True  # show the module docstrings, after the code
    html: Path | None = None  # write a page here, and nothing to the terminal
    all: Path | None = None  # write the pages of all parents and children into this folder
    width: int | None = None  # columns to write in, >= 40; None: those of the terminal


@dataclass
class Script:
    """One of the two that are compared."""

    name: str  # as it is shown
    stem: str  # its name in the family; "" if it is none of it
    text: str

    @cached_property
    def lines(self):
        return self.text.splitlines()

    @cached_property
    def coloured(self):
        return coloured(self.text)

    @cached_property
    def pieces(self):
        """For each line the piece it lies in (tools/family.py)."""
        found = family.pieces(self.text) or [family.Piece("comments", "", 1, len(self.lines))]
        return [piece for piece in found for _ in range(piece.first, piece.last + 1)]

    @cached_property
    def sections(self):
        """For each line the name of its section. The blank lines above a heading belong to the section before."""
        first = "imports" if self.pieces and self.pieces[-1].section else "code"
        found = []
        for line, piece in zip(self.lines, self.pieces):
            found.append(piece.section or first if line.strip() or not found else found[-1])
        return found

    @cached_property
    def docstring_lines(self):
        """The lines of the module docstring, counted from 0, except one that shares a line with code."""
        tree = ast.parse(self.text)
        if ast.get_docstring(tree) is None:
            return range(0)
        first, last = tree.body[0].lineno, tree.body[0].end_lineno
        shares = len(tree.body) > 1 and tree.body[1].lineno == last
        return range(0) if shares else range(first - 1, last)

    @cached_property
    def code_lines(self):
        """All other lines, counted from 0."""
        return [k for k in range(len(self.lines)) if k not in self.docstring_lines]

    @cached_property
    def num_code_lines(self):
        return len(family.code_lines(self.text))

    @property
    def about(self):
        """The first paragraph of the module docstring: what the script is, in one line."""
        return " ".join(paragraphs(self.text)[0].split())

    @property
    def objective(self):
        """The formulas of the module docstring: its paragraphs that are indented as a whole."""
        found = paragraphs(self.text)
        formulas = [text for text in found if all(line.startswith("    ") for line in text.splitlines()) and text]
        return "\n\n".join(re.sub("^    ", "", text, flags=re.MULTILINE) for text in formulas)


def paragraphs(text):
    """The paragraphs of a script's module docstring; [""] if there is none."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return re.split(r"\n(?:[ \t]*\n)+", docstring)


@dataclass
class Row:
    """A line of the left text, of the right one, or of both (counted from 0), and which of its characters differ."""

    left: int | None
    right: int | None
    equal: bool = False
    marks: tuple = ((), ())  # left and right: [(first character, last + 1), ...]


@dataclass
class Part:
    """A section of the two, or the docstring, or some sections in a row that don't differ."""

    name: str
    rows: list

    @property
    def differs(self):
        return not all(row.equal for row in self.rows)

    def count(self):
        """How many of its lines, comments and blank ones included, were removed and added."""
        rows = [row for row in self.rows if not row.equal]
        return sum(row.left is not None for row in rows), sum(row.right is not None for row in rows)


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


def parts(left, right, docstring=True):
    """The two scripts as Parts: the code section by section, then the docstring."""

    def rows_of(left_lines, right_lines):
        rows = compare([left.lines[k] for k in left_lines], [right.lines[k] for k in right_lines])
        for row in rows:
            row.left = None if row.left is None else left_lines[row.left]
            row.right = None if row.right is None else right_lines[row.right]
        return rows

    def section(row):
        return left.sections[row.left] if row.right is None else right.sections[row.right]

    runs = itertools.groupby(rows_of(left.code_lines, right.code_lines), section)
    code = [Part(name, list(rows)) for name, rows in runs]
    found = []
    for differs, run in itertools.groupby(code, lambda part: part.differs):
        run = list(run)
        if differs:
            found += run
        else:
            found.append(Part(", ".join(part.name for part in run), [row for part in run for row in part.rows]))
    if docstring and (left.docstring_lines or right.docstring_lines):
        found.append(Part("docstring", rows_of(left.docstring_lines, right.docstring_lines)))
    return found


def fold_title(rows, right, part):
    """What is folded: the first and the last definition in it, or the sections."""
    if part.differs:
        pieces = [right.pieces[row.right] for row in rows if right.lines[row.right].strip()]
        names = [piece.name for piece in pieces if piece.name != f"section {piece.section}"]
        names = list(dict.fromkeys([*names[:1], *names[-1:]]))
    else:
        names = [part.name]
    return f"{len(rows)} equal lines" + (": " if names else "") + " … ".join(names)


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


def fitted(line, width):
    """A Text as a list of Texts of at most `width` columns, cut behind a space if one is near the end.

    What follows is indented by HANG more than the line. Of a section's heading only dashes are left out.
    """
    plain = line.plain
    surplus = cell_len(plain) - width
    if surplus > 0 and (heading := family.HEADING.match(plain)) and heading.start(1) > surplus + 4:
        return [line[:2] + line[2 + surplus :]]
    indent = len(plain) - len(plain.lstrip())
    hang = min(indent + HANG, width // 2)
    found, room = [], width
    while cell_len(line.plain) > room:
        plain = line.plain
        ends = list(itertools.accumulate(map(cell_len, plain)))
        fits = max(1, bisect.bisect_right(ends, room))
        space = plain.rfind(" ", 0, fits) + 1
        end = space if space > max(fits // 2, 0 if found else indent) else fits
        found.append(line[:end])
        line, room = line[end:], width - hang
    found.append(line)
    return found[:1] + [Text(" " * hang) + rest for rest in found[1:]]


def shown_text(text):
    """A tab as four spaces, and a dot for what would move the cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "·", text.replace("\t", "    "))


def cells(row, side, scripts):
    """Number, sign and text of a row on one side; empty if it has none there."""
    k = (row.left, row.right)[side]
    if k is None:
        return "", " ", Text()
    sign, line = " " if row.equal else "-+"[side], Text()
    for kind, piece, marked in cut(scripts[side].coloured[k], row.marks[side]):
        line.append(shown_text(piece), f"reverse {SIGNS[sign]}" if marked else STYLES[kind])
    return str(k + 1), sign, line


def one_column(rows):
    """(row, side) for each line of a single column; of rows that differ first all the left lines, then the right."""
    for equal, run in itertools.groupby(rows, lambda row: row.equal):
        run = list(run)
        for side in [1] if equal else [0, 1]:
            yield from ((row, side) for row in run if (row.left, row.right)[side] is not None)


def print_diff(console, found, scripts, context=3):
    """found: the Parts of the two scripts."""
    two = console.width >= SIDE_BY_SIDE
    number_width = len(str(max(len(script.lines) for script in scripts)))
    side_width = (console.width - len(BETWEEN)) // 2 if two else console.width
    before_code = number_width + 3

    def side_lines(number, sign, line):
        """One side's lines on the screen: the first has number and sign."""
        first = Text(f"{number:>{number_width}} {sign} ", SIGNS[sign])
        starts = itertools.chain([first], itertools.repeat(Text(" " * before_code)))
        return [start + part for start, part in zip(starts, fitted(line, side_width - before_code))]

    def print_cells(*sides):
        for texts in itertools.zip_longest(*(side_lines(*side) for side in sides), fillvalue=Text()):
            line = texts[0].copy()
            for text in texts[1:]:
                line.append(" " * (side_width - cell_len(line.plain)) + BETWEEN, "dim")
                line.append_text(text)
            line.rstrip()
            console.print(line, no_wrap=True, crop=False, overflow="ignore")

    titles = [("", sign, Text(title, "bold")) for sign, title in zip("-+", titles_of(scripts))]
    for sides in [titles] if two else [[title] for title in titles]:
        print_cells(*sides)
    for part in found:
        if part.differs:
            heading = f"── {part.name} "
            console.print(Text(heading.ljust(console.width, "─"), "bold"), no_wrap=True, overflow="ellipsis")
        for fold, rows in blocks(part.rows, context):
            if fold:
                title = Text(f"{'⋯':>{number_width}} {fold_title(rows, scripts[1], part)}", "dim")
                for line in fitted(title, console.width):
                    line.rstrip()
                    console.print(line, no_wrap=True)
            elif two:
                for row in rows:
                    print_cells(cells(row, 0, scripts), cells(row, 1, scripts))
            else:
                for row, side in one_column(rows):
                    print_cells(cells(row, side, scripts))


def titles_of(scripts):
    lengths = [f"{script.name}: {script.num_code_lines} code lines" for script in scripts]
    return [lengths[0], f"{lengths[1]}, {family.changed(*(script.text for script in scripts))} changed"]


# ---------------------------------------------------------------------------------------------------------- the page


CSS = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --faint: #59636e; --fold: #eef1f4; --link: #0a58ca;
  --minus: #ffebe9; --minus-word: #ffb8b0; --plus: #e4f8e8; --plus-word: #9be9a8;
  --comment: #59636e; --string: #0a4f8f; --keyword: #b3202c; --name: #6639ba; --number: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #0d1117; --faint: #8d96a0; --fold: #1c2128;
  --link: #79b8ff; --minus: #3c1618; --minus-word: #8e2a2a; --plus: #12301c; --plus-word: #1f6f35;
  --comment: #9aa4ae; --string: #a5d6ff; --keyword: #ff8f87; --name: #d2a8ff; --number: #79c0ff; } }
body { margin: 1rem; color: var(--text); background: var(--page); font: 1rem/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; } h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; }
h3 { font-size: 1rem; margin: 0; } p { margin: 0.3rem 0; max-width: 50rem; } a { color: var(--link); }
a:focus-visible, summary:focus-visible, pre:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.both { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; } .both > div { min-width: 0; }
pre, table { font: 0.8rem/1.45 ui-monospace, monospace; }
pre { background: var(--fold); padding: 0.6rem; margin: 0.3rem 0; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; table-layout: fixed; }
col.n { width: 3.2rem; } col.s { width: 1.2rem; }
td { padding: 0; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; }
.c { padding-left: var(--hang); text-indent: calc(-1 * var(--hang)); }
.n, .s { color: var(--faint); text-align: right; padding-right: 0.4rem; user-select: none; }
.minus { background: var(--minus); } .minus mark { background: var(--minus-word); }
.plus { background: var(--plus); } .plus mark { background: var(--plus-word); }
mark { color: inherit; border-radius: 2px; }
summary { color: var(--faint); background: var(--fold); padding: 0.2rem 0.6rem; margin: 0.2rem 0; cursor: pointer; }
.comment { color: var(--comment); } .string { color: var(--string); } .keyword { color: var(--keyword); }
.name { color: var(--name); } .number { color: var(--number); }
@media (max-width: 60rem) {  /* one column: left above right, and what is equal once */
  .both { display: block; }
  col { display: none; } tr { display: grid; grid-template-columns: 2.4rem 1rem minmax(0, 1fr); }
  .c { --least: min(var(--hang), 10ch); padding-left: var(--least); text-indent: calc(-1 * var(--least)); }
  .none, .equal .left { display: none; } }
"""
COLUMNS = "<colgroup>" + '<col class="n"><col class="s"><col>' * 2 + "</colgroup>"


def document(title, body):
    """A whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def html_cells(row, side, scripts):
    """A row's three cells on one side of the page."""
    k, classes = (row.left, row.right)[side], ["left", "right"][side]
    if k is None:
        return f'<td class="n none {classes}"></td><td class="s none {classes}"></td><td class="none {classes}"></td>'
    sign, line = " " if row.equal else "−+"[side], ""
    classes += "" if row.equal else [" minus", " plus"][side]
    for kind, piece, marked in cut(scripts[side].coloured[k], row.marks[side]):
        piece = html.escape(piece)
        piece = f'<span class="{kind}">{piece}</span>' if kind else piece
        line += f"<mark>{piece}</mark>" if marked else piece
    plain = scripts[side].lines[k]
    hang = len(plain) - len(plain.lstrip()) + HANG  # where the line goes on if it is wrapped
    return (
        f'<td class="n {classes}">{k + 1}</td><td class="s {classes}">{sign}</td>'
        f'<td class="c {classes}" style="--hang: {hang}ch">{line}</td>'
    )


def html_table(rows, scripts):
    lines = []
    for row in rows:
        of_row = ' class="equal"' if row.equal else ""
        lines.append(f"<tr{of_row}>{html_cells(row, 0, scripts)}{html_cells(row, 1, scripts)}</tr>")
    return "\n".join([f"<table>{COLUMNS}", *lines, "</table>"])


def html_part(part, scripts, context):
    """A part's lines; a fold opens on a click."""
    found = []
    for fold, rows in blocks(part.rows, context):
        table = html_table(rows, scripts)
        if fold:
            title = html.escape(fold_title(rows, scripts[1], part))
            table = f"<details><summary>⋯ {title}</summary>\n{table}\n</details>"
        found.append(table)
    return "\n".join(found)


def page_name(parent, child):
    """The file name of the page of two scripts of the family."""
    return f"{parent}_{child}.html"


def link(parent, child):
    return f'<a href="{page_name(parent, child)}">{parent}.py → {child}.py</a>'


def html_family(left, right):
    """Links to the pages of what the two scripts grew from and what grew from them, as --all names them."""
    if not (left.stem and right.stem):
        return ""
    stems = family.family()
    before = [(family.PARENT[stem], stem) for stem in (left.stem, right.stem) if stem in family.PARENT]
    after = [(right.stem, stem) for stem in stems if family.PARENT.get(stem) == right.stem]
    lines = []
    for words, pairs in (("parent", before), ("children", after)):
        links = [link(*pair) for pair in pairs if pair != (left.stem, right.stem)]
        if links:
            lines.append(f"<li>{words}: {', '.join(links)}</li>")
    lines.append('<li><a href="index.html">the whole family</a></li>')
    return '<nav aria-label="Family">\n<ul>\n' + "\n".join(lines) + "\n</ul>\n</nav>\n"


def html_objectives(scripts):
    """What the two are, with their formulas side by side."""
    columns = []
    for script in scripts:
        name, about, objective = (html.escape(text) for text in (script.name, script.about, script.objective))
        formulas = (
            f'<pre tabindex="0" role="region" aria-label="objective of {name}">{objective}</pre>' if objective else ""
        )
        columns.append(f"<div>\n<h3>{name}</h3>\n<p>{about}</p>\n{formulas}\n</div>\n")
    return '<div class="both">\n' + "".join(columns) + "</div>\n"


def page(found, scripts, context=3):
    """The two as one HTML page that needs nothing else. found: their Parts."""
    title = html.escape(" → ".join(script.name for script in scripts))
    contents, sections, anchors = [], [], set()
    for number, part in enumerate(found):
        body = html_part(part, scripts, context)
        if part.differs:
            name = html.escape(part.name)
            removed, added = part.count()
            anchor = f"{name}-{number}" if name in anchors else name
            anchors.add(anchor)
            contents.append(f'<li><a href="#{anchor}">{name}</a> (−{removed} +{added})</li>')
            body = f'<section id="{anchor}">\n<h2>{name}</h2>\n{body}\n</section>'
        sections.append(body)
    lengths = ", ".join(f"{html.escape(script.name)} has {script.num_code_lines}" for script in scripts)
    num_changed = family.changed(*(script.text for script in scripts))
    return document(
        " → ".join(script.name for script in scripts),
        f"<h1>{title}</h1>\n"
        f"{html_family(*scripts)}"
        f"{html_objectives(scripts)}"
        f"<p>{num_changed} code lines changed (removed and added together); {lengths}.</p>\n"
        f'<nav aria-label="Sections that differ">\n<h2>What differs</h2>\n<ul>\n{"".join(contents)}\n</ul>\n</nav>\n'
        "<main>\n" + "\n".join(sections) + "\n</main>",
    )


# ------------------------------------------------------------------------------------------------ the pages of all


def index(scripts):
    """The page of the family tree. scripts: {stem: Script}."""

    def branch(stem):
        script, parent = scripts[stem], family.PARENT.get(stem)
        words = f"<b>{html.escape(script.name)}</b>"
        if parent:
            words = f"{link(parent, stem)}, {family.changed(scripts[parent].text, script.text)} code lines changed"
        children = "".join(branch(child) for child in scripts if family.PARENT.get(child) == stem)
        children = f"\n<ul>\n{children}</ul>\n" if children else ""
        return f"<li>{words}<br>{html.escape(script.about)}{children}</li>\n"

    root = next(iter(scripts))
    return document(
        "What grew from what",
        "<h1>What grew from what</h1>\n<p>Each page shows what differs between a script and the one it grew from.</p>\n"
        f'<nav aria-label="Family">\n<ul>\n{branch(root)}</ul>\n</nav>',
    )


def write_all(folder, args):
    """Writes the pages of all parents and children into a folder, and their index."""
    scripts = {stem: read(find(stem)) for stem in family.family()}
    folder.mkdir(parents=True, exist_ok=True)
    children = [stem for stem in scripts if stem in family.PARENT]
    for stem in tqdm(children, desc="pages", unit="page", leave=False, delay=1):
        parent = family.PARENT[stem]
        both = scripts[parent], scripts[stem]
        text = page(parts(*both, args.docstring), both, args.context)
        (folder / page_name(parent, stem)).write_text(text, encoding="utf-8")
    (folder / "index.html").write_text(index(scripts), encoding="utf-8")
    print(f"wrote {folder / 'index.html'} and {len(children)} pages beside it")


# -------------------------------------------------------------------------------------------------- the command line


def find(name):
    """A script's path, by its name, with or without .py, or by a path. ValueError where there is none."""
    for path in (family.ROOT / f"{name}.py", family.ROOT / name, Path(f"{name}.py"), Path(name)):
        if path.is_file():
            return path.resolve()
    raise ValueError(f"there is no script {name!r}; there are {', '.join(family.family())}, and paths will do")


def read(path):
    """A Script. ValueError if it is no Python."""
    try:
        text = path.read_text(encoding="utf-8")
        # These end a line for str.splitlines, but not for Python.
        text = re.sub("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", " ", text)
        family.pieces(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is no Python script: {error}") from error
    in_family = path.parent == family.ROOT and path.stem in ["grpo", *family.PARENT]
    return Script(path.name, path.stem if in_family else "", text)


def pair(args):
    """The two scripts, left and right. ValueError if the arguments don't name two."""
    if not args.script:
        raise ValueError("name one or two scripts, or a folder for all pages: --all FOLDER")
    path = find(args.script)
    if args.other:
        paths = path, find(args.other)
    elif path.parent == family.ROOT and path.stem in family.PARENT:
        paths = find(family.PARENT[path.stem]), path
    else:
        raise ValueError(f"{path.name} grew from no other script: name the one to compare it with")
    if paths[0] == paths[1]:
        raise ValueError(f"{path.name} is to be compared with itself")
    left, right = map(read, paths)
    if left.name == right.name:
        left.name, right.name = map(str, paths)
    return left, right


def check_args(args):
    if args.context < 0 or (args.width is not None and args.width < 40):
        raise ValueError("--context must be 0 or greater, --width 40 or greater")
    if args.all and (args.script or args.html):
        raise ValueError("--all writes all pages: it goes with neither a script nor --html")


def main(args):
    try:
        check_args(args)
        if args.all:
            write_all(args.all, args)
            return
        scripts = pair(args)
        found = parts(*scripts, args.docstring)
        if args.html:
            args.html.write_text(page(found, scripts, args.context), encoding="utf-8")
            print(f"wrote {args.html}")
        else:
            print_diff(Console(width=args.width), found, scripts, args.context)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

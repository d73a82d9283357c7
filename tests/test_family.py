"""The scripts as a family: what they share is the same to the letter, and the tools that read,
carry and count it.

tools/family.py, diff.py, propagate.py and table.py are checked on small scripts and git
repositories made here, and on the trainers themselves.
"""

import ast
import difflib
import functools
import html.parser
import io
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tools import diff, family, propagate, table

# What a script has of its own: the pieces (tools/family.py) in which it differs from its parent,
# comments and docstrings included. "Args" stands for all of Args, "Args.eta" for that flag alone. A
# script must be in here.
# A heading above flags (# ---- objective) belongs to the first of them: where a script begins with a
# flag of its own, the one that came first before has lost it.
OWNED = {
    "grpo_ar_lopti": """module docstring, imports, Args.alpha, Args.eta, Args.lopti_stages,
        Args.clip_low, TASKS, Args.check, ar_weight, in_stage, update, main""",
    "acpo": """module docstring, imports, Args.kl_coef, Args.clip_low, Args.clip_high,
        Args.clip_alpha, Args.clip_base, Args.clip_base_high, Args.clip_max, Args.n_bins, TASKS,
        clip_ranges, policy_loss, update, update_once""",
    "archer": """module docstring, imports, Args.entropy_quantile, Args.reasoning_clip,
        Args.reasoning_kl, Args.clip_low, Args.clip_high, reasoning_tokens, policy_loss, update""",
    "cispo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, Args.gated, GATE_LOW,
        GATE_HIGH, policy_loss, update""",
    "dapo": """module docstring, imports, Args.max_refills, Args.overlong_buffer, Args.check,
        dynamic_sampling, overlong_penalty, main""",
    "entropy_top": """module docstring, imports, Args.entropy_top, Args.clip_low, entropy_threshold,
        update""",
    "gspo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, policy_loss, update""",
    "reinforce_pp": """module docstring, imports, token_returns, compute_advantages, policy_loss,
        main""",
    "reinforce": """module docstring, imports, Args.updates_per_step, Args.clip_low, Args.clip_high,
        Args.kl_coef, compute_advantages, policy_loss, k3, update, update_once, main""",
    "rloo": """module docstring, imports, Args.kl_coef, Args.updates_per_step, compute_advantages,
        main""",
    "dr_grpo": "module docstring, Args.kl_coef, compute_advantages, policy_loss, update",
    "ppo": """module docstring, imports, Args.gamma, Args.gae_lambda, Args.value_lr,
        Args.value_clip, ValueModel, ValueModel.__init__, ValueModel.forward, load_policy,
        compute_values, estimate_advantages, compute_advantages, policy_loss, value_loss,
        update_values, main""",
    "dppo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, Args.divergence,
        Args.delta, LARGEST_RATIO, outside_region, policy_loss""",
    "sapo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, Args.tau_positive,
        Args.tau_negative, policy_loss, update""",
    "grpo_tis": """module docstring, Args.correction, Args.correction_max, Args.correction_min,
        Args.check, sampler_correction, policy_loss, main""",
}
# The patch is the algorithm. reinforce_pp.py has the import already.
OWNED["reinforce_pp_ar_lopti"] = OWNED["grpo_ar_lopti"].replace("imports,", "", 1)
OWNED["dapo_ar_lopti"] = OWNED["grpo_ar_lopti"]
DESCENDANTS = [stem for stem in family.family() if stem in family.PARENT]
each_descendant = pytest.mark.parametrize("stem", DESCENDANTS)


def call(*words):
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)


# ------------------------------------------------------------------------------------------- the scripts themselves


def differing(before, after):
    """The names of the pieces that two texts don't have in common, letter by letter."""
    before, after = family.texts(before), family.texts(after)
    return {name for name in before | after if before.get(name) != after.get(name)}


@each_descendant
def test_a_script_differs_from_its_parent_only_in_what_it_owns(stem):
    """`diff grpo.py grpo_ar_lopti.py` shows the algorithm and nothing else, neither in code nor in comments."""
    assert stem in OWNED, f"{stem}.py is new: say in OWNED what it has of its own"
    owned = {name.strip() for name in OWNED[stem].split(",")}
    before, after = family.source(family.PARENT[stem]), family.source(stem)
    changed = differing(before, after)
    assert {name for name in changed if name not in owned and name.split(".")[0] not in owned} == set()
    assert {name for name in owned if not any(n == name or n.startswith(f"{name}.") for n in changed)} == set()


@each_descendant
def test_what_a_script_shares_with_its_parent_comes_in_the_same_order(stem):
    before, after = (
        family.texts(family.source(family.PARENT[stem])),
        family.texts(family.source(stem)),
    )
    assert [name for name in after if name in before] == [name for name in before if name in after]


def without_docstring(stem):
    """A script from below its docstring on, with α's default as in grpo_ar_lopti.py; and without Args.check.

    AR-Lopti has settings that depend on each other, and so has DAPO: both bring a check, and it is compared apart.
    """
    text = family.source(stem)
    pieces = family.texts(text)
    below = text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno :]
    text = "".join(below).replace("    alpha: Fraction = 0.1  #", "    alpha: Fraction = 0.3  #")
    return text.replace(pieces.get("Args.check", "\0"), "")


def checks_of(stem):
    """The lines of a script's Args.check below its docstring; "" without one."""
    piece = family.texts(family.source(stem)).get("Args.check", "")
    return piece.partition('."""\n')[2]


@pytest.mark.parametrize("parent", ["reinforce_pp", "dapo"])
def test_what_makes_ar_lopti_of_grpo_makes_it_of_the_others(parent, tmp_path):
    """What turns grpo.py into grpo_ar_lopti.py turns the parent into its own AR-Lopti, letter by
    letter.

    By three-way merge, and as an ordinary patch, in which no import is that the parent has already.
    """
    stems = (parent, "grpo", "grpo_ar_lopti")
    for stem in stems:
        (tmp_path / stem).write_text(without_docstring(stem))
    merge = ["git", "merge-file", "-p", *stems]
    merged = subprocess.run(merge, cwd=tmp_path, capture_output=True, text=True)
    assert merged.returncode == 0 and merged.stdout == without_docstring(f"{parent}_ar_lopti")
    patched = {stem: without_docstring(stem).replace("import math\n", "") for stem in stems}
    lines = [patched[stem].splitlines(keepends=True) for stem in ("grpo", "grpo_ar_lopti")]
    (tmp_path / "change.patch").write_text("".join(difflib.unified_diff(*lines, f"a/{parent}", f"b/{parent}", n=1)))
    (tmp_path / parent).write_text(patched[parent])
    apply = ["git", "apply", "-C1", "change.patch"]
    subprocess.run(apply, cwd=tmp_path, check=True)
    assert (tmp_path / parent).read_text() == merged.stdout.replace("import math\n", "")
    assert checks_of(f"{parent}_ar_lopti") == checks_of("grpo_ar_lopti") + checks_of(parent)


def test_the_tables_are_up_to_date():
    readme, objectives = ((ROOT / name).read_text() for name in ("README.md", "docs/objectives.md"))
    assert table.with_table(readme, table.short_table()) == readme
    assert table.with_table(objectives, table.table()) == objectives


# --------------------------------------------------------------------------------------------------------- family.py

HEAD = "# " + "-" * 30
SCRIPT = f'''"""What it is,
in two lines."""

import os
import sys

{HEAD} arguments

# about N
N = 1  # a number


@decorated  # on a line of its own
class Args:
    """The flags."""

    lr: float = 1.0  # a rate
    # how many
    steps: int = 2

    def shown(self):
        """A docstring."""
        return "# no comment"


N |= 2
# ------ short: no heading
{HEAD} main (and what belongs to it)


def main():
    text = """kept
# inside a string

it"""
    "a text that nothing uses"
    return text   # trailing
'''


def test_code_lines_by_hand():
    lines = family.code_lines(SCRIPT)
    assert lines == [
        "import os",
        "import sys",
        "N = 1",
        "@decorated",
        "class Args:",
        "    lr: float = 1.0",
        "    steps: int = 2",
        "    def shown(self):",
        '        return "# no comment"',
        "N |= 2",
        "def main():",
        '    text = """kept',
        "# inside a string",
        'it"""',
        "    return text",
    ]
    assert family.code_lines("f = lambda: 0\n") == ["f = lambda: 0"]


def test_changed_counts_lines_added_and_removed_and_no_comments():
    before = 'a = 1\nb = 2\n\n\ndef f():\n    """Old."""\n    return a  # old\n'
    after = 'a = 1\nb = 3\nc = 4\n\n\ndef f():\n    """New,\n    longer."""\n    return a  # new\n'
    assert family.changed(before, after) == 3  # b = 2 goes; b = 3 and c = 4 come
    assert family.changed(before, before) == 0 and family.changed("a = 1\n", "") == 1


def test_pieces_are_all_lines_and_have_what_stands_above_them():
    found = family.pieces(SCRIPT)
    assert [piece.name for piece in found] == [
        "module docstring", "imports", "imports", "section arguments", "N", "Args", "Args", "Args.lr", "Args.steps",
        "Args.shown", "N", "section main", "main",
    ]  # fmt: skip
    assert [row for piece in found for row in range(piece.first, piece.last + 1)] == list(
        range(1, len(SCRIPT.splitlines()) + 1)
    )
    assert [piece.section for piece in found] == [""] * 3 + ["arguments"] * 8 + ["main"] * 2
    texts = family.texts(SCRIPT)
    assert texts["module docstring"] == '"""What it is,\nin two lines."""\n'
    assert texts["imports"] == "\nimport os\nimport sys\n"
    assert texts["N"] == "\n# about N\nN = 1  # a number\n\n\nN |= 2\n"
    assert texts["Args"] == '\n\n@decorated  # on a line of its own\nclass Args:\n    """The flags."""\n'
    assert texts["Args.steps"] == "    # how many\n    steps: int = 2\n"
    assert texts["section main"] == f"# ------ short: no heading\n{HEAD} main (and what belongs to it)\n"
    assert texts["main"].endswith("# trailing\n")
    assert family.texts("a = 1\n\n# the end\n") == {"a": "a = 1\n\n# the end\n"}


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("a number", "the number", "N"),
        ("# about N\n", "", "N"),
        ("lr: float = 1.0", "lr: float = 1", "Args.lr"),
        ("# how many", "# how few", "Args.steps"),
        ('"""A docstring."""', '"""A docstring"""', "Args.shown"),
        ("# ------ short: no", "# ------ short, no", "section main"),
        ("import sys", "import json", "imports"),
        ("@decorated", "@decorated()", "Args"),
        ("return text   # trailing", "return text  # trailing", "main"),
        ("in two lines", "in 2 lines", "module docstring"),
        ("\n\n\ndef main", "\n\ndef main", "main"),
        ("N |= 2", "M = 2\nN |= 2", None),
    ],
)
def test_every_letter_belongs_to_a_piece(old, new, name):
    assert SCRIPT.count(old) == 1
    assert differing(SCRIPT, SCRIPT.replace(old, new)) == ({name} if name else {"N", "M"})


def test_sections_by_hand_and_of_a_trainer():
    assert family.sections(SCRIPT) == {"": (1, 5), "arguments": (6, 26), "main": (27, 37)}
    text = family.source("grpo")
    names = "settings policy sampler advantages loss update evaluation main".split()
    assert list(family.sections(text)) == ["", *names]
    first, last = family.sections(text)["loss"]
    assert "def policy_loss(" in "\n".join(text.splitlines()[first - 1 : last])
    assert "def update_once(" not in "\n".join(text.splitlines()[first - 1 : last])


def test_the_family_is_what_is_there_in_tree_order(tmp_path):
    for stem in "archer dapo_ar_lopti grpo dapo reinforce_pp grpo_ar_lopti other".split():
        (tmp_path / f"{stem}.py").touch()
    order = ["grpo", "grpo_ar_lopti", "reinforce_pp", "dapo", "dapo_ar_lopti", "archer"]
    assert family.family(tmp_path) == order
    assert family.family(tmp_path, "dapo") == ["dapo", "dapo_ar_lopti"]
    assert [family.depth(stem) for stem in order] == [0, 1, 1, 1, 2, 1]
    (tmp_path / "dapo.py").unlink()
    with pytest.raises(ValueError, match=r"dapo_ar_lopti\.py is there, but not dapo\.py"):
        family.family(tmp_path)


# ----------------------------------------------------------------------------------------------------------- diff.py


def test_rows_by_hand():
    """What is alike shares a row, though lines were added before it; what is not stands alone."""
    left = ["import os", "x = compute(rewards, 1)", "return x"]
    right = ["import os", "entirely += something_else", "x = compute(rewards, 2)", "return x"]
    rows = diff.compare(left, right)
    assert [(row.left, row.right, row.equal) for row in rows] == [
        (0, 0, True), (None, 1, False), (1, 2, False), (2, 3, True),
    ]  # fmt: skip
    assert rows[2].marks == ([(21, 22)], [(21, 22)])  # the 1 and the 2
    rows = diff.compare(["a = b", "c"], ["d(e, f)", "c"])
    assert [(row.left, row.right, row.marks) for row in rows] == [
        (0, 0, ((), ())),
        (1, 1, ((), ())),
    ]


def test_rows_have_every_line_once():
    left, right = (family.source(stem).splitlines() for stem in ("grpo", "grpo_ar_lopti"))
    rows = diff.compare(left, right)
    assert [row.left for row in rows if row.left is not None] == list(range(len(left)))
    assert [row.right for row in rows if row.right is not None] == list(range(len(right)))
    assert all((left[row.left] == right[row.right]) for row in rows if row.equal)


def test_folds_leave_the_context_and_no_single_line():
    rows = [diff.Row(k, k, equal=k not in (5, 11)) for k in range(20)]
    found = diff.blocks(rows, 2)
    shown = [[row.left for row in run] for fold, run in found if not fold]
    assert shown == [list(range(3, 14))]  # between 7 and 9 only 8 would be folded
    assert [(fold, len(run)) for fold, run in found] == [(True, 3), (False, 11), (True, 6)]
    assert [len(run) for _, run in diff.blocks(rows, 0)] == [5, 1, 5, 1, 8]
    assert [fold for fold, _ in diff.blocks([diff.Row(k, k, equal=True) for k in range(9)], 3)] == [True]


def test_colours_change_no_letter_and_marks_cut_where_they_should():
    text = family.source("grpo")
    assert ["".join(piece for _, piece in line) for line in diff.coloured(text)] == text.splitlines()
    assert diff.coloured("if x:  # why\n") == [
        [("keyword", "if"), ("", " "), ("", "x"), ("", ":"), ("", "  "), ("comment", "# why")]
    ]
    assert list(diff.cut([("", "abc"), ("name", "def")], [(2, 4)])) == [
        ("", "ab", False), ("", "c", True), ("name", "d", True), ("name", "ef", False),
    ]  # fmt: skip


def test_added_lines_begin_with_a_statement():
    left = ["if a:", "    f(", "        a", "    )", "end"]
    right = ["if a:", "    f(", "        a", "    )", "if b:", "    f(", "        b", "    )", "end"]
    for before, after, side in ((left, right, "right"), (right, left, "left")):
        changed = [getattr(row, side) for row in diff.compare(before, after) if not row.equal]
        assert changed == [4, 5, 6, 7]  # not 3 to 6, from ")" on
    rows = diff.compare(["a", ""], ["a", "", "b", ""])
    assert [row.right for row in rows if not row.equal] == [2, 3]  # not from the blank line on
    assert [row.right for row in diff.compare([], ["a"])] == [0]


@functools.cache
def scripts_of(stem):
    return tuple(diff.read(diff.find(name)) for name in (family.PARENT[stem], stem))


@functools.cache
def parts_of(stem):
    return diff.parts(*scripts_of(stem))


def terminal(stem, width, found=None):
    """What the terminal shows of a script and its parent, line by line."""
    console = Console(file=io.StringIO(), width=width)
    diff.print_diff(console, found or parts_of(stem), scripts_of(stem))
    return console.file.getvalue().splitlines()


each_width = pytest.mark.parametrize("width", [40, 80, 100, 120, 160, 200])
FOLD = re.compile(r" *⋯ (\d+) equal lines")


@each_descendant
@each_width
def test_nothing_is_wider_than_the_terminal_and_no_line_is_lost(stem, width):
    lines = terminal(stem, width)
    assert max(map(cell_len, lines)) <= width and not any(line.endswith(" ") for line in lines)
    two = width >= 120
    middle = (width - 3) // 2
    rows = [line for line in lines if not line.startswith("──") and not FOLD.match(line)]
    if two:
        assert all(line[middle : middle + 3].rstrip() == " │" for line in rows)
    folded = sum(int(FOLD.match(line)[1]) for line in lines if FOLD.match(line))
    left, right = scripts_of(stem)
    digits = len(str(max(len(left.lines), len(right.lines))))
    number = rf"([ \d]{{{digits - 1}}}\d)"  # right-aligned; a line that goes on has none
    for script, sign, start in ((left, "-", 0), (right, "+", middle + 3 if two else 0)):
        shown = []
        for line in rows:
            if found := re.match(rf"{number}(?: [ {sign}](?: |$)|$)", line[start:]):
                shown.append(int(found[1]))
        if script is right or two:  # in one column, equal lines have the right's numbers
            assert len(shown) == len(set(shown)) == len(script.lines) - folded
        else:
            assert {k + 1 for k in removed(stem)} <= set(shown)


def removed(stem):
    return [row.left for part in parts_of(stem) for row in part.rows if not row.equal and row.left is not None]


@each_descendant
def test_the_parts_have_every_line_once_and_the_docstring_last(stem):
    found, (left, right) = parts_of(stem), scripts_of(stem)
    for script, side in ((left, "left"), (right, "right")):
        numbers = [getattr(row, side) for part in found for row in part.rows]
        numbers = [number for number in numbers if number is not None]
        assert numbers == [*script.code_lines, *script.docstring_lines]
        assert sorted(numbers) == list(range(len(script.lines)))
        docstring = "\n".join(script.lines[k] for k in script.docstring_lines)
        assert docstring.startswith('"""') and docstring.endswith('"""')
    names = [part.name for part in found if part.differs]
    assert names[-1] == "docstring" and set(names[:-1]) < {"imports", *family.sections(right.text)}


@pytest.mark.parametrize("width", range(34, 110, 7))
def test_a_long_line_is_wrapped_inside_its_column_and_loses_no_letter(width):
    for line in scripts_of("grpo_ar_lopti")[1].lines:
        found = [text.plain for text in diff.fitted(Text(line), width)]
        assert max(map(cell_len, found)) <= width
        if family.HEADING.match(line):  # may lose dashes
            assert len(found) == 1 and found[0].split()[-1] == line.split()[-1]
            continue
        hang = min(len(line) - len(line.lstrip()) + 4, width // 2)
        assert all(text.startswith(" " * hang) for text in found[1:])
        assert found[0] + "".join(text[hang:] for text in found[1:]) == line


def test_lines_are_cut_behind_spaces_and_wide_letters_take_two_columns():
    def wrapped(line, width):
        return [text.plain for text in diff.fitted(Text(line), width)]

    assert wrapped("    one two three", 12) == ["    one two ", "      three"]
    assert wrapped("a" * 12, 8) == ["a" * 8, "    aaaa"]
    assert wrapped("漢字漢字漢字", 8) == ["漢字漢字", "    漢字"]
    assert wrapped("", 8) == [""] and wrapped("12345678", 8) == ["12345678"]


@each_width
def test_a_script_beside_its_parent_in_the_terminal(width):
    lines = terminal("grpo_ar_lopti", width)
    headings = [line.split()[1] for line in lines if line.startswith("──")]
    assert headings == ["imports", "settings", "advantages", "update", "main", "docstring"]
    words = " ".join(" ".join(lines).replace("│", " ").split())
    assert "def in_stage(stage, batch, eta):" in words and "def to_batch" not in words
    assert re.search(r"\d+ equal lines: policy, sampler ── advantages ─", words)
    assert words.index("── docstring") < words.index("Group Relative Policy Optimization")
    row = next(line for line in lines if "def in_stage" in line)
    assert "grpo.py:" in lines[0] and ("│" in lines[0]) == (width >= 120)
    assert row.index("def in_stage") > (width // 2 if width >= 120 else 0)


def test_without_docstring_the_rest_stays_as_it_is(capsys):
    shown = []
    for docstring in (True, False):
        diff.main(diff.Args("dapo", docstring=docstring, width=160))
        shown.append(capsys.readouterr().out)
    assert shown[0].startswith(shown[1]) and "── docstring ──" in shown[0]
    assert "── docstring" not in shown[1] and "samples until every group" not in shown[1]
    assert "def dynamic_sampling(" in shown[1] and "A group is mixed if the rule" in shown[1]  # a function's stays
    done = call("tools/diff.py", "dapo", "--no_docstring", "--width", 160)
    assert done.stdout == shown[1] and not done.stderr


def test_two_scripts_by_path_stand_in_the_order_given(tmp_path):
    for name, text in {"a.py": '"""A."""\nx = 1\ny = 2\n', "b.py": "x = 1\ny = 3\n"}.items():
        (tmp_path / name).write_text(text)
    done = call("tools/diff.py", tmp_path / "b.py", tmp_path / "a.py", "--width", 60)
    assert [line.strip("─ ").split() for line in done.stdout.splitlines()] == [
        ["-", "b.py:", "2", "code", "lines"],
        ["+", "a.py:", "2", "code", "lines,", "2", "changed"],
        ["code"],
        ["2", "x", "=", "1"],
        ["2", "-", "y", "=", "3"],
        ["3", "+", "y", "=", "2"],
        ["docstring"],
        ["1", "+", '"""A."""'],
    ]


@pytest.mark.parametrize(
    "texts",
    [
        ("", "x = 1\n"),
        ("# only\n# comments\n", "# only\n"),
        ('"""One."""; x = 1\n', '"""Two."""; x = 1\n'),
        ("x = 1\n\x0c\ny = 1\n", "x = '\u2028'\n\ty\n".replace("\t", "if x:\n\t")),
        ("x = 'a\x1b[31mb'\n", "x = 'b'\n"),
        ("x = 1\n", "x = 1\n"),
    ],
)
def test_odd_scripts_are_shown_too(texts, tmp_path, capsys):
    for name, text in zip("ab", texts):
        (tmp_path / f"{name}.py").write_text(text)
    paths = str(tmp_path / "a.py"), str(tmp_path / "b.py")
    for width in (40, 120):
        diff.main(diff.Args(*paths, width=width))
        out = capsys.readouterr().out
        assert "\x1b" not in out and "\t" not in out
        assert max(map(cell_len, out.splitlines())) <= width
    diff.main(diff.Args(*paths, html=tmp_path / "page.html"))


def test_the_terminal_shows_the_words_that_differ():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    scripts = [diff.Script(name, "", text) for name, text in (("a", "if x == 1:\n  y\n"), ("b", "if x == 2:\n  y\n"))]
    diff.print_diff(console, diff.parts(*scripts), scripts)
    out = console.file.getvalue()
    assert "\x1b[7;31m1\x1b[0m" in out and "\x1b[7;32m2\x1b[0m" in out  # reversed, red and green
    assert out.count("\x1b[34mif\x1b[0m") == 2 and out.count("\x1b[7") == 2


class Page(html.parser.HTMLParser):
    """Reads a page as a browser would: its text, tags, attributes, and whether every tag is closed in turn."""

    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.tags, self.attributes = "", [], set(), set()
        self.links, self.ids, self.texts = [], [], {}  # texts: {tag: [text, ...]}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.links += [value for name, value in attributes if name == "href"]
        self.ids += [value for name, value in attributes if name == "id"]
        self.texts.setdefault(tag, []).append("")
        if tag not in ("meta", "col", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if self.open:
            self.texts[self.open[-1]][-1] += data


def test_the_page_is_whole_escaped_and_needs_nothing_else(tmp_path):
    nasty = 'x = "<script>alert(1)</script> & <b>"\n'
    same = "".join(f"same_{k} = {k}\n" for k in range(9))
    (tmp_path / "a.py").write_text(f"{same}y = 1  # <i>\n")
    (tmp_path / "b.py").write_text(f"{same}y = 2  # <i>\n{nasty}")
    done = call("tools/diff.py", tmp_path / "a.py", tmp_path / "b.py", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert nasty.strip() in page.text and "y = 1  # <i>" in page.text and "same_0" in page.text
    assert "6 equal lines: same_0 … same_5" in page.text
    assert not page.tags & {"script", "link", "img", "iframe", "form", "button"}
    assert not page.attributes & {"src", "onclick"} and page.links == ["#code"] and page.ids == ["code"]
    assert "://" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text
    colours = set(re.findall(r"var\((--[a-z-]+)\)", text)) - {"--hang", "--least"}
    light, dark = re.findall(r":root \{([^}]*)\}", text)
    assert all(f"{name}: #" in light and f"{name}: #" in dark for name in colours)
    assert re.findall(r"<mark>(.*?)</mark>", text) == [
        '<span class="number">1</span>',
        '<span class="number">2</span>',
    ]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{file name: Page} that --all writes."""
    folder = tmp_path_factory.mktemp("pages") / "new" / "folder"
    done = call("tools/diff.py", "--all", folder)
    assert done.returncode == 0 and f"{len(DESCENDANTS)} pages" in done.stdout, done.stderr
    return {path.name: Page(path.read_text()) for path in folder.iterdir()}


def test_all_writes_a_page_for_each_child_and_every_link_leads_somewhere(pages):
    assert set(pages) == {"index.html"} | {f"{family.PARENT[stem]}_{stem}.html" for stem in DESCENDANTS}
    for page in pages.values():
        assert len(page.ids) == len(set(page.ids))
        for target in page.links:
            assert target[1:] in page.ids if target.startswith("#") else target in pages
    index = pages["index.html"]
    assert set(index.links) == set(pages) - {"index.html"} and "grpo.py" in index.texts["b"]
    assert "grpo_dapo.html" in pages["dapo_dapo_ar_lopti.html"].links  # its parent's
    assert "dapo_dapo_ar_lopti.html" in pages["grpo_dapo.html"].links  # its child's
    assert all("index.html" in page.links for name, page in pages.items() if name != "index.html")


def test_the_index_is_a_tree(pages):
    """A script's children stand in a list inside its own item."""
    index = pages["index.html"]
    assert len(index.texts["li"]) == len(DESCENDANTS) + 1
    parents = {family.PARENT[stem] for stem in DESCENDANTS}
    assert len(index.texts["ul"]) == 1 + len(parents)
    assert all(diff.read(diff.find(stem)).about in index.text for stem in family.family())


@each_descendant
def test_a_page_has_its_heading_objectives_and_contents_and_the_docstring_last(pages, stem):
    parent = family.PARENT[stem]
    page = pages[f"{parent}_{stem}.html"]
    left, right = scripts_of(stem)
    assert page.texts["h1"] == [f"{parent}.py → {stem}.py"] and page.texts["title"] == page.texts["h1"]
    assert page.texts["h3"] == [f"{parent}.py", f"{stem}.py"]
    assert page.texts["p"][:2] == [left.about, right.about]
    assert page.texts["pre"] == [left.objective, right.objective] and "tabindex" in page.attributes
    assert f"{family.changed(left.text, right.text)} code lines changed" in page.texts["p"][2]
    differing = [part.name for part in parts_of(stem) if part.differs]
    assert page.ids == differing and page.ids[-1] == "docstring"
    assert page.texts["h2"] == ["What differs", *differing]
    assert [link for link in page.links if link.startswith("#")] == [f"#{name}" for name in differing]
    assert all(line in page.text for line in left.lines + right.lines)  # those folded, too


def test_objective_and_description_by_hand():
    text = '''"""GRPO that
does it.

Maximise

    J = a
        + b

    a = 1   first

The command:
    python it.py
"""
'''
    script = diff.Script("a.py", "", text)
    assert script.about == "GRPO that does it." and script.objective == "J = a\n    + b\n\na = 1   first"
    bare = diff.Script("b.py", "", "x = 1\n")
    assert bare.about == "" and bare.objective == "" and list(bare.docstring_lines) == []
    assert all(scripts_of(stem)[1].objective for stem in DESCENDANTS)
    assert scripts_of("dapo")[0].objective.startswith("J = 1/Σ_i|o_i| · Σ_i Σ_t {")


@pytest.mark.parametrize(
    "names, options, message",
    [
        (["grpo", "gppo"], {}, "there is no script 'gppo'; there are grpo, reinforce, rloo"),
        (["grpo", "grpo.py"], {}, "grpo.py is to be compared with itself"),
        (["grpo", str(ROOT / "grpo.py")], {}, "grpo.py is to be compared with itself"),
        (["grpo"], {}, "grpo.py grew from no other script"),
        (["grpo", "README.md"], {}, "README.md is no Python script"),
        (["grpo_ar_lopti"], {"context": -1}, "--context must be 0 or greater"),
        (["grpo_ar_lopti"], {"width": 39}, "--width 40 or greater"),
        (["grpo_ar_lopti"], {"html": ROOT / "nowhere" / "x.html"}, "No such file or directory"),
        ([], {}, "name one or two scripts"),
        (["grpo_ar_lopti"], {"all": ROOT / "nowhere"}, "--all writes all pages"),
        ([], {"all": ROOT / "README.md"}, "File exists"),
    ],
)
def test_diff_says_what_is_wrong(names, options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        diff.main(diff.Args(*names, **options))
    captured = capsys.readouterr()
    assert ended.value.code == 2 and message in captured.err and not captured.out


def test_diff_ends_with_2_and_no_traceback():
    done = call("tools/diff.py", "grpo", "gppo")
    assert done.returncode == 2 and done.stderr.startswith("error: there is no script") and not done.stdout


# ------------------------------------------------------------------------------------------------------ propagate.py

LINES = "".join(f"line_{k} = {k}\n" for k in range(30))


class Repository:
    """A git repository of small scripts; what is not yet given to a script is its own lines, which it has committed."""

    def __init__(self, folder):
        self.folder = folder
        self.git("init", "-q")
        self.write("grpo", LINES)
        self.write("dapo", LINES.replace("line_20 = 20\n", "line_20 = 20\nown_of_dapo = 1\n"))
        self.write("archer", LINES.replace("line_25 = 25", "line_25 = 'archer'"))
        self.write("dapo_ar_lopti", self.read("dapo") + "own_of_lopti = 1\n")
        self.commit()

    def git(self, *words):
        about = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *about, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self):
        self.git("add", ".")
        self.git("commit", "-q", "-m", "x")

    def read(self, stem):
        return (self.folder / f"{stem}.py").read_text()

    def write(self, stem, text):
        (self.folder / f"{stem}.py").write_text(text)

    def edit(self, stem, old, new):
        assert self.read(stem).count(old) == 1
        self.write(stem, self.read(stem).replace(old, new))

    def texts(self):
        return {stem: self.read(stem) for stem in family.family(self.folder)}

    def propagate(self, capsys, **options):
        """(exit code, what was printed, what was printed to stderr)"""
        with pytest.raises(SystemExit) as ended:
            propagate.main(propagate.Args(folder=self.folder, **options))
        return ended.value.code, *capsys.readouterr()


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


@pytest.mark.parametrize("committed", [False, True])
def test_a_change_reaches_children_and_grandchildren_and_a_second_time_does_nothing(repository, committed, capsys):
    expected = {stem: text.replace("line_5 = 5", "line_5 = 'new'") for stem, text in repository.texts().items()}
    repository.edit("grpo", "line_5 = 5", "line_5 = 'new'")
    if committed:
        repository.commit()
        (repository.folder / "README.md").write_text("a later commit of something else")
        repository.commit()
    code, out, _ = repository.propagate(capsys)
    assert code == 0 and repository.texts() == expected
    assert all(f"{stem}.py: 1 lines added, 1 removed" in out for stem in ("dapo", "dapo_ar_lopti", "archer"))
    code, out, _ = repository.propagate(capsys)
    assert code == 0 and repository.texts() == expected and out.count("has it already") == 3
    repository.commit()
    code, out, _ = repository.propagate(capsys)
    assert code == 0 and repository.texts() == expected


def test_a_dry_run_shows_the_change_and_writes_nothing(repository, capsys):
    repository.edit("grpo", "line_5 = 5\n", "")
    before = repository.texts()
    code, out, _ = repository.propagate(capsys, dry_run=True)
    assert code == 0 and repository.texts() == before
    assert out.count("-line_5 = 5") == 3 and "dapo_ar_lopti.py: 0 lines added, 1 removed" in out


def test_a_conflict_leaves_the_script_and_what_grew_from_it_untouched_and_others_go_on(repository, capsys):
    for stem in ("dapo", "dapo_ar_lopti"):
        repository.edit(stem, "line_5 = 5", "line_5 = 'dapo'")
        repository.edit(stem, "line_2 = 2\n", "line_2 = 2\none = 1\ntwo = 2\n")
    repository.commit()
    repository.edit("grpo", "line_5 = 5", "line_5 = 'grpo'")
    repository.edit("grpo", "line_15 = 15", "line_15 = 'grpo'")
    before = repository.texts()
    code, out, _ = repository.propagate(capsys)
    assert code == 1
    after = repository.texts()
    assert after["dapo"] == before["dapo"] and after["dapo_ar_lopti"] == before["dapo_ar_lopti"]
    assert "line_5 = 'grpo'" in after["archer"] and "line_15 = 'grpo'" in after["archer"]
    assert "dapo.py: left untouched, 1 conflict\n  line 8:\n    dapo.py:\n      | line_5 = 'dapo'\n" in out
    assert "grpo.py was:\n      | line_5 = 5\n    grpo.py is:\n      | line_5 = 'grpo'\n" in out
    assert "dapo_ar_lopti.py: left untouched, since dapo.py was" in out
    # Resolved by hand, it goes on from there, by what dapo.py has not committed
    repository.edit("dapo", "line_5 = 'dapo'", "line_5 = 'grpo'\nline_5_too = 'dapo'")
    repository.edit("dapo", "line_15 = 15", "line_15 = 'grpo'")
    code, out, _ = repository.propagate(capsys)
    assert code == 0 and "dapo.py: has it already" in out
    assert repository.read("dapo_ar_lopti").count("line_5 = 'grpo'\nline_5_too = 'dapo'\n") == 1
    assert "line_15 = 'grpo'" in repository.read("dapo_ar_lopti")
    done = repository.texts()
    assert repository.propagate(capsys)[0] == 0 and repository.texts() == done


def test_what_a_script_got_by_hand_after_a_conflict_reaches_its_children_with_the_rest(repository, capsys):
    """The conflict alone is resolved by hand, in one of two places; the other is merged, and both are carried on."""
    for stem in ("dapo", "dapo_ar_lopti"):
        repository.edit(stem, "line_5 = 5\n", "line_5 = 5\nown = 'dapo'\n")
    repository.commit()
    repository.edit("grpo", "line_5 = 5\n", "line_5 = 5\nnew = 'grpo'\n")
    repository.edit("grpo", "line_15 = 15", "line_15 = 'grpo'")
    assert repository.propagate(capsys)[0] == 1  # both have a new line in the same place
    repository.edit("dapo", "line_5 = 5\n", "line_5 = 5\nnew = 'grpo'\n")
    code, out, _ = repository.propagate(capsys)
    assert code == 0 and "dapo.py: 1 lines added, 1 removed" in out
    for stem in ("dapo", "dapo_ar_lopti"):
        text = repository.read(stem)
        assert text.count("line_5 = 5\nnew = 'grpo'\nown = 'dapo'\n") == 1 and "line_15 = 'grpo'" in text


def test_a_script_that_got_the_change_by_hand_stays_and_its_children_get_it(repository, capsys):
    """Also where lines of its own stand beside the change; and what else changed in it is not carried along."""
    repository.edit("archer", "line_5 = 5", "line_5 = 'new'\nown = 'archer'")
    repository.edit("dapo", "line_5 = 5", "line_5 = 'new'")
    repository.edit("dapo", "line_10 = 10", "line_10 = 'only in dapo'")
    repository.edit("grpo", "line_5 = 5", "line_5 = 'new'")
    before = repository.texts()
    for _ in range(2):
        code, out, _ = repository.propagate(capsys)
        assert code == 0 and "archer.py: has it already" in out and "dapo.py: has it already" in out
        after = repository.texts()
        assert after["archer"] == before["archer"] and after["dapo"] == before["dapo"]
        assert after["dapo_ar_lopti"] == before["dapo_ar_lopti"].replace("line_5 = 5", "line_5 = 'new'")


def test_where_lines_were_only_removed_a_conflict_remains_one():
    assert propagate.has_already("a\nown\n", "b\n", "a\n")
    assert not propagate.has_already("own\n", "b\n", "")
    assert not propagate.has_already("a\nb\n", "b\n", "a\n")  # what was to go is still there
    assert not propagate.has_already("c\na\n", "b\n", "a\nc\n")  # not in this order
    text, conflicts = propagate.merge("x\nown\nz\n", "x\ny\nz\n", "x\nz\n")
    assert text == "x\nown\nz\n" and [(c.line, c.here, c.base, c.theirs) for c in conflicts] == [
        (2, "own\n", "y\n", "")
    ]
    _, conflicts = propagate.merge("x\nz\n", "x\ny\nz\n", "x\nyes\nz\n")
    assert [(c.line, c.here, c.theirs) for c in conflicts] == [(2, "", "yes\n")]
    text, conflicts = propagate.merge("a\nb\nc\nmine\n", "a\nb\nc\nd\n", "new\na\nb\nc\nyours\n")
    assert [c.line for c in conflicts] == [4]  # of the script as it is, without the new line


def test_lines_that_look_like_marks_of_a_conflict_are_lines():
    look = "<<<<<<< here\n||||||| base\n=======\n>>>>>>> there\n"
    text, conflicts = propagate.merge(f"own\na\nb\nc\n{look}", f"a\nb\nc\n{look}", f"a\nb\nc\n{look}new\n")
    assert text == f"own\na\nb\nc\n{look}new\n" and not conflicts


def test_from_another_script_and_another_revision(repository, capsys):
    repository.edit("dapo", "line_5 = 5", "line_5 = 'dapo'")
    repository.commit()
    repository.edit("dapo", "line_7 = 7", "line_7 = 'dapo'")
    repository.commit()
    before = repository.texts()
    assert repository.propagate(capsys, script="dapo.py", base="HEAD~2", dry_run=True)[1].count("+line_") == 2
    assert repository.propagate(capsys, script="dapo")[0] == 0  # the last commit alone
    after = repository.texts()
    assert after.pop("dapo_ar_lopti") == before.pop("dapo_ar_lopti").replace("line_7 = 7", "line_7 = 'dapo'")
    assert after == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"script": "gppo"}, "--script gppo: the scripts are grpo, dapo, dapo_ar_lopti, archer"),
        ({"base": "nowhere"}, "nowhere"),
        ({}, "grpo.py"),  # its only commit has none before
    ],
)
def test_propagate_says_what_is_wrong(repository, options, message, capsys):
    code, out, err = repository.propagate(capsys, **options)
    assert code == 2 and err.startswith("error: ") and message in err and not out


def test_propagate_as_a_program(repository):
    repository.edit("grpo", "line_25 = 25", "line_25 = 'grpo'")
    done = call("tools/propagate.py", "--folder", repository.folder)
    assert done.returncode == 1 and "archer.py: left untouched, 1 conflict" in done.stdout and not done.stderr
    assert "line_25 = 'grpo'" in repository.read("dapo_ar_lopti")


# ---------------------------------------------------------------------------------------------------------- table.py


def test_the_table_by_hand(tmp_path, monkeypatch):
    scripts = {
        "grpo": '"""Text."""\na = 1\nb = 2\n',
        "dapo": "a = 1\nb = 3\n",
        "dapo_ar_lopti": "a = 1\nb = 3\nc = 4\nd = 5\ne = 6\n",
        "archer": "a = 1\nb = 2\nc = 3\n",
        "acpo": "a = 1\nb = 2\nc = 3\nd = 4\n",
    }
    for stem, text in scripts.items():
        (tmp_path / f"{stem}.py").write_text(text)
    monkeypatch.delitem(table.TEXTS, "dapo_ar_lopti")
    with pytest.raises(ValueError, match=r"dapo_ar_lopti\.py has no words for the table: add them to TEXTS"):
        table.table(tmp_path)
    for stem in scripts:
        monkeypatch.setitem(table.TEXTS, stem, (f"max {stem}", f"from {stem}"))
    assert table.table(tmp_path).splitlines() == [
        "| script | what it maximises | from | code lines | changed |",
        "|---|---|---|---|---|",
        "| `grpo.py` | max grpo | from grpo | 2 | |",
        "| `dapo.py` | max dapo | from dapo | 2 | 2 |",
        "| └ `dapo_ar_lopti.py` | max dapo_ar_lopti | from dapo_ar_lopti | 5 | 3 (`dapo.py`) |",
        "| `acpo.py` | max acpo | from acpo | 4 | 2 |",
        "| `archer.py` | max archer | from archer | 3 | 1 |",
        "",
        "Changed, median: 2 lines.",  # of 1, 2, 2, 3
    ]
    monkeypatch.delitem(table.SHORT, "dapo_ar_lopti")
    with pytest.raises(ValueError, match=r"dapo_ar_lopti\.py has no words for the table: add them to SHORT"):
        table.short_table(tmp_path)
    for stem in scripts:
        monkeypatch.setitem(table.SHORT, stem, f"is {stem}")
    page = "docs/algorithms/{0}.md"
    assert table.short_table(tmp_path).splitlines()[2:5] == [
        f"| [`grpo.py`]({page}) | is grpo | 2 | |".format("grpo"),
        f"| [`dapo.py`]({page}) | is dapo | 2 | [2]({page}#the-difference) |".format("dapo"),
        f"| └ [`dapo_ar_lopti.py`]({page}) | is dapo_ar_lopti | 5 | [3]({page}#the-difference) |".format(
            "dapo_ar_lopti"
        ),
    ]


def test_no_cell_has_a_bar_in_it():
    cells = [words for row in table.TEXTS.values() for words in row] + list(table.SHORT.values())
    assert all("|" not in words and "\n" not in words for words in cells)


def test_the_tables_are_written_between_their_marks_and_checked(tmp_path, capsys):
    places = {"readme": tmp_path / "README.md", "objectives": tmp_path / "objectives.md"}
    old = f"before\n\n{table.BEGIN}\nold\n{table.END}\n\nafter\n"
    for path in places.values():
        path.write_text(old)
    done = call("tools/table.py", "--readme", places["readme"], "--objectives", places["objectives"], "--check")
    assert done.returncode == 1 and done.stdout.count("out of date") == 2 and places["readme"].read_text() == old
    table.main(table.Args(**places))
    for name, made in (("readme", table.short_table()), ("objectives", table.table())):
        text = places[name].read_text()
        assert text == f"before\n\n{table.BEGIN}\n\n{made}\n{table.END}\n\nafter\n"
    with pytest.raises(SystemExit) as ended:
        table.main(table.Args(**places, check=True))
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("up to date") == 2
    for words, code, message in [(old, 1, "out of date"), ("no marks", 2, "must have the marks")]:
        places["objectives"].write_text(words)
        with pytest.raises(SystemExit) as ended:
            table.main(table.Args(**places, check=True))
        assert ended.value.code == code and message in "".join(capsys.readouterr())
        assert places["objectives"].read_text() == words


@pytest.mark.parametrize("text", ["{0}", "{1}", "{1} {0}", "{0} {1} {0}", "{0} {1} {1}"])
def test_marks_must_be_there_once_and_in_order(text):
    with pytest.raises(ValueError, match="must have the marks"):
        table.with_table(text.format(table.BEGIN, table.END), "new")

"""The scripts as a family: what they share is the same to the letter, and the tools that read,
carry and count it.

tools/family.py, diff.py, propagate.py and table.py are checked on small scripts and git
repositories made here, and on the trainers themselves.
"""

import ast
import difflib
import itertools
import subprocess

import pytest
from conftest import python

from tools import family
from tools.maintain import generated, propagate, table

# What a script has of its own: the pieces (tools/family.py) in which it differs from its parent,
# comments and docstrings included. "Args" stands for all of Args, "Args.eta" for that flag alone. A
# script must be in here.
# A heading above flags (# ---- objective) belongs to the first of them: where a script begins with a
# flag of its own, the one that came first before has lost it.
OWNED = {
    "grpo_ar_lopti": """module docstring, imports, Args.alpha, Args.eta, Args.lopti_stages,
        Args.clip_low, TASKS, Args.check, ar_weight, in_stage, update, main""",
    "acpo": """module docstring, imports, Args.kl_coef, Args.clip_low, Args.clip_high,
        Args.clip_alpha, Args.clip_base, Args.clip_base_high, Args.clip_max, Args.n_bins, Args.check, TASKS,
        clip_ranges, policy_loss, update, update_once""",
    "archer": """module docstring, imports, Args.entropy_quantile, Args.reasoning_clip,
        Args.reasoning_kl, Args.clip_low, Args.clip_high, reasoning_tokens, policy_loss, update""",
    "cispo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, Args.gated, GATE_LOW,
        GATE_HIGH, policy_loss, update""",
    "dapo": """module docstring, imports, Args.max_refills, Args.overlong_buffer, Args.check,
        is_mixed, dynamic_sampling, overlong_penalty, main""",
    "entropy_top": """module docstring, imports, Args.entropy_top, Args.clip_low, entropy_threshold,
        update""",
    "gspo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, policy_loss, update""",
    "reinforce_pp": """module docstring, imports, Args.kl_coef, Args.kl, token_returns,
        compute_advantages, policy_loss, kl_term, main""",
    "reinforce": """module docstring, imports, Args.updates_per_step, Args.clip_low, Args.clip_high,
        Args.kl_coef, Args.kl, compute_advantages, policy_loss, kl_term, k3, update, update_once, main""",
    "rloo": """module docstring, imports, Args.kl_coef, Args.updates_per_step, compute_advantages,
        update, update_once, main""",
    "maxrl": "module docstring, compute_advantages, main",
    "sft": """module docstring, imports, Args, TASKS, log_probs, section sampler, load_sampler, generate,
        sample, to_batch, sync_weights, section advantages, compute_advantages, section examples,
        policy_loss, update, update_once, evaluate, main""",
    "opd": """module docstring, Args.teacher, Args.updates_per_step, compute_advantages, update,
        update_once, main""",
    "dr_grpo": "module docstring, Args.kl_coef, compute_advantages, policy_loss, update",
    "ppo": """module docstring, imports, Args.kl_coef, Args.kl, kl_term, Args.gamma, Args.gae_lambda,
        Args.value_lr, Args.value_clip, ValueModel, ValueModel.__init__, ValueModel.forward, load_policy,
        compute_values, estimate_advantages, compute_advantages, policy_loss, value_loss,
        update_values, main""",
    "dppo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, Args.divergence,
        Args.delta, LARGEST_RATIO, outside_region, policy_loss""",
    "sapo": """module docstring, Args.kl_coef, Args.clip_low, Args.clip_high, Args.tau_positive,
        Args.tau_negative, policy_loss, update""",
    "grpo_tis": """module docstring, Args.correction, Args.correction_max, Args.correction_min,
        Args.mask, Args.mask_delta, Args.check, sampler_correction, left_out, policy_loss, update,
        update_once, main""",
}
# The patch is the algorithm. reinforce_pp.py has the import already.
OWNED["reinforce_pp_ar_lopti"] = OWNED["grpo_ar_lopti"].replace("imports,", "", 1)
OWNED["dapo_ar_lopti"] = OWNED["grpo_ar_lopti"]
# How many lines of code a script takes from its parent and adds, in the pieces that it owns. A line that both should
# have and that differs makes them more.
OWN_LINES = {
    "acpo": (12, 50),
    "archer": (4, 19),
    "cispo": (8, 18),
    "dapo": (7, 51),
    "dapo_ar_lopti": (1, 23),
    "dppo": (10, 25),
    "dr_grpo": (7, 3),
    "entropy_top": (1, 19),
    "grpo_ar_lopti": (1, 23),
    "grpo_tis": (3, 36),
    "gspo": (6, 8),
    "maxrl": (3, 5),
    "opd": (8, 9),
    "ppo": (27, 79),
    "reinforce": (65, 15),
    "reinforce_pp": (20, 18),
    "reinforce_pp_ar_lopti": (1, 22),
    "rloo": (8, 23),
    "sapo": (11, 12),
    "sft": (131, 48),
}
DESCENDANTS = [stem for stem in family.family() if stem in family.PARENT]
each_descendant = pytest.mark.parametrize("stem", DESCENDANTS)


# ------------------------------------------------------------------------------------------- the scripts themselves


def differing(before, after):
    """The names of the pieces that two texts don't have in common, letter by letter."""
    before, after = family.texts(before), family.texts(after)
    return {name for name in before | after if before.get(name) != after.get(name)}


@each_descendant
def test_a_script_differs_from_its_parent_only_in_what_it_owns(stem):
    """`diff grpo.py grpo_ar_lopti.py` shows the algorithm and nothing else, neither in code nor in comments."""
    before, after = family.source(family.PARENT[stem]), family.source(stem)
    changed = differing(before, after)
    entry = f'"{stem}": "{", ".join(name for name in family.texts(after) | family.texts(before) if name in changed)}"'
    assert stem in OWNED, f"{stem}.py is not in OWNED in tests/test_family.py. If it should differ so, add {entry}"
    owned = {name.strip() for name in OWNED[stem].split(",")}
    assert {name for name in changed if name not in owned and name.split(".")[0] not in owned} == set()
    assert {name for name in owned if not any(n == name or n.startswith(f"{name}.") for n in changed)} == set()


def code_of_pieces(text):
    """{piece: its lines of code}, without docstrings, comments and the blanks around a line."""
    code = family.numbered_code_lines(text)
    found = {}
    for piece in family.pieces(text):
        found.setdefault(piece.name, []).extend(
            code[n].strip() for n in range(piece.first - 1, piece.last) if n in code
        )
    return found


def own_lines(before, after):
    """(lines that a text takes from the one before, lines that it adds), each with its piece.

    Lines are compared piece by piece and in their order. In a piece that is new, those that stand somewhere in the
    text before are not its own: they are a copy, which should change with them.
    """
    before, after = code_of_pieces(before), code_of_pieces(after)
    known = set(itertools.chain(*before.values()))
    taken, added = [], []
    for name in before | after:
        old, new = before.get(name, []), after.get(name, [])
        if not old:
            added += [(name, line) for line in new if line not in known]
            continue
        for kind, a, a_end, b, b_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind != "equal":
                taken += [(name, line) for line in old[a:a_end]]
                added += [(name, line) for line in new[b:b_end]]
    return taken, added


@each_descendant
def test_a_shared_line_is_the_same_in_functions_that_a_script_owns_too(stem):
    taken, added = own_lines(family.source(family.PARENT[stem]), family.source(stem))
    lines = [f"{sign} {name}: {line}" for sign, some in (("-", taken), ("+", added)) for name, line in some]
    entry = f'"{stem}": ({len(taken)}, {len(added)})'
    message = f"if all of these are the algorithm's, OWN_LINES in tests/test_family.py has {entry}"
    assert OWN_LINES.get(stem) == (len(taken), len(added)), "\n".join([message, *lines])


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("def f():\n    # why\n    a = 1\n    b = 2\n", (0, 0)),
        ("def f():\n    for i in x:\n        a = 1\n        b = 2\n", (0, 1)),  # deeper, and still shared
        ("def f():\n    for i in x:\n        a = 7\n        b = 2\n", (1, 2)),
        ("def f():\n    b = 2\n    a = 1\n", (1, 1)),  # another order is another program
        ("def f():\n    a = 1\n    b = 2\n\ndef g():\n    a = 1\n    c = 3\n", (0, 2)),  # a copy
    ],
)
def test_own_lines_by_hand(text, own):
    assert tuple(map(len, own_lines('def f():\n    """A."""\n    a = 1  # one\n    b = 2\n', text))) == own


@pytest.mark.parametrize("stems", [("reinforce_pp", "ppo"), ("grpo", "dr_grpo")], ids=lambda stems: stems[1])
def test_cousins_have_the_same_policy_loss(stems):
    """So one of the two needs no numbers of its own."""
    one, other = (family.code_lines(family.texts(family.source(stem))["policy_loss"]) for stem in stems)
    assert one == other


@each_descendant
def test_what_a_script_shares_with_its_parent_comes_in_the_same_order(stem):
    before, after = (family.texts(family.source(family.PARENT[stem])), family.texts(family.source(stem)))
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


def test_every_published_script_names_its_parent():
    named = family.new_scripts(known=())
    for stem in DESCENDANTS:
        message = f'{stem}.py: no line of the docstring begins with "What differs from PARENT.py"'
        assert named[stem] == family.PARENT[stem], message


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


CODE = '''import os
import sys
N = 1
@decorated
class Args:
    lr: float = 1.0
    steps: int = 2
    def shown(self):
        return "# no comment"
N |= 2
def main():
    text = """kept
# inside a string
it"""
    return text
'''


def test_code_lines_by_hand():
    assert family.code_lines(SCRIPT) == CODE.splitlines()
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
    main = '\n\ndef main():\n    text = """kept\n# inside a string\n\nit"""\n    "a text that nothing uses"\n'
    assert texts["main"] == f"{main}    return text   # trailing\n"
    assert family.texts("a = 1\n\n# the end\n") == {"a": "a = 1\n\n# the end\n"}


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


def test_a_new_script_is_found_by_its_docstring(tmp_path):
    begin = "\nfirst.check(Args, TASKS)\n"
    (tmp_path / "toy.py").write_text(f'"""A toy.\n\nWhat differs from grpo.py: one line.\n"""{begin}')
    (tmp_path / "mine.py").write_text(f'"""Says what differs from grpo.py, but does not begin so."""{begin}')
    (tmp_path / "dapo.py").write_text(f'"""What differs from grpo.py: it is known already."""{begin}')
    (tmp_path / "other.py").write_text('"""What differs from grpo.py: it is no trainer."""\n')
    assert family.new_scripts(folder=tmp_path) == family.own_scripts(tmp_path) == {"toy": "grpo", "mine": None}
    (tmp_path / "grpo.py").touch()
    assert family.family(tmp_path) == ["grpo", "dapo"]
    assert family.family(tmp_path, parents=propagate.parents_in(tmp_path)) == ["grpo", "dapo", "toy"]
    assert family.PARENT["maxrl"] == "reinforce"


# ----------------------------------------------------------------------------------------------------------- diff.py


def test_what_differs_stands_below_the_names_of_functions(tmp_path):
    for name, value in (("a", "low"), ("b", "high")):
        body = "    y = 2\n" * 9 + f"    return {value} + 1\n"
        text = f'"""{name}."""\nx = 1\n\n\ndef f():\n{body}'
        (tmp_path / f"{name}.py").write_text(text)
    done = python("tools/diff.py", tmp_path / "a.py", tmp_path / "b.py")
    assert done.returncode == 0 and done.stdout.startswith("a.py → b.py: 2 lines of code removed or added\n")
    assert "\n-    return low + 1\n+    return high + 1\n" in done.stdout and "def f():" in done.stdout
    assert '"""' not in done.stdout
    assert '\n-"""a."""' in python("tools/diff.py", tmp_path / "a.py", tmp_path / "b.py", "--docstring").stdout


@pytest.mark.parametrize(
    "names, message",
    [
        (["grpo", "gppo"], "there is no script 'gppo'; there are grpo, reinforce, rloo"),
        (["grpo"], "grpo.py grew from no other script"),
        (["grpo", "README.md"], "README.md is no Python script"),
    ],
)
def test_diff_says_what_is_wrong_in_one_line(names, message):
    done = python("tools/diff.py", *names)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and message in done.stderr and len(done.stderr.splitlines()) == 1


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


def test_lines_that_look_like_marks_of_a_conflict_are_lines():
    look = "<<<<<<< here\n||||||| base\n=======\n>>>>>>> there\n"
    text, conflicts = propagate.merge(f"own\na\nb\nc\n{look}", f"a\nb\nc\n{look}", f"a\nb\nc\n{look}new\n")
    assert text == f"own\na\nb\nc\n{look}new\n" and not conflicts


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


# ---------------------------------------------------------------------------------------------------------- table.py


def test_a_script_without_words_for_the_tables_is_named(monkeypatch):
    monkeypatch.delitem(table.TEXTS, "dapo_ar_lopti")
    with pytest.raises(ValueError, match=r"dapo_ar_lopti\.py has no words for the table: add them to TEXTS"):
        table.table()
    monkeypatch.delitem(table.SHORT, "dapo_ar_lopti")
    with pytest.raises(ValueError, match=r"dapo_ar_lopti\.py has no words for the table: add them to SHORT"):
        table.short_table()


def test_no_cell_has_a_bar_in_it():
    cells = [words for row in table.TEXTS.values() for words in row] + list(table.SHORT.values())
    assert all("|" not in words and "\n" not in words for words in cells)


def test_a_text_is_written_between_its_marks(tmp_path, capsys):
    marks = "<!-- one: begin -->{}<!-- one: end -->"
    page = tmp_path / "docs" / "page.md"
    for _ in range(2):
        text = page.read_text() if page.exists() else f"a\n\n{marks.format('old')}\n\nb\n"
        generated.write({page: generated.between(text, "one", "| x |\n| y |\n")})
    assert page.read_text() == "a\n\n" + marks.format("\n\n| x |\n| y |\n\n") + "\n\nb\n"
    assert capsys.readouterr().out.split()[::2] == ["wrote", "left"]


@pytest.mark.parametrize("text", ["{0}", "{1}", "{1} {0}", "{0} {1} {0}", "{0} {1} {1}", "<!-- two: begin --> {1}"])
def test_marks_must_be_there_once_and_in_order(text):
    with pytest.raises(ValueError, match="must have the marks <!-- one: begin --> and <!-- one: end -->"):
        generated.between(text.format("<!-- one: begin -->", "<!-- one: end -->"), "one", "new")

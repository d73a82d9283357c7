"""The scripts as a family: what they share is the same to the letter, and the tools that read and carry it."""

import ast
import difflib
import itertools
import subprocess

import pytest

from tools import family
from tools.maintain import propagate

# Where a script and its parent have the same code, and other comments or docstrings. Beside the module docstring.
OWN_WORDS = {
    "archer": ["Args.clip_low"], "dapo": ["compute_advantages"], "dapo_ar_lopti": ["Args.clip_low"],
    "dr_grpo": ["policy_loss"], "entropy_top": ["Args.clip_low"], "grpo_ar_lopti": ["Args.clip_low"], "grpo_kl": ["k3"],
    "grpo_multi_turn": ["Args", "Args.max_response_tokens"], "opd": ["Args.updates_per_step"],
    "ppo": ["Args.kl_coef"], "reinforce_pp": ["Args.kl_coef"], "reinforce_pp_ar_lopti": ["Args.clip_low"],
    "rloo": ["Args.updates_per_step"], "sdpo": ["Args.updates_per_step", "compute_advantages"],
    "sft": ["Args.max_response_tokens", "Args.prompts_per_step", "Args.seed", "Args.task", "Args.updates_per_step"],
}  # fmt: skip
# How many lines of code a script takes from its parent and adds. A line that both should have and that differs makes
# them more.
OWN_LINES = {
    "acpo": (8, 60), "archer": (4, 19), "cispo": (8, 18), "dapo": (10, 104), "dapo_ar_lopti": (3, 21), "dppo": (10, 25),
    "dr_grpo": (8, 3), "entropy_bonus": (6, 42), "entropy_top": (1, 19), "gdpo": (5, 11), "gigpo": (2, 43),
    "grpo_ar_lopti": (3, 22), "grpo_kl": (2, 13), "grpo_async": (31, 67),
    "grpo_multi_turn": (34, 95), "grpo_stale": (11, 28), "grpo_tis": (2, 48), "gspo": (6, 8), "maxrl": (3, 5),
    "opd": (9, 10), "ppo": (19, 92),
    "reinforce": (55, 15), "reinforce_pp": (11, 18), "reinforce_pp_ar_lopti": (3, 21), "rloo": (8, 24),
    "sapo": (11, 12), "sdpo": (4, 43), "sft": (136, 49),
}  # fmt: skip
DESCENDANTS = [stem for stem in family.family() if stem in family.PARENT]
each_descendant = pytest.mark.parametrize("stem", DESCENDANTS)


# ------------------------------------------------------------------------------------------- the scripts themselves


@each_descendant
def test_where_a_script_has_its_parents_code_it_has_its_words(stem):
    """`diff grpo.py grpo_ar_lopti.py` shows the algorithm and nothing else, neither in code nor in comments."""
    before, after = family.source(family.PARENT[stem]), family.source(stem)
    codes, texts = (code_of_pieces(before), code_of_pieces(after)), (family.texts(before), family.texts(after))
    names = texts[0].keys() | texts[1].keys()
    same_code = {name for name in names if codes[0].get(name, []) == codes[1].get(name, [])}
    other_words = {name for name in same_code if texts[0].get(name) != texts[1].get(name)} - {"module docstring"}
    entry = f'if all of these are the algorithm\'s, OWN_WORDS has "{stem}": {sorted(other_words)}'
    assert sorted(other_words) == OWN_WORDS.get(stem, []), entry


def code_of_pieces(text):
    """{piece: its lines of code}, without docstrings, comments and the blanks around a line."""
    code = family.numbered_code_lines(text)
    found = {}
    for name, first, last in family.pieces(text):
        found.setdefault(name, []).extend(code[n].strip() for n in range(first - 1, last) if n in code)
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


def test_every_script_names_its_parent_and_a_new_one_is_found_by_that(tmp_path):
    assert len(family.PARENT) >= 25 and None not in family.PARENT.values()
    begin = "\nflags.check(Args, TASKS)\n"
    for name, docstring in (("toy", "A toy.\n\nWhat differs from grpo.py: one line."), ("mine", "Of my own.")):
        (tmp_path / f"{name}.py").write_text(f'"""{docstring}\n"""{begin}')
    (tmp_path / "other.py").write_text('"""What differs from grpo.py: it is no trainer."""\n')
    assert family.own_scripts(tmp_path) == {"toy": "grpo", "mine": None}


def test_the_pieces_of_a_script_are_all_its_lines_and_its_code_has_no_comments():
    for stem in ("grpo", "dapo_ar_lopti"):
        text = family.source(stem)
        rows = [row for _, first, last in family.pieces(text) for row in range(first, last + 1)]
        assert rows == list(range(1, len(text.splitlines()) + 1)) and "".join(family.texts(text).values())
        tree = ast.parse("\n".join(family.code_lines(text)))
        assert not any(ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


# ------------------------------------------------------------------------------------------------------ propagate.py


@pytest.fixture
def repository(tmp_path, capsys):
    """(edit, run) of a git repository of small scripts: a change, and propagate.py with its exit code and output."""

    def git(*words):
        about = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *about, *words], cwd=tmp_path, check=True, capture_output=True)

    def edit(stems, old, new, commit=False):
        for stem in stems.split():
            path = tmp_path / f"{stem}.py"
            path.write_text(path.read_text().replace(old, new))
        if commit:
            git("add", ".")
            git("commit", "-q", "-m", "x")

    def run(**args):
        with pytest.raises(SystemExit) as ended:
            propagate.main(propagate.Args(folder=tmp_path, **args))
        texts = {stem: (tmp_path / f"{stem}.py").read_text() for stem in family.family(tmp_path)}
        return ended.value.code, capsys.readouterr().out, texts

    git("init", "-q")
    for stem in "grpo dapo dapo_ar_lopti archer".split():
        (tmp_path / f"{stem}.py").write_text("".join(f"line_{k} = {k}\n" for k in range(30)))
    edit("dapo dapo_ar_lopti", "line_20 = 20\n", "line_20 = 20\nown_of_dapo = 1\n")
    edit("archer", "line_25 = 25", "line_25 = 'archer'", commit=True)
    return edit, run


@pytest.mark.parametrize("committed", [False, True])
def test_a_change_reaches_children_and_grandchildren_and_a_second_time_does_nothing(repository, committed):
    edit, run = repository
    edit("grpo", "line_5 = 5", "line_5 = 'new'", committed)
    code, out, texts = run()
    assert code == 0 and all(text.count("line_5 = 'new'") == 1 for text in texts.values())
    assert all(f"{stem}.py: changed" in out for stem in ("dapo", "dapo_ar_lopti", "archer"))
    assert "line_25 = 'archer'" in texts["archer"] and "own_of_dapo = 1" in texts["dapo_ar_lopti"]
    code, out, again = run()
    assert code == 0 and again == texts and out.count("has it already") == 3


def test_a_conflict_leaves_the_script_and_what_grew_from_it_untouched_and_others_go_on(repository):
    edit, run = repository
    edit("dapo dapo_ar_lopti", "line_5 = 5", "line_5 = 'dapo'", commit=True)
    edit("grpo", "line_5 = 5", "line_5 = 'grpo'")
    edit("grpo", "line_15 = 15", "line_15 = 'grpo'")
    code, out, texts = run()
    assert code == 1 and "dapo.py: left untouched, 1 conflict\n" in out
    assert "grpo" not in texts["dapo"] + texts["dapo_ar_lopti"] and texts["archer"].count("'grpo'") == 2
    # Resolved by hand, it goes on from there
    edit("dapo", "line_5 = 'dapo'", "line_5 = 'grpo'\nline_5_too = 'dapo'")
    edit("dapo", "line_15 = 15", "line_15 = 'grpo'")
    code, out, texts = run(script="dapo")
    assert code == 0 and "line_5 = 'grpo'\nline_5_too = 'dapo'\n" in texts["dapo_ar_lopti"]
    assert "line_15 = 'grpo'" in texts["dapo_ar_lopti"]

"""The pages of docs/algorithms: their parts, the worked example, the ladder; what is generated is up to date."""

import ast
import dataclasses
import math
import re

import pytest
import torch
from conftest import ROOT

from tools import anchors, example, family, pages, updates

PARTS = [
    "The idea",
    "The objective",
    "Where each symbol is computed",
    "A worked example",
    "The difference",
    "What was measured",
    "Run it",
    "Papers",
]
NUMBER = re.compile(r"[+−]?\d+\.\d{3}")


def page(script):
    return (pages.FOLDER / f"{script}.md").read_text()


def part(script, heading):
    return page(script).split(f"\n## {heading}\n")[1].split("\n## ")[0]


# --------------------------------------------------------------------------------------------------------------------
# The pages


def test_what_is_generated_is_up_to_date():
    for path, text in pages.all_pages().items():
        assert path.read_text() == text, f"{path.name}: python -m tools.pages"


def test_every_script_has_a_page_and_no_page_is_left_over():
    names = {path.stem for path in pages.FOLDER.iterdir()}
    assert names == {"README", "ladder", "grpo", *family.PARENT} == {"README", "ladder", "sft", *updates.ALGORITHMS}


def test_a_page_has_its_parts_and_leads_to_script_parent_and_neighbours():
    for script in updates.ALGORITHMS:
        assert re.findall(r"^## (.*)$", page(script), re.MULTILINE) == PARTS, script
        place = updates.ALGORITHMS.index(script)
        around = [*updates.ALGORITHMS[max(0, place - 1) : place], *updates.ALGORITHMS[place + 1 : place + 2]]
        grew_from = [f"{family.PARENT[script]}.md"] if script in family.PARENT else []
        links = re.findall(r"\]\((.*?)\)", page(script).splitlines()[2])
        expected = [f"../../{script}.py", *grew_from, *(f"{name}.md" for name in around)]
        assert links == expected, f"docs/algorithms/{script}.md, line 3: links to {links}, not to {expected}"


def test_each_symbol_has_code():
    """test_docs.py looks whether it occurs once in the script."""
    for script in (*updates.ALGORITHMS, "sft"):
        found = anchors.ROW.findall(anchors.SYMBOLS.search(page(script))[1])
        assert len(found) == part(script, PARTS[2]).count("\n| ") - 1 >= 6, script  # all rows but the head


def test_the_remarks_have_numbers_of_the_tables():
    for script in updates.ALGORITHMS:
        tables, remarks = part(script, "A worked example").split("<!-- example: end -->")
        where = f"docs/algorithms/{script}.md, below the worked example"
        assert remarks.count("\n- ") >= 3, f"{where}: at least three remarks"
        foreign = set(NUMBER.findall(remarks)) - set(NUMBER.findall(tables))
        assert not foreign, f"{where}: {foreign} do not stand in the example's tables"


def test_the_result_is_one_that_is_kept():
    """Its numbers stand in the comparison, whose own are those of the kept runs, or in the lab's page.

    opd.py, which needs a teacher, is not compared there: its page has runs of its own.
    """
    places = ("docs/comparison.md", "lab/README.md", "benchmarks/kk_tiny/family.md")
    kept = " ".join("".join((ROOT / place).read_text() for place in places).split())
    for script in set(updates.ALGORITHMS) - {"opd"}:
        measured = " ".join(part(script, "What was measured").split())
        for number in re.findall(r"[+−]?\d+\.\d+(?: ± \d+\.\d+| %)?", measured):
            assert number in kept, (
                f"docs/algorithms/{script}.md, What was measured: {number} stands in none of {places}"
            )
        for link in ("comparison.md", "lab/README.md", "claims.md"):
            assert link in measured, f"docs/algorithms/{script}.md, What was measured: no link to {link}"


def test_the_command_is_that_of_the_docstring():
    for script in (*updates.ALGORITHMS, "sft"):
        docstring = ast.get_docstring(ast.parse(family.source(script)))
        commands = re.search(r"```bash\n(.*?)```", part(script, "Run it"), re.DOTALL)[1].splitlines()
        expected = f"docs/algorithms/{script}.md, Run it: the commands are those of {script}.py's docstring"
        assert commands and all(f"    {command}" in docstring.splitlines() for command in commands), expected


def test_formulas_are_such_as_github_shows():
    for path in pages.FOLDER.glob("*.md"):
        text = re.sub("```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
        for formula in re.findall(r"\$\$.*?\$\$|\$[^$\n]+\$", text, flags=re.DOTALL):
            # Markdown takes the backslash from \, and \{; < and > may be taken for tags; some macros are not allowed.
            assert not re.search(r"\\[^a-zA-Z\s]|[<>]|\\operatorname", formula), formula
            assert formula.count("{") == formula.count("}"), formula
            assert len(re.findall(r"\\left\b", formula)) == len(re.findall(r"\\right\b", formula)), formula
        for line in re.sub(r"\$[^$\n]+\$", "", text.replace("$$", "")).splitlines():
            assert "$" not in line, line  # a formula that does not end on its line


# --------------------------------------------------------------------------------------------------------------------
# The ladder


def lines_of(script, name):
    """The code of a definition, without comments, as a set of lines; empty if the script has none of this name."""
    text = family.source(script)
    for found, node in anchors.definitions(text):
        if found == name:
            numbers = range(node.lineno - 1, node.end_lineno)
            return {line.strip() for k, line in family.numbered_code_lines(text).items() if k in numbers}
    return set()


def test_the_ladders_differences_are_those_of_the_scripts():
    blocks = re.findall(r"```diff\n(.*?)```", page("ladder"), re.DOTALL)
    pairs = []
    for block in blocks:
        head, *parts = re.split(r"^@@ (\w+) @@\n", block, flags=re.MULTILINE)
        *before, after = re.findall(r"^[-+]{3} (\w+)\.py$", head, re.MULTILINE)
        pairs.append((*before, after))
        for name, lines in zip(parts[::2], parts[1::2]):
            old = lines_of(before[0], name) if before else set()
            new = lines_of(after, name)
            right = {"-": old - new, "+": new - old, " ": old & new}
            for line in lines.splitlines():
                assert line[1:].strip() in right[line[0]], (before, after, name, line)
    assert pairs == [
        ("reinforce",),
        ("reinforce", "rloo"),
        *[("rloo", "grpo")] * 3,
        ("grpo", "dr_grpo"),
        ("grpo", "ppo"),
    ]


def weights(name):
    _, script, update, settings = pages.WEIGHTS[name]
    return example.example(script, **settings).columns[update]


def test_what_the_ladder_says_of_the_weights():
    rung = {name: weights(name) for name in pages.WEIGHTS}
    approx = lambda values: pytest.approx(values, abs=1e-5)  # noqa: E731
    assert rung["reinforce"] == approx([example.REWARDS[token.response - 1] - 0.5 for token in example.TOKENS])
    assert rung["rloo"] == approx([4 / 3 * weight for weight in rung["reinforce"]])
    assert rung["normalised"] == approx([3 / 4 / 3 * weight for weight in rung["rloo"]])
    ratios = [token.new / token.old for token in example.TOKENS]
    cut = ["suppose", "obviously"]
    left = [0 if token.text in cut else ratio for token, ratio in zip(example.TOKENS, ratios)]
    assert rung["clipped"] == approx([share * weight for share, weight in zip(left, rung["normalised"])])
    kl = [0.1 * (token.ref / token.new - 1) for token in example.TOKENS]
    assert rung["grpo"] == approx([weight + pull for weight, pull in zip(rung["clipped"], kl)])
    assert rung["dr_grpo"] == approx([3 / 4 * 12 / 20 * share * weight for share, weight in zip(left, rung["rloo"])])


# --------------------------------------------------------------------------------------------------------------------
# The worked example

BY_HAND = {  # of grpo.py: (response, π_old, π, π_ref); the advantages are (r − 0.5) / 3, from the rewards 3, 3, −1, −3
    "now": (0, 0.90, 0.92, 0.85),
    "suppose": (0, 0.05, 0.07, 0.04),
    "check": (1, 0.50, 0.45, 0.50),
    "so": (2, 0.90, 0.73, 0.90),
    "obviously": (2, 0.02, 0.012, 0.03),
    "lies": (2, 0.42, 0.41, 0.50),
    "guess": (3, 0.30, 0.48, 0.30),
    "perhaps": (3, 0.10, 0.09, 0.20),
}
CUT_OFF = {"suppose", "obviously"}  # ρ 1.4 above 1.24 with A > 0, ρ 0.6 below 0.8 with A < 0


def number(script, token, column):
    place = [one.text for one in example.TOKENS].index(token)
    return pages.example_of(script).columns[column][place]


@pytest.mark.parametrize("token", BY_HAND)
def test_the_numbers_of_grpo_by_hand(token):
    response, old, now, ref = BY_HAND[token]
    advantage = ([3, 3, -1, -3][response] - 0.5) / (3 + 1e-6)  # the squares 6.25, 6.25, 2.25, 12.25 add up to 27 = 3·3²
    ratio = now / old
    expected = {
        "ratio": ratio,
        "advantages": advantage,
        "left": float(token not in CUT_OFF),
        "k3": ref / now - math.log(ref / now) - 1,
        "first": advantage + 0.1 * (ref / old - 1),
        "second": (token not in CUT_OFF) * ratio * advantage + 0.1 * (ref / now - 1),
    }
    for name, value in expected.items():
        assert number("grpo", token, name) == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize(
    ("script", "token", "column", "value"),
    [
        ("reinforce", "obviously", "second", -1.5),  # r − the mean of the step
        ("rloo", "guess", "advantages", -3 - 5 / 3),  # the others' mean is (3 + 3 − 1) / 3
        ("rloo", "suppose", "second", 3 + 1 / 3),  # there is no clip
        ("maxrl", "guess", "second", -1),  # −3 is as wrong as −1
        ("dr_grpo", "guess", "first", -3.5 * 12 / 20),  # divided by 4 × 5, and the weights are times 12
        ("ppo", "now", "k1", math.log(0.90 / 0.85)),
        ("ppo", "suppose", "return", 3 - 0.1 * math.log(0.05 / 0.04)),  # λ 1: the rewards to come, whatever V is
        ("ppo", "perhaps", "value_loss", 0.5 * (-1.6 - (-3 + 0.1 * math.log(2))) ** 2),
        ("ppo", "suppose", "value_clipped", 1),
        ("reinforce_pp", "perhaps", "return", -3 + 0.1 * math.log(2)),
        ("dapo", "so", "advantages", (-1.5 - 0.375) / math.sqrt((2 * 2.625**2 + 1.875**2 + 3.375**2) / 3)),
        ("grpo_ar_lopti", "suppose", "ar_weight", 0.3 * 0.05 + 0.7),
        ("grpo_ar_lopti", "suppose", "advantages", (0.3 * 0.05 + 0.7) * 2.5 / 3),
        ("grpo_ar_lopti", "check", "stage", 1),  # π_old is η
        ("reinforce_pp_ar_lopti", "suppose", "ar_weight", 0.1 * 0.05 + 0.9),
        ("acpo", "check", "first", 2.5 / 3 * 12 / 8),  # the mean over two tokens, then over four responses
        ("cispo", "guess", "second", -1.45 * 3.5 / 3),  # ρ is 1.6
        ("cispo", "guess", "left", 1.45 / 1.6),
        ("gspo", "check", "ratio", math.sqrt(0.9 * 0.93 / 0.95)),
        ("gspo", "check", "left", 1),
        ("sapo", "suppose", "left", 4 * (p := 1 / (1 + math.exp(-0.4))) * (1 - p)),
        ("dppo", "so", "left", 0),  # −0.17 is beyond −0.15
        ("dppo", "suppose", "second", 1.4 * 2.5 / 3),
        ("entropy_top", "now", "in_loss", 0),
        ("entropy_top", "guess", "in_loss", 1),
        ("archer", "perhaps", "reasoning", 1),
        ("archer", "guess", "reasoning", 0),
        ("grpo_tis", "obviously", "correction", 2),  # 0.02 / 0.005, bounded
        ("grpo_tis", "perhaps", "icepop", 0),
    ],
)
def test_numbers_of_the_other_scripts_by_hand(script, token, column, value):
    assert number(script, token, column) == pytest.approx(value, abs=1e-5)


def test_what_the_responses_have_by_hand():
    grpo, dapo = pages.example_of("grpo"), pages.example_of("dapo")
    assert grpo.advantages == pytest.approx([2.5 / 3, 2.5 / 3, -1.5 / 3, -3.5 / 3], abs=1e-5)
    assert pages.example_of("grpo_ar_lopti").advantages == grpo.advantages  # those before AR
    assert pages.example_of("ppo").advantages == []  # tokens of a response have different ones
    assert dapo.penalties == [0, 0, -0.5, 0] and dapo.rewards == [3, 3, -1.5, -3]
    assert "| 4 | `guess` `A` `perhaps` | −3.000 | −1.167 |" in page("grpo")


def test_acpos_bins_by_hand():
    lowest, empty, *_ = pages.example_of("acpo").bins
    ratios = torch.tensor([1.4, 0.6, 0.9])
    assert lowest["tokens"] == 3 and lowest["sigma"] == pytest.approx(ratios.std(correction=0).item())
    assert lowest["clip_range"] == pytest.approx(0.2 + 3 * lowest["sigma"])
    assert empty == {"tokens": 0, "sigma": 0.0, "clip_range": 0.2}


def test_each_script_has_its_own_settings_except_for_the_sizes():
    import grpo

    ours, default = dataclasses.asdict(example.settings_of("grpo")), dataclasses.asdict(grpo.Args())
    assert {name for name in ours if ours[name] != default[name]} == {*example.SETTINGS, "kl_coef", "max_grad_norm"}


def test_cells():
    assert [pages.cell(value) for value in (1.23456, -0.5, -0.0001, math.nan)] == ["1.235", "−0.500", "0.000", "–"]
    assert [pages.cell(value, "in_loss") for value in (0.0, 1.0)] == ["", "yes"] and pages.cell(2.0, "stage") == "2"


# --------------------------------------------------------------------------------------------------------------------
# The command


def test_what_is_wrong_with_a_page_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    with pytest.raises(SystemExit) as ended:
        pages.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: ") and "README.md" in line

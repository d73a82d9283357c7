"""The pages of docs/algorithms: their parts, the worked example, the ladder; what is generated is up to date."""

import json
import math
import re

import pytest

from tools import family
from tools.maintain import anchors, example, pages


def page(script):
    return (pages.FOLDER / f"{script}.md").read_text()


# --------------------------------------------------------------------------------------------------------------------
# The pages


def test_what_is_generated_is_up_to_date():
    """Tables, worked examples, claims, and numbers of kept runs: all that one command makes."""
    for path, text in pages.all_texts().items():
        assert path.read_text() == text, f"{path}: python -m tools.maintain.pages"


def test_a_table_gets_the_numbers_of_kept_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(pages.family, "ROOT", tmp_path)
    rows = [{"step": 0, "kl": 2.5e-8}, {"step": 4, "kl": -0.25}]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    by_column = "<!-- kept runs: a kl -->\n\n| step | a |\n|---|---|\n| 0 | 9.99e-09 |\n| 4 | 1.00 |\n"
    assert pages.with_kept_numbers(by_column) == by_column.replace("9.99e-09", "2.50e-08").replace("1.00", "−0.25")
    by_row = "<!-- kept runs: a kl -->\n\n| x | step 0 | step 4 |\n|---|---|---|\n| kl | | 1.0 |\n| other"
    assert pages.with_kept_numbers(by_row) == by_row.replace("1.0", "−0.2")


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
        ("rloo", "suppose", "second", 3 + 1 / 3),  # there is no clip
        ("dr_grpo", "guess", "first", -3.5 * 12 / 20),  # divided by 4 × 5, and the weights are times 12
        ("ppo", "suppose", "return", 3 - 0.1 * math.log(0.05 / 0.04)),  # λ 1: the rewards to come, whatever V is
        ("ppo", "perhaps", "value_loss", 0.5 * (-1.6 - (-3 + 0.1 * math.log(2))) ** 2),
        ("grpo_ar_lopti", "suppose", "ar_weight", 0.3 * 0.05 + 0.7),
        ("grpo_ar_lopti", "check", "stage", 1),  # π_old is η
        ("acpo", "check", "first", 2.5 / 3 * 12 / 8),  # the mean over two tokens, then over four responses
        ("cispo", "guess", "second", -1.45 * 3.5 / 3),  # ρ is 1.6
        ("gspo", "check", "ratio", math.sqrt(0.9 * 0.93 / 0.95)),
        ("sapo", "suppose", "left", 4 * (p := 1 / (1 + math.exp(-0.4))) * (1 - p)),
        ("dppo", "so", "left", 0),  # −0.17 is beyond −0.15
        ("entropy_top", "guess", "in_loss", 1),
        ("archer", "perhaps", "reasoning", 1),
        ("grpo_tis", "obviously", "correction", 2),  # 0.02 / 0.005, bounded
        ("grpo_tis", "perhaps", "icepop", 0),
    ],
)
def test_numbers_of_the_other_scripts_by_hand(script, token, column, value):
    assert number(script, token, column) == pytest.approx(value, abs=1e-5)


# --------------------------------------------------------------------------------------------------------------------
# The command


def test_what_is_wrong_with_a_page_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    with pytest.raises(SystemExit) as ended:
        pages.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: ") and "README.md" in line

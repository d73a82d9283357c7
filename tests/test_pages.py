"""The pages of docs/algorithms: their parts, the worked example, the ladder; what is generated is up to date."""

import math

import pytest

from tools.maintain import example, pages


def page(script):
    return (pages.FOLDER / f"{script}.md").read_text()


def test_what_is_generated_is_up_to_date():
    """Tables, worked examples, claims, and numbers of kept runs: all that one command makes."""
    for path, text in pages.all_texts().items():
        assert path.read_text() == text, f"{path}: python -m tools.maintain.pages"


def number(script, token, column):
    place = [one.text for one in example.TOKENS].index(token)
    return pages.example_of(script).columns[column][place]


@pytest.mark.parametrize(
    ("script", "token", "column", "value"),
    [  # of grpo.py the advantages are (r − 0.5) / 3, from the rewards 3, 3, −1, −3
        ("grpo", "now", "second", 2.5 / 3 * 0.92 / 0.90 + 0.1 * (0.85 / 0.92 - 1)),
        ("grpo", "suppose", "second", 0.1 * (0.04 / 0.07 - 1)),  # ρ is 1.4, above 1.24
        ("grpo", "lies", "k3", 0.50 / 0.41 - math.log(0.50 / 0.41) - 1),
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

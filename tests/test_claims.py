"""docs/claims.toml and what reads it: every verdict from raw values, worked out by hand."""

import json
import math

import pytest

from tools import compare, inference, kept
from tools.maintain import claims


def test_the_four_words_by_hand():
    """Three values of error 1 and mean m: the interval is m ± 4.303."""
    made = {size: inference.Estimate("", 0.0, 1.0, 2, 3, size=size) for size in (0.0, 3.0, 5.0)}

    def word(mean, size=0.0):
        return inference.replace(made[size], mean=mean).word(0.05)

    assert (word(4.4), word(-4.4)) == (inference.SHOWS, inference.OPPOSITE)
    assert (word(0.5, 5.0), word(-1.4, 3.0)) == (inference.NO_EFFECT, inference.NO_EFFECT)
    amount = inference.replace(made[0.0], mean=-4.4, is_amount=True)
    assert amount.word(0.05) == inference.NO_EFFECT  # less than what is claimed
    assert word(0.5, 3.0) == word(0.5) == word(1.0, 5.0) == inference.TOO_FEW
    assert made[0.0].numbers(0.05) == "+0 (−4.3 to +4.3)"
    two = inference.Estimate("", 9.0, 0.1, 60, 2)
    assert two.word(0.05) == inference.TOO_FEW  # however small the error that it shares
    assert inference.holms_level([two, made[0.0]], 0.05) == 0.05  # and it takes no level from the others


def test_three_seeds_that_agree_by_luck_share_the_error_of_the_others():
    """Alone 0.01 ± 0.002 would show at the level of 5 %, and with the others' deviation it can't."""
    lucky = inference.of_values("", [(0.01, 0.0), (0.0065, 0.0), (0.0135, 0.0)])
    other = inference.of_values("", [(0.05, 0.0), (0.0, 0.0), (-0.05, 0.0)])
    assert lucky.error == pytest.approx(0.00202, abs=1e-5) and lucky.word(0.05) == inference.SHOWS
    lucky, other = inference.pooled([lucky, other])
    assert lucky.error == other.error == pytest.approx(math.sqrt((0.0035**2 + 0.05**2) / 2 / 3)) and lucky.df == 4
    assert lucky.word(0.05) == inference.TOO_FEW


def test_comparisons_with_the_same_baseline_count_as_fewer():
    """Three differences to the same runs: M has 2 on its diagonal and 1 beside it, so 2·6²/(3·2² + 6·1²) = 4 for 6."""
    values = [(0.1, 0.0), (0.2, 0.0), (0.3, 0.0)]
    apart, together = [], []
    for name in "abc":
        one = inference.of_values(name, values)
        apart.append(one)
        together.append(inference.replace(one, of=((name, 1.0), ("baseline", -1.0))))
    assert [one.df for one in inference.pooled(apart)] == [6, 6, 6]
    assert [one.df for one in inference.pooled(together)] == [pytest.approx(4)] * 3
    assert inference.pooled(together)[0].error == pytest.approx(apart[0].error)
    # The mean of three runs has a third of a run's variance, and a difference of two has twice that of a run.
    mean = inference.replace(together[0], error=0.0, of=(("d", 1 / 3), ("e", 1 / 3), ("f", 1 / 3)))
    [difference, mean] = inference.pooled([together[0], mean])
    assert mean.error == pytest.approx(difference.error * math.sqrt((1 / 3) / 2))


# ------------------------------------------------------------------------------------------------------- the verdicts


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    for name in ("LAB", "RUNS", "RESULTS"):
        monkeypatch.setattr(claims, name, tmp_path / name)
        (tmp_path / name).mkdir()


def keep(suite, entry, seed, accuracies, **metrics):
    """A kept run with these evaluations, one every 4 steps, and metrics that all steps share."""
    common, commands, _ = compare.read_suite(suite)
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    rows += [{"step": 4 * i, "eval/accuracy": value} | metrics for i, value in enumerate(accuracies, 1)]
    path = claims.RUNS / f"{kept.name_of(entry, seed)}.jsonl"
    path.unlink(missing_ok=True)
    kept.add(path, kept.name_of(entry, seed), compare.asked_for(commands[entry], common, seed) | {"rows": rows})
    return path


AHEAD = {"suite": "comparison", "more": "ar", "than": "grpo"}


def test_a_difference_of_runs_by_hand():
    """Of seeds 0.1, 0.2, 0.3: 0.2 ± 0.058, over the second half of the run's evaluations, or of its steps."""
    assert claims.estimates_of(AHEAD) == []
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        keep("comparison", "grpo", seed, [0.2] * 6, response_tokens=100)
        path = keep("comparison", "ar", seed, [0.2] * 3 + [0.2 + gain] * 3, response_tokens=110)
    [found] = claims.estimates_of(AHEAD)
    assert (found.mean, found.error) == (pytest.approx(0.2), pytest.approx(0.1 / math.sqrt(3)))
    assert (found.n, found.df, found.label) == (3, 2, "ar minus grpo")
    [longer] = claims.estimates_of(AHEAD | {"metric": "response_tokens"})
    assert longer.mean == 10
    short = {"rows": [{"step": 4, "eval/accuracy": 0.1}, {"step": 8, "eval/accuracy": 0.3, "kl": 1.0}]}
    assert claims.late(short, "eval/accuracy") == 0.3 and claims.late(short, ["eval/accuracy", "kl"]) == 0.3 - 1
    [twice] = claims.estimates_of({"suite": "comparison", "pairs": [["ar", "grpo"]] * 2})
    assert (twice.mean, twice.n) == (pytest.approx(0.2), 3)  # seeds are the units, however many pairs there are
    [beyond] = claims.estimates_of(AHEAD | {"beyond": ["ar", "grpo"]})
    assert beyond.mean == pytest.approx(0) and beyond.label == "ar minus grpo, less ar minus grpo"
    for entry in ("grpo", "ar"):
        keep("comparison", entry, 3, [0.9] * 6)
    [table] = claims.estimates_of(AHEAD)
    [eight] = claims.estimates_of(AHEAD | {"suite": "control"})
    assert (table.n, eight.n) == (3, 4)  # the seeds of the suite's own table count
    path.write_text(path.read_text().replace('"alpha": 0.3', '"alpha": 0.2'))
    with pytest.raises(ValueError, match="was made by"):
        claims.estimates_of(AHEAD)
    with pytest.raises(ValueError, match="off: a value is NaN or infinite"):
        inference.of_values("off", [(0.1, 0.0), (math.nan, 0.0)])


def test_a_comparison_of_batches_by_hand():
    batches = [{"a": [2.0, 1.0, 1.5], "b": {"c": 4.0}}, {"a": [3.0, 1.0, 2.5], "b": {"c": None}}]
    (claims.LAB / "x.json").write_text(json.dumps({"advantages": "1", "batches": batches}))
    for comparison, expected in [
        ({"more": "a/0", "than": ["a/1", "a/2"]}, [(0.5, 2)]),
        ({"less": "a/{}", "than": 1.75, "for": [0, 1]}, [(-0.75, 2), (0.75, 2)]),
        ({"equals": "b/c", "than": 3, "slack": 1.5}, [(0.5, 1)]),  # the batch without one is left out
        ({"more": "a/0", "than": "a/1", "ratio": True}, [(pytest.approx(math.log(6) / 2), 2)]),
        ({"more": "a/0", "than": "a/1", "times": 1.5}, [(1.0, 2)]),
    ]:
        found = claims.estimates_of({"file": "x"} | comparison)
        assert [(one.mean, one.n) for one in found] == expected, comparison


def test_words_that_turn_with_the_number_of_people_are_not_pooled():
    """With two people more of the words go with the reward, with three fewer: pooled, nothing would be seen."""
    raw = []
    for problem in range(40):
        for people, sign in (("2", 1), ("3", -1)):
            count = [problem % 5, problem % 3]
            raw.append({"category": people, "count": count, "reward": [sign * x for x in count]})
    words = {family: {"raw": raw} for family in ("conclusion indicator", "analysis")}
    (claims.RESULTS / "words.json").write_text(json.dumps({"rows": [{"words": words}]}))
    assert inference.correlation([(one["count"], one["reward"]) for one in raw])[0] == pytest.approx(0, abs=1e-9)
    expected = {"words analysis": ["shows", "the opposite"], "words conclusion indicator": ["the opposite", "shows"]}
    for name, of_name in expected.items():
        made = claims.MADE[name]
        assert made["for"] == [2, 3, 4] and made["only"] == {"category": "{}"}
        assert [found.word(0.05) for found in claims.estimates_of(made | {"for": [2, 3]})] == of_name


def test_a_row_has_the_worst_of_its_words():
    """Means of 9, 0 and −9, each with the interval ± 2.3: shown, an effect of 1 that may be there, the opposite."""
    found = {
        name: [inference.Estimate("", mean, 1.0, 9, 10, size=1.0)]
        for name, mean in (("a", 9.0), ("b", 0.0), ("c", -9.0))
    }

    def word(*by, beside=()):
        return claims.judged({"item": "x", "by": list(by), "beside": list(beside)}, found, dict.fromkeys("abc", 0.05))

    assert word("a")[0] == word("-c")[0] == word("a", beside="c")[0] == inference.SHOWS
    assert word("a", "b")[0] == inference.TOO_FEW and word("a", "c", "b")[0] == inference.OPPOSITE
    assert word("a", "b")[2] == ["━━━━━━━━━━━━●━━━━◇━━━━━━━"] and word("a")[2] == ["│·◇···········━━━━━●━━━━━"]
    assert word("a", "b")[1].startswith("(1 × shows, 1 × too few runs to tell) +9 (+6.74 to +11.3), claimed 1<br>+0 (")
    told = word("a", beside=["c", "-a", "b"])[1]
    assert "<br>for comparison, the opposite: −9 (" in told and "<br>and −9 (" in told and told.count("opposite") == 1
    found["a"] = []
    with pytest.raises(ValueError, match="nothing is kept that measures"):
        word("a")

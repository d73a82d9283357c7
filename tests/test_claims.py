"""docs/claims.toml and what reads it: every item of the papers once, every verdict from raw values, by hand."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, flags_of

from lab import verdicts
from tools import claims, compare, comparisons, inference, kept

PAPERS = {paper["name"]: paper["claims"] for paper in verdicts.CLAIMS["papers"]}
ALL = [claim for of_paper in PAPERS.values() for claim in of_paper]
ITEMS = {paper: [claim["item"] for claim in of_paper] for paper, of_paper in PAPERS.items()}


def numbered(kind, items):
    """The numbers of the figures (or tables) that the items name, in order, each once."""
    found = [int(number) for item in items for number in re.findall(rf"^{kind} (\d+)", item)]
    return sorted(set(found))


def equations(items):
    """The numbers of the equations that the items name."""
    numbers = []
    for item in items:
        for text in re.findall(r"eq\. ([\d–, ]+)", item):
            for part in text.split(","):
                first, _, last = part.strip().partition("–")
                numbers += range(int(first), int(last or first) + 1)
    return numbers


# ------------------------------------------------------------------------------------------------ the list of claims


@pytest.mark.parametrize(
    ("paper", "figures", "tables", "last_equation"), [("AR-Lopti", 19, 10, 21), ("ACPO", 4, 3, 69)]
)
def test_every_figure_table_and_equation_of_a_paper_is_listed(paper, figures, tables, last_equation):
    items = ITEMS[paper]
    assert numbered("Figure", items) == [*range(1, figures + 1)]
    assert numbered("Table", items) == [*range(1, tables + 1)]
    assert sorted(equations(items)) == [*range(1, last_equation + 1)]  # each once


def test_no_item_is_listed_twice():
    for items in ITEMS.values():
        assert len(items) == len(set(items))
        wholes = [item for item in items if re.fullmatch(r"(Figure|Table) \d+", item)]
        for whole in wholes:  # either a figure as a whole, or its parts
            assert not [item for item in items if re.match(rf"{whole}\D", item)], whole


def test_panels_of_a_figure_are_listed_once():
    for paper, figure, panels in [
        ("AR-Lopti", 1, "abcdef"),
        ("AR-Lopti", 5, "ab"),
        ("AR-Lopti", 6, "abcd"),
        ("ACPO", 1, "abc"),
    ]:
        found = [item for item in ITEMS[paper] if re.match(rf"Figure {figure}\(", item)]
        assert "".join(sorted(re.findall(r"\((\w)\)", " ".join(found)))) == panels


def test_every_numbered_statement_is_listed():
    text = " ".join(item for items in ITEMS.values() for item in items)
    for name in ("Assumption 4.1", "Proposition 4.2", "Algorithm 1", "Lemma 1", "Proposition 1", "Remark 1"):
        assert name in text, name


NOTES = ROOT.parent / "shared" / "papers" / "token_level_rl_notes.md"


@pytest.mark.skipif(not NOTES.exists(), reason="the notes are not at hand")
def test_every_figure_of_the_notes_is_listed():
    figures = set(re.findall(r'src="([^"]+)"', NOTES.read_text()))
    listed = set(re.findall(r"\w[\w-]*\.png", " ".join(ITEMS["Notes"])))
    assert figures == listed


def test_no_verdict_is_typed_by_hand():
    """Neither in the words of a claim nor in a comparison: these have numbers alone."""
    for claim in ALL:
        for word in (*claims.WORDS[:6], claims.TESTED, "does not show", "cannot tell"):
            assert word not in claim["says"] + claim.get("note", ""), claim["item"]
    for name, made in verdicts.MADE.items():
        assert not set(map(str, made.values())) & set(claims.WORDS), name
        assert ("suite" in made) != ("file" in made) and len({"more", "less", "equals"} & made.keys()) <= 1, name


def named_by(claim):
    return [name.removeprefix("-") for name in claim.get("by", []) + claim.get("beside", [])]


def test_every_comparison_is_named_by_a_claim_and_every_name_is_one():
    assert {name for claim in ALL for name in named_by(claim)} == set(verdicts.MADE)
    assert set(verdicts.CLAIMS["stages"]["by"]) <= set(verdicts.MADE)


# ----------------------------------------------------------------------------------------------------- the commands


def commands():
    found = []
    for claim in ALL:
        found += [command.strip("`") for command in claims.commands_of(claim, verdicts.MADE)]
        found += [text for text in re.findall(r"`([^`]+)`", claim.get("note", "")) if text.startswith("python")]
    return sorted(set(found))


def test_every_command_exists():
    for command in commands():
        program, *words = shlex.split(command)
        if program == "pytest":
            assert [(ROOT / word).is_file() for word in words] == [True], command
            continue
        assert program == "python", command
        if words[0] == "-m":
            words = [words[1].replace(".", "/") + ".py", *words[2:]]
        file, *rest = words
        assert (ROOT / file).is_file(), command
        given = {word[2:]: rest[i + 1] for i, word in enumerate(rest) if word.startswith("--") and i + 1 < len(rest)}
        flags = {word[2:] for word in rest if word.startswith("--")}
        assert flags <= flags_of(file), (command, flags - flags_of(file))
        if "suite" in given and "compare" in file:
            assert given["suite"] in comparisons.SUITES, command


def test_what_is_named_in_the_code_is_there():
    """A test or definition that is gone would leave its row not measured."""
    for claim in ALL:
        only = {key: claim[key] for key in ("tests", "where") if key in claim}
        assert not only or claims.judged(only, {})[0] != claims.NOT_MEASURED, claim["item"]


# ----------------------------------------------------------------------------------------------------- the statistics


@pytest.mark.parametrize(("df", "t"), [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (120, 1.980)])
def test_students_t_is_that_of_the_tables(df, t):
    assert inference.student(0.05, df) == pytest.approx(t, abs=5e-4)
    assert inference.p_value(t, df) == pytest.approx(0.05, abs=5e-5)


def test_holms_level_by_hand():
    """0.001 ≤ 0.05/4, 0.02 > 0.05/3: one is rejected, and the three others are tested at 0.05/3."""
    assert inference.holms_level([0.9, 0.02, 0.001, 0.04], 0.05) == pytest.approx(0.05 / 3)
    assert inference.holms_level([0.001, 0.01], 0.05) == 0.05 and inference.holms_level([], 0.05) == 0.05


def test_the_four_words_by_hand():
    """Three values of error 1 and mean m: the interval is m ± 4.303, and 7.364 would have been seen."""
    made = {size: inference.Estimate("", 0.0, 1.0, 2, 3, size=size) for size in (0.0, 3.0, 5.0)}

    def word(mean, size=0.0):
        return inference.replace(made[size], mean=mean).word(0.05)

    assert (word(4.4), word(-4.4)) == (inference.SHOWS, inference.OPPOSITE)
    assert (word(0.5, 5.0), word(-1.4, 3.0)) == (inference.NO_EFFECT, inference.NO_EFFECT)
    amount = inference.replace(made[0.0], mean=-4.4, is_amount=True)
    assert amount.word(0.05) == inference.NO_EFFECT  # less than what is claimed
    assert word(0.5, 3.0) == word(0.5) == word(1.0, 5.0) == inference.TOO_FEW
    assert made[0.0].visible(0.05) == pytest.approx(4.303 + 1.061, abs=1e-3)
    assert made[0.0].numbers(0.05) == "+0 (−4.3 to +4.3), visible 5.36"
    two = inference.Estimate("", 9.0, 0.1, 60, 2)
    assert two.word(0.05) == inference.TOO_FEW  # however small the error that it shares
    assert verdicts.level_of([two, made[0.0]]) == 0.05  # and it takes no level from the others


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


def test_the_bootstrap_draws_whole_clusters():
    """Each response four times over in its cluster is no more than once; scattered it would halve the error."""
    once = [([float(x)], [float(x * (1 if x % 3 else -1))]) for x in range(-20, 21)]
    value, error = inference.correlation(once)
    assert inference.correlation([(x * 4, y * 4) for x, y in once]) == pytest.approx((value, error), rel=1e-6)
    assert inference.correlation(once * 4)[1] == pytest.approx(error / 2, rel=0.15)
    assert inference.correlation([([1, 2], [3, 3])]) == (None, None)
    assert inference.correlation([([1, 5], [2, 9]), ([7], [100])], in_ranks=True)[0] == pytest.approx(1)


def test_a_draw_of_equal_numbers_has_the_correlation_0():
    """Two problems, of which a draw may take one twice: what is left of its variance is rounding."""
    draws = []
    value, error = inference.correlation([([0.1] * 3, [0.7] * 3), ([0.3], [0.2])], draws=draws)
    assert value == pytest.approx(-1) and 0 < error < 1
    assert all(abs(drawn) < 1 + 1e-6 for drawn in draws)


# ------------------------------------------------------------------------------------------------------- the verdicts


@pytest.fixture
def folders(tmp_path):
    for name in ("lab", "runs", "results"):
        (tmp_path / name).mkdir()
    return verdicts.Folders(tmp_path / "lab", tmp_path / "runs", tmp_path / "results")


def keep(folders, suite, entry, seed, accuracies, **metrics):
    """A kept run with these evaluations, one every 4 steps, and metrics that all steps share."""
    common, entries = comparisons.SUITES[suite]
    script, *flags = shlex.split(compare.command_of(compare.read_entries(entries)[entry], common, seed))
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    rows += [{"step": 4 * i, "eval/accuracy": value} | metrics for i, value in enumerate(accuracies, 1)]
    about = {"script": Path(script).stem, "settings": kept.settings_of(flags), "commit": "abc"}
    about |= {"machine": "m", "date": "d"}
    path = compare.kept_file(folders.runs, entry, seed)
    path.write_text(json.dumps(about | {"rows": rows}))
    return path


AHEAD = {"suite": "comparison", "more": "ar", "than": "grpo"}


def test_a_difference_of_runs_by_hand(folders):
    """Of seeds 0.1, 0.2, 0.3: 0.2 ± 0.058, over the second half of the run's evaluations, or of its steps."""
    assert verdicts.estimates_of(AHEAD, folders) == []
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        keep(folders, "comparison", "grpo", seed, [0.2] * 6, response_tokens=100)
        path = keep(folders, "comparison", "ar", seed, [0.2] * 3 + [0.2 + gain] * 3, response_tokens=110)
    [found] = verdicts.estimates_of(AHEAD, folders)
    assert (found.mean, found.error) == (pytest.approx(0.2), pytest.approx(0.1 / math.sqrt(3)))
    assert (found.n, found.df, found.label) == (3, 2, "ar minus grpo")
    [longer] = verdicts.estimates_of(AHEAD | {"metric": "response_tokens"}, folders)
    assert longer.mean == 10
    short = {"rows": [{"step": 4, "eval/accuracy": 0.1}, {"step": 8, "eval/accuracy": 0.3, "kl": 1.0}]}
    assert verdicts.late(short, "eval/accuracy") == 0.3 and verdicts.late(short, ["eval/accuracy", "kl"]) == 0.3 - 1
    [all_steps] = verdicts.estimates_of(AHEAD, folders, since=verdicts.ALL)
    assert all_steps.mean == pytest.approx(0.1)
    [twice] = verdicts.estimates_of({"suite": "comparison", "pairs": [["ar", "grpo"]] * 2}, folders)
    assert (twice.mean, twice.n) == (pytest.approx(0.2), 3)  # seeds are the units, however many pairs there are
    [beyond] = verdicts.estimates_of(AHEAD | {"beyond": ["ar", "grpo"]}, folders)
    assert beyond.mean == pytest.approx(0) and beyond.label == "ar minus grpo, less ar minus grpo"
    for entry in ("grpo", "ar"):
        keep(folders, "comparison", entry, 3, [0.9] * 6)
    [table] = verdicts.estimates_of(AHEAD, folders)
    [eight] = verdicts.estimates_of(AHEAD | {"suite": "control"}, folders)
    assert (table.n, eight.n) == (3, 4)  # the seeds of the suite's own table count
    path.write_text(path.read_text().replace('"alpha": 0.3', '"alpha": 0.2'))
    with pytest.raises(ValueError, match="was made by"):
        verdicts.estimates_of(AHEAD, folders)
    with pytest.raises(ValueError, match="off: a value is NaN or infinite"):
        inference.of_values("off", [(0.1, 0.0), (math.nan, 0.0)])


def test_a_comparison_of_batches_by_hand(folders):
    batches = [{"a": [2.0, 1.0, 1.5], "b": {"c": 4.0}}, {"a": [3.0, 1.0, 2.5], "b": {"c": None}}]
    (folders.lab / "x.json").write_text(json.dumps({"advantages": "1", "batches": batches}))

    def means(**comparison):
        return [(found.mean, found.n) for found in verdicts.estimates_of({"file": "x"} | comparison, folders)]

    assert means(more="a/0", than=["a/1", "a/2"]) == means(more="a/0", than="a/2") == [(0.5, 2)]
    assert means(less="a/{}", than=1.75, **{"for": [0, 1]}) == [(-0.75, 2), (0.75, 2)]
    assert means(equals="b/c", than=3, slack=1.5) == [(0.5, 1)]  # the batch without one is left out
    assert means(more="a/0", than="a/1", ratio=True) == [(pytest.approx(math.log(6) / 2), 2)]
    assert means(more="a/0", than="a/1", times=1.5) == [(1.0, 2)]
    signed = [{"a": [3.0, -4.0]}, {"a": [-1.0, -1.0]}]  # the size of the means: 1 and 2.5
    (folders.lab / "y.json").write_text(json.dumps({"batches": signed}))
    assert means(file="y", more="a/1", than="a/0", size_of_mean=True) == [(1.5, 2)]
    assert means(more="a/0", needs={"advantages": "GRPO"}) == means(more="d") == means(more="a/0", rows="e") == []


def test_words_that_turn_with_the_number_of_people_are_not_pooled(folders):
    """With two people more of the words go with the reward, with three fewer: pooled, nothing would be seen."""
    raw = []
    for problem in range(40):
        for people, sign in (("2", 1), ("3", -1)):
            count = [problem % 5, problem % 3]
            raw.append({"category": people, "count": count, "reward": [sign * x for x in count]})
    words = {family: {"raw": raw} for family in ("conclusion indicator", "analysis")}
    (folders.results / "words.json").write_text(json.dumps({"rows": [{"words": words}]}))
    assert inference.correlation([(one["count"], one["reward"]) for one in raw])[0] == pytest.approx(0, abs=1e-9)
    expected = {"words analysis": ["shows", "the opposite"], "words conclusion indicator": ["the opposite", "shows"]}
    for name, of_name in expected.items():
        made = verdicts.MADE[name]
        assert made["for"] == [2, 3, 4] and made["only"] == {"category": "{}"}
        assert [found.word(0.05) for found in verdicts.estimates_of(made | {"for": [2, 3]}, folders)] == of_name


def test_of_several_correlations_the_lowest_counts(folders):
    responses = [{"rest": [0.1, 0.5, 0.3 + i / 300], "norm": {"a": [1, 5, 3], "b": [5, 1, 3]}} for i in range(25)]
    (folders.lab / "proposition.json").write_text(json.dumps({"responses": responses}))
    [found] = verdicts.estimates_of(verdicts.MADE["norm_of_rest"], folders)
    assert found.sides == (pytest.approx(-1, abs=0.02), 0.8) and found.n == 25
    assert found.word(0.05) == inference.NO_EFFECT
    [unsure] = verdicts.estimates_of(verdicts.MADE["norm_of_rest_unsure"], folders)
    assert unsure.sides[0] == pytest.approx(-1, abs=0.1)
    (folders.lab / "proposition.json").write_text(json.dumps({"responses": responses[1:]}))
    assert verdicts.estimates_of(verdicts.MADE["norm_of_rest_unsure"], folders) == []  # 48 tokens are too few


def test_the_interval_of_a_correlation_stays_below_1():
    """0.9 ± 1 in Fisher's z, against 0.8: tanh of 1.472 ± 2.262, less 0.8."""
    z = inference.fishers_z(0.9) - inference.fishers_z(0.8)
    found = inference.Estimate("", z, 1.0, 9, 10, is_correlation=True, threshold=0.8)
    low, high = math.tanh(1.4722 - 2.2622) - 0.8, math.tanh(1.4722 + 2.2622) - 0.8
    assert found.numbers(0.05).startswith(f"+0.1 (−{-low:.3g} to +{high:.3g}), visible ") and high < 0.2
    assert math.isfinite(inference.fishers_z(1.0)) and found.word(0.05) == inference.TOO_FEW


def test_runs_of_a_kind_of_their_own_share_no_deviation_with_the_others(folders):
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        keep(folders, "comparison", "grpo", seed, [0.5])
        keep(folders, "comparison", "ar", seed, [0.5 + gain])
        keep(folders, "collapse", "grpo, 2 updates, lr 1e-3", seed, [0.5])
        keep(folders, "collapse", "grpo, 16 updates, lr 1e-3", seed, [0.4 - 3 * gain])
    names = ["ar / grpo", "grpo, 2 updates / grpo, 16 updates"]
    [[calm], [wild]] = verdicts.measured(folders, names=names).values()
    assert (calm.error, wild.error) == (pytest.approx(0.1 / math.sqrt(3)), pytest.approx(0.3 / math.sqrt(3)))


def test_a_bound_that_nothing_can_break_is_no_finding(monkeypatch, tmp_path):
    """The vocabulary exceeds the width, so the head's Jacobian shrinks some vector to 0."""
    claim = next(claim for claim in ALL if claim["item"].startswith("Proposition 4.2"))
    verdicts_of = {"inside_the_bounds": [("shows", "all")]}
    assert claims.judged(claim, verdicts_of)[0] == claims.BY_CONSTRUCTION
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    (tmp_path / "lab" / "results").mkdir(parents=True)
    (tmp_path / "lab" / "results" / "proposition.json").write_text('{"vocabulary": 60, "width": 128}')
    assert claims.judged(claim, verdicts_of) == ("shows", "all")


def test_a_row_has_the_worst_of_its_words():
    def word(*words, **more):
        names = [str(i) for i in range(len(words))]
        return claims.judged({"by": names} | more, {n: [(w, "n")] if w else [] for n, w in zip(names, words)})

    assert word("shows", "shows") == ("shows", "n; n")
    assert word("shows", "too few runs to tell") == (
        "too few runs to tell", "(1 × shows, 1 × too few runs to tell) n; n",
    )  # fmt: skip
    assert word("the opposite", "no effect of that size")[0] == "the opposite"
    assert word("shows", "the opposite")[0] == word("the opposite", "too few runs to tell", "shows")[0] == "mixed"
    assert word("shows", None)[0] == word()[0] == claims.NOT_MEASURED
    beside = claims.judged({"by": ["a"], "beside": ["b"]}, {"a": [("shows", "n")], "b": [("the opposite", "m")]})
    assert beside == ("shows", "n; for comparison, the opposite: m")


def test_one_effect_has_one_verdict_wherever_it_is_named():
    """AR and Lopti together on GRPO, REINFORCE++ and DAPO; and in the row that claims its opposite."""
    rows = [claim["by"] for claim in ALL if re.fullmatch(r"(Figure 4|Table [78]), AR and Lopti", claim["item"])]
    assert len(rows) == 3 and rows[0] == rows[1] == rows[2]
    measured = [str({key: made[key] for key in made if key != "size"}) for made in verdicts.MADE.values()]
    assert len(measured) == len(set(measured))
    found = {"x": [inference.Estimate("a minus b; c, then d minus e (length)", 9.0, 1.0, 9, 10)]}
    over_all = {"x": [inference.Estimate("", 2.0, 1.0, 9, 10)]}  # shown behind, without a word
    both = [verdicts.said(name, found, {"x": "p"}, {"p": 0.05}, over_all)[0] for name in ("x", "-x")]
    assert [word for word, _ in both] == ["shows", "the opposite"]
    assert both[1][1].startswith("b minus a; e minus c, then d (length): −9 (")
    assert both[1][1].endswith(", and of all evaluations −2 (−4.26 to +0.262)")


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_file_is_up_to_date():
    assert verdicts.FILE.read_text() == verdicts.page(), "python -m lab.verdicts"


def test_a_new_raw_value_changes_the_page(folders):
    """Every verdict is read from the values of the batches, none from a word that is kept."""
    shutil.copytree(verdicts.Folders.lab, folders.lab, dirs_exist_ok=True)
    path = folders.lab / "who_dominates.json"
    data = json.loads(path.read_text())
    assert "verdicts" not in data
    for batch in data["batches"]:
        batch["norm_share"] = batch["norm_share"][::-1]
    path.write_text(json.dumps(data))
    of = verdicts.Folders()
    rows = []
    for page in (verdicts.FILE.read_text(), verdicts.page(verdicts.Folders(folders.lab, of.runs, of.results))):
        rows.append(next(line for line in page.splitlines() if "</a>Figure 1(a), (d) |" in line))
    assert "**shows**" in rows[0] and "**the opposite**" in rows[1]

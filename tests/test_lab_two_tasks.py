"""lab/two_tasks.py: on two tokens worked by hand, on made-up batches, and with a real model."""

import dataclasses
import json
import math
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT, run
from test_lab import A, of_lab, on_the_cpu, two_tokens  # noqa: F401

from lab import common, two_tasks


@pytest.mark.parametrize("with_rewards", [True, False])
def test_two_tokens_by_hand(with_rewards):
    """∇ log π with respect to the layer is (1 − π) · (1, −1) ⊗ state, of length √2 · (1 − π)."""
    policy, sampled = two_tokens(overlap=0.6)
    args = of_lab(two_tasks)
    found = two_tasks.measure(policy, sampled, args, with_rewards)
    size = math.sqrt(2) / 2 * (A if with_rewards else 1.0)  # a mean over two tokens
    assert found["tokens"] == 2 and found["share"] == [0.5, 0, 0, 0.5]
    assert found["norm"] == pytest.approx([0.9 * size, 0, 0, 0.1 * size], abs=1e-9)
    assert found["norm_share"] == pytest.approx([0.9, 0, 0, 0.1])
    assert found["right"] == 0.5


def test_the_norms_agree_with_finite_differences():
    """Of the mean log π over both tokens, bin by bin, along each of the layer's four weights."""
    policy, sampled = two_tokens(overlap=0.6)
    found = two_tasks.measure(policy, sampled, of_lab(two_tasks), with_rewards=False)
    batch = sampled.batch
    for place, row in ((0, 0), (3, 1)):  # the bin of each token
        slopes = []
        for entry in range(policy.weight.numel()):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    policy.weight.view(-1)[entry] += step
                    logp, _ = policy(batch["ids"], batch["mask"], 1.0)
                    policy.weight.view(-1)[entry] -= step
                values.append(logp[row, 1].item() / 2)
            slopes.append((values[0] - values[1]) / 2e-5)
        assert found["norm"][place] == pytest.approx(math.hypot(*slopes), rel=1e-5)


def test_an_average_has_a_mean_and_its_error():
    rows = [{"tokens": 4, "share": [0.1, 0.9]}, {"tokens": 6, "share": [0.3, 0.7]}]
    average = two_tasks.average_of(rows)
    assert average["tokens"] == pytest.approx((5, 1))
    assert average["share"] == [pytest.approx((0.2, 0.1)), pytest.approx((0.8, 0.1))]


def averages(first, second, error):
    """Two tasks with these shares of improbable tokens."""
    norms = [[(0.4, 0.0), (0.1, 0.0)], [(0.2, 0.0), (0.3, 0.0)]]
    shares = [[(first, error)], [(second, error)]]
    return {task: {"share": share, "norm_share": norm} for task, share, norm in zip(("kk", "math"), shares, norms)}


@pytest.mark.parametrize(
    ("second", "error", "count", "expected"),
    [
        (0.10, 0.02, 3, "shows"),  # 0.06 apart; both errors together are 0.028
        (0.10, 0.03, 3, "does not show"),  # 0.042
        (0.20, 0.01, 3, "does not show"),  # the other way round
        (0.10, 0.02, 2, "cannot tell at this scale"),
    ],
)
def test_fewer_improbable_tokens_count_from_two_errors_on(second, error, count, expected):
    verdicts = two_tasks.verdicts_of(averages(0.16, second, error), count)
    assert verdicts[0][:2] == ("math has fewer improbable tokens (p ≤ 0.25) than kk", expected)
    if count >= 3:
        assert [words for _, words, _ in verdicts[1:]] == ["shows", "does not show"]


def test_a_batch_has_a_gradient_if_one_group_differs():
    args = of_lab(two_tasks, responses=2)
    _, sampled = two_tokens()
    for rewards, expected in (([1, 1, 0, 0], False), ([1, 1, 0, 1], True)):
        changed = dataclasses.replace(sampled, rewards=torch.tensor(rewards).float())
        assert two_tasks.has_gradient(changed, args) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "kk", "kk"], "--tasks kk kk: give two different ones"),
        (["--tasks", "kk", "chess"], "--task chess: must be one of kk, math, countdown, hitab"),
        (["--batches", "0"], "--batches is 0; it must be greater than 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    sizes = ["--model", str(KK_TINY), "--out", str(tmp_path), "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["two_tasks", *sizes, *flags])
    with pytest.raises(SystemExit) as stop:
        two_tasks.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in error and error.count("\n") == 1


def test_a_quick_run_of_two_tasks(tmp_path):
    """kk_tiny can't read Countdown's prompts, but its tokens have probabilities all the same."""
    folders = ["--out", tmp_path, "--cache", tmp_path / "cache"]
    done = run("lab/two_tasks.py", "--quick", "--model", KK_TINY, *folders)
    result = json.loads((tmp_path / "two_tasks.json").read_text())
    assert list(result["average"]) == ["kk", "countdown"]
    for average in result["average"].values():
        assert sum(mean for mean, _ in average["share"]) == pytest.approx(1, abs=1e-4)
        assert all(mean > 0 for mean, _ in average["norm"])
    assert result["advantages"] == "1"  # it is never right on Countdown
    assert (tmp_path / "two_tasks.png").stat().st_size > 20_000
    for claim, word, numbers in result["verdicts"]:
        assert f"{word.upper()}: {claim}\n    {numbers}" in done.stdout
    kept = sorted(path.name.split("_")[-2] for path in (tmp_path / "cache").iterdir())
    assert kept == ["2-3", "countdown"]
    assert common.TASKS == ("kk", "math", "countdown", "hitab")

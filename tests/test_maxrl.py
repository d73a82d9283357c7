"""MaxRL in numbers: its advantages, by hand and by enumeration of all that a group can be.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import itertools
import math

import pytest
import torch
from conftest import step_of_main
from helpers import advantages_of, arguments, make_batch

import maxrl

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_the_advantages_by_hand():
    """One of four: 0.75/0.25 and −1. Three of four: 0.25/0.75 and −1."""
    advantages = advantages_of([0, 1, 0, 0, 1, 1, 0, 1], maxrl)
    assert advantages[:, 1].tolist() == pytest.approx([-1, 3, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3], abs=1e-12)
    assert not advantages[:, [0, 2]].any()


PROBABILITIES = [0.5, 0.3, 0.2]  # of the tokens; a response is one token
CORRECT = [1.0, 0.0, 0.0]
P = 0.5  # so the first token is the answer


def expected_gradient(group, of_all_wrong=None):
    """The mean over all groups that can be sampled, weighed by their probabilities, of 1/G Σ A·∇log π.

    In the logits, where that of log π(a) is (k = a) − π_k. of_all_wrong: another advantage for groups without success.
    """
    total = [0.0] * 3
    for tokens in itertools.product(range(3), repeat=group):
        probability = math.prod(PROBABILITIES[token] for token in tokens)
        rewards = [CORRECT[token] for token in tokens]
        advantages = advantages_of(rewards, maxrl, group)[:, 1].tolist()
        if of_all_wrong is not None and not any(rewards):
            advantages = [of_all_wrong] * group
        for token, advantage in zip(tokens, advantages):
            for k in range(3):
                total[k] += probability * advantage * ((k == token) - PROBABILITIES[k]) / group
    return total


def gradient_of_j(terms):
    """Σ_{k≤T} (1−p)^(k−1) · ∇p, where ∇p in the logit of token k is p·((k is the answer) − π_k)."""
    factor = sum((1 - P) ** (k - 1) for k in range(1, terms + 1))
    return [factor * P * (correct - probability) for correct, probability in zip(CORRECT, PROBABILITIES)]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
def test_the_expected_gradient_is_that_of_the_first_g_minus_1_terms_of_log_p(group):
    """And not of the first G: for these, groups that are all wrong would need the advantage −1."""
    assert expected_gradient(group) == pytest.approx(gradient_of_j(group - 1), rel=1e-12, abs=1e-15)
    assert expected_gradient(group) != pytest.approx(gradient_of_j(group), rel=1e-2)
    assert expected_gradient(group, of_all_wrong=-1.0) == pytest.approx(gradient_of_j(group), rel=1e-12)


def test_in_main_a_reward_is_whether_the_answer_is_correct(tiny_model, monkeypatch):
    """K&K's rewards, in groups of three: one of them is correct, none is, two are. The metric is still the task's."""
    batch = make_batch(tiny_model)
    rewards = [3.0, -0.5, -1.0, -3.0, -0.5, -1.0, 3.0, 3.0, -3.0] + [-3.0] * (len(batch["ids"]) - 9)
    metrics, given = step_of_main(maxrl, arguments(maxrl), batch, rewards, monkeypatch)
    expected = torch.tensor([2.0, -1, -1, 0, 0, 0, 0.5, 0.5, -1] + [0] * (len(rewards) - 9))
    torch.testing.assert_close(given["advantages"], expected[:, None] * batch["mask"])
    assert metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))

"""The advantages that each script's main hands to its update, in numbers worked out by hand."""

import itertools
import math

import pytest
import torch
from conftest import step_of_main
from helpers import GROUP, REWARDS, ROWS, advantages_of, arguments, batch_of, gradients

import dapo
import dapo_ar_lopti
import dr_grpo
import gdpo
import grpo
import grpo_ar_lopti
import grpo_multi_turn
import maxrl
import ppo
import reinforce
import reinforce_pp
import reinforce_pp_ar_lopti
import rloo
from rewards import TaskError, kk, parts_of
from runtime import metrics
from tools.maintain import updates

pytestmark = pytest.mark.usefixtures("on_the_cpu")

TWO_GROUPS = [1, 2, 3, 6, -1, 3, 3, -1]  # means 3 and 1; squares 4 + 1 + 0 + 9 and 4 · 4 over G − 1 = 3
STD, OTHER_STD = math.sqrt(14 / 3) + 1e-6, 4 / math.sqrt(3) + 1e-6
H = math.sqrt(3) / 2  # what two equal pairs in a group of four are normalised to, with either sign
OF_SUMS = math.sqrt((6 - 2 * math.sqrt(3)) / 3)  # squares of 3 for each of two parts, and twice their product −√3
SMALL = 1 / (math.sqrt(2) + 1)  # what 0 and 2e-6 are normalised to; without the 1e-6 it would be 1/√2
OF_SMALL = math.sqrt((2 * SMALL**2 + 1) / 3)
ADVANTAGES = {  # script: [(G, rewards, advantages)]
    grpo: [
        (4, TWO_GROUPS, [*(x / STD for x in (-2, -1, 0, 3)), *(x / OTHER_STD for x in (-2, 2, 2, -2))]),
        (2, [0, 2e-6], [-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)]),  # without the 1e-6: ±1/√2
        (1, [3, -0.5, 0], [3 / (1 + 1e-6), -0.5 / (1 + 1e-6), 0]),
    ],
    rloo: [(4, TWO_GROUPS, [1 - 11 / 3, 2 - 10 / 3, 0, 4, -1 - 5 / 3, 3 - 1 / 3, 3 - 1 / 3, -1 - 5 / 3])],
    dr_grpo: [(4, TWO_GROUPS, [-2, -1, 0, 3, -2, 2, 2, -2])],
    gdpo: [  # rewards in parts; each row's sums have mean 0, except for groups of one
        # Three responses have the sum 1, by different parts. Part 1 becomes 1.5 and −0.5, part 2 ∓H.
        (4, [[1, 0], [0, 1], [0, 1], [0, 0]], [x / OF_SUMS for x in (1.5 - H, H - 0.5, H - 0.5, -0.5 - H)]),
        (4, [[1, 2], [1, -2], [1, 2], [1, -2]], [H, -H, H, -H]),  # a part that is constant gives 0
        (1, [[1, 2], [1, -2], [-1, -2]], [x / math.sqrt(28 / 3) for x in (10 / 3, -2 / 3, -8 / 3)]),  # mean −1/3
        # The second normalisation is over the step: of ∓1/√2, 0 and 0 the standard deviation is 1/√3.
        (2, [[0], [1], [5], [5]], [-math.sqrt(3 / 2), math.sqrt(3 / 2), 0, 0]),
        (2, [[0], [2e-6], [0], [1]], [x / OF_SMALL for x in (-SMALL, SMALL, -math.sqrt(1 / 2), math.sqrt(1 / 2))]),
    ],
    reinforce: [(group, [3, -1, 0.5, 1.5], [2, -2, -0.5, 0.5]) for group in (1, 2, 4)],  # no groups: mean 1
    maxrl: [(4, [0, 1, 0, 0, 1, 1, 0, 1], [-1, 3, -1, -1, 1 / 3, 1 / 3, -1, 1 / 3])],  # 0.75/0.25, 0.25/0.75
}


@pytest.mark.parametrize("trainer", ADVANTAGES, ids=lambda trainer: trainer.__name__)
def test_advantages_by_hand(trainer):
    for group, rewards, expected in ADVANTAGES[trainer]:
        advantages = advantages_of(rewards, trainer, group)
        # gdpo.py gathers the step's sums in float32, and its second 1e-6 is not in the numbers above.
        exactly = {"rel": 5e-6, "abs": 1e-6} if trainer is gdpo else {"rel": 1e-8, "abs": 1e-12}
        assert advantages[:, 1].tolist() == pytest.approx(expected, **exactly)
        assert not advantages[:, [0, 2]].any()  # prompt and padding


@pytest.mark.parametrize("trainer", [*ADVANTAGES, reinforce_pp, grpo_multi_turn], ids=lambda one: one.__name__)
def test_a_steps_entropy_is_the_mean_over_the_response_tokens(trainer):
    """Of 8 tokens: (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) / 8. Prompts and padding have an entropy of 100 here."""
    batch = batch_of(ROWS)
    batch["entropy"] = torch.full(batch["mask"].shape, 100.0, dtype=torch.float64)
    batch["entropy"][batch["mask"]] = torch.arange(1.0, 9, dtype=torch.float64)

    metrics, _ = in_main(trainer, REWARDS, batch, beta=0.0, group=len(REWARDS))
    assert metrics["entropy"] == pytest.approx(4.5, abs=1e-12)


SAME = (3.0, -0.5, 0.0, 0.7, -1.3, 1e6 / 3)
EQUAL_REWARDS = [
    *itertools.product((grpo, rloo, dr_grpo, reinforce, reinforce_pp, ppo), (1, 2, 3, 8), SAME),
    *itertools.product([maxrl], (1, 2, 3, 7, 8), (0.0, 1.0)),
    *itertools.product([gdpo], (1, 2, 3, 8), SAME),
]


def test_equal_rewards_have_advantage_zero_exactly():
    """In the float32 that main uses, which holds 0.7 only roughly: not a rounding error divided by a rounding error."""
    for trainer, group, reward in EQUAL_REWARDS:
        args = arguments(trainer, responses_per_prompt=group, kl_coef=0.0)
        n = 500 * group
        batch = {"mask": torch.ones(n, 2, dtype=torch.bool), "old_values": torch.zeros(n, 2)}
        batch |= {"old_logp": torch.randn(n, 2), "ref_logp": torch.randn(n, 2)}
        rewards = torch.full((n, 2) if trainer is gdpo else (n,), reward)
        correct = [reward > 0] * n
        advantages = updates.with_advantages(trainer.__name__, batch, rewards, correct, args)["advantages"]
        alone = trainer is grpo and group == 1  # a group of one is not compared
        assert alone or torch.equal(advantages, torch.zeros(n, 2)), (trainer, group, reward)


@pytest.mark.parametrize("trainer", [grpo, gdpo], ids=["grpo", "gdpo"])
def test_rewards_that_differ_by_rounding_alone_have_advantage_zero(trainer):
    """In float32 the next number after 50 is 50.000004. The formula would make an advantage of 0.98 of it.

    More than a millionth of the largest reward is a difference, and so is any to 0.
    """
    close = [50.0, 50.000004, 50.0, 50.0]
    assert metrics.all_equal(torch.tensor([close, [-x for x in close], [0.0] * 4, [7e5, 7e5 + 0.5, 7e5, 7e5]])).all()
    assert not metrics.all_equal(torch.tensor([[50, 50.0002, 50, 50], [0, 1e-9, 0, 0], [-1, 1, -1, 1.0]])).any()
    batch, args = {"mask": torch.ones(8, 1, dtype=torch.bool)}, arguments(trainer, responses_per_prompt=4)
    rewards = torch.tensor([*close, 50.0, 50.0002, 50.0, 50.0])
    advantages = updates.with_advantages(trainer.__name__, batch, rewards, None, args)["advantages"][:, 0].tolist()
    assert advantages[5] > 1
    if trainer is gdpo:  # which normalises the step's sums once more
        assert advantages[:4] == pytest.approx([0.0] * 4, abs=1e-6)
    else:
        assert advantages[:4] == [0.0] * 4


def in_main(trainer, rewards, batch, beta, group=1):
    """(the metrics that main writes, the batch that it gives to update)."""
    nothing = {name: torch.zeros(batch["mask"].shape) for name in ("ids", "entropy", "sampler_logp")}
    args = arguments(trainer, kl_coef=float(beta), responses_per_prompt=group)
    with pytest.MonkeyPatch.context() as patch:
        return step_of_main(trainer, args, nothing | batch, rewards, patch)


@pytest.mark.parametrize(
    "beta, expected, kl",
    [
        (0.5, [1.75, -1.25, -0.5], 4 / 8),  # kl: the mean of log(π_old/π_ref) over the 8 tokens
        (0.0, [3, -3, 0], None),  # the means of the others' are 0, 2 and 1; no reference is asked
    ],
)
def test_rloos_penalty_is_that_of_the_whole_response_and_comes_before_the_baseline(beta, expected, kl):
    """The k1 of three responses to one prompt. By hand with β 0.5: the sums are 3, −1 and 2, so that the rewards 3, −1
    and 1 are 1.5, −0.5 and 0; the means of the others' are −0.25, 0.75 and 0.5."""
    batch = batch_of([(2, [1, -2, 4], 1), (2, [-1], 3), (2, [0.5, 0.5, -1, 2], 0)])
    batch |= {key: batch[key] * batch["mask"] for key in ("old_logp", "ref_logp")}  # as log_probs gives them
    metrics, given = in_main(rloo, [3.0, -1.0, 1.0], batch, beta, group=3)
    of_tokens = torch.tensor(expected, dtype=torch.float64)[:, None] * batch["mask"]  # the response's, on each token
    torch.testing.assert_close(given["advantages"].double(), of_tokens, atol=1e-6, rtol=0)
    assert metrics["kl"] == pytest.approx(kl)
    assert metrics["reward"] == 1 and metrics["accuracy"] == pytest.approx(2 / 3)  # of the rule, without the penalty


# ------------------------------------------------------------------------------------------------------------- gdpo.py


def test_gdpos_second_normalisation_is_over_the_responses_of_all_processes(monkeypatch):
    """Two groups: in one process, and the second group in a process of its own."""
    rewards, own_sums = [[1, 0], [0, 1], [0, 0], [5, 2], [7, 2], [5, 3]], []
    monkeypatch.setattr(gdpo, "gather", lambda own: own_sums.append(own) or own)
    of_one = advantages_of(rewards, gdpo, 3)
    monkeypatch.setattr(gdpo, "gather", lambda own: own_sums[0])
    torch.testing.assert_close(advantages_of(rewards[3:], gdpo, 3), of_one[3:], rtol=1e-12, atol=0)


NO_SIGNAL = {  # parts of two groups, or of one response, whose sums S are equal: A is 0 exactly
    "one group of one": (1, [[1.0, 2.0]]),
    "all parts are equal": (2, [[1 / 3, 0.7]] * 4),
    "parts that cancel": (4, [[1, 0], [0, 1], [0.1, 0.9], [0.3, 0.7]] * 2),
    "parts that cancel, of different sizes": (4, [[x, 2 - 3 * x] for x in (0.1, 0.7, 0.3, 1.1, 0.2, 0.9, 1.3, 2.1)]),
    "parts that cancel and one that is equal": (2, [[0.1, 0.7, 5], [0.7, 0.1, 5]] * 2),
    "equal sums without groups": (1, [[0.1, 0.2], [0.3, 0.0], [0.7, -0.4]]),
}


@pytest.mark.parametrize("case", NO_SIGNAL)
def test_gdpos_advantage_is_exactly_0_if_the_sums_of_the_parts_are_equal(case):
    group, rewards = NO_SIGNAL[case]
    batch = {"mask": torch.ones(len(rewards), 2, dtype=torch.bool)}
    args = arguments(gdpo, responses_per_prompt=group)
    advantages = updates.with_advantages("gdpo", batch, torch.tensor(rewards), None, args)["advantages"]
    assert torch.equal(advantages, torch.zeros(len(rewards), 2))


def test_gdpos_parts_are_mixed_by_their_names():
    task = "my_task.py"
    parts = [{"form": 1, "answer": 0}, {"answer": 1, "form": 0}]
    assert parts_of([{"reward": 1, "parts": part} for part in parts], task) == [[1, 0], [0, 1]]
    assert parts_of([{"reward": 3.0, "parts": {}}, {"reward": 2.0}], task) == [[3.0], [2.0]]
    for other in ({"form": 1}, {"form": 1, "answer": 2, "length": 3}, {"form": 1, "length": 0}, {}):
        with pytest.raises(TaskError, match=r"^my_task.py: .*'second' .* another one \['form', 'answer'\]"):
            parts_of([{"reward": 1, "parts": parts[0]}, {"reward": 1, "parts": other, "response": "second"}], task)


def test_in_main_gdpos_parts_are_those_that_the_task_names(batch):
    """Knights & Knaves pays for the form and for the answer. A task that names none has one part, its reward."""
    assert parts_of([kk.score("no tags", {"Zoe": True})], "kk") == [[-1.0, -2.0]]
    rewards = [float(i % 4) for i in range(len(batch["ids"]))]
    _, given = in_main(gdpo, rewards, batch, beta=0.0, group=GROUP)
    expected = updates.with_advantages("gdpo", batch, torch.tensor(rewards), None, arguments(gdpo))["advantages"]
    assert torch.equal(given["advantages"], expected) and expected.any()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
def test_the_expected_gradient_is_that_of_the_first_g_minus_1_terms_of_log_p(group):
    """Over all groups that can be drawn, in the logit of being right, where ∇log π is (is right) − p.

    By hand: Σ_{k<G} (1 − p)^(k−1) · ∇p, with ∇p = p·(1 − p). Groups that are all wrong have no part in it.
    """
    p, found = 0.3, 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=group):
        probability = math.prod(p if right else 1 - p for right in rewards)
        advantages = advantages_of(rewards, maxrl, group)[:, 1].tolist()
        found += probability * sum(a * (right - p) for a, right in zip(advantages, rewards)) / group
    by_hand = sum((1 - p) ** (k - 1) for k in range(1, group)) * p * (1 - p)
    assert found == pytest.approx(by_hand, rel=1e-12, abs=1e-15)


def test_in_main_a_reward_is_whether_the_answer_is_correct(batch):
    """K&K's rewards, in groups of three: one of them is correct, none is, two are. The metric is still the task's."""
    rewards = [3.0, -0.5, -1.0, -3.0, -0.5, -1.0, 3.0, 3.0, -3.0] + [-3.0] * (len(batch["ids"]) - 9)
    metrics, given = in_main(maxrl, rewards, batch, beta=0.0, group=GROUP)
    expected = torch.tensor([2.0, -1, -1, 0, 0, 0, 0.5, 0.5, -1] + [0] * (len(rewards) - 9))
    torch.testing.assert_close(given["advantages"], expected[:, None] * batch["mask"])
    assert metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_a_tokens_return_is_the_reward_less_beta_times_the_k1_of_it_and_all_after_it():
    """Of ROWS and REWARDS with β 0.5. And the advantages are the returns, whitened over all tokens."""
    to_go = [[3, 2, 4], [-1], [2, 1.5, 1, 2]]  # Σ over j ≥ t of k1
    by_hand = [r - 0.5 * x for r, row in zip(REWARDS, to_go) for x in row]
    assert by_hand == [1, 1.5, 0.5, 0.25, 0, 0.25, 0.5, 0]  # their sum is 4, of 8 tokens
    batch, scores = batch_of(ROWS), [{"reward": reward} for reward in REWARDS]
    args = arguments(reinforce_pp, kl_coef=0.5)
    returns, mean, variance = reinforce_pp.token_returns(scores, batch, args)
    assert returns.dtype == torch.float64 and returns[batch["mask"]].tolist() == by_hand
    assert mean == 0.5 and variance == pytest.approx(1.875 / 7, abs=1e-15)  # Bessel: 8 tokens less one
    advantages = reinforce_pp.compute_advantages(scores, batch, args)
    whitened = [(value - 0.5) / math.sqrt(1.875 / 7 + 1e-8) for value in by_hand]
    assert advantages[batch["mask"]].tolist() == pytest.approx(whitened, abs=1e-12)
    assert not returns[~batch["mask"]].any() and not advantages[~batch["mask"]].any()


def test_the_metrics_by_hand():
    """Σ|β·Σk1| = (9 + 1 + 6.5)/2 = 8.25, Σ|r| = 3·2.5 + 0.25 + 4·1 = 11.75: the penalty's share is 8.25/20."""
    metrics, given = in_main(reinforce_pp, REWARDS, batch_of(ROWS), beta=0.5)
    args = arguments(reinforce_pp, kl_coef=0.5)
    expected = reinforce_pp.compute_advantages([{"reward": reward} for reward in REWARDS], batch_of(ROWS), args)
    assert torch.equal(given["advantages"], expected)
    assert metrics["return"] == 0.5
    assert metrics["return_std"] == pytest.approx(math.sqrt(1.875 / 7), abs=1e-15)
    assert metrics["kl_share"] == pytest.approx(8.25 / 20, abs=1e-15)
    k3 = [math.exp(-x) + x - 1 for _, k1, _ in ROWS for x in k1]
    assert metrics["kl"] == pytest.approx(sum(k3) / 8, abs=1e-13)
    assert metrics["reward"] == pytest.approx(3.25 / 3, abs=1e-15)  # without the penalty

    for rewards, beta, least, most in (
        ([1, 0], 0, 0, 0),
        ([0, 0], 0, 0, 0),
        ([0, 0], 0.5, 1, 1),
        ([1, 0], 0.5, 0.1, 0.9),
    ):
        metrics, _ = in_main(reinforce_pp, rewards, batch_of([(1, [0.5, -2], 0), (2, [3], 0)]), beta)
        assert least <= metrics["kl_share"] <= most


@pytest.mark.parametrize("alpha", [0.3, 1.0, 0.0])
def test_reweighting_is_eq_4_for_both_signs(alpha):
    """Rewards [1, 3]: A = ∓1/(√2 + 1e-6). Tokens of probability 0.9, 0.5 and 0.01: A·(α·π_old + 1 − α)."""
    probabilities = [0.9, 0.5, 0.01]
    old_logp = [[math.log(p) for p in probabilities]] * 2
    advantages = advantages_of([1, 3], grpo_ar_lopti, group=2, old_logp=old_logp, alpha=alpha)
    by_hand = [(alpha * p + 1 - alpha) / (math.sqrt(2) + 1e-6) for p in probabilities]
    assert advantages.flatten().tolist() == pytest.approx([*(-a for a in by_hand), *by_hand], abs=1e-12)


PAIRS = [(grpo, grpo_ar_lopti), (reinforce_pp, reinforce_pp_ar_lopti), (dapo, dapo_ar_lopti)]


@pytest.mark.parametrize("parent, child", PAIRS, ids=["grpo", "reinforce_pp", "dapo"])
def test_main_multiplies_the_parents_advantages(batch, parent, child, monkeypatch):
    """By α·π_old + 1 − α, α 0.2."""
    rewards = torch.randn(len(batch["ids"]), generator=torch.Generator().manual_seed(3)).tolist()
    _, plain = step_of_main(parent, arguments(parent), batch, rewards, monkeypatch)
    _, given = step_of_main(child, arguments(child, alpha=0.2), batch, rewards, monkeypatch)
    expected = plain["advantages"] * (0.2 * batch["old_logp"].exp() + 0.8)
    assert expected[batch["mask"]].abs().max() > 1
    torch.testing.assert_close(given["advantages"], expected, atol=1e-6, rtol=0)


def test_dapo_passes_over_stages_and_updates_that_have_nothing(tiny_model, batch):
    """The second update has no groups, and of the first only high tokens are left: one optimizer step of four."""
    args = arguments(dapo_ar_lopti, model=str(tiny_model), updates_per_step=2)
    half = len(batch["ids"]) // 2
    high = batch["mask"] & (batch["old_logp"] > math.log(0.5))
    high[half:] = False
    found, metrics = gradients(dapo_ar_lopti, batch | {"mask": high}, args)
    assert metrics["optimizer_steps"] == len(found) == 1 and found[0].any() and metrics["low_rate"] == 0
    found, metrics = gradients(dapo_ar_lopti, batch | {"mask": torch.zeros_like(high)}, args)
    assert found == [] and metrics == {"clip_rate": 0, "grad_norm": 0, "optimizer_steps": 0, "low_rate": 0}

"""entropy_top.py and archer.py in numbers: which tokens they single out, and the loss and gradient,
by hand.

What is worked out by hand is Python's float arithmetic on the numbers written out, never the
trainers' own formula.
"""

import dataclasses
import math

import pytest
import torch
from test_algorithms import Recorder, arguments, distance, gradients, loss_batch, share, weights

import archer
import entropy_top
import grpo
from tools.updates import TablePolicy

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def by_token(trainer, rows, monkeypatch, entropy_now=None, **changes):
    """The mini-batches' losses, each token's gradient, over all mini-batches, and the metrics of an
    update in float64.

    rows: for each response its tokens' (entropy, log π − log π_old, log π_ref − log π, A). Around
    them lies garbage. entropy_now: each token's under the current policy; None: as it was.
    """
    n_tokens, longest = sum(map(len, rows)), max(map(len, rows))
    batch = {"ids": torch.full((len(rows), longest + 2), n_tokens)}  # prompt and padding: a token of their own
    batch["mask"] = torch.zeros(batch["ids"].shape, dtype=torch.bool)
    for key in ("entropy", "old_logp", "ref_logp", "advantages"):
        batch[key] = torch.full(batch["ids"].shape, 7.0, dtype=torch.float64)
    number = 0
    for i, row in enumerate(rows):
        for t, (entropy, moved, reference, advantage) in enumerate(row, 1):
            batch["ids"][i, t], batch["mask"][i, t] = number, True
            values = {"entropy": entropy, "old_logp": -2 - moved, "ref_logp": -2 + reference, "advantages": advantage}
            for key, value in values.items():
                batch[key][i, t] = value
            number += 1
    entropies = torch.tensor((entropy_now or [token[0] for row in rows for token in row]) + [7.0])
    policy = TablePolicy(torch.full((n_tokens + 1,), -2.0, dtype=torch.float64), entropies)
    recorder, losses, loss_of = Recorder(policy), [], trainer.policy_loss

    def policy_loss(*inputs):
        loss, clipped = loss_of(*inputs)
        losses.append(loss.item())
        return loss, clipped

    # With checkpointing no pass is for one group alone: each mini-batch is one pass.
    settings = {"prompts_per_step": len(rows), "responses_per_prompt": 1, "gradient_checkpointing": True}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "policy_loss", policy_loss)
        metrics = trainer.update(policy, recorder, batch, 1, arguments(trainer, **settings | changes))
    gradient = sum(recorder.gradients)
    assert gradient[-1] == 0
    return losses, gradient[:-1].tolist(), metrics


def exactly(numbers):
    return pytest.approx(numbers, rel=1e-12, abs=1e-12)


# -------------------------------------------------------------------------------------------- entropy_top: threshold


def threshold_of(rows, entropy_top_):
    """entropy_threshold of responses with these entropies, in a batch whose other places have the largest of all."""
    mask = torch.zeros(len(rows), max(map(len, rows)) + 2, dtype=torch.bool)
    entropy = torch.full(mask.shape, 9.0)
    for i, row in enumerate(rows):
        mask[i, 1 : len(row) + 1] = True
        entropy[i, 1 : len(row) + 1] = torch.tensor(row)
    minibatch = {"mask": mask, "entropy": entropy}
    return entropy_top.entropy_threshold(minibatch, arguments(entropy_top, entropy_top=entropy_top_))


TEN = [[0.5, 0.25, 2.0, 0.0], [1.5], [0.125, 1.0, 0.75, 1.25, 0.0625]]


@pytest.mark.parametrize(
    ("rows", "top", "threshold"),
    [
        (TEN, 0.2, 1.5),  # 2 of 10
        ([*TEN, [3.0]], 0.2, 1.5),  # 2.2 of 11: the third
        (TEN, 0.21, 1.25),
        (TEN, 0.5, 0.75),
        (TEN, 1.0, 0.0),
        (TEN, 1e-9, 2.0),  # at least one
        ([[0.5]], 0.2, 0.5),
        ([[0.5, 0.5], [0.5]], 0.2, 0.5),
        ([[0.0, 0.0], [1.0, 1.0, 1.0]], 0.2, 1.0),
    ],
)
def test_the_threshold_is_the_kth_largest_entropy_of_the_mini_batch(rows, top, threshold):
    assert threshold_of(rows, top) == threshold


# (entropy, log ρ, log π_ref − log π, A), with ε 0.2 and 0.24, β 0.1: k = ⌈0.3·10⌉ = 3, and two tie
# for the third place
RULE = [
    [
        (0.1, 0.0, 0.5, 1.5), (2.0, math.log(1.1), 0.5, 2.0), (0.9, math.log(1.5), 0.0, 2.0),
        (0.3, math.log(3), 0.0, -1.0), (0.0, 0.0, 0.0, 4.0), (0.5, math.log(0.5), -0.7, 1.0),
    ],
    [(0.9, math.log(0.5), -0.7, -2.0)],
    [(1.3, 0.0, 0.0, -3.0), (0.2, math.log(1.5), 0.5, 2.0), (0.8, 0.0, 0.0, 5.0)],
]  # fmt: skip


def test_only_the_tokens_from_the_threshold_on_have_loss_gradient_and_kl_term(monkeypatch):
    """Tokens 1, 2, 6 and 7; 2 is clipped at 1.24, 6 at 0.8. All is divided by the 10 tokens that there are."""
    (loss,), gradient, metrics = by_token(entropy_top, RULE, monkeypatch, entropy_top=0.3)
    k3 = math.exp(0.5) - 1.5 + math.exp(-0.7) - 0.3
    assert loss == exactly((0.1 * k3 - (2.2 + 2.48 - 1.6 - 3)) / 10)
    expected = [0.0] * 10
    expected[1] = -(2.2 + 0.1 * (math.exp(0.5) - 1)) / 10
    expected[6] = -0.1 * (math.exp(-0.7) - 1) / 10
    expected[7] = 3 / 10
    assert gradient == exactly(expected)
    assert metrics["top_rate"] == 0.4 and metrics["entropy_threshold"] == 0.9 and metrics["clip_rate"] == 0.2


def test_later_updates_take_the_entropy_of_the_policy_as_it_is_then(monkeypatch):
    """Two updates of one response each: the first goes by the batch's entropies, the second by the policy's own now."""
    rows = [RULE[2], RULE[2]]  # A −3, 2 and 5
    now = [0.0, 9.0, 0.0, 0.1, 2.5, 0.3]  # of the second response the middle token is now the least sure one
    settings = {"entropy_top": 0.2, "kl_coef": 0.0, "clip_high": 9.0, "updates_per_step": 2}
    _, gradient, metrics = by_token(entropy_top, rows, monkeypatch, entropy_now=now, **settings)
    assert gradient == exactly([3 / 3, 0, 0, 0, -2 * 1.5 / 3, 0])
    assert metrics["entropy_threshold"] == pytest.approx((1.3 + 2.5) / 2, rel=1e-6)


def test_tokens_without_advantage_count_for_the_threshold_though_they_teach_nothing(monkeypatch):
    """Without KL: the four highest are tokens 1, 7 and the two that tie; of these A is 0 in two."""
    zero = {1, 6}
    numbers = iter(range(10))
    rows = [[(*token[:3], 0.0 if next(numbers) in zero else token[3]) for token in row] for row in RULE]
    (loss,), gradient, metrics = by_token(entropy_top, rows, monkeypatch, entropy_top=0.3, kl_coef=0.0)
    assert loss == exactly(-(2.48 - 3) / 10)
    assert gradient == exactly([0, 0, 0, 0, 0, 0, 0, 0.3, 0, 0])
    assert metrics["top_rate"] == 0.4


def test_the_gradient_is_grpos_of_the_chosen_tokens_and_no_other_token_goes_through_a_pass(tiny_model, batch):
    """Of each mini-batch, on the tiny model, however it is cut: grpo.py on the chosen tokens, times their share."""
    args = arguments(entropy_top, model=str(tiny_model), updates_per_step=2)
    half, expected, thresholds, n_top = len(batch["ids"]) // 2, [], [], []
    for rows in (slice(0, half), slice(half, None)):
        part = share(batch, rows)
        entropies = sorted(part["entropy"][part["mask"]].tolist(), reverse=True)
        thresholds.append(entropies[math.ceil(0.2 * len(entropies)) - 1])
        chosen = part["mask"] & (part["entropy"] >= thresholds[-1])
        n_top.append(int(chosen.sum()))
        (alone,), _ = gradients(grpo, part | {"mask": chosen}, arguments(grpo, model=str(tiny_model)))
        expected.append(alone * n_top[-1] / len(entropies))
    assert (chosen.any(1).sum() < part["mask"].any(1).sum()) and min(n_top) > 5
    before = {key: value.clone() for key, value in batch.items()}
    policy, seen = entropy_top.load_policy(args, trained=True), []
    # With a gradient: the entropy of later updates takes a pass of its own without.
    policy.register_forward_pre_hook(lambda _, inputs: seen.append(int(inputs[1].sum()) * torch.is_grad_enabled()))
    for budget in (10**6, 300, 1):
        seen.clear()
        cut = dataclasses.replace(args, micro_batch_tokens=budget)
        steps, metrics = gradients(entropy_top, batch, cut, policy)
        assert len(steps) == 2 and all(distance(a, b) < 1e-5 for a, b in zip(steps, expected))
        assert sum(seen) == sum(n_top)
        assert metrics["top_rate"] == pytest.approx(sum(n_top) / int(batch["mask"].sum()), rel=1e-12)
        assert metrics["entropy_threshold"] == pytest.approx(sum(thresholds) / 2, rel=1e-12)
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], before[key]) for key in before)


def test_a_token_whose_entropy_is_no_number_is_not_left_out_silently(tiny_model, batch, tmp_path):
    """As where the weights have gone: its loss is none either, and the program ends before they are touched."""
    args = arguments(entropy_top, model=str(tiny_model), run_dir=str(tmp_path))
    policy = entropy_top.load_policy(args, trained=True)
    start = weights(policy)
    broken = batch | {key: batch[key].clone() for key in ("entropy", "old_logp")}
    at = batch["mask"].nonzero()[0].tolist()
    for key in ("entropy", "old_logp"):
        broken[key][*at] = math.nan
    with pytest.raises(SystemExit, match="loss nan"):
        entropy_top.update(policy, torch.optim.SGD(policy.parameters(), lr=0.1), broken, 1, args)
    assert torch.equal(weights(policy), start)


# ------------------------------------------------------------------------------------------- archer: reasoning tokens


def reasoning_of(rows, **changes):
    """For each response the places of its reasoning tokens; other places of the batch have the largest of entropies."""
    mask = torch.zeros(len(rows), max(map(len, rows)) + 2, dtype=torch.bool)
    entropy = torch.full(mask.shape, 9.0)
    for i, row in enumerate(rows):
        mask[i, 1 : len(row) + 1] = True
        entropy[i, 1 : len(row) + 1] = torch.tensor(row)
    reasoning = archer.reasoning_tokens({"mask": mask, "entropy": entropy}, arguments(archer, **changes))
    assert reasoning.dtype == torch.bool and reasoning.shape == mask.shape and not (reasoning & ~mask).any()
    return [(row.nonzero()[:, 0] - 1).tolist() for row in reasoning]


@pytest.mark.parametrize(
    ("row", "places"),
    [
        ([0.5, 0.25, 2.0, 0.0, 1.5, 0.125, 1.0, 0.75, 1.25, 0.0625], [2, 4]),  # 0.8·9 = 7.2: the two beyond
        ([0.0, 1.0, 5.0, 4.0, 2.0, 3.0], [2]),  # 0.8·5 = 4: the quantile is 4.0 itself, and not above itself
        ([0.0, 1.0, 4.0, 5.0, 3.0], [3]),  # 0.8·4 = 3.2
        ([1.0, 0.5], [0]),  # 0.9
        ([0.0, 0.0, 0.0, 2.0, 2.0], []),  # 0.8·4 = 3.2: 2.0
        ([0.0, 0.0, 0.0, 0.0, 2.0], [4]),  # 0.4
        ([0.7], []),
        ([0.3] * 7, []),
        ([0.0] * 5, []),
    ],
)
def test_reasoning_tokens_are_above_the_quantile_of_their_response(row, places):
    assert reasoning_of([row]) == [places]
    assert reasoning_of([[8.0, 8.5, 8.25], row, [1e-6, 3e-6, 2e-6]]) == [[1], places, [1]]  # whatever others have


# --------------------------------------------------------------------------------------------------------- archer: loss

HALF_E = math.exp(0.5)
# What a token's loss is, by hand, with the paper's clips and β 0.1 of which reasoning tokens have a
# quarter: (log ρ, log π_ref − log π, A) → for knowledge and for reasoning (surrogate, whether the
# clip cuts it off)
TOKENS = {
    "on policy": ((0, 0, 1.5), (1.5, False), (1.5, False)),
    "1.19": ((math.log(1.19), 0, 2), (2.38, False), (2.38, False)),
    "1.22": ((math.log(1.22), 0, 1), (1.2, True), (1.22, False)),
    "1.4": ((math.log(1.4), 0.5, 2), (2.4, True), (2.8, False)),
    "1.6": ((math.log(1.6), -0.7, 2), (2.4, True), (3.0, True)),
    "1.6, A < 0": ((math.log(1.6), 0, -2), (-3.2, False), (-3.2, False)),
    "0.81": ((math.log(0.81), 0, -1), (-0.81, False), (-0.81, False)),
    "0.6": ((math.log(0.6), 0.5, -2), (-1.6, True), (-1.2, False)),
    "0.4": ((math.log(0.4), 0.5, -2), (-1.6, True), (-1.0, True)),
    "0.4, A > 0": ((math.log(0.4), 0, 2), (0.8, False), (0.8, False)),
    "A = 0": ((math.log(3), -0.7, 0), (0, False), (0, False)),
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("kind", ["knowledge", "reasoning"])
def test_a_tokens_loss_and_gradient_by_hand(name, kind):
    """1/n·(β·k3 − surrogate), n 7 although this micro-batch has one token: n is the whole mini-batch's."""
    token, *by_kind = TOKENS[name]
    surrogate, is_clipped = by_kind[kind == "reasoning"]
    beta = 0.1 * 0.25 if kind == "reasoning" else 0.1
    moved, reference, advantage = token
    logp, rest = loss_batch([token])
    rest["reasoning"] = ~rest["mask"] | (kind == "reasoning")
    loss, clipped = archer.policy_loss(logp, rest, 7, arguments(archer, reasoning_kl=0.25))
    loss.backward()
    assert loss.item() == exactly((beta * (math.exp(reference) - reference - 1) - surrogate) / 7)
    assert clipped.item() == is_clipped
    slope = 0 if is_clipped else math.exp(moved) * advantage
    assert logp.grad[0].tolist() == exactly([0, -(slope + beta * (math.exp(reference) - 1)) / 7, 0])


# ------------------------------------------------------------------------------------------------------- archer: update

# Six tokens of which the last is above the 0.8 quantile (0.5), and a response of one token, all
# with ρ 1.4.
TWO = [[(0.1 * (i + 1), math.log(1.4), 0.5, 1.0) for i in range(6)], [(3.0, math.log(1.4), 0.5, 1.0)]]


def test_an_update_by_hand(monkeypatch):
    """Of 7 tokens one, the sixth, is a reasoning token and not clipped; with A 0 tokens have their KL term alone."""
    k3, slope = HALF_E - 1.5, HALF_E - 1
    (loss,), gradient, metrics = by_token(archer, TWO, monkeypatch, reasoning_kl=0.5)
    assert loss == exactly((0.1 * k3 * 6.5 - 1.2 * 6 - 1.4) / 7)
    knowledge, reasoning = -0.1 * slope / 7, -(1.4 + 0.05 * slope) / 7
    assert gradient == exactly([knowledge] * 5 + [reasoning, knowledge])
    assert metrics["reasoning_rate"] == exactly(1 / 7) and metrics["clip_rate"] == exactly(6 / 7)
    flat = [[(*token[:3], 0.0) for token in row] for row in TWO]
    _, gradient, _ = by_token(archer, flat, monkeypatch, reasoning_kl=0.5)
    assert gradient == exactly([knowledge] * 5 + [knowledge / 2, knowledge])


def test_without_kl_coef_neither_kind_has_a_kl_term_and_the_kinds_stay_those_of_the_whole_response(monkeypatch):
    """Tokens 3 to 5 have no advantage and drop out; the third is not taken for the highest of those that are left."""
    rows = [[(*token[:3], 0.0 if i > 2 else 1.0) for i, token in enumerate(TWO[0])], TWO[1]]
    (loss,), gradient, metrics = by_token(archer, rows, monkeypatch, kl_coef=0.0, reasoning_kl=1.0)
    assert loss == exactly(-1.2 * 4 / 7) and gradient == [0.0] * 7
    assert metrics["reasoning_rate"] == exactly(1 / 7) and metrics["clip_rate"] == exactly(4 / 7)
    (loss,), gradient, _ = by_token(archer, TWO, monkeypatch, kl_coef=0.0, reasoning_kl=1.0)
    assert loss == exactly(-(1.2 * 6 + 1.4) / 7) and gradient == exactly([0, 0, 0, 0, 0, -0.2, 0])

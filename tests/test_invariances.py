"""What must not change a gradient or an advantage: micro-batches, padding, what lies outside the mask, and processes.

For the trainers whose own numbers are in test_reinforce_rloo_dr_grpo.py, test_dppo_sapo.py and test_grpo_tis.py.
"""

import dataclasses
import math

import pytest
import torch
from conftest import run_together, step_of_main, timeless
from test_algorithms import (
    GROUP,
    PROMPTS,
    adamw,
    arguments,
    distance,
    gradients,
    lengths_of,
    loss_batch,
    make_batch,
    rows_of,
    state_of,
    weights,
)

import dppo
import dr_grpo
import grpo
import grpo_tis
import reinforce
import rloo
import sapo
from runtime import processes

N = PROMPTS * GROUP
# Settings at which some tokens of the batch are cut off, and others not.
CASES = {
    "reinforce": (reinforce, {}),
    "rloo": (rloo, {}),
    "dr_grpo": (dr_grpo, {}),
    "dppo tv": (dppo, {"delta": 0.02}),
    "dppo kl": (dppo, {"divergence": "kl", "delta": 0.002}),
    "sapo": (sapo, {"tau_positive": 5.0, "tau_negative": 7.0}),
    "grpo_tis tis": (grpo_tis, {"correction_max": 1.1}),
    "grpo_tis icepop": (grpo_tis, {"correction": "icepop", "correction_max": 1.1, "correction_min": 0.9}),
}
WITHOUT_CLIP = (reinforce, rloo)
each_case = pytest.mark.parametrize("case", CASES)
one_case_each = pytest.mark.parametrize("case", [case for case in CASES if case not in ("dppo kl", "grpo_tis icepop")])


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    """With rewards; those of the second group are all equal."""
    batch = make_batch(tiny_model)
    rewards = torch.tensor([-3, -0.5, -1, 3])[torch.randint(4, (N,), generator=torch.Generator().manual_seed(2))]
    rewards[GROUP : 2 * GROUP] = -0.5
    return batch | {"rewards": rewards[:, None]}


def args_of(case, model, **changes):
    trainer, settings = CASES[case]
    return arguments(trainer, model=str(model), max_response_tokens=50, **settings | changes)


def kl_term(trainer, kl_coef):
    return {"kl_coef": kl_coef} if hasattr(trainer.Args, "kl_coef") else {}  # reinforce.py has none


def with_advantages(batch, trainer, args):
    return batch | {"advantages": trainer.compute_advantages(batch["rewards"][:, 0], batch, args)}


@pytest.mark.parametrize(("case", "kl_coef"), [*((case, 0.0) for case in CASES), ("dr_grpo", 0.1), ("sapo", 0.1)])
def test_the_gradient_does_not_move_with_the_micro_batches(tiny_model, batch, case, kl_coef):
    """Of two updates, over all parameters; and the metrics are the same."""
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, updates_per_step=2, **kl_term(trainer, kl_coef))
    batch = with_advantages(batch, trainer, args)
    before = {key: value.clone() for key, value in batch.items()}
    policy = trainer.load_policy(args, trained=True)
    whole, metrics = gradients(trainer, batch, args, policy)
    assert len(whole) == 2
    assert trainer in WITHOUT_CLIP or 0.05 < metrics["clip_rate"] < 0.95
    for budget in (300, 1):
        steps, others = gradients(trainer, batch, dataclasses.replace(args, micro_batch_tokens=budget), policy)
        assert all(distance(a, b) < 1e-5 for a, b in zip(steps, whole, strict=True))
        assert others == pytest.approx(metrics, rel=1e-5)
    assert all(torch.equal(batch[key], before[key]) for key in before)


@each_case
def test_padding_and_what_lies_outside_the_mask_change_nothing(tiny_model, batch, case):
    """Seven more columns, and in all places that are no response token other numbers, in the padding other tokens."""
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, micro_batch_tokens=300)
    policy = trainer.load_policy(args, trained=True)
    batch = with_advantages(batch, trainer, args)
    rng = torch.Generator().manual_seed(5)
    mask = torch.nn.functional.pad(batch["mask"], (0, 7))
    padding = torch.arange(mask.shape[1]) >= torch.tensor(lengths_of(batch))[:, None]
    other = {"mask": mask}
    for key, value in batch.items():
        if key not in ("mask", "rewards"):
            other[key] = torch.nn.functional.pad(value, (0, 7))
            garbage = torch.randint(2, 600, mask.shape, generator=rng)
            place = padding if key == "ids" else ~mask
            other[key] = torch.where(place, garbage.to(value.dtype), other[key])
    assert not torch.equal(other["ids"][:, :-7], batch["ids"])
    advantages = trainer.compute_advantages(batch["rewards"][:, 0], other, args)
    assert torch.equal(advantages[:, :-7], batch["advantages"]) and not advantages[~mask].any()
    (one,), metrics = gradients(trainer, batch, args, policy)
    (padded,), others = gradients(trainer, batch | other, args, policy)
    assert distance(padded, one) < 1e-6 and others == pytest.approx(metrics, rel=1e-6)


@each_case
def test_without_tokens_the_loss_is_zero_and_without_gradient(case):
    """Such is the pass that a process repeats because others have more: with an empty mask."""
    trainer, settings = CASES[case]
    logp, rest = loss_batch([(0.1, 0.3, 1), (0, 0, 2)])
    rest |= {"mask": rest["mask"] & False, "sampler_logp": rest["old_logp"]}
    result = trainer.policy_loss(logp, rest, 5, arguments(trainer, **settings))
    loss, clipped = (result, torch.tensor(0)) if trainer in WITHOUT_CLIP else result
    loss.backward()
    assert loss.item() == 0 and clipped.item() == 0 and not logp.grad.any()


@one_case_each
def test_responses_of_advantage_0_go_through_no_pass_and_change_nothing(tiny_model, batch, case):
    """Without a KL term; with one of weight 10⁻¹², for which they go too, the gradient is the same."""
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, micro_batch_tokens=300, **kl_term(trainer, 0.0))
    batch = batch | {"advantages": batch["advantages"].clone()}
    batch["advantages"][[0, 1, 2, 7, 20]] = 0
    policy, seen = trainer.load_policy(args, trained=True), []
    policy.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0].tolist()))
    (one,), metrics = gradients(trainer, batch, args, policy)
    sent = {i for i, row in enumerate(batch["ids"].tolist()) for ids in seen if row[: len(ids)] == ids}
    assert sent == set(range(N)) - {0, 1, 2, 7, 20}
    if trainer is not reinforce:
        (other,), others = gradients(trainer, batch, dataclasses.replace(args, kl_coef=1e-12), policy)
        assert distance(one, other) < 1e-5 and others.get("clip_rate") == metrics.get("clip_rate")


@one_case_each
def test_gradients_are_scaled_down_to_max_grad_norm_and_the_norm_before_is_told(tiny_model, batch, case):
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, micro_batch_tokens=300, updates_per_step=2)
    policy = trainer.load_policy(args, trained=True)
    free, metrics = gradients(trainer, batch, args, policy)
    capped, capped_metrics = gradients(trainer, batch, dataclasses.replace(args, max_grad_norm=1e-3), policy)
    norms = [step.double().norm().item() for step in free]
    for a, b, norm in zip(capped, free, norms, strict=True):
        torch.testing.assert_close(a, b * (1e-3 / norm), rtol=2e-3, atol=0)
    assert capped_metrics == metrics and metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)


@one_case_each
def test_a_loss_that_is_not_finite_ends_the_program_before_the_weights_are_touched(tiny_model, batch, case, tmp_path):
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, run_dir=str(tmp_path), micro_batch_tokens=300)
    policy = trainer.load_policy(args, trained=True)
    optimizer = adamw(policy)
    trainer.update(policy, optimizer, batch, 1, args)
    before, moments = weights(policy), state_of(optimizer)
    broken = batch | {"advantages": batch["advantages"].clone()}
    broken["advantages"][7][batch["mask"][7]] = math.nan
    with pytest.raises(SystemExit) as end:
        trainer.update(policy, optimizer, broken, 12, args)
    assert "nan" in end.value.code and "step 12" in end.value.code
    assert (tmp_path / "non_finite_step_000012_process_0.pt").exists()
    assert torch.equal(weights(policy), before) and torch.equal(state_of(optimizer), moments)


# ------------------------------------------------------------------------------------------------- two processes


def compute_share(folder):
    """Writes what this process's main makes of its share of the batch: advantages, metrics; and the gradients."""
    results, started = {}, False
    for case, (trainer, _) in CASES.items():
        args = trainer.Args(**torch.load(folder / f"{case}.pt"))
        if not started:
            processes.start()
            started = True
        rows = rows_of(processes.RANK, processes.WORLD_SIZE)
        batch = {key: value[rows] for key, value in torch.load(folder / "batch.pt").items()}
        rewards = batch["rewards"][:, 0]
        with pytest.MonkeyPatch.context() as patch:
            metrics, given = step_of_main(trainer, args, batch, rewards.tolist(), patch)
        result = {"rows": rows, "metrics": timeless(metrics), "advantages": given["advantages"]}
        result["gradients"], result["update"] = gradients(trainer, given, args)
        equal = trainer.compute_advantages(torch.full_like(rewards, 0.7), batch, args)
        results[case] = result | {"of equal rewards": equal}
    torch.save(results, folder / f"of_{processes.RANK}_in_{processes.WORLD_SIZE}.pt")


@pytest.fixture(scope="module")
def two_processes(tiny_model, batch, tmp_path_factory):
    """Results of one process and of each of two; the long responses all go to process 0 of two.

    So it makes more passes than process 1, which repeats one with an empty mask.
    """
    folder = tmp_path_factory.mktemp("two_processes")
    for case in CASES:
        args = args_of(case, tiny_model, updates_per_step=2, micro_batch_tokens=150)
        torch.save(dataclasses.asdict(args), folder / f"{case}.pt")
    torch.save({key: value for key, value in batch.items() if key != "advantages"}, folder / "batch.pt")
    n_passes = []
    for rank in range(2):
        share = {key: value[rows_of(rank, 2)] for key, value in batch.items()}
        n_passes.append([len(list(grpo.micro_batches(m, args))) for m in grpo.minibatches(share, 2)])
    assert all(a > b for a, b in zip(*n_passes))  # otherwise this would not show what it should
    run_together(compute_share, folder)
    compute_share(folder)
    return {(rank, n): torch.load(folder / f"of_{rank}_in_{n}.pt") for rank, n in ((0, 1), (0, 2), (1, 2))}


@each_case
def test_two_processes_have_the_advantages_gradients_and_metrics_of_one(two_processes, case):
    one = two_processes[0, 1][case]
    assert len(one["gradients"]) == 2 and all(step.norm() > 1e-3 for step in one["gradients"])
    for rank in range(2):
        two = two_processes[rank, 2][case]
        torch.testing.assert_close(two["advantages"], one["advantages"][two["rows"]], atol=1e-6, rtol=1e-6)
        assert all(distance(a, b) < 1e-5 for a, b in zip(two["gradients"], one["gradients"], strict=True))
        assert two["update"] == pytest.approx(one["update"], rel=1e-5)
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
        assert not two["of equal rewards"].any() and not one["of equal rewards"].any()


def test_the_two_processes_shares_differ_in_their_mean_reward(two_processes, batch):
    """Otherwise the test above would pass if each process had a baseline of its own."""
    means = [batch["rewards"][two_processes[rank, 2]["reinforce"]["rows"]].mean() for rank in range(2)]
    assert abs(means[0] - means[1]) > 0.1

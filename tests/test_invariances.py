"""What must not change a gradient or an advantage: micro-batches, padding, what lies outside the mask, and processes.

Of every script whose update is its own. What another one shares with its parent is the same to the letter
(test_family.py).
"""

import dataclasses
import inspect
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

import acpo
import archer
import cispo
import dppo
import dr_grpo
import entropy_top
import grpo
import grpo_ar_lopti
import grpo_tis
import gspo
import opd
import ppo
import reinforce
import reinforce_pp
import rloo
import sapo
from runtime import passes, processes

N = PROMPTS * GROUP
# Settings at which some tokens of the batch are cut off, and others not.
CASES = {
    "grpo": (grpo, {}),
    "grpo_ar_lopti": (grpo_ar_lopti, {}),
    "reinforce": (reinforce, {}),
    "rloo": (rloo, {}),
    "opd": (opd, {}),
    "dr_grpo": (dr_grpo, {}),
    "ppo": (ppo, {}),
    "reinforce_pp": (reinforce_pp, {}),
    "acpo": (acpo, {"n_bins": 20}),
    "gspo": (gspo, {"clip_low": 0.05, "clip_high": 0.03}),
    "cispo": (cispo, {"clip_low": 0.05, "clip_high": 0.03}),
    "entropy_top": (entropy_top, {}),
    "archer": (archer, {}),
    "dppo tv": (dppo, {"delta": 0.02}),
    "dppo kl": (dppo, {"divergence": "kl", "delta": 0.002}),
    "sapo": (sapo, {"tau_positive": 5.0, "tau_negative": 7.0}),
    "grpo_tis tis": (grpo_tis, {"correction_max": 1.1}),
    "grpo_tis icepop": (grpo_tis, {"correction": "icepop", "correction_max": 1.1, "correction_min": 0.9}),
    "grpo_tis mask": (grpo_tis, {"mask": "sequence", "mask_delta": 0.0}),
}
WITHOUT_CLIP = (reinforce, rloo, opd)
each_case = pytest.mark.parametrize("case", CASES)
# The first script with each of the family's ways to make one update.
UPDATES = {inspect.getsource(trainer.update_once): case for case, (trainer, _) in reversed(CASES.items())}
each_update = pytest.mark.parametrize("case", list(reversed(UPDATES.values())))


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    """With rewards, of which the second group's are all equal, with values, and with a teacher."""
    batch = make_batch(tiny_model)
    rng = torch.Generator().manual_seed(2)
    rewards = torch.tensor([-3, -0.5, -1, 3])[torch.randint(4, (N,), generator=rng)]
    rewards[GROUP : 2 * GROUP] = -0.5
    values = torch.randn(batch["mask"].shape, generator=rng) * batch["mask"]
    return batch | {"rewards": rewards[:, None], "values": values, "teacher_logp": batch["ref_logp"].clone()}


def args_of(case, model, **changes):
    trainer, settings = CASES[case]
    return arguments(trainer, model=str(model), max_response_tokens=50, **settings | changes)


def kl_term(trainer, kl_coef):
    return {"kl_coef": kl_coef} if hasattr(trainer.Args, "kl_coef") else {}  # reinforce.py has none


def num_steps(trainer, args):
    """How many optimizer steps an update makes."""
    return args.updates_per_step * (2 if trainer is grpo_ar_lopti else 1)


def with_advantages(batch, trainer, args):
    return batch | {"advantages": trainer.compute_advantages(batch["rewards"][:, 0], batch, args)}


@pytest.mark.parametrize(("case", "kl_coef"), [*((case, 0.0) for case in CASES), ("dr_grpo", 0.1), ("sapo", 0.1)])
def test_the_gradient_does_not_move_with_the_micro_batches(tiny_model, batch, case, kl_coef):
    """Of two updates, over all parameters; the metrics are the same, and the batch is as it was."""
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, updates_per_step=2, **kl_term(trainer, kl_coef))
    batch = with_advantages(batch, trainer, args)
    before = {key: value.clone() for key, value in batch.items()}
    policy = trainer.load_policy(args, trained=True)
    whole, metrics = gradients(trainer, batch, args, policy)
    assert len(whole) == metrics["optimizer_steps"] == num_steps(trainer, args)
    assert trainer in WITHOUT_CLIP or 0.01 < metrics["clip_rate"] < 0.95
    for budget in (300, 1):
        steps, others = gradients(trainer, batch, dataclasses.replace(args, micro_batch_tokens=budget), policy)
        assert all(distance(a, b) < 1e-5 for a, b in zip(steps, whole, strict=True))
        # The second update's σ is of ratios after a step of AdamW, which makes 1.3e-5 of rounding with AVX2 alone.
        assert others == pytest.approx(metrics, rel=1e-4, abs=2e-6)
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], before[key]) for key in before)


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
            place = padding if key == "ids" else ~mask & (key != "values")  # which are zero there
            other[key] = torch.where(place, garbage.to(value.dtype), other[key])
    assert not torch.equal(other["ids"][:, :-7], batch["ids"])
    advantages = trainer.compute_advantages(batch["rewards"][:, 0], other, args)
    torch.testing.assert_close(advantages[:, :-7], batch["advantages"], rtol=1e-6, atol=1e-6)
    assert not advantages[~mask].any()
    steps, metrics = gradients(trainer, batch, args, policy)
    padded, others = gradients(trainer, batch | other, args, policy)
    assert all(distance(a, b) < 1e-6 for a, b in zip(padded, steps, strict=True))
    assert others == pytest.approx(metrics, rel=1e-6)


@each_case
def test_without_tokens_the_loss_is_zero_and_without_gradient(case):
    """Such is the pass that a process repeats because others have more: with an empty mask."""
    trainer, settings = CASES[case]
    logp, rest = loss_batch([(0.1, 0.3, 1), (0, 0, 2)])
    rest |= {"mask": rest["mask"] & False, "sampler_logp": rest["old_logp"], "reasoning": rest["mask"]}
    rest |= {"weight": rest["old_logp"], "clip_range": rest["old_logp"]}
    divisor = () if trainer is acpo else (5,)  # there it is in the weight
    result = trainer.policy_loss(logp, rest, *divisor, arguments(trainer, **settings))
    loss, clipped = (result, torch.tensor(0)) if trainer in WITHOUT_CLIP else result
    loss.backward()
    assert loss.item() == 0 and clipped.item() == 0 and not logp.grad.any()


@pytest.mark.parametrize("case", [case for case in CASES if case != "entropy_top"])  # it leaves out others, too
def test_responses_of_advantage_0_go_through_no_pass_and_change_nothing(tiny_model, batch, case):
    """Without a KL term; with one of weight 10⁻¹², for which they go too, the gradient is the same."""
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, micro_batch_tokens=300, **kl_term(trainer, 0.0))
    batch = batch | {"advantages": batch["advantages"].clone()}
    batch["advantages"][[0, 1, 2, 7, 20]] = 0
    policy, seen = trainer.load_policy(args, trained=True), []
    policy.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0].tolist()))
    steps, metrics = gradients(trainer, batch, args, policy)
    sent = {i for i, row in enumerate(batch["ids"].tolist()) for ids in seen if row[: len(ids)] == ids}
    assert sent == set(range(N)) - {0, 1, 2, 7, 20}
    if trainer not in (reinforce, opd):
        all_steps, others = gradients(trainer, batch, dataclasses.replace(args, kl_coef=1e-12), policy)
        assert all(distance(a, b) < 1e-5 for a, b in zip(steps, all_steps, strict=True))
        assert others.get("clip_rate") == metrics.get("clip_rate")  # a share of all tokens as before


def test_if_no_token_has_an_advantage_adamw_still_makes_its_step(tiny_model, batch):
    """Without a KL term its gradient is 0, as if the tokens went through passes: the weights decay."""
    args = args_of("grpo", tiny_model, kl_coef=0.0, weight_decay=0.1, lr=1e-3, updates_per_step=1)
    policy = grpo.load_policy(args, trained=True)
    before = policy.lm.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    metrics = grpo.update(policy, optimizer, batch | {"advantages": 0 * batch["advantages"]}, 1, args)
    assert metrics["grad_norm"] == 0 and metrics["optimizer_steps"] == 1
    torch.testing.assert_close(policy.lm.lm_head.weight, before * (1 - 1e-4), rtol=1e-6, atol=0)


@each_update
def test_gradients_are_scaled_down_to_max_grad_norm_and_the_norm_before_is_told(tiny_model, batch, case):
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, micro_batch_tokens=300, updates_per_step=2)
    policy = trainer.load_policy(args, trained=True)
    free, metrics = gradients(trainer, batch, args, policy)
    capped, capped_metrics = gradients(trainer, batch, dataclasses.replace(args, max_grad_norm=1e-3), policy)
    norms = [step.double().norm().item() for step in free]
    for a, b, norm in zip(capped, free, norms, strict=True):
        torch.testing.assert_close(a, b * (1e-3 / norm), rtol=2e-3, atol=0)
    assert capped_metrics == metrics and metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)


@each_update
def test_a_loss_that_is_not_finite_ends_the_program_before_the_weights_are_touched(tiny_model, batch, case, tmp_path):
    trainer = CASES[case][0]
    args = args_of(case, tiny_model, run_dir=str(tmp_path), micro_batch_tokens=300)
    policy = trainer.load_policy(args, trained=True)
    optimizer = adamw(policy)
    trainer.update(policy, optimizer, batch, 1, args)
    before, moments = weights(policy), state_of(optimizer)
    broken = batch | {"advantages": batch["advantages"].clone()}
    broken["advantages"][batch["mask"] & (torch.arange(N) == 7)[:, None]] = math.nan
    with pytest.raises(SystemExit) as end:
        trainer.update(policy, optimizer, broken, 12, args)
    path = tmp_path / "non_finite_step_000012_process_0.pt"
    assert str(path) in end.value.code and "nan" in end.value.code and "step 12" in end.value.code
    assert torch.equal(weights(policy), before) and torch.equal(state_of(optimizer), moments)
    saved = torch.load(path)
    assert saved["args"] == dataclasses.asdict(args) and saved["batch"]["advantages"].isnan().any()


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
            if trainer is ppo:  # its value model is in test_ppo.py
                patch.setattr(ppo, "compute_values", lambda *_, batch=batch: batch["values"])
                patch.setattr(ppo, "update_values", lambda *_: {})
            metrics, given = step_of_main(trainer, args, batch, rewards.tolist(), patch)
        result = {"rows": rows, "metrics": timeless(metrics), "advantages": given["advantages"]}
        result["gradients"], result["update"] = gradients(trainer, given, args)
        without_kl = dataclasses.replace(args, **kl_term(trainer, 0.0))
        equal = batch | {"values": torch.zeros(batch["mask"].shape), "teacher_logp": batch["old_logp"]}
        equal = trainer.compute_advantages(torch.full_like(rewards, 0.7), equal, without_kl)
        results[case] = result | {"of equal rewards": equal}
        if case == "grpo":
            results["of each pass cost"] = gradients_by_pass_cost(given, args)
    torch.save(results, folder / f"of_{processes.RANK}_in_{processes.WORLD_SIZE}.pt")


# What a pass costs, in tokens: with the first of them sharing a prompt always pays, with the last never.
PASS_COSTS = (0, 20, 40, 80, 160, 500)


def gradients_by_pass_cost(batch, args):
    """The gradients for each of PASS_COSTS, which decides whether a pass computes its prompt once."""
    found = []
    for cost in PASS_COSTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "PASS_COST", cost)
            found.append(gradients(grpo, batch, args)[0])
    return found


@pytest.fixture(scope="module")
def two_processes(tiny_model, batch, tmp_path_factory):
    """Results of one process and of each of two; the long responses all go to process 0 of two.

    So it makes more passes than process 1, which repeats one with an empty mask; and all tokens of high entropy are its
    own.
    """
    folder = tmp_path_factory.mktemp("two_processes")
    for case in CASES:
        args = args_of(case, tiny_model, updates_per_step=2, micro_batch_tokens=150)
        torch.save(dataclasses.asdict(args), folder / f"{case}.pt")
    batch = batch | {"entropy": batch["entropy"].clone()}
    batch["entropy"][rows_of(1, 2)] *= 0.01
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
    assert len(one["gradients"]) in (2, 4) and all(step.norm() > 1e-3 for step in one["gradients"])
    for rank in range(2):
        two = two_processes[rank, 2][case]
        torch.testing.assert_close(two["advantages"], one["advantages"][two["rows"]], atol=1e-6, rtol=1e-6)
        assert all(distance(a, b) < 1e-5 for a, b in zip(two["gradients"], one["gradients"], strict=True))
        assert two["update"] == pytest.approx(one["update"], rel=1e-5, abs=2e-6)
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
        assert not two["of equal rewards"].any() and not one["of equal rewards"].any()


def test_two_processes_agree_whether_a_pass_computes_its_prompt_once(two_processes):
    """It calls each layer twice, and FSDP2 needs as many calls in each process. Process 1 has short prompts, for which
    it pays less."""
    for rank in range(2):
        found = zip(two_processes[rank, 2]["of each pass cost"], two_processes[0, 1]["of each pass cost"], strict=True)
        for two, one in found:
            assert all(distance(a, b) < 1e-5 for a, b in zip(two, one, strict=True))


def test_the_two_processes_shares_differ_in_their_mean_reward(two_processes, batch):
    """Otherwise the test above would pass if each process had a baseline of its own."""
    means = [batch["rewards"][two_processes[rank, 2]["reinforce"]["rows"]].mean() for rank in range(2)]
    assert abs(means[0] - means[1]) > 0.1

"""The settings and rules that the scripts take from the papers' releases, each with the file and line it follows.

The releases are public repositories, named with the commit that was read:

    AR-Lopti   zhyang2226/AR-Lopti                       cbeb333
    ACPO       Control-derek/ACPO                        cfcd73d
    Archer     wizard-III/ArcherCodeR                    8a1785b
    80/20      Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR   6f5dda6f
    verl       volcengine/verl                           b178a3cd5
    DPPO       verl-project/verl                         8f11888a
    Dr. GRPO   sail-sg/understand-r1-zero                14046dca

A number that is given with a line is the release's own. Where a script deviates on purpose, its docstring says so,
and the test holds it to the deviation.
"""

import math

import pytest
import torch
from conftest import parse
from test_algorithms import arguments

import acpo
import archer
import cispo
import dppo
import dr_grpo
import entropy_top
import grpo
import grpo_ar_lopti
import grpo_tis
import reinforce_pp
import rloo
import sapo

BASELINE = "scripts/train_kklogic_baseline_4x80GB.sh"


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("prompts_per_step", 64, f"{BASELINE}:15"),
        ("responses_per_prompt", 8, f"{BASELINE}:16"),
        ("epochs", 5, f"{BASELINE}:17, 101"),
        ("temperature", 0.7, f"{BASELINE}:19"),
        ("clip_low", 0.20, f"{BASELINE}:20"),
        ("clip_high", 0.24, f"{BASELINE}:21"),
        ("lr", 1e-6, f"{BASELINE}:24"),
        ("kl_coef", 0.001, f"{BASELINE}:27, 61"),
        ("max_response_tokens", 4096, f"{BASELINE}:53"),
        ("save_every", 20, f"{BASELINE}:98"),
        ("eval_every", 20, f"{BASELINE}:99"),
        ("weight_decay", 0.01, "verl/workers/fsdp_workers.py:242"),
        ("max_grad_norm", 1.0, "verl/trainer/config/ppo_trainer.yaml:32"),
    ],
)
def test_grpos_settings_are_those_of_ar_loptis_release(name, value, where):
    for trainer in (grpo, grpo_ar_lopti, reinforce_pp):
        assert getattr(trainer.Args(), name) == value, where


def test_two_updates_of_256_responses():
    """AR-Lopti, scripts/train_kklogic_baseline_4x80GB.sh:18 and 58: UPDATE_BS=256, counted in responses."""
    args = grpo.Args()
    assert args.prompts_per_step * args.responses_per_prompt / args.updates_per_step == 256


def test_alpha_and_eta_are_the_papers_as_in_the_release_for_both_together():
    """AR-Lopti, scripts/train_kklogic_AR-Lopti_4x80GB.sh:34 and 40. Alone: α 0.2 and η 0.4 (lines 34, 40)."""
    assert (grpo_ar_lopti.Args().alpha, grpo_ar_lopti.Args().eta) == (0.3, 0.5)


def test_what_weighs_and_sorts_tokens_is_the_probability_before_the_update():
    """AR-Lopti, verl/trainer/ppo/ray_trainer.py:1189-1190 and 348 (AR), 1270 (Lopti): old_log_probs in both."""
    old_logp = torch.tensor([[math.log(0.9), math.log(0.1)]])
    assert grpo_ar_lopti.ar_weight(old_logp, 0.3)[0].tolist() == pytest.approx([0.97, 0.73])
    batch = {"old_logp": old_logp, "mask": torch.tensor([[True, True]])}
    assert grpo_ar_lopti.in_stage("low", batch, 0.5).tolist() == [[False, True]]


def test_equal_to_eta_is_low_where_the_release_has_less():
    """AR-Lopti, verl/trainer/ppo/ray_trainer.py:1270 has <; Algorithm 1, which is followed, has ≤."""
    at = torch.tensor([[math.log(0.5)]])
    batch = {"old_logp": at, "mask": torch.tensor([[True]])}
    assert grpo_ar_lopti.in_stage("low", batch, 0.5).item()


def test_log_ratios_are_clamped_as_in_verl_and_k3_is_not():
    """verl, verl/trainer/ppo/core_algos.py:1212 (±20 on log ρ), 1893 (±20 in k3), 1896 (k3 itself at 10, not here)."""
    assert grpo.k3(torch.tensor(0.0), torch.tensor(5.0)).item() == pytest.approx(math.exp(5) - 6)
    assert grpo.k3(torch.tensor(0.0), torch.tensor(50.0)).item() == pytest.approx(math.exp(20) - 21)


def test_the_penalty_of_reinforce_pp_is_in_the_return_and_not_in_the_loss():
    """AR-Lopti: README.md:73 leaves use_kl_loss=True in scripts/…:60, and verl/trainer/ppo/ray_trainer.py:1171-1177
    then skips the penalty. Eq. 20, which is followed, has it in the return."""
    batch = {"mask": torch.tensor([[False, True]]), "advantages": torch.ones(1, 2), "old_logp": torch.zeros(1, 2)}
    loss, _ = reinforce_pp.policy_loss(torch.zeros(1, 2), batch, 1, arguments(reinforce_pp, kl_coef=0.5))
    assert loss.item() == -1  # no ref_logp is asked for
    batch["ref_logp"] = torch.tensor([[0.0, -1.0]])
    returns, _, _ = reinforce_pp.token_returns(torch.tensor([2.0]), batch, arguments(reinforce_pp, kl_coef=0.5))
    assert returns.tolist() == [[0, 2 - 0.5]]


ACPO = "scripts/acpo/run_math_qwen_7b.sh"


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("prompts_per_step", 128, f"{ACPO}:27"),
        ("updates_per_step", 2, f"{ACPO}:27-28, mini-batches of 64 prompts"),
        ("responses_per_prompt", 10, f"{ACPO}:79"),
        ("max_prompt_tokens", 1024, f"{ACPO}:50"),
        ("max_response_tokens", 3072, f"{ACPO}:51"),
        ("lr", 1e-6, f"{ACPO}:55"),
        ("kl_coef", 0, f"{ACPO}:62-63"),
        ("temperature", 1.0, "verl/trainer/config/ppo_trainer.yaml:399"),
        ("clip_alpha", 3, f"{ACPO}:92-96"),
        ("clip_base", 0.2, f"{ACPO}:82"),
        ("clip_max", 3, f"{ACPO}:92-96"),
        ("n_bins", 5, "verl/trainer/ppo/core_algos.py:584-587"),
    ],
)
@pytest.mark.parametrize("task", ["math", "countdown"])
def test_acpos_settings_are_those_of_its_release(task, name, value, where):
    assert getattr(parse(acpo, "--task", task, "--model", "some/model"), name) == value, where


def test_the_deviation_is_divided_by_all_tokens_of_the_bin():
    """ACPO, verl/trainer/ppo/core_algos.py:596: unbiased=False. Its floor, √(σ² + 1e-8) in line 597, is not here."""
    logp = torch.tensor([[-0.1, -0.1]], dtype=torch.float64)
    old_logp = logp - torch.tensor([[math.log(1.1), math.log(0.9)]], dtype=torch.float64)
    batch = {"mask": torch.ones(1, 2, dtype=torch.bool), "old_logp": old_logp}
    _, of_bins = acpo.clip_ranges(logp, batch, arguments(acpo))
    assert of_bins[4]["sigma"] == pytest.approx(0.1, abs=1e-12)  # with ddof 1 it would be 0.141
    _, of_bins = acpo.clip_ranges(logp, {**batch, "old_logp": logp}, arguments(acpo))
    assert of_bins[4]["clip_range"] == 0.2  # 0.2003 in the release


def test_acpos_baseline_dapo_clips_at_0_2_and_0_3_and_means_over_responses():
    """ACPO, scripts/acpo/run_math_qwen_7b.sh:80 (seq-mean-token-mean, for all methods), 82-83 and 99-101."""
    args = arguments(acpo, clip_alpha=0.0, clip_base_high=0.3, kl_coef=0.0)
    logp = torch.tensor([[0.0, math.log(1.29)], [0.0, math.log(1.31)]], dtype=torch.float64, requires_grad=True)
    batch = {
        "mask": torch.tensor([[False, True]] * 2), "advantages": torch.ones(2, 2), "weight": torch.full((2, 2), 0.5),
        "old_logp": torch.zeros(2, 2), "ref_logp": torch.zeros(2, 2), "clip_range": torch.full((2, 2), 0.2),
    }  # fmt: skip
    loss, clipped = acpo.policy_loss(logp, batch, args)
    loss.backward()
    assert clipped.item() == 1
    assert logp.grad[:, 1].tolist() == pytest.approx([-0.5 * 1.29, 0])


def test_cispos_bounds_and_the_gate_of_acpos_release():
    """ACPO, scripts/acpo/run_math_qwen_7b.sh:106-107 (1.0 and 0.45), 82-83 and core_algos.py:800-807 (the gate)."""
    assert (cispo.Args().clip_low, cispo.Args().clip_high, cispo.Args().gated) == (1.0, 0.45, False)
    assert (cispo.GATE_LOW, cispo.GATE_HIGH) == (0.2, 0.3)


def test_the_80_20_rules_share_is_rounded_up():
    """80/20, verl/trainer/ppo/core_algos.py:76-77: ⌈0.2·n⌉, at least one token."""
    minibatch = {"entropy": torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]), "mask": torch.ones(1, 6, dtype=torch.bool)}
    assert entropy_top.entropy_threshold(minibatch, arguments(entropy_top, entropy_top=0.2)) == 4.0


def test_archers_kinds_of_tokens():
    """Archer, scripts/train/run_archer_qwen2.5_1.5b_code.sh:62-67 and verl/workers/actor/dp_actor.py:406-410: the 0.8
    quantile of each response, strictly above it is reasoning; ε 0.2 and 0.5; β 0.001 and 0."""
    args = archer.Args()
    assert (args.entropy_quantile, args.clip_low, args.clip_high, args.reasoning_clip) == (0.8, 0.2, 0.2, 0.5)
    assert (args.kl_coef, args.reasoning_kl) == (0.001, 0)
    batch = {"entropy": torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]), "mask": torch.ones(1, 6, dtype=torch.bool)}
    assert archer.reasoning_tokens(batch, args).tolist() == [[False] * 5 + [True]]


def rewarded(trainer, rewards, group):
    """Advantages of responses of one token."""
    batch = {"mask": torch.ones(len(rewards), 1, dtype=torch.bool)}
    args = arguments(trainer, responses_per_prompt=group)
    return trainer.compute_advantages(torch.tensor(rewards), batch, args)[:, 0].tolist()


def test_rloos_advantages_but_for_a_group_of_one():
    """verl, verl/trainer/ppo/core_algos.py:518-523: r·n/(n − 1) − mean·n/(n − 1), and r itself if n is 1 (0 here)."""
    assert rewarded(rloo, [1.0, 2.0, 6.0], 3) == [1 * 1.5 - 3 * 1.5, 2 * 1.5 - 3 * 1.5, 6 * 1.5 - 3 * 1.5]
    assert rewarded(rloo, [1.0, 2.0], 1) == [0, 0]
    assert rloo.Args().kl_coef == 0


def test_dr_grpos_advantages_divisor_and_missing_kl_term():
    """Dr. GRPO, train_zero_math.py: compute_monte_carlo_advantages (r − mean) and masked_aggregator, a sum over tokens
    divided by generate_max_length; examples/qwen2.5-math-7b.sh: --beta 0."""
    assert rewarded(dr_grpo, [1.0, 2.0, 6.0], 3) == [-2, -1, 3]
    assert dr_grpo.Args().kl_coef == 0
    ones = torch.ones(1, 2)
    batch = {"mask": ones.bool(), "advantages": ones, "old_logp": -ones, "ref_logp": -ones}
    loss, _ = dr_grpo.policy_loss(-ones, batch, 1 * 3000, arguments(dr_grpo, kl_coef=0.0))
    assert loss.item() == pytest.approx(-2 / 3000)


def test_dppos_bounds():
    """DPPO, examples/dppo_trainer/run_qwen30b_dppo.sh:27-29 (KL) and 32-34 (TV), without a KL term (lines 64, 66).

    The ratio's bound is what compute_policy_loss_dppo_tv in verl/trainer/ppo/core_algos.py falls back to; the script
    itself sets it to 10,000 (line 46)."""
    assert (dppo.Args().divergence, dppo.Args().delta, dppo.Args().kl_coef) == ("tv", None, 0)
    assert dppo.LARGEST_RATIO == 20
    for divergence, kept, cut_off in (("tv", 0.6499, 0.6501), ("kl", 0.6542, 0.6543)):  # from 0.5
        logp = torch.tensor([kept, cut_off], dtype=torch.float64).log()
        old_logp = torch.full((2,), 0.5, dtype=torch.float64).log()
        args = arguments(dppo, divergence=divergence)
        assert dppo.outside_region(logp, old_logp, torch.ones(2), args).tolist() == [False, True]


def test_sapos_temperatures_and_mean_over_responses():
    """verl, verl/trainer/config/actor/actor.yaml:46 and 49; verl/trainer/ppo/core_algos.py:1366 (the gate), 1380 (τ by
    the sign of A) and 1396 (seq-mean-token-mean)."""
    assert (sapo.Args().tau_positive, sapo.Args().tau_negative, sapo.Args().kl_coef) == (1.0, 1.05, 0)
    mask = torch.tensor([[True, False], [True, True]])
    batch = {"mask": mask, "advantages": torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), "old_logp": torch.zeros(2, 2)}
    batch["ref_logp"] = batch["old_logp"]
    logp = torch.tensor([2.0, 3.0]).log().expand(2, 2)
    loss, _ = sapo.policy_loss(logp, batch, 2, arguments(sapo, kl_coef=0.0))
    gate = [4 / tau * torch.sigmoid(torch.tensor(tau * (x - 1))).item() for tau, x in ((1, 2), (1.05, 2), (1.05, 3))]
    assert loss.item() == pytest.approx((-gate[0] + (gate[1] + gate[2]) / 2) / 2, rel=1e-5)


def test_the_correction_for_the_sampler():
    """verl, verl/trainer/config/algorithm.py:174 (C 2), verl/trainer/ppo/rollout_corr_helper.py:562 and 566 (bounded
    above, no gradient). IcePop has 0.5 and 5 (the Ring team's text, which is not in a repository); here C is 2."""
    args = grpo_tis.Args()
    assert (args.correction, args.correction_max, args.correction_min) == ("tis", 2.0, 0.5)
    batch = {"old_logp": torch.tensor([3.0, 0.4, 0.5, 2.0]).log(), "sampler_logp": torch.zeros(4)}
    assert grpo_tis.sampler_correction(batch, args)[0].tolist() == pytest.approx([2, 0.4, 0.5, 2])

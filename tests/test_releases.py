"""The settings that the scripts take from the papers' releases, each with the file and line it follows.

AR-Lopti: zhyang2226/AR-Lopti, cbeb333. ACPO: Control-derek/ACPO, cfcd73d. Archer: wizard-III/ArcherCodeR, 8a1785b.
80/20: Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR, 6f5dda6f. verl: volcengine/verl, b178a3cd5. DPPO: verl-project/verl,
8f11888a. Dr. GRPO: sail-sg/understand-r1-zero, 14046dca. Where a script deviates on purpose, it or its page says so.
"""

import importlib

import pytest
from conftest import parse

import acpo

BASELINE = "scripts/train_kklogic_baseline_4x80GB.sh"
OF_AR_LOPTI = {
    "prompts_per_step": 64,  # BASELINE:15
    "responses_per_prompt": 8,  # :16
    "updates_per_step": 2,  # :18, 58: UPDATE_BS=256, in responses, of 64 × 8
    "epochs": 5,  # :17, 101
    "temperature": 0.7,  # :19
    "clip_low": 0.20,  # :20
    "clip_high": 0.24,  # :21
    "lr": 1e-6,  # :24
    "kl_coef": 0.001,  # :27, 61
    "max_response_tokens": 4096,  # :53
    "save_every": 20,  # :98
    "eval_every": 20,  # :99
    "weight_decay": 0.01,  # verl/workers/fsdp_workers.py:242
    "max_grad_norm": 1.0,  # verl/trainer/config/ppo_trainer.yaml:32
}
ACPO = "scripts/acpo/run_math_qwen_7b.sh"
OF_ACPO = {
    "prompts_per_step": 128,  # ACPO:27
    "updates_per_step": 2,  # :27-28, mini-batches of 64 prompts
    "responses_per_prompt": 10,  # :79
    "max_prompt_tokens": 1024,  # :50
    "max_response_tokens": 3072,  # :51
    "lr": 1e-6,  # :55
    "kl_coef": 0,  # :62-63
    "temperature": 1.0,  # verl/trainer/config/ppo_trainer.yaml:399
    "clip_alpha": 3,  # :92-96
    "clip_base": 0.2,  # :82
    "clip_max": 3,  # :92-96
    "n_bins": 5,  # verl/trainer/ppo/core_algos.py:584-587
}


# What a script has of its own: its settings, and where they are from.
OF_ITS_OWN = {
    # AR-Lopti, scripts/train_kklogic_AR-Lopti_4x80GB.sh:34, 40, for both together; alone they are 0.2 and 0.4
    "grpo_ar_lopti": {"alpha": 0.3, "eta": 0.5},
    "cispo": {"clip_low": 1.0, "clip_high": 0.45, "gated": False},  # ACPO:106-107
    "entropy_top": {"entropy_top": 0.2},  # 80/20, verl/trainer/ppo/core_algos.py:76-77
    # Archer, scripts/train/run_archer_qwen2.5_1.5b_code.sh:62-67
    "archer": {"entropy_quantile": 0.8, "clip_low": 0.2, "clip_high": 0.2, "reasoning_clip": 0.5, "kl_coef": 0.001,
               "reasoning_kl": 0},
    "rloo": {"kl_coef": 0},  # a deviation: the paper has 0.03 and 0.10, with a learned reward model (Appendix C)
    "dr_grpo": {"kl_coef": 0},  # Dr. GRPO, examples/qwen2.5-math-7b.sh: --beta 0
    # DPPO, examples/dppo_trainer/run_qwen30b_dppo.sh:27-34, 64, 66; delta None is 0.15, with kl 0.05
    "dppo": {"divergence": "tv", "delta": None, "kl_coef": 0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05, "kl_coef": 0},  # verl/trainer/config/actor/actor.yaml:46, 49
    # verl's, but for ε_V, a deviation: PPO's own ε is 0.2, and verl has 0.5
    "ppo": {"gamma": 1, "gae_lambda": 1, "value_lr": 1e-5, "value_clip": 0.2},
    # verl, verl/trainer/config/algorithm.py:174; 0.5 is IcePop's, whose text has 5 for the other bound
    "grpo_tis": {"correction": "tis", "correction_max": 2.0, "correction_min": 0.5},
}  # fmt: skip
CASES = [(script, OF_AR_LOPTI) for script in ("grpo", "grpo_ar_lopti", "reinforce_pp")] + [*OF_ITS_OWN.items()]


@pytest.mark.parametrize(("script", "settings"), CASES)
def test_a_scripts_settings_are_those_of_its_release(script, settings):
    assert settings.items() <= vars(importlib.import_module(script).Args()).items()


@pytest.mark.parametrize("task", ["math", "countdown", "hitab"])
def test_acpos_settings_are_those_of_its_release(task):
    assert OF_ACPO.items() <= vars(parse(acpo, "--task", task, "--model", "some/model")).items()

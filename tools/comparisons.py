"""List the suites of tools/compare.py, each with the flags of all entries, and the entries.

An entry is "NAME: SCRIPT FLAGS". Its flags override the same flags of all entries.
"""

ENTRIES = [  # in the tree's order: scripts with a parent other than grpo.py are below it
    "grpo: grpo.py",
    "grpo 4 updates: grpo.py --updates_per_step 4",  # as many optimizer steps as Lopti
    "ar: grpo_ar_lopti.py --alpha 0.3 --eta 0",
    "lopti: grpo_ar_lopti.py --alpha 0 --eta 0.5",
    "ar+lopti: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
    "reinforce++: reinforce_pp.py",
    "reinforce++ ar+lopti: reinforce_pp_ar_lopti.py --alpha 0.1 --eta 0.5",
    "dapo: dapo.py",
    "dapo ar+lopti: dapo_ar_lopti.py --alpha 0.3 --eta 0.5",
    "acpo: acpo.py",
    "gspo: gspo.py",
    "cispo: cispo.py",
    "80/20: entropy_top.py",
    "archer: archer.py",
]
# float32, so that processors with and without bfloat16 agree. 16 prompts, because 16 updates per step divide them.
QUICK = "--steps 8 --eval_every 4 --eval_size 300 --dtype float32"
SHORT = "--steps 8 --eval_every 4 --eval_size 300 --prompts_per_step 16 --dtype float32"
LONG = "--steps 40 --eval_every 8 --eval_size 500 --dtype float32"  # kk_tiny, until it learns slowly

# A pretrained model and a task that it learns in ten steps, as in `make llm`, which has a lower learning rate.
SMOLLM2 = (
    "--model models/SmolLM2-135M-Instruct --task rewards/largest.py --kl_coef 0 --lr 5e-5 --temperature 1"
    " --prompts_per_step 8 --responses_per_prompt 16 --updates_per_step 1 --max_response_tokens 16"
    " --micro_batch_tokens 1024 --kv_cache_gb 0.25 --steps 12 --eval_every 4 --eval_size 128"
)
# The same model after sft.py has taught it to solve puzzles (docs/algorithms/sft.md): reasoning pays, and takes tokens.
# 512 tokens, because 384 would truncate a tenth of all careful solutions. bfloat16, because a step in float32 takes
# half as long again.
SMOLLM2_KK = (
    "--model models/SmolLM2-135M-KK --people 2 --max_prompt_tokens 352 --kl_coef 0 --lr 3e-5 --dtype bfloat16"
    " --temperature 1 --prompts_per_step 4 --responses_per_prompt 8 --updates_per_step 1 --max_response_tokens 512"
    " --micro_batch_tokens 2048 --kv_cache_gb 0.5 --steps 20 --eval_every 10 --eval_size 96"
)
# Several turns, with the same model: a calculator (the first entry is `make agent`), and a game.
TURNS = (
    "--model models/SmolLM2-135M-Instruct --kl_coef 0 --lr 2e-5 --temperature 1 --prompts_per_step 6"
    " --responses_per_prompt 8 --updates_per_step 1 --max_response_tokens 96 --micro_batch_tokens 2048"
    " --kv_cache_gb 0.5"
)


# Short responses and few prompts, so that many runs fit into an afternoon; five times the other suites' learning rate.
STALE = (
    "--people 2 --prompts_per_step 4 --max_response_tokens 320 --lr 5e-4 --steps 24 --eval_every 4 --eval_size 100"
    " --dtype float32"
)


def sweep(flag, values, others):
    """Return an entry of grpo_ar_lopti.py per value of a flag."""
    return [f"{flag} {value}: grpo_ar_lopti.py --{flag} {value} {others}" for value in values]


def with_parts(base, script, alpha):
    """Return entries of a script with AR alone, Lopti alone, Lopti's stages in reverse order, and both."""
    parts = {
        "ar": f"--alpha {alpha} --eta 0",
        "lopti": "--alpha 0 --eta 0.5",
        "high, then low": "--alpha 0 --eta 0.5 --lopti_stages high,low",
        "ar+lopti": f"--alpha {alpha} --eta 0.5",
    }
    return [f"{base}{name}: {script} {flags}" for name, flags in parts.items()]


SUITES = {  # name: (flags of all entries, entries); the papers' ablations
    "comparison": (QUICK, ENTRIES),
    # The scripts of the course, and those that repair GRPO.
    "family": (
        QUICK,
        [
            "grpo: grpo.py",
            "reinforce: reinforce.py",
            "rloo: rloo.py",
            "maxrl: maxrl.py",
            "dr. grpo: dr_grpo.py",
            "gdpo: gdpo.py",
            "ppo: ppo.py",
            "dppo: dppo.py",
            "sapo: sapo.py",
            "grpo tis: grpo_tis.py",
        ],
    ),
    # AR-Lopti, fig. 6a: the low-probability tokens alone, or the others alone; fig. 6b: the stages in reverse order.
    "stages": (
        QUICK,
        [
            "grpo: grpo.py",
            "lopti: grpo_ar_lopti.py --alpha 0 --eta 0.5",
            "high, then low: grpo_ar_lopti.py --alpha 0 --eta 0.5 --lopti_stages high,low",
            "low alone: grpo_ar_lopti.py --alpha 0 --eta 0.5 --lopti_stages low",
            "high alone: grpo_ar_lopti.py --alpha 0 --eta 0.5 --lopti_stages high",
        ],
    ),
    # AR-Lopti, fig. 6c: AR alone; "ar" is AR with α 0.3.
    "alpha": (
        QUICK,
        [
            "grpo: grpo.py",
            "ar: grpo_ar_lopti.py --alpha 0.3 --eta 0",
            *sweep("alpha", (0.2, 0.5, 1), "--eta 0"),
        ],
    ),
    # Fig. 6d: Lopti alone ("lopti" has η 0.5), next to GRPO with equal optimizer steps: Lopti makes two of one update.
    "eta": (
        QUICK,
        [
            "grpo: grpo.py",
            "grpo 4 updates: grpo.py --updates_per_step 4",
            "lopti: grpo_ar_lopti.py --alpha 0 --eta 0.5",
            *sweep("eta", (0.1, 0.3, 0.9), "--alpha 0"),
        ],
    ),
    # The effect of AR and Lopti on three algorithms, next to equally many optimizer steps without them.
    "control": (
        QUICK,
        [
            "grpo: grpo.py",
            "grpo 4 updates: grpo.py --updates_per_step 4",
            *with_parts("", "grpo_ar_lopti.py", 0.3),
            "reinforce++: reinforce_pp.py",
            "reinforce++ 4 updates: reinforce_pp.py --updates_per_step 4",
            *with_parts("reinforce++ ", "reinforce_pp_ar_lopti.py", 0.1),
            "dapo: dapo.py",
            "dapo 4 updates: dapo.py --updates_per_step 4",
            *with_parts("dapo ", "dapo_ar_lopti.py", 0.3),
        ],
    ),
    # ACPO, Table 3, off-policy. Every entry averages the responses' means, as the paper's release does: only the clip
    # differs. The numbers are the largest and the average clip range of the saved run "acpo, 16 updates", seed 0.
    "clip": (
        SHORT,
        [
            "grpo's clip, 16 updates: acpo.py --clip_alpha 0 --updates_per_step 16",
            "dapo's clip, 16 updates: acpo.py --clip_alpha 0 --clip_base_high 0.3 --updates_per_step 16",
            "acpo, 16 updates: acpo.py --updates_per_step 16",
            "dapo, clip-high at acpo's largest, 16 updates: acpo.py --clip_alpha 0 --clip_base_high 2.393"
            " --updates_per_step 16",
            "grpo, clip at acpo's average, 16 updates: acpo.py --clip_alpha 0 --clip_base 0.257 --updates_per_step 16",
        ],
    ),
    # Too far off-policy: ten times the learning rate. The CISPO of ACPO's Table 1(a) (`--gated`) collapses with 16
    # updates and not with 2. Clip ranges without effect mean no clip.
    "collapse": (
        f"{SHORT} --lr 1e-3",
        [
            "grpo, 2 updates, lr 1e-3: grpo.py --updates_per_step 2",
            "grpo, 16 updates, lr 1e-3: grpo.py --updates_per_step 16",
            "no clip, 16 updates, lr 1e-3: grpo.py --clip_low 1 --clip_high 1e9 --updates_per_step 16",
            "cispo, gated, 2 updates, lr 1e-3: cispo.py --gated --updates_per_step 2",
            "cispo, gated, 16 updates, lr 1e-3: cispo.py --gated --updates_per_step 16",
            "acpo, 16 updates, lr 1e-3: acpo.py --updates_per_step 16",
            "acpo, clip_max 0.4, 16 updates, lr 1e-3: acpo.py --clip_max 0.4 --updates_per_step 16",
            # ACPO without its range, and with GRPO's KL term.
            "acpo, clip_alpha 0, 16 updates, lr 1e-3: acpo.py --clip_alpha 0 --updates_per_step 16",
            "acpo, KL, 16 updates, lr 1e-3: acpo.py --kl_coef 0.001 --updates_per_step 16",
        ],
    ),
    # Does the order of the short comparison persist?
    "long": (
        LONG,
        [
            "grpo, 40 steps: grpo.py",
            "grpo 4 updates, 40 steps: grpo.py --updates_per_step 4",
            "lopti, 40 steps: grpo_ar_lopti.py --alpha 0 --eta 0.5",
            "ar+lopti, 40 steps: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
            "acpo, 40 steps: acpo.py",
        ],
    ),
    # Does Lopti also beat GRPO with equal optimizer steps at a third and three times the learning rate? "long" has
    # the same flags except for the steps, so its evaluation at step 8 is the comparison at 1e-4.
    "learning_rate": (
        "--steps 8 --eval_every 4 --eval_size 500 --dtype float32",
        [
            f"lr {lr}{also}: {script} --lr {lr}"
            for lr in ("3e-5", "3e-4")
            for also, script in (
                ("", "grpo.py --updates_per_step 4"),
                (", lopti", "grpo_ar_lopti.py --alpha 0 --eta 0.5"),
            )
        ],
    ),
    "llm": (  # each run takes longer: --limit 30
        SMOLLM2,
        [
            "grpo, SmolLM2: grpo.py",
            "grpo 2 updates, SmolLM2: grpo.py --updates_per_step 2",  # as many optimizer steps as Lopti
            "dapo, SmolLM2: dapo.py",
            "ar+lopti, SmolLM2: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
        ],
    ),
    "calculator": (  # --limit 30
        f"{TURNS} --task calculator --eval_size 32",
        [
            "agent, SmolLM2: grpo_multi_turn.py --max_turns 3 --steps 5 --eval_every 5",
            "two calls, SmolLM2: grpo_multi_turn.py --operations 2 --max_turns 4 --max_response_tokens 160 --steps 8"
            " --eval_every 4",
        ],
    ),
    "guess": (  # what keeps the entropy up? --limit 60
        f"{TURNS} --task guess --max_turns 5 --eval_temperature 1 --eval_size 60 --eval_every 7 --steps 14",
        [
            "guess, SmolLM2: grpo_multi_turn.py --lr 3e-5",
            "guess, KL term, SmolLM2: grpo_multi_turn.py --lr 3e-5 --kl_coef 0.05",
        ],
    ),
    "puzzles": (  # needs `make taught`; a run takes over an hour on one core: --limit 200
        SMOLLM2_KK,
        [
            "grpo, puzzles: grpo.py",
            "grpo 2 updates, puzzles: grpo.py --updates_per_step 2",  # as many optimizer steps as Lopti
            "ar+lopti, puzzles: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
            "dapo, puzzles: dapo.py",
            "acpo, puzzles: acpo.py",
        ],
    ),
    "puzzles_384": (  # this length truncates a tenth of the careful solutions
        SMOLLM2_KK,
        ["grpo, puzzles: grpo.py", "grpo 384 tokens, puzzles: grpo.py --max_response_tokens 384"],
    ),
    "lora": (  # LoRA's rank, at ten times the learning rate; otherwise the same flags
        SMOLLM2,
        [
            "ar+lopti, SmolLM2: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
            *(
                f"rank {rank}, SmolLM2: grpo_ar_lopti.py --alpha 0.3 --eta 0.5 --lora_rank {rank} --lr 5e-4"
                for rank in (1, 8, 32)
            ),
        ],
    ),
    "lag": (  # stale responses: their age, and corrections for it
        STALE,
        [
            "lag 0: grpo_stale.py --lag 0 --correction none",
            *(
                f"lag {lag}, {correction}: grpo_stale.py --lag {lag} --correction {correction}"
                for lag in (1, 2, 4, 8)
                for correction in ("none", "ppo", "tis", "icepop")
            ),
        ],
    ),
    "updates": (  # fig. 19: the 80/20 rule near and far off-policy
        SHORT,
        [
            f"{n} updates{also}: {script}.py --updates_per_step {n}"
            for n in (2, 4, 8, 16)
            for also, script in (("", "grpo"), (", 80/20", "entropy_top"))
        ],
    ),
}
SEEDS = {"control": 8}  # runs per entry; other suites: three
# Suites whose second figure is on no page.
ONE_PICTURE = "family alpha eta control collapse learning_rate updates llm lora puzzles puzzles_384".split()
ONE_PICTURE += ["calculator", "guess", "lag"]

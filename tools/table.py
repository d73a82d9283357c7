"""Writes the README's table of the scripts: each one's objective, length and difference from its parent.

    python tools/table.py            puts the table into README.md, between its two marks
    python tools/table.py --check    changes nothing; exit code 1 if the table in README.md is out of date

The lengths and differences come from the scripts, the descriptions from TEXTS below.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family

BEGIN, END = "<!-- variants: begin -->", "<!-- variants: end -->"
TEXTS = {  # script: (its objective, the source); formulas have ∣ as the bar, because | would end the table's cell
    "grpo": (
        "`1/Σ∣o_i∣ Σ_i Σ_t min[ρA, clip(ρ, 1−ε_low, 1+ε_high)A] − β·k3`, with A the reward normalised in its group",
        "AR-Lopti paper, eq. 1; Shao et al. 2024",
    ),
    "reinforce": (
        "`1/Σ∣o_i∣ Σ_i Σ_t A·log π`, with `A = r − mean` over the step: no ratio, no clip, no groups, no KL term; one "
        "update a step. The first script to read",
        "REINFORCE (Williams 1992)",
    ),
    "rloo": (
        "the same with `A = r − mean of the group's other rewards`; no KL term",
        "RLOO (Ahmadian et al. 2024)",
    ),
    "dr_grpo": (
        "`1/(n·L) Σ_i Σ_t min[ρA, clip(ρ, 1−ε_low, 1+ε_high)A]` with `A = r − mean` of the group: divided neither by a "
        "standard deviation nor by lengths, but by the largest length L; no KL term",
        "Dr. GRPO (Liu et al. 2025)",
    ),
    "ppo": (
        "the same with A from a value model, trained beside the policy: generalised advantages (GAE), whitened over "
        "the step; the KL term is in the rewards",
        "PPO, GAE (Schulman et al. 2017, 2015)",
    ),
    "grpo_ar_lopti": (
        "the same with `A ← (α·π_old + 1 − α)·A` (AR, eq. 4), "
        "in two stages: the tokens with `π_old ≤ η`, then the others (Lopti, Algorithm 1)",
        "*Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs*",
    ),
    "reinforce_pp": (
        "the same with `A_t = (R_t − μ)/σ` over all response tokens of the step, not by group; the KL term is in the "
        "return, `R_t = r − β·Σ_{j≥t} log(π_old/π_ref)`, and not in the loss",
        "REINFORCE++ (Hu 2025); AR-Lopti paper, eq. 20 and 21",
    ),
    "dapo": (
        "the same on groups whose rewards are not all equal (dynamic sampling puts new prompts in place of others), "
        "with `r + min[0, (L − B − ∣o∣)/B]` as the reward (overlong shaping: the last B of L tokens cost up to 1)",
        "DAPO (Yu et al. 2025)",
    ),
    "reinforce_pp_ar_lopti": (
        "that of `reinforce_pp.py` with AR, α 0.1, and in Lopti's two stages",
        "AR-Lopti paper, Appendix D.1.1, Table 7",
    ),
    "dapo_ar_lopti": (
        "that of `dapo.py` with AR and in Lopti's two stages",
        "AR-Lopti paper, Appendix D.1.2, Table 8",
    ),
    "acpo": (
        "`1/n Σ_i 1/∣o_i∣ Σ_t min[ρA, clip(ρ, 1−ε_a, 1+ε_a)A]`, where `ε_a = ε_b + α·σ_a` is wider for a bin of "
        "probabilities π in which ρ has a larger standard deviation σ_a",
        "*What Are Key Factors for Updates in RL for LLM Reasoning?* (ACPO), eq. 8",
    ),
    "gspo": (
        "`1/n Σ_i min[s_i·A, clip(s_i, 1−ε_low, 1+ε_high)·A]`, where s_i, the geometric mean of a response's ρ, takes "
        "the place of each token's; no KL term",
        "GSPO (Zheng et al. 2025)",
    ),
    "cispo": (
        "`1/Σ∣o_i∣ Σ_i Σ_t sg[clip(ρ, 1−ε_low, 1+ε_high)]·A·log π`: the clip bounds a token's weight and cuts none "
        "off; no KL term",
        "CISPO (Chen et al. 2025, MiniMax-M1), with the ACPO release's bounds",
    ),
    "dppo": (
        "`1/Σ∣o_i∣ Σ_i Σ_t sg[min(ρ, 20)]·A·log π` over the tokens whose π has moved by at most δ from π_old in the "
        "direction of A: a bound on the difference, not on the ratio; no KL term",
        "DPPO (Qi et al. 2026)",
    ),
    "sapo": (
        "`1/n Σ_i 1/∣o_i∣ Σ_t 4/τ·sigmoid(τ(ρ − 1))·A`: a gate that closes softly in place of the clip; no KL term",
        "SAPO (Gao et al. 2025)",
    ),
    "grpo_tis": (
        "the same with each token weighed by `min(π_old/π_sampler, C)`: sampler and trainer differ, and this corrects "
        "for it; `--correction icepop` leaves out the tokens on which they differ much",
        "TIS (Yao et al. 2025), IcePop",
    ),
    "entropy_top": (
        "the same over the tokens whose entropy is among the mini-batch's highest 20% (`H ≥ τ`), still divided by all: "
        "`1/Σ∣o_i∣ Σ_i Σ_t 1[H ≥ τ]·{…}`",
        "*Beyond the 80/20 Rule* (Wang et al. 2025); AR-Lopti paper, fig. 19",
    ),
    "archer": (
        "the same with two kinds of tokens: those above the 0.8 entropy quantile of their response have ε 0.5 and no "
        "KL term, the others ε 0.2 and β 0.001",
        "*Stabilizing Knowledge, Promoting Reasoning* (Archer, Wang et al. 2025)",
    ),
}


@dataclass
class Args:
    """The table's place."""

    check: bool = False  # only check if it is up to date
    readme: Path = family.ROOT / "README.md"  # the file with the marks
    folder: Path = family.ROOT  # the scripts' folder


def table(folder=family.ROOT):
    """The table as Markdown, and below it the median of "changed" (of an even number, the larger of the middle two).

    ValueError if a script is not in TEXTS.
    """
    lines = ["| script | what it maximises | from | code lines | changed |", "|---|---|---|---|---|"]
    differences = []
    for stem in family.family(folder):
        if stem not in TEXTS:
            raise ValueError(f"{stem}.py has no words for the table: add them to TEXTS in tools/table.py")
        text, changed = family.source(stem, folder), ""
        if parent := family.PARENT.get(stem):
            differences.append(family.changed(family.source(parent, folder), text))
            changed = str(differences[-1]) + (f" (`{parent}.py`)" if parent != "grpo" else "")
        below = family.depth(stem) - 1  # children of grpo.py are not indented
        name = "&emsp;" * (below - 1) + "└ " * (below > 0) + f"`{stem}.py`"
        cells = [name, *TEXTS[stem], str(len(family.code_lines(text))), changed]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    if differences:
        lines += ["", f"Changed, median: {median_high(differences)} lines."]
    return "\n".join(lines) + "\n"


def with_table(text, new):
    """The README's text with this table between its marks. ValueError unless each mark occurs once, in order."""
    if [text.count(mark) for mark in (BEGIN, END)] != [1, 1] or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README must have the marks {BEGIN} and {END}, each once and in this order")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{new}\n{text[text.index(END) :]}"


def main(args):
    try:
        text = args.readme.read_text(encoding="utf-8")
        new = with_table(text, table(args.folder))
    except (ValueError, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if args.check:
        print(f"the table in {args.readme} is {'up to date' if new == text else 'out of date: python tools/table.py'}")
        sys.exit(int(new != text))
    args.readme.write_text(new, encoding="utf-8")
    print(f"{'left' if new == text else 'wrote'} {args.readme}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

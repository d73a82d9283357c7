"""The tables of the scripts: in the README what each one is, in docs/objectives.md what it maximises; and their tree.

The lengths and differences come from the scripts, the formulas from the pages of docs/algorithms, and the descriptions
from SHORT and TEXTS below. tools/maintain/pages.py writes them into their files.
"""

from dataclasses import dataclass
from statistics import median_high

from tools import family

MARKS = "variants"
SHORT = {  # script: what it is, for the README
    "grpo": "the reward normalised in its group of responses, PPO's clip, a KL term: the root of the tree",
    "reinforce": "reward minus the step's mean, times log π; no ratio, no clip, no groups: read it first",
    "rloo": "reward minus the mean of the group's other rewards",
    "maxrl": "reward minus the group's mean, divided by that mean: rarely solved prompts count more",
    "sft": "no reinforcement learning: given responses instead of sampled ones, all with weight 1",
    "opd": "a teacher's log-probability of each token minus the student's, in place of rewards: distillation",
    "dr_grpo": "divides neither by the standard deviation nor by lengths",
    "ppo": "a value model, trained beside the policy, gives the advantages (GAE)",
    "grpo_ar_lopti": "improbable tokens weigh less (AR) and are updated first, on their own (Lopti)",
    "reinforce_pp": "normalised over the whole step; the KL term is in the reward",
    "reinforce_pp_ar_lopti": "reinforce_pp.py with AR and Lopti",
    "dapo": "drops groups without a difference, samples others; penalises overlong responses",
    "dapo_ar_lopti": "dapo.py with AR and Lopti",
    "acpo": "a clip range for each bin of probability, wider where the ratio spreads more",
    "gspo": "one ratio for a whole response",
    "cispo": "the clip bounds a token's weight and never drops the token",
    "dppo": "bounds the change of the probability, not its ratio",
    "sapo": "a gate that closes softly in place of the clip",
    "grpo_tis": "corrects for the difference between sampler and trainer (TIS, IcePop, DeepSeek-V3.2's mask)",
    "entropy_top": "learns from the 20 % of tokens with the highest entropy",
    "archer": "a wider clip and no KL term for tokens of high entropy",
}
TEXTS = {  # script: (what its objective's formulas don't say, the source)
    "grpo": (
        r"$\mu_i$ and $\sigma_i$ are mean and standard deviation of the rewards in the group of response $i$",
        "AR-Lopti paper, eq. 1; Shao et al. 2024",
    ),
    "reinforce": (
        r"$\mu$ is the step's mean; one update a step; no clip, no groups, no KL term. The first script to read",
        "REINFORCE (Williams 1992)",
    ),
    "rloo": (
        r"the mean of the group's other rewards is the baseline; $\beta$ is 0 by default",
        "RLOO (Ahmadian et al. 2024)",
    ),
    "maxrl": (
        "$r$ is 1 for a correct response and 0 otherwise; $J_T$, with $T = G - 1$ and $p$ the probability of a correct "
        r"response, is what this maximises in expectation: the first terms of $\log p$",
        "MaxRL (Tajwar et al. 2026)",
    ),
    "sft": (
        "of given responses: no sampler, no reward, no advantage. What comes before, if no response is ever right",
        "maximum likelihood",
    ),
    "opd": (
        r"the mean gradient is that of $-\text{KL}(\pi \Vert \pi_{\text{teacher}})$ at each token; no reward is in it",
        "on-policy distillation (Lu and Thinking Machines Lab 2025)",
    ),
    "dr_grpo": (
        "divided neither by a standard deviation nor by lengths, but by the largest length $L$; no KL term",
        "Dr. GRPO (Liu et al. 2025)",
    ),
    "ppo": (
        "$V$ is a value model, trained beside the policy; generalised advantages (GAE), whitened over the step",
        "PPO, GAE (Schulman et al. 2017, 2015)",
    ),
    "grpo_ar_lopti": (
        r"AR, eq. 4; in two stages: tokens with $\pi_{\text{old}} \le \eta$, then the others (Lopti, Algorithm 1)",
        "*Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs*",
    ),
    "reinforce_pp": (
        r"$\mu$ and $\sigma$ are those of all tokens of the step, not of a group; the KL term is in the return",
        "REINFORCE++ (Hu 2025); AR-Lopti paper, eq. 20 and 21",
    ),
    "dapo": (
        "on groups whose rewards differ (dynamic sampling puts new prompts in place of others); the last $B$ "
        "of $L$ tokens cost up to 1 (overlong shaping)",
        "DAPO (Yu et al. 2025)",
    ),
    "reinforce_pp_ar_lopti": (r"in Lopti's two stages, with $\alpha$ 0.1", "AR-Lopti paper, Appendix D.1.1, Table 7"),
    "dapo_ar_lopti": (
        "in Lopti's two stages, on groups like those of `dapo.py`",
        "AR-Lopti paper, Appendix D.1.2, Table 8",
    ),
    "acpo": (
        r"wider for a bin $a$ of probabilities in which $\rho$ has a larger standard deviation $\sigma_a$",
        "*What Are Key Factors for Updates in RL for LLM Reasoning?* (ACPO), eq. 8",
    ),
    "gspo": (
        r"the geometric mean of a response's $\rho$ takes the place of each token's; no KL term",
        "GSPO (Zheng et al. 2025)",
    ),
    "cispo": (
        "the clip bounds a token's weight and cuts none off; no KL term",
        "CISPO (Chen et al. 2025, MiniMax-M1), with the ACPO release's bounds",
    ),
    "dppo": (
        "and $M_{i,t} = 1$ otherwise: a bound on the difference of the probabilities, not on their ratio; no KL term",
        "DPPO (Qi et al. 2026)",
    ),
    "sapo": ("a gate that closes softly in place of the clip; no KL term", "SAPO (Gao et al. 2025)"),
    "grpo_tis": (
        "sampler and trainer differ, and $w$ corrects for it; `--correction icepop` leaves out tokens on which they "
        "differ much, `--mask sequence` bad responses that have become improbable since they were sampled",
        "TIS (Yao et al. 2025), IcePop, DeepSeek-V3.2",
    ),
    "entropy_top": (
        "the tokens whose entropy is among the mini-batch's highest 20 %, still divided by all",
        "*Beyond the 80/20 Rule* (Wang et al. 2025); AR-Lopti paper, fig. 19",
    ),
    "archer": (
        r"tokens above the 0.8 entropy quantile of their response have $\epsilon$ 0.5 and no KL term, the others "
        r"$\epsilon$ 0.2 and $\beta$ 0.001",
        "*Stabilizing Knowledge, Promoting Reasoning* (Archer, Wang et al. 2025)",
    ),
}


def short_table():
    """What each script is, as Markdown, with links to its page; below it the median of "changed".

    ValueError if a script is not in SHORT.
    """
    lines = ["| script | what it is | code lines | changed |", "|---|---|---|---|"]
    for row in rows():
        if row.stem not in SHORT:
            entry = f'"{row.stem}": "what it is"'
            raise ValueError(f"{row.stem}.py has no words for the table: add them to SHORT in table.py, {entry}")
        page = f"docs/algorithms/{row.stem}.md"
        changed = f"[{row.changed}]({page}#the-difference)" if row.changed else ""
        cells = [f"{row.indent}[`{row.stem}.py`]({page})", SHORT[row.stem], str(row.length), changed]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join([*lines, *median()]) + "\n"


def table():
    """What each script maximises, and the source, as Markdown.

    ValueError if a script is not in TEXTS.
    """
    lines = ["| script | what it maximises |", "|---|---|"]
    for row in rows():
        if row.stem not in TEXTS:
            entry = f'"{row.stem}": ("what its formulas don\'t say", "the source")'
            raise ValueError(f"{row.stem}.py has no words for the table: add them to TEXTS in table.py, {entry}")
        words, source = TEXTS[row.stem]
        formulas = "$" + ",$&emsp; $".join(objective(row.stem)) + "$"
        name = f"{row.indent}[`{row.stem}.py`](algorithms/{row.stem}.md)"
        lines.append(f"| {name} <br> {source} | {formulas} <br> {words} |")
    return "\n".join(lines) + "\n"


def objective(stem):
    """The equations, in LaTeX, of "The objective" on a script's page."""
    path = family.ROOT / "docs" / "algorithms" / f"{stem}.md"
    if not path.exists():
        raise ValueError(f"{path} is missing: it is written by hand, from a copy of the parent's page")
    section = path.read_text(encoding="utf-8").partition("\n## The objective\n")[2].partition("\n## ")[0]
    formulas = [" ".join(formula.split()) for formula in section.split("\n$$\n")[1::2]]
    return [formula for formula in formulas if " = " in formula]


@dataclass
class Row:
    """The facts of one script."""

    stem: str
    parent: str | None
    indent: str  # what stands before the name of a script that did not grow from grpo.py
    length: int  # lines of code
    changed: int | None  # lines of code added and removed, against the parent


def rows():
    """The Rows of all scripts, in tree order."""
    made = []
    for stem in family.family():
        parent, text = family.PARENT.get(stem), family.source(stem)
        changed = family.changed(family.source(parent), text) if parent else None
        below = family.depth(stem) - 1  # children of grpo.py are not indented
        indent = "&emsp;" * (below - 1) + "└ " * (below > 0)
        made.append(Row(stem, parent, indent, len(family.code_lines(text)), changed))
    return made


def median():
    """The lines below a table: the median of "changed" (of an even number, the larger of the middle two)."""
    differences = [row.changed for row in rows() if row.parent]
    return ["", f"Changed, median: {median_high(differences)} lines."] if differences else []


def drawing():
    """The tree of the scripts as SVG, in the colour of the system's light or dark (the site gives it that of its text).

    Beside each script stands how many lines of code differ from its parent's.
    """
    places, lines, texts = {}, [], []
    for number, row in enumerate(rows()):
        x, y = places[row.stem] = 10 + 60 * family.depth(row.stem), 18 + 24 * number
        texts.append(f'<text x="{x}" y="{y}">{row.stem}.py</text>')
        if row.parent:
            left, top = places[row.parent]
            lines.append(f"M{left + 8} {top + 6}V{y - 5}H{x - 6}")
            texts.append(f'<text x="430" y="{y}" text-anchor="end">{row.changed} lines</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" id="family" viewBox="0 0 440 {y + 12}" width="440" role="img"
  font-family="monospace" font-size="14" aria-label="What grew from what, and how many lines of code differ">
<style>#family {{ color: #222; fill: currentColor }}
@media (prefers-color-scheme: dark) {{ #family {{ color: #ddd }} }}</style>
<path d="{" ".join(lines)}" fill="none" stroke="currentColor" shape-rendering="crispEdges"/>
{chr(10).join(texts)}
</svg>
"""

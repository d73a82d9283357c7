"""Writes the tables of the scripts: in the README what each one is, in docs/objectives.md what it maximises.

    python tools/table.py            prints the short table, puts both into their files, between the marks, and draws
                                     docs/family.svg
    python tools/table.py --check    changes nothing; exit code 1 if a table or the drawing is out of date

The lengths and differences come from the scripts, the descriptions from SHORT and TEXTS below.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high

import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family, generated

BEGIN, END = "<!-- variants: begin -->", "<!-- variants: end -->"
SHORT = {  # script: what it is, for the README
    "grpo": "the reward normalised in its group of responses, PPO's clip, a KL term: the root of the tree",
    "reinforce": "reward minus the step's mean, times log π; no ratio, no clip, no groups: read it first",
    "rloo": "reward minus the mean of the group's other rewards",
    "sft": "no reinforcement learning: given responses instead of sampled ones, all with weight 1",
    "dr_grpo": "divides neither by the standard deviation nor by lengths",
    "ppo": "a value model, trained beside the policy, gives the advantages (GAE)",
    "grpo_ar_lopti": "improbable tokens weigh less (AR) and are updated first, on their own (Lopti)",
    "reinforce_pp": "normalised over the whole step; the KL term is in the reward",
    "reinforce_pp_ar_lopti": "reinforce_pp.py with AR and Lopti",
    "dapo": "drops groups without a difference, samples others; penalises overlong responses",
    "dapo_ar_lopti": "dapo.py with AR and Lopti",
    "acpo": "a clip range for each bin of probability, wider where ρ spreads more",
    "gspo": "one ratio for a whole response",
    "cispo": "the clip bounds a token's weight and never drops the token",
    "dppo": "bounds the change of the probability, not its ratio",
    "sapo": "a gate that closes softly in place of the clip",
    "grpo_tis": "corrects for the difference between sampler and trainer (TIS, IcePop)",
    "entropy_top": "learns from the 20 % of tokens with the highest entropy",
    "archer": "a wider clip and no KL term for tokens of high entropy",
}
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
        "that of `reinforce.py` with `A = r − mean of the group's other rewards`, where `--kl_coef` takes "
        "`β·log(π/π_ref)` of the response off r",
        "RLOO (Ahmadian et al. 2024)",
    ),
    "sft": (
        "`1/Σ∣o_i∣ Σ_i Σ_t log π` of given responses: no sampler, no reward, no advantage. What comes before, if no "
        "response is ever right",
        "maximum likelihood",
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
    """The tables' places."""

    check: bool = False  # only check if they are up to date
    readme: Path = family.ROOT / "README.md"  # the file with the short table's marks
    objectives: Path = family.ROOT / "docs" / "objectives.md"  # the file with the long table's marks
    drawing: Path = family.ROOT / "docs" / "family.svg"  # what grew from what
    folder: Path = family.ROOT  # the scripts' folder


def short_table(folder=family.ROOT):
    """What each script is, as Markdown, with links to its page; below it the median of "changed".

    ValueError if a script is not in SHORT.
    """
    lines = ["| script | what it is | code lines | changed |", "|---|---|---|---|"]
    for row in rows(folder):
        if row.stem not in SHORT:
            raise ValueError(f"{row.stem}.py has no words for the table: add them to SHORT in tools/table.py")
        page = f"docs/algorithms/{row.stem}.md"
        changed = f"[{row.changed}]({page}#the-difference)" if row.changed else ""
        cells = [f"{row.indent}[`{row.stem}.py`]({page})", SHORT[row.stem], str(row.length), changed]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join([*lines, *median(folder)]) + "\n"


def table(folder=family.ROOT):
    """What each script maximises, and the source, as Markdown.

    ValueError if a script is not in TEXTS.
    """
    lines = ["| script | what it maximises | from |", "|---|---|---|"]
    for row in rows(folder):
        if row.stem not in TEXTS:
            raise ValueError(f"{row.stem}.py has no words for the table: add them to TEXTS in tools/table.py")
        cells = [f"{row.indent}[`{row.stem}.py`](algorithms/{row.stem}.md)", *TEXTS[row.stem]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@dataclass
class Row:
    """The facts of one script."""

    stem: str
    parent: str | None
    indent: str  # what stands before the name of a script that did not grow from grpo.py
    length: int  # lines of code
    changed: int | None  # lines of code added and removed, against the parent


def rows(folder):
    """The Rows of all scripts in a folder, in tree order."""
    made = []
    for stem in family.family(folder):
        parent, text = family.PARENT.get(stem), family.source(stem, folder)
        changed = family.changed(family.source(parent, folder), text) if parent else None
        below = family.depth(stem) - 1  # children of grpo.py are not indented
        indent = "&emsp;" * (below - 1) + "└ " * (below > 0)
        made.append(Row(stem, parent, indent, len(family.code_lines(text)), changed))
    return made


def median(folder):
    """The lines below a table: the median of "changed" (of an even number, the larger of the middle two)."""
    differences = [row.changed for row in rows(folder) if row.parent]
    return ["", f"Changed, median: {median_high(differences)} lines."] if differences else []


def show(folder):
    """Prints the short table."""
    shown = Table("script", "what it is", box=None, pad_edge=False)
    for title in ("code lines", "changed"):
        shown.add_column(title, justify="right")
    for row in rows(folder):
        indent = row.indent.replace("&emsp;", " ")
        shown.add_row(f"{indent}{row.stem}.py", SHORT[row.stem], str(row.length), str(row.changed or ""))
    Console().print(shown)


def drawing(folder=family.ROOT):
    """The tree of the scripts as SVG, in the colour of the system's light or dark (the site gives it that of its text).

    Beside each script stands how many lines of code differ from its parent's.
    """
    places, lines, texts = {}, [], []
    for number, row in enumerate(rows(folder)):
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


def with_table(text, new):
    """A file's text with this table between its marks. ValueError unless each mark occurs once, in order."""
    if [text.count(mark) for mark in (BEGIN, END)] != [1, 1] or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the file must have the marks {BEGIN} and {END}, each once and in this order")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{new}\n{text[text.index(END) :]}"


def main(args):
    try:
        tables = {args.readme: short_table(args.folder), args.objectives: table(args.folder)}
        new = {path: with_table(path.read_text(encoding="utf-8"), made) for path, made in tables.items()}
        new[args.drawing] = drawing(args.folder)
    except (ValueError, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if not args.check:
        show(args.folder)
    generated.keep(new, args.check, "python tools/table.py")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

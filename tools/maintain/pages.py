"""Write all generated texts: tables and worked examples of the algorithms, claims, numbers of recorded runs.

    python -m tools.maintain.pages

Pages are written by hand. Generated parts are between <!-- NAME: begin --> and <!-- NAME: end -->: the tables of
README.md and docs/objectives.md, responses before and after training in docs/first_runs.md, and in docs/algorithms the
reading order and the worked examples (example.py). docs/claims.md is generated as a whole (claims.py). Below <!-- kept
runs: … --> a table has the numbers of recorded runs. It needs no GPU and no vLLM.

Comments at the top of a script's page hold facts that only a person knows: `short` describes the script, for the
README; `open` completes the formulas of its objective; `source`; `columns`, the columns of a table of tokens in its
example. A page without `columns` uses those of its script's parent.
"""

import functools
import itertools
import json
import math
import re
from statistics import fmean, median_high, stdev

import tyro
from rich.console import Console

from runtime import flags, terminal
from tools import combine, family, kept, texts
from tools.maintain import claims, example, notebook, updates

ROOT = family.ROOT
FOLDER = ROOT / "docs" / "algorithms"
TITLES = {  # titles of a worked example's columns, as text: a program that reads pages aloud finds none in formulas
    "old": "π<sub>old</sub>",
    "new": "π",
    "ref": "π<sub>ref</sub>",
    "sampler": "π<sub>sampler</sub>",
    "entropy": "*H* at sampling",
    "entropy_new": "*H* now",
    "value": "*V*<sub>old</sub>",
    "logp": "log π",
    "ratio": "ρ",
    "difference": "π − π<sub>old</sub>",
    "clip_range": "ε<sub>a</sub>",
    "correction": "*w*",
    "icepop": "*w* (IcePop)",
    "reasoning": "reasoning",
    "in_loss": "*H* ≥ τ",
    "k1": "*k*<sub>1</sub>",
    "return": "*R*",
    "estimate": "*Â*",
    "ar_weight": "AR's factor",
    "advantages": "*A*",
    "left": "kept fraction of ρ*A*",
    "k3": "*k*<sub>3</sub>",
    "stage": "stage",
    "first": "weight, first update",
    "second": "weight, second update",
    "second_none": "none",
    "second_ppo": "ppo",
    "second_icepop": "icepop",
}
OTHER_TITLES = {
    "gspo": {"ratio": "*s*", "left": "kept fraction of *sA*"},
    "sapo": {"left": "*f′*(ρ)"},
    "reinforce": {"second": "weight"},
    "grpo_stale": {"second": "tis"},
    "opd": {"ref": "π<sub>teacher</sub>", "second": "weight"},
    "sdpo": {"ref": "π with the hint", "second": "weight"},
}
LADDER = {  # the ladder's tables: title, the table whose column is shown too, script, which update, settings
    "reinforce": ("REINFORCE", None, "reinforce", "second", {}),
    "rloo": ("RLOO", "reinforce", "rloo", "second", {}),
    "normalised": ("3a", "rloo", "grpo", "first", {"kl_coef": 0}),
    "clipped": ("3b", "normalised", "grpo", "second", {"kl_coef": 0}),
    "grpo": ("3c: GRPO", "clipped", "grpo", "second", {}),
    "dr_grpo": ("Dr. GRPO", "grpo", "dr_grpo", "second", {}),
    "ppo": ("PPO", "grpo", "ppo", "second", {}),
}
COMMENT = re.compile(r"^<!-- (short|open|source|columns): (.+?)\s-->$", re.MULTILINE | re.DOTALL)
KEPT = re.compile(r"<!-- kept runs: (.+?) -->\n\n((?:\|.*\n)+)")
NUMBER = re.compile(r"[-−]?\d[\d.]*(e[-+]\d+)?")


# -------------------------------------------------------------------------------------------------- what a page says


def read(path):
    """Return a page's text. ValueError if it is missing."""
    if not path.exists():
        raise ValueError(f"{path} is missing: it is written by hand, from a copy of the parent's page")
    return path.read_text(encoding="utf-8")


def comments(script, name):
    """Return the texts of a page's comments of this name."""
    return [" ".join(text.split()) for of, text in COMMENT.findall(read(FOLDER / f"{script}.md")) if of == name]


def comment(script, name):
    """Return the text of a page's only comment of this name. ValueError if there is none."""
    found = comments(script, name)
    if len(found) != 1:
        raise ValueError(f"docs/algorithms/{script}.md must have <!-- {name}: … --> once, below its third line")
    return found[0]


def columns_of(script):
    """Return (the script whose page has them, the columns of each table of tokens), from a script or its parents."""
    found = comments(script, "columns")
    return (script, found) if found else columns_of(family.PARENT[script])


def objective(script):
    """Return the equations, in LaTeX, of "The objective" on a script's page."""
    section = read(FOLDER / f"{script}.md").partition("\n## The objective\n")[2].partition("\n## ")[0]
    formulas = [" ".join(formula.split()) for formula in section.split("\n$$\n")[1::2]]
    return [formula for formula in formulas if " = " in formula]


# ------------------------------------------------------------------------------------------------- tables of scripts


def table(titles, rows):
    """Return a Markdown table, with one blank in an empty cell."""
    return texts.table(titles, rows).replace("|  |", "| |").replace("|  |", "| |")


def changed(script):
    """Return the lines of code added and removed, compared with the parent; None without a parent."""
    parent = family.PARENT.get(script)
    return family.changed(family.source(parent), family.source(script)) if parent else None


def indent(script):
    """Return the indentation of a script whose parent is not grpo.py."""
    below = family.depth(script) - 1
    return "&emsp;" * (below - 1) + "└ " * (below > 0)


def short_table():
    """Return a table with each script's description and page; below it the median of the differences."""
    rows = []
    for script in family.family():
        page = f"docs/algorithms/{script}.md"
        difference = f"[{changed(script)}]({page}#the-difference)" if script in family.PARENT else ""
        length = len(family.code_lines(family.source(script)))
        rows.append([f"{indent(script)}[`{script}.py`]({page})", comment(script, "short"), str(length), difference])
    median = median_high(changed(script) for script in family.family()[1:])
    return table(["script", "what it is", "code lines", "changed"], rows) + f"\n\nChanged, median: {median} lines."


def long_table():
    """Return a table with each script's objective, and the source."""
    rows = []
    for script in family.family():
        name = f"{indent(script)}[`{script}.py`](algorithms/{script}.md)"
        formulas = "$" + ",$&emsp; $".join(objective(script)) + "$"
        rows.append([f"{name} <br> {comment(script, 'source')}", f"{formulas} <br> {comment(script, 'open')}"])
    return table(["script", "what it maximises"], rows)


# --------------------------------------------------------------------------------------------------- worked examples


def cell(value):
    """Format a float with three decimals and a typographic minus, a dash if it is NaN; a bool is "yes" or ""."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return str(value)
    return "–" if math.isnan(value) else f"{value:z.3f}".replace("-", "−")


def worked_example(script):
    """Write the responses, the tokens, and acpo.py's bins.

    The rewards are one sentence if the table of tokens has all else: the responses' tokens and advantages.
    """
    found = example.example(script)
    of, tables = columns_of(script)
    titles = TITLES | OTHER_TITLES.get(of, {})
    tables = [names.split() for names in tables]
    of_tokens = [found.advantages[token.response - 1] for token in found.tokens] if found.advantages else []
    is_shown = "advantages" in tables[0]
    is_simple = response_columns(script, found).keys() <= {"reward", "*A*"}
    if is_simple and (not (is_shown and of_tokens) or found.columns["advantages"] == of_tokens):
        parts = [" ".join(response_sentences(found, with_advantages=not is_shown))]
    else:
        parts = ["**The responses**", *response_table(script, found)]
    for names in tables:
        rows = []
        for k, token in enumerate(found.tokens):
            rows.append([*named(token), *(cell(found.columns[name][k]) for name in names)])
        parts += ["**The tokens**"] * (len(parts) > 1 or len(tables) > 1)
        parts.append(table(["response", "token", *(titles[name] for name in names)], rows))
    if found.bins:
        rows = []
        for i, of_bin in enumerate(found.bins):
            edges = f"{i / len(found.bins):.1f} – {(i + 1) / len(found.bins):.1f}"
            rows.append([edges, *(cell(of_bin[name]) for name in ("tokens", "sigma", "clip_range"))])
        parts += ["**The bins**", table(["bin of π", "tokens", "σ<sub>a</sub>", "ε<sub>a</sub>"], rows)]
    return "\n\n".join(parts)


def named(token):
    return [str(token.response), f"`{token.text}`"]


def response_columns(script, found):
    """Return {title: numbers} of the responses, with advantages if all tokens of a response share one."""
    columns = {"reward": example.REWARDS}
    if script == "gdpo":
        columns |= example.PARTS
    if found.penalties:
        columns["penalty"] = found.penalties
    if found.rewards != example.REWARDS:
        columns["*r*"] = found.rewards
    if found.advantages:
        columns["*A*"] = found.advantages
    return columns


def response_sentences(found, with_advantages):
    """Return what a table of tokens leaves to say about the responses."""
    values = {"Rewards": found.rewards} | ({"Advantages": found.advantages} if with_advantages else {})
    number = len(found.rewards)
    texts = [f"{name} of responses 1 to {number}: {', '.join(map(cell, of))}." for name, of in values.items() if of]
    return [*texts, *([mean_of("the rewards", found.rewards)] if found.advantages else [])]


def mean_of(name, values):
    return f"Mean of {name}: {cell(fmean(values))}; standard deviation, with $G - 1$: {cell(stdev(values))}."


def response_table(script, found):
    """Return the table of the responses, and a text about the mean of the rewards if it is used."""
    columns = response_columns(script, found)
    rows = []
    for i, values in enumerate(zip(*columns.values()), 1):
        tokens = " ".join(f"`{token.text}`" for token in found.tokens if token.response == i)
        rows.append([str(i), tokens, *map(cell, values)])
    parts = [table(["response", "tokens", *columns], rows)]
    if found.advantages:
        name = "$r$" if "*r*" in columns else "the rewards"
        normalised = example.PARTS if script == "gdpo" else {name: found.rewards}
        parts += [mean_of(name, values) for name, values in normalised.items()]
    return parts


def all_weights():
    """Return the weights of the twelve tokens at the second update, a row per script."""
    rows = []
    for script in updates.ALGORITHMS:
        found = example.example(script)
        pairs = zip(found.tokens, found.columns["second"])
        weights = [cell(weight) for token, weight in pairs if token is not example.REPLY]
        title = read(FOLDER / f"{script}.md").splitlines()[0].removeprefix("# ")
        rows.append([f"[{title}]({script}.md)", *weights])
    return table(["script", *(" ".join(named(token)) for token in example.TOKENS)], rows)


def ladder_table(name):
    """Return a table of LADDER: the weights of the twelve tokens, beside those of the table before."""
    columns = {}
    for of in filter(None, (LADDER[name][1], name)):
        title, _, script, update, settings = LADDER[of]
        columns[title] = map(cell, example.example(script, **settings).columns[update])
    rows = [[*named(token), *weights] for token, *weights in zip(example.TOKENS, *columns.values())]
    return table(["response", "token", *columns], rows)


# --------------------------------------------------------------------------------------------------------- kept runs


def with_kept_numbers(text):
    """Return the text with the numbers of recorded runs in its tables, each in its present format.

    <!-- kept runs: RUN METRIC, … --> above a table names the content of its columns, if its rows are steps. Otherwise
    it names the content of its rows, below the titles "step N".
    """

    def in_table(match):
        places = [place.split() for place in match[1].split(", ")]
        runs = [kept.run(name)["rows"] for name, _ in places]
        titles, line, *rows = [line.strip("|").split("|") for line in match[2].splitlines()]
        for i, row in enumerate(rows):
            for k, old in enumerate(row[1:]):
                which, step = (k, row[0]) if titles[0].strip() == "step" else (i, titles[k + 1].replace("step", ""))
                if old.strip():
                    [value] = [one[places[which][1]] for one in runs[which] if one["step"] == int(step)]
                    row[k + 1] = NUMBER.sub(lambda number, value=value: in_the_form_of(number[0], value), old)
        return match[0].removesuffix(match[2]) + "".join(f"|{'|'.join(row)}|\n" for row in [titles, line, *rows])

    return KEPT.sub(in_table, text)


def in_the_form_of(old, value):
    """Format a value with as many digits as the old number: "0.573", "2.88e-07", "−3.00"."""
    digits = len(re.sub(r"e.*", "", old).partition(".")[2])
    return f"{value:.{digits}{'e' if 'e' in old else 'f'}}".replace("-", "−" if "e" not in old else "-")


def two_responses(name):
    """Show a response before and after training, as in the terminal. name: docs/NAME.json (pictures.py)."""
    kept = json.loads((ROOT / "docs" / f"{name}.json").read_text(encoding="utf-8"))
    console = Console(width=88, color_system=None)
    with console.capture() as shown:
        console.print(terminal.side_by_side(kept["before"], kept["after"]))
    lines = "\n".join(line.rstrip() for line in shown.get().strip("\n").splitlines())
    count = f"{kept['learned']} of the {kept['kept_problems']} saved responses go"
    accuracy = [row["eval/accuracy"] for row in kept["rows"] if "eval/accuracy" in row]
    size = kept["settings"]["eval_size"]
    words = f"Accuracy on {size} test problems goes from {accuracy[0]:.3f} to {accuracy[-1]:.3f}.\n"
    words += f"{count} from wrong before training to right after it. One of them, as the terminal shows it:"
    return f"{words}\n\n```text\n{lines}\n```"


@functools.cache
def pairs_table():
    """Say which scripts tools/combine.py adds up: per script, its alternatives and its conflicts."""
    scripts = [script for script in family.family() if script not in ("grpo", "sft")]
    others = {script: {"alternatives": [], "conflict": []} for script in scripts}
    num_clean = num_contained = 0
    pairs = list(itertools.combinations(scripts, 2))
    for one, other in pairs:
        kind = combine.kind_of_pair(one, other)
        num_clean += kind == "clean"
        num_contained += kind == "contained"
        if kind in ("alternatives", "conflict"):
            others[one][kind].append(f"`{other}`")
            others[other][kind].append(f"`{one}`")
    rows = []
    for script, found in others.items():
        rows.append([f"`{script}`", ", ".join(found["alternatives"]), ", ".join(found["conflict"])])
    words = f"Of {len(pairs)} pairs, {num_clean} merge cleanly. In {num_contained}, one script contains the other one; "
    words += "the rest is in this table. Without `sft.py`, which samples nothing.\n\n"
    return words + table(["script", "alternatives: both change the objective", "conflicts elsewhere"], rows)


# ------------------------------------------------------------------------------------------------------------- pages


def blocks():
    """Return {path: {name of a block: a function that makes it}}."""
    docs, once = ROOT / "docs", functools.partial
    found = {
        ROOT / "README.md": {"variants": short_table},
        docs / "objectives.md": {"variants": long_table},
        docs / "add_a_variant.md": {"pairs": pairs_table},
        docs / "first_runs.md": {name: once(two_responses, name) for name in ("demo", "llm")},
        FOLDER / "README.md": {"weights": all_weights},
        FOLDER / "ladder.md": {name: once(ladder_table, name) for name in LADDER},
    }
    return found | {FOLDER / f"{name}.md": {"example": once(worked_example, name)} for name in updates.ALGORITHMS}


def all_texts():
    """Return {path: text} of all generated texts, in their pages. ValueError if a page is missing."""
    made = {}
    paths = [*(ROOT / "docs").glob("*.md"), *(ROOT / "course").glob("lesson_*/README.md")]
    for path in dict.fromkeys([*blocks(), *paths]):
        made[path] = with_kept_numbers(read(path))
        for name, block in blocks().get(path, {}).items():
            made[path] = texts.between(made[path], name, block())
    return made | {claims.FILE: claims.page(), notebook.FILE: notebook.text()}


def main():
    with flags.errors_in_one_line():
        texts.write(all_texts())


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

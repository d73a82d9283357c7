"""Writes all generated texts: tables and worked examples of the algorithms, claims, numbers of kept runs.

    python -m tools.maintain.pages

Pages are written by hand. What is generated stands between <!-- NAME: begin --> and <!-- NAME: end -->: the tables of
README.md and docs/objectives.md (table.py), responses before and after training (demo_picture.py), and in
docs/algorithms the order of reading and the worked examples (example.py). docs/claims.md is made as a whole
(claims.py). Below <!-- kept runs: … --> a table has the numbers of kept runs. It needs no GPU and no vLLM.
"""

import functools
import json
import math
import re
from statistics import fmean, stdev

import tyro

from runtime import settings
from tools import family
from tools.maintain import claims, demo_picture, example, generated, table, updates

FOLDER = family.ROOT / "docs" / "algorithms"
TITLES = {  # of the columns of a worked example
    "old": r"$\pi_{\text{old}}$",
    "new": r"$\pi$",
    "ref": r"$\pi_{\text{ref}}$",
    "sampler": r"$\pi_{\text{sampler}}$",
    "entropy": "$H$ at sampling",
    "entropy_new": "$H$ now",
    "value": r"$V_{\text{old}}$",
    "value_new": "$V$",
    "logp": r"$\log \pi$",
    "ratio": r"$\rho$",
    "difference": r"$\pi - \pi_{\text{old}}$",
    "clip_range": r"$\epsilon_a$",
    "correction": "$w$",
    "icepop": "$w$ (IcePop)",
    "reasoning": "reasoning",
    "in_loss": r"$H \ge \tau$",
    "k1": "$k_1$",
    "return": "$R$",
    "estimate": r"$\hat A$",
    "ar_weight": "AR's factor",
    "advantages": "$A$",
    "left": r"left of $\rho A$",
    "outside_kl": "cut off (KL)",
    "k3": "$k_3$",
    "value_loss": "loss of $V$",
    "value_clipped": "cut off",
    "stage": "stage",
    "first": "weight, first update",
    "second": "weight, second update",
}
OTHER_TITLES = {
    ("gspo", "ratio"): "$s$",
    ("gspo", "left"): "left of $s A$",
    ("sapo", "left"): r"$f'(\rho)$",
    ("reinforce", "second"): "weight",
    ("opd", "ref"): r"$\pi_{\text{teacher}}$",
    ("opd", "second"): "weight",
}
FLAGS = ["reasoning", "in_loss", "outside_kl", "value_clipped"]  # "yes" or nothing
TABLES = {  # the columns of the tables of tokens; a script that is not here has those of its parent
    "reinforce": ["old logp advantages second"],
    "grpo": ["old new ref ratio advantages left k3 first second"],
    "dr_grpo": ["old new ratio advantages left first second"],
    "ppo": [
        "old ref value value_new k1 estimate advantages return value_loss value_clipped",
        "old new ratio advantages left first second",
    ],
    "reinforce_pp": ["old new ref k1 return advantages ratio left first second"],
    "dapo": ["old new ref ratio advantages left first second"],
    "grpo_ar_lopti": ["old new ref ar_weight advantages stage ratio left first second"],
    "reinforce_pp_ar_lopti": ["old new return ar_weight advantages stage ratio left first second"],
    "dapo_ar_lopti": ["old new ref ar_weight advantages stage ratio left first second"],
    "acpo": ["old new ratio clip_range advantages left first second"],
    "cispo": ["old new ratio advantages left first second"],
    "gspo": ["old new ratio advantages left first second"],
    "sapo": ["old new ratio advantages left first second"],
    "dppo": ["old new difference ratio advantages left outside_kl first second"],
    "entropy_top": ["old new ref entropy_new in_loss ratio advantages left first second"],
    "archer": ["old new ref entropy reasoning ratio left k3 first second"],
    "opd": ["old ref logp advantages second"],
    "grpo_tis": ["old new ref sampler correction icepop ratio left first second"],
}
WEIGHTS = {  # rows of the ladder's tables: what it is, script, which update, settings
    "reinforce": ("REINFORCE", "reinforce", "second", {}),
    "rloo": ("RLOO", "rloo", "second", {}),
    "normalised": ("3a", "grpo", "first", {"kl_coef": 0}),
    "clipped": ("3b", "grpo", "second", {"kl_coef": 0}),
    "grpo": ("3c: GRPO", "grpo", "second", {}),
    "dr_grpo": ("Dr. GRPO", "dr_grpo", "second", {}),
    "ppo": ("PPO", "ppo", "second", {}),
}
LADDER = {  # block: the rows of its table
    "reinforce": ["reinforce"],
    "rloo": ["reinforce", "rloo"],
    "normalised": ["rloo", "normalised"],
    "clipped": ["normalised", "clipped"],
    "grpo": ["clipped", "grpo"],
    "dr_grpo": ["rloo", "grpo", "dr_grpo"],
    "ppo": ["grpo", "ppo"],
}


@functools.cache
def example_of(script):
    return example.example(script)


# -------------------------------------------------------------------------------------------------------------- tables


def cell(value, name=""):
    """A number with three decimals and a typographic minus; a dash if there is none. A flag is "yes" or nothing."""
    if math.isnan(value):
        return "–"
    if name in FLAGS:
        return "yes" if value else ""
    if name == "stage":
        return str(int(value))
    return f"{value:z.3f}".replace("-", "−")


def markdown_table(titles, rows):
    """A Markdown table, as a list of lines. rows: lists of texts."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return lines + [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows]


def columns_of(script):
    """(the titles of columns that are not TITLES', the columns of each table of tokens), of a script or its parent."""
    if script not in TABLES:
        return columns_of(family.PARENT[script])
    return {name: title for (of, name), title in OTHER_TITLES.items() if of == script}, TABLES[script]


def worked_example(script):
    """The responses, the tokens, and acpo.py's bins."""
    found = example_of(script)
    lines = ["**The responses**", "", *response_table(script, found)]
    other_titles, tables = columns_of(script)
    for names in map(str.split, tables):
        titles = [other_titles.get(name, TITLES[name]) for name in names]
        rows = []
        for k, token in enumerate(example.TOKENS):
            numbers = [cell(found.columns[name][k], name) for name in names]
            rows.append([str(token.response), f"`{token.text}`", *numbers])
        lines += ["", "**The tokens**", "", *markdown_table(["response", "token", *titles], rows)]
    if found.bins:
        rows = []
        for i, of_bin in enumerate(found.bins):
            edges = f"{i / len(found.bins):.1f} – {(i + 1) / len(found.bins):.1f}"
            rows.append([edges, str(of_bin["tokens"]), cell(of_bin["sigma"]), cell(of_bin["clip_range"])])
        lines += [
            "",
            "**The bins**",
            "",
            *markdown_table([r"bin of $\pi$", "tokens", r"$\sigma_a$", r"$\epsilon_a$"], rows),
        ]
    return lines


def response_table(script, found):
    """The responses with their rewards, and with their advantages if all tokens of a response have the same."""
    columns = {"reward": example.REWARDS}
    if found.penalties:
        columns["penalty"] = found.penalties
    if found.rewards != example.REWARDS:
        columns["$r$"] = found.rewards
    if script == "rloo":
        columns["mean of the others"] = [r - a for r, a in zip(found.rewards, found.advantages)]
    if found.advantages:
        columns["$A$"] = found.advantages
    rows = []
    for i, values in enumerate(zip(*columns.values()), 1):
        tokens = " ".join(f"`{token.text}`" for token in example.TOKENS if token.response == i)
        rows.append([str(i), tokens, *map(cell, values)])
    lines = markdown_table(["response", "tokens", *columns], rows)
    if found.advantages:
        mean, std = cell(fmean(found.rewards)), cell(stdev(found.rewards))
        of_what = "$r$" if "$r$" in columns else "the rewards"
        lines += ["", f"Mean of {of_what}: {mean}; standard deviation, with $G - 1$: {std}."]
    return lines


def weights_table(rows):
    """Rows of weights of the twelve tokens. rows: {what it is: the weights}."""
    titles = ["", *(f"{token.response} `{token.text}`" for token in example.TOKENS)]
    return markdown_table(titles, [[name, *map(cell, weights)] for name, weights in rows.items()])


def ladder_table(names):
    """The weights of the twelve tokens, which stand below each other. names: keys of WEIGHTS."""
    columns = []
    for name in names:
        _, script, update, settings = WEIGHTS[name]
        found = example.example(script, **settings) if settings else example_of(script)
        columns.append(map(cell, found.columns[update]))
    tokens = [[str(token.response), f"`{token.text}`"] for token in example.TOKENS]
    titles = ["response", "token", *(WEIGHTS[name][0] for name in names)]
    return markdown_table(titles, [[*token, *weights] for token, *weights in zip(tokens, *columns)])


def link(script):
    """A link to a script's page, with the page's title."""
    title = (FOLDER / f"{script}.md").read_text(encoding="utf-8").splitlines()[0]
    return f"[{title.removeprefix('# ')}]({script}.md)"


def order_table():
    """The scripts in the order to read them."""
    rows = []
    for i, script in enumerate(updates.ALGORITHMS, 1):
        about = " ".join(family.paragraphs(family.source(script))[0].split())
        parent = family.PARENT.get(script)
        rows.append([str(i), link(script), about, link(parent) if parent else ""])
    return markdown_table(["", "page", "in one line", "grew from"], rows)


# --------------------------------------------------------------------------------------------------------------- pages


def blocks_of(name):
    """{name of a block: its lines} of a page, by the page's name."""
    if name == "README":
        weights = {link(script): example_of(script).columns["second"] for script in updates.ALGORITHMS}
        return {"order": order_table(), "weights": weights_table(weights)}
    if name == "ladder":
        return {block: ladder_table(rows) for block, rows in LADDER.items()}
    return {"example": worked_example(name)}


KEPT = re.compile(r"<!-- kept runs: (.+?) -->\n\n((?:\|.*\n)+)")
NUMBER = re.compile(r"[-−]?\d[\d.]*(e[-+]\d+)?")


def with_kept_numbers(text):
    """The text with the numbers of kept runs in its tables, each in the form that it has.

    <!-- kept runs: FILE METRIC, … --> above a table names what its columns have, if its rows are steps, and otherwise
    what its rows have, below the titles "step N".
    """

    def in_table(match):
        places = [place.split() for place in match[1].split(", ")]
        runs = [json.loads((family.ROOT / f"{file}.json").read_text(encoding="utf-8"))["rows"] for file, _ in places]
        rows = [line.strip("|").split("|") for line in match[2].splitlines()]
        for i, row in enumerate(rows[2:]):
            for k, cell in enumerate(row[1:]):
                by_step = rows[0][0].strip() == "step"
                which, step = (k, row[0]) if by_step else (i, rows[0][k + 1].replace("step", ""))
                if cell.strip():
                    [value] = [one[places[which][1]] for one in runs[which] if one["step"] == int(step)]
                    row[k + 1] = NUMBER.sub(lambda old, value=value: in_the_form_of(old[0], value), cell)
        return match[0].removesuffix(match[2]) + "".join(f"|{'|'.join(row)}|\n" for row in rows)

    return KEPT.sub(in_table, text)


def in_the_form_of(old, value):
    """A value with as many digits as a number has: "0.573", "2.88e-07", "−3.00"."""
    digits = len(re.sub(r"e.*", "", old).partition(".")[2])
    return f"{value:.{digits}{'e' if 'e' in old else 'f'}}".replace("-", "−" if "e" not in old else "-")


def all_texts():
    """{path: text} of all that is generated, and of the pages that it is a part of."""
    readme, docs = family.ROOT / "README.md", family.ROOT / "docs"
    paths = [readme, *docs.glob("*.md"), *(family.ROOT / "course").glob("lesson_*.md")]
    texts = {path: with_kept_numbers(path.read_text(encoding="utf-8")) for path in paths}
    for name in ("demo", "llm"):
        kept = json.loads((docs / f"{name}.json").read_text(encoding="utf-8"))
        [page] = [path for path, text in texts.items() if f"<!-- {name}: begin -->" in text]
        texts[page] = demo_picture.with_words(texts[page], name, kept)
    for path, made in ((readme, table.short_table()), (docs / "objectives.md", table.table())):
        texts[path] = generated.between(texts[path], table.MARKS, made)
    return texts | {docs / "family.svg": table.drawing(), claims.FILE: claims.page()} | all_pages()


def all_pages():
    """{path: text} of docs/algorithms. ValueError if a page is missing, or its marks are not as they must be."""
    pages = {FOLDER / f"{name}.md": name for name in ["README", "ladder", *updates.ALGORITHMS]}
    for path in pages:
        if not path.exists():
            raise ValueError(f"{path} is missing: it is written by hand, from a copy of the parent's page")
    for path, name in pages.items():
        text = path.read_text(encoding="utf-8")
        for mark, lines in blocks_of(name).items():
            text = generated.between(text, mark, "\n".join(lines))
        pages[path] = text
    return pages


def main():
    with settings.errors_in_one_line():
        generated.write(all_texts())


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

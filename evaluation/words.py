"""Count words of reasoning in responses, and correlate them with the reward (AR-Lopti, fig. 5, Table 5).

`evaluate.py --words` uses this. The paper lists the words and counts plurals of nouns, past tenses and past participles
of verbs, in upper and lower case. Here third persons, present participles and "definitely" count too. "XXX's statement"
is any possessive before "statement". "if … then …" must lie within one sentence.
"""

import json
import math
import re
from statistics import fmean

from runtime import curves
from tools import inference

WORDS = {  # family: patterns of whole words
    "analysis": [r"analyz(e|es|ed|ing)", r"consider(s|ed|ing)?", r"look(s|ed|ing)?\s+at", r"check(s|ed|ing)?"],
    "statement": [r"\w+('s|’s|s'|s’)\s+statements?"],
    "causal indicator": [r"since", r"because", r"due\s+to", r"given\s+that"],
    "conclusion indicator": [r"so", r"thus", r"hence", r"as\s+a\s+result", r"consequently", r"therefore"],
    "assumption": [r"assum(e|es|ed|ing)", r"if\b[^.?!\n]{0,300}?\bthen"],  # bounded, so that no text takes long
    "assertion": [r"must\s+be", r"definite(ly)?"],
}
WORDS["analysis"] += [r"examin(e|es|ed|ing)"]
PATTERNS = {
    family: [re.compile(rf"(?<!\w){word}(?!\w)", re.IGNORECASE) for word in words] for family, words in WORDS.items()
}


def count_words(text: str) -> dict:
    """Return {family: the number of its words in the text}."""
    return {family: sum(len(p.findall(text)) for p in patterns) for family, patterns in PATTERNS.items()}


def related(problems, names, **options):
    """Return (correlation, its standard error) of the counts with the rewards, (None, None) if one is constant.

    problems: as in count_all's "raw"; names: one per problem (name_of); options: passed to inference.correlation. The
    bootstrap resamples whole problems, because the responses to a problem are not independent; equal problems are one.
    """
    clusters = {}
    for one, name in zip(problems, names, strict=True):
        counts, rewards = clusters.setdefault(name, ([], []))
        counts += one["count"]
        rewards += one["reward"]
    return inference.correlation(list(clusters.values()), **options)[:2]


def name_of(of_problem):
    """Return a name that the responses to equal problems share. of_problem: the responses to one problem."""
    about = [of_problem[0].get(key) for key in ("category", "prompt", "answer")]
    return json.dumps(about, sort_keys=True, default=str)


def count_all(responses) -> tuple:
    """Return ({family: mean count per response, per problem}, {family: its relation to the reward}).

    responses: per problem a list of dicts with `response`, `reward` and, if there are several kinds of problems,
    `category`, such as the number of people. A relation: "pearson" and "spearman" over all responses; "by_category",
    {category: {"spearman", "error"}}, because words may go with the reward in one category and against it in another;
    and "raw", the raw values: [{"category", "count", "reward"}], the latter two with a number per response.
    """
    names = [name_of(of_problem) for of_problem in responses]
    counts = [[count_words(one["response"]) for one in of_problem] for of_problem in responses]
    by_problem, relations = {}, {}
    for family in WORDS:
        by_problem[family] = [fmean(count[family] for count in of_problem) for of_problem in counts]
        problems = []
        for of_problem, of_counts in zip(responses, counts):
            category = of_problem[0].get("category", "all")
            rewards = [float(one["reward"]) for one in of_problem]
            problems.append({"category": category, "count": [count[family] for count in of_counts], "reward": rewards})
        relation = {"pearson": related(problems, names)[0], "spearman": related(problems, names, in_ranks=True)[0]}
        by_category = {}
        for category in dict.fromkeys(one["category"] for one in problems):
            of_it = [(one, name) for one, name in zip(problems, names) if one["category"] == category]
            by_category[category] = dict(zip(("spearman", "error"), related(*zip(*of_it), in_ranks=True)))
        relations[family] = relation | {"by_category": by_category, "raw": problems}
    return by_problem, relations


def lines_of(rows):
    """Return the table as lines of cells. The first line has the titles.

    rows: dicts with `model`, `words` ({family: {"value", "error", "pearson", "spearman"}}) and, if the model is
    compared with another one, `words_change` ({family: {"value", "error"}}). An error of None is not shown.
    """
    lines = [["words", *WORDS]]

    def add(title, figures, sign=""):
        texts = [f"{one['value']:{sign}.2f}" for one in figures]
        errors = ["" if one["error"] is None else f" ± {one['error']:.2f}" for one in figures]
        lines.append([title, *map(str.__add__, texts, errors)])

    for row in rows:
        found = row["words"].values()
        add(row["model"], found)
        if "words_change" in row:
            add("change", row["words_change"].values(), "+")
        for kind, letter in (("pearson", "r"), ("spearman", "ρ")):
            cells = ["" if one[kind] is None else f"{one[kind]:+.2f}" for one in found]
            lines.append([f"{letter} with the reward", *cells])
    return lines


def draw(rows, path) -> None:
    """Plot two panels to the file `path`: each family's count per response, and its rank correlation with the reward.

    The correlations are within a category of problems, such as a number of people, for the first row's model.

    rows: as for lines_of.
    """
    figure = curves.new_figure(curves.WIDTH, 10, "")
    above, below = figure.subplots(2, 1)
    width = 0.8 / len(rows)
    for i, (row, colour) in enumerate(zip(rows, curves.COLOURS * len(rows))):
        places = [j + (i + 0.5) * width - 0.4 for j in range(len(WORDS))]
        found = [row["words"][family] for family in WORDS]
        errors = [one["error"] or 0 for one in found]
        above.bar(places, [one["value"] for one in found], width, yerr=errors, color=colour, label=row["model"])
    categories = list(rows[0]["words"]["analysis"]["by_category"])
    width = 0.8 / len(categories)
    for i, (category, colour) in enumerate(zip(categories, curves.COLOURS * len(categories))):
        found = [rows[0]["words"][family]["by_category"][category] for family in WORDS]
        places = [j + (i + 0.5) * width - 0.4 for j in range(len(WORDS))]
        look = {"fmt": "o", "color": colour, "capsize": 3, "label": category}
        errors = [2 * (one["error"] or 0) for one in found]
        values = [math.nan if one["spearman"] is None else one["spearman"] for one in found]  # None: no point
        below.errorbar(places, values, yerr=errors, **look)
    above.set(title="words in a response, ± standard error", ylabel="count")
    title = f"with the reward, by kind of problem, ± 2 standard errors: {rows[0]['model']}"
    below.set(title=title, ylabel="rank correlation", ylim=(-1, 1))
    below.axhline(0, color="black", lw=0.8)
    below.legend(title="kind of problem", ncols=3)
    above.legend()
    for axis in (above, below):
        axis.set_xticks(range(len(WORDS)), WORDS)
    curves.save(figure, [path])

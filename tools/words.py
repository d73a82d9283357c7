"""Words of reasoning: their counts in responses and the correlation with the reward (AR-Lopti, fig. 5, Table 5).

`evaluate.py --words` uses this. The paper lists the words and counts plurals of nouns, past tenses and past participles
of verbs, in upper and lower case. Here third persons, present participles and "definitely" count too. "XXX's statement"
is any possessive before "statement". "if … then …" must lie within one sentence.
"""

import re
from bisect import bisect_left, bisect_right
from statistics import StatisticsError, correlation, fmean

from runtime.curves import COLOURS

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


def count_words(text):
    """{family: the number of its words in the text}."""
    return {family: sum(len(p.findall(text)) for p in patterns) for family, patterns in PATTERNS.items()}


def ranks(values):
    """The ranks of the values, from 1. Equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in values]


def related(a, b):
    """Pearson's correlation of two lists (Spearman's if they are ranks()), or None if one of them is constant."""
    try:
        return correlation(a, b)
    except StatisticsError:
        return None


def count_all(responses):
    """Returns ({family: the mean count per response, for each problem}, {family: {"pearson", "spearman"}}).

    responses: for each problem a list of dicts with `response` and `reward`. The correlations are over responses.
    """
    counts = [[count_words(one["response"]) for one in of_problem] for of_problem in responses]
    rewards = [float(one["reward"]) for of_problem in responses for one in of_problem]
    by_problem, relations = {}, {}
    for family in WORDS:
        flat = [float(count[family]) for of_problem in counts for count in of_problem]
        by_problem[family] = [fmean(count[family] for count in of_problem) for of_problem in counts]
        relations[family] = {"pearson": related(flat, rewards), "spearman": related(ranks(flat), ranks(rewards))}
    return by_problem, relations


def lines_of(rows):
    """The table as lines of cells. The first line has the titles.

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


def draw(rows, path):
    """Draws two panels to the file `path`: each family's count per response, and its correlation with the reward.

    rows: as for lines_of.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    width = 0.8 / len(rows)
    for i, (row, colour) in enumerate(zip(rows, COLOURS * len(rows))):
        places = [j + (i + 0.5) * width - 0.4 for j in range(len(WORDS))]
        found = [row["words"][family] for family in WORDS]
        errors = [one["error"] or 0 for one in found]
        left.bar(places, [one["value"] for one in found], width, yerr=errors, color=colour, label=row["model"])
        for kind, shift, alpha in (("pearson", -0.25, 1), ("spearman", 0.25, 0.5)):
            at = [place + shift * width for place in places]
            right.bar(at, [one[kind] or 0 for one in found], width / 2, color=colour, alpha=alpha)
    left.set(title="words in a response, ± standard error", ylabel="count")
    right.set(title="correlation with the reward: Pearson (full), Spearman (pale)", ylim=(-1, 1))
    right.axhline(0, color="black", lw=0.8)
    for axis in (left, right):
        axis.set_xticks(range(len(WORDS)), [family.replace(" ", "\n") for family in WORDS])
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

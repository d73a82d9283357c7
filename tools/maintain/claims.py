"""Write docs/claims.md, the papers' claims and our results, from the saved raw values.

docs/claims.toml has the measured claims, and the comparisons that measure them: two numbers per batch, per seed's run
or per token. It has no verdicts. Comparisons of a kind share one standard deviation, pooled over them. Holm's procedure
leaves one level for those comparisons of a paper that it does not reject. At that level the paper's intervals are
computed, and an interval decides. A comparison that several rows name, directly or with a − for its opposite, is
made once. `make docs` writes the page.
"""

import json
import math
import re
import textwrap
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from runtime import curves
from tools import compare, inference, texts
from tools.inference import NO_EFFECT, OPPOSITE, SHOWS, TOO_FEW, Estimate

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "claims.md"
CLAIMS = tomllib.loads((ROOT / "docs" / "claims.toml").read_text(encoding="utf-8"))
MADE = CLAIMS["comparisons"]
WORDS = [OPPOSITE, NO_EFFECT, TOO_FEW, SHOWS]  # a row gets the first of these among its comparisons
LAB = ROOT / "lab" / "results"  # the raw values: of the lab's commands,
RUNS = ROOT / "benchmarks" / "kk_tiny"  # of runs,
RESULTS = ROOT / "benchmarks" / "results"  # and of benchmarks and evaluate.py
WIDTH, MOST_PLOTS = 25, 4  # of a plot in characters; of a row
ALPHA = 0.05  # the chance, at most, that any of a paper's "shows" or "the opposite" is luck


def at(tree, path):
    """Return the value at a path such as "tails/p < 0.2/norm". A number is itself; of several paths the largest counts.

    None if there is no such value.
    """
    if isinstance(path, list):
        found = [at(tree, one) for one in path]
        return None if None in found else max(found)
    if not isinstance(path, str):
        return path
    for key in filter(None, path.split("/")):
        try:
            tree = tree[int(key)] if isinstance(tree, list) else tree[key]
        except (KeyError, IndexError, TypeError):  # TypeError: a None on the way
            return None
    return tree


def estimates_of(comparison, lab=None):
    """Return a comparison's Estimates, one for each of its `for`; [] if its values are not saved.

    lab: the folder of the lab's results, if not LAB.
    """
    found = []
    for each in map(str, comparison.get("for", [""])):
        filled = json.loads(json.dumps(comparison).replace("{}", each))
        more = {"size": filled.get("size", 0.0), "is_ratio": filled.get("ratio", False)}
        more["is_amount"] = "amount" in filled or "equals" in filled
        more["label"] = ", ".join(filter(None, [filled.get("what", ""), each]))
        if "suite" in filled:
            found += of_runs(filled, **more)
            continue
        paths = [folder / f"{filled['file']}.json" for folder in (lab or LAB, RESULTS)]
        data = next((json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()), {})
        rows = at(data, filled.get("rows", "batches"))
        if rows:
            of = of_tokens if "correlation" in filled else of_batches
            found += of(filled, rows if isinstance(rows, list) else [rows], **more)
    return found


def of_batches(comparison, rows, is_ratio, **more):
    """Return [the Estimate] of two numbers per batch: `more` than, `less` than, or `equals`.

    `size_of_mean`: compare the sizes of their means over the batches, where values have signs.
    A mean that is as small as its error looks too large.
    """
    [claimed] = {"more", "less", "equals"} & comparison.keys()
    pairs = [(at(row, comparison[claimed]), at(row, comparison.get("than", 0.0))) for row in rows]
    times = comparison.get("times", 1)
    pairs = [(value, than * times) for value, than in pairs if None not in (value, than)]
    if not pairs:
        return []
    if "size_of_mean" in comparison:
        signs = [math.copysign(1, fmean(side)) for side in zip(*pairs)]
        pairs = [tuple(sign * value for sign, value in zip(signs, pair)) for pair in pairs]
    if is_ratio and "is_log" not in comparison:
        pairs = [tuple(math.log(max(value, 1e-300)) for value in pair) for pair in pairs]
    found = inference.of_values(pairs=pairs, is_ratio=is_ratio, **more)
    sides = map(math.exp, found.sides) if is_ratio else found.sides
    found = replace(found, sides=tuple(sides)[: 2 if "than" in comparison else 1])
    if claimed == "less":
        return [replace(found, mean=-found.mean)]
    if claimed == "equals":  # how far inside the margin it is
        return [replace(found, mean=comparison["slack"] - abs(found.mean), is_ratio=False)]
    return [found]


def of_runs(comparison, label, **more):
    """Return [the Estimate] of a metric's difference between two entries of tools/compare.py, by seed.

    `pairs`: the mean over several pairs of entries; `beyond`: a pair whose difference is subtracted. The seeds of the
    suite's table count. ValueError if a run was made with other flags.
    """
    pairs = comparison.get("pairs") or [[comparison["more"], comparison["than"]]]
    signed = [(pair, 1 / len(pairs)) for pair in pairs]
    label = "; ".join(" minus ".join(pair) for pair in pairs)
    if "beyond" in comparison:
        signed.append((comparison["beyond"], -1))
        label += f", less {' minus '.join(comparison['beyond'])}"
    if "what" in comparison:
        label += f" ({comparison['what']})"
    factors = Counter()
    for (ours, theirs), factor in signed:
        factors[ours] += factor
        factors[theirs] -= factor
    common, commands, seeds = compare.read_suite(comparison["suite"])
    runs = compare.read_runs(RUNS, {entry: commands[entry] for entry in factors}, common, seeds)
    metric = comparison.get("metric", "eval/accuracy")  # of two metrics, their difference
    values = []
    for seed in seeds:
        if all(seed in by_seed for by_seed in runs.values()):
            values.append(sum(factor * late(runs[entry][seed], metric) for entry, factor in factors.items()))
    if not values:
        return []
    found = inference.of_values(label, [(value, 0.0) for value in values], **more)
    return [replace(found, sides=(), of=tuple(factors.items()))]


def late(run, metric):
    """Return the mean of a metric over the second half of a run's steps; of two metrics, their difference."""
    if isinstance(metric, list):
        return late(run, metric[0]) - late(run, metric[1])
    steps, values = curves.points(run["rows"], metric)
    return fmean(value for step, value in zip(steps, values) if step > run["rows"][-1]["step"] / 2)


def of_tokens(comparison, rows, label, **more):
    """Return [the Estimate] of the correlation of two numbers per token; of several the lowest.

    rows: clusters of tokens, such as responses. `above`: the smallest second number that counts. []
    if all are equal.
    """
    wanted = comparison.get("only", {})
    rows = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not rows:
        return []
    first, second = comparison["correlation"]
    least = comparison.get("above", -math.inf)
    several = at(rows[0], first)
    paths = [f"{first}/{name}" for name in several] if isinstance(several, dict) else [first]
    found, draws = [], []
    for path in paths:
        clusters = []
        for row in rows:
            tokens = [(x, y) for x, y in zip(at(row, path), at(row, second)) if y >= least]
            if "log" in comparison:
                tokens = [(math.log(max(x, 1e-30)), math.log(y)) for x, y in tokens]
            clusters.append(([x for x, _ in tokens], [y for _, y in tokens]))
        value, _, of_value = inference.correlation(clusters, comparison.get("ranks", False))
        if value is None:
            return []
        found.append(value)
        draws.append(of_value)
    than = comparison.get("than", 0.0)
    z, z_of_than = inference.fishers_z(min(found)), inference.fishers_z(than)
    mean = z_of_than - z if "negative" in comparison else z - z_of_than
    error = stdev(inference.fishers_z(min(of_draw)) for of_draw in zip(*draws))
    sides = (min(found), than)[: 2 if "than" in comparison else 1]
    more |= {"size": inference.fishers_z(than + more["size"]) - z_of_than}
    more |= {"threshold": than}
    return [Estimate(label, mean, error, len(rows) - 1, len(rows), sides, **more)]


def measured():
    """Return {name: [Estimate]} of the comparisons; comparisons of a kind share one standard deviation."""
    found = {name: estimates_of(comparison) for name, comparison in MADE.items()}
    kinds = {}
    for name, comparison in MADE.items():
        metric = str(comparison.get("metric")) if "suite" in comparison else None
        if kind := comparison.get("kind", metric):
            kinds.setdefault(kind, []).append(name)
    for of_kind in kinds.values():
        estimates = iter(inference.pooled([one for name in of_kind for one in found[name]]))
        found |= {name: [next(estimates) for _ in found[name]] for name in of_kind}
    return found


def names_of(claim):
    return claim["by"] + claim.get("beside", [])


def levels_of(found):
    """Return ({comparison: the level of the first paper that names it}, {paper: its level})."""
    levels, of_papers = {}, {}
    for paper in CLAIMS["papers"]:
        names = [name for claim in paper["claims"] for name in names_of(claim)] + paper.get("counted", [])
        own = {name.removeprefix("-") for name in names} - levels.keys()
        of_papers[paper["name"]] = inference.holms_level([one for name in own for one in found[name]], ALPHA)
        levels |= dict.fromkeys(own, of_papers[paper["name"]])
    return levels, of_papers


def forest(one, level):
    """Draw an interval as text: ━ the interval, ● the mean, │ 0 or the threshold, ◇ the claimed size."""
    low, high = one.interval(level)
    if math.isinf(high):
        return ""
    ends = [low, high, 0.0, one.size]
    scale = (WIDTH - 1) / (max(ends) - min(ends) or 1.0)
    low, high, zero, size, mean = (round((value - min(ends)) * scale) for value in (*ends, one.mean))
    marks = {zero: "│"} | ({size: "◇"} if one.size else {}) | {mean: "●"}
    return "".join(marks.get(at, "━" if low <= at <= high else "·") for at in range(WIDTH))


def judged(claim, found, levels):
    """Return a row's (word, numbers, plots): a claim shows if all its comparisons show.

    ValueError if no value is saved.
    """
    counts, numbers, plots, last = Counter(), [], {}, None
    for name in names_of(claim):  # a − before a name: its opposite
        plain = name.removeprefix("-")
        if not found[plain]:
            raise ValueError(f"docs/claims.toml, {claim['item']}: nothing is kept that measures {plain}")
        for one in found[plain]:
            one = one if name == plain else one.reversed()
            word, text = one.word(levels[plain]), one.numbers(levels[plain])
            if name in claim["by"]:
                counts[word] += 1
                numbers.append(text)
                plots.setdefault(word, []).append(forest(one, levels[plain]))
            else:
                numbers.append(f"and {text}" if word == last else f"for comparison, {word}: {text}")
                last = word
    start = f"({', '.join(f'{count} × {one}' for one, count in counts.items())}) " if len(counts) > 1 else ""
    worst = min(counts, key=WORDS.index)
    return worst, start + "<br>".join(numbers), list(filter(None, plots[worst]))


def of_file(name, folder):
    """Return the verdicts on FOLDER/NAME.json alone, one line each; the lab's commands print them last."""
    lines = []
    for comparison in MADE.values():
        if comparison.get("file") == name:
            for estimate in estimates_of(comparison, folder):
                lines.append(f"{estimate.word(ALPHA).upper()}: {estimate.numbers(ALPHA)}")
    return lines


def page():
    """Return docs/claims.md."""
    found = measured()
    levels, of_papers = levels_of(found)
    papers, verdicts = [], {}
    for paper in CLAIMS["papers"]:
        rows = []
        for claim in paper["claims"]:
            word, numbers, plots = judged(claim, found, levels)
            verdicts[f"{paper['name']}: {claim['item']}"] = word
            anchor = re.sub(r"[^a-z0-9]+", "-", f"{paper['name']} {claim['item']}".lower()).strip("-")
            note = f"<br>Note: {claim['note']}" if "note" in claim else ""
            text = f'<a id="{anchor}"></a>{claim["item"]}: {claim["says"]}'
            plot = "<br>".join(f"`{one}`" for one in plots[:MOST_PLOTS])
            more = f"{numbers}{note}<br>{', '.join(commands_of(claim))}"
            rows.append([text, f"**{word}**", f"{plot}<details><summary>numbers</summary>{more}</details>"])
        title = f"{paper['title']} Intervals of {1 - of_papers[paper['name']]:.2%}."
        head = ["claim", "verdict", "what came out here"]
        papers += [f"## {paper['name']}", wrapped(title), texts.table(head, rows), wrapped(paper.get("below", ""))]
    findings = []
    for i, finding in enumerate(CLAIMS["findings"], 1):
        if wrong := {name: verdicts.get(name) for name in finding["rows"] if verdicts.get(name) != finding["verdict"]}:
            raise ValueError(f"a finding says {finding['verdict']!r}, but the verdicts are {wrong}: {finding['says']}")
        findings.append(wrapped(f"{i}. {finding['says']} (**{finding['verdict']}**)", subsequent_indent="   "))
    words = Counter(verdicts.values())
    of_words = [[word, str(words[word]), CLAIMS["meaning"][word]] for word in WORDS[::-1]]
    parts = ["# Claims", "Findings; the tables below have the numbers:", "\n".join(findings), wrapped(CLAIMS["intro"])]
    parts += [texts.table(["verdict", "rows", "what it means"], of_words), wrapped(CLAIMS["plots"])]
    rules = f"<details><summary>How a verdict is reached</summary>\n\n{wrapped(CLAIMS['rules'])}\n\n</details>"
    return "\n\n".join(filter(None, [*parts, rules, *papers, wrapped(CLAIMS["sources"])])) + "\n"


def commands_of(claim):
    """Return the commands that measure a claim, each once, in the short form that the page explains above."""
    found = []
    for name in names_of(claim):
        of = MADE[name.removeprefix("-")]
        usual = f"suite {of['suite']}" if "suite" in of else f"lab.{of['file']}"
        found.append(f"`{of.get('command', usual)}`")
    return list(dict.fromkeys(found))


def wrapped(text, **options):
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False, **options))

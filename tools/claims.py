"""docs/claims.md as Markdown: rows of docs/claims.toml with the verdicts that lab/verdicts.py reads from raw values."""

import ast
import functools
import json
import textwrap
from collections import Counter
from pathlib import Path

from tools.inference import NO_EFFECT, OPPOSITE, SHOWS, TOO_FEW

ROOT = Path(__file__).parents[1]
NOT_MEASURED, BY_CONSTRUCTION = "not measured here", "by construction"
TESTED, NO_CLAIM, MIXED = "holds in a test", "no claim", "mixed"
# A row has the first of these that it is judged by; mixed, if it has both "shows" and "the opposite".
WORDS = [NOT_MEASURED, MIXED, OPPOSITE, NO_EFFECT, TOO_FEW, SHOWS, BY_CONSTRUCTION, NO_CLAIM, TESTED]
KEYS = ("commit", "machine", "date")


@functools.cache
def defined_in(path):
    """The names of a file's functions and classes."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else []
    return {node.name for node in nodes if hasattr(node, "name")}


def judged(claim, verdicts):
    """(word, numbers) of a row: a claim shows if all that it is measured by does.

    verdicts: {comparison: [(word, numbers)]}; one without any is not measured.
    """
    found = [one for name in claim.get("by", []) for one in verdicts[name] or [(NOT_MEASURED, "")]]
    for test in claim.get("tests", []):
        file, name = test.split("::")
        found.append((TESTED if name in defined_in(ROOT / "tests" / file) else NOT_MEASURED, f"`{name}`"))
    for place in claim.get("where", []):
        file, name = place.split("::")
        is_there = name in defined_in(ROOT / file)
        found.append((NO_CLAIM if is_there else NOT_MEASURED, f"[`{file}`](../{file}), `{name}`"))
    words, texts = [word for word, _ in found], [text for _, text in found if text]
    if reason := certain(claim):
        words, texts = [BY_CONSTRUCTION], [reason, *texts]
    counts = Counter(words)
    word = next((one for one in WORDS if one in words), NOT_MEASURED)
    if word == OPPOSITE and SHOWS in words:
        word = MIXED
    start = f"({', '.join(f'{count} × {one}' for one, count in counts.items())}) " if len(counts) > 1 else ""
    for name in claim.get("beside", []):
        texts += [f"for comparison, {one}: {numbers}" for one, numbers in verdicts[name]]
    return word, start + "; ".join(texts)


def certain(claim):
    """Why a claim can't fail, or nothing if it can: `certain` says so, or that one number exceeds another."""
    if "certain_if" not in claim:
        return claim.get("certain", "")
    name, more, than = claim["certain_if"]
    found = json.loads((ROOT / "lab" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    if not found.get(more, 0) > found.get(than, 0):
        return ""
    return f"{more} {found[more]}, {than} {found[than]}"


def commands_of(claim, comparisons):
    """The commands that measure a claim, each once."""
    found = [claim["command"]] if "command" in claim else []
    for name in claim.get("by", []) + claim.get("beside", []):
        of = comparisons[name.removeprefix("-")]
        usual = f"tools/compare.py --suite {of['suite']}" if "suite" in of else f"-m lab.{of['file']}"
        found.append(of.get("command", f"python {usual}"))
    found += [f"pytest tests/{test.split('::')[0]}" for test in claim.get("tests", [])]
    return [f"`{command}`" for command in dict.fromkeys(found)]


def page(data, verdicts, levels, stages, level_of_stages, read):
    """The page. data: docs/claims.toml; levels: {paper: that of its intervals}; stages: as lab.verdicts.of_stages.

    read: [(a result's path, what it says of itself, or a list of runs)].
    """
    rows = {}
    for paper in data["papers"]:
        rows[paper["name"]] = [(claim, *judged(claim, verdicts)) for claim in paper["claims"]]
    words = [word for of_paper in rows.values() for _, word, _ in of_paper]
    lines = ["# Claims", "", *wrapped(data["intro"]), "", *wrapped(data["rules"]), ""]
    lines += ["| verdict | rows | what it means |", "|---|---|---|"]
    lines += [row(word, str(words.count(word)), data["meaning"][word]) for word in WORDS]
    lines += ["", "## In short", ""]
    for word in (SHOWS, MIXED, OPPOSITE, NO_EFFECT, TOO_FEW):
        items = {}
        for name, of in rows.items():
            places = [(claim["item"], anchor(name, i)) for i, (claim, one, _) in enumerate(of) if one == word]
            items[name] = [f"[{item}](#{place})" for item, place in places]
        text = ". ".join(f"{name}: {'; '.join(of)}" for name, of in items.items() if of)
        lines += wrapped(f"- **{word}**: {text or 'nothing'}.", subsequent_indent="  ")
    for paper in data["papers"]:
        title = f"{paper['title']} Intervals of {1 - levels[paper['name']]:.2%}."
        lines += ["", f"## {paper['name']}", "", *wrapped(title), ""]
        lines += ["| item | what it says | command | what came out here | note |", "|---|---|---|---|---|"]
        for i, (claim, word, numbers) in enumerate(rows[paper["name"]]):
            item = f'<a id="{anchor(paper["name"], i)}"></a>{claim["item"]}'
            cell = f"**{word}**" + f": {numbers}" * bool(numbers)
            commands = ", ".join(commands_of(claim, data["comparisons"]))
            lines.append(row(item, claim["says"], commands, cell, claim.get("note", "")))
    columns = [stage for model in data["stages"]["models"] for stage in model]
    says = f"{data['stages']['says']} Intervals of {1 - level_of_stages:.2%}."
    lines += ["", "## Over training, and another model", "", *wrapped(says), ""]
    lines += [row("what is compared", *columns), "|---" * (len(columns) + 1) + "|"]
    for name, of in stages.items():
        cells = ["; ".join(f"**{word}**: {numbers}" for word, numbers in of.get(stage, [])) for stage in columns]
        what = data["comparisons"][name]["what"]
        lines.append(row(what, *(cell or NOT_MEASURED for cell in cells)))
    lines += ["", "## Where this was read", "", "| result | commit | machine | date |", "|---|---|---|---|"]
    for path, about in read:
        several = about if isinstance(about, list) else [about]
        cells = [", ".join(sorted({str(one.get(key)) for one in several})) for key in KEYS]
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        count = f": {len(about)} kept runs" if isinstance(about, list) else ""
        lines.append(row(f"[`{name}`](../{name}){count}", *cells))
    return "\n".join(lines) + "\n"


def anchor(paper, i):
    """What a link to the row of a paper's claim number i, counted from 0, names."""
    return f"{''.join(sign if sign.isalnum() else '-' for sign in paper.lower())}--{i + 1}"


def wrapped(text, **options):
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False, **options)


def row(*cells):
    """A row of a table; a bar inside a cell would end it."""
    return "| " + " | ".join(cell.replace("|", "∣") for cell in cells) + " |"

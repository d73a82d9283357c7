"""Format the tables of an evaluation for the terminal, as Markdown and as JSON."""

import dataclasses
import hashlib
import json
from collections import Counter
from itertools import chain
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from evaluation import words
from evaluation.models import short_name
from rewards import identity
from runtime import files

PERCENT = ("math", "countdown", "hitab")  # suites for which the papers print percentages


def unit_of(suite) -> tuple:
    """Return (factor, digits) for a suite's figures, as the papers print them."""
    return (100, 2) if suite in PERCENT else (1, 3)


def shown(found, unit, sign=""):
    """Format a figure with its standard error. unit: (factor, digits)."""
    factor, digits = unit
    text = f"{found['value'] * factor:{sign}.{digits}f}"
    if found["error"] is not None:
        text += f" ± {found['error'] * factor:.{digits}f}"
    return text


def tables_of(rows, comparisons, papers, columns, args):
    """Return {title: lines of cells}. The first line has the titles of the columns."""
    titles = {key: column.title for key, column in columns.items()}
    if "all" not in columns:
        titles["mean"] = "mean"
    unit = unit_of(args.suite)
    title = "Share of right answers" + ", in percent" * (args.suite in PERCENT)
    tables = {title: [["model", *titles.values(), "format", "tokens", "truncated"]]}
    for row in rows:
        tables[title].append(line_of(row, titles, unit))
    for paper in papers:
        tables[title] += lines_of_paper(paper, titles, columns)
    if comparisons:
        name = "The same problems, compared"
        tables[name] = [["difference", *titles.values()]]
        for comparison in comparisons:
            tables[name] += lines_of_comparison(comparison, titles, unit)
    if args.words:
        tables["Words of reasoning in a response"] = words.lines_of(rows)
    return tables


def line_of(row, titles, unit) -> list:
    factor, digits = unit
    return [
        row["model"],
        *(shown(row["figures"][key], unit) for key in titles),
        f"{row['format_rate'] * factor:.{digits}f}",
        f"{row['mean_tokens']:.0f}",
        f"{row['truncated_rate'] * factor:.{digits}f}",
    ]


def lines_of_paper(paper, titles, columns):
    # Show the paper's mean only if it is over the same columns.
    is_alike = set(paper["columns"]) - {"mean"} == set(columns)
    lines = []
    for name, *numbers in paper["rows"]:
        there = dict(zip(paper["columns"], numbers))
        if not is_alike:
            there.pop("mean", None)
        cells = []
        for key in titles:
            number = there.get(key)
            cells.append("" if number is None else f"{number:.2f}")
        lines.append([f"{name} ({paper['source']})", *cells, "", "", ""])
    return lines


def lines_of_comparison(comparison, titles, unit) -> list:
    differences = [f"{comparison['model']} minus {comparison['versus']}"]
    problems = ["problems up / down / ties"]
    for key in titles:
        found = comparison["figures"][key]
        differences.append(shown(found, unit, "+"))
        problems.append(f"{found['up']} / {found['down']} / {found['ties']}")
    return [differences, problems]


def settings_of(args):
    """Return {name: value} of the settings that the results depend on, except settings without a value."""
    left_out = ("models", "versus", "words", "pass_at_k", "paper", "keep_responses", "out", "score_timeout")
    left_out += ("max_reply_tokens", "tool_timeout", "tool_parser")  # a row's engine has them
    values = {}
    for name, value in dataclasses.asdict(args).items():
        if name not in left_out and value not in (None, "", ()):
            values[name] = ", ".join(value) if isinstance(value, tuple) else value
    return values


def caption(rows, problems, args) -> str:
    """Return the text below the tables: settings, problems, commit, versions and machine."""
    parts = [part for row in rows for part in row["checkpoints"]]
    made = [one for part in parts for one in part["made"]]
    commits = {str(one["commit"]) for one in made}
    machines = {one["machine"] for one in made}
    versions = set()
    for one in made:
        versions |= {f"{name} {version}" for name, version in one["versions"].items()}
    counts = Counter(problem["category"] for problem in problems)
    cut = sum(part["cut_by_context"] for part in parts)
    late = sum(row["timed_out"] for row in rows)

    how = ", ".join(f"{name} {value}" for name, value in settings_of(args).items())
    asked = ", ".join(f"{category}: {count}" for category, count in counts.items())
    sentences = ["± one standard error.", f"{how}.", f"Problems: {asked}."]
    different = len({(identity(problem), problem["category"]) for problem in problems})
    if different < len(problems):
        sentences.append(f"{different} of them are different; equal ones are one cluster in the errors.")
    if cut:
        sentences.append(f"{cut} times the model's context, and not --max_response_tokens, was the limit.")
    if late:
        sentences.append(f"{late} answers took too long to compare and count as wrong.")
    on = ", ".join([*sorted(versions), *sorted(machines)])
    sentences.append(f"Commit {', '.join(sorted(commits))}; {on}.")
    return " ".join(sentences)


def rows_of_papers(args) -> list:
    """Return the papers' tables of this suite and protocol, from benchmarks/paper.json."""
    file = Path(__file__).parents[1] / "benchmarks" / "paper.json"
    wanted = (args.suite, args.protocol)
    papers = json.loads(file.read_text(encoding="utf-8"))
    return [paper for paper in papers if (paper["suite"], paper["protocol"]) == wanted]


def sampling_of(problems):
    """Return {category: how its problems' responses are sampled}."""
    sampling = {}
    for problem in problems:
        how = {"samples": problem["samples"], "temperature": problem["temperature"]}
        sampling[problem["category"]] = how
    return sampling


def print_header(console, args) -> None:
    console.rule(f"[bold]evaluate.py[/] {escape(', '.join(args.models))}")
    shown_settings = [f"{name} [bold]{escape(str(value))}[/]" for name, value in settings_of(args).items()]
    console.print("   ".join(shown_settings))


def print_table(console, title, lines) -> None:
    """Print a table. lines: lists of cells; the first list has the titles."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(lines[0]):
        table.add_column(escape(name), justify="right" if i else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*(escape(cell.replace(" ± ", "\n±")) for cell in line))
    console.print(table)


def markdown(tables, below) -> str:
    """Format the tables, with the text below them."""
    text = ""
    for title, lines in tables.items():
        text += f"{title}:\n\n"
        for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]]:
            text += f"| {' | '.join(line)} |\n"
        text += "\n"
    return f"{text}{below}\n"


def file_name(rows, args) -> str:
    """Return the results' file name: the suite, the first model, and a digest of everything evaluated."""
    files_of = [[part["responses"] for part in row["checkpoints"]] for row in rows]
    digest = hashlib.sha256(json.dumps([settings_of(args), files_of]).encode()).hexdigest()
    others = f"_and_{len(rows) - 1}_more" * (len(rows) > 1)
    return f"{Path(args.suite).stem}_{short_name(args.models[0])}{others}_{digest[:8]}"


def write(results, text: str, responses, args):
    """Write the files of an evaluation into --out; return their names."""
    rows = results["rows"]
    name = file_name(rows, args)
    contents = {
        f"{name}.json": json.dumps(results, indent=1, ensure_ascii=False) + "\n",
        f"{name}.md": text,
    }
    if args.keep_responses:
        everything = chain(*chain(*responses))
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in everything]
        contents[f"{name}_responses.jsonl"] = "".join(lines)
    for file, content in contents.items():
        files.write(Path(args.out, file), content)
    written = list(contents)
    if args.words:
        words.draw(rows, Path(args.out, f"{name}_words.png"))
        written.append(f"{name}_words.png")
    return written

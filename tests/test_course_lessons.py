"""The course's texts: commands, quoted accuracies and outputs are right. test_docs.py looks at their links."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from tools import anchors

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "course"
PAGES = sorted(COURSE.glob("*.md"))
COMMAND = re.compile(r"^(?:nice )?python ((?:-m )?[\w./]+)(.*)$", re.MULTILINE)
# "<!-- test accuracy: A, B -->", then a table: a column of steps and one column for each kept run.
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
KEPT = re.compile(r"<!-- test accuracy: (.+?) -->\n\n\|.*\n\|[-| ]+\n((?:\|.*\n)+)")
INHERITED = {"settings.RunArgs": "runtime/settings.py", "common.Args": "lab/common.py"}  # classes of settings


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def class_of(path, name):
    return next(node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def settings_of(path):
    """The names of a program's settings: the fields of its Args, and of the class that it grew from."""
    args = class_of(path, "Args")
    classes = [args]
    for base in map(ast.unparse, args.bases):
        classes.append(class_of(ROOT / INHERITED[base], base.split(".")[1]))
    fields = [node for found in classes for node in found.body if isinstance(node, ast.AnnAssign)]
    return {field.target.id for field in fields}


def test_each_lesson_names_places_in_scripts_and_has_a_section_for_the_lecturer():
    lecturer = (COURSE / "lecturer.md").read_text()
    overview = (COURSE / "README.md").read_text()
    for number in range(9):
        text = (COURSE / f"lesson_{number}.md").read_text()
        assert anchors.NAMED.search(text), number
        assert f"python -m course.check {number}" in text
        assert text.count("<details>") == text.count("</details>") == 3, number
        assert f"## Lesson {number}:" in lecturer
        assert f"(lesson_{number}.md)" in overview


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_only_settings_that_exist(page):
    text = page.read_text().replace("\\\n", " ")
    for program, rest in COMMAND.findall(text):
        rest = rest.split(" #")[0].rstrip()
        module = program.removeprefix("-m ")
        if module == "course.check":
            assert re.fullmatch(r" ([0-8](\.\d)?( --solutions)?|--all( --solutions)?)", rest), rest
            continue
        path = ROOT / (module.replace(".", "/") + ".py" if program != module else module)
        assert path.exists(), program
        own = re.sub(r'"[^"]*"', "", rest)  # what is in quotes belongs to other programs
        flags = {flag.removeprefix("no_") for flag in re.findall(r"--(\w+)", own)}
        if flags:
            assert flags <= settings_of(path), (program, flags - settings_of(path))


def test_quoted_accuracies_are_those_of_the_kept_runs():
    num_tables = 0
    for page in PAGES:
        for runs, rows in KEPT.findall(page.read_text()):
            num_tables += 1
            kept = []
            for run in runs.split(", "):
                file = ROOT / "benchmarks" / "kk_tiny" / f"{run}.json"
                kept.append({row["step"]: row for row in json.loads(file.read_text())["rows"]})
            for row in rows.strip().split("\n"):
                step, *values = row.strip("| ").split(" | ")
                right = [f"{of_run[int(step)]['eval/accuracy']:.3f}" for of_run in kept]
                assert values == right, (page.name, row)
    assert num_tables >= 5


@pytest.mark.parametrize("number", range(9))
def test_live_snippets_print_what_is_said(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    text = (COURSE / "lecturer.md").read_text()
    section = re.split(r"^## Lesson \d: ", text, flags=re.MULTILINE)[number + 1]
    [(code, expected)] = SNIPPET.findall(section)
    exec(code, {})
    assert capsys.readouterr().out == expected

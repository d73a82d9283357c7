"""The course's texts: links, line numbers, commands, quoted accuracies and outputs are right.

`python tests/test_course_lessons.py` sets the line numbers anew, after a script has changed.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "course"
PAGES = sorted(COURSE.glob("*.md"))
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s]+)\)")
COMMAND = re.compile(r"^(?:nice )?python ((?:-m )?[\w./]+)(.*)$", re.MULTILINE)
# "<!-- test accuracy: A, B -->", then a table: a column of steps and one column for each kept run.
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
KEPT = re.compile(r"<!-- test accuracy: (.+?) -->\n\n\|.*\n\|[-| ]+\n((?:\|.*\n)+)")
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
INHERITED = {"settings.RunArgs": "runtime/settings.py", "common.Args": "lab/common.py"}  # classes of settings


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def find(node, name):
    """The definition of `name`, or of `Class.name`, inside a node; None if there is none."""
    first, _, rest = name.partition(".")
    for child in ast.walk(node):
        if isinstance(child, DEFINITIONS) and child.name == first:
            return find(child, rest) if rest else child
    return None


def right_lines(path, name):
    """The lines (from 1) that a link with this name may point at, the best one first.

    name: a function or class; `Class.method`; `function: word`, for a line inside the function that
    has this word; or a setting or constant, for the line that sets it.
    """
    outer, _, word = name.partition(": ")
    definition = find(tree_of(path), outer)
    if word:
        lines = path.read_text().split("\n")
        body = definition.body
        if ast.get_docstring(definition) is not None:
            body = body[1:]
        found = []
        for number in range(body[0].lineno, definition.end_lineno + 1):
            if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", lines[number - 1]):
                found.append(number)
        return found
    if definition is not None:
        return [definition.lineno]
    found = []
    for node in ast.walk(tree_of(path)):
        targets = []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found.append(node.lineno)
    return found


def links(text):
    """(text, path, line or None) of each relative link."""
    for match in LINK.finditer(text):
        target = match[2]
        if not target.startswith(("http", "#")):
            path, _, anchor = target.partition("#")
            line = int(anchor[1:]) if re.fullmatch(r"L\d+", anchor) else None
            yield " ".join(match[1].split()), path, line


def problems_of(text, folder):
    """What is wrong with the relative links of a page in this folder, as a list of texts."""
    problems = []
    for label, path, line in links(text):
        file = (folder / path).resolve()
        if not file.exists():
            problems.append(f"{label}: {path} does not exist")
        elif line is not None:
            script, _, name = label.partition(", ")
            right = right_lines(file, name) if script == file.name else []
            if line not in right:
                problems.append(f"{label}: line {line}, not one of {right}")
    return problems


def settings_of(path):
    """The names of a program's settings: the fields of its Args, and of the class that it grew from."""
    args = find(tree_of(path), "Args")
    classes = [args]
    for base in map(ast.unparse, args.bases):
        classes.append(find(tree_of(ROOT / INHERITED[base]), base.split(".")[1]))
    fields = [node for found in classes for node in found.body if isinstance(node, ast.AnnAssign)]
    return {field.target.id for field in fields}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist_and_point_at_what_they_name(page):
    assert problems_of(page.read_text(), page.parent) == []


def test_a_wrong_line_a_wrong_name_and_a_missing_file_are_found():
    line = find(tree_of(ROOT / "grpo.py"), "k3").lineno
    assert problems_of(f"[grpo.py, k3](../grpo.py#L{line})", COURSE) == []
    assert problems_of(f"[grpo.py, k3](../grpo.py#L{line + 1})", COURSE)
    assert problems_of(f"[grpo.py, policy_loss](../grpo.py#L{line})", COURSE)
    assert problems_of(f"[ppo.py, k3](../grpo.py#L{line})", COURSE)
    assert problems_of("[a lesson](lesson_99.md)", COURSE)
    assert problems_of(f"[grpo.py, k3: exp](../grpo.py#L{line})", COURSE)
    assert problems_of(f"[grpo.py, k3: exp](../grpo.py#L{line + 3})", COURSE) == []


def test_each_lesson_links_to_lines_and_has_a_section_for_the_lecturer():
    lecturer = (COURSE / "lecturer.md").read_text()
    overview = (COURSE / "README.md").read_text()
    for number in range(9):
        text = (COURSE / f"lesson_{number}.md").read_text()
        assert any(line is not None for _, _, line in links(text)), number
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_at_most_120_columns(page):
    assert [line for line in page.read_text().split("\n") if len(line) > 120] == []


def set_line_numbers():
    for page in PAGES:
        text = page.read_text()
        for match in LINK.finditer(text):
            path, _, anchor = match[2].partition("#")
            _, _, name = " ".join(match[1].split()).partition(", ")
            if name and re.fullmatch(r"L\d+", anchor):
                line, *_ = right_lines((page.parent / path).resolve(), name)
                text = text.replace(match[0], f"[{match[1]}]({path}#L{line})")
        page.write_text(text)


if __name__ == "__main__":
    set_line_numbers()

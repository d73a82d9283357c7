"""The pages: their places, commands and worked examples. Building the site (test_site.py) checks their links."""

import ast
import re
import tomllib
from pathlib import Path

from conftest import ROOT

from tools.maintain import anchors, pages

PAGES = sorted(
    path
    for pattern in "*.md docs/**/*.md course/*.md course/*/README.md examples/*.md lab/*.md models/kk_tiny/*.md".split()
    for path in ROOT.glob(pattern)
)
INHERITED = {"settings.RunArgs": "runtime/settings.py", "settings.CommonArgs": "runtime/settings.py"}
INHERITED |= {"common.Args": "lab/common.py"}
COMMAND = re.compile(r"(?:^(?:nice )?|`)python ((?:-m )?[\w./]+)([^\n`]*)", re.MULTILINE)


def flags_of(file, name="Args"):
    """The names of a script's settings: of its Args and of the class that it grew from, or of its main."""
    file = "evaluation/settings.py" if Path(file).name == "evaluate.py" else file
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            names |= {member.target.id for member in node.body if isinstance(member, ast.AnnAssign)}
            for base in map(ast.unparse, node.bases):
                names |= flags_of(INHERITED.get(base, file), base.split(".")[-1])
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            names |= {argument.arg for argument in node.args.args} - {"args"}
    return names


def test_every_place_that_a_page_names_is_there():
    """As the site resolves them: [grpo.py, k3: exp](../grpo.py), and the code in the tables of symbols."""
    for page in PAGES:
        anchors.with_anchors(page.read_text(), page.relative_to(ROOT).as_posix())


def test_commands_have_only_settings_that_exist():
    """Those of blocks and those of sentences."""
    for page in PAGES:
        for program, rest in COMMAND.findall(page.read_text().replace("\\\n", " ")):
            rest = rest.split(" #")[0].rstrip()
            module = program.removeprefix("-m ")
            if module == "pytest":
                assert all((ROOT / file).exists() for file in rest.split()), rest
                continue
            if module == "course.check":
                assert re.fullmatch(r" (([0-9]|1[0-5])( --solutions)?|--all( --solutions)?)", rest), rest
                continue
            path = ROOT / (module.replace(".", "/") + ".py" if program != module else module)
            assert path.exists(), (page, program)
            own = re.sub(r'"[^"]*"', "", rest)  # what is in quotes belongs to other programs
            flags = {flag.removeprefix("no_") for flag in re.findall(r"--(\w+)", own)} - {"help"}
            if flags:
                assert flags <= flags_of(path), (page, program, flags - flags_of(path))


def test_blocks_of_code_fit_beside_a_page_s_contents():
    """The site cuts a block of code off after 91 columns."""
    for page in PAGES:
        for block in re.findall(r"^ *```.*?^ *```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert not [line for line in block.splitlines() if len(line) > 88], page


def test_what_is_generated_is_up_to_date():
    """Tables, worked examples, claims, and numbers of kept runs: all that one command makes."""
    for path, text in pages.all_texts().items():
        assert path.read_text() == text, f"{path}: python -m tools.maintain.pages"


def test_uv_reads_what_pip_reads():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"] | {"common": project["project"]["dependencies"]}
    files = {group: f"requirements-{group}.txt" for group in groups} | {"gpu": "requirements.txt"}
    for group, file in files.items():
        lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
        assert groups[group] == [line for line in lines if line and not line.startswith("-r")], file

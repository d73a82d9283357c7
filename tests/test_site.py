"""The site of tools/maintain/site.py: its links, formulas and anchors, and, in a browser, its viewer and its search.

The site is built once. Without the generator (`make site` installs it into .venv-site) all of this is skipped, and
without playwright and a Chromium or Chrome what needs a browser.
"""

import ast
import difflib
import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def generator():
    """The interpreter that has the generator."""
    path = ROOT / ".venv-site/bin/python"
    if path.is_file():
        return path
    if importlib.util.find_spec("zensical"):
        return sys.executable
    pytest.skip("no generator: `make site` installs it")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [generator(), "-m", "tools.maintain.site", "--out", folder]
    env = os.environ | {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "some/repository"}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert made.returncode == 0, made.stdout + made.stderr  # it looks for links that lead nowhere itself
    return folder


@pytest.fixture
def page(site):
    """A page of Chromium or Chrome, which must load nothing from a network and leave no error behind."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")))
    if not (binary := next(found, None)):
        pytest.skip("neither Chromium nor Chrome is installed")
    errors, asked = [], []
    with playwright.sync_playwright() as started:
        page = started.chromium.launch(executable_path=binary, args=["--no-sandbox"]).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        yield page
    assert not errors and not [url for url in asked if not url.startswith(("file:", "data:", "about:"))]


@pytest.mark.parametrize("left, right", [("grpo", "dapo"), ("acpo", "reinforce_pp_ar_lopti")])
def test_the_viewer_shows_every_line_once_and_as_many_equal_ones_as_difflib_finds(page, site, left, right):
    page.goto(f"{site.as_uri()}/diff.html")
    rows = page.evaluate(
        f"parts(script('{left}'), script('{right}'), false).slice(0, -1)"
        ".flatMap((part) => part.rows.map((row) => [row.left, row.right, row.equal, row.marks]))"
    )
    code = []
    for name in (left, right):
        lines = (ROOT / f"{name}.py").read_text().splitlines()
        code.append((lines, ast.parse("\n".join(lines)).body[0].end_lineno))  # the docstring is the last part
    for side, (lines, first) in enumerate(code):
        assert [lines[row[side]] for row in rows if row[side] is not None] == lines[first:]
    matcher = difflib.SequenceMatcher(None, *(lines[first:] for lines, first in code), autojunk=False)
    assert sum(row[2] for row in rows) == sum(block.size for block in matcher.get_matching_blocks())
    assert all(code[0][0][i] == code[1][0][j] for i, j, equal, _ in rows if equal)

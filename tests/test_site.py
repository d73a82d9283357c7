"""The site of tools/maintain/site.py: its links, formulas and anchors, and, in a browser, its pages and its viewer.

The site is built once. Without the generator (`make site` installs it into .venv-site) all of this is skipped, and
without playwright and a Chromium or Chrome what needs a browser.
"""

import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

from tools import family


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    python = ROOT / ".venv-site/bin/python"
    if not python.is_file():
        pytest.skip("no generator: `make site` installs it")
    command = [python, "-m", "tools.maintain.site", "--out", folder]
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


def test_pages_load_without_errors(page, site):
    for name in ("index.html", "docs/claims.html", "lens.html", "grpo.py.html"):
        page.goto(f"{site.as_uri()}/{name}")
        assert page.text_content("h1")


@pytest.mark.parametrize("left, right", [("grpo", "dapo"), ("acpo", "reinforce_pp_ar_lopti")])
def test_the_viewer_shows_what_goes_and_what_comes(page, site, left, right):
    page.goto(f"{site.as_uri()}/diff.html#left={left}&right={right}&all=1")
    counts = map(int, re.findall(r"\d+", page.text_content("#counts")))
    for name, mark, count in zip((left, right), ("del", "ins"), counts):
        lines = (ROOT / f"{name}.py").read_text().splitlines()
        shown = page.locator(f"td.d2h-{mark} .d2h-code-line-ctn").all_text_contents()
        assert count == len(shown) > 0 and set(shown) <= set(lines)


def test_the_number_of_a_line_is_beside_it_and_the_line_that_a_link_names_is_marked(page, site):
    page.goto(f"{site.as_uri()}/grpo.py.html#L-500")
    lines = (ROOT / "grpo.py").read_text().splitlines()
    for number in (1, 100, 500, len(lines)):
        line = page.locator(f"#L-{number}")
        link = line.locator("[data-linenos]")
        assert link.get_attribute("data-linenos").strip() == str(number) and line.inner_text().rstrip() == lines[number - 1]
        assert abs(link.bounding_box()["y"] - line.bounding_box()["y"]) < 4
    ground = "line => getComputedStyle(line).backgroundColor"
    assert page.locator("#L-500").evaluate(ground) != page.locator("#L-499").evaluate(ground)


def test_the_page_of_each_script_shows_what_differs_from_its_parent_and_links_to_the_viewer(site):
    for script in set(family.family()) - {"grpo"}:
        text = (site / f"docs/algorithms/{script}.html").read_text()
        assert f'href="../../diff.html#left={family.PARENT[script]}&amp;right={script}"' in text, script
        shown = text.partition(f"<summary>The lines that differ from {family.PARENT[script]}.py")[2]
        removed, added = (len(re.findall(f'<span class="{kind}">', shown)) for kind in ("gd", "gi"))
        assert removed + added >= family.changed(family.source(family.PARENT[script]), family.source(script)), script

"""The site of tools/maintain/site.py: its links, formulas and anchors, and, in a browser, its pages and its viewer.

The site is built once. Without the generator (`make site` installs it into .venv-site) all of this is skipped, and
without playwright and a Chromium or Chrome what needs a browser.
"""

import json
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
def test_the_viewer_shows_what_goes_and_what_comes_with_the_lines_own_numbers(page, site, left, right):
    page.goto(f"{site.as_uri()}/diff.html#left={left}&right={right}&all=1")
    counts = map(int, re.findall(r"[−+](\d+)", page.text_content("#counts")))
    for name, mark, count in zip((left, right), ("del", "ins"), counts):
        lines = (ROOT / f"{name}.py").read_text().splitlines()
        numbers = page.locator(f"td.number.{mark}").all_text_contents()
        shown = page.locator(f"td.{mark}:not(.number)").all_text_contents()
        assert count == len(shown) > 0
        assert [line.rstrip() for line in shown] == [lines[int(number) - 1].rstrip() for number in numbers]


def test_the_viewer_begins_with_the_parent_and_folds_imports_and_settings(page, site):
    page.goto(f"{site.as_uri()}/diff.html#right=gigpo")
    assert page.input_value("#left") == family.PARENT["gigpo"]
    page.select_option("#right", "grpo_ar_lopti")
    page.wait_for_function("document.querySelector('#counts').textContent.includes('grpo_ar_lopti')")
    assert page.input_value("#left") == "grpo"
    heads = page.locator("#viewer details").evaluate_all(
        "all => all.map((one) => [one.innerText.split(' ')[0], one.open])"
    )
    assert ["ar_weight", True] in heads and ["update", True] in heads and ["Args", False] in heads
    assert page.locator("#viewer .k").count()  # Python's colours
    widths = page.locator("#viewer details[open] tr:not(.far) td.number").evaluate_all(
        "all => all.map((of) => of.clientWidth)"
    )
    assert max(widths) < 60  # also in a table that begins with a row of one cell


def test_the_number_of_a_line_is_beside_it_and_the_line_that_a_link_names_is_marked(page, site):
    page.goto(f"{site.as_uri()}/grpo.py.html#L-500")
    lines = (ROOT / "grpo.py").read_text().splitlines()
    for number in (1, 100, 500, len(lines)):
        line = page.locator(f"#L-{number}")
        link = line.locator("[data-linenos]")
        assert (
            link.get_attribute("data-linenos").strip() == str(number)
            and line.inner_text().rstrip() == lines[number - 1]
        )
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


QUERIES = {  # what people look for: the page that must come first
    "docs/data": ["custom dataset", "train on my own data", "gsm8k", "qwen3"],
    "docs/troubleshooting": ["out of memory", "learning rate", "resume"],
    "docs/metrics": ["wandb", "tensorboard", "checkpoint"],
    "docs/add_a_task": ["reward function", "add a task"],
    "docs/scaling": ["multi gpu", "lora"],
    "examples/index": ["slurm", "colab", "docker"],
    "docs/agents": ["agent"],
    "docs/evaluation": ["evaluate"],
    "docs/algorithms/dapo": ["dapo"],
    "docs/reward_models": ["reward model"],
}
ASK = """async ([worker, data, queries]) => {
  const found = {}, sent = [], self = { postMessage: (message) => sent.push(message) };
  new Function("self", worker)(self);
  self.onmessage({ data: { type: 0, data: structuredClone(data) } });
  const next = async () => {
    while (!sent.length) await new Promise((done) => setTimeout(done, 5));
    return sent.pop();
  };
  const filter = { input: { type: "operator", data: { operator: "and", operands: [] } } };
  await next();
  for (const input of queries) {
    self.onmessage({ data: { type: 2, data: { input, filter: structuredClone(filter) } } });  // it adds to the filter
    found[input] = (await next()).data.items.map((item) => data.items[item.id].location);
  }
  return found;
}"""


def test_a_search_finds_the_page_first_and_neither_quiz_nor_notes_nor_changes(page, site):
    page.goto(f"{site.as_uri()}/diff.html")
    [worker] = site.glob("assets/javascripts/workers/search.*.js")
    data = json.loads((site / "search.json").read_text())
    queries = [query for of_page in QUERIES.values() for query in of_page]
    found = page.evaluate(ASK, [worker.read_text(), data, queries])
    for name, of_page in QUERIES.items():
        for query in of_page:
            assert found[query] and found[query][0].startswith(f"{name}.html"), (query, found[query][:3])
    unsought = ("CHANGELOG", "course/quiz", "course/lecturer", "benchmarks/")
    assert not [item["location"] for item in data["items"] if item["location"].startswith(unsought)]


def test_home_leads_on_above_the_fold_and_the_lens_begins_where_its_sides_differ(page, site):
    page.goto(f"{site.as_uri()}/index.html")
    tops = [
        page.locator("article .md-button", has_text=name).bounding_box()["y"] for name in ("Run it", "Course", "Alg")
    ]
    assert max(tops) < 800 and page.locator("header .md-source").first.get_attribute("href").endswith("some/repository")
    for name in ("index", "lens", "course/lesson_05/index", "course/lesson_06/index"):
        page.goto(f"{site.as_uri()}/{name}.html")
        colours = "sides => sides.map((side) => [...side.children].map((token) => token.style.background))"
        left, right = page.locator("#lens .text").evaluate_all(colours)
        assert sum(a != b for a, b in zip(left, right)) >= 5, name
        assert page.locator("#lens .token.differs").count() >= 2, name  # framed, so that one sees the difference
    page.locator("#lens select").last.select_option("probability")
    assert page.locator("#lens .differs").count() == 0  # a probability and a weight can't be compared


def test_a_phone_shows_pictures_with_letters_of_9_px_and_lines_of_code_of_its_width(page, site):
    page.set_viewport_size({"width": 400, "height": 800})
    for name in ("index", "docs/comparison", "docs/add_a_task", "docs/algorithms/dapo"):
        page.goto(f"{site.as_uri()}/{name}.html")
        get = "all => all.map((one) => [one.width, one.naturalWidth, one.closest('p, picture').tabIndex])"
        shown = page.locator("article img").evaluate_all(get)
        assert shown and all(width >= min(natural, 750) and focus == 0 for width, natural, focus in shown), name
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.goto(f"{site.as_uri()}/diff.html#left=grpo&right=dapo")
    lines = page.locator("#viewer details[open] td:is(.ins, .del):not(.number)")
    assert min(lines.evaluate_all("all => all.map((line) => line.clientWidth)")) > 200


def test_a_lesson_s_old_address_leads_to_its_place(page, site):
    page.goto(f"{site.as_uri()}/course/lesson_5.html#exercises", wait_until="commit")
    page.wait_for_url("**/course/lesson_05/index.html#exercises")


def test_wide_pages_have_their_contents_beside_them_and_claims_their_plots(page, site):
    page.set_viewport_size({"width": 1280, "height": 800})
    for name in ("docs/claims", "docs/comparison", "docs/objectives", "lab/index"):
        page.goto(f"{site.as_uri()}/{name}.html")
        assert page.locator(".md-sidebar--secondary").is_visible(), name
    page.goto(f"{site.as_uri()}/docs/index.html")
    listed = page.locator(".md-sidebar--primary a:visible").evaluate_all("all => all.map((link) => link.href)")
    linked = page.locator("article li a").evaluate_all("all => all.map((link) => link.href)")
    hidden = set(linked) - set(listed)  # every guide stands in the list beside the page, too
    assert linked and not hidden
    page.goto(f"{site.as_uri()}/docs/claims.html")
    plots, rows = (page.locator(f"article {what}").count() for what in ("svg.forest", "tr:has(td details)"))
    assert plots >= rows > 50 and not page.locator("article td details[open]").count()

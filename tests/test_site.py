"""The site of tools/maintain/site.py: its links, formulas and anchors, and, in a browser, its viewer and its search.

The site is built once. Without the generator (`make site` installs it into .venv-site) all of this is skipped, and
without playwright and a Chromium or Chrome what needs a browser.
"""

import ast
import difflib
import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tools import family

HIDING = """[...document.querySelectorAll('article table:not(.diff)')].filter((table) => {
  for (let box = table; box.tagName !== 'ARTICLE'; box = box.parentElement)
    if (box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== 'visible') return true;
}).length"""
AXE = """(options) => axe.run(document, options).then((found) => found.violations.map(
  (rule) => `${rule.id}: ${rule.nodes.length} × ${rule.nodes[0].target} ${rule.nodes[0].any[0]?.message ?? ''}`))"""


@pytest.fixture(scope="session")
def python():
    """The interpreter that has the generator."""
    path = ROOT / ".venv-site/bin/python"
    if path.is_file():
        return path
    if importlib.util.find_spec("zensical"):
        return sys.executable
    pytest.skip("no generator: `make site` installs it")


@pytest.fixture(scope="session")
def site(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [python, "-m", "tools.maintain.site", "--out", folder]
    env = os.environ | {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "some/repository"}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert made.returncode == 0, made.stdout + made.stderr  # it looks for links that lead nowhere itself
    return folder


@pytest.fixture(scope="session")
def inside(python):
    """Runs a program with site.py and site_markdown.py of tools/maintain; the JSON that its last line prints."""

    def run(program):
        imports = "import json\nfrom pathlib import Path\nfrom tools.maintain import site, site_markdown as md\n"
        done = subprocess.run([python, "-c", imports + program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def page(browser_page, site):
    """The browser with open_page(address within the site); the page must load nothing from a network."""
    asked = []
    browser_page.on("request", lambda request: asked.append(request.url))
    browser_page.open_page = lambda address: (
        browser_page.goto("about:blank"),
        browser_page.goto(f"{site.as_uri()}/{address}"),
    )
    yield browser_page
    assert not [address for address in asked if not address.startswith(("file:", "data:", "about:"))]


# --------------------------------------------------------------------------------------------------------------------
# Markdown

LIST = "Text\n- one\n  - two\n\n<details>\n\n**bold**\n\n</details>\n\n| a |\n|---|\n| `x \\| y` |"
FORMULAS = "A half is $\\frac{1}{2}$, not `$\\frac{1}{2}$`.\n\n$$\nx\n$$\n\n```math\nz\n```\n"
PAPERS = "*DAPO* (arXiv 2503.14476). [arXiv 2402.03300](x.md), `2402.03301`, 1.25001, 2.2402.03302"


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        (LIST, r"<(?:ul|li|strong|code)>", ["<ul>", "<li>", "<ul>", "<li>", "<strong>", "<code>"]),
        (
            "# Where `grpo.py` & co. differ?\n## Same\n## Same",
            r'id="(.*?)"',
            ["where-grpopy--co-differ", "same", "same-1"],
        ),
        (PAPERS, r'"(https:[^"]+)">', ["https://arxiv.org/abs/2503.14476"]),
        ("| a | b |\n|---|---|\n| 1 ± 0.5 | 3 |\n|  | x |\n", r'class="number">(.*?)<', ["a", "1 ± 0.5", ""]),
        (FORMULAS, r"<mfrac>|<math |\$.*?\$", ["<math ", "<mfrac>", "$\\frac{1}{2}$", "<math ", "<math "]),
        ("$\\nosuchthing x$ $\\left( x$", "unreadable-formula", ["unreadable-formula"] * 2),
    ],
)
def test_markdown_is_read_as_github_reads_it(inside, text, pattern, found):
    assert re.findall(pattern, inside(f"print(json.dumps(md.rendered({text!r}, 'docs/page.md', {{}})[0]))")) == found


def test_links_of_github_lead_to_pages(inside):
    links = {
        "other.md#part": "other.html#part",
        "../README.md": "../index.html",
        "../grpo.py#L10-L20": "../grpo.py.html#L10",
        "../lab/": "../lab/index.html",
        "../lab/results/lens.png": "../lab/results/lens.png",
        "#here": "#here",
        "https://arxiv.org/abs/2402.03300": "https://arxiv.org/abs/2402.03300",
    }
    files = {"grpo.py": "grpo.py.html", "lab": "lab/index.html"}
    made = [f"md.site_link({link!r}, 'docs/page.md', {files!r})" for link in links]
    assert inside(f"print(json.dumps([{', '.join(made)}]))") == list(links.values())


# --------------------------------------------------------------------------------------------------------------------
# what is built


def test_faults_are_found(inside, tmp_path):
    wrong = ["b.html#not", "c.html", "/b.html", "diff.html#left=grpo&right=nothing"]
    links = [f'<a href="{link}"></a>' for link in ["b.html#there", "https://example.org", *wrong]]
    links.append('<img src="https://example.org/x.png"><a href="diff.html#left=grpo&right=dapo">6</a>')
    (tmp_path / "a.html").write_text("".join(links))
    (tmp_path / "b.html").write_text('<p id="there"><code class="unreadable-formula">x</code></p>')
    (tmp_path / "diff.html").write_text("<p></p>")
    (tmp_path / "a.css").write_text('a { background: url("https://example.org/y.png") url(data:image/png;base64,AA) }')
    found = inside(f"print(json.dumps(site.faults(Path({str(tmp_path)!r}))))")
    expected = [f"a.html: {link}" for link in [*wrong, "https://example.org/x.png"]]
    expected += ["b.html: a", "a.css: https://example.org/y.png"]
    assert sorted(" ".join(line.split()[:2]) for line in found) == sorted(expected)


def test_every_text_has_a_page_with_its_headings_and_no_formula_as_it_was_written(site):
    for pattern in ("README.md", "docs/**/*.md", "course/*.md", "lab/README.md"):
        for path in ROOT.glob(pattern):
            name = path.relative_to(ROOT).as_posix()
            shown = (site / re.sub(r"README\.md$", "index.html", name).replace(".md", ".html")).read_text()
            body = shown[shown.index("<article") : shown.index("</article>")]
            text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            assert len(re.findall(r"<h[1-6] id=", body)) == len(re.findall(r"^#{1,6} ", text, re.MULTILINE)), name
            assert not re.search(r"\$\$|\\frac", re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", body, flags=re.DOTALL))


def test_every_source_file_has_a_page_with_an_anchor_for_each_line(site):
    for path in [*ROOT.glob("*.py"), *(ROOT / "runtime").glob("*.py"), *(ROOT / "rewards").glob("*.py")]:
        shown = (site / f"{path.relative_to(ROOT)}.html").read_text()
        lines = re.findall(r'<span id="L(\d+)" class="line"><a [^>]*></a>(.*?)\n</span>', shown, flags=re.DOTALL)
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
        texts = [html.unescape(re.sub("<[^>]+>", "", line)) for _, line in lines]
        assert texts == path.read_text().splitlines(), path


def test_the_result_of_something_else_is_not_removed(python, tmp_path):
    kept = tmp_path / "mine.txt"
    kept.write_text("mine")
    program = (
        "from pathlib import Path\nfrom tools.maintain import site\n"
        f"site.publish(Path('nothing'), Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "no earlier build" in done.stderr and kept.read_text() == "mine"


# --------------------------------------------------------------------------------------------------------------------
# in a browser


@pytest.mark.parametrize("left, right", [("grpo", "dapo"), ("acpo", "reinforce_pp_ar_lopti")])
def test_the_viewer_shows_every_line_once_and_as_many_equal_ones_as_difflib_finds(page, left, right):
    page.open_page("diff.html")
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


def test_the_viewers_state_is_in_its_address_and_follows_its_controls(page):
    def state():
        return page.evaluate("['left', 'right'].map((id) => document.getElementById(id).value)")

    page.open_page("diff.html#left=ppo&right=sapo&code=1&section=loss")
    assert state() == ["ppo", "sapo"] and page.evaluate("document.activeElement.textContent") == "loss"
    assert '"""' not in page.inner_text("#viewer")  # code alone
    page.open_page("diff.html#left=nothing&right=../x&code=7")
    assert state() == ["grpo", "grpo_ar_lopti"]
    page.focus("#right")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # swaps
    page.wait_for_function("location.hash === '#left=grpo_ar_lopti&right=grpo'")
    page.go_back()
    page.wait_for_function("document.getElementById('left').value === 'grpo'")


def test_claims_are_chosen_by_verdict(page):
    page.open_page("docs/claims.html")
    page.locator(".ask select").first.select_option("shows")
    shown, of = map(int, re.findall(r"\d+", page.text_content(".ask span")))
    assert of - shown == page.locator("article tbody tr[hidden]").count() > shown > 5


def test_search_works_from_a_folder(page, site):
    page.open_page("index.html")
    page.click(".md-search__button")
    page.keyboard.type("lopti")
    page.wait_for_selector("mark:has-text('lopti')")
    links = page.locator("a:has(mark)").evaluate_all("(links) => links.map((link) => link.href.split('?')[0])")
    assert links and all((site / link.removeprefix(f"{site.as_uri()}/")).is_file() for link in links)


@pytest.mark.parametrize("address", ["index.html", "docs/what_fits.html", "lab/results/lens.html", "grpo.py.html"])
def test_pages_fit_a_phone_and_are_dark_where_the_system_is(page, address):
    page.set_viewport_size({"width": 400, "height": 800})
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.open_page(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


@pytest.mark.slow
def test_no_page_breaks_a_rule_of_accessibility_or_hides_a_column(page, site):
    """By axe-core, light and dark. All source files' pages are alike: two are looked at."""
    axe = Path(pytest.importorskip("axe_core_python").__file__).parent / "axe.min.js"
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    faults = []
    for name in names:
        if name.endswith(".py.html") and name not in ("grpo.py.html", "rewards/kk.py.html"):
            continue
        for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            page.emulate_media(color_scheme=scheme)
            page.open_page(name)
            page.add_script_tag(content=axe.read_text())
            faults += [f"{name}, {scheme}: {fault}" for fault in page.evaluate(AXE, options)]
        if hiding := page.evaluate(HIDING):
            faults.append(f"{name}: {hiding} tables hide columns")
    assert not faults, "\n".join(faults)


def test_differences_are_links_to_the_viewer(site):
    viewer = html.unescape((site / "diff.html").read_text())
    for child, parent in family.PARENT.items():
        page = html.unescape((site / f"docs/algorithms/{child}.html").read_text())
        assert f'href="../../diff.html#left={parent}&right={child}"' in page
        assert f'href="#left={parent}&right={child}"' in viewer

"""The site that tools/site.py builds: its links, formulas and anchors, and, in a browser, its viewer and its search.

The site is built once. Without the generator (`make site` installs it into .venv-site) all of this is skipped, and
without Chromium or Chrome what needs a browser.
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

import browser
import pytest
from conftest import ROOT

from tools import family, updates

PAIRS = [("grpo", "dapo"), ("dapo", "grpo"), ("reinforce", "ppo"), ("acpo", "reinforce_pp_ar_lopti"), ("gspo", "gspo")]


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
    command = [python, "-m", "tools.site", "--out", folder]
    env = os.environ | {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "some/repository"}
    made = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="session")
def inside(python):
    """Runs a program with tools/site.py and tools/site_markdown.py; the JSON that its last line prints."""

    def run(program):
        program = f"import json\nfrom pathlib import Path\nfrom tools import site, site_markdown as md\n{program}"
        done = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if not browser.binary():
        pytest.skip("neither Chromium nor Chrome is installed")
    with browser.Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def page(chromium, site):
    """The browser, wide and light, with open_page(address within the site); the page must leave no error behind."""
    chromium.resize(1280, 900)
    chromium.dark(False)
    chromium.open_page = lambda address: chromium.open(f"{site.as_uri()}/{address}")
    chromium.open("about:blank#")
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium
    assert not chromium.errors
    assert not [address for address in chromium.requests if not address.startswith(("file:", "data:", "about:"))]


# --------------------------------------------------------------------------------------------------------------------
# Markdown


def rendered(inside, text, path="docs/page.md", files=None):
    return inside(f"print(json.dumps(md.rendered({text!r}, {path!r}, {files or {}!r})[0]))")


def test_markdown_is_read_as_github_reads_it(inside):
    text = "Text\n- one\n  - two\n\n<details><summary>Answer</summary>\n\n**bold**\n\n</details>\n\n"
    text += "| a |\n|---|\n| `x \\| y` |\n"
    found = re.sub(r"\s+", "", rendered(inside, text))
    assert "<ul><li>one<ul><li>two</li></ul></li></ul>" in found
    assert "<details><summary>Answer</summary><p><strong>bold</strong></p></details>" in found
    assert "<td><code>x|y</code></td>" in found


def test_headings_have_the_anchors_of_github(inside):
    found = rendered(inside, "# Where `grpo.py` & co. differ?\n\n## Same\n\n## Same\n")
    assert re.findall(r'id="([^"]+)"', found) == ["where-grpopy--co-differ", "same", "same-1"]


@pytest.mark.parametrize(
    "link, expected",
    [
        ("other.md#part", "other.html#part"),
        ("../README.md", "../index.html"),
        ("../lab/README.md", "../lab/index.html"),
        ("../grpo.py#L417", "../grpo.py.html#L417"),
        ("../grpo.py#L10-L20", "../grpo.py.html#L10"),
        ("../lab/", "../lab/index.html"),
        ("../lab/results/lens.png", "../lab/results/lens.png"),
        ("#here", "#here"),
        ("https://arxiv.org/abs/2402.03300", "https://arxiv.org/abs/2402.03300"),
    ],
)
def test_links_of_github_lead_to_pages(inside, link, expected):
    files = {"grpo.py": "grpo.py.html", "lab": "lab/index.html"}
    found = rendered(inside, f'[x]({link}) <a href="{link}">y</a>', files=files)
    assert re.findall(r'href="([^"]+)"', found) == [expected, expected]


def test_numbers_of_papers_are_links_to_them_once(inside):
    found = rendered(inside, "*DAPO* (arXiv 2503.14476). [arXiv 2402.03300](x.md), `2402.03301`, 1.25001, 2.2402.03302")
    assert re.findall(r'href="(https:[^"]+)">(.*?)</a>', found) == [("https://arxiv.org/abs/2503.14476", "2503.14476")]
    found = rendered(inside, '```python numbered\n"""arXiv 2503.14476"""\n```\n')
    assert '<a href="https://arxiv.org/abs/2503.14476">2503.14476</a>' in found


def test_columns_of_numbers_are_marked(inside):
    table = "| a | b | c |\n|---|---|---|\n| 1 ± 0.5 | 3 | [2](x.md) |\n|  | x | −1,000.5 % |\n"
    found = rendered(inside, table)
    assert re.findall(r'<t[hd] class="number">(?:<a.*?>)?(.*?)<', found) == ["a", "c", "1 ± 0.5", "2", "", "−1,000.5 %"]


def test_cells_of_wide_tables_know_their_title(inside):
    """Those of a dozen columns, each with a title in words."""
    titles = [f"title {number}" for number in range(12)]

    def table(titles):
        lines = [titles, ["---"] * len(titles), [str(number) for number in range(len(titles))]]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    found = rendered(inside, table(titles))
    assert re.findall(r'data-title="(title \d+)">(\d+)<', found) == [(f"title {n}", str(n)) for n in range(12)]
    for other in (titles[:10], ["", *titles[1:]], ["$\\pi$", *titles[1:]]):
        assert "data-title" not in rendered(inside, table(other))


def test_long_names_may_be_broken_behind_an_underscore(inside):
    name = "scaled_dot_product_flash_attention"
    found = rendered(inside, f"{name}, `{name}`, short_name")
    assert found.count(name.replace("_", "_<wbr>")) == 2 and "short_name" in found


def test_formulas_become_mathml(inside):
    found = rendered(
        inside, "A half is $\\frac{1}{2}$, not `$\\frac{1}{2}$`.\n\n$$\nx \\sim \\pi_\\theta\n$$\n\n```math\nz\n```\n"
    )
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>" in found
    assert found.count("<math ") == 3 and found.count('display="block"') == 2
    assert "<mo>∼</mo>" in html.unescape(found) and "<code>$\\frac{1}{2}$</code>" in found


def test_an_unknown_command_in_a_formula_is_a_fault(inside):
    assert 'class="unreadable-formula"' in rendered(inside, "$\\nosuchthing x$")
    assert 'class="unreadable-formula"' in rendered(inside, "$\\left( x$")


# --------------------------------------------------------------------------------------------------------------------
# what is built


def test_faults_are_found(inside, tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a><a href="b.html#not">2</a><a href="c.html">3</a><a href="/b.html">4</a>'
        '<img src="https://example.org/x.png"><script src="//example.org/x.js"></script><a href="https://example.org">5</a>'
        '<a href="diff.html#left=grpo&right=dapo">6</a><a href="diff.html#left=grpo&right=nothing">7</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><code class="unreadable-formula">x</code></p>')
    (tmp_path / "diff.html").write_text("<p></p>")
    (tmp_path / "a.css").write_text('a { background: url("https://example.org/y.png") url(data:image/png;base64,AA) }')
    found = inside(f"print(json.dumps(site.faults(Path({str(tmp_path)!r}))))")
    assert sorted(line.split()[:2] for line in found) == sorted(
        [
            ["a.html:", "b.html#not"],
            ["a.html:", "c.html"],
            ["a.html:", "/b.html"],
            ["a.html:", "https://example.org/x.png"],
            ["a.html:", "//example.org/x.js"],
            ["a.html:", "diff.html#left=grpo&right=nothing"],
            ["b.html:", "a"],
            ["a.css:", "https://example.org/y.png"],
        ]
    )


def test_every_text_has_a_page(site):
    patterns = "README.md docs/*.md docs/algorithms/*.md course/*.md lab/README.md models/kk_tiny/README.md".split()
    texts = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert len(texts) >= 4
    for path in texts:
        name = path.relative_to(ROOT).as_posix()
        name = re.sub(r"README\.md$", "index.html", name).replace(".md", ".html")
        shown = (site / name).read_text()
        body = shown[shown.index("<article") : shown.index("</article>")]
        text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        headings = re.findall(r"^#{1,6} ", text, flags=re.MULTILINE)
        assert len(re.findall(r"<h[1-6] id=", body)) == len(headings), name
        assert not re.search(
            r"wzxhzdk|\$\$|\\frac", re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", body, flags=re.DOTALL)
        )


def test_every_source_file_has_a_page_with_an_anchor_for_each_line(site):
    sources = [*ROOT.glob("*.py"), *(ROOT / "runtime").glob("*.py"), *(ROOT / "rewards").glob("*.py")]
    assert len(sources) > 40
    for path in sources:
        shown = (site / f"{path.relative_to(ROOT)}.html").read_text()
        lines = re.findall(r'<span id="L(\d+)" class="line"><a [^>]*></a>(.*?)\n</span>', shown, flags=re.DOTALL)
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
        texts = [html.unescape(re.sub("<[^>]+>", "", line)) for _, line in lines]
        assert texts == path.read_text().splitlines(), path


def test_every_page_leads_home_and_to_the_repository(site):
    address = re.search(r"^repository-code: *(.*)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    address = address[1].strip('"') if address else "https://github.com/some/repository"
    for path in site.rglob("*.html"):
        shown = path.read_text()
        assert f'<a href="{address}"' in shown and 'class="md-header__button md-logo"' in shown, path


def test_the_lens_is_there_in_the_design_of_the_site(page, site):
    data = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
    shown, kept = ((folder / "lab/results/lens.html").read_text() for folder in (site, ROOT))
    assert json.loads(data.search(shown)[1]) == json.loads(data.search(kept)[1])
    page.open_page("lab/results/lens.html")
    assert page.run("document.querySelectorAll('.token').length") > 10
    assert page.run("document.querySelector('.md-tabs a').href").endswith("/index.html")
    colours = []
    for scheme in (False, True):
        page.dark(scheme)
        page.open_page("lab/results/lens.html")
        colours.append(page.run("getComputedStyle(document.querySelector('#lens select')).backgroundColor"))
    assert colours[0] != colours[1]


def test_no_page_is_found_twice_and_no_raw_table(site):
    items = json.loads((site / "search.json").read_text())["items"]
    assert (site / "search.js").read_text() == f"var __index = {(site / 'search.json').read_text()};"
    titles = [(item["location"].partition("#")[0], item["title"]) for item in items if item["level"] == 1]
    assert len(titles) > 40 and len(titles) == len(set(titles))
    assert not [item for item in items if item["location"].startswith("benchmarks/kk_tiny/")]


def test_an_algorithms_page_has_one_next(site):
    seen = 0
    for path in (ROOT / "docs/algorithms").glob("*.md"):
        shown = (site / f"docs/algorithms/{path.stem}.html").read_text() if path.stem != "README" else ""
        ours = re.search(r' next: <a href="([^"]+)">', shown)
        if ours:
            seen += 1
            assert re.search(r'<link rel="next" href="([^"]+)"', shown)[1].rpartition("/")[2] == ours[1]
    assert seen == len(updates.ALGORITHMS)


def test_places_in_scripts_are_links_to_their_lines_and_differences_to_the_viewer(site):
    lines = (ROOT / "reinforce.py").read_text().splitlines()
    number = lines.index("def main():") + 1
    assert (
        f'href="../reinforce.py.html#L{number}">reinforce.py, main</a>' in (site / "course/lesson_0.html").read_text()
    )
    page = html.unescape((site / "docs/algorithms/reinforce.html").read_text())
    number = next(k for k, line in enumerate(lines, 1) if 'loss = -batch["advantages"] * logp' in line)
    assert f'<a href="../../reinforce.py.html#L{number}"><code>loss = -batch["advantages"] * logp</code></a>' in page
    for child, parent in family.PARENT.items():
        page = html.unescape((site / f"docs/algorithms/{child}.html").read_text())
        assert f'href="../../diff.html#left={parent}&right={child}"' in page
        assert f'href="#left={parent}&right={child}"' in html.unescape((site / "diff.html").read_text())


def test_the_result_of_something_else_is_not_removed(python, inside, tmp_path):
    kept = tmp_path / "mine.txt"
    kept.write_text("mine")
    program = f"""
try:
    site.publish(Path('nothing'), Path({str(tmp_path)!r}))
except ValueError as error:
    print(json.dumps(str(error)))"""
    assert "no earlier build" in inside(program) and kept.read_text() == "mine"


# --------------------------------------------------------------------------------------------------------------------
# in a browser


def shown_by_viewer(page, left, right, code_only=False):
    """[(name of the part, [(left line, right line, equal), …]), …]"""
    found = page.run(
        f"JSON.stringify(parts(script('{left}'), script('{right}'), {json.dumps(code_only)})"
        ".map((part) => [part.name, part.rows.map((row) => [row.left, row.right, row.equal, row.marks])]))"
    )
    return json.loads(found)


def apart(name):
    """The lines of a script's code, and of its docstring."""
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    end = ast.parse("\n".join(lines)).body[0].end_lineno
    return lines[end:], lines[:end]


def without_marks(line, marks):
    for first, last in reversed(marks):
        line = line[:first] + line[last:]
    return line


@pytest.mark.parametrize("left, right", PAIRS)
def test_viewer_finds_what_differs(page, left, right):
    """Every line once and in order; as many equal lines as difflib finds; what is not marked in a row is the same."""
    page.open_page("diff.html")
    found = shown_by_viewer(page, left, right)
    texts = [(ROOT / f"{name}.py").read_text().splitlines() for name in (left, right)]
    docstring = found.pop()
    assert docstring[0] == "docstring"
    code = [row for _, rows in found for row in rows]
    for rows, parts in (
        (code, [apart(name)[0] for name in (left, right)]),
        (docstring[1], [apart(left)[1], apart(right)[1]]),
    ):
        for side in (0, 1):
            shown = [texts[side][row[side]] for row in rows if row[side] is not None]
            assert shown == parts[side]
        blocks = difflib.SequenceMatcher(None, *parts, autojunk=False).get_matching_blocks()
        assert sum(row[2] for row in rows) == sum(block.size for block in blocks)
    for i, j, equal, (left_marks, right_marks) in [*code, *docstring[1]]:
        if equal:
            assert texts[0][i] == texts[1][j]
        elif left_marks or right_marks:  # otherwise they are different lines that stand beside each other
            assert without_marks(texts[0][i], left_marks) == without_marks(texts[1][j], right_marks)


def test_code_only_leaves_out_docstrings_and_comments(page):
    page.open_page("diff.html#left=grpo&right=dapo&code=1")
    page.run("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    for side, name in (("left", "grpo"), ("right", "dapo")):
        lines = page.run(
            f"[...document.querySelectorAll('#viewer td.c.{side}:not(.none)')].map((cell) => cell.textContent)"
        )
        text = (ROOT / f"{name}.py").read_text()
        assert lines == family.code_lines(text)
        assert ast.get_docstring(ast.parse(text)).splitlines()[0] not in "\n".join(lines)
    page.open_page("diff.html#left=grpo&right=dapo")
    lines = page.run("[...document.querySelectorAll('#viewer td.c.right:not(.none)')].map((cell) => cell.textContent)")
    assert sorted(lines) == sorted((ROOT / "dapo.py").read_text().splitlines())


def state(page):
    names = page.run("[document.getElementById('left').value, document.getElementById('right').value]")
    titles = page.run("[...document.querySelectorAll('#viewer .both h2')].map((title) => title.textContent)")
    assert titles == [f"{name}.py" for name in names]
    return [*names, page.run("document.getElementById('code').checked")]


def test_viewers_state_is_in_its_address(page):
    page.open_page("diff.html")
    assert state(page) == ["grpo", "grpo_ar_lopti", False]
    page.open_page("diff.html#left=ppo&right=sapo&code=1&section=loss")
    assert state(page) == ["ppo", "sapo", True]
    assert page.run("document.activeElement.textContent") == "loss"
    page.open_page("diff.html#left=nothing&right=../x&code=7")
    assert state(page) == ["grpo", "grpo_ar_lopti", False]


def test_viewers_controls_work_with_the_keyboard_alone(page):
    page.open_page("diff.html#left=grpo&right=dapo")
    page.run("document.getElementById('left').focus()")
    page.press("ArrowDown")
    page.wait("location.hash.includes('left=reinforce&')")
    assert state(page) == ["reinforce", "dapo", False]
    page.press("Tab")
    assert page.run("document.activeElement.id") == "right"
    page.press("Tab")
    assert page.run("document.activeElement.id") == "swap"
    page.press("Enter")
    page.wait("location.hash === '#left=dapo&right=reinforce'")
    assert state(page) == ["dapo", "reinforce", False]
    page.press("Tab")
    page.press("Space")
    page.wait("location.hash === '#left=dapo&right=reinforce&code=1'")
    assert state(page) == ["dapo", "reinforce", True]
    page.run("history.back()")
    page.wait("location.hash === '#left=dapo&right=reinforce'")
    assert state(page) == ["dapo", "reinforce", False]


def test_a_link_to_a_section_goes_there(page):
    page.open_page("diff.html#left=grpo&right=dapo")
    page.run("[...document.querySelectorAll('#viewer nav a')].find((link) => link.textContent === 'main').click()")
    page.wait("location.hash.endsWith('&section=main')")
    page.wait("document.activeElement.closest('section')?.id === 'section-main'")
    assert 0 <= page.run("document.activeElement.getBoundingClientRect().top") < 300


def test_the_viewers_first_change_is_above_the_fold(page):
    for address in ("diff.html", "diff.html#left=grpo&right=dapo", "diff.html#left=reinforce&right=rloo"):
        page.open_page(address)
        assert page.run("document.querySelector('tr.differs').getBoundingClientRect().bottom") < 900, address
        assert page.run(
            "[...document.querySelectorAll('.both pre')].every((one) => one.scrollWidth <= one.clientWidth)"
        )


def test_claims_are_chosen_by_verdict_and_paper(page):
    page.open_page("docs/claims.html")
    rows = "[...document.querySelectorAll('article tbody tr')].filter((row) => row.querySelector('strong.verdict'))"
    counts = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", (ROOT / "docs/claims.md").read_text(), re.MULTILINE))
    assert page.run(f"{rows}.length") >= sum(map(int, counts.values())) > 90
    choose = "(([verdict, paper]) => { [...document.querySelectorAll('.ask select')].forEach((menu, k) => "
    choose += "{ menu.value = [verdict, paper][k]; menu.dispatchEvent(new Event('change', {bubbles: true})) }) })"
    page.run(f"{choose}(['no effect of that size', 'AR-Lopti'])")
    left = page.run(f"{rows}.filter((row) => !row.hidden).map((row) => row.querySelector('.verdict').textContent)")
    assert left and set(left) == {"no effect of that size"}
    assert page.run("document.querySelector('.ask span').textContent").startswith(f"{len(left)} of ")
    page.run(f"{choose}(['no effect of that size', ''])")
    assert len(left) < page.run(f"{rows}.filter((row) => !row.hidden).length")


def test_search_works_from_a_folder(page, site):
    page.open_page("index.html")
    page.run("document.querySelector('.md-search__button').click()")
    dialog = "[...document.querySelectorAll('div')].find((one) => one.shadowRoot).shadowRoot"
    page.wait(f"{dialog}.activeElement?.matches('input')")
    for letter in "lopti":
        page.press(letter)
    page.wait(f"{dialog}.querySelector('mark')?.textContent.toLowerCase() === 'lopti'")
    assert page.run(f"{dialog}.querySelector('input').value") == "lopti"
    texts = page.run(f"[...{dialog}.querySelectorAll('a')].map((link) => link.textContent)")
    links = page.run(f"[...{dialog}.querySelectorAll('a')].map((link) => link.href.split('?')[0])")
    assert texts and "lopti" in texts[0].lower()
    assert all((site / link.removeprefix(f"{site.as_uri()}/")).is_file() for link in links)


def test_formulas_are_drawn(page, site):
    pages = [path for path in sorted(site.rglob("*.html")) if "<math " in path.read_text()]
    if not pages:
        assert not [path for path in (ROOT / "docs").rglob("*.md") if "$$" in path.read_text()]
        pytest.skip("no text has a formula")
    page.open_page(pages[0].relative_to(site).as_posix())
    sizes = page.run("[...document.querySelectorAll('math')].map((one) => one.getBoundingClientRect().height)")
    assert sizes and min(sizes) > 5


@pytest.mark.parametrize(
    "address", ["index.html", "docs/what_fits.html", "lab/index.html", "grpo.py.html", "diff.html"]
)
def test_pages_fit_a_phone(page, address):
    page.resize(400, 800)
    page.open_page(address)
    assert page.run("document.documentElement.scrollWidth") <= 400


def test_pages_are_dark_where_the_system_is(page):
    def background():
        page.open_page("index.html")
        return sum(map(int, re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor"))[:3]))

    light = background()
    page.dark()
    assert background() < 200 < 600 < light


def test_a_line_of_a_source_file_is_shown(page):
    page.open_page("grpo.py.html#L417")
    assert page.run("document.querySelector(':target').id") == "L417"
    assert 0 < page.run("document.querySelector(':target').getBoundingClientRect().top") < 900


@pytest.mark.slow
def test_every_page_passes_the_check_of_the_site(python, chromium, site, tmp_path):
    """And pictures of ten pages are taken, at both widths, light and dark."""
    command = [python, ROOT / "tests/check_site.py", site, "--shots", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.png"))) == 40
    print(done.stdout)

"""The pages: README, docs, course, lab. Links lead somewhere; places in scripts and commands exist."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import flags_of, python

from tools import anchors, demo_picture

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "course/*.md", "examples/*.md", "lab/*.md", "models/kk_tiny/*.md")
    for path in ROOT.glob(pattern)
)
COMMAND = re.compile(r"(?:^(?:nice )?|`)python ((?:-m )?[\w./]+)([^\n`]*)", re.MULTILINE)


def without_code(text):
    """A page without its blocks and pieces of code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def headings(text):
    """The names of a page's headings, as links on GitHub give them, and of its rows."""
    found = re.findall(r"^#+ (.*)$", text, re.M)
    names = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}
    return names | set(re.findall(r'<a id="([^"]+)"></a>', text))


def test_every_link_of_a_page_leads_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            if re.match(r"https?://|mailto:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page}: {link}"
            if anchor:  # a heading or a row: no text has numbers of lines
                assert anchor in headings(target.read_text()), f"{page}: {link}"


def test_every_page_of_the_docs_is_linked_from_another():
    linked = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)#\s]+)[)#]", page.read_text())
        if not link.startswith("http")
    }
    assert not [page for page in PAGES if page.name != "README.md" and page not in linked]


def test_every_place_that_a_page_names_is_there():
    """As the site resolves them: [grpo.py, k3: exp](../grpo.py), and the code in the tables of symbols."""
    for page in PAGES:
        anchors.with_anchors(page.read_text(), page.relative_to(ROOT).as_posix())


PROGRAM = """\
LIMIT = 3


class Policy:
    size: int = LIMIT

    def head(self):
        \'\'\'The head, of some size.\'\'\'
        head = self.size
        return head
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [("LIMIT", 1), ("Policy", 4), ("Policy.size", 5), ("size", 5), ("head", 7), ("Policy.head: size", 9)],
)
def test_a_line_by_its_name(name, line):
    assert anchors.line_named(PROGRAM, name) == line


@pytest.mark.parametrize("name", ["limit", "Policy.tail", "head: LIMIT", "head: siz"])
def test_a_name_that_is_not_there(name):
    with pytest.raises(ValueError, match="nothing is called"):
        anchors.line_named(PROGRAM, name)


def test_what_the_site_adds_to_a_text():
    lines = (ROOT / "grpo.py").read_text().splitlines()
    k3 = lines.index("def k3(logp, ref_logp):") + 1
    row = "| $J$ | it | `return difference.exp() - difference - 1` |"
    text = f"[grpo.py, k3:\nexp](../../grpo.py)\n## Where each symbol is computed\n\n{row}\n\n## Next\n\n{row}\n"
    new = anchors.with_anchors(text, "docs/algorithms/grpo.md")
    assert f"[grpo.py, k3:\nexp](../../grpo.py#L{k3 + 3})" in new
    assert new.count(f"[`return difference.exp() - difference - 1`](../../grpo.py#L{k3 + 3}) |") == 1 and row in new
    viewer = "[`python tools/diff.py dapo`](../diff.html#left=grpo&right=dapo)"
    assert anchors.with_anchors("`python tools/diff.py dapo`", "docs/tools.md") == viewer
    for wrong in ("[ppo.py, k3](../grpo.py)", "[grpo.py, k4](../grpo.py)", "[gppo.py, k3](../gppo.py)"):
        with pytest.raises(ValueError, match=r"^course/x\.md: "):
            anchors.with_anchors(wrong, "course/x.md")
    with pytest.raises(ValueError, match=r"grpo\.md: `import` occurs \d+ times"):
        anchors.with_anchors(
            text.replace("return difference.exp() - difference - 1", "import"), "docs/algorithms/grpo.md"
        )


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
                assert re.fullmatch(r" (([0-9]|1[01])( --solutions)?|--all( --solutions)?)", rest), rest
                continue
            path = ROOT / (module.replace(".", "/") + ".py" if program != module else module)
            assert path.exists(), (page, program)
            own = re.sub(r'"[^"]*"', "", rest)  # what is in quotes belongs to other programs
            flags = {flag.removeprefix("no_") for flag in re.findall(r"--(\w+)", own)} - {"help"}
            if flags:
                assert flags <= flags_of(path), (page, program, flags - flags_of(path))


def test_targets_of_make_in_the_readme_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    said = re.findall(r"\bmake (demo|llm|test|site|docs|lab|bench|doctor)\b", (ROOT / "README.md").read_text())
    assert set(said) <= targets


# ------------------------------------------------------------------------------------------------ the demo's picture


def kept_demo():
    return json.loads((ROOT / "docs" / "demo.json").read_text())


def test_the_readmes_accuracies_are_those_of_the_picture():
    accuracies = [row["eval/accuracy"] for row in kept_demo()["rows"] if "eval/accuracy" in row]
    assert f"goes from {accuracies[0]:g} to {accuracies[-1]:g}" in (ROOT / "README.md").read_text().replace("\n", " ")
    assert kept_demo()["before"]["correct"] is False and kept_demo()["after"]["correct"] is True


def test_picture_and_text_are_those_of_the_kept_figures(tmp_path):
    page = (ROOT / "docs" / "first_runs.md").read_text()
    path = tmp_path / "demo.json"
    path.write_text((ROOT / "docs" / "demo.json").read_text())
    (tmp_path / "page.md").write_text(re.sub("before training .step 0.", "", page))
    done = python("-m", "tools.demo_picture", "--out", path, "--page", tmp_path / "page.md")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    llm = json.loads((ROOT / "docs" / "llm.json").read_text())
    assert demo_picture.with_words((tmp_path / "page.md").read_text(), "llm", llm) == page
    [accuracy] = demo_picture.draw(kept_demo(), tmp_path / "again.png").axes
    drawn = dict(zip(accuracy.lines[0].get_xdata(), accuracy.lines[0].get_ydata()))
    assert drawn == {row["step"]: row["eval/accuracy"] for row in kept_demo()["rows"] if "eval/accuracy" in row}
    with pytest.raises(ValueError, match="must have the marks"):
        demo_picture.with_words("none", "demo", kept_demo())


def sample(step, number, correct, response):
    return {"step": step, "id": number, "prompt": "p", "response": response, "reward": 0.0, "correct": correct}


def test_the_picture_of_a_run_shows_the_shortest_problem_that_was_learned(tmp_path):
    rows = [sample(0, i, False, "a guess") for i in range(3)]
    rows += [sample(2, 0, True, "long " * 9), sample(2, 1, True, "short"), sample(2, 2, False, "x")]
    kept = kept_demo()
    about = {key: kept[key] for key in ("script", "commit", "machine", "versions", "date")}
    (tmp_path / "run.json").write_text(json.dumps(about))
    (tmp_path / "args.json").write_text(json.dumps(kept["settings"]))
    metrics = [{"step": 0, "eval/accuracy": 0.0}, {"step": 2, "eval/accuracy": 0.5, "reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (tmp_path / "test_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = demo_picture.read(tmp_path)
    assert read["after"]["response"] == "short" and read["learned"] == 2 and read["kept_problems"] == 3
    assert read["rows"] == [{"step": 0, "eval/accuracy": 0.0}, {"step": 2, "eval/accuracy": 0.5}]
    (tmp_path / "test_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    with pytest.raises(ValueError, match="has no test problem that was wrong before"):
        demo_picture.read(tmp_path)
    with pytest.raises(ValueError, match="is not the folder of a run"):
        demo_picture.read(tmp_path / "nothing")


# --------------------------------------------------------------------------------------------------- add_a_variant.md


def test_the_toy_variant_is_one_line_of_grpo():
    page, script = (ROOT / "docs" / "add_a_variant.md").read_text(), (ROOT / "grpo.py").read_text()
    old, new = (re.search(rf"^\{sign}(    .*)$", page, re.M)[1] for sign in "-+")
    assert script.count(old + "\n") == 1
    groups = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    values = {"groups": groups, "mean": groups.mean(1, keepdim=True), "std": groups.std(1, keepdim=True)}
    assert f"{values['std'].item():.3f}" in page
    for line, expected in ((old, [0.866, -0.866, -0.866, 0.866]), (new, [0.866, 0, 0, 0.866])):
        exec(line.strip(), {}, values)
        assert torch.allclose(values["advantages"], torch.tensor([expected]), atol=1e-3)


def test_the_drawing_of_the_loop_names_functions_of_the_scripts():
    drawn = (ROOT / "docs/loop.svg").read_text()
    code = re.findall(r"<g font-family.*?</g>|<tspan.*?</tspan>", drawn, re.DOTALL)
    names = re.findall(r"\w+", re.sub(r"<.*?>", " ", " ".join(code)))
    assert len(names) == 6
    assert all(f"{name}(" in (ROOT / "grpo.py").read_text() for name in names)

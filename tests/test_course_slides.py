"""The decks of course/slides.py: what they quote is there, nothing stands twice, and Marp makes slides of them."""

import re
import subprocess

import pytest
from conftest import ROOT

from course import slides

DECKS = {number: slides.deck(number) for number in slides.LESSONS}
TOO_LARGE = "[...document.querySelectorAll('section')].filter((slide) => slide.scrollHeight > slide.clientHeight + 1 ||"
TOO_LARGE += " slide.scrollWidth > slide.clientWidth + 1).map((slide) => slide.querySelector('h1, h2').textContent)"


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("number", slides.LESSONS)
def test_quoted_code_is_in_its_script(number):
    quoted = re.findall(r"```python\n((?:(?!```).)*)\n```\n\n`([^`]+)`, line (\d+)", DECKS[number], re.S)
    assert quoted
    for code, name, line in quoted:
        lines = [text.strip() for text in (ROOT / name).read_text().splitlines()]
        assert lines[int(line) - 1] == code.split("\n")[0]
        assert {text.strip() for text in code.split("\n")} <= set(lines)


@pytest.mark.parametrize(
    "directive", ["table: No such heading", "text: No such sentence", "code: grpo.py, no_such_function", "ask: 99", "x"]
)
def test_a_part_that_is_not_there(directive, tmp_path, monkeypatch):
    (tmp_path / "frame.md").write_text("# {{ title }}\n\n{{ deck }}\n")
    (tmp_path / "lesson_1.md").write_text(f"{{{{ {directive} }}}}\n")
    monkeypatch.setattr(slides, "DECKS", tmp_path)
    with pytest.raises(ValueError, match=rf"lesson_1\.md: {{{{ {directive} }}}} is not there"):
        slides.deck(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of all decks."""
    if not slides.MARP.exists():
        pytest.skip("no Marp: `make slides` installs it")
    folder = tmp_path_factory.mktemp("slides")
    with pytest.raises(SystemExit) as ended:
        slides.main(slides.Args(folder))
    assert ended.value.code == 0
    return folder


def test_every_slide_holds_what_is_on_it(made, browser_page):
    """Without the presenter's program, which shows one slide at a time."""
    files = [made / f"lesson_{number}.md" for number in DECKS]
    options = ["--html", "--no-stdin", "--template", "bare", "--theme-set", slides.DECKS / "style.css"]
    subprocess.run([slides.MARP, *files, *options], check=True, capture_output=True)
    for number in DECKS:
        browser_page.goto((made / f"lesson_{number}.html").as_uri())
        assert browser_page.evaluate(TOO_LARGE) == [], number
        assert browser_page.evaluate("[...document.images].every((image) => image.naturalWidth > 0)"), number

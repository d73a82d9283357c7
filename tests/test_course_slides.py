"""The decks of course/slides.py: what they quote is there, nothing stands twice, and Marp makes slides of them."""

import re
import subprocess

import browser
import pytest
from conftest import ROOT

from course import slides

DECKS = {number: slides.deck(number) for number in slides.LESSONS}
TOO_LARGE = "[...document.querySelectorAll('section')].filter((slide) => slide.scrollHeight > slide.clientHeight + 1 ||"
TOO_LARGE += " slide.scrollWidth > slide.clientWidth + 1).map((slide) => slide.querySelector('h1, h2').textContent)"


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("number", slides.LESSONS)
def test_a_deck_is_short_and_has_a_question_a_formula_or_picture_code_and_exercises(number):
    text = DECKS[number]
    assert 8 <= len(re.findall(r"^##? ", without_code(text), re.M)) <= 14
    assert "{{" not in without_code(text).replace("^{{", "")
    assert re.search(r"^> \S", text, re.M) and ("$$" in text or "<img" in text)
    assert "```python" in text and "## Exercises\n\n- **" in text and f"course.check {number}" in text
    assert text.count("<!--\n") >= 4  # notes for the presenter: timing, what to draw and to ask, answers


@pytest.mark.parametrize("number", slides.LESSONS)
def test_quoted_code_is_in_its_script(number):
    quoted = re.findall(r"```python\n((?:(?!```).)*)\n```\n\n`([^`]+)`, line (\d+)", DECKS[number], re.S)
    assert quoted
    for code, name, line in quoted:
        lines = [text.strip() for text in (ROOT / name).read_text().splitlines()]
        assert lines[int(line) - 1] == code.split("\n")[0]
        assert {text.strip() for text in code.split("\n")} <= set(lines)


@pytest.mark.parametrize("number", slides.LESSONS)
def test_a_deck_has_no_measured_number_of_its_own(number):
    own = slides.DIRECTIVE.sub("", (slides.DECKS / f"lesson_{number}.md").read_text())
    assert not re.search(r"\d[.,]\d|\d ?%|±", own)


@pytest.mark.parametrize(
    "directive", ["table: No such heading", "text: No such sentence", "code: grpo.py, no_such_function", "ask: 99", "x"]
)
def test_a_part_that_is_not_there(directive, tmp_path, monkeypatch):
    (tmp_path / "frame.md").write_text("# {{ title }}\n\n{{ deck }}\n")
    (tmp_path / "lesson_1.md").write_text(f"{{{{ {directive} }}}}\n")
    monkeypatch.setattr(slides, "DECKS", tmp_path)
    with pytest.raises(ValueError, match=rf"lesson_1\.md: {{{{ {directive} }}}} is not there"):
        slides.deck(1)


def test_without_marp(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slides, "MARP", tmp_path / "marp")
    with pytest.raises(SystemExit) as ended:
        slides.main(slides.Args(tmp_path))
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


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


def test_a_made_deck_has_its_slides_and_loads_nothing(made):
    for number, text in DECKS.items():
        page = (made / f"lesson_{number}.html").read_text()
        assert len(re.findall(r"<section ", page)) == len(re.findall(r"^##? ", without_code(text), re.M)), number
        assert not re.search(r"(src|href)=[\"']?(https?:)?//|url\([\"']?(https?:)?//", page), number
        assert page.count('bespoke-marp-note" data-index') == text.count("<!--\n"), number
        assert "<mjx-container" in page or "$" not in text, number


def test_every_slide_holds_what_is_on_it(made, tmp_path):
    """Without the presenter's program, which shows one slide at a time."""
    if not browser.binary():
        pytest.skip("no Chromium")
    files = [made / f"lesson_{number}.md" for number in DECKS]
    options = ["--html", "--no-stdin", "--template", "bare", "--theme-set", slides.DECKS / "style.css"]
    subprocess.run([slides.MARP, *files, *options], check=True, capture_output=True)
    with browser.Browser(tmp_path) as opened:
        for number in DECKS:
            opened.open((made / f"lesson_{number}.html").as_uri())
            assert opened.run(TOO_LARGE) == [], number
            assert opened.run("[...document.images].every((image) => image.naturalWidth > 0)"), number

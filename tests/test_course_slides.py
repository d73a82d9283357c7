"""The decks of course/slides.py: what they quote is there."""

import re

import pytest
from conftest import ROOT

from course import slides

DECKS = {number: slides.deck(number) for number in slides.LESSONS}


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

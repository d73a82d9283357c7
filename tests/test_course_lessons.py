"""The snippets of the lecturer's page run. test_docs.py looks at links and commands of the course."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "course"
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("number", range(12))
def test_live_snippets_print_what_is_said(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    text = (COURSE / "lecturer.md").read_text()
    section = re.split(r"^## Lesson \d+: ", text, flags=re.MULTILINE)[number + 1]
    [(code, expected)] = SNIPPET.findall(section)
    exec(code, {})
    assert capsys.readouterr().out == expected

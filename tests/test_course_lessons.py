"""The snippets of the lecturer's page run. test_docs.py looks at links and commands of the course."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo
from course.solutions import lesson_4

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "course"
LESSONS = range(13)
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("number", LESSONS)
def test_live_snippets_print_what_is_said(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    text = (COURSE / "lecturer.md").read_text()
    section = re.split(r"^## Lesson \d+: ", text, flags=re.MULTILINE)[number + 1]
    [(code, expected)] = SNIPPET.findall(section)
    exec(code, {})
    assert capsys.readouterr().out == expected


def test_the_advantages_of_lesson_4_are_those_of_grpo():
    batch = {"mask": torch.ones(3, 1, dtype=torch.bool)}
    found = grpo.compute_advantages(torch.tensor([0.0, 1, 1]), batch, SimpleNamespace(responses_per_prompt=3))
    assert found[:, 0].tolist() == pytest.approx(lesson_4.ADVANTAGES.tolist(), rel=1e-5)

"""Answers that are not right, however they come: each is refused, and the next function is judged as ever."""

import textwrap

import pytest
from conftest import ROOT

from course import check

RIGHT = """
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (group_size - 1)).reshape(-1)
"""
EQUAL = "class Equal:\n        __eq__ = lambda *_: True"
SOLUTION = str(ROOT / "course" / "solutions" / "lesson_1.py")
TABLE = "TABLE = {(1.0, 0.0): [1.0, -1.0], (3.0, 1.0, 2.0, 0.0, 0.0, 6.0): [1.5, -1.5, 0.0, -3.0, -3.0, 6.0]}"
MEMORY = """
    import gc
    found = [one for one in gc.get_objects() if type(one).__name__ in ("Case", "Exercise", "Key")]
    return found[0].expected if found else 1 / 0
"""
ATTACKS = {  # name: (what the function does, what stands above it, what is said)
    "exits": ("import sys; sys.exit(0)", "", "raises SystemExit"),
    "exits hard": ("import os; os._exit(0)", "", "ends the program (exit code 0)"),
    "exits when imported": ("return rewards", "raise SystemExit(0)", "can't be imported: SystemExit"),
    "aborts": ("import os; os.abort()", "", "ends the program (exit code -6)"),
    "loops": ("while True: pass", "", "takes too long"),
    "ignores signals": ("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass", "", "takes too long"),
    "waits for input": ("return input()", "", "EOFError"),
    "recurses": ("return leave_one_out(rewards, group_size)", "", "RecursionError"),
    "prints a verdict and ends": ("import os; os.write(1, b'2 of 2 pass'); os._exit(0)", "", "ends the program"),
    "patches the comparison": ("return rewards", "torch.allclose = lambda *_, **__: True", "expected [1, -1]"),
    "patches what is sent": ("return rewards", "torch.save = lambda *_, **__: None", "expected [1, -1]"),
    "gives what is equal to everything": ("return Equal()", EQUAL, "gives a Equal"),
    "has a table": ("return torch.tensor(TABLE.get(tuple(rewards.tolist()), rewards.tolist()))", TABLE, "expected ["),
    "imports the solution": (
        "return rewards",
        "from course.solutions.lesson_1 import leave_one_out",
        "PermissionError",
    ),
    "reads the solution": (f"exec(open({SOLUTION!r}).read())", "", "PermissionError"),
    "looks through the memory": (MEMORY, "", "ZeroDivisionError"),
    "changes its argument": ("rewards -= rewards.mean()\nreturn 2 * rewards", "", "changes its argument rewards"),
}


def function(body, before=""):
    """A file with the function."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"import torch\n{before}\n\ndef leave_one_out(rewards, group_size):\n{body}\n"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name, tmp_path):
    body, before, said = ATTACKS[name]
    file = tmp_path / "lesson_1.py"
    file.write_text(function(body, before))
    seconds = 1 if said == "takes too long" else 20
    (_, verdict, found, _), _ = check.check_lesson(1, tmp_path, seconds=seconds)
    assert verdict == check.WRONG and said in found, found
    file.write_text(function(RIGHT))
    lines = check.check_lesson(1, tmp_path)
    assert lines[0][1:] == (check.PASS, "", "") and lines[1][1] == check.WRONG

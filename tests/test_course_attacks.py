"""Answers that try to pass without being right: the checker refuses each of them, and says why if it can."""

import textwrap

import pytest
from conftest import ROOT

from course import check

LESSON = 1  # leave_one_out(rewards, group_size)
SECONDS = 20
RIGHT = """
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (group_size - 1)).reshape(-1)
"""
FUNCTION = "def leave_one_out(rewards, group_size):"


def function(body, before=""):
    """A file with the function. before: what stands above it."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"import torch\n{textwrap.dedent(before)}\n\n{FUNCTION}\n{body}\n"


WRONG = "return rewards"
ENDS, TIME, REFUSED = "ends the program (exit code", "takes too long", "PermissionError"
TABLE = """
    TABLE = {
        (1.0, 0.0): [1.0, -1.0],
        (3.0, 1.0, 2.0, 0.0, 0.0, 6.0): [1.5, -1.5, 0.0, -3.0, -3.0, 6.0],
    }
"""
PATH = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
SOLUTION = str(ROOT / "course" / "solutions" / "lesson_1.py")
ATTACKS = {  # name: (the file, what is said of it)
    # ---- no verdict
    "exits": (function("import sys; sys.exit(0)"), "raises SystemExit"),
    "exits hard": (function("import os; os._exit(0)"), f"{ENDS} 0)"),
    "exits when imported": (function(WRONG, "import os; os._exit(0)"), f"{ENDS} 0)"),
    "exits politely when imported": (function(WRONG, "raise SystemExit(0)"), "can't be imported: SystemExit"),
    "aborts": (function("import os; os.abort()"), f"{ENDS} -6)"),
    "crashes": (function("torch.from_numpy; import faulthandler; faulthandler._sigsegv()"), f"{ENDS} -11)"),
    "loops": (function("while True: pass"), TIME),
    "loops when imported": (function(WRONG, "while True: pass"), TIME),
    "sleeps": (function("import time; time.sleep(1000)"), TIME),
    "ignores signals": (function("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass"), TIME),
    "leaves a thread": (
        function(
            "import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\nreturn rewards"
        ),
        "wrong value",
    ),
    "waits for input": (function("return input()"), "EOFError"),
    "takes all memory": (function("return torch.zeros(10**12)"), "raises RuntimeError"),
    "recurses": (function("return leave_one_out(rewards, group_size)"), "RecursionError"),
    # ---- a false verdict
    "prints a verdict": (
        function("print('1.1   leave_one_out    PASS\\n2 of 2 pass'); return rewards"),
        "expected [1, -1]",
    ),
    "prints a verdict and ends": (function("import os; os.write(1, b'2 of 2 pass'); os._exit(0)"), f"{ENDS} 0)"),
    "patches the comparison": (
        function(WRONG, "torch.allclose = torch.equal = lambda *_, **__: True"),
        "expected [1, -1]",
    ),
    "patches the tensor": (
        function(WRONG, "torch.Tensor.__eq__ = lambda *_: True\ntorch.Tensor.isnan = lambda *_: False"),
        "expected [1, -1]",
    ),
    "patches what is sent": (function(WRONG, "torch.save = lambda *_, **__: None"), "expected [1, -1]"),
    "gives what is equal to everything": (
        function("return Equal()", "class Equal:\n        __eq__ = lambda *_: True"),
        "gives a Equal",
    ),
    "gives a tensor that is equal to everything": (
        function(
            "return torch.zeros(len(rewards)).as_subclass(Equal)",
            """
            class Equal(torch.Tensor):
                @classmethod
                def __torch_function__(cls, function, types, args=(), kwargs=None):
                    result = super().__torch_function__(function, types, args, kwargs or {})
                    return torch.tensor(True) if "eq" in function.__name__ else result
            """,
        ),
        "expected [1, -1]",
    ),
    # ---- somebody else's numbers
    "has a table": (function("return torch.tensor(TABLE[tuple(rewards.tolist())])", TABLE), "KeyError"),
    "has a table and guesses": (
        function("return torch.tensor(TABLE.get(tuple(rewards.tolist()), rewards.tolist()))", TABLE),
        "expected [",
    ),
    "imports the solution": (
        function(
            "return solution(rewards, group_size)", "from course.solutions.lesson_1 import leave_one_out as solution"
        ),
        "No module named 'course'",
    ),
    "imports the solution by its path": (
        function("from course.solutions import lesson_1; return lesson_1.leave_one_out(rewards, group_size)", PATH),
        REFUSED,
    ),
    "imports a trainer": (
        function("import rloo; return rloo.compute_advantages(rewards, {}, None)", PATH),
        REFUSED,
    ),
    "reads the solution": (
        function(
            f"names = {{}}; exec(open({SOLUTION!r}).read(), names); return names['leave_one_out'](rewards, group_size)"
        ),
        REFUSED,
    ),
    "reads the solution through the system": (
        function(f"import os; os.read(os.open({SOLUTION!r}, os.O_RDONLY), 10**6)\nreturn rewards"),
        REFUSED,
    ),
    "lets a program read the solution": (
        function(f"import subprocess; subprocess.check_output(['cat', {SOLUTION!r}])\nreturn rewards"),
        REFUSED,
    ),
    "reads the caller's frames": (
        function(
            """
            import inspect
            for frame in inspect.stack():
                for name, value in {**frame.frame.f_globals, **frame.frame.f_locals}.items():
                    if "expected" in name or "solution" in name:
                        return value
            raise LookupError("nothing is expected here")
            """
        ),
        "nothing is expected here",
    ),
    "looks through the memory": (
        function(
            """
            import gc
            for found in gc.get_objects():
                if type(found).__name__ in ("Case", "Exercise", "Key"):
                    return found.expected
            raise LookupError("nothing is expected here")
            """
        ),
        "nothing is expected here",
    ),
    "reads the checker's memory": (
        function("import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\nreturn rewards"),
        REFUSED,
    ),
    # ---- harm
    "ends the checker": (function("import os, signal; os.kill(os.getppid(), signal.SIGKILL)\nreturn rewards"), REFUSED),
    "forks": (function("import os\nwhile True: os.fork()"), REFUSED),
    "writes a file": (function("open('harm', 'w').write('x')\nreturn rewards"), REFUSED),
    "removes a file": (function("import os; os.remove(__file__)\nreturn rewards"), REFUSED),
    "calls C": (function("import ctypes; ctypes.CDLL(None).kill(0, 9)\nreturn rewards"), REFUSED),
    "changes its argument": (function("rewards -= rewards.mean()\nreturn 2 * rewards"), "changes its argument rewards"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name, box, tmp_path):
    text, said = ATTACKS[name]
    file = tmp_path / f"lesson_{LESSON}.py"
    file.write_text(text)
    seconds = 1 if said == TIME else SECONDS
    (_, verdict, found, _), _ = check.check_lesson(LESSON, tmp_path, box=box, seconds=seconds)
    assert verdict == check.WRONG and said in found, found
    assert file.read_text() == text
    file.write_text(function(RIGHT))  # and the next student's function is judged as ever
    lines = check.check_lesson(LESSON, tmp_path, box=box, seconds=SECONDS)
    assert lines[0][1:] == (check.PASS, "", "") and lines[1][1] == check.WRONG

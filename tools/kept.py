"""Identify the code and the settings that made a saved result: a hash of its code, and its settings.

compare.py, lab/ and benchmarks/ write both into their results; `python tools/compare.py --stale` reads them. The code
is the script, common.py next to it if there is one, and runtime/, without comments, docstrings and line breaks.
"""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks/kk_tiny", "benchmarks/llm", "benchmarks/results", "course/results", "lab/results")


def code_in(path):
    """Return a file's code without comments, line breaks and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def hash_of(paths):
    return hashlib.sha256("\n".join(map(code_in, paths)).encode()).hexdigest()[:12]


@cache
def code_of(script, root=ROOT):
    """Return {"script": hash, "runtime": hash} of a script by its name: grpo, lab.lens, limit (in benchmarks/).

    None if there is no such script.
    """
    names = [f"{script.replace('.', '/')}.py", f"benchmarks/{script}.py"]
    path = next((root / name for name in names if (root / name).is_file()), None)
    if not path:
        return None
    beside = [] if path.parent == root else path.parent.glob("common.py")
    return {"script": hash_of([path, *beside]), "runtime": hash_of(sorted((root / "runtime").glob("*.py")))}


def differs(result):
    """Return which code has changed since it made a result: "script", "runtime", "script and runtime" or "unknown".

    "" if nothing has. "unknown": its commit is not in this history, or had uncommitted changes.
    """
    now, then = code_of(result["script"]), result.get("code")
    if not then or not now:
        return "unknown" if now else "script"
    return " and ".join(part for part in ("script", "runtime") if now[part] != then[part])


def settings_of(words):
    """Return {setting: value} of flags such as --lr 1e-4 and --gated; a value is a number, True or a text."""
    found = {}
    for word in words:
        if word.startswith("--"):
            name, word = word.removeprefix("--"), "true"
        try:
            found[name] = json.loads(word)
        except ValueError:
            found[name] = word
    return found


def command_of(script, settings):
    """Return the words of a command: the script's file, then its flags. settings_of reads them."""
    words = [f"{script}.py"]
    for name, value in settings.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words

"""Read and add saved runs, and tell whether today's code would give a saved result the same digits.

The runs of a folder are in its JSONL files: a line per run, sorted by name ("grpo_seed_0"). Every result notes its
code: a hash of its script (with a common.py next to it) and one of runtime/, both without comments, docstrings and line
breaks, and how many lines of tests/digits.txt there were about its script. Git is not needed.
"""

import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
from functools import cache, lru_cache
from pathlib import Path

from runtime import files

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks/kk_tiny", "benchmarks/llm", "benchmarks/results", "course/results", "lab/results")
MOVED, UNKNOWN = "moved", "not known"  # verdicts begin with one of them


def name_of(entry, seed):
    """Return the name of a run: "grpo_seed_0"."""
    return f"{re.sub('[^a-z0-9.]+', '_', entry.lower())}_seed_{seed}"


@lru_cache(maxsize=100)
def read_file(path, _version):
    """Return {name: run} of a JSONL file. ValueError, with file and line, if a line is damaged or two have a name."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            run = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} can't be read: {error}") from None
        if isinstance(run, dict) and "run" in run and found.setdefault(run["run"], run) != run:
            raise ValueError(f"{path}, line {number} is a second run named {run['run']}: remove one of them")
    return found


def read(folder):
    """Return {name: run} of all JSONL files in a folder; a run is a dictionary with its metrics in `rows`.

    Also reads the files NAME.json that runs had before. ValueError if a file is damaged, or two runs have a name.
    """
    found = {path.stem: files.read_object(path) for path in folder.glob("*_seed_*.json")}
    for path in sorted(folder.glob("*.jsonl")):
        about = path.stat()
        for name, run in read_file(path, (about.st_mtime_ns, about.st_size)).items():
            if found.setdefault(name, run) != run:
                raise ValueError(f"{path} has another run named {name} than a file next to it: rename one of them")
    return found


def run(name):
    """Return a saved run of this repository: "benchmarks/kk_tiny/grpo_seed_0". ValueError if there is none."""
    folder, _, own = name.rpartition("/")
    try:
        return read(ROOT / folder)[own]
    except KeyError:
        raise ValueError(f"no file {folder}/*.jsonl has a run named {own}") from None


def add(path, name, run):
    """Add a run to a JSONL file, or create the file. A run of this name that is already there stays.

    Several processes may add to a file: each waits for the others. On a file system without locks, none waits.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        runs = read_file.__wrapped__(path, None) if path.exists() else {}
        runs.setdefault(name, {"run": name} | run)
        files.write(path, "".join(f"{json.dumps(runs[each])}\n" for each in sorted(runs)))
    finally:
        os.close(folder)


@cache
def code_in(path):
    """Return a file's code without comments, line breaks and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def hash_of(paths):
    return hashlib.sha256("\n".join(map(code_in, paths)).encode()).hexdigest()[:12]


def path_of(script, root=ROOT):
    """Return the path of a script by its name (grpo, lab.lens, limit in benchmarks/), from the root; None without."""
    names = [f"{script.replace('.', '/')}.py", f"benchmarks/{script}.py"]
    return next((name for name in names if (root / name).is_file()), None)


@cache
def moves(script, root=ROOT):
    """Return the lines of tests/digits.txt about a script: those that name its path before a colon, or no script.

    A sum of scripts, such as gigpo+entropy_bonus, has the lines of each. A line that names a file that is not there is
    about all. None without tests/digits.txt.
    """
    paths = {path_of(one, root) for one in script.split("+")}
    try:
        lines = (root / "tests" / "digits.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        named = re.findall(r"[\w/]+\.py\b", line.partition(":")[0])
        is_of_some = named and all((root / name).is_file() for name in named)
        if line[:1].isdigit() and (not is_of_some or paths & set(named)):
            found.append(line)
    return found


@cache
def code_of(script, root=ROOT):
    """Return a script's {"script": hash, "runtime": hash, "digits": number of its moves}; None without the script.

    The script of a sum is all of its scripts: tools.combine makes the one that runs.
    """
    names = [path_of(one, root) for one in script.split("+")]
    if None in names:
        return None
    paths = [root / name for name in names]
    beside = [] if paths[0].parent == root else paths[0].parent.glob("common.py")
    found = {"script": hash_of([*paths, *beside]), "runtime": hash_of(sorted((root / "runtime").glob("*.py")))}
    lines = moves(script, root)
    return found if lines is None else found | {"digits": len(lines)}


def differs(result, root=ROOT):
    """Return "" if today's code gives the digits of a saved result, and "moved: WHY" or "not known: WHY" otherwise.

    Nobody compares the digits of lab/ and benchmarks/: if their own code has changed, their digits are not known.
    """
    script, then = result["script"], result.get("code") or {}
    now = code_of(script, root)
    if not now:
        return f"{UNKNOWN}: there is no script {script}"
    if all(then.get(part) == now[part] for part in ("script", "runtime")):
        return ""
    if str(result.get("commit")).endswith("+"):
        return f"{UNKNOWN}: its code had changes that no commit has"
    if "digits" not in then or "digits" not in now:
        return f"{UNKNOWN}: nothing tells which commits came after it"
    if later := moves(script, root)[then["digits"] :]:
        return f"{MOVED}: {'; '.join(later)}"
    path = path_of(script, root)
    if path and "/" in path and then["script"] != now["script"]:
        return f"{UNKNOWN}: {path} or its common.py has changed"
    return ""


def settings_of(words):
    """Return {setting: value} of flags such as --lr 1e-4, --gated and --no_turn_std.

    A value is a number, True, False or a text.
    """
    found = {}
    for word in words:
        if word.startswith("--no_"):
            name, word = word.removeprefix("--no_"), "false"
        elif word.startswith("--"):
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
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}", str(value)]
    return words

"""Shows what differs between two trainers: that is the algorithm.

    python tools/diff.py grpo dapo        any two scripts, by name or path
    python tools/diff.py grpo_ar_lopti    a script and the one it grew from (tools/family.py)
    … --docstring                         the module docstrings, too

git makes the difference; in a terminal in colour, with a pager (q ends it). The name of a function stands above what
differs in it. The site (make site) shows the two side by side in a browser, with the words that differ in a line.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family


@dataclass
class Args:
    """Which two, and how."""

    script: tyro.conf.Positional[str]  # a script, by name or path
    other: tyro.conf.Positional[str] = ""  # what it is compared with; none: its parent, which then comes first
    docstring: bool = False  # the module docstrings, too


def find(name):
    """A script's path, by its name, with or without .py, or by a path. ValueError if there is none."""
    for path in (family.ROOT / f"{name}.py", family.ROOT / name, Path(f"{name}.py"), Path(name)):
        if path.is_file():
            return path.resolve()
    raise ValueError(f"there is no script {name!r}; there are {', '.join(family.family())}, and paths will do")


def pair(args):
    """The paths of the two scripts, in order. ValueError if the arguments don't name two."""
    path = find(args.script)
    if args.other:
        return path, find(args.other)
    if path.parent == family.ROOT and path.stem in family.PARENT:
        return find(family.PARENT[path.stem]), path
    raise ValueError(f"{path.name} grew from no other script: name the one to compare it with")


def code(path):
    """A script without its module docstring. ValueError if it is no Python script."""
    try:
        first, *rest = family.pieces(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path.name} is no Python script: {error}") from error
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[first.last :] if rest and first.name == "module docstring" else lines)


def main(args):
    try:
        paths = pair(args)
        texts = [code(path) for path in paths]
        if args.docstring:
            texts = [path.read_text(encoding="utf-8") for path in paths]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    changed = family.changed(*(path.read_text(encoding="utf-8") for path in paths))
    lines = f"{changed} line{'s' * (changed != 1)} of code removed or added"
    print(f"{paths[0].name} → {paths[1].name}: {lines}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{side}/{path.name}" for side, path in zip("ab", paths)]
        for name, text in zip(names, texts):
            Path(folder, name).parent.mkdir()
            Path(folder, name).write_text(text, encoding="utf-8")
        Path(folder, "attributes").write_text("*.py diff=python\n")  # that finds the functions' names
        command = ["git", "-c", f"core.attributesFile={folder}/attributes", "diff", "--no-index", "--no-prefix"]
        subprocess.run([*command, "--histogram", *names], cwd=folder)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

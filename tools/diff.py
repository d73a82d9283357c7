"""Show the differences between two trainers: they are the algorithm.

    python tools/diff.py grpo dapo        any two scripts, by name or path
    python tools/diff.py grpo_ar_lopti    a script and the one it grew from (tools/family.py)
    … --docstring                         include the module docstrings

git computes the difference; in a terminal in colour, with a pager (q ends it). The name of a function is above the
differences in it. The site (make site) shows both scripts side by side in a browser, with changed words marked.
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
    """The two scripts, and how to show them."""

    script: tyro.conf.Positional[str]  # a script, by name or path
    other: tyro.conf.Positional[str] = ""  # the other script; none: its parent, which then comes first
    docstring: bool = False  # include the module docstrings


def find(name):
    """Return a script's path, by its name, with or without .py, or by a path. ValueError if there is none."""
    for path in (family.ROOT / f"{name}.py", family.ROOT / name, Path(f"{name}.py"), Path(name)):
        if path.is_file():
            return path.resolve()
    raise ValueError(f"there is no script {name!r}; there are {', '.join(family.family())}, and paths will do")


def text_of(path, docstring):
    """Return a script's text, with or without its module docstring. ValueError if it is not a Python script."""
    text = path.read_text(encoding="utf-8")
    try:
        first, *rest = family.pieces(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path.name} is no Python script: {error}") from error
    if docstring or not rest or first.name != "module docstring":
        return text
    return "".join(text.splitlines(keepends=True)[first.last :])


def main(args):
    try:
        path, other = find(args.script), args.other and find(args.other)
        if not other:
            if path.parent != family.ROOT or path.stem not in family.PARENT:
                raise ValueError(f"{path.name} grew from no other script: name the one to compare it with")
            path, other = find(family.PARENT[path.stem]), path
        texts = [text_of(one, args.docstring) for one in (path, other)]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    paths = path, other
    changed = family.changed(*(path.read_text(encoding="utf-8") for path in paths))
    lines = f"{changed} line{'s' * (changed != 1)} of code removed or added"
    print(f"{paths[0].name} → {paths[1].name}: {lines}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{side}/{path.name}" for side, path in zip("ab", paths)]
        for name, text in zip(names, texts):
            Path(folder, name).parent.mkdir()
            Path(folder, name).write_text(text, encoding="utf-8")
        Path(folder, "attributes").write_text("*.py diff=python\n")  # makes git show functions' names
        command = ["git", "-c", f"core.attributesFile={folder}/attributes", "diff", "--no-index", "--no-prefix"]
        subprocess.run([*command, "--histogram", *names], cwd=folder)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

"""Show the differences between two trainers: they are the algorithm.

    python tools/diff.py grpo dapo        any two scripts, by name or path
    python tools/diff.py grpo_ar_lopti    a script and the one it grew from (tools/family.py)

git computes the difference, without the module docstrings; in a terminal in colour, with a pager (q ends it). The name
of a function is above the differences in it. The site (make site) shows both scripts side by side in a browser, with
changed words marked.
"""

import ast
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
    """The two scripts."""

    script: tyro.conf.Positional[str]  # a script, by name or path
    other: tyro.conf.Positional[str] = ""  # the other script; none: its parent, which then comes first


def text_of(name):
    """Return the text of a script, by its name or path. OSError if there is none, SyntaxError if it is not Python."""
    path = Path(name) if Path(name).is_file() else family.ROOT / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    ast.parse(text)
    return text


def without_docstring(text):
    node = ast.parse(text).body[0]
    below = node.end_lineno if family.name_of(node) == "" else 0
    return "".join(text.splitlines(keepends=True)[below:])


def main(args):
    script = args.script.removesuffix(".py")
    names = [args.script, args.other] if args.other else [family.PARENT.get(script), script]
    try:
        if names[0] is None:
            raise ValueError(f"{script} grew from no other script: name the one to compare it with")
        texts = [text_of(name) for name in names]
    except (OSError, SyntaxError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    changed = family.changed(*texts)
    print(f"{' → '.join(names)}: {changed} line{'s' * (changed != 1)} of code removed or added", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{side}/{Path(name).stem}.py" for side, name in zip("ab", names)]
        for place, text in zip(places, texts):
            Path(folder, place).parent.mkdir()
            Path(folder, place).write_text(without_docstring(text), encoding="utf-8")
        Path(folder, "attributes").write_text("*.py diff=python\n")  # makes git show functions' names
        command = ["git", "-c", f"core.attributesFile={folder}/attributes", "diff", "--no-index", "--no-prefix"]
        subprocess.run([*command, "--histogram", *places], cwd=folder)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

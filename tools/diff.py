"""Show the differences between two trainers: they are the algorithm.

    python -m tools.diff grpo dapo        any two scripts, by name or path
    python -m tools.diff grpo_ar_lopti    a script and the one it grew from (tools/family.py)

git computes the difference, without the module docstrings; in a terminal in colour, with a pager (q ends it). The name
of a function is above the differences in it. The site (make site) shows both scripts side by side in a browser, with
changed words marked.
"""

import ast
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family


def run(names, **options):
    """Run git's diff of two scripts, given by name or path, and return the finished process; options of subprocess."""
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{side}/{Path(name).stem}.py" for side, name in zip("ab", names)]
        for place, name in zip(places, names):
            path = Path(name) if Path(name).is_file() else family.ROOT / f"{name}.py"
            if not path.is_file():
                sys.exit(f"error: there is no {path}")
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            below = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
            Path(folder, place).parent.mkdir()
            Path(folder, place).write_text("".join(text.splitlines(keepends=True)[below:]), encoding="utf-8")
        Path(folder, "attributes").write_text("*.py diff=python\n")  # makes git show functions' names
        command = ["git", "-c", f"core.attributesFile={folder}/attributes", "diff", "--no-index", "--no-prefix"]
        return subprocess.run([*command, "--histogram", *places], cwd=folder, **options)


def main(script: tyro.conf.Positional[str], other: tyro.conf.Positional[str] = ""):
    """other: none compares the script's parent with the script."""
    names = [script, other] if other else [family.PARENT.get(script.removesuffix(".py")), script]
    if names[0] is None:
        sys.exit(f"error: {script} grew from no other script: name the one to compare it with")
    run(names)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

"""Carry a change of a script into all scripts derived from it, by three-way merges.

    python -m tools.maintain.propagate                   the uncommitted change of grpo.py, or the last commit
    python -m tools.maintain.propagate --script dapo     starts from dapo.py
    python -m tools.maintain.propagate --base main~5     all changes of grpo.py since that revision

Parents come before their children. A script that already has the change stays as it is, so a second run does nothing.
If a script's own lines conflict with the change, the script and all scripts derived from it are left untouched. The
conflict is printed and the exit code is 1. In this case, make the change in that script by hand, and carry it on from
there with --script. `git diff` shows the changes.
"""

import difflib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
from runtime import flags
from tools import family


@dataclass
class Args:
    """The change to carry."""

    script: str = "grpo"  # the script whose change is carried
    base: str = ""  # the revision before the change; empty: HEAD or, without a change since, its last commit's parent
    folder: Path = family.ROOT  # the scripts' folder, in a git repository


def git(folder, *words):
    """Return a git command's output. ValueError with git's message if it fails."""
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def base_revision(folder, stem):
    """Return HEAD if the script differs from it, otherwise the parent of the last commit that changed the script."""
    if git(folder, "show", f"HEAD:./{stem}.py") != family.source(stem, folder):
        return "HEAD"
    last = git(folder, "log", "-1", "--format=%h", "--", f"{stem}.py").strip()
    return f"{last}~1"


def merge(child, parent, here, base, theirs):
    """Return (`here` with the changes from `base` to `theirs`, the number of conflicts, which are marked in the text).

    ValueError if git fails.
    """
    names = f"{child}.py", f"{parent}.py before", f"{parent}.py now"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in zip(names, (here, base, theirs)):
            Path(folder, name).write_text(text, encoding="utf-8", newline="")
        done = subprocess.run(["git", "merge-file", "-p", "--diff3", *names], cwd=folder, capture_output=True)
    if done.returncode > 127:  # up to 127 it is the number of conflicts
        raise ValueError(f"git merge-file: {done.stderr.decode().strip()}")
    return done.stdout.decode(), done.returncode


def propagate(stem, base, folder):
    """Carry a script's change since `base`, its text before, into its descendants. Return whether all have it."""
    parents = family.PARENT | {child: parent for child, parent in family.own_scripts(folder).items() if parent}
    before, after = {stem: base}, {stem: family.source(stem, folder)}
    for child in family.family(folder, stem, parents)[1:]:
        parent = parents[child]
        if parent not in before:
            print(f"{child}.py: left untouched, since {parent}.py was")
            continue
        here = family.source(child, folder)
        merged, conflicts = merge(child, parent, here, before[parent], after[parent])
        if conflicts:
            print(f"{child}.py: left untouched, {conflicts} conflict{'s' * (conflicts > 1)}")
            print(*difflib.unified_diff(here.splitlines(), merged.splitlines(), lineterm="", n=0), sep="\n")
            continue
        (folder / f"{child}.py").write_text(merged, encoding="utf-8")
        # If this script had the change before, its children may not: their base is this script without the change.
        undone, unclear = merge(child, parent, merged, after[parent], before[parent])
        before[child], after[child] = here if unclear else undone, merged
        print(f"{child}.py: {'changed' if merged != here else 'has it already'}")
    return all(child in before for child in family.family(folder, stem, parents))


def main(args):
    stem, folder = args.script.removesuffix(".py"), args.folder
    with flags.errors_in_one_line():
        revision = args.base or base_revision(folder, stem)
        base = git(folder, "show", f"{revision}:./{stem}.py")
        print(f"the change of {stem}.py since {revision}")
        has_all = propagate(stem, base, folder)
    sys.exit(int(not has_all))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

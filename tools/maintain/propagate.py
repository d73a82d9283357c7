"""Carry a change of a script into all scripts derived from it, by three-way merges.

    python tools/maintain/propagate.py                   the uncommitted change of grpo.py, or the last commit
    python tools/maintain/propagate.py --dry_run         shows the changes, and writes nothing
    python tools/maintain/propagate.py --script dapo     starts from dapo.py
    python tools/maintain/propagate.py --base main~5     all changes of grpo.py since that revision

Parents come before their children, and each script gets the change of its own parent. A script that already has the
change stays as it is, so a second run does nothing. If a script's own lines conflict with the change, the script and
all scripts derived from it are left untouched. The conflict is printed and the exit code is 1. In this case, make the
change in that script by hand and run this again.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools import family

MARKER = 60  # characters in a conflict's marks; no line of a script begins with so many
CONFLICT = re.compile(  # the groups are its three versions: here, base, and the parent's
    rf"^<{{{MARKER}}} .*\n((?:.*\n)*?)\|{{{MARKER}}} .*\n((?:.*\n)*?)={{{MARKER}}}\n((?:.*\n)*?)>{{{MARKER}}} .*\n",
    re.M,
)


@dataclass
class Args:
    """The change to carry."""

    script: str = "grpo"  # the script whose change is carried
    base: str = ""  # the revision before the change; empty: HEAD or, without a change since, its last commit's parent
    dry_run: bool = False  # show what would change, write nothing
    folder: Path = family.ROOT  # the scripts' folder, in a git repository


@dataclass
class Outcome:
    """The result of a script's merge."""

    here: str  # its text before
    merged: str  # its text with the change; the same as before if there are conflicts
    conflicts: list  # versions of lines that both have changed: its own, its parent's before, its parent's now
    asked: bool  # whether its parent has changed


def git(folder, *words):
    """Return a git command's output. ValueError with git's message if it fails."""
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def version(folder, revision, stem):
    """Return a script's text at a revision. ValueError if it is not there."""
    return git(folder, "show", f"{revision}:./{stem}.py")


def base_revision(folder, stem):
    """Return HEAD if the script differs from it, otherwise the parent of the last commit that changed the script."""
    if version(folder, "HEAD", stem) != family.source(stem, folder):
        return "HEAD"
    last = git(folder, "log", "-1", "--format=%h", "--", f"{stem}.py").strip()
    return f"{last}~1"


def merge(here, base, theirs):
    """Return (`here` with the changes from `base` to `theirs`, the list of conflicts).

    If there are conflicts, the text lacks the changes at these places. ValueError if git fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("here", here), ("base", base), ("theirs", theirs)):
            Path(folder, name).write_text(text, encoding="utf-8", newline="")
        words = ["git", "merge-file", "-p", "--diff3", f"--marker-size={MARKER}", "here", "base", "theirs"]
        done = subprocess.run(words, cwd=folder, capture_output=True)
    if done.returncode > 127:  # up to 127 it is the number of conflicts
        raise ValueError(f"git merge-file: {done.stderr.decode().strip()}")
    text, open_ones, at = done.stdout.decode(), [], 0
    while found := CONFLICT.search(text, at):  # a conflict gets the lines of `here`
        if not has_already(*found.groups()):
            open_ones.append(found.groups())
        text = text[: found.start()] + found[1] + text[found.end() :]
        at = found.start() + len(found[1])
    return text, open_ones


def has_already(here, base, theirs):
    """Return whether conflicting lines already have the parent's change: all added lines, in order, no removed line.

    It is False for a change that adds nothing.
    """
    here, base, theirs = (part.splitlines() for part in (here, base, theirs))
    steps = list(difflib.ndiff(base, theirs))
    added = [step[2:] for step in steps if step[0] == "+" and step[2:].strip()]
    removed = {step[2:] for step in steps if step[0] == "-" and step[2:].strip()}
    rest = iter(here)
    return bool(added) and all(line in rest for line in added) and not (removed - set(added)) & set(here)


def parents_in(folder):
    """Return {script: its parent}: the family, and users' own scripts whose docstrings name a parent."""
    return family.PARENT | {stem: parent for stem, parent in family.own_scripts(folder).items() if parent}


def propagate(stem, base, folder):
    """Return {script: Outcome} in tree order, with None for a script whose parent did not get the change."""
    before, after, outcome = {stem: base}, {stem: family.source(stem, folder)}, {}
    parents = parents_in(folder)
    for child in family.family(folder, stem, parents)[1:]:
        parent = parents[child]
        if parent not in before:
            outcome[child] = None
            continue
        here = family.source(child, folder)
        merged, conflicts = merge(here, before[parent], after[parent])
        asked = before[parent] != after[parent]
        outcome[child] = Outcome(here, here if conflicts else merged, conflicts, asked)
        if conflicts:
            continue
        before[child], after[child] = here, merged
        if asked:
            # This script may have had the change before, or the conflicting part of it, and its children may not. Their
            # base is this script without the change. If the reverse merge conflicts, as after a conflict resolved by
            # hand, it is the committed script.
            before[child], unclear = merge(merged, after[parent], before[parent])
            if unclear:
                tracked = git(folder, "ls-files", f"{child}.py")
                before[child] = version(folder, "HEAD", child) if tracked else here
    return outcome


def count(before, after):
    """Return the numbers of added and removed lines, as text."""
    steps = [step[0] for step in difflib.ndiff(before.splitlines(), after.splitlines())]
    return f"{steps.count('+')} lines added, {steps.count('-')} removed"


def report(child, parent, outcome, dry_run):
    """Return the result for one script, as text."""
    if outcome is None:
        return f"{child}.py: left untouched, since {parent}.py was"
    here, merged, conflicts = outcome.here, outcome.merged, outcome.conflicts
    if not outcome.asked:
        return f"{child}.py: nothing new in {parent}.py"
    if merged != here:
        steps = difflib.unified_diff(here.splitlines(), merged.splitlines(), f"{child}.py", f"{child}.py", lineterm="")
        return "\n".join([f"{child}.py: {count(here, merged)}", *(steps if dry_run else [])])
    if not conflicts:
        return f"{child}.py: has it already"
    lines = [f"{child}.py: left untouched, {len(conflicts)} conflict{'s' * (len(conflicts) > 1)}"]
    titles = f"{child}.py", f"{parent}.py was", f"{parent}.py is"
    for title, text in (pair for conflict in conflicts for pair in zip(titles, conflict)):
        lines += [f"    {title}:", *(f"      | {line}" for line in text.splitlines() or ["(nothing)"])]
    return "\n".join(lines)


def main(args):
    stem, folder = args.script.removesuffix(".py"), args.folder
    try:
        names = family.family(folder, parents=parents_in(folder))
        if stem not in names:
            raise ValueError(f"--script {stem}: the scripts are {', '.join(names)}")
        revision = args.base or base_revision(folder, stem)
        base = version(folder, revision, stem)
        print(f"{stem}.py since {revision}: {count(base, family.source(stem, folder))}")
        outcomes = propagate(stem, base, folder) if base != family.source(stem, folder) else {}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for child, outcome in outcomes.items():
        if outcome and outcome.merged != outcome.here and not args.dry_run:
            (folder / f"{child}.py").write_text(outcome.merged, encoding="utf-8")
        print(report(child, parents_in(folder)[child], outcome, args.dry_run))
    sys.exit(int(any(outcome is None or outcome.conflicts for outcome in outcomes.values())))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

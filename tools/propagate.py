"""Carries a change of a script into every script that grew from it, by three-way merges.

    python tools/propagate.py                   the change of grpo.py that is not committed yet, or else its last commit
    python tools/propagate.py --dry_run         shows what that would change, and writes nothing
    python tools/propagate.py --script dapo     from dapo.py on
    python tools/propagate.py --base main~5     all that changed in grpo.py since that revision

Children first, then theirs, each of which gets what its own parent got. A script that has the change already stays as
it is, so that a second time does nothing. Where a script's own lines stand in the way it is left untouched, and so is
what grew from it; the conflict is shown and the exit code is 1. Make the change there by hand, and run this again.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import family

MARKER = 60  # characters in the marks of a conflict: more than any line of a script begins with
CONFLICT = re.compile(  # its three versions: here, base, and the parent's
    rf"^<{{{MARKER}}} .*\n((?:.*\n)*?)\|{{{MARKER}}} .*\n((?:.*\n)*?)={{{MARKER}}}\n((?:.*\n)*?)>{{{MARKER}}} .*\n",
    re.M,
)


@dataclass
class Args:
    """Which change."""

    script: str = "grpo"  # whose change is carried
    base: str = ""  # the revision it is counted from; empty: HEAD or, if it is as there, its last commit's parent
    dry_run: bool = False  # show what would change, write nothing
    folder: Path = family.ROOT  # where the scripts lie, in a git repository


@dataclass
class Conflict:
    """Where both a script and its parent differ from what the parent was."""

    line: int  # of the script, counted from 1, where it begins
    here: str  # the script's lines
    base: str  # what the parent's were
    theirs: str  # what they are


@dataclass
class Outcome:
    """What a merge makes of a script."""

    here: str  # its text now
    merged: str  # its text with the change; where there are conflicts, as it is now
    conflicts: list[Conflict]
    asked: bool  # whether its parent has a change for it


def git(folder, *words):
    """A git command's output. ValueError with git's own words where it fails."""
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def version(folder, revision, stem):
    """A script's text at a revision."""
    return git(folder, "show", f"{revision}:./{stem}.py")


def base_revision(folder, stem):
    """HEAD where the script differs from it; else the commit before the last one that changed the script."""
    if version(folder, "HEAD", stem) != family.source(stem, folder):
        return "HEAD"
    last = git(folder, "log", "-1", "--format=%h", "--", f"{stem}.py").strip()
    return f"{last}~1"


def merge(here, base, theirs):
    """The text `here` with what changed from base to theirs; and the conflicts, without which alone it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("here", here), ("base", base), ("theirs", theirs)):
            Path(folder, name).write_text(text, encoding="utf-8", newline="")
        words = ["git", "merge-file", "-p", "--diff3", f"--marker-size={MARKER}", "here", "base", "theirs"]
        done = subprocess.run(words, cwd=folder, capture_output=True)
    if done.returncode > 127:  # else the number of conflicts
        raise ValueError(f"git merge-file: {done.stderr.decode().strip()}")
    text, open_ones, at = done.stdout.decode(), [], 0
    while found := CONFLICT.search(text, at):  # put back what stands here
        if not has_already(*found.groups()):
            open_ones.append((found.start(), found.groups()))
        text = text[: found.start()] + found[1] + text[found.end() :]
        at = found.start() + len(found[1])
    return text, [Conflict(line_here(here, text, start), *versions) for start, versions in open_ones]


def has_already(here, base, theirs):
    """Whether lines that conflict have the parent's change in them: all that it added, in order, none that it removed.

    A change that adds nothing leaves no trace by which to tell.
    """
    here, base, theirs = (part.splitlines() for part in (here, base, theirs))
    steps = list(difflib.ndiff(base, theirs))
    added = [step[2:] for step in steps if step[0] == "+" and step[2:].strip()]
    removed = {step[2:] for step in steps if step[0] == "-" and step[2:].strip()}
    rest = iter(here)
    return bool(added) and all(line in rest for line in added) and not (removed - set(added)) & set(here)


def line_here(here, merged, start):
    """The line of `here`, counted from 1, that stands at this character of the merged text."""
    row, here, merged = merged[:start].count("\n"), here.splitlines(), merged.splitlines()
    for _, i, _, j, j_end in difflib.SequenceMatcher(None, here, merged, autojunk=False).get_opcodes():
        if j <= row < j_end:
            return i + row - j + 1
    return len(here) + 1  # behind the last line


def propagate(stem, base, folder):
    """{script: Outcome} in tree order; None for one whose parent was left without the change."""
    before, after, outcome = {stem: base}, {stem: family.source(stem, folder)}, {}
    for child in family.family(folder, stem)[1:]:
        parent = family.PARENT[child]
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
        if merged == here and asked:
            # It has the change already, but what grew from it may not: what would it be without? Where that can't be
            # told, as after a conflict resolved by hand, what was committed.
            before[child], unclear = merge(here, after[parent], before[parent])
            if unclear:
                tracked = git(folder, "ls-files", f"{child}.py")
                before[child] = version(folder, "HEAD", child) if tracked else here
    return outcome


def count(before, after):
    """How many lines were added and removed, in words."""
    steps = [step[0] for step in difflib.ndiff(before.splitlines(), after.splitlines())]
    return f"{steps.count('+')} lines added, {steps.count('-')} removed"


def report(child, parent, outcome, dry_run):
    """What happened to one script, as text."""
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
    for conflict in conflicts:
        last = conflict.line + max(1, conflict.here.count("\n")) - 1
        lines.append(f"  lines {conflict.line} to {last}:" if last > conflict.line else f"  line {last}:")
        whose = {f"{child}.py": conflict.here, f"{parent}.py was": conflict.base, f"{parent}.py is": conflict.theirs}
        for title, text in whose.items():
            lines += [f"    {title}:", *(f"      | {line}" for line in text.splitlines() or ["(nothing)"])]
    return "\n".join(lines)


def main(args):
    stem, folder = args.script.removesuffix(".py"), args.folder
    try:
        if stem not in family.family(folder):
            raise ValueError(f"--script {stem}: the scripts are {', '.join(family.family(folder))}")
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
        print(report(child, family.PARENT[child], outcome, args.dry_run))
    sys.exit(int(any(outcome is None or outcome.conflicts for outcome in outcomes.values())))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

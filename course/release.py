"""Makes the students' version of this repository: without solutions, and with checks that work all the same.

    python -m course.release FOLDER

FOLDER gets what git tracks, except the solutions, the lecturer's page, the slides, the grading and the tests of the
course. The checks need what the solutions compute, and what known mistakes give. Both are kept as numbers, for
NUM_SEEDS seeds of random inputs (course/cases/kept.pt). `python -m course.grade` draws other inputs, in the whole
repository.
"""

import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

from course import check

ROOT = Path(__file__).resolve().parents[1]
NUM_SEEDS = 4
FIRST_SEED = 100  # of the kept inputs
LEFT_OUT = re.compile(
    r"course/solutions/.*|course/cases/lesson_\d+\.py|course/(lecturer\.md|(grade|release|slides)\.py|decks/.*)|tests/test_course.*"
)


def as_dictionary(outcome):
    return None if outcome is None else asdict(outcome)


def kept_of(exercise, solution):
    """What check.kept_keys reads of an exercise."""
    sets = []
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS * check.cases.NUM_FRESH * 2, check.cases.NUM_FRESH * 2):
        key = check.key_of(exercise, solution, seed)
        sets.append(
            {
                "cases": [(case.arguments, case.padded, case.deep) for case in key.cases],
                "expected": [as_dictionary(outcome) for outcome in key.expected],
                "mistakes": {
                    message: [as_dictionary(outcome) for outcome in outcomes]
                    for message, outcomes in key.mistakes.items()
                },
            }
        )
    about = {
        name: getattr(exercise, name) for name in ("number", "function", "gradient", "tolerance", "padding", "deep")
    }
    return {"about": about, "sets": sets}


def kept():
    """{lesson: [what is kept of each exercise]}"""
    found = {}
    for lesson in check.LESSONS:
        exercises = importlib.import_module(f"course.cases.lesson_{lesson}").EXERCISES
        solutions = importlib.import_module(f"course.solutions.lesson_{lesson}")
        found[lesson] = [kept_of(exercise, getattr(solutions, exercise.function)) for exercise in exercises]
    return found


def release(folder):
    """Fills the folder. ValueError if there is something in it."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if LEFT_OUT.fullmatch(name) or not (ROOT / name).is_file():
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        shutil.copymode(ROOT / name, target)
    readme = folder / "course" / "README.md"
    readme.write_text(re.sub(r"^## For lecturers\n.*?(?=^## |\Z)", "", readme.read_text(), flags=re.M | re.S))
    readme = folder / "README.md"
    readme.write_text(re.sub(r"\[([^]]*)\]\(course/lecturer\.md\)", r"\1", readme.read_text()))
    torch.save(kept(), folder / check.KEPT.relative_to(ROOT))


@dataclass
class Args:
    """Where to."""

    folder: tyro.conf.Positional[Path]


def main(args):
    try:
        release(args.folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"the students' version is in {args.folder}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

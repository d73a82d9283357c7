"""Create the students' version of this repository: without solutions, but with working checks.

    python -m course.release FOLDER

FOLDER gets all files that git tracks, except the solutions, the lecturer's page, the slides, the grading and the tests
of the course. The checks need the results of the solutions and of known mistakes. Both are saved as numbers, for
NUM_SEEDS seeds of random inputs (course/kept.pt). `python -m course.grade` uses other inputs, in the complete
repository.
"""

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
FIRST_SEED = 100  # for the saved inputs
LEFT_OUT = re.compile(
    r"course/lesson_\d+/(solution.*|cases\.py|slides\.md)|course/(lecturer\.md|(grade|release|slides)\.py|decks/.*)|"
    r"tests/test_course.*"
)


def as_dictionary(outcome):
    return None if outcome is None else asdict(outcome)


def kept_of(exercise, solution):
    """Return the data of an exercise that check.kept_keys reads."""
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
    """Return {lesson: [the saved data of each exercise]}."""
    found = {}
    for lesson in check.LESSONS:
        found[lesson] = [kept_of(exercise, solution) for exercise, solution in check.exercises_of(lesson)]
    return found


def release(folder):
    """Fill the folder. ValueError if it is not empty."""
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
    """The folder of the students' version."""

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

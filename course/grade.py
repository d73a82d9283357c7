"""Grade a class: check the functions of every student, with the same hidden inputs for all.

    python -m course.grade FOLDER                       FOLDER has a folder per student, with lesson_0.py, …
    python -m course.grade FOLDER --lessons 0 1 2       only these lessons
    python -m course.grade FOLDER --seed 7              repeats the inputs of an earlier time
    python -m course.grade FOLDER --weights 0=1 2=3 --due 2026-12-01 --late 0.1

A function that passes is worth one point, and with --step so is each part of step.py. A lesson's marks are the fraction
of its functions that pass, times the lesson's weight. After --due, each day begun costs a fraction --late of them. The
time of a hand-in is the file's modification time. A file one folder deeper is found, and the table warns of it.

Students' files run in a jail (course/jail.py). The table is printed. OUT/grades.csv has a row per student,
OUT/grades.json has every verdict and the seed that repeats it, and OUT/gradescope/STUDENT.json has the same in the
format of Gradescope's results.json.
"""

import csv
import functools
import json
import math
import multiprocessing
import secrets
import sys
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from course import check, check_step, jail

Line = namedtuple("Line", "lesson number function verdict text")
STEP = "step"  # the "lesson" of step.py
DAY = 24 * 60 * 60


def find(folder, name):
    """Return (a hand-in, a warning): the file, or the only one of this name one folder deeper."""
    if (folder / name).exists() or (folder / name).is_symlink():
        return folder / name, ""
    deeper = [path for path in sorted(folder.glob(f"*/{name}")) if not path.parent.is_symlink()]
    if len(deeper) == 1:
        return deeper[0], f"{name} was found in {deeper[0].parent.name}/"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".py", ".zip", ".ipynb"))
    there = f" (there: {', '.join(others)[:100]})" if others else ""
    return folder / name, f"there is no {name}{there}"


def grade_student(folder, args, seed):
    """Return {"lines": [Line], "late": {lesson: days}, "warnings": [texts]} for one student's folder."""
    lines, late, warnings = [], {}, []
    with nullcontext() if args.trust_files else jail.Jail(folder) as place:
        for lesson in [*args.lessons, *([STEP] if args.step else [])]:
            file, warning = find(folder, "step.py" if lesson == STEP else f"lesson_{lesson}.py")
            warnings += [warning] if warning else []
            if lesson == STEP:
                found = check_step.check_file(file, place)
            else:
                found = check.check_lesson(lesson, file, seed, jail=place)
            lines += as_lines(lesson, file, found)
            late[str(lesson)] = days_late(file, args.due)
    return {"lines": lines, "late": late, "warnings": warnings}


def as_lines(lesson, file, found):
    """Convert verdicts to Lines. A link is refused: it could lead to a solution."""
    lines = []
    for exercise, verdict, text, _ in found:
        if file.is_symlink():
            verdict, text = check.WRONG, f"{file.name} is a link: hand in the file itself"
        lines.append(Line(str(lesson), exercise.number, exercise.function, verdict, text))
    return lines


def days_late(file, due):
    """Count the days begun between --due and a file's last change; 0 without a file or a date."""
    if not due or not file.is_file():
        return 0
    end = datetime.fromisoformat(due).timestamp() + DAY  # the day itself is in time
    return max(0, math.ceil((file.stat().st_mtime - end) / DAY))


def points_of(lines):
    return sum(line.verdict == check.PASS for line in lines)


def marks(found, args):
    """Return {lesson: weight · fraction of its functions that pass · factor for lateness} for one student."""
    weights = dict(pair.split("=") for pair in args.weights)
    result = {}
    for lesson, late in found["late"].items():
        lines = [line for line in found["lines"] if line.lesson == lesson]
        left = max(0.0, 1 - args.late * late)
        weight = float(weights.get(lesson, len(lines)))
        result[lesson] = round(weight * points_of(lines) / len(lines) * left, 3)
    return result


def as_table(graded):
    """Return a table with a row per student: passing functions per lesson, marks, days late, warnings."""
    lessons = list(next(iter(graded.values()))["late"])
    titles = [f"lesson {lesson}".replace("lesson step", "step") for lesson in lessons]
    table = Table("student", *titles, "marks", "days late", "warnings")
    for student, found in graded.items():
        of_lessons = [[line for line in found["lines"] if line.lesson == lesson] for lesson in lessons]
        cells = [f"{points_of(some)}/{len(some)}" for some in of_lessons]
        late = max(found["late"].values())
        table.add_row(student, *cells, f"{sum(found['marks'].values()):g}", str(late), "; ".join(found["warnings"]))
    return table


def as_gradescope(found):
    """Return the content of Gradescope's results.json for one student."""
    tests = []
    for line in found["lines"]:
        name = f"{line.number} {line.function}"
        tests.append({"name": name, "score": int(line.verdict == check.PASS), "max_score": 1, "output": line.text})
    return {"score": sum(found["marks"].values()), "output": "\n".join(found["warnings"]), "tests": tests}


def write(graded, about, folder):
    """Write grades.csv, grades.json, and Gradescope's file for each student."""
    (folder / "gradescope").mkdir(parents=True, exist_ok=True)
    lessons = list(next(iter(graded.values()))["late"])
    with (folder / "grades.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["student", *(f"lesson {lesson}" for lesson in lessons), "marks", "days late", "warnings"])
        for student, found in graded.items():
            total = round(sum(found["marks"].values()), 3)
            late, warnings = max(found["late"].values()), "; ".join(found["warnings"])
            rows.writerow([student, *found["marks"].values(), total, late, warnings])
            (folder / "gradescope" / f"{student}.json").write_text(json.dumps(as_gradescope(found), indent=1) + "\n")
    students = {name: found | {"lines": [line._asdict() for line in found["lines"]]} for name, found in graded.items()}
    grades = about | {"students": students}
    (folder / "grades.json").write_text(json.dumps(grades, indent=1, ensure_ascii=False) + "\n")


@dataclass
class Args:
    """The students, and the functions to grade."""

    folder: tyro.conf.Positional[Path]  # has a folder for each student
    lessons: list[int] = field(default_factory=lambda: list(check.LESSONS))
    step: tyro.conf.FlagCreatePairsOff[bool] = False  # step.py, too: 5 more functions
    seed: int | None = None  # of the random inputs; None: drawn now, and kept in grades.json
    weights: list[str] = field(default_factory=list)  # LESSON=MARKS; of others: the number of functions
    due: str = ""  # the last day in time, such as 2026-12-01; empty: nothing is late
    late: float = 0.1  # share of a file's marks that each late day costs
    trust_files: tyro.conf.FlagCreatePairsOff[bool] = False  # run all files with your rights, in no jail
    out: Path = Path("grades")  # where the grades are written

    def __post_init__(self):
        """Raise ValueError if an argument can't be right."""
        is_there = self.folder.is_dir()
        places = sorted(self.folder.iterdir()) if is_there else []
        self.students = [path for path in places if path.is_dir() and not path.name.startswith(".")]
        if not self.students:
            raise ValueError(f"{self.folder} has no folders of students")
        if not set(self.lessons) <= set(check.LESSONS):
            raise ValueError(f"the lessons are {check.LESSONS[0]} to {check.LESSONS[-1]}")
        for pair in self.weights:
            lesson, _, marks = pair.partition("=")
            if lesson not in [*map(str, check.LESSONS), STEP] or not marks.replace(".", "", 1).isdigit():
                raise ValueError(f"--weights {pair}: it must be LESSON=MARKS, such as 2=3 or step=5")
        if self.due:
            datetime.fromisoformat(self.due)
        if not self.trust_files:
            jail.check()


def main():
    try:
        args = tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    console = Console()
    # Processes, not threads: transformers can't load two models at once in threads.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        found = processes.map(functools.partial(grade_student, args=args, seed=seed), args.students)
        found = list(track(found, "grading", len(args.students), console=console, transient=True))
    graded = {student.name: one | {"marks": marks(one, args)} for student, one in zip(args.students, found)}
    console.print(as_table(graded))
    write(graded, {"seed": seed, "lessons": args.lessons, "step": args.step}, args.out)
    console.print(
        f"written to {args.out}: grades.csv, grades.json, a file for each student (seed {seed})", markup=False
    )


if __name__ == "__main__":
    main()

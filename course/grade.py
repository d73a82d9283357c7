"""Grades a class: the functions of every student, with the same hidden inputs for all.

    python -m course.grade FOLDER                       a folder in FOLDER for each student, with lesson_0.py, …
    python -m course.grade FOLDER --lessons 0 1 2       these lessons alone
    python -m course.grade FOLDER --seed 7              the inputs of another time

A function that passes is worth one point, and with --step so is each part of step.py. Every function runs in a process
of its own with a time limit (course/sandbox.py), but with your rights: grade the files of strangers in a container.
The table is printed. OUT/grades.json has every verdict, and the seed that repeats it. OUT/grades.xml has JUnit's form,
which GitHub and GitLab show: a suite for each student and a test for each function.
"""

import json
import secrets
import sys
import xml.etree.ElementTree as ElementTree
from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from course import check, check_step, sandbox

Line = namedtuple("Line", "lesson number function verdict text")
STEP = "step"  # the "lesson" of step.py


def grade_student(folder, lessons, step, seed, seconds=sandbox.SECONDS):
    """The Lines of one student. folder: where lesson_N.py is, and step.py."""
    lines = []
    for lesson in lessons:
        file = folder / f"lesson_{lesson}.py"
        found = check.check_lesson(lesson, folder, seed, seconds)
        lines += as_lines(lesson, file, found)
    if step:
        file = folder / "step.py"
        lines += as_lines(STEP, file, check_step.check_file(file))
    return lines


def as_lines(lesson, file, found):
    """Lines of verdicts. A link is refused: it could lead to a solution."""
    lines = []
    for exercise, verdict, text, _ in found:
        if file.is_symlink():
            verdict, text = check.WRONG, f"{file.name} is a link: hand in the file itself"
        lines.append(Line(str(lesson), exercise.number, exercise.function, verdict, text))
    return lines


def points_of(lines):
    return sum(line.verdict == check.PASS for line in lines)


def as_table(graded):
    """One row for each student: points of each lesson, and all of them."""
    lessons = list(dict.fromkeys(line.lesson for lines in graded.values() for line in lines))
    table = Table("student", *[f"lesson {lesson}".replace("lesson step", "step") for lesson in lessons], "points")
    for student, lines in graded.items():
        of_lessons = [[line for line in lines if line.lesson == lesson] for lesson in lessons]
        cells = [f"{points_of(some)}/{len(some)}" for some in of_lessons]
        table.add_row(student, *cells, f"{points_of(lines)}/{len(lines)}")
    return table


def as_junit(graded):
    """The same as JUnit's XML: a function that is not written yet is skipped, a wrong one has failed."""
    suites = ElementTree.Element("testsuites", name="course")
    for student, lines in graded.items():
        failed = sum(line.verdict == check.WRONG for line in lines)
        skipped = sum(line.verdict == check.NOT_YET for line in lines)
        counts = {"tests": str(len(lines)), "failures": str(failed), "skipped": str(skipped), "errors": "0"}
        suite = ElementTree.SubElement(suites, "testsuite", name=student, **counts)
        for line in lines:
            names = {"classname": f"{student}.lesson_{line.lesson}", "name": f"{line.number} {line.function}"}
            case = ElementTree.SubElement(suite, "testcase", **names)
            kind = {check.WRONG: "failure", check.NOT_YET: "skipped"}.get(line.verdict)
            if kind:
                clean = "".join(sign for sign in line.text if sign.isprintable() or sign == "\n")
                ElementTree.SubElement(case, kind, message=clean.partition("\n")[0]).text = clean
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


@dataclass
class Args:
    """Whose functions, and which."""

    folder: tyro.conf.Positional[Path]  # has a folder for each student
    lessons: list[int] = field(default_factory=lambda: list(check.LESSONS))
    step: tyro.conf.FlagCreatePairsOff[bool] = False  # step.py, too: 5 more points
    seed: int | None = None  # of the random inputs; None: drawn now, and kept in grades.json
    out: Path = Path("grades")  # where grades.json and grades.xml are written


def main(args):
    places = sorted(args.folder.iterdir()) if args.folder.is_dir() else []
    students = [path for path in places if path.is_dir() and not path.name.startswith(".")]
    if not students or not set(args.lessons) <= set(check.LESSONS):
        why = f"the lessons are {check.LESSONS[0]} to {check.LESSONS[-1]}"
        if not students:
            why = f"{args.folder} has no folders of students"
        print(f"error: {why}", file=sys.stderr)
        sys.exit(2)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    console = Console()
    graded = {}
    for student in track(students, "grading", console=console, transient=True):
        graded[student.name] = grade_student(student, args.lessons, args.step, seed)
    console.print(as_table(graded))
    args.out.mkdir(parents=True, exist_ok=True)
    of_students = {
        student: {"points": points_of(lines), "of": len(lines), "functions": [line._asdict() for line in lines]}
        for student, lines in graded.items()
    }
    grades = {"seed": seed, "lessons": args.lessons, "step": args.step, "students": of_students}
    (args.out / "grades.json").write_text(json.dumps(grades, indent=1, ensure_ascii=False) + "\n")
    (args.out / "grades.xml").write_text(as_junit(graded))
    console.print(f"written to {args.out}: grades.json, grades.xml (seed {seed})", markup=False)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

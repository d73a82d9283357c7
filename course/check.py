"""Check the functions that you wrote for a lesson, and explain in plain words what is wrong with them.

    python -m course.check 1                check course/lesson_01/lesson_1.py
    python -m course.check --all            check the exercises of all lessons
    python -m course.check 1 --solutions    check course/lesson_01/solution.py

Each function gets inputs with results worked out by hand (each lesson's cases.py), and fresh random inputs. It runs in
a separate process, which knows no result and has a time limit (course/sandbox.py). A wrong result is compared with the
results of known mistakes. If one matches, the mistake is named, otherwise the first input that fails is shown. The exit
code is 0 if all functions pass, and 1 otherwise.
"""

import contextlib
import importlib
import linecache
import os
import secrets
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from course import cases, sandbox
from course.sandbox import call

COURSE = Path(__file__).parent
LESSONS = range(16)
PASS, NOT_YET, WRONG = "PASS", "NOT YET", "WRONG"
COLOURS = {PASS: "green", NOT_YET: "yellow", WRONG: "bold red"}
IGNORES_GENERATOR = "does not draw from the generator: give it to torch.randint, so that a seed repeats the result"
PADDING = (
    "padding is not left out: −inf or NaN in {}, where mask is False, changes the result. 0 · (−inf) is NaN, so "
    "x * mask does not leave it out; x[mask], or masked_fill before anything else, does"
)
DEEP = (
    "wrong where {} are near −200: exp(−200) is 0, and 0/0 is NaN. Subtract log-probabilities, and take exp of the "
    "difference"
)
MOST_SHOWN = 24  # numbers of an input that are printed
KEPT = COURSE / "kept.pt"  # replaces the solutions in a students' version (course/release.py)


@dataclass
class Key:
    """The key to judge a function by: cases, the expected result of each, and the results of known mistakes."""

    exercise: object
    cases: list
    expected: list  # an Outcome per case

    @cached_property
    def mistakes(self):
        """Return {message: [an Outcome per case, or None if the mistake has no result]}."""
        found = {message: [None] * len(self.cases) for message in self.exercise.mistakes}
        for message, wrong in self.exercise.mistakes.items():
            for i, case in enumerate(self.cases):
                with contextlib.suppress(Exception):
                    found[message][i] = call(wrong, case.arguments, self.exercise.gradient)
        return found


@cache
def key_of(exercise, solution, seed):
    """Return the Key with the fresh cases of a seed. solution: the correct function."""
    all_cases = [*exercise.cases, *exercise.fresh_cases(seed)]
    return Key(exercise, all_cases, [expected_outcome(exercise, case, solution) for case in all_cases])


def expected_outcome(exercise, case, solution):
    """Return the expected Outcome: the numbers worked out by hand if the case has them, otherwise the solution's."""
    outcome = call(solution, case.arguments, exercise.gradient)
    if case.expected is not None:
        by_hand = call(lambda *_: case.expected, case.arguments)
        outcome.parts, outcome.is_tuple = by_hand.parts, by_hand.is_tuple
    return outcome


def same_tensor(a, b, tolerance):
    """Return whether two tensors have equal shapes and values, and both or neither have dtype bool."""
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def same_values(a, b, tolerance):
    if a.is_tuple != b.is_tuple or len(a.parts) != len(b.parts):
        return False
    are_tensors = all(isinstance(part, torch.Tensor) for part in a.parts + b.parts)
    return are_tensors and all(same_tensor(*pair, tolerance) for pair in zip(a.parts, b.parts))


def same_gradient(a, b, tolerance, where=None):
    """Return whether two Outcomes have equal gradients. where [N, T]: the positions that count; None: all."""
    if a.gradient is None or b.gradient is None or a.has_gradient != b.has_gradient:
        return a.gradient is b.gradient and a.has_gradient == b.has_gradient
    if where is None or a.gradient.shape != b.gradient.shape:
        return same_tensor(a.gradient, b.gradient, tolerance)
    return same_tensor(a.gradient[where], b.gradient[where], tolerance)


def same(a, b, exercise, case):
    """Return whether two Outcomes of a case are equal, up to the exercise's tolerance."""
    if a is None or b is None or not same_values(a, b, exercise.tolerance):
        return False
    where = case.arguments["mask"] if case.padded else None
    return not exercise.gradient or same_gradient(a, b, exercise.tolerance, where)


def verdict(done, key, file):
    """Return (PASS, NOT YET or WRONG, message). done: the result of course/sandbox.py for the function."""
    exercise, expected = key.exercise, key.expected
    if stopped := without_result(done, file):
        return WRONG, stopped
    if "error" in done:
        if done["error"]["type"] == "NotImplementedError":
            return NOT_YET, "not written yet"
        return WRONG, f"{raised(done['error'], file)}\n{shown_arguments(key.cases[done['at']])}"
    found = done["outcomes"]
    for outcome in found:
        if outcome.changed:
            return WRONG, f"changes its argument {outcome.changed}: make a new tensor (no in-place operation)"
    failing = [i for i in range(len(key.cases)) if not same(found[i], expected[i], exercise, key.cases[i])]
    if not failing:
        return (PASS, "") if all(outcome.drew for outcome in found) else (WRONG, IGNORES_GENERATOR)
    first = failing[0]
    if found[first].parts == ["NoneType"]:
        return WRONG, "gives nothing (None): the return is missing"
    if key.cases[first].padded:  # everything else is right
        return WRONG, PADDING.format(exercise.padding.replace(" ", " or "))
    if key.cases[first].deep:
        return WRONG, DEEP.format(exercise.deep.replace(" ", " and "))
    mistake = known_mistake(found, key, failing)
    if mistake:
        return WRONG, mistake
    return WRONG, difference(found[first], expected[first], key.cases[first], exercise, constant_factor(found, key))


def known_mistake(found, key, failing):
    """Return the mistake with the same results in all cases, or in all failing cases if there are several; or None.

    Cases with −inf or NaN in the padding do not count: they test only how a function ignores the padding.
    """
    everywhere = [i for i, case in enumerate(key.cases) if not case.padded]
    failing = [i for i in failing if not key.cases[i].padded]
    for places in (everywhere, failing if len(failing) > 1 else []):
        for message, outcomes in key.mistakes.items():
            if places and all(same(outcomes[i], found[i], key.exercise, key.cases[i]) for i in places):
                return message
    return None


def raised(error, file):
    """Return an exception's message, and the last line of the file in its traceback."""
    text = f"raises {error['type']}: {error['text']}".rstrip(": ")
    if error["line"]:
        line = linecache.getline(str(file), error["line"]).strip()
        text += f"\nin line {error['line']} of {Path(file).name}: {line}"
    return text


def without_result(done, file):
    """Explain why a file's function returned nothing at all, or return ""."""
    if error := done.get("unreadable"):
        where = f" in line {error['line']}" if error["line"] else ""
        return f"{file.name} can't be imported: {error['type']}{where}: {error['text']}"
    if done.get("ended") == "time":
        return "takes too long: it was ended. Is there a loop without an end?"
    if "ended" in done:
        return f"ends the program (exit code {done['ended']}): a function gives its result with return"
    return f"{file.name} has no function of this name" if "missing" in done else ""


def difference(found, expected, case, exercise, factor):
    """Describe the difference, for a result that matches no known mistake. factor: see constant_factor."""
    if (found.is_tuple, len(found.parts)) != (expected.is_tuple, len(expected.parts)):
        gives, asked = (f"{len(one.parts)} values" if one.is_tuple else "one value" for one in (found, expected))
        return f"wrong type: gives {gives}; expected {'a tuple of ' * expected.is_tuple}{asked}"
    for mine, right in zip(found.parts, expected.parts):
        if not isinstance(mine, torch.Tensor):
            return f"wrong type: gives a {mine}; a tensor or number is expected"
        if mine.shape != right.shape:
            return f"wrong shape: expected {list(right.shape)}, got {list(mine.shape)}\n{shown_arguments(case)}"
        kinds = ["of True and False (bool)" if one.dtype == torch.bool else "of numbers" for one in (right, mine)]
        if kinds[0] != kinds[1]:
            return f"wrong type: expected a tensor {kinds[0]}, got one {kinds[1]}"
    name = exercise.gradient
    if same_values(found, expected, exercise.tolerance):
        if expected.has_gradient and not found.has_gradient:
            return f"has no gradient: {name} must not be detached (.detach(), .item(), .data, float(), no_grad)"
        if found.has_gradient and not expected.has_gradient:
            return f"a gradient flows to {name}: the result is a constant, detach it"
        return f"the values are right, but their gradient by {name} is not"
    start = f"wrong value: {factor} times what is expected" if factor else "wrong value"
    if factor == "-1":
        start = "wrong sign"
    if any(mine.isnan().any() and not right.isnan().any() for mine, right in zip(found.parts, expected.parts)):
        start = "gives NaN, not a number"
    values = f"expected {shown_value(expected)}\ngot      {shown_value(found)}"
    return f"{start}\n{shown_arguments(case)}\n{values}{first_difference(found, expected, exercise.tolerance)}"


def first_difference(found, expected, tolerance):
    """Show where two results first differ, with enough digits; "" if single numbers already show the difference."""
    for mine, right in zip(found.parts, expected.parts):
        mine, right = mine.double(), right.double()
        apart = ~torch.isclose(mine, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        if apart.any():
            place = apart.nonzero()[0].tolist()
            a, b = right[tuple(place)].item(), mine[tuple(place)].item()
            digits = next((digits for digits in range(4, 17) if f"{a:.{digits}g}" != f"{b:.{digits}g}"), 17)
            where = f"at {place}: " if place else ""
            shows = not place and digits == 4
            return "" if shows else f"\nfirst difference {where}expected {a:.{digits}g}, got {b:.{digits}g}"
    return ""


def constant_factor(found, key):
    """Return the constant factor between the actual and the expected results of all cases, as text; "" if none."""
    mine, right = [], []
    for outcome, expected, case in zip(found, key.expected, key.cases):
        if not case.padded:
            mine += outcome.parts
            right += expected.parts
    shapes = [[getattr(part, "shape", None) for part in parts] for parts in (mine, right)]
    if shapes[0] != shapes[1]:
        return ""
    mine, right = (torch.cat([part.double().flatten() for part in parts]) for parts in (mine, right))
    factors = mine[right != 0] / right[right != 0]
    if mine[right == 0].any() or not len(factors) or not torch.allclose(factors, factors[0], rtol=1e-4):
        return ""
    return f"{factors[0].item():.4g}" if factors[0] else ""


def shown_arguments(case):
    shapes = {name: value.shape for name, value in case.arguments.items() if isinstance(value, torch.Tensor)}
    if any(shape.numel() > MOST_SHOWN for shape in shapes.values()):
        return "with a larger input: " + ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    rows = [f"{name} = {shown(value)}" for name, value in case.arguments.items() if not isinstance(value, dict)]
    return "with " + "\n     ".join(rows)


def shown_value(outcome):
    texts = [shown(part) for part in outcome.parts]
    return f"({', '.join(texts)})" if outcome.is_tuple else texts[0]


def shown(value):
    """Format a tensor as nested lists of rounded numbers; a large tensor as its shape and first numbers."""
    if isinstance(value, torch.Tensor) and value.numel() > MOST_SHOWN:
        first = ", ".join(map(shown, value.flatten()[:6].tolist()))
        return f"a tensor of shape {list(value.shape)} that begins {first}"
    if isinstance(value, torch.Tensor):
        value = value.detach().tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def keys_of_lesson(lesson, seed):
    """Return the Keys of a lesson's exercises, in order."""
    if KEPT.exists():
        return kept_keys(lesson, seed)
    return [key_of(exercise, solution, seed) for exercise, solution in exercises_of(lesson)]


def exercises_of(lesson):
    """Return a list of (exercise, the function that solves it) for a lesson."""
    exercises = importlib.import_module(f"course.lesson_{lesson:02}.cases").EXERCISES
    solutions = importlib.import_module(f"course.lesson_{lesson:02}.solution")
    return [(exercise, getattr(solutions, exercise.function)) for exercise in exercises]


def file_of(lesson, solutions=False):
    """Return the path of a lesson's exercises, or of their solutions."""
    return COURSE / f"lesson_{lesson:02}" / ("solution.py" if solutions else f"lesson_{lesson}.py")


def check_lesson(lesson, file, seed=None, seconds=sandbox.SECONDS, jail=None):
    """Return a list of (exercise, verdict, message, printed text) for a lesson.

    file: has its functions. seed: for the fresh cases; None: a new one each time. jail: as in attempt_file.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    file = Path(file).resolve()
    linecache.checkcache(str(file))
    lines, done = [], {}
    for key in keys_of_lesson(lesson, seed):
        exercise = key.exercise
        if not file.exists():
            lines.append((exercise, WRONG, f"there is no {file}", ""))
            continue
        if "unreadable" not in done:  # or it can't be imported for the next function either
            arguments = [case.arguments for case in key.cases]
            done = sandbox.attempt_file(file, exercise.function, arguments, exercise.gradient, seconds, jail=jail)
            if done.get("ended") == "time":
                seconds = min(seconds, sandbox.SECONDS / 4)  # for the file's other functions
        lines.append((exercise, *verdict(done, key, file), done["printed"]))
    return lines


def kept_keys(lesson, seed):
    """Return the Keys from the students' version: numbers saved by course/release.py, for a few seeds."""

    def read(dictionaries):
        return [found and sandbox.Outcome(**found) for found in dictionaries]

    keys = []
    for kept in torch.load(KEPT, weights_only=True)[lesson]:
        one = kept["sets"][seed % len(kept["sets"])]
        kept_cases = [cases.Case(arguments, None, *kind) for arguments, *kind in one["cases"]]
        keys.append(Key(SimpleNamespace(**kept["about"]), kept_cases, read(one["expected"])))
        keys[-1].mistakes = {message: read(outcomes) for message, outcomes in one["mistakes"].items()}
    return keys


def show(lines, console):
    """Print the verdicts, and below them the functions' own output."""
    if not console.is_terminal:
        console.width = 150  # for a file, or a report
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for exercise, verdict, text, _ in lines:
        table.add_row(exercise.number, exercise.function, Text(verdict, COLOURS[verdict]), Text(text))
    console.print(table)
    for exercise, _, _, printed in lines:
        for line in printed.splitlines():
            console.print(f"{exercise.function} prints | {line}")


@dataclass
class Args:
    """The lesson, and the functions to check."""

    lesson: tyro.conf.Positional[Annotated[int | None, tyro.conf.arg(metavar="LESSON")]] = None  # 0 to 14
    all: tyro.conf.FlagCreatePairsOff[bool] = False  # all lessons
    solutions: tyro.conf.FlagCreatePairsOff[bool] = False  # the solutions instead of the exercises
    folder: Path | None = None  # where lesson_N.py is; None: in the lesson's own folder
    seed: int | None = None  # of the random inputs, 0 or greater; None: others in each check


def chosen_lessons(args):
    """Return the lessons to check. ValueError, with the list of lessons, if none or a wrong one is chosen."""
    last = LESSONS[-1]
    if args.all and args.lesson is not None:
        raise ValueError("give a lesson or --all, not both")
    if args.lesson is None and not args.all:
        raise ValueError(f"which lesson? Give a number from 0 to {last}, or --all")
    if not args.all and args.lesson not in LESSONS:
        raise ValueError(f"there is no lesson {args.lesson}: the lessons are 0 to {last}")
    if args.solutions and KEPT.exists():
        raise ValueError("the students' version has no solutions")
    return list(LESSONS) if args.all else [args.lesson]


def main(args):
    try:
        lessons = chosen_lessons(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    console = Console(highlight=False, emoji=False, markup=False)
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    files = {lesson: file_of(lesson, args.solutions) for lesson in lessons}
    if args.folder and not args.solutions:
        files = {lesson: args.folder / file.name for lesson, file in files.items()}
    lines = [line for lesson, file in files.items() for line in check_lesson(lesson, file, seed)]
    show(lines, console)
    unwritten = [exercise.number.partition(".")[0] for exercise, verdict, *_ in lines if verdict == NOT_YET]
    if unwritten:
        console.print(f"write the functions in {os.path.relpath(files[int(unwritten[0])])}")
    num_passed = sum(verdict == PASS for _, verdict, *_ in lines)
    console.print(f"{num_passed} of {len(lines)} pass (random inputs: --seed {seed} repeats them)")
    sys.exit(int(num_passed < len(lines)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

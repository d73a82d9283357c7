"""Checks the functions that you wrote for a lesson, and says in plain words what is wrong with them.

    python -m course.check 1                checks course/exercises/lesson_1.py
    python -m course.check --all            checks the exercises of all lessons
    python -m course.check 1 --solutions    checks course/solutions/lesson_1.py

Each function gets inputs whose results were worked out by hand (course/cases), and mostly a larger one. If a result is
wrong, it is compared with what known mistakes give, and the mistake is named. Otherwise the first input that fails is
shown. The exit code is 0 if all functions pass, and 1 otherwise.
"""

import importlib
import importlib.util
import linecache
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

COURSE = Path(__file__).parent
LESSONS = range(9)
PASS, NOT_YET, WRONG = "PASS", "NOT YET", "WRONG"
COLOURS = {PASS: "green", NOT_YET: "yellow", WRONG: "bold red"}
IGNORES_GENERATOR = "does not draw from the generator: give it to torch.randint, so that a seed repeats the result"
MOST_SHOWN = 24  # numbers of an input that is printed

# ------------------------------------------------------------------------------------------------ calling a function


@dataclass
class Outcome:
    """What one call gave. parts: its tensors, one unless it gave a tuple."""

    value: object
    parts: list
    is_tuple: bool
    has_gradient: bool
    gradient: torch.Tensor | None  # of a weighted sum of the result, by the argument that the exercise names


def fresh(case, gradient_of=""):
    """The case's arguments, copied: a function can't change the next call's. Generators begin anew."""
    arguments = {}
    for name, value in case.arguments.items():
        if isinstance(value, torch.Generator):
            value = torch.Generator().manual_seed(value.initial_seed())
        elif isinstance(value, torch.Tensor):
            value = value.clone()
        if name == gradient_of:
            value.requires_grad_()
        arguments[name] = value
    return arguments


def call(function, case, gradient_of=""):
    """The Outcome of a function in a case. Whatever the function raises comes through."""
    arguments = fresh(case, gradient_of)
    value = function(*arguments.values())
    is_tuple = isinstance(value, tuple | list)
    parts = []
    for part in value if is_tuple else [value]:
        if isinstance(part, bool | int | float):
            part = torch.tensor(part, dtype=torch.bool if isinstance(part, bool) else torch.float64)
        parts.append(part)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    has_gradient = any(part.requires_grad for part in tensors)
    gradient = None
    if gradient_of and has_gradient:
        # With different weights, so that a gradient in the wrong place shows.
        total = sum((part * torch.arange(1, part.numel() + 1).view(part.shape)).sum() for part in tensors)
        (gradient,) = torch.autograd.grad(total, arguments[gradient_of], allow_unused=True)
    return Outcome(value, [detached(part) for part in parts], is_tuple, has_gradient, gradient)


def detached(part):
    return part.detach() if isinstance(part, torch.Tensor) else part


def changed_argument(function, case):
    """The name of an argument that the function changes, or None."""
    arguments = fresh(case)
    function(*arguments.values())
    for name, value in case.arguments.items():
        if isinstance(value, torch.Tensor) and not same_tensor(arguments[name], value, 0):
            return name
    return None


def ignores_generator(function, case):
    """Whether the case has a generator that the function draws nothing from."""
    arguments = fresh(case)
    generators = [value for value in arguments.values() if isinstance(value, torch.Generator)]
    before = [generator.get_state() for generator in generators]
    function(*arguments.values())
    return any(torch.equal(generator.get_state(), state) for generator, state in zip(generators, before))


# -------------------------------------------------------------------------------------------------------- comparing


def same_tensor(a, b, tolerance):
    """Whether two tensors have one shape, are both of bool or neither, and have the same values."""
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def same_values(a, b, tolerance):
    if a.is_tuple != b.is_tuple or len(a.parts) != len(b.parts):
        return False
    pairs = list(zip(a.parts, b.parts))
    if not all(isinstance(part, torch.Tensor) for pair in pairs for part in pair):
        return False
    return all(same_tensor(*pair, tolerance) for pair in pairs)


def same_gradient(a, b, tolerance):
    if (a.gradient is None) != (b.gradient is None) or a.has_gradient != b.has_gradient:
        return False
    return a.gradient is None or same_tensor(a.gradient, b.gradient, tolerance)


def same(a, b, exercise):
    """Whether two Outcomes are the same, up to the exercise's tolerance."""
    if not same_values(a, b, exercise.tolerance):
        return False
    return not exercise.gradient or same_gradient(a, b, exercise.tolerance)


def expected_outcome(exercise, case, solution):
    """What must come back: the numbers worked out by hand if the case has them, otherwise the solution's."""
    outcome = call(solution, case, exercise.gradient)
    if case.expected is not None:
        by_hand = call(lambda *_: case.expected, case)
        outcome.value, outcome.parts, outcome.is_tuple = by_hand.value, by_hand.parts, by_hand.is_tuple
    return outcome


# --------------------------------------------------------------------------------------------------------- verdicts


def judge(function, exercise, solution, file):
    """(PASS, NOT YET or WRONG, what to say) of one function. file: where it is written."""
    cases = exercise.cases
    expected = [expected_outcome(exercise, case, solution) for case in cases]
    found = []
    for case in cases:
        try:
            found.append(call(function, case, exercise.gradient))
            changed = changed_argument(function, case)
        except NotImplementedError:
            return NOT_YET, "not written yet"
        except Exception as error:
            return WRONG, raised(error, case, file)
        if changed:
            return WRONG, f"changes its argument {changed}: make a new tensor (no in-place operation)"
    failing = [i for i in range(len(cases)) if not same(found[i], expected[i], exercise)]
    if not failing and any(ignores_generator(function, case) for case in cases):
        return WRONG, IGNORES_GENERATOR
    if not failing:
        return PASS, ""
    if found[failing[0]].value is None:
        return WRONG, "gives nothing (None): the return is missing"
    mistake = known_mistake(found, exercise, failing)
    if mistake:
        return WRONG, mistake
    first = failing[0]
    return WRONG, difference(found[first], expected[first], cases[first], exercise)


def known_mistake(found, exercise, failing):
    """The mistake that gives the same in all cases, or in all that fail, or in the first that fails; or None."""
    everywhere = range(len(exercise.cases))
    for places in (everywhere, failing, failing[:1]):
        for message, wrong in exercise.mistakes.items():
            if all(makes_it(wrong, exercise, found[i], exercise.cases[i]) for i in places):
                return message
    return None


def makes_it(wrong, exercise, outcome, case):
    """Whether a known mistake gives this outcome in a case."""
    try:
        return same(call(wrong, case, exercise.gradient), outcome, exercise)
    except Exception:  # it may have no result here
        return False


def raised(error, case, file):
    """What an exception says, and the last line of the file that it came through."""
    text = f"raises {type(error).__name__}: {error}".rstrip(": ")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if lines:
        text += f"\nin line {lines[-1]} of {Path(file).name}: {linecache.getline(str(file), lines[-1]).strip()}"
    return f"{text}\n{shown_arguments(case)}"


def difference(found, expected, case, exercise):
    """What differs, for a result that is no known mistake."""
    if not expected.is_tuple and found.is_tuple:
        return f"wrong type: gives {len(found.parts)} values; one is expected"
    if expected.is_tuple and (not found.is_tuple or len(found.parts) != len(expected.parts)):
        number = f"{len(found.parts)} values" if found.is_tuple else "one value"
        return f"wrong type: gives {number}; a tuple of {len(expected.parts)} is expected"
    for mine, right in zip(found.parts, expected.parts):
        if not isinstance(mine, torch.Tensor):
            return f"wrong type: gives a {type(mine).__name__}; a tensor or number is expected"
        if mine.shape != right.shape:
            return f"wrong shape: expected {list(right.shape)}, got {list(mine.shape)}\n{shown_arguments(case)}"
        if (mine.dtype == torch.bool) != (right.dtype == torch.bool):
            return f"wrong type: expected a tensor of {kind(right)}, got one of {kind(mine)}"
    if same_values(found, expected, exercise.tolerance):
        return wrong_gradient(found, expected, exercise)
    start = "wrong value"
    if any(mine.isnan().any() and not right.isnan().any() for mine, right in zip(found.parts, expected.parts)):
        start = "gives NaN, not a number"
    elif factor := constant_factor(found, expected):
        start = "wrong sign" if factor == "-1" else f"wrong value: {factor} times what is expected"
    return f"{start}\n{shown_arguments(case)}\nexpected {shown_value(expected)}\ngot      {shown_value(found)}"


def kind(tensor):
    return "True and False (bool)" if tensor.dtype == torch.bool else "numbers"


def wrong_gradient(found, expected, exercise):
    """What is said of a gradient, if the values are right."""
    name = exercise.gradient
    if expected.has_gradient and not found.has_gradient:
        return f"has no gradient: {name} must not be detached (.detach(), .item(), .data, float(), no_grad)"
    if found.has_gradient and not expected.has_gradient:
        return f"a gradient flows to {name}: the result is a constant, detach it"
    return f"the values are right, but their gradient by {name} is not"


def constant_factor(found, expected):
    """The one factor between the results as text, or "" if there is none."""
    mine = torch.cat([part.double().flatten() for part in found.parts])
    right = torch.cat([part.double().flatten() for part in expected.parts])
    counts = right != 0
    if mine.shape != right.shape or not counts.any() or mine[~counts].any():
        return ""
    factors = mine[counts] / right[counts]
    if not torch.allclose(factors, factors[:1].expand_as(factors), rtol=1e-4) or not factors[0]:
        return ""
    return f"{factors[0].item():.4g}"


def shown_arguments(case):
    sizes = [value.numel() for value in case.arguments.values() if isinstance(value, torch.Tensor)]
    if max(sizes, default=0) > MOST_SHOWN:
        what = ", ".join(f"{name} {shape_of(value)}" for name, value in case.arguments.items())
        return f"with a larger input: {what}"
    rows = [
        f"{name} = {shown(value)}" for name, value in case.arguments.items() if not isinstance(value, torch.Generator)
    ]
    return "with " + "\n     ".join(rows)


def shape_of(value):
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else shown(value)


def shown_value(outcome):
    texts = [shown(part) for part in outcome.parts]
    return f"({', '.join(texts)})" if outcome.is_tuple else texts[0]


def shown(value):
    """A tensor as nested lists of rounded numbers; a large one as its shape and first numbers."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.numel() > MOST_SHOWN:
        first = ", ".join(f"{number:.4g}" for number in value.flatten()[:6].tolist())
        return f"a tensor of shape {list(value.shape)} that begins {first}"
    return nested(value.detach().tolist())


def nested(value):
    if isinstance(value, list):
        return f"[{', '.join(nested(item) for item in value)}]"
    return str(value) if isinstance(value, bool) else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------------- lessons


def load(file):
    """The module of a lesson's file, read anew. Errors of the file come through."""
    linecache.checkcache(str(file))
    spec = importlib.util.spec_from_file_location(f"checked_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_lesson(lesson, folder):
    """A list of (exercise, verdict, what to say) of a lesson, 0 to 8; folder: where lesson_N.py is."""
    exercises = importlib.import_module(f"course.cases.lesson_{lesson}").EXERCISES
    solutions = importlib.import_module(f"course.solutions.lesson_{lesson}")
    file = (Path(folder) / f"lesson_{lesson}.py").resolve()
    try:
        module = load(file)
    except FileNotFoundError:
        return [(exercise, WRONG, f"there is no {file}") for exercise in exercises]
    except Exception as error:
        return [(exercise, WRONG, unreadable(error, file)) for exercise in exercises]
    lines = []
    for exercise in exercises:
        function = getattr(module, exercise.function, None)
        if not callable(function):
            verdict = WRONG, f"{file.name} has no function of this name"
        else:
            verdict = judge(function, exercise, getattr(solutions, exercise.function), file)
        lines.append((exercise, *verdict))
    return lines


def unreadable(error, file):
    """Why a file can't be imported."""
    place = getattr(error, "lineno", None)
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if place is None and frames:
        place = frames[-1]
    where = f" in line {place}" if place else ""
    return f"{file.name} can't be imported: {type(error).__name__}{where}: {getattr(error, 'msg', error)}"


def table(lines):
    """The verdicts as rich's table."""
    shown_table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        shown_table.add_column(no_wrap=True)
    shown_table.add_column(overflow="fold")
    for exercise, verdict, text in lines:
        shown_table.add_row(exercise.number, exercise.function, Text(verdict, COLOURS[verdict]), Text(text))
    return shown_table


# ------------------------------------------------------------------------------------------------------------- main


@dataclass
class Args:
    """Which lesson, and whose functions."""

    lesson: tyro.conf.Positional[Annotated[int | None, tyro.conf.arg(metavar="LESSON")]] = None  # 0 to 8
    all: tyro.conf.FlagCreatePairsOff[bool] = False  # all lessons
    solutions: tyro.conf.FlagCreatePairsOff[bool] = False  # the solutions instead of the exercises
    folder: Path = COURSE / "exercises"  # where lesson_N.py is


def chosen_lessons(args):
    """The lessons to check. ValueError, saying which there are, if none or a wrong one is chosen."""
    if args.all and args.lesson is not None:
        raise ValueError("give a lesson or --all, not both")
    if args.all:
        return list(LESSONS)
    if args.lesson is None:
        raise ValueError(f"which lesson? Give a number from {LESSONS[0]} to {LESSONS[-1]}, or --all")
    if args.lesson not in LESSONS:
        raise ValueError(f"there is no lesson {args.lesson}: the lessons are {LESSONS[0]} to {LESSONS[-1]}")
    return [args.lesson]


def main(args):
    try:
        lessons = chosen_lessons(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    folder = COURSE / "solutions" if args.solutions else args.folder
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 150  # for a file, or a report
    lines = []
    for lesson in lessons:
        lines += check_lesson(lesson, folder)
    console.print(table(lines))
    num_passed = sum(verdict == PASS for _, verdict, _ in lines)
    console.print(f"{num_passed} of {len(lines)} pass")
    sys.exit(int(num_passed < len(lines)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

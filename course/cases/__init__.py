"""What course/check.py gives to the functions of each lesson, and the mistakes that it knows.

A module lesson_N.py has EXERCISES, a list of Exercise. What is expected in a Case was worked out by hand; the working
is beside it. A Case without an expected value is larger, and what the solution computes is expected.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class Case:
    """One call: the arguments in order, by name, and what must come back (None: what the solution computes)."""

    arguments: dict
    expected: object = None


@dataclass
class Exercise:
    """A function to write, with its cases (the simplest first) and {what to say: the wrong function that does it}."""

    number: str  # such as "0.1"
    function: str  # its name
    cases: list
    mistakes: dict = field(default_factory=dict)
    gradient: str = ""  # the argument by which the gradient is compared; the solution says if there is one
    tolerance: float = 1e-5  # absolute and relative


def floats(values):
    return torch.tensor(values, dtype=torch.float32)


def bools(values):
    return torch.tensor(values, dtype=torch.bool)


def random_mask(generator, num_rows=5, num_places=9):
    """Rows as the trainers have them: a prompt, a response of one token or more, padding. [N, T]."""
    start = torch.randint(1, 4, (num_rows, 1), generator=generator)
    length = torch.randint(1, num_places - 3, (num_rows, 1), generator=generator)
    places = torch.arange(num_places)
    return (places >= start) & (places < start + length)


def random_logp(generator, shape):
    """Log-probabilities, also in places that are not of responses. Of float32."""
    return -4 * torch.rand(shape, generator=generator)

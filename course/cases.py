"""What course/check.py gives to the functions of each lesson, and the mistakes that it knows.

A lesson's cases.py has EXERCISES, a list of Exercise. What is expected in a Case was worked out by hand; the working
is beside it. A Case without an expected value is drawn at random, and what the solution computes is expected. One such
case is always the same. Others are fresh in each check, and in some of them the padding is −inf or NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

NUM_FRESH = 3


@dataclass
class Case:
    """One call: the arguments in order, by name, and what must come back (None: what the solution computes)."""

    arguments: dict
    expected: object = None
    padded: bool = False  # with −inf or NaN outside the mask; gradients count on response tokens alone
    deep: bool = False  # with log-probabilities so low that exp gives 0


@dataclass(eq=False)  # each is itself alone, and can be a key
class Exercise:
    """A function to write, with its cases (the simplest first) and {what to say: the wrong function that does it}."""

    number: str  # such as "0.1"
    function: str  # its name
    cases: list
    random: Callable  # arguments, drawn with a torch.Generator
    mistakes: dict = field(default_factory=dict)
    gradient: str = ""  # the argument by which the gradient is compared; the solution says if there is one
    tolerance: float = 1e-5  # absolute and relative
    padding: str = ""  # names of arguments that may hold anything outside the argument "mask"
    deep: str = ""  # names of log-probabilities of which only differences matter

    def __post_init__(self):
        self.cases = [*self.cases, Case(self.random(generator(0)))]

    def fresh_cases(self, seed):
        """Random cases of this seed: some as the trainers have them, and some with −inf and NaN in the padding."""
        cases = [Case(self.random(generator(seed + i))) for i in range(NUM_FRESH)]
        if self.padding:
            cases += [self.padded_case(seed + NUM_FRESH, value) for value in (-math.inf, math.nan)]
        if self.deep:
            arguments = self.random(generator(seed))
            cases.append(Case(arguments | {name: arguments[name] - 200 for name in self.deep.split()}, deep=True))
        return cases

    def padded_case(self, seed, value):
        arguments = self.random(generator(seed))
        for name in self.padding.split():
            arguments[name] = arguments[name].masked_fill(~arguments["mask"], value)
        return Case(arguments, padded=True)


def generator(seed):
    return torch.Generator().manual_seed(seed)


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

"""reasoning-gym: problems of about a hundred generators, each with its own verifier (PyPI, Apache-2.0).

The library (Stojanovski et al. 2025, arXiv 2505.24760) makes the questions and scores the answers. This file makes
them a task. `--gym letter_counting,chain_sum` names the generators, which are the categories, and
`--gym_options '{"max_words": 3}'` sets their parameters: each generator takes the ones that it has. One parameter is
this project's: with `{"think": true}` the model's turn begins with <think>. Without it, the turn begins with
<answer>, for a model that can only give the result.

A digest of its text assigns each question to the test or the training problems, for any seed. So no problem is on
both sides, and the two sides never use the same seed of the library.

Generators in UNSAFE are refused: their verifiers run the response as Python (eval, or sympy's parser). So are those in
LENIENT: a constant wrong answer gets 1 (0 in coin_flip, nan in complex_arithmetic, any text in game_of_life_halting).
"""

import dataclasses
import difflib
import json
import math
import random
from functools import cache
from importlib.util import find_spec

from tqdm import tqdm

from rewards.countdown import last_answer
from rewards.puzzles import TEST_SHARE, digest, split_of, take_turns
from rewards.rows import check_split

INSTALL = "pip install -r requirements-gym.txt"
DEFAULT_SIZE = {"train": 2000, "test": 200}
OWN = ("seed", "size")  # the library's parameters that are settings of the trainers
UNSAFE = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
LENIENT = {"coin_flip", "complex_arithmetic", "game_of_life_halting"}
PREFIX = {False: "<answer>", True: "<think>"}  # the beginning of the model's turn, by "think"
REQUEST = {
    False: "Answer with the result alone, as in <answer>result</answer>.",
    True: "First think inside <think> </think>, then give the result alone inside <answer> </answer>.",
}

# --------------------------------------------------------------------------------------------------------------------
# Scoring

MAX_LENGTH = 5000  # characters per answer; the largest boards have half as many


def score(response, answer) -> dict:
    """Score one response by the generator's own verifier, which gets the last complete <answer>...</answer>.

    In: `response`, the model's text after the prefix; `answer`, {"generator", "options", "think", "entry"} from `load`.
    Out: `reward`, the library's score: 1 for a right answer and, with many generators, a part of it for a nearly right
    one; `correct` (the score is 1); `format` (there is an answer of a readable size). It never raises on any text.
    """
    text = last_answer(PREFIX[answer["think"]] + response).strip()
    is_answer = 0 < len(text) <= MAX_LENGTH
    reward = 0.0
    if is_answer:
        verifier = dataset(answer["generator"], json.dumps(answer["options"]))
        try:
            reward = float(verifier.score_answer(text, answer["entry"]))
        except Exception:  # some verifiers read a number, and raise without one
            reward = 0.0
    return {"reward": reward if math.isfinite(reward) else 0.0, "correct": reward == 1, "format": is_answer}


def score_all(responses, answers) -> list:
    """Score each response with its answer, in order."""
    return [score(response, answer) for response, answer in zip(responses, answers, strict=True)]


# --------------------------------------------------------------------------------------------------------------------
# Loading


def check(names, options, source="") -> tuple:
    """Return ({generator: its options}, think) of the two settings.

    ValueError, with the nearest names, if one can't be right.
    """
    if source:
        raise ValueError("--task gym generates its problems: it takes no --data or --test_data")
    if not find_spec("reasoning_gym"):
        raise ValueError(f"--task gym needs reasoning-gym: {INSTALL}")
    options = read_options(options)
    think = options.pop("think", False)
    if not isinstance(think, bool):
        raise ValueError(f"--gym_options: think is {think!r}; it must be true or false")
    chosen = {name.strip(): {} for name in names.split(",")}
    known = {"think"}
    for name in chosen:
        check_name(name)
        known |= parameters(name)
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"--gym_options: {names} has no {option!r}{nearest(option, known)}")
        for name in chosen:
            if option in parameters(name):
                chosen[name][option] = value
    for name, own in chosen.items():
        check_answers(name, own)
    return chosen, think


def read_options(text: str):
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"""--gym_options is {text}; it must be like '{{"max_words": 3}}'""")
    return options


def check_name(name) -> None:
    names = registry().keys() - UNSAFE - LENIENT
    if name in UNSAFE:
        raise ValueError(f"--gym {name}: its verifier runs the response as a program, which is not safe")
    if name in LENIENT:
        raise ValueError(f"--gym {name}: its verifier takes wrong answers for right ones")
    if name not in names:
        raise ValueError(f"--gym has no generator {name!r}{nearest(name, names)}")


def check_answers(name, options) -> None:
    """Raise ValueError unless the generator takes these options, and its first problems have an answer."""
    try:
        made = dataset(name, json.dumps(options))
        answers = [made[i]["answer"] for i in range(3)]
    except Exception as error:  # the library asserts its ranges; values of another type can raise anything
        raise ValueError(f"--gym {name} can't take --gym_options {json.dumps(options)}: {error}") from error
    if not any(answers):
        raise ValueError(f"--gym {name}: the answer to its problems is empty")


def nearest(name, names) -> str:
    """Return the end of an error's line: the most similar names, or all names if they are few."""
    close = difflib.get_close_matches(name, names, n=3) or sorted(names)[:12]
    return f"; nearest: {', '.join(close)}"


def registry() -> dict:
    """Return {name: (class, class of its parameters)} of the library's generators, except the one that joins others."""
    from reasoning_gym.factory import DATASETS  # imported late: it takes a second

    return {name: classes for name, classes in DATASETS.items() if name != "composite"}


def parameters(name):
    """Return the names of a generator's own parameters."""
    return {field.name for field in dataclasses.fields(registry()[name][1])} - set(OWN)


@cache
def dataset(name, options, seed=0, size=10):
    """Return the library's generator: a list of `size` problems, each generated on access. options: as JSON."""
    from reasoning_gym import create_dataset

    return create_dataset(name, seed=seed, size=size, **json.loads(options))


def load(source, split: str, *, gym="letter_counting", gym_options="{}", size=None, seed=0):
    """Return problems of the generators in turn: equally many of each, or all of a generator that has fewer.

    Out: a list of dicts with `messages`, `prefix`, `answer` (see `score`) and `category`, the generator's name.
    ValueError if a setting can't be right.
    """
    check_split(split)
    chosen, think = check(gym, gym_options, source)
    wanted = size or DEFAULT_SIZE[split]
    each = math.ceil(wanted / len(chosen))
    groups = [generate(name, options, think, each, split, seed) for name, options in chosen.items()]
    return take_turns(groups)[:wanted]


def generate(name, options, think, count, split: str, seed) -> list:
    """Return up to `count` different problems of one generator."""
    tries = 2 * TEST_SHARE * count  # a test problem needs TEST_SHARE tries, and some problems come twice
    made = dataset(name, json.dumps(options), random.Random(f"{seed} {name}").randrange(2**31), tries)
    problems = {}
    # Some generators need a second per problem, so show a bar.
    for i in tqdm(range(tries), desc=f"{name}: {split} problems", delay=5, leave=False, disable=None):
        entry = made[i]
        if split_of(digest(entry["question"])) == split and entry["answer"]:
            problems[entry["question"]] = make_item(name, options, think, entry)
        if len(problems) == count:
            break
    if not problems:
        raise ValueError(f"--gym {name}: no {split} problem among {tries}")
    return list(problems.values())


def make_item(name, options, think, entry) -> dict:
    """Return a problem for the trainers. entry: the library's, with question, answer and metadata."""
    return {
        "messages": [{"role": "user", "content": f"{entry['question']}\n{REQUEST[think]}"}],
        "prefix": PREFIX[think],
        "answer": {"generator": name, "options": options, "think": think, "entry": entry},
        "category": name,
    }

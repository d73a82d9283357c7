"""Load a task from a user's own Python file: `--task FILE.py`. docs/add_a_task.md makes one.

rewards/__init__.py lists the functions that a task must offer. A file that lacks something is refused here in one line,
before anything large is loaded.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import pydantic

from rewards.rows import text_of, with_content


class Message(pydantic.BaseModel, extra="allow"):
    """A turn. It may have more keys, such as tool_calls; runtime/chats.py refuses what the template leaves out."""

    role: str
    content: Annotated[str, pydantic.BeforeValidator(text_of)]


Turn = Annotated[Message, pydantic.BeforeValidator(with_content)]


class Problem(pydantic.BaseModel):
    messages: list[Turn] = pydantic.Field(min_length=1)
    answer: Any
    prefix: str = ""
    category: str | int = "all"


# The square of a larger one is infinite in float32, and so is the standard deviation of a group.
Reward = Annotated[float, pydantic.Field(allow_inf_nan=False, ge=-1e18, le=1e18)]


class Score(pydantic.BaseModel):
    reward: Reward
    correct: bool
    format: bool
    parts: dict[str, Reward | list[Reward]] = {}  # a list has a number per turn


@functools.cache
def read_file(name, flag="--task"):
    """Import the file as a module with load, score and score_all. ValueError if that fails, or if one is missing."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{flag} {name}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    task = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = task  # dataclasses and multiprocessing look for it there
    try:
        spec.loader.exec_module(task)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{flag} {name} can't be imported: {said(error)}") from error
    for function in ("load", "score"):
        if not callable(getattr(task, function, None)):
            raise ValueError(f"{flag} {name} has no function {function}(): a task needs load() and score()")
    if not hasattr(task, "score_all"):
        task.score_all = lambda responses, answers: [task.score(*pair) for pair in zip(responses, answers)]
    return task


def load(name, task, source, split, size, seed):
    """Return the problems from the task's load(), completed with all optional keys.

    ValueError unless they are valid, and so is the score of an empty response to the first one.
    """
    try:
        problems = task.load(source, split, size=size, seed=seed)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: load() fails: {said(error)}") from error
    if not isinstance(problems, list) or not problems:
        raise ValueError(f"{name}: load() must give a list of problems, and gave {problems!r:.60}")
    complete = []
    for i, problem in enumerate(problems):
        checked = as_model(Problem, problem, f"{name}: problem {i} of load()")
        complete.append({**problem, **checked.model_dump()})
    try:
        json.dumps(complete[0]["answer"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: problem 0 of load(): its answer can't be kept as JSON: {error}") from error
    try:
        if hasattr(task, "score_conversation"):
            scores = [task.score_conversation([""], complete[0]["answer"])]
        else:
            scores = task.score_all([""], [complete[0]["answer"]])
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: score() fails on an empty response: {said(error)}") from error
    if hasattr(task, "reply"):
        try:
            reply = task.reply([""], complete[0])
        except (Exception, SystemExit) as error:
            raise ValueError(f"{name}: reply() fails on an empty turn: {said(error)}") from error
        if reply is not None and not isinstance(reply, str):
            raise ValueError(f"{name}: reply() must give a string or None, and gave {reply!r:.60}")
    if hasattr(task, "state"):
        for turns in ([], [""]):
            try:
                hash(task.state(turns, complete[0]))
            except (Exception, SystemExit) as error:
                raise ValueError(f"{name}: state() must give a key; after {turns}: {said(error)}") from error
    if not isinstance(scores, list) or len(scores) != 1:
        raise ValueError(f"{name}: score_all() must give a list with a score for each response, not {scores!r:.60}")
    as_model(Score, scores[0], f"{name}: what score() gives")
    return complete


def check_scores(task, scores, responses):
    """Raise ValueError, with the task's file and the response, unless score_all() scored each response completely.

    responses: per response, the list of its turns.
    """
    name = getattr(task, "__file__", task)
    if len(scores) != len(responses):
        raise ValueError(f"{name}: score_all() gave {len(scores)} scores for {len(responses)} responses")
    for score, response in zip(scores, responses):
        said = response[0] if len(response) == 1 else response
        as_model(Score, score, f"{name}: what score() gives the response {said!r:.200}")
        for part, value in score.get("parts", {}).items():
            if isinstance(value, list) and len(value) != len(response):
                raise ValueError(f"{name}: part {part!r} of a score has {len(value)} numbers for {len(response)} turns")


def as_model(model, found, what):
    """Return the dictionary as a pydantic model. ValueError, in one line, if it does not fit."""
    try:
        return model.model_validate(found, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{what} is not complete: {place}: {first['msg']}; it is {found!r:.200}") from error


def said(error):
    return f"{type(error).__name__}: {error}"

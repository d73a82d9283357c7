"""Load a task from a user's own Python file: `--task FILE.py`. docs/add_a_task.md makes one.

rewards/__init__.py lists the functions that a task must offer. A file that lacks something is refused here in one line,
before anything large is loaded.
"""

import copy
import functools
import hashlib
import importlib.util
import inspect
import json
import sys
import traceback
import types
from pathlib import Path
from typing import Annotated, Any

import pydantic

from rewards import TaskError
from rewards.rows import text_of, with_content

TIMED_OUT = "timed out"  # in place of a score
KEYS_OF_ROWS = {"step", "id", "prompt", "response", "turns", "replies", "answer"}  # of samples.jsonl, beside a score's


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
    # A task in several files imports the others. Its folder comes last: it hides no library.
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(task)
    except BaseException as error:  # also SystemExit
        raise ValueError(f"{flag} {name} can't be imported: {said(error)}") from error
    scorers = [function for function in ("Conversation", "score_conversation") if hasattr(task, function)]
    for function in ("load", *(scorers or ["score"])):
        if not callable(getattr(task, function, None)):
            needed = "a task needs load() and score(), or score_conversation() if it has several turns"
            raise ValueError(f"{flag} {name} has no function {function}(): {needed}")
    task.scores_one_by_one = not hasattr(task, "score_all")
    if task.scores_one_by_one:
        task.score_all = lambda responses, answers: [task.score(*pair) for pair in zip(responses, answers)]
    return task


def digest(task):
    """Return the SHA-256 (hex) of the task's file, and of the files in its folder that it has imported."""
    folder = Path(task.__file__).parent
    paths = {Path(task.__file__)}
    if hasattr(task, "scores_one_by_one"):  # a user's own
        paths |= {Path(file) for file in map(file_of, list(sys.modules.values())) if Path(file).parent == folder}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def file_of(module):
    return getattr(module, "__file__", None) or ""


def load(name, task, source, split: str, size, seed):
    """Return the problems from the task's load(), completed with all optional keys. ValueError unless all are valid."""
    try:
        problems = task.load(source, split, size=size, seed=seed)
    except BaseException as error:
        raise ValueError(f"{name}: load() fails: {said(error)}") from error
    if not isinstance(problems, list) or not problems:
        raise ValueError(f"{name}: load() must give a list of problems, and gave {problems!r:.60}")
    complete = []
    tools = {"tools": schemas(task)} if hasattr(task, "TOOLS") else {}
    for i, problem in enumerate(problems):
        where = f"{name}: problem {i} of load()"
        checked = as_model(Problem, problem, where)
        if checked.messages[-1].role == "assistant":  # the template would end this turn and begin another one
            raise ValueError(f"{where} ends with the model's turn: its beginning is given as prefix, not as a message")
        check_json(checked.answer, f"{where}: its answer")
        complete.append({**problem, **checked.model_dump(), **tools})
    return complete


def schemas(task):
    """Return the schemas of the task's TOOLS, as chat templates take them. ValueError if a function has none."""
    from transformers.utils import get_json_schema

    try:
        return [get_json_schema(tool) for tool in task.TOOLS]
    except Exception as error:  # of transformers
        raise ValueError(f"{task.__file__}: TOOLS: {said(error)}") from error


def chosen(function, given, *first):
    """Return the arguments for a function that takes some of those given, {name: value}, by its parameters' names.

    first: the names of what its first parameters get if they are called otherwise.
    """
    values = []
    for i, name in enumerate(inspect.signature(function).parameters):
        if name in given or i < len(first):
            values.append(given[name if name in given else first[i]])
    return values


def check(name, task, problems, loads, seconds):
    """Try score() and reply() with empty responses to the first problems. ValueError if they fail.

    From now on the task's own process scores responses (judge.py). loads, seconds: as in judge.Judge.
    """
    from rewards import judge  # here, because its process imports this module

    task.judge = judge.Judge(task, loads, seconds)
    if hasattr(task, "Conversation"):
        return check_conversation(task, problems[0], seconds)
    task.judge.start()  # while reply() is tried
    if hasattr(task, "reply"):
        reply(task, [""], copy.deepcopy(problems[0]))
    if hasattr(task, "state"):
        for turns in ([], [""]):
            try:
                hash(task.state(list(turns), copy.deepcopy(problems[0])))
            except BaseException as error:
                raise ValueError(f"{name}: state() must give a key; after {turns}: {said(error)}") from error
    tried = (problems[:2] * 2)[:2]
    answers = [problem["answer"] for problem in tried]
    more = [{"problem": problem, "replies": [], "truncated": False} for problem in tried]
    if TIMED_OUT in scores(task, [[""], [""]], answers, more):
        raise ValueError(f"{name}: score() of an empty response took longer than --score_timeout, {seconds:g} s")


def check_conversation(task, problem, seconds) -> None:
    """Try a Conversation with an empty turn. ValueError if it fails."""
    from runtime import tools

    side = tools.Side(task, problem, 0)
    one = types.SimpleNamespace(turns=[""], replies=[], side=side, finish_reason="stop")
    [(said, error)] = tools.side_by_side([side.method("reply", "")], seconds)
    if error:
        raise TaskError(failure(task.__file__, "Conversation.reply", "", error)) from error
    if said is not None and not isinstance(said, str):
        raise TaskError(f"{task.__file__}: Conversation.reply() must give a string or None, and gave {said!r:.60}")
    if TIMED_OUT in tools.scores_of_objects([one], seconds):
        raise ValueError(f"{task.__file__}: Conversation.score() took longer than --score_timeout, {seconds:g} s")


def reply(task, turns, problem) -> None:
    """Try reply(): it gives a string or None. TaskError if it raises, or gives anything else."""
    try:
        text = task.reply(*chosen(task.reply, {"turns": turns, "replies": [], "problem": problem}, "turns", "problem"))
        if text is not None and not isinstance(text, str):
            raise TypeError(f"it must give a string or None, and gave {text!r:.60}")
    except BaseException as error:
        raise TaskError(failure(task.__file__, "reply", turns[-1], error)) from error


def scores(task, conversations, answers, more):
    """Return the scores of conversations (lists of turns), TIMED_OUT where a call was ended. TaskError if one fails.

    The functions get copies, in the task's own process if check has started one. more: per conversation, what
    score_conversation may also name as a parameter: problem, replies, truncated.
    """
    name, jobs = "score", [(turns[-1], answer) for turns, answer in zip(conversations, answers)]
    if hasattr(task, "score_conversation"):
        name = "score_conversation"
        jobs = []
        for turns, answer, given in zip(conversations, answers, more):
            given = {"turns": turns, "answer": answer, **given}
            jobs.append(chosen(task.score_conversation, given, "turns", "answer"))
    elif not task.scores_one_by_one:
        found = call(task, "score_all", [turn for turn, _ in jobs], answers)
        if found is TIMED_OUT:
            return [TIMED_OUT] * len(jobs)
        if not isinstance(found, list) or len(found) != len(jobs):
            raise TaskError(f"{task.__file__}: score_all() gave {found!r:.200} for {len(jobs)} responses, not a list "
                            "with a score for each")  # fmt: skip
        check_scores(task, found, conversations)
        return found
    found = []
    for job, turns in zip(jobs, conversations):
        found.append(call(task, name, *job))
        if found[-1] is not TIMED_OUT:
            check_scores(task, found[-1:], [turns])
    return found


def call(task, name, text, *more):
    """Return what the function of this name gives, or TIMED_OUT if the call was ended. TaskError if it raises."""
    if not hasattr(task, "judge"):
        try:
            return getattr(task, name)(copy.deepcopy(text), *copy.deepcopy(more))
        except BaseException as error:
            raise TaskError(failure(task.__file__, name, text, error)) from error
    try:
        return task.judge.call(name, text, *more)
    except TimeoutError:
        if not task.judge.has_warned:
            task.judge.has_warned = True
            print(f"warning: {task.__file__}: {name}() took longer than --score_timeout, {task.judge.seconds:g} s, or "
                  f"ended its process, on {str(text)[:60]!r}: such responses count as timed_out")  # fmt: skip
        return TIMED_OUT


def check_scores(task, scores, responses) -> None:
    """Raise TaskError, with the task's file and the response, unless score_all() scored each response completely.

    responses: per response, the list of its turns.
    """
    name = getattr(task, "__file__", task)
    if len(scores) != len(responses):
        raise TaskError(f"{name}: score_all() gave {len(scores)} scores for {len(responses)} responses")
    for score, response in zip(scores, responses):
        said = response[0] if len(response) == 1 else response
        what = f"{name}: what score() gives the response {said!r:.200}"
        try:
            as_model(Score, score, what)
            check_json(score, what)
            for key in KEYS_OF_ROWS & score.keys():
                raise ValueError(f"{name}: a score can't have the key {key!r}: samples.jsonl has its own; rename it")
            for part, value in score.get("parts", {}).items():
                if isinstance(value, list) and len(value) != len(response):
                    raise ValueError(
                        f"{name}: part {part!r} of a score has {len(value)} numbers for {len(response)} turns"
                    )
        except ValueError as error:
            raise TaskError(str(error)) from error


def check_json(value, what) -> None:
    """Raise ValueError unless the value can be kept as JSON, which has no NaN and no dates."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} can't be kept as JSON: {error}") from error


def failure(file, name, text: str, error) -> str:
    """Say in one line what a task's function raised, where in the file, and for which turn."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" in line {lines[-1]}" if lines else ""
    turn = (text or [""])[-1] if isinstance(text, list) else text
    return " ".join(f"{file}: {name}() fails{where} on {str(turn)[:60]!r}: {said(error)}".split())


def as_model(model, found, what):
    """Return the dictionary as a pydantic model. ValueError, in one line, if it does not fit."""
    try:
        return model.model_validate(found, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{what} is not complete: {place}: {first['msg']}; it is {found!r:.200}") from error


def said(error) -> str:
    return f"{type(error).__name__}: {error}"

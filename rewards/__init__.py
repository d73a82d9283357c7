"""Define the tasks: problems whose answers a reward function can check.

Each of kk.py, math.py, countdown.py, hitab.py, gym.py, calculator.py, guess.py, maze.py, facts.py and largest.py is a
task, and so is a user's own file (own.py). The other modules are parts of them.

A task offers

- `load(source, split, *, size=None, seed=0)`: problems for "train" or "test" from a file, a hub id or a generator. Each
  is a dictionary with `messages` (the chat up to the model's turn) and `answer`. It may have `prefix` (the beginning of
  the model's turn) and `category` (accuracy is reported per category).
- `score(response, answer)`: a dictionary with `reward` (a number), `correct` and `format` (True or False). It may have
  `parts`, a dictionary of the numbers that the reward consists of; each is logged, and gdpo.py needs the same names for
  all responses. It is fast and accepts any text.
- `score_all(responses, answers)`: a list of these dictionaries, in order. If scoring can take long, each of them also
  has `timed_out`. A user's own file may omit this function (own.py).
- perhaps what makes it reply to the model's turns, in grpo_multi_turn.py, gigpo.py and evaluate.py: `reply`,
  `reply_all`, `TOOLS` or `Conversation`, with `score_conversation` (in place of `score`), `state` and `TURNS`.
  docs/add_a_task.md has them in a table. In other scripts each conversation ends after its first turn.
- perhaps `puzzle_of(problem)`: the puzzle's identity. If either training or test puzzles come from a file, and
  the others are generated, it keeps test puzzles out of training.
"""

import copy
import importlib
import json
import random
import re

# Import other tasks, and own.py, which needs pydantic, where they are used: nano_grpo.py needs kk.py alone.
from rewards import kk


class TaskError(ValueError):
    """A user's task has failed: its message is one line with the file, the turn's beginning and the exception."""


TASKS = ("kk", "math", "countdown", "hitab", "gym", "calculator", "guess")
OPTIONS = {  # settings of one task only
    "kk": ["people"],
    "countdown": ["numbers"],
    "gym": ["gym", "gym_options"],
    "calculator": ["operations"],
}


def find_task(name, flag="--task"):
    """Return a task's module: one of TASKS, or a Python file. ValueError if it is neither; flag: the name's source."""
    if name in TASKS:
        return importlib.import_module(f"rewards.{name}")
    if name.endswith(".py"):
        from rewards import own

        return own.read_file(name, flag)
    raise ValueError(f"{flag} is {name!r}; it must be one of {', '.join(TASKS)}, or a Python file")


def converses(task) -> bool:
    """Return whether the task replies to the model's turns."""
    return any(hasattr(task, name) for name in ("reply", "reply_all", "TOOLS", "Conversation"))


def check_options(args) -> None:
    """Raise ValueError if a task's setting is wrong. people and numbers are checked whatever the task."""
    kk.parse_people(args.people)
    if not args.has_sampler:  # sft.py: of these tasks, only Knights & Knaves has worked solutions
        return
    find_task("countdown").parse_numbers(args.numbers)
    if args.task == "calculator":
        find_task("calculator").parse_operations(args.operations)
    if args.task == "gym":  # other tasks don't need the library
        find_task("gym").check(args.gym, args.gym_options, args.data or args.test_data)


def load_task(args, encode) -> tuple:
    """Return (the task's module, training problems, test problems).

    args: a trainer's settings. encode: a function that returns a problem's token ids, {"prompt_ids": […]}. Each problem
    gets them and a number `id`. Problems with prompts longer than args.max_prompt_tokens are dropped; a printed line
    says how many.
    Errors: ValueError if the data are invalid; it names the file or value.
    """
    from rewards import own

    task = find_task(args.task)
    check_options(args)
    options = {name: getattr(args, name) for name in OPTIONS.get(args.task, [])}
    splits = []
    loads = []
    for split, source, size in (("train", args.data, None), ("test", args.test_data, args.eval_size)):
        if args.task in TASKS:
            problems = task.load(source or None, split, size=size, seed=args.seed, **options)
        else:
            problems = own.load(args.task, task, source or None, split, size, args.seed)
            loads.append((source or None, split, size, args.seed))
        for i, problem in enumerate(problems):
            problem["id"] = i
            try:
                problem.update(encode(problem))
            except ValueError as error:
                raise ValueError(f"--task {args.task}, {split} problem {i + 1}: {error}") from error
        fitting = [problem for problem in problems if len(problem["prompt_ids"]) <= args.max_prompt_tokens]
        if not fitting:
            shortest = min(len(problem["prompt_ids"]) for problem in problems)
            raise ValueError(f"--max_prompt_tokens is {args.max_prompt_tokens}, and the shortest prompt has {shortest}")
        if len(fitting) < len(problems):
            print(f"{split}: {len(problems) - len(fitting)} of {len(problems)} prompts exceed --max_prompt_tokens")
        splits.append(fitting)
        if args.task == "math" and args.data and not args.test_data:  # no generator: hold out some problems
            if len(fitting) < 2:
                raise ValueError(f"{args.data} has one problem that fits; without --test_data there must be two")
            n_test = min(args.eval_size, len(fitting) // 2)
            order = random.Random(args.seed).sample(fitting, len(fitting))
            print(f"no --test_data: {n_test} of the {len(fitting)} problems are held back to test on")
            test = sorted(order[:n_test], key=lambda p: p["id"])
            train = without(sorted(order[n_test:], key=lambda p: p["id"]), test, question)
            return task, train, test
    train, test = splits
    if loads:
        own.check(args.task, task, train, loads, args.score_timeout)
    if args.task != "guess":  # it trains and tests on the same fifteen numbers
        key = getattr(task, "puzzle_of", question if args.task in ("math", "hitab") else identity)
        train = without(train, test, key, keep_if_all=True)
    return task, train, test


def without(train, test, key, keep_if_all=False):
    """Return the training problems that are not test problems, by their key; print how many are dropped.

    If none is left, it raises a ValueError or, with keep_if_all, prints a line and returns them all.
    """
    tested = set(map(key, test))
    others = [problem for problem in train if key(problem) not in tested]
    if not others and not keep_if_all:
        raise ValueError("every problem to train on is a test problem, too: give another --data or --test_data")
    if not others:
        print("warning: every problem to train on is a test problem, too: the test accuracy is that of problems seen")
        return train
    if len(others) < len(train):
        print(f"train: {len(train) - len(others)} of {len(train)} are test problems, too, and left out")
    return others


def question(problem):
    """Return the chat without system turns and blanks, to find equal problems."""
    turns = [turn["content"] for turn in problem["messages"] if turn["role"] != "system"]
    return re.sub(r"[\s\u200b-\u200d\u2060\ufeff]", "", "\0".join(turns))  # also blanks without width


def identity(problem) -> tuple:
    """Return what equal problems share: the question (see question) and the answer.

    In a game, the answer may be all that differs: every game of guess.py has the same prompt.
    """
    return question(problem), json.dumps(problem["answer"], sort_keys=True, default=str)


def score(task, responses, problems):
    """Return a dictionary with reward, correct and format for each of vLLM's responses, which have their texts.

    It also has the response's text, as `response`, and in gigpo.py the turns, as (problem, state, number of tokens).
    problems: one per response. A conversation is scored by its last turn, or by all its turns if the task has
    score_conversation(). If the task fails in any process, TaskError is raised in all of them: records.py then ends the
    run with a checkpoint. All processes must call it.
    """
    from runtime import distributed, tools  # here, because flags.check must find bad flags before torch is loaded

    answers = [problem["answer"] for problem in problems]
    conversations = [getattr(response, "turns", [response.text]) for response in responses]
    more = []  # what score_conversation may name, too
    for response, problem in zip(responses, problems):
        truncated = getattr(response, "finish_reason", None) == "length"
        more.append({"problem": problem, "replies": getattr(response, "replies", []), "truncated": truncated})
    scores, failed = [], getattr(task, "failed", "") or tools.most_failed(responses)
    try:
        if not failed and hasattr(task, "Conversation"):
            played = [tools.played(task, response, problem) for response, problem in zip(responses, problems)]
            scores = with_ended(tools.scores_of_objects(played, task.judge.seconds))
        elif not failed:
            scores = scores_of(task, conversations, answers, more)
    except TaskError as error:
        failed = str(error)
    for failure in filter(None, distributed.gather([failed])):
        raise TaskError(failure)
    copies = []
    for found, response, problem in zip(scores, responses, problems):
        # Copy it, because equal responses may share one. Convert rewards to float, because they become tensors.
        copies.append({**found, "reward": float(found["reward"]), "response": response.text})
        if hasattr(response, "states"):
            turns = zip(response.states, response.lengths)
            copies[-1]["turns"] = [(problem["id"], state, length) for state, length in turns]
    return copies


def with_part(score, name, value) -> dict:
    """Return the score with a number added to its reward and, if the reward has parts, with this part."""
    parts = score.get("parts") or {}
    return {**score, "reward": score["reward"] + value, "parts": {**parts, name: value} if parts else {}}


def scores_of(task, conversations, answers, more=None):
    """Return the scores of conversations (lists of turns): by all turns if the task wants them, or by the last.

    more: as in own.scores. own.TaskError if the task fails, or gives anything else, such as NaN.
    """
    from rewards import own

    if hasattr(task, "scores_one_by_one"):  # a user's own file
        return with_ended(own.scores(task, conversations, answers, more or [{}] * len(answers)))
    if hasattr(task, "score_conversation"):
        found = [task.score_conversation(turns, answer) for turns, answer in zip(conversations, answers)]
    else:
        found = task.score_all([turns[-1] for turns in conversations], answers)
    own.check_scores(task, found, conversations)
    return found


def with_ended(scores) -> list:
    """Return the scores; a call that was ended counts as timed out.

    Its reward is 0, or the lowest of the others if that is less, so that it never pays to exceed the limit.
    """
    from rewards.own import TIMED_OUT

    ended = {"correct": False, "format": False, "timed_out": True}
    complete = [score for score in scores if score != TIMED_OUT]
    ended["reward"] = min([0.0, *(score["reward"] for score in complete)])
    ended["parts"] = {name: 0.0 for score in complete for name in score.get("parts", {})}
    return [ended if score == TIMED_OUT else score for score in scores]


def parts_of(scores, name) -> list:
    """Return the parts of each reward, a list of numbers per response, in one order; without parts, the reward itself.

    name: the task's, for errors. TaskError in all processes if a response has other parts than the first one.
    All processes must call it.
    """
    from runtime.distributed import gather  # here, because flags.check must find bad flags before torch is loaded

    parts = [score.get("parts") or {"reward": score["reward"]} for score in scores]
    names = gather([list(parts[0])])[0]  # the order of the first process's first response
    failed = []
    for part, score in zip(parts, scores):
        if set(part) != set(names):
            which = f"the response {score['response']!r:.200} the parts {list(part)}, and another one {names}"
            failed.append(f"{name}: score() gives {which}")
    for failure in gather(failed[:1]):
        raise TaskError(failure)
    return [[total(part[name]) for name in names] for part in parts]


def total(part):
    """Return a part of a reward: the number, or the sum of a list with a number per turn."""
    return sum(part) if isinstance(part, list) else part


def turn_rewards(score, num_turns):
    """Return the reward of each turn of a conversation, a list that adds up to the score's reward.

    Parts that are lists have a number per turn. The rest of the reward belongs to the last turn.
    """
    parts = [part for part in score.get("parts", {}).values() if isinstance(part, list)]
    rewards = [float(sum(of_turn)) for of_turn in zip(*parts)] or [0.0] * num_turns
    if rewards:
        rewards[-1] += score["reward"] - sum(rewards)
    return rewards


def state(task, turns, problem, side=None):
    """Return what the model's next turn begins with, after these turns: equal states are compared by gigpo.py.

    A task without state() has the problem and all turns so far as its state. So has one whose state() fails, or gives
    something that can't be a key of a dictionary, such as a list; score then raises its TaskError. side: the
    conversation's tools.Side, for a task with a Conversation.
    """
    if side is not None and side.line:
        from runtime import tools

        return tools.state_of(side, (problem["id"], *turns))
    if hasattr(task, "state"):
        try:
            found = task.state(list(turns), copy.deepcopy(problem))
            hash(found)
            return found
        except BaseException as error:
            task.failed = f"{task.__file__}: state() fails after {turns!r:.60}: {type(error).__name__}: {error}"
    return (problem["id"], *turns)

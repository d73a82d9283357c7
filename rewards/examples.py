"""Load examples for sft.py: prompts and responses to learn, from a file of chats or a task's own worked solutions.

A file has a chat in each row, `messages`, whose last turn is the assistant's and is learned. A task has worked
solutions if its module offers `worked(problem, careful, seed)`: Knights & Knaves does (kk_solutions.py).
"""

import functools
import random
from typing import Annotated, Any

import pydantic

from rewards import find_task, kk, kk_solutions, math, own, question, without
from rewards.rows import chat_of


class Chat(pydantic.BaseModel):
    messages: Annotated[list[own.Turn], pydantic.BeforeValidator(chat_of)] = pydantic.Field(min_length=2)
    tools: Any = None


def load_task(args, encode) -> tuple:
    """Return (None, training examples, test examples); args: the settings of sft.py.

    encode: a function that returns an example's token ids, {"prompt_ids": […], "response_ids": […]}; the response ends
    with the EOS token. Examples with a part that is too long are dropped, and a printed line says how many. ValueError
    if the data are invalid.
    """
    train = read_chats(args.data, "train") if args.data else worked_solutions(args, "train")
    if args.test_data:
        test = read_chats(args.test_data, "test")
    elif args.data:
        if len(train) < 2:
            raise ValueError(f"{args.data} has one chat; without --test_data there must be two")
        random.Random(args.seed).shuffle(train)
        num_test = min(args.eval_size, max(1, len(train) // 10))
        print(f"no --test_data: {num_test} of the {len(train)} chats are held back to test on")
        train, test = train[num_test:], train[:num_test]
    else:
        test = worked_solutions(args, "test")
    test = test[: args.eval_size]
    if bool(args.data) != bool(args.test_data):  # two files are the user's choice
        train = without(train, test, question)
    return None, *(encoded(some, encode, args, split) for some, split in ((train, "train"), (test, "test")))


def worked_solutions(args, split: str) -> list:
    """Return the task's own problems with a worked solution each."""
    task = find_task(args.task)
    if args.task == "kk":
        work = functools.partial(kk_solutions.worked, restated=args.restated)
    else:
        work = getattr(task, "worked", None)
    if not work:
        raise ValueError(f"--task {args.task} has no worked solutions: give --data FILE, with a chat in each row")
    size = args.eval_size if split == "test" else None
    if args.task == "kk":
        problems = kk.load(None, split, people=args.people, size=size, seed=args.seed)
    else:
        problems = own.load(args.task, task, None, split, size, args.seed)
    return [{**problem, "response": work(problem, args.careful, args.seed)} for problem in problems]


def read_chats(source, split: str):
    """Return the chats of a file, a folder or a hub id. ValueError, with the row, if one has no final response."""
    examples = []
    for name, rows in math.read_source(source, split):
        for i, row in enumerate(rows, 1):
            where = f"{name}, row {i}"
            chat = own.as_model(Chat, row, where).model_dump()
            *before, last = chat["messages"]
            if last["role"] != "assistant":
                raise ValueError(
                    f"{where}: the last turn must be the assistant's, to be learned, not the {last['role']}'s"
                )
            if not last["content"].strip() and not last.get("tool_calls"):
                raise ValueError(f"{where}: the assistant's last turn is empty: there is nothing to learn")
            example = {"messages": before, "prefix": "", "response": last["content"], "tools": chat["tools"]}
            if any(value for key, value in last.items() if key not in ("role", "content")):
                example["turn"] = last  # with calls or reasoning: the chat template writes it
            examples.append(example)
    return examples


def encoded(examples, encode, args, split: str):
    """Return the examples that fit, with id, prompt_ids and response_ids. ValueError if none fits."""
    fitting = []
    for i, example in enumerate(examples):
        try:
            ids = encode(example)
        except ValueError as error:
            raise ValueError(f"{split} example {i + 1}: {error}") from error
        if len(ids["prompt_ids"]) <= args.max_prompt_tokens and len(ids["response_ids"]) <= args.max_response_tokens:
            fitting.append({**example, "id": i, **ids})
    if not fitting:
        raise ValueError(
            f"no {split} example has at most {args.max_prompt_tokens} tokens of prompt (--max_prompt_tokens) and "
            f"{args.max_response_tokens} of response (--max_response_tokens)"
        )
    if len(fitting) < len(examples):
        print(f"{split}: {len(examples) - len(fitting)} of {len(examples)} examples are too long and left out")
    return fitting

"""Run the task's side of conversations: tools, reply() and objects with a state, in threads.

transformers makes the tools' schemas, the model's chat template writes them, and vLLM's parsers
read the calls in a turn. A call that fails, or takes longer than --tool_timeout, is answered with
an error, and training goes on.
"""

import copy
import inspect
import json
import logging
import queue
import re
import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace

from rewards import TaskError, own
from rewards.rows import check_text
from runtime import chats

AT_ONCE = 64  # calls that run side by side
# A step with so many failed calls, or with a larger share, says that the tool is broken.
MOST_ERRORS, MOST_FAILED = 4, 0.75
PARSERS = {  # what a chat template writes in a call: vLLM's parser
    "<function=": "qwen3_xml",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "ipython": "llama3_json",
    "<|tool_call|>": "granite",
    "<start_function_call>": "functiongemma",
}


def set_up(task, tokenizer, args) -> None:
    """Prepare to read the calls of the task's TOOLS: task.parser is (its name, a function).

    ValueError if the chat template has no tools, or no parser is known for it. Nothing happens
    without TOOLS, and in scripts of one turn.
    """
    is_apart = hasattr(args, "max_turns") and hasattr(args, "sampler_gpus")
    if is_apart and hasattr(task, "Conversation"):
        raise ValueError(
            f"{task.__file__} has a Conversation, whose state is in the sampler's process; this "
            "script scores in another one: give the task functions, or take a script without --lag"
        )
    if not hasattr(task, "TOOLS") or not hasattr(args, "tool_parser"):
        return
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    if args.chat_template == "none" or not re.search(r"\btools\b", template):
        raise ValueError(
            f"{task.__file__} has TOOLS, and the chat template of {tokenizer.name_or_path} has "
            "none: take another --model, or let reply() read calls, as rewards/calculator.py does"
        )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    found = [name for sign, name in PARSERS.items() if sign in template]
    name = found[0] if args.tool_parser == "auto" and found else args.tool_parser
    request = ChatCompletionRequest(messages=[], model="", tools=own.schemas(task))
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    except Exception as error:  # the parsers raise many kinds
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ValueError(f"--tool_parser {name}: {error}; vLLM has {known}") from error

    def calls_in(turn):
        # A call that can't be read is the model's answer; vLLM would print a traceback for each.
        # Set here, because the engine sets vLLM's levels anew when it starts.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            calls = parser.extract_tool_calls(turn, request).tool_calls
        except Exception:
            return []
        return [(call.function.name, call.function.arguments) for call in calls]

    task.parser = name, calls_in


# ---------------------------------------------------------------------------------- side by side


class Late(TimeoutError):
    """A call took too long."""


def side_by_side(jobs, seconds):
    """Run (function, line) jobs in threads. Return [(value, None) or (None, exception)], in order.

    line: a queue whose own thread runs the function; None: a new thread. The exception is Late
    after so many seconds: a thread can't be ended, so it goes on, but nobody waits for it.
    """
    results = []
    for first in range(0, len(jobs), AT_ONCE):
        futures = []
        for function, line in jobs[first : first + AT_ONCE]:
            futures.append(Future())
            run = line.put if line else in_new_thread
            run((function, futures[-1]))
        wait(futures, seconds)
        for future in futures:
            late = Late(f"no result within {seconds:g} s")
            error = future.exception() if future.done() else late
            results.append((None if error else future.result(), error))
    return results


def in_new_thread(job) -> None:
    threading.Thread(target=run_job, args=job, daemon=True).start()


def run_job(function, future) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # also sys.exit
        future.set_exception(error)


class Side:
    """The task's side of one conversation: counts of calls and, perhaps, its own Conversation.

    seed: for a Conversation, the same in a resumed run. All that a Conversation does runs in one
    thread, because browsers and data bases insist on that.
    """

    def __init__(self, task, problem: dict, seed: int):
        self.task = task
        self.file = getattr(task, "__file__", "")
        self.problem = problem
        self.num_calls = self.num_errors = 0
        self.last_error = ""
        self.line = self.object = None
        if hasattr(task, "Conversation"):
            self.line = queue.SimpleQueue()
            jobs = iter(self.line.get, None)
            work = lambda: [run_job(*job) for job in jobs]  # noqa: E731
            threading.Thread(target=work, daemon=True).start()
            self.make = lambda: task.Conversation(copy.deepcopy(problem), seed)

    def __getstate__(self):
        """Without the task: a conversation may come from the sampler's process (grpo_async.py)."""
        return {**vars(self), "task": None}

    def method(self, name, *arguments) -> tuple:
        """Return a job for side_by_side: a call of the Conversation's method."""

        def call():
            if self.object is None:
                self.object = self.make()
            function = getattr(self.object, name, None)
            if name == "score":
                return function(*own.chosen(function, *arguments))
            return function(*arguments) if function else None  # close() may be missing

        return call, self.line

    def failed(self, error) -> str:
        """Count a failed call; return the reply that says so."""
        self.num_errors += 1
        said = str(error) if isinstance(error, Late) else f"{type(error).__name__}: {error}"
        self.last_error = " ".join(said.split())[:300]
        return f"error: {self.last_error}"


# --------------------------------------------------------------------------------------- replies


def replies(task, conversations, tokenizer, args):
    """Return the task's reply to each conversation's last turn: a string, or None if it is over.

    If the turn calls tools, it is a list of strings, one per call. conversations: objects with
    turns and replies (lists of texts) and side. At most --max_reply_tokens of a reply stay.
    """
    if not hasattr(task, "parser"):  # in a sampler's process of its own
        set_up(task, tokenizer, args)
    found = [None] * len(conversations)
    jobs = []  # (index of the conversation, function, line)
    called = []  # per job: the function's name, and what it was called with
    for i, one in enumerate(conversations):
        calls = task.parser[1](one.turns[-1]) if hasattr(task, "parser") else []
        if calls:
            found[i] = []
        if calls and len(one.turns) < args.max_turns:  # otherwise nobody would read the results
            jobs += [(i, job_of_call(task, *call), None) for call in calls]
            called += calls
        elif one.side.line and not calls:
            jobs.append((i, *one.side.method("reply", one.turns[-1])))
            called.append(("Conversation.reply", one.turns))
        elif hasattr(task, "reply") and not hasattr(task, "reply_all") and not calls:
            jobs.append((i, job_of_reply(task, one), None))
            called.append(("reply", one.turns))
    results = side_by_side([job[1:] for job in jobs], args.tool_timeout)
    numbers = [i for i, *_ in jobs]
    others = [i for i in range(len(found)) if found[i] is None]
    if hasattr(task, "reply_all") and others:
        numbers += others
        called += [("reply_all", conversations[i].turns) for i in others]
        results += all_at_once(task, [conversations[i] for i in others], args.tool_timeout)
    for i, (value, error), of_call in zip(numbers, results, called, strict=True):
        side = conversations[i].side
        is_call = isinstance(found[i], list)
        try:
            if error:
                raise error
            text = as_text(value, is_call)
        except BaseException as failure:  # also sys.exit
            text = side.failed(failure)
            warn_once(task, *of_call, failure)
        side.num_calls += text is not None
        text = cut(text, tokenizer, args.max_reply_tokens)
        found[i] = [*found[i], text] if is_call else text
    return found


def warn_once(task, name, given, error) -> None:
    """Print the first failure of each function, because samples.jsonl has few conversations.

    given: the call's arguments, a JSON object as text, or the turns that reply() got.
    """
    warned = vars(task).setdefault("functions_that_failed", set())
    if name not in warned:
        print(f"warning: {own.failure(getattr(task, '__file__', ''), name, given, error)}; later "
              f"failures of {name}() are counted in tool_errors alone")  # fmt: skip
    warned.add(name)


def job_of_call(task, name, arguments):
    """Return a function that calls the tool of this name. The model's mistakes are no failures."""
    known = {tool.__name__: tool for tool in task.TOOLS}
    if name not in known:
        return lambda: f"error: there is no tool {name!r}, only {', '.join(known)}"
    try:
        given = json.loads(arguments or "{}")
        inspect.signature(known[name]).bind(**given)
    except (TypeError, ValueError) as error:
        said = f"error: {name}: {error}"
        return lambda: said
    return lambda: known[name](**given)


def job_of_reply(task, one):
    given = {"turns": list(one.turns), "replies": list(one.replies), "problem": one.side.problem}
    return lambda: task.reply(*own.chosen(task.reply, copy.deepcopy(given), "turns", "problem"))


def all_at_once(task, conversations, seconds):
    """Return what reply_all() gives for these conversations, as side_by_side does."""
    turns = [list(one.turns) for one in conversations]
    problems = [copy.deepcopy(one.side.problem) for one in conversations]
    [(texts, error)] = side_by_side([(lambda: task.reply_all(turns, problems), None)], seconds)
    if not error and (not isinstance(texts, list) or len(texts) != len(turns)):
        error = TypeError(f"reply_all() gave {texts!r:.60} for {len(turns)} conversations")
    return [(None, error)] * len(turns) if error else [(text, None) for text in texts]


def as_text(value, is_call):
    """Return a reply as text: a string, a tool's other results as JSON; None if reply() gave it."""
    if is_call and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"reply() must give a string or None, and gave {value!r:.60}")
    check_text(value or "", "the reply")
    return value


def cut(text: str, tokenizer, most):
    """Return the text's first `most` tokens, and a note if there are more."""
    if text is None or len(text.encode()) <= most:  # no token is shorter than a byte
        return text
    ids = tokenizer.encode(text[: 100 * most], add_special_tokens=False)
    if len(ids) <= most and len(text) <= 100 * most:
        return text
    kept = tokenizer.decode(ids[:most], skip_special_tokens=False).rstrip("\ufffd")
    return f"{kept} … [cut: {len(kept)} of {len(text)} characters]"


# --------------------------------------------------------------------------------------- scores


def scores_of_objects(conversations, seconds):
    """Return the score() of each conversation's own object, then close() it.

    own.TIMED_OUT where it takes too long; TaskError if one fails. score() may have parameters named
    turns, replies, truncated, problem and answer.
    """
    jobs = []
    for one in conversations:
        given = {
            "turns": list(one.turns),
            "replies": list(one.replies),
            "truncated": one.finish_reason == "length",
            "problem": one.side.problem,
            "answer": one.side.problem["answer"],
        }
        jobs.append(one.side.method("score", copy.deepcopy(given)))
    results = side_by_side(jobs, seconds)
    side_by_side([one.side.method("close") for one in conversations], seconds)
    found = []
    for one, (score, error) in zip(conversations, results):
        one.side.line.put(None)  # its thread ends
        if isinstance(error, Late):
            score = own.TIMED_OUT
        elif error:
            file = one.side.task.__file__
            raise TaskError(own.failure(file, "score", one.turns[-1], error)) from error
        else:
            own.check_scores(one.side.task, [score], [one.turns])
        found.append(score)
    return found


def most_failed(conversations) -> str:
    """Return why the run must end if most of these conversations' calls have failed, or ""."""
    sides = [one.side for one in conversations if hasattr(one, "side")]
    calls = sum(side.num_calls for side in sides)
    errors = [side.last_error for side in sides for _ in range(side.num_errors)]
    if len(errors) < max(MOST_ERRORS, MOST_FAILED * calls):
        return ""
    file = sides[0].file
    return f"{file}: {len(errors)} of {calls} calls of this step have failed, such as {errors[-1]}"


def played(task, response, problem: dict):
    """Return a response as a conversation. In scripts of one turn it gets its side here."""
    if hasattr(response, "side"):
        return response
    side = Side(task, problem, 0)
    side_by_side([side.method("reply", response.text)], task.judge.seconds)
    reason = response.finish_reason
    return SimpleNamespace(turns=[response.text], replies=[], side=side, finish_reason=reason)


def state_of(side, default):
    """Return the Conversation's state(), or the default if it has none or fails: see rewards.state.

    A failure ends the run, when score raises it.
    """
    [(found, error)] = side_by_side([side.method("state")], side.task.judge.seconds)
    try:
        if error:
            raise error
        hash(found)
    except BaseException as failure:
        side.task.failed = own.failure(side.task.__file__, "Conversation.state", "", failure)
        return default
    return default if found is None else found


# -------------------------------------------------------------------------------- replies as tokens


def encode_reply(tokenizer, reply, chat_template="auto", template_options="{}", turn=""):
    """Return the token ids between two turns of the model: the reply, as a user turn.

    reply: a text or, if the turn called tools, a list of texts: the results, in the template's own
    role for them. The ids follow the token that ended the last turn. So they include the newline
    that most templates write after this token, and the beginning of the model's next turn. Control
    tokens in the reply are encoded as text. chat_template, template_options: the settings, two
    strings. turn: the last turn's text. ValueError if the reply holds half of a surrogate pair.
    """
    texts = [reply] if isinstance(reply, str) else reply
    num_results = 0 if isinstance(reply, str) else len(texts)
    end, *pieces = chats.around_replies(tokenizer, chat_template, template_options, num_results)
    ids_of_calls = re.findall(r'"id": *"(\w{9})"', turn)  # Mistral's results repeat them
    text = end + pieces[0]
    for i, (reply, piece) in enumerate(zip(texts, pieces[1:])):
        check_text(reply, "a reply")
        if piece.startswith(chats.AS_JSON):
            reply, piece = json.dumps(reply, ensure_ascii=False)[1:-1], piece[len(chats.AS_JSON) :]
        if 0 < num_results == len(ids_of_calls):
            piece = piece.replace(chats.CALL_ID.format(i), ids_of_calls[i])
        text += chats.marked(tokenizer, reply) + piece
    # Encode it after the end token: some tokenizers put a space before a text's first word.
    return chats.to_ids(tokenizer, text)[len(tokenizer.encode(end, add_special_tokens=False)) :]

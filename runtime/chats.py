"""Turn prompts and responses into tokens: the chat template, its options, and a task's tags.

A tag such as <think> may be text or a special token. It may be the prompt's last word or the
response's first. The model's template and tokenizer decide; tasks read it as text.
"""

import contextlib
import datetime
import functools
import json
import re

import jinja2.meta

import rewards
from rewards.rows import check_text
from runtime import files

OPENING_TAG = r"[<\[◁][^\s<>\[\]◁▷/]+[>\]▷]"  # <think>, [THINK]
# A special token with one of these words counts as text. Others control the chat: end of text, end
# of turn, padding.
TEXT_WORDS = r"think|thought|reason|answer|solution|solve|tool_"
FIXED = {}  # keywords of every call of a chat template: strftime_now, from chats.fix_date
MARK = "\ufdd0"  # Unicode promises that no text has this code point
AS_JSON = "\ufdd1"  # this one neither
CALL_ID = "call{:05d}"  # nine letters and digits, as Mistral's templates want it


def load_task(args, tokenizer, data=rewards):
    """Return (the task's module, training problems, test problems), with their token ids.

    args: a script's settings; data: rewards, or rewards.examples, whose problems have responses.
    ValueError if the data are invalid, or the model's chat template refuses a chat.
    """
    task = rewards.find_task(args.task)
    check_replies(task, tokenizer, args)
    found = data.load_task(args, encoder(args, tokenizer))
    if rewards.converses(task) and not hasattr(args, "max_turns"):
        print(f"--task {args.task} replies to turns; this script has one turn: grpo_multi_turn.py")
    return found


def check_replies(task, tokenizer, args) -> None:
    """Raise ValueError if the chat template has no place for the task's replies."""
    if not rewards.converses(task) or not hasattr(args, "max_turns"):
        return
    from runtime import tools  # it imports pydantic, and flags.py imports this module

    tools.set_up(task, tokenizer, args)
    how = args.chat_template, args.template_options
    around_replies(tokenizer, *how)
    if hasattr(task, "TOOLS"):
        around_replies(tokenizer, *how, num_results=1)
    needed = getattr(task, "TURNS", 0)
    if args.max_turns < needed:
        print(
            f"--max_turns is {args.max_turns}, and {args.task} has TURNS = {needed}: conversations "
            "that need more turns count as truncated"
        )


def encoder(args, tokenizer):
    """Return a function that encodes a problem: prompt_ids, and response_ids if there is one."""
    options = check_template(args, tokenizer)

    def ids_of(problem):
        prompt = encode(tokenizer, problem, args.chat_template, options)
        if "response" not in problem:
            return {"prompt_ids": prompt}
        if problem.get("turn"):  # more than content
            text = written_turn(tokenizer, problem, args.chat_template, options)
        else:
            text = marked(tokenizer, problem["response"])
        text = after_prompt(tokenizer.decode(prompt), text)
        end = end_of_turn(tokenizer, args.chat_template)
        return {"prompt_ids": prompt, "response_ids": [*to_ids(tokenizer, text), end]}

    return ids_of


def read_template_options(args):
    """Return --template_options as a dictionary. ValueError if it is not a JSON object."""
    text = getattr(args, "template_options", "{}")
    try:
        options = dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(
            f"--template_options {text} is no JSON object, "
            """such as '{"enable_thinking": false}'"""
        ) from None
    if options and args.chat_template == "none":
        raise ValueError(f"--template_options {text} is for a template: give --chat_template auto")
    return options


def check_template(args, tokenizer):
    """Return --template_options as a dictionary. ValueError if the template has no such variable.

    A model without a template gets plain text, and a printed line says so.
    """
    options = read_template_options(args)
    if args.chat_template == "auto" and not tokenizer.chat_template:
        print(f"{tokenizer.name_or_path} has no chat template: it gets plain text")
    known = set()
    if options and tokenizer.chat_template:
        # Import it here: flags.py imports this module, and finds bad flags before torch is loaded.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = tokenizer.get_chat_template()
        environment = _compile_jinja_template(source).environment  # it knows transformers' own tags
        known = jinja2.meta.find_undeclared_variables(environment.parse(source))
        known = known.difference(environment.globals)
    for name in options.keys() - known:
        raise ValueError(
            f"--template_options: the model's chat template has no variable {name!r}; it has "
            f"{', '.join(sorted(known - {'messages', 'add_generation_prompt'})) or 'none'}"
        )
    return options


def encode(tokenizer, problem, chat_template="auto", template_options=None):
    """Return a prompt's token ids, a list: the chat in the tokenizer's template, then the prefix.

    If the tokenizer has no template, or chat_template is "none" (for base models), the chat becomes
    plain lines of text. They follow the token that the tokenizer begins every text with, if it has
    one (Llama 3, Mistral, Gemma). template_options: keywords for the template. If the template ends
    with a tag and the prefix begins with it, the tag occurs once. Control tokens that stand in a
    turn are encoded as text. ValueError if the template refuses the chat (some refuse a system
    turn), or would leave out a part of it.
    """
    begin = []
    prefix = problem["prefix"]
    text = written(tokenizer, problem, chat_template, template_options)
    check_keys(
        functools.partial(written, tokenizer, how=chat_template, options=template_options), problem
    )
    if tokenizer.chat_template and chat_template == "auto":
        prefix = after_prompt(text, prefix)
    elif tokenizer.encode("a")[0] == tokenizer.bos_token_id:  # it may add an EOS token, too
        begin = [tokenizer.bos_token_id]
    return begin + to_ids(tokenizer, text + prefix)


def written(tokenizer, problem: dict, how="auto", options=None, begins_turn=True):
    """Return a chat as one text, in which control tokens of its turns are marked.

    problem: has messages, and perhaps tools; how, options: --chat_template, and its keywords;
    begins_turn: whether the text ends with the beginning of the model's next turn.
    """
    messages = [cleaned(turn, tokenizer) for turn in problem["messages"]]
    if not tokenizer.chat_template or how == "none":
        return "\n".join(turn["content"] for turn in messages) + "\n"
    chat = {"tokenize": False, "add_generation_prompt": begins_turn}
    if problem.get("tools"):
        chat["tools"] = cleaned(problem["tools"], tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, **chat, **FIXED, **(options or {}))
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: an option of another type
        raise ValueError(f"the model's chat template refuses the chat: {error}") from error


def written_turn(tokenizer, problem: dict, how, options):
    """Return the problem's turn, to be learned, as the template writes it without its end token."""
    chat = {**problem, "messages": [*problem["messages"], problem["turn"]]}
    check_keys(functools.partial(written, tokenizer, how=how, options=options), chat)
    prompt = written(tokenizer, problem, how, options)
    text = written(tokenizer, chat, how, options, begins_turn=False)
    end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer, how))
    if not text.startswith(prompt) or end not in text[len(prompt) :]:
        raise ValueError(f"the model's chat template rewrites the prompt {prompt[-40:]!r}")
    return text[len(prompt) :].rpartition(end)[0]


def check_keys(write, problem: dict) -> None:
    """Raise ValueError if a turn has a key, or the problem has tools, that would not be written.

    write: written, of one model. A key is tried in a chat that ends with its turn, because
    templates leave out the reasoning in earlier turns.
    """
    user = {"role": "user", "content": "Who?"}
    tried = []  # (the key, a chat with it, the chat without it)
    if tools := problem.get("tools"):
        tried.append(("tools", {"messages": [user], "tools": tools}, {"messages": [user]}))
    for turn in map(cleaned, problem["messages"]):
        before = [user] if turn["role"] in ("assistant", "tool") else []
        said_by_call = {"name", "tool_call_id"} if turn["role"] == "tool" else set()
        for key in turn.keys() - {"role", "content"} - said_by_call:
            without = {name: value for name, value in turn.items() if name != key}
            tried.append((key, {"messages": [*before, turn]}, {"messages": [*before, without]}))
    for key, chat, other in tried:
        try:
            is_lost = write(chat) == write(other)
        except ValueError:  # the template takes one of them alone
            is_lost = False
        if is_lost:
            raise ValueError(
                f"the chat has {key}, which would be lost: the model's chat template, or plain "
                "text without one, does not write it"
            )


def cleaned(value, tokenizer=None):
    """Return a turn, or tools, without the empty values that columnar files have.

    With a tokenizer, control tokens in its texts are marked.
    """
    if isinstance(value, str):
        return marked(tokenizer, value) if tokenizer else value
    if isinstance(value, list):
        return [cleaned(one, tokenizer) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: cleaned(one, tokenizer) for key, one in value.items() if one not in (None, [])}
    if {"name", "arguments"} <= value.keys():  # a call: templates expect an object
        found["arguments"] = read_arguments(found.get("arguments") or "{}", value)
    return found


def read_arguments(given, call: dict):
    """Return a call's arguments as a dictionary. OpenAI writes them as a JSON string."""
    with contextlib.suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise ValueError(
            f"the call of {call['name']!r} has arguments that are no JSON object, such as "
            f"""{{"city": "Paris"}}: {call["arguments"]!r:.80}"""
        )
    return given


def marked(tokenizer, text: str):
    """Return the text with a mark inside each control token, so that to_ids takes it for text."""
    text = text.replace(MARK, "")
    return control_pattern(tokenizer).sub(lambda token: token[0][0] + MARK + token[0][1:], text)


def to_ids(tokenizer, text: str):
    """Return a text's token ids, a list. Control tokens that marked has found are plain text."""
    check_text(text, "a chat")
    if MARK not in text:
        return tokenizer.encode(text, add_special_tokens=False)
    # Take the marks out, and put one before each control token that the template has written.
    pattern = f"{MARK}|({control_pattern(tokenizer).pattern})"
    text = re.sub(pattern, lambda found: MARK + found[0] if found[1] else "", text)
    return with_marks(tokenizer).encode(text, add_special_tokens=False).ids


@functools.cache
def with_marks(tokenizer):
    """Return the same tokenizer, but with a mark at the beginning of each control token's name."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("a text holds a control token, which this tokenizer can't encode as text")
    from tokenizers import Tokenizer  # takes a moment, and few texts need it

    names = set(control_names(tokenizer))
    rules = re.sub(
        r'"((?:[^"\\]|\\.)*)"',  # each string of the JSON
        lambda text: f'"{MARK}{text[1]}"' if text[1] in names else text[0],
        tokenizer.backend_tokenizer.to_str(),
    )
    found = Tokenizer.from_str(rules)
    found.no_truncation()
    return found


@functools.cache
def control_pattern(tokenizer):
    names = sorted(control_names(tokenizer), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


@functools.cache
def around_replies(tokenizer, chat_template="auto", template_options="{}", num_results=0):
    """Return [the token that ends a turn, the text before a reply, the text after it], strings.

    num_results: of tools, each in a turn of its own; then the list has a text after each of them.
    It begins with AS_JSON if the template writes the result as a JSON string (Llama 3).

    They are taken from one chat that the template has rendered. Earlier turns are never rendered
    again, so a template that rewrites them (Qwen3's drops their thinking) does not change a
    conversation. ValueError if the template has no end token after a turn.
    """
    if not tokenizer.chat_template or chat_template == "none":
        return tokenizer.eos_token, "\n", "\n"
    chat = [{"role": "user", "content": "FIRST"}, {"role": "assistant", "content": "SECOND"}]
    replies = ["THIRD"]
    if num_results:
        # A template that writes results as JSON shows it at the quotation mark.
        replies = [f'THIRD{i}"' for i in range(num_results)]
    for i, reply in enumerate(replies):
        result = {"role": "tool", "content": reply, "tool_call_id": CALL_ID.format(i)}
        chat.append(result if num_results else {"role": "user", "content": reply})
    text = written(tokenizer, {"messages": chat}, chat_template, json.loads(template_options))
    behind = text.rpartition("SECOND")[2].lstrip(" ")
    ends = [token for token in control_names(tokenizer) if behind.startswith(token)]
    pieces = []
    rest = behind
    for reply in replies:
        as_json = json.dumps(reply)[1:-1]
        is_json = as_json != reply and as_json in rest
        before, found, rest = rest.partition(as_json if is_json else reply)
        if not ends or not found:
            raise ValueError(
                "the model's chat template has no place for a reply: behind the model's turn it "
                f"has {behind!r}"
            )
        pieces.append(before)
        rest = AS_JSON * is_json + rest
    end = max(ends, key=len)
    return end, pieces[0][len(end) :], *pieces[1:], rest


def end_of_turn(tokenizer, chat_template: str = "auto"):
    """Return the id of the token that ends the model's turns: the chat template's, or else EOS."""
    try:
        return tokenizer.convert_tokens_to_ids(around_replies(tokenizer, chat_template)[0])
    except ValueError:  # the template has no such token, or refuses a chat of three turns
        return tokenizer.eos_token_id


def after_prompt(prompt, text: str):
    """Return the text, without its first tag if the prompt ends with that tag."""
    tag = re.match(rf"\s*({OPENING_TAG})", text)
    if not tag or not prompt.rstrip().endswith(tag[1]):
        return text
    rest = text[tag.end() :]
    return rest if prompt.endswith(tag[1]) else rest.lstrip()  # the prompt has the line break


def control_tokens(tokenizer) -> set:
    """Return the set of ids of the tokens that control the chat and are not text."""
    return set(tokenizer.convert_tokens_to_ids(control_names(tokenizer)))


def control_names(tokenizer):
    """Return the control tokens as strings: special tokens, and tags that the template writes."""
    names = []
    for about in tokenizer.added_tokens_decoder.values():
        name = about.content
        # DeepSeek's <｜User｜> is not special.
        controls = about.special or (
            name[:1] in ("<", "[") and name in str(tokenizer.chat_template)
        )
        if controls and not re.search(TEXT_WORDS, name, re.IGNORECASE):
            names.append(name)
    return names


# --------------------------------------------------------------------------------------------- date


def fix_date(tokenizer, chat_template: str, begun):
    """Make a chat template that writes the date (strftime_now) write the same one in all of a run.

    begun: the run, or its checkpoint, that is resumed or evaluated; another model has no run.json.
    Return the date, "2026-05-31": today's or that run's. None if no template writes it.
    """
    if chat_template == "none" or "strftime_now" not in str(tokenizer.chat_template):
        return None
    date = str(datetime.date.today())
    path = files.run_of(begun) / "run.json"
    if begun and path.is_file():
        about = files.read_object(path)
        date = about.get("sizes", {}).get("template_date") or about.get("date", date)
    FIXED["strftime_now"] = datetime.datetime.fromisoformat(date).strftime  # at midnight
    print(f"the chat template writes the date: {date} in all of the run, even if it is resumed")
    return date

"""Prompts and responses as tokens: the model's chat template, its options, and the tags of a task.

A tag such as <think> may be text or a special token, and the prompt's last word or the response's
first: the model's template and tokenizer decide. Tasks read it as text.
"""

import json
import re
from pathlib import Path

import jinja2

import rewards

# Variables of a template that are no options: set by the trainer, or jinja's and transformers' own.
NO_OPTIONS = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
NO_OPTIONS |= jinja2.defaults.DEFAULT_NAMESPACE.keys()
OPENING_TAG = r"[<\[◁][^\s<>\[\]◁▷/]+[>\]▷]"  # <think>, [THINK]
# A special token is text if it is a tag of a pair or has one of these words. Others control the
# chat: the end of a text or turn, padding. So do some in the form of a tag.
TEXT_WORDS = r"think|thought|reason|answer|solution"
TAG = r"[<\[◁]/?[A-Za-z][\w.:-]*[>\]▷]"
CONTROL = r"""(?ix) \W* (s | [be]o[stm] | pad | unk | mask | cls | sep | inst | \w+_prompt) \W* $
    | .* (turn | _of_text | _of_sent | unused | reserved | extra_id | fim_ | image | audio
          | control)"""


def load_task(args, tokenizer, data=rewards):
    """(the task's module, training problems, test problems), with their token ids.

    args: a script's settings; data: rewards, or rewards.examples, whose problems have responses.
    ValueError if the data are invalid, or the model's chat template refuses a chat.
    """
    return data.load_task(args, encoder(args, tokenizer))


def encoder(args, tokenizer):
    """A function that gives a problem's ids: prompt_ids, and response_ids if it has a response."""
    options = check_template(args, tokenizer)

    def ids_of(problem):
        prompt = encode(tokenizer, problem, args.chat_template, options)
        if "response" not in problem:
            return {"prompt_ids": prompt}
        text = after_prompt(tokenizer.decode(prompt), problem["response"])
        response = tokenizer.encode(text, add_special_tokens=False)
        return {"prompt_ids": prompt, "response_ids": [*response, tokenizer.eos_token_id]}

    return ids_of


def read_template_options(args):
    """--template_options as a dictionary. ValueError if it is no JSON object."""
    text = getattr(args, "template_options", "{}")
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--template_options {text} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(
            f"--template_options {text} is no JSON object, "
            """such as '{"enable_thinking": false}'"""
        )
    return options


def check_template(args, tokenizer):
    """--template_options as a dictionary. ValueError if the model's chat template does not use one.

    Also if a chat model has no template. A base model without one gets plain text, which a printed
    line says.
    """
    from transformers.utils.chat_template_utils import _get_template_variables  # takes seconds

    options = read_template_options(args)
    if args.chat_template == "none" or not tokenizer.chat_template:
        if options:
            raise ValueError(
                "--template_options has no effect: "
                "the prompts are plain text, without a chat template"
            )
        if args.chat_template == "auto":
            say_plain_text(str(tokenizer.name_or_path))
        return {}
    known = _get_template_variables(tokenizer.get_chat_template())
    known -= NO_OPTIONS | set(type(tokenizer).SPECIAL_TOKENS_ATTRIBUTES)
    for name in options.keys() - known:
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"--template_options: the model's chat template does not use {name!r}; it uses {there}"
        )
    return options


def say_plain_text(model):
    """Prints that a model has no chat template. ValueError if it is a chat model.

    Its name or Mistral's own files say so.
    """
    about = f"{model} has no chat template that transformers can read"
    of_mistral = any((Path(model) / name).is_file() for name in ("tekken.json", "params.json"))
    if of_mistral or re.search(r"instruct|chat|[-_]it\b", Path(model).name, re.IGNORECASE):
        raise ValueError(
            f"{about}: --chat_template none gives it plain text, which chat models have not learned"
        )
    print(f"{about}: it gets plain text, as with --chat_template none")


def encode(tokenizer, problem, chat_template="auto", template_options=None):
    """A prompt's token ids, a list: the chat in the tokenizer's template, then the prefix.

    If the tokenizer has no template, or chat_template is "none" (for base models), the chat is
    plain lines of text, after the token that the tokenizer begins every text with, if it has one
    (Llama 3, Mistral, Gemma). template_options: keywords for the template. A tag in which the
    template ends and with which the prefix begins is there once. ValueError if the template refuses
    the chat, as some do a system's turn.
    """
    begin = []
    prefix = problem["prefix"]
    if tokenizer.chat_template and chat_template == "auto":
        chat = {
            "conversation": problem["messages"],
            "tokenize": False,
            "add_generation_prompt": True,
        }
        try:
            text = tokenizer.apply_chat_template(**chat, **(template_options or {}))
        except (
            jinja2.TemplateError,
            TypeError,
        ) as error:  # the latter if an option has the wrong type
            raise ValueError(f"the model's chat template refuses the chat: {error}") from error
        prefix = after_prompt(text, prefix)
    else:
        text = "\n".join(message["content"] for message in problem["messages"]) + "\n"
        if (
            tokenizer.encode("a")[0] == tokenizer.bos_token_id
        ):  # it may also add an end token, which we don't want
            begin = [tokenizer.bos_token_id]
    return begin + tokenizer.encode(text + prefix, add_special_tokens=False)


def after_prompt(prompt, text):
    """The text, without its first tag if the prompt ends in that tag."""
    tag = re.match(rf"\s*({OPENING_TAG})", text)
    if not tag or not prompt.rstrip().endswith(tag[1]):
        return text
    rest = text[tag.end() :]
    return rest if prompt.endswith(tag[1]) else rest.lstrip()  # the prompt has the line break


def decode(tokenizer, responses):
    """The texts of vLLM's responses, without control tokens and end tokens: a list.

    Tags stay, also those that are special tokens, as </think> is in some tokenizers.
    """
    control = control_tokens(tokenizer)
    kept = []
    for response in responses:
        ended = response.finish_reason == "stop"  # otherwise it was cut off, and all of it counts
        ids = response.token_ids[:-1] if ended else response.token_ids
        kept.append([token for token in ids if token not in control])
    return tokenizer.batch_decode(
        kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def control_tokens(tokenizer):
    """The ids of the special tokens that are no text: a set."""
    named = {
        getattr(tokenizer, name) for name in type(tokenizer).SPECIAL_TOKENS_ATTRIBUTES
    }  # end, padding …
    added = tokenizer.added_tokens_decoder
    texts = {about.content for about in added.values()}
    control = set()
    for token, about in added.items():
        text = about.content
        is_tag = re.fullmatch(TAG, text) and not re.match(CONTROL, text)
        is_of_pair = "/" in text or f"{text[0]}/{text[1:]}" in texts
        is_text = (is_tag and is_of_pair) or re.search(TEXT_WORDS, text, re.IGNORECASE)
        if about.special and (text in named or not is_text):
            control.add(token)
    return control

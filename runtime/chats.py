"""Turn prompts and responses into tokens: the chat template, its options, and a task's tags.

A tag such as <think> may be text or a special token. It may be the prompt's last word or the
response's first. The model's template and tokenizer decide; tasks read it as text.
"""

import functools
import json
import re

import jinja2

import rewards

OPENING_TAG = r"[<\[◁][^\s<>\[\]◁▷/]+[>\]▷]"  # <think>, [THINK]
# A special token with one of these words counts as text. Others control the chat: end of text, end
# of turn, padding.
TEXT_WORDS = r"think|thought|reason|answer|solution|solve|tool_"
FIXED = {}  # keywords of every call of a chat template: strftime_now, from inputs.fix_date


def load_task(args, tokenizer, data=rewards):
    """Return (the task's module, training problems, test problems), with their token ids.

    args: a script's settings; data: rewards, or rewards.examples, whose problems have responses.
    ValueError if the data are invalid, or the model's chat template refuses a chat.
    """
    found = data.load_task(args, encoder(args, tokenizer))
    if hasattr(found[0], "reply") and hasattr(args, "max_turns"):
        around_replies(tokenizer, args.chat_template, args.template_options)  # it may have no place
    elif hasattr(found[0], "reply"):
        print(f"--task {args.task} replies to turns; this script has one turn: grpo_multi_turn.py")
    return found


def encoder(args, tokenizer):
    """Return a function that encodes a problem: prompt_ids, and response_ids if there is one."""
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
    """Return --template_options as a dictionary. ValueError if it is not a JSON object."""
    text = getattr(args, "template_options", "{}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(
            f"--template_options {text} is no JSON object, "
            """such as '{"enable_thinking": false}'"""
        ) from None


def check_template(args, tokenizer):
    """Return --template_options as a dictionary.

    A model without a template gets plain text, and a printed line says so.
    """
    if args.chat_template == "auto" and not tokenizer.chat_template:
        print(f"{tokenizer.name_or_path} has no chat template: it gets plain text")
    return read_template_options(args)


def encode(tokenizer, problem, chat_template="auto", template_options=None):
    """Return a prompt's token ids, a list: the chat in the tokenizer's template, then the prefix.

    If the tokenizer has no template, or chat_template is "none" (for base models), the chat becomes
    plain lines of text. They follow the token that the tokenizer begins every text with, if it has
    one (Llama 3, Mistral, Gemma). template_options: keywords for the template. If the template ends
    with a tag and the prefix begins with it, the tag occurs once. ValueError if the template
    refuses the chat: some refuse a system turn.
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
            text = tokenizer.apply_chat_template(**chat, **FIXED, **(template_options or {}))
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: an option of another type
            raise ValueError(f"the model's chat template refuses the chat: {error}") from error
        prefix = after_prompt(text, prefix)
    else:
        text = "\n".join(message["content"] for message in problem["messages"]) + "\n"
        if tokenizer.encode("a")[0] == tokenizer.bos_token_id:  # it may add an EOS token, too
            begin = [tokenizer.bos_token_id]
    return begin + tokenizer.encode(text + prefix, add_special_tokens=False)


def encode_reply(tokenizer, reply, chat_template="auto", template_options="{}"):
    """Return the token ids between two turns of the model: the reply, as a user turn.

    They follow the token that ended the last turn. So they include the newline that most templates
    write after this token, and the beginning of the model's next turn. chat_template,
    template_options: the settings, two strings.
    """
    end, before, after = around_replies(tokenizer, chat_template, template_options)
    # Encode it after the end token: some tokenizers put a space before a text's first word.
    ids = tokenizer.encode(end + before + reply + after, add_special_tokens=False)
    return ids[len(tokenizer.encode(end, add_special_tokens=False)) :]


@functools.cache
def around_replies(tokenizer, chat_template="auto", template_options="{}"):
    """Return (the token that ends a turn, the text before a reply, the text after it), as strings.

    They are taken from one chat that the template has rendered. Earlier turns are never rendered
    again, so a template that rewrites them (Qwen3's drops their thinking) does not change a
    conversation. ValueError if the template has no end token after a turn.
    """
    if not tokenizer.chat_template or chat_template == "none":
        return tokenizer.eos_token, "\n", "\n"
    chat = [("user", "FIRST"), ("assistant", "SECOND"), ("user", "THIRD")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat],
        tokenize=False,
        add_generation_prompt=True,
        **FIXED,
        **json.loads(template_options),
    )
    behind = text.rpartition("SECOND")[2].lstrip(" ")
    special = [about.content for about in tokenizer.added_tokens_decoder.values() if about.special]
    ends = [token for token in special if behind.startswith(token)]
    before, found, after = behind.partition("THIRD")
    if not ends or not found:
        raise ValueError(
            "the model's chat template has no place for a reply: behind the model's turn it has "
            f"{behind!r}"
        )
    end = max(ends, key=len)
    return end, before[len(end) :], after


def after_prompt(prompt, text):
    """Return the text, without its first tag if the prompt ends with that tag."""
    tag = re.match(rf"\s*({OPENING_TAG})", text)
    if not tag or not prompt.rstrip().endswith(tag[1]):
        return text
    rest = text[tag.end() :]
    return rest if prompt.endswith(tag[1]) else rest.lstrip()  # the prompt has the line break


def decode(tokenizer, responses):
    """Return the texts of vLLM's responses, a list, without control tokens and end tokens.

    Tags stay, even if they are special tokens, as </think> is in some tokenizers.
    """
    control = control_tokens(tokenizer)
    kept = []
    for response in responses:
        ended = response.finish_reason == "stop"  # otherwise it was truncated, and all of it counts
        ids = response.token_ids[:-1] if ended else response.token_ids
        kept.append([token for token in ids if token not in control])
    return tokenizer.batch_decode(
        kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def control_tokens(tokenizer):
    """Return the set of ids of the special tokens that are not text."""
    control = set()
    for token, about in tokenizer.added_tokens_decoder.items():
        if about.special and not re.search(TEXT_WORDS, about.content, re.IGNORECASE):
            control.add(token)
    return control

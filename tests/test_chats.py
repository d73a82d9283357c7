"""Chat templates, their options, and tags that are tokens of their own."""

from types import SimpleNamespace

import pytest
from conftest import CHATML, KK_TINY, puzzles, task_settings, write_rows
from helpers import chat, settings_of_sft
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rewards import countdown, examples, kk, score
from runtime.chats import check_template, decode, encode, load_task, read_template_options

THINKING = "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
NOTHING = "<think>\n\n</think>\n\n"
BUDGET = "{% if enable_thinking %}<think>{{ 'up to ' + budget if budget }}\n{% else %}" + NOTHING + "{% endif %}"
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "[THINK]", "[/THINK]", "◁/think▷", "<|end_of_thought|>"]
TAGS += ["<tool_call>", "</tool_call>", "</solve>"]
CONTROL = ["<|im_sep|>", "<end_of_turn>", "<pad>", "</s>", "[INST]", "[/INST]", "<|eot_id|>", "<｜Assistant｜>"]
CONTROL += ["[PAD]", "<unused3>", "<mask>", "<bos>", "<|endoftext|>", "[SYSTEM_PROMPT]", "<end_of_text>"]
CONTROL += ["<fim_prefix>", "<file_sep>"]


def of_kk(**changes):
    """The settings of a script for puzzles from a file."""
    return task_settings("kk", {"kk": {"data": puzzles(), "test_data": puzzles()}}, **changes)


def with_template(end="", tags=()):
    """kk_tiny's tokenizer with a chat template that ends otherwise, in text or code, and more special tokens."""
    end = end if "{" in end else f"{{{{ {end!r} }}}}"  # jinja drops a last line break
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.chat_template = THINKING + CHATML + end
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in tags])
    return tokenizer


@pytest.mark.parametrize(
    ("template_ends", "prefix", "prompt_ends"),
    [
        ("", "<think>", "<think>"),
        ("<think>", "<think>", "<think>"),
        ("<think>\n", "<think>", "<think>\n"),
        ("<think>\n\n", "<think>\n", "<think>\n\n"),
        ("<think>", "<think>\nOkay", "<think>\nOkay"),
        ("<think>\n", "<think>\nOkay", "<think>\nOkay"),
        ("[THINK]", "[THINK]", "[THINK]"),
        ("<|START_THINKING|>", "<|START_THINKING|>", "<|START_THINKING|>"),
        ("<think>\n", "<answer>", "<think>\n<answer>"),
        ("<think>\n", "", "<think>\n"),
        ("<think>\n\n</think>\n\n", "<think>", "<think>\n\n</think>\n\n<think>"),  # closed: the task's own follows
        ("t", "that is", "tthat is"),  # no tag
    ],
)
@pytest.mark.parametrize("tags", [(), TAGS])
def test_a_tag_of_template_and_task_is_in_the_prompt_once(template_ends, prefix, prompt_ends, tags):
    tokenizer = with_template(template_ends, tags)
    ids = encode(tokenizer, {"messages": [{"role": "user", "content": "Who?"}], "prefix": prefix})
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n" + prompt_ends)


def test_a_response_to_learn_does_not_repeat_the_tag_in_which_the_prompt_ends(tmp_path):
    file = write_rows(tmp_path / "chats.jsonl", [chat("Who?", "<think>\nI.</think>Me."), chat("Why?", "So.")] * 2)
    for end, text in (("<think>\n", "I.</think>Me."), ("", "<think>\nI.</think>Me.")):
        tokenizer = with_template(end)
        _, train, _ = load_task(settings_of_sft(data=str(file), test_data=str(file)), tokenizer, examples)
        assert tokenizer.decode(train[0]["response_ids"]) == text + "<|im_end|>"


def test_tags_stay_in_the_text_that_is_scored_and_control_tokens_do_not():
    tokenizer = with_template(tags=TAGS + CONTROL)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    ends = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    for text in TAGS + CONTROL:
        ids = tokenizer.encode(f"a{text}b", add_special_tokens=False)
        assert tokenizer.convert_tokens_to_ids(text) in ids
        cut_off = SimpleNamespace(token_ids=[*ids, *ends], finish_reason="length")
        assert decode(tokenizer, [cut_off]) == [f"a{text}b" if text in TAGS else "ab"]


@pytest.mark.parametrize("task", [kk, countdown])
def test_a_right_answer_is_right_whatever_its_tags_are_made_of(task):
    answer = {"nums": [1, 2], "target": 3} if task is countdown else {"Ann": True}
    text = "hm</think><answer>" + ("1 + 2" if task is countdown else "Ann is a knight") + "</answer>"
    for tags in ([], ["</think>"], TAGS):
        tokenizer = with_template(tags=tags)
        response = SimpleNamespace(token_ids=[*tokenizer.encode(text), tokenizer.eos_token_id], finish_reason="stop")
        response.text = decode(tokenizer, [response])[0]
        [found] = score(task, [response], [{"answer": answer}])
        assert found["correct"] and found["format"]


def test_template_options_reach_the_prompt_of_every_script(tmp_path):
    tokenizer = with_template("{% if add_generation_prompt %}" + BUDGET + "{% endif %}")
    file = str(write_rows(tmp_path / "chats.jsonl", [chat("Who?", "Me.")]))
    ends = {"{}": "<think>\n", '{"enable_thinking": false}': "</think>\n\n", '{"budget": "9"}': "up to 9\n"}
    for options, end in ends.items():
        _, chats, _ = load_task(
            settings_of_sft(template_options=options, data=file, test_data=file), tokenizer, examples
        )
        assert tokenizer.decode(chats[0]["prompt_ids"]).endswith(end)
        _, train, _ = load_task(of_kk(template_options=options), tokenizer)
        last = end if end == "<think>\n" else end + "<think>"
        assert tokenizer.decode(train[0]["prompt_ids"]).endswith(last)


@pytest.mark.parametrize(
    ("options", "chat_template", "message"),
    [
        ("", "auto", "is no JSON object"),
        ("enable_thinking=false", "auto", "is no JSON object"),
        ("{'enable_thinking': False}", "auto", "is no JSON object"),
        ("[1]", "auto", "is no JSON object, such as '{\"enable_thinking\": false}'"),
        ("null", "auto", "is no JSON object"),
        ('{"budget": 9}', "auto", "the model's chat template refuses the chat: can only concatenate str"),
        ('{"messages": []}', "auto", "the model's chat template refuses the chat: "),
    ],
)
def test_template_options_that_are_refused(options, chat_template, message):
    tokenizer = with_template(BUDGET + "{{ eos_token }}")
    args = of_kk(template_options=options, chat_template=chat_template)
    with pytest.raises(ValueError) as error:
        load_task(args, tokenizer)
    assert message in str(error.value) and "\n" not in str(error.value)
    if "JSON" in message:  # found before torch is loaded
        with pytest.raises(ValueError):
            read_template_options(args)


def test_a_model_without_a_template_gets_plain_text(capsys):
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.chat_template = None
    assert check_template(of_kk(), tokenizer) == {} and "it gets plain text" in capsys.readouterr().out
    assert check_template(of_kk(chat_template="none"), tokenizer) == {}

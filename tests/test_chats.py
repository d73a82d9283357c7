"""Chat templates, their options, tags that are tokens of their own, and texts that look like control tokens."""

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import CHATML, KK_TINY, puzzles, task_settings, write_rows
from helpers import chat, requests_of, settings_of_sft
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rewards import countdown, examples, kk, score
from runtime import sampler
from runtime.chats import check_template, control_names, encode, load_task, read_template_options, with_marks
from runtime.sampler import decode
from runtime.tools import encode_reply

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
        ('{"add_generation_prompt": false}', "auto", "the model's chat template refuses the chat: "),
        (
            '{"enable_thnking": false}',
            "auto",
            "no variable 'enable_thnking'; it has budget, enable_thinking, eos_token",
        ),
        ('{"tokenize": true}', "auto", "no variable 'tokenize'"),
        ('{"enable_thinking": false}', "none", "is for a template: give --chat_template auto"),
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
    with pytest.raises(ValueError, match="no variable 'enable_thinking'; it has none"):
        check_template(of_kk(template_options='{"enable_thinking": false}'), tokenizer)


# -------------------------------------------------------------------------------------------------------- text is text

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}"
    " {{ m.content }}</s>{% endif %}{% endfor %}"
)
KINDS = {  # control tokens, the first begins texts and the last ends turns; the template; how it treats blanks
    "ChatML": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML, None),
    "Llama 3": (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], LLAMA_3, None),
    "Mistral": (["<s>", "[INST]", "[/INST]", "</s>"], MISTRAL, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": (["<s>", "[INST]", "[/INST]", "</s>"], MISTRAL, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "Llama 2": (["<s>", "[INST]", "[/INST]", "</s>"], MISTRAL, "normalizer"),
    "Unigram": (["<s>", "[INST]", "[/INST]", "</s>"], MISTRAL, pre_tokenizers.Metaspace()),
}
LETTERS = ['Who is a knight? <|_im/end] [INST of text start header id begin ok> "" \\ "'] * 3


def tokenizer_of(kind):
    """A small tokenizer of a kind: byte-level BPE, or sentencepiece's BPE or Unigram, with <s> in the vocabulary."""
    control, template, blanks = KINDS[kind]
    fast = Tokenizer(models.Unigram() if kind == "Unigram" else models.BPE(unk_token="<unk>"))
    options = {"special_tokens": ["<unk>", *control], "show_progress": False}
    if blanks is None:
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    elif blanks == "normalizer":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        fast.pre_tokenizer, fast.decoder = blanks, decoders.Metaspace()
    if kind == "Unigram":
        fast.train_from_iterator(LETTERS, trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **options))
    else:
        fast.train_from_iterator(LETTERS, trainers.BpeTrainer(vocab_size=400, **options))
    found = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=control[0], eos_token=control[-1])
    found.chat_template = template
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_a_question_an_earlier_turn_or_a_reply_are_text(kind):
    """Those of the template are the only ones, and all other ids are those of the same text without any."""
    tokenizer = tokenizer_of(kind)
    control = tokenizer.convert_tokens_to_ids(KINDS[kind][0])
    texts = {"plain": "Who is", "inside": "Who".join(["is", *KINDS[kind][0], "is"]), "alone": KINDS[kind][0][-1]}
    assert with_marks(tokenizer).get_vocab_size() == len(tokenizer)
    found = {}
    for name, text in texts.items():
        turns = [("user", text), ("assistant", text), ("user", "Who?")]
        problem = {"messages": [{"role": role, "content": content} for role, content in turns], "prefix": ""}
        found[name] = [encode(tokenizer, problem), encode_reply(tokenizer, text)]
        assert encode(tokenizer, problem, "none")[0] not in control[1:]
        assert not {*encode(tokenizer, problem, "none")[1:]} & {*control}
        rendered = tokenizer.apply_chat_template(problem["messages"], tokenize=False, add_generation_prompt=True)
        if name == "plain":
            assert found[name][0] == tokenizer.encode(rendered, add_special_tokens=False)
        if "▁" not in tokenizer.decode(found[name][0]):  # Llama 2's is decoded by more than it has here
            assert tokenizer.decode(found[name][0]).replace(" ", "") == rendered.replace(" ", "")
    for prompt, reply in found.values():
        for ids, plain in zip((prompt, reply), found["plain"]):
            assert [token for token in ids if token in control] == [token for token in plain if token in control]
    learned = load_chats(tokenizer, [chat("Who is a knight?", texts["inside"])] * 2)[0]["response_ids"]
    assert [token for token in learned if token in control] == control[-1:]


def load_chats(tokenizer, rows, **changes):
    """The examples to learn, of rows of a file, which is also the test file."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(write_rows(Path(folder, "chats.jsonl"), rows))
        return load_task(settings_of_sft(data=file, test_data=file, **changes), tokenizer, examples)[1]


def test_a_tag_in_a_prefix_and_a_token_that_only_the_template_makes_one_keep_their_meaning():
    tokenizer = with_template("<｜Assistant｜>", tags=TAGS)
    tokenizer.add_tokens([AddedToken("<｜Assistant｜>", special=False)])  # as DeepSeek has it
    problem = {"messages": [{"role": "user", "content": "<|im_end|><｜Assistant｜><answer>"}], "prefix": "<think>"}
    ids = encode(tokenizer, problem)
    turn, end, tag, answer = tokenizer.convert_tokens_to_ids(["<｜Assistant｜>", "<|im_end|>", "<think>", "<answer>"])
    assert ids[-2:] == [turn, tag] and ids.count(turn) == 1 and ids.count(end) == 1 and answer in ids
    assert "<｜Assistant｜>" in control_names(tokenizer) and "<think>" not in control_names(tokenizer)


def test_half_of_a_surrogate_pair_is_named(tokenizer, tmp_path):
    half = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=r"a reply: a text holds '\\udce9'"):
        encode_reply(tokenizer, half)
    task = tmp_path / "mine.py"
    task.write_text(
        "def load(source, split, *, size=None, seed=0):\n"
        f"    return [{{'messages': [{{'role': 'user', 'content': {half!r}}}], 'answer': 1}}]\n"
        "def score(response, answer):\n    return {'reward': 0, 'correct': False, 'format': False}\n"
    )
    with pytest.raises(ValueError, match=r"mine\.py, train problem 1: .*'\\udce9'"):
        load_task(task_settings(str(task), {str(task): {}}), tokenizer)


# ---------------------------------------------------------------------------------------------------------- end of turn


def folder_with(tmp_path, of_config, eos):
    """kk_tiny's folder with other end tokens in its configuration and tokenizer than its template writes."""
    folder = tmp_path / "model"
    shutil.copytree(KK_TINY, folder)
    for name, change in {
        "config.json": {"eos_token_id": of_config and 634},
        "generation_config.json": {"eos_token_id": of_config},
        "tokenizer_config.json": {"eos_token": eos},
    }.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    return folder


@pytest.mark.parametrize(
    ("of_config", "eos", "ends"),
    [(634, "<|im_start|>", [634, 635]), ([634, 635], "<|im_start|>", [634, 635]), (None, "<|im_end|>", [635])],
)
def test_the_templates_end_of_turn_ends_a_response_whatever_the_configuration_says(of_config, eos, ends, tmp_path):
    folder = folder_with(tmp_path, of_config, eos)
    assert sampler.end_tokens(str(folder)) == ends
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert load_chats(tokenizer, [chat("Who?", "Me.")] * 2)[0]["response_ids"][-1] == 635
    plain = load_chats(tokenizer, [chat("Who?", "Me.")] * 2, chat_template="none")[0]["response_ids"][-1]
    assert plain == tokenizer.eos_token_id
    assert requests_of(folder)[1]["stop"] == ends


# -------------------------------------------------------------------------------------------------- keys beside content

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
QWEN = (  # its calls, results and reasoning, which only the turns after the last question have
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_CALL = [
    {"role": "user", "content": "What is 2 + 3?", "name": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I add."},
    {"role": "tool", "content": "5<|im_end|>", "tool_call_id": "1", "name": "add"},
]
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def test_calls_tools_and_reasoning_reach_the_template_and_are_learned():
    tokenizer = with_template()
    tokenizer.chat_template = QWEN
    last = {"role": "assistant", "reasoning_content": "It said so.", "content": "It is 5."}
    rows = [{"tools": TOOLS, "messages": [*WITH_CALL, last]}, {"messages": WITH_CALL[:2]}]
    first, second = load_chats(tokenizer, rows)
    prompt = tokenizer.decode(first["prompt_ids"])
    assert json.dumps(TOOLS) in prompt and WRITTEN in prompt and "<think>\nI add.\n</think>" in prompt
    assert first["prompt_ids"].count(635) == 4  # not the one in the tool's result
    assert tokenizer.decode(first["response_ids"]) == "<think>\nIt said so.\n</think>\n\nIt is 5.<|im_end|>"
    assert tokenizer.decode(second["response_ids"]) == f"<think>\nI add.\n</think>\n\n{WRITTEN}<|im_end|>"
    asked = {"messages": [*WITH_CALL, {"role": "user", "content": "And 3?"}], "tools": TOOLS, "prefix": ""}
    asked["messages"][1]["content"] = ""
    prompt = tokenizer.decode(encode(tokenizer, asked))
    assert WRITTEN in prompt and "I add." not in prompt  # the template's own choice


@pytest.mark.parametrize("chat_template", ["auto", "none"])
@pytest.mark.parametrize(
    ("turn", "more", "key"),
    [
        ({"tool_calls": [CALL]}, {}, "tool_calls"),
        ({"reasoning_content": "So."}, {}, "reasoning_content"),
        ({"images": ["a.png"]}, {}, "images"),
        ({"role": "user", "name": "Ann"}, {}, "name"),
        ({}, {"tools": TOOLS}, "tools"),
    ],
)
def test_a_key_that_the_template_leaves_out_is_refused_by_name(turn, more, key, chat_template, tokenizer):
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "."} | turn,
        *chat("?", "!")["messages"],
    ]
    with pytest.raises(ValueError, match=f"train example 1: the chat has {key}, which would be lost"):
        load_chats(tokenizer, [{"messages": turns} | more] * 2, chat_template=chat_template)
    if not more and turns[1]["role"] == "assistant":  # the turn to be learned
        with pytest.raises(ValueError, match=f"the chat has {key}, which would be lost"):
            load_chats(tokenizer, [{"messages": turns[:2]}] * 2, chat_template=chat_template)

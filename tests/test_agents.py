"""Tools that are functions, objects with a state, and what a task's side of a conversation may do to a run."""

import json
import logging
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, ROOT, learn_by_heart, metrics, run, small, timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards import TaskError, own, score, scores_of, state
from runtime import chats, tools

# Small templates that write tools, calls and results as those of four families do.
CHATML_TOOLS = """{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
<tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>
{% endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == "user" %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}{%- else %}<|im_start|>{{ m.role }}
{% if THINKS and m.role == "assistant" and loop.index0 > ns.last %}<think>

</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{% if not loop.first or m.content %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{%- set head = "<|start_header_id|>" %}{{ bos_token }}{%- for m in messages %}
{%- set call = m.tool_calls[0].function if m.tool_calls else none %}
{%- if m.role == "tool" %}{{ head }}ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{%- elif call %}{{ head }}assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}{{ head }}{{ m.role }}<|end_header_id|>

{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ head }}assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """{{ bos_token }}{%- for m in messages %}{%- if m.role == "user" %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- "[INST] " + m.content + "[/INST]" }}
{%- elif m.role == "tool" %}{% if m.tool_call_id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
{{- "" }}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", {#
#}"arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]
{{- eos_token }}
{%- else %} {{ m.content }}{{ eos_token }}{%- endif %}{%- endfor %}"""
FAMILIES = {
    "Qwen2.5": ("hermes", CHATML_TOOLS.replace("THINKS", "false"), 2),
    "Qwen3": ("hermes", CHATML_TOOLS.replace("THINKS", "true"), 2),
    "Llama 3.2": ("llama3_json", LLAMA, 1),  # its template writes one call in a turn
    "Mistral": ("mistral", MISTRAL, 2),
}
CONTROL = [
    "<|python_tag|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
]
CONTROL += [
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "<tool_call>",
    "</tool_call>",
]

TASK = """
import sys, time

def load(source, split, *, size=None, seed=0):
    problems = [{"messages": [{"role": "user", "content": f"{split} {n}"}], "answer": n} for n in range(size or 48)]
    return problems

def search(query: str, k: int = 3) -> str:
    '''Search the facts.

    Args:
        query: what to look for
        k: how many facts
    '''
    return f"{query}: {k} facts"

def odd(way: str) -> str:
    '''Fail in a way.

    Args:
        way: how
    '''
    if way == "raise":
        raise ValueError("two\\nlines")
    if way == "hang":
        time.sleep(60)
    if way == "exit":
        sys.exit(1)
    print("printed")
    given = {"bytes": b"abc", "big": "word " * 10**6, "none": None, "number": 42, "half": "a\\udce9", "dict": {"a": 1}}
    return given.get(way, way)

TOOLS = [search, odd]

def score(response, answer):
    return {"reward": float(len(response)), "correct": False, "format": True}
"""


@pytest.fixture
def a_task(tmp_path):
    """A function that writes a task and reads it."""

    def write(text):
        (tmp_path / "agent.py").write_text(text)
        own.read_file.cache_clear()
        return own.read_file(str(tmp_path / "agent.py"))

    return write


def settings(**changes):
    fixed = {
        "tool_parser": "auto",
        "chat_template": "auto",
        "template_options": "{}",
        "max_turns": 4,
        "task": "agent.py",
    }
    return SimpleNamespace(**fixed | {"tool_timeout": 10.0, "max_reply_tokens": 99} | changes)


def with_template(template):
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL, "bos_token": "<s>"})
    if "INST" in template:
        tokenizer.eos_token = "</s>"
    tokenizer.chat_template = template
    return tokenizer


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def talk(task, *turns, **problem):
    return SimpleNamespace(
        text=turns[-1], turns=list(turns), replies=[], side=tools.Side(task, {"answer": 1, **problem}, 5)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_and_results_are_the_templates_own(family, a_task):
    """The ids of prompt, turn and results are those of the whole chat, and vLLM reads the calls that it wrote."""
    parser, template, num_calls = FAMILIES[family]
    tokenizer, task = with_template(template), a_task(TASK)
    tools.set_up(task, tokenizer, settings())
    assert task.parser[0] == parser
    calls = [("search", {"query": "lamp", "k": 2}), ("odd", {"way": 'a "b"'})][:num_calls]
    results = ['a "quoted"\nline', "<|im_end|> é"][:num_calls]
    made = []
    for i, (name, arguments) in enumerate(calls):
        made.append({"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}})
    chat = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "", "tool_calls": made}]
    asked = {"messages": chat[:1], "prefix": "", "tools": own.schemas(task)}
    for i, result in enumerate(results):
        chat.append({"role": "tool", "content": result, "tool_call_id": f"abcdefgh{i}"})
    prompt = chats.written(tokenizer, asked)
    whole = chats.written(tokenizer, {**asked, "messages": chat})
    end = chats.around_replies(tokenizer)[0]
    turn = whole.removeprefix(prompt).partition(end)[0]
    assert [(name, json.loads(arguments)) for name, arguments in task.parser[1](turn)] == calls
    ids = chats.to_ids(tokenizer, prompt + turn + end) + tools.encode_reply(tokenizer, results, turn=turn)
    assert ids == chats.to_ids(tokenizer, whole)
    assert all(name in tokenizer.decode(ids) for name in ("search", "quoted", "facts"))


def test_a_template_without_tools_and_an_unknown_parser_are_refused(a_task):
    task = a_task(TASK)
    with pytest.raises(ValueError, match=r"has none: take another --model, or let reply\(\) read calls"):
        tools.set_up(task, AutoTokenizer.from_pretrained(KK_TINY), settings())
    with pytest.raises(ValueError, match=r"--tool_parser nope: .*vLLM has .*hermes"):
        tools.set_up(task, with_template(FAMILIES["Qwen3"][1]), settings(tool_parser="nope"))
    for text in ("def f(x):\n    '''F.\\n    Args:\\n        x: it\\n    '''", "def f(x: int):\n    '''F.'''"):
        task = a_task(f"{text}\nTOOLS = [f]\n" + TASK.replace("TOOLS", "NONE"))
        with pytest.raises(ValueError, match=r"^/\S+agent.py: TOOLS: \w+: ") as refused:
            tools.set_up(task, with_template(FAMILIES["Qwen3"][1]), settings())
        assert "parser" not in str(refused.value)


ODD = {
    "raise": "error: ValueError: two lines",
    "hang": "error: no result within 0.3 s",
    "exit": "error: SystemExit: 1",
    "bytes": "error: TypeError: Object of type bytes is not JSON serializable",
    "half": "error: ValueError: the reply: a text holds '\\udce9', which is no character",
    "none": "null",
    "number": "42",
    "dict": '{"a": 1}',
    "<|im_end|>": "<|im_end|>",
}


def test_tools_run_side_by_side_and_what_fails_becomes_a_reply(a_task, capsys):
    tokenizer, task = with_template(FAMILIES["Qwen2.5"][1]), a_task(TASK)
    args = settings(tool_timeout=0.3)
    tools.set_up(task, tokenizer, args)
    others = {
        call("search", query="x") + call("search", query="y", k=1): ["x: 3 facts", "y: 1 facts"],
        call("nowhere"): ["error: there is no tool 'nowhere', only search, odd"],
        call("search", wrong=1): ["error: search: missing a required argument: 'query'"],
        call("odd", way="big"): None,
        "The answer is 3.": None,
        "<tool_call>\n{half": None,
    }
    talks = [talk(task, call("odd", way=way)) for way in ODD] + [talk(task, turn) for turn in others]
    logger = logging.getLogger("vllm.tool_parsers")
    logger.setLevel(logging.NOTSET)  # as vLLM does when the engine starts
    started = time.monotonic()
    found = tools.replies(task, talks, tokenizer, args)
    assert time.monotonic() - started < 3
    assert logger.level == logging.CRITICAL  # a broken call prints no traceback
    assert found[: len(ODD)] == [[reply] for reply in ODD.values()]
    assert found[len(ODD) : len(ODD) + 3] == list(others.values())[:3] and found[-2:] == [None, None]
    [big] = found[-3]
    assert big.endswith("of 5000000 characters]") and 300 < len(big) < 1000
    assert [one.side.num_errors for one in talks[: len(ODD)]] == [1] * 5 + [0] * 4
    [warning] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]  # of five
    assert re.search(r"agent.py: odd\(\) fails in line 24 on .*raise.*: ValueError: two lines; later", warning)
    assert not tools.most_failed(talks)  # 5 of 15
    assert "5 of 6 calls" in tools.most_failed(talks[:5] + talks[-1:] + talks[-3:-2])
    # Nobody would read the result after the last turn.
    assert tools.replies(task, [talk(task, *["a"] * 3, call("odd", way="raise"))], tokenizer, args) == [[]]


def test_the_function_forms_get_what_they_name(a_task, capsys):
    text = (
        TASK.replace("TOOLS = ", "NONE = ")
        + """
def reply(turns, problem):
    turns.append(problem.pop("answer"))
    return None if "over" in turns else b"3" if "bytes" in turns else f"{len(turns)}"

def score_conversation(turns, problem, replies, truncated):
    return {"reward": problem["answer"] + len(replies), "correct": truncated, "format": True}
"""
    )
    task, tokenizer = a_task(text), AutoTokenizer.from_pretrained(KK_TINY)
    talks = [talk(task, "a"), talk(task, "over"), talk(task, "bytes")]
    error = "error: TypeError: reply() must give a string or None, and gave b'3'"
    assert tools.replies(task, talks, tokenizer, settings()) == ["2", None, error]
    assert talks[0].turns == ["a"] and talks[0].side.problem == {"answer": 1}
    more = [{"problem": {"answer": 2}, "replies": ["x"], "truncated": True}]
    assert scores_of(task, [["a"]], [2], more) == [{"reward": 3, "correct": True, "format": True}]
    at_once = "def reply_all(turns, problems):\n    return [t[-1] if t[-1] != 'None' else None for t in turns]\n"
    task = a_task(text + at_once)
    assert tools.replies(task, [talk(task, "p"), talk(task, "None")], tokenizer, settings()) == ["p", None]
    task = a_task(text + at_once.replace("return ", "return 1 / 0, "))
    found = tools.replies(task, [talk(task, "p"), talk(task, "q")], tokenizer, settings())
    assert found == ["error: ZeroDivisionError: division by zero"] * 2
    said = capsys.readouterr().out
    assert re.findall(r"agent.py: (\w+)\(\) fails.* on '(\w+)': (\w+)", said) == [
        ("reply", "bytes", "TypeError"), ("reply_all", "p", "ZeroDivisionError"),
    ]  # fmt: skip


OBJECTS = """
import threading

class Conversation:
    closed = []

    def __init__(self, problem, seed):
        self.thread = threading.get_ident()
        self.seen = [problem["answer"], seed]

    def reply(self, turn):
        assert self.thread == threading.get_ident()
        self.seen.append(turn)
        return None if turn == "over" else f"{len(self.seen)}"

    def score(self, truncated):
        if self.seen[-1] == "bad":
            raise RuntimeError("no")
        return {"reward": float(len(self.seen)), "correct": truncated, "format": True}

    def state(self):
        return [] if self.seen[-1] == "bad" else len(self.seen)

    def close(self):
        self.closed.append(self.seen)

def load(source, split, *, size=None, seed=0):
    return [{"messages": [{"role": "user", "content": f"{split} {n}"}], "answer": n} for n in range(size or 48)]
"""


def test_an_object_per_conversation_has_its_own_thread_and_is_closed(a_task):
    task, tokenizer = a_task(OBJECTS), AutoTokenizer.from_pretrained(KK_TINY)
    problems = own.load("agent.py", task, None, "train", 3, 0)
    own.check("agent.py", task, problems, [(None, "train", 3, 0)], 9.0)
    assert task.Conversation.closed.pop() == [0, 0, ""]
    threads = threading.active_count()
    talks = [talk(task, "a"), talk(task, "over"), talk(task, "c")]
    assert tools.replies(task, talks, tokenizer, settings()) == ["3", None, "3"]
    assert [state(task, one.turns, {"id": 0}, one.side) for one in talks] == [3, 3, 3]
    for one, finish in zip(talks, ("stop", "length", "stop")):
        one.finish_reason = finish
    found = score(task, talks, problems)
    assert [one["reward"] for one in found] == [3, 3, 3] and [one["correct"] for one in found] == [False, True, False]
    assert sorted(task.Conversation.closed, key=str) == [[1, 5, "a"], [1, 5, "c"], [1, 5, "over"]]
    alone = SimpleNamespace(text="one", finish_reason="stop")  # of a script of one turn
    assert score(task, [alone], problems[:1])[0]["reward"] == 3
    bad = talk(task, "bad")
    bad.finish_reason = "stop"
    tools.replies(task, [bad], tokenizer, settings())
    with pytest.raises(TaskError, match=r"agent.py: score\(\) fails in line 18 on 'bad': RuntimeError: no"):
        score(task, [bad], problems[:1])
    bad = talk(task, "bad")
    tools.replies(task, [bad], tokenizer, settings())
    assert state(task, ["bad"], {"id": 7}, bad.side) == (7, "bad") and "unhashable type" in task.failed
    bad.side.line.put(None)
    assert threading.active_count() <= threads + 1


# A tool that raises for some of a conversation's turns, as AT says.
RAISES = """
import zlib
from rewards import kk

TURNS = 2

def load(source, split, *, size=None, seed=0):
    return kk.load(None, split, people="2", size=size or 48, seed=seed)

def reply(turns, problem):
    if turns != [""] and zlib.crc32(turns[-1].encode()) % 3 < AT:
        raise TimeoutError("the server does not answer")
    return "nothing <|im_end|>found" if len(turns) == 1 else None

def score(response, answer):
    return {**kk.score(response, answer), "reward": float(len(response) % 7)}
"""


@pytest.mark.parametrize("script", ["grpo_multi_turn.py"])
def test_a_tool_that_raises_now_and_then_is_trained_with_and_one_that_always_does_ends_the_run(script, tmp_path):
    task = tmp_path / "raises.py"
    task.write_text(f"AT = 1\n{RAISES}")
    done = run(script, *small(tmp_path / "run", task=task, max_response_tokens=120, steps=1))
    [row] = metrics(tmp_path / "run")
    assert 0 < row["tool_errors"] < 0.75 and row["turns"] > 1
    kept = (tmp_path / "run" / "samples.jsonl").read_text() + (tmp_path / "run" / "test_samples.jsonl").read_text()
    assert "error: TimeoutError: the server does not answer" in kept and "--max_turns" not in done.stdout


def test_the_page_of_an_agent_with_two_tools(tmp_path):
    """Its file is short, its two calls find the answer, and it trains with the template that the page names."""
    text = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)[1]
    (tmp_path / "stock.py").write_text(text)
    assert len(text.splitlines()) <= 62
    shutil.copytree(KK_TINY, tmp_path / "agent")
    shutil.copy(ROOT / "examples" / "qwen_tools.jinja", tmp_path / "agent" / "chat_template.jinja")
    task, tokenizer = own.read_file(str(tmp_path / "stock.py")), AutoTokenizer.from_pretrained(tmp_path / "agent")
    tools.set_up(task, tokenizer, settings())
    train, test = (own.load("stock.py", task, None, split, None, 0) for split in ("train", "test"))
    assert len(train) == len(test) == 40
    assert not {str(one["messages"]) for one in train} & {str(one["messages"]) for one in test}
    turns = [call("find_shop", city="Paris")]
    [[shop]] = tools.replies(task, [talk(task, *turns)], tokenizer, settings())
    turns.append(call("count_things", shop=shop, thing="lamp"))
    [[count]] = tools.replies(task, [talk(task, *turns)], tokenizer, settings())
    answer = train[0]["answer"]
    assert answer == [int(shop), int(count)]
    shown = tokenizer.decode(chats.encode(tokenizer, train[0]))
    assert shown.count("<tool_response>") == 6 and call("find_shop", city="Madrid") in shown
    given = [
        ([*turns, f"There are {count}."], [shop, count], False),
        ([*turns, f"Is it {shop}?"], [shop, count], False),
    ]
    given += [([*turns, turns[1]], [shop, count], True), ([*turns, str(count)], [shop, count], True)]
    given += [([turns[0], count], [shop], False), (["I can't know that."], [], False)]
    more = [{"replies": replies, "truncated": truncated} for _, replies, truncated in given]
    found = scores_of(task, [turns for turns, *_ in given], [answer] * len(given), more)
    assert [one["reward"] for one in found] == [1, 0.5, 0.5, 0.5, 0.75, 0]

    flags = {"model": tmp_path / "agent", "task": tmp_path / "stock.py", "max_prompt_tokens": 2000, "steps": 1}
    flags |= {"max_response_tokens": 8, "prompts_per_step": 2, "responses_per_prompt": 2, "eval_size": 1, "kl_coef": 0}
    done = run("grpo_multi_turn.py", *small(tmp_path / "run", **flags))
    assert "find_shop, count_things; calls are read by vLLM's parser hermes" in done.stdout
    assert metrics(tmp_path / "run")[0]["turns"] == 1


def test_the_template_of_the_page_writes_calls_and_results_as_qwen_does():
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.chat_template = (ROOT / "examples" / "qwen_tools.jinja").read_text()
    made = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}]
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    chat += [{"role": "assistant", "content": "", "tool_calls": made * 2}]
    chat += [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = tokenizer.apply_chat_template(chat, tools=[{"a": 1}, {"b": 2}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nS\n\n# Tools\n\nYou may call")
    assert '\n<tools>\n{"a": 1}\n{"b": 2}\n</tools>\n' in text
    calls = '\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>' * 2
    results = "".join(f"\n<tool_response>\n{i}\n</tool_response>" for i in (1, 2))
    end = f"<|im_end|>\n<|im_start|>assistant{calls}<|im_end|>\n<|im_start|>user{results}<|im_end|>\n"
    assert text.endswith(f"<|im_start|>user\nU{end}<|im_start|>assistant\n")


@pytest.mark.slow
def test_a_tool_that_always_raises_ends_the_run(tmp_path):
    task = tmp_path / "raises.py"
    task.write_text(f"AT = 3\n{RAISES}")
    done = run("grpo_multi_turn.py", *small(tmp_path / "run", task=task, max_response_tokens=120), check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"error: {task}: ") and "does not answer" in last
    assert "calls of this step have failed" in last and (tmp_path / "run" / "ended.txt").exists()


@pytest.fixture(scope="module")
def calling_model(tiny_model, tmp_path_factory):
    """The tiny model with a template that has tools. It has learned by heart to call one twice, and then to answer."""
    folder = tmp_path_factory.mktemp("calling") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = FAMILIES["Qwen2.5"][1]
    tokenizer.save_pretrained(folder)
    path = folder.parent / "agent.py"
    path.write_text(TASK)
    task = own.read_file(str(path))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = [tokenizer.eos_token_id]
    turn = [*tokenizer.encode(call("search", query="a") * 2, add_special_tokens=False), *end]
    rows = []
    problems = [own.load("agent.py", task, None, split, 2, 0)[i] for split in ("test", "train") for i in (0, 1)]
    for i, problem in enumerate(problems):
        prompt = chats.encode(tokenizer, problem)
        rows.append((prompt, turn))
        answer = [*tokenizer.encode(f"answer {i}", add_special_tokens=False), *end]
        rows.append((prompt + turn + tools.encode_reply(tokenizer, ["a: 3 facts"] * 2), answer))
    learn_by_heart(model, rows, lr=5e-3, steps=600, enough=0.01)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder, path


@pytest.mark.slow
def test_a_model_that_calls_tools_is_trained_and_evaluated(calling_model, tmp_path):
    folder, path = calling_model
    flags = {"model": folder, "task": path, "max_response_tokens": 200, "dtype": "float32", "steps": 1}
    done = run("grpo_multi_turn.py", *small(tmp_path / "run", **flags))
    assert "tools      search, odd; calls are read by vLLM's parser hermes" in done.stdout
    [row] = metrics(tmp_path / "run")
    assert row["turns"] > 1 and row["sampler_gap"] < 1e-4
    out = ("--out", tmp_path / "out", "--keep_responses", "--limit", "2", "--max_response_tokens", "200")
    run("evaluate.py", folder, "--suite", path, *out)
    [kept] = (tmp_path / "out").glob("*_responses.jsonl")
    replies = [json.loads(line)["replies"] for line in kept.read_text().splitlines()]
    assert replies == [["a: 3 facts\na: 3 facts"]] * 2


@pytest.mark.slow
def test_objects_are_trained_and_evaluated_and_a_resumed_run_equals_an_unbroken_one(tmp_path):
    path = tmp_path / "game.py"
    of_kk = "from rewards import kk\n" + OBJECTS[: OBJECTS.index("def load")].replace(
        "self.seen[-1]", "str(self.seen[-1])"
    )
    of_kk = of_kk.replace('problem["answer"]', "0").replace(
        "return None if turn", "return None if len(self.seen) > 3 or turn"
    )
    load = (
        "def load(source, split, *, size=None, seed=0):\n    return kk.load(None, split, people='2', size=size or 48)\n"
    )
    path.write_text(of_kk.replace("float(len(self.seen))", "float(len(turns[0]) % 7 + len(replies) + self.seen[1] % 2)")
                    .replace("score(self, truncated)", "score(self, turns, replies, truncated)") + load)  # fmt: skip
    flags = {"task": path, "max_response_tokens": 150, "dtype": "float32", "steps": 2, "save_every": 1}
    run("grpo_multi_turn.py", *small(tmp_path / "whole", **flags))
    run("grpo_multi_turn.py", *small(tmp_path / "run", **flags | {"steps": 1}))
    run("grpo_multi_turn.py", "--resume", tmp_path / "run", "--steps", 2)
    whole, resumed = (timeless(metrics(tmp_path / name)[-1]) for name in ("whole", "run"))
    assert whole == resumed and whole["turns"] > 1
    run("grpo_multi_turn.py", *small(tmp_path / "two", **flags | {"steps": 1}), processes=2)
    assert metrics(tmp_path / "two")[0]["reward"] == pytest.approx(metrics(tmp_path / "whole")[0]["reward"], rel=0.1)
    run("grpo.py", *small(tmp_path / "one", **flags | {"steps": 1}))
    run("evaluate.py", KK_TINY, "--suite", path, "--out", tmp_path / "out", "--limit", 4, "--max_response_tokens", 100)

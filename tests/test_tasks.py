"""What load_task makes of a task's problems, and tasks in files of one's own."""

import importlib
import json
from types import SimpleNamespace

import pytest
from conftest import KK_TINY, answer, data_of, puzzles, row_of_puzzle, task_settings, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from rewards import TaskError, find_task, score, scores_of
from runtime import metrics, tools
from runtime.chats import encode, load_task
from runtime.sampler import decode


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """{task: flags that name its files}."""
    return {"kk": {"data": puzzles()}, **data_of(tmp_path_factory.mktemp("data"))}


@pytest.mark.parametrize("task", ["kk", "math", "countdown", "hitab"])
def test_tasks_keep_to_their_interface(task, data, tokenizer):
    module, train, test = load_task(task_settings(task, data), tokenizer)
    assert len(test) == 5 and [problem["id"] for problem in test] == list(range(5))
    for problem in (train[0], test[0]):
        assert problem["prompt_ids"] == encode(tokenizer, problem)
        assert {"messages", "prefix", "answer", "category"} <= problem.keys()
    scores = module.score_all(["no answer"] * 2, [train[0]["answer"], train[1]["answer"]])
    assert scores == [module.score("no answer", train[0]["answer"])] * 2
    assert not scores[0]["correct"] and {"reward", "correct", "format"} <= scores[0].keys()


@pytest.mark.parametrize("task, kind", [("kk", {"people": "2-3"}), ("countdown", {"numbers": "3-4"})])
def test_a_files_puzzle_that_is_in_the_generated_test_is_not_trained_on(task, kind, tmp_path, capsys, tokenizer):
    """Not even with the numbers of Countdown in another order."""
    module = importlib.import_module(f"rewards.{task}")
    tested, others = (module.load(None, split, size=5, seed=0, **kind) for split in ("test", "train"))
    if task == "kk":
        rows = [row_of_puzzle(item) for item in tested + others]
    else:
        rows = [item["answer"] | {"nums": item["answer"]["nums"][::-1]} for item in tested + others]
    file = str(write_rows(tmp_path / "mine.jsonl", rows))
    _, train, test = load_task(task_settings(task, {task: {"data": file}}), tokenizer)
    assert len(test) == 5 and {module.puzzle_of(p) for p in train} == {module.puzzle_of(p) for p in others}
    assert "train: 5 of 10 are test problems, too, and left out" in capsys.readouterr().out
    both = {"data": file, "test_data": file}
    assert len(load_task(task_settings(task, {task: both}), tokenizer)[1]) == 5


def test_mathematics_without_test_data_holds_problems_back(data, tokenizer):
    _, train, test = load_task(task_settings("math", data, test_data=""), tokenizer)
    assert len(test) == 5 and train and not {p["id"] for p in train} & {p["id"] for p in test}
    assert sorted(p["id"] for p in train + test) == list(range(30))
    _, _, other = load_task(task_settings("math", data, test_data="", seed=1), tokenizer)
    assert [p["id"] for p in other] != [p["id"] for p in test]


def test_a_problem_that_stands_twice_in_a_file_is_not_on_both_sides(tmp_path, tokenizer):
    path = tmp_path / "twice.json"
    path.write_text(json.dumps([{"problem": f"What is {n} + 1?", "answer": n + 1} for n in range(6)] * 2))
    _, train, test = load_task(task_settings("math", {"math": {"data": path}}), tokenizer)
    assert not {str(p["messages"]) for p in train} & {str(p["messages"]) for p in test} and len(train + test) < 12
    path.write_text(json.dumps([{"problem": "What is 1 + 1?", "answer": 2}] * 2))
    with pytest.raises(ValueError, match="every problem to train on is a test problem, too"):
        load_task(task_settings("math", {"math": {"data": path}}), tokenizer)


QUESTION = "What is 1 + 1?"
SAME = [
    " What is  1 + 1?\n", "What is\r\n1 + 1?", "What\xa0is\u30001 + 1?", "What is 1\u200b + 1?\ufeff", "What is 1+1?",
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
]  # fmt: skip


@pytest.mark.parametrize("same", SAME)
def test_a_problem_with_other_blanks_or_system_turn_is_not_on_both_sides(same, tmp_path, tokenizer):
    path = write_rows(tmp_path / "two.json", [{"prompt": prompt, "final_answer": 2} for prompt in (QUESTION, same)])
    with pytest.raises(ValueError, match="every problem to train on is a test problem, too"):
        load_task(task_settings("math", {"math": {"data": path}}), tokenizer)


def test_plain_text_begins_as_the_tokenizer_begins_texts_and_never_ends(tokenizer):
    """Llama 3 and Mistral put <s> before a text; a template has its own."""
    problem = {"messages": [{"role": "user", "content": "Who?"}], "prefix": "<think>"}
    plain = encode(tokenizer, problem, "none")
    assert tokenizer.decode(plain) == "Who?\n<think>"
    beginning = AutoTokenizer.from_pretrained(KK_TINY)
    beginning.add_special_tokens({"bos_token": "<s>"})
    bos = beginning.bos_token_id
    for pattern, begin in (("<s> $A", [bos]), ("<s> $A <s>", [bos]), ("$A <s>", [])):
        post_processor = TemplateProcessing(single=pattern, special_tokens=[("<s>", bos)])
        beginning.backend_tokenizer.post_processor = post_processor
        assert encode(beginning, problem, "none") == begin + plain
        assert encode(beginning, problem) == encode(tokenizer, problem)


def test_texts_are_without_the_token_that_ended_them(tokenizer):
    """Of a response that was cut off all tokens count."""
    ids = tokenizer.encode("Zoey is a knight")
    ended = SimpleNamespace(token_ids=[*ids, tokenizer.eos_token_id], finish_reason="stop")
    cut_off = SimpleNamespace(token_ids=ids[:-1], finish_reason="length")
    assert decode(tokenizer, [ended, cut_off]) == ["Zoey is a knight", tokenizer.decode(ids[:-1])]
    assert tokenizer.decode(ids[:-1]) != tokenizer.decode(ids[:-2])


LOAD = """
def load(source, split, *, size=None, seed=0):
    asked = [source, split, size, seed]
    return [{"messages": [{"role": "user", "content": f"Count to {n}"}], "answer": asked + [n]} for n in range(2, 9)]
"""
SCORE = """
def score(response, answer):
    return {"reward": len(response), "correct": "5" in response, "format": True}
"""


@pytest.fixture
def a_task(tmp_path):
    """A function that writes a task and gives its settings."""

    def write(text, **changes):
        file = tmp_path / "mine.py"
        file.write_text(text)
        return task_settings(str(file), {str(file): changes})

    return write


def test_a_task_of_ones_own_gets_what_it_leaves_out(a_task, tokenizer):
    args = a_task(LOAD + SCORE, data="here.txt", eval_size=3, seed=8)
    task, train, test = load_task(args, tokenizer)
    assert train[1]["answer"] == ["here.txt", "train", None, 8, 3] and test[0]["answer"] == [None, "test", 3, 8, 2]
    assert (train[0]["prefix"], train[0]["category"], train[6]["id"]) == ("", "all", 6)
    assert train[0]["prompt_ids"] == encode(tokenizer, train[0])
    found = score(task, [SimpleNamespace(text="1 2 3"), SimpleNamespace(text="12345")], train[:2])
    assert [(s["reward"], s["correct"]) for s in found] == [(5, False), (5, True)]


def test_a_task_that_scores_conversations_needs_no_score_of_one_turn(a_task, tokenizer):
    """In scripts of one turn, too: they pass one turn, and no replies."""
    text = LOAD + "def score_conversation(turns, answer, replies):\n    return {'reward': len(turns) + len(replies), "
    task, train, _ = load_task(a_task(text + "'correct': answer[1] == 'train', 'format': True}\n"), tokenizer)
    found = score(task, [SimpleNamespace(text="a"), SimpleNamespace(turns=["a", "b"], replies=["c"], text="b")],
                  train[:2])  # fmt: skip
    assert [(one["reward"], one["correct"]) for one in found] == [(1, True), (3, True)]


def test_a_task_of_ones_own_may_score_all_responses_together_and_have_categories_and_a_prefix(a_task, tokenizer):
    text = LOAD.replace('"answer"', '"prefix": "1 ", "category": n % 2, "answer"') + SCORE
    text += "def score_all(responses, answers):\n    return [score(max(responses), None) for _ in responses]\n"
    task, train, _ = load_task(a_task(text), tokenizer)
    assert tokenizer.decode(train[0]["prompt_ids"]).endswith("1 ") and train[1]["category"] == 1
    assert [found["reward"] for found in task.score_all(["1", "22"], [None, None])] == [2, 2]


NO_LOAD = "def load(*_, **more):\n    "
NOT_TASKS = [
    (SCORE, r"has no function load\(\)"),
    (LOAD, r"has no function score\(\)"),
    (LOAD + "score = 3", r"has no function score\(\)"),
    (LOAD + SCORE + "score_conversation = 3", r"has no function score_conversation\(\)"),
    ("import nowhere\n" + LOAD, "ModuleNotFoundError"),
    ("def load(", "SyntaxError"),
    (NO_LOAD + "return []\n" + SCORE, r"load\(\) must give a list"),
    (NO_LOAD + "pass\n" + SCORE, r"load\(\) must give a list"),
    (LOAD.replace('"answer"', '"target"') + SCORE, r"load\(\) is not complete: answer"),
    (LOAD.replace("asked + [n]", "{n}") + SCORE, "can't be kept as JSON"),
    (LOAD.replace('"role": "user", ', "") + SCORE, r"messages\.0\.role"),
    *((LOAD + SCORE.replace(word, "x"), f"is not complete: {word}") for word in ("reward", "correct", "format")),
    (LOAD + "def score(response, answer):\n    pass\n", "is not complete: it: "),
    (LOAD + SCORE.replace("len(response)", "response[0]"), r"score\(\) fails in line 7 on '': IndexError"),
    # As of a date, a NaN of pandas or half of a surrogate pair in a later problem.
    (
        LOAD.replace("asked + [n]", "n if n < 8 else {n}") + SCORE,
        r"problem 6 of load\(\): its answer can't be kept as JSON",
    ),
    (LOAD.replace("asked + [n]", "float('nan')") + SCORE, "can't be kept as JSON"),
    (LOAD.replace("Count to {n}", "Count to {n}\\ud800") + SCORE, "train problem 1: .*a text holds '.ud800'"),
    (LOAD + SCORE.replace("True}", "True, 'at': {1}}"), "can't be kept as JSON: Object of type set"),
    (LOAD + SCORE.replace("True}", "True, 'step': 'x'}"), "can't have the key 'step': samples.jsonl has its own"),
    (LOAD.replace('"user"', '"assistant"') + SCORE, "problem 0 of load.. ends with the model's turn: .* prefix"),
    (
        LOAD + SCORE + "def score_all(responses, answers):\n    return [score('', 1)]\n",
        r"score_all\(\) gave .* for 2 resp",
    ),
    (LOAD + SCORE.replace("    return", "    raise SystemExit(3)\n    return"), "fails in line 7 on '': SystemExit: 3"),
    (NO_LOAD + "raise KeyboardInterrupt\n" + SCORE, r"load\(\) fails: KeyboardInterrupt"),
    (
        LOAD + SCORE + "def reply(turns, problem):\n    return b'bytes'\n",
        "must give a string or None, and gave b'bytes'",
    ),
]


@pytest.mark.parametrize("text, says", NOT_TASKS)
def test_a_file_that_is_no_task_is_refused_in_one_line(text, says, a_task):
    args = a_task(text)
    with pytest.raises(ValueError, match=says) as refused:
        load_task(args, AutoTokenizer.from_pretrained(KK_TINY))
    assert str(refused.value).count(args.task) == 1 and len(str(refused.value).splitlines()) == 1


WRONG_LATER = [  # what score() gives a response that is not the first
    *(("reward", value) for value in ("float('nan')", "-float('inf')", "None", "'2'", "True", "1e30", "[1.0]")),
    *(("correct", value) for value in ("None", "2", "'yes'")), ("format", "float('nan')"),
    *(("parts", value) for value in ("{'a': float('nan')}", "{'a': 1e19}", "{'a': None}", "{'a': 'b'}", "[]")),
]  # fmt: skip


@pytest.mark.parametrize("name, value", WRONG_LATER)
def test_a_wrong_score_of_a_later_response_ends_the_run_with_its_name_and_the_tasks(name, value, a_task):
    right = "'reward': 1.0, 'correct': True, 'format': True"
    wrong = f"    if response == 'late':\n        return {{{right}, '{name}': {value}}}"
    args = a_task(LOAD + SCORE.replace("answer):", f"answer):\n{wrong}"))
    responses = [SimpleNamespace(text=text) for text in ("so", "late")]
    with pytest.raises(TaskError) as ended:
        score(find_task(args.task), responses, [{"answer": 1}] * 2)
    said = str(ended.value)
    assert said.startswith(f"{args.task}: what score() gives the response 'late' is not complete: {name}")
    assert len(said.splitlines()) == 1


OWN = """
STATE = {}

def load(source, split, *, size=None, seed=0):
    STATE[split] = seed
    return [{"messages": [{"role": "user", "content": f"{split} {n}"}], "answer": {"n": n}} for n in range(size or 9)]

def score(response, answer):
    assert STATE == {"train": 7, "test": 7}  # what load() has left
    answer["n"] = "changed"
    if response == "hangs":
        while True:
            try:
                re.match("(a+)+$", "a" * 40 + "b")
            except BaseException:
                pass
    if response == "ends":
        os._exit(1)
    if response == "leaves":
        sys.exit("no")
    if response == "prints":
        print("seen")
    if response == "odd":
        return lambda: 1
    return {"reward": len(response) - 3.0, "correct": False, "format": True, "parts": {"length": 1.0}}
"""


def test_what_a_task_of_ones_own_can_do_to_a_run(a_task, tokenizer, capfd):
    """A call that hangs, or ends its process, counts as timed out: it pays no more than any other. It gets copies."""
    args = a_task("import os, re, sys\n" + OWN, seed=7, score_timeout=0.5)
    task, train, _ = load_task(args, tokenizer)
    answers = [{"n": 1} for _ in range(5)]
    found = scores_of(task, [[text] for text in ("hangs", "prints", "ends", "", "four")], answers)
    late = {"reward": -3.0, "correct": False, "format": False, "timed_out": True, "parts": {"length": 0.0}}
    assert [one["reward"] for one in found] == [-3, 3, -3, -3, 1] and found[0] == found[2] == late
    assert answers == [{"n": 1}] * 5 and train[0]["answer"] == {"n": 0}
    said = capfd.readouterr().out
    assert "seen\n" in said and said.count("longer than --score_timeout, 0.5 s, or ended its process, on 'hangs'") == 1
    for text, error in {"leaves": "in line 21 on 'leaves': SystemExit: no", "odd": "on 'odd': AttributeError"}.items():
        with pytest.raises(TaskError, match=rf"^{args.task}: score\(\) fails {error}"):
            scores_of(task, [[""], [text]], answers[:2])
    task.judge.end()


def test_a_reply_gets_copies_and_what_it_raises_is_the_reply(a_task, tokenizer):
    text = (
        OWN
        + """
def reply(turns, problem):
    turns.append("mine")
    problem["answer"]["n"] = problem["messages"][0]["content"] = "changed"
    return {"": None, "half": "caf\\udce9"}.get(turns[0], 3) if turns[0] != "leaves" else exit()
"""
    )
    said = {
        "": None,
        "half": r"error: ValueError: the reply: a text holds '\udce9', which is no character",
        "leaves": "error: SystemExit: None",
        "else": "error: TypeError: reply() must give a string or None, and gave 3",
    }
    task = find_task(a_task(text).task)
    problem = {"messages": [{"role": "user", "content": "a"}], "answer": {"n": 1}}
    talks = [SimpleNamespace(turns=[turn], replies=[], side=tools.Side(task, problem, 0)) for turn in said]
    limits = SimpleNamespace(tool_timeout=9, max_reply_tokens=99, max_turns=3)
    assert tools.replies(task, talks, tokenizer, limits) == list(said.values())
    assert [talk.turns for talk in talks] == [[turn] for turn in said]
    assert problem == {"messages": [{"role": "user", "content": "a"}], "answer": {"n": 1}}


def test_what_a_task_does_to_its_arguments_while_it_is_tried_changes_nothing(a_task, tokenizer):
    clears = "turns.clear(), problem.clear()"
    args = a_task(
        LOAD + SCORE + f"def reply(turns, problem):\n    {clears}\ndef state(turns, problem):\n    {clears}\n"
    )
    task, train, _ = load_task(args, tokenizer)
    assert train[0]["answer"] == [None, "train", None, 0, 2] and train[0]["messages"][0]["content"] == "Count to 2"
    task.judge.end()


def test_a_task_in_two_files_imports_its_sibling_later_too(a_task, tokenizer, tmp_path):
    (tmp_path / "sibling_of_mine.py").write_text("REWARD = 2.0\n")
    (tmp_path / "json.py").write_text("raise ImportError('hides a library')\n")
    text = (
        "import sibling_of_mine, json\n"
        + LOAD
        + "def score(response, answer):\n    from sibling_of_mine import REWARD\n"
    )
    args = a_task(text + "    return {'reward': REWARD, 'correct': True, 'format': True}\n")
    task, train, _ = load_task(args, tokenizer)
    assert score(task, [SimpleNamespace(text="")], train[:1])[0]["reward"] == 2


def test_problems_of_ones_own_that_are_test_problems_are_not_trained_on(a_task, tokenizer, capsys):
    """The answer counts: in a game it may be all that differs. If nothing is left, a warning says so."""
    same = LOAD.replace("asked + [n]", "n % 5").replace("Count to {n}", "Count") + SCORE
    for size, left, says in (
        (9, 7, "warning: every problem to train on is a test problem, too"),
        (2, 3, "train: 4 of 7"),
    ):
        _, train, _ = load_task(a_task(same.replace("range(2, 9)", "range(2, 9)[:size]"), eval_size=size), tokenizer)
        assert len(train) == left and says in capsys.readouterr().out


def test_a_response_that_was_cut_off_is_scored_by_its_text():
    """It gets no other reward, and no length of its own: a rule reads texts alone."""
    texts = [r"\boxed{5}", r"\boxed{6}"] * 2
    responses = [answer(3, text, ended) for text, ended in zip(texts, ["stop", "stop", "length", "length"])]
    found = score(find_task("math"), responses, [{"answer": ["5"]}] * 4)
    assert [one["reward"] for one in found] == [1.0, 0.0, 1.0, 0.0]


def test_what_is_no_task_is_refused(tmp_path):
    for name in ("own", str(tmp_path / "nowhere.py"), str(tmp_path)):  # the first is a module of rewards/
        with pytest.raises(ValueError, match=r"there is no such file|must be one of kk, math, countdown"):
            find_task(name)


def test_pass_at_k_by_hand():
    """Of 4 responses 1 and 4 are right in category a, 2 in b. pass@2 of 1: the other drawn is wrong in 3 of 6 draws."""
    right = [("a", 1), ("b", 2), ("a", 4)]
    problems = [{"category": category} for category, _ in right for _ in range(4)]
    scores = [{"correct": i < count} for _, count in right for i in range(4)]
    found = metrics.pass_at_each_k("eval/pass", problems, scores, 4)
    assert found == {
        "eval/pass@1": pytest.approx(((1 / 4 + 1) / 2 + 2 / 4) / 2),
        "eval/pass@2": pytest.approx(((1 / 2 + 1) / 2 + 5 / 6) / 2),
        "eval/pass@4": 1,
    }
    accuracy = metrics.accuracy_by_category("eval/accuracy", problems, scores)
    assert found["eval/pass@1"] == pytest.approx(sum(accuracy.values()) / 2)
    assert metrics.pass_at_each_k("eval/pass", problems[:3], scores[:3], 1) == {}
    assert metrics.numbers_of_draws(6) == [1, 2, 4, 6] and metrics.numbers_of_draws(64)[-2:] == [32, 64]


def test_parts_of_a_reward_are_means_over_the_responses_that_have_them():
    scores = [{"parts": {"a": 1, "b": 2.0}}, {"parts": {"a": 2}}, {}, {"parts": {}}]
    assert metrics.parts_of_rewards(scores) == {"reward/a": 1.5, "reward/b": 2.0}
    assert metrics.parts_of_rewards([{"reward": 1}]) == {}

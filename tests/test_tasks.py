"""Every script on every task, end to end on the CPU; and what load_task makes of a task's problems."""

import importlib
import json
from types import SimpleNamespace

import pytest
from conftest import DATA, KK_TINY, metrics, puzzles, run, small
from transformers import AutoTokenizer

from rewards import encode, load_task
from tools import family

SCRIPTS = family.family()
TASKS = ["kk", "math", "countdown", "hitab"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags that name files for a task: the papers' own where they are at hand."""
    folder = tmp_path_factory.mktemp("data")
    if (DATA / "orz").exists():
        math, countdown = DATA / "orz/aime2024.json", DATA / "countdown/test.parquet"
    else:
        math, countdown = folder / "math.json", folder / "countdown.json"
        math.write_text(json.dumps([{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(30)]))
        countdown.write_text(json.dumps([{"nums": [i, i + 1, 50], "target": 51 - 2 * i} for i in range(1, 20)]))
    hitab = folder / "hitab.json"
    table = {"texts": [["", "n"], ["all", "5"]], "top_header_rows_num": 1, "left_header_columns_num": 1}
    hitab.write_text(json.dumps([{"question": f"What is n + {i}?", "answer": 5 + i, "table": table} for i in range(9)]))
    return {
        "kk": {"data": puzzles()},
        "math": {"data": math, "test_data": math},
        "countdown": {"data": countdown},
        "hitab": {"data": hitab, "test_data": hitab},
    }


ALL_RUNS = """
import json, sys, traceback
from tools import fingerprint
runs, result = sys.argv[1:]  # train gives it other words
train = fingerprint.with_one_engine()
ended = {}
for name, flags in json.load(open(runs)).items():
    try:
        train(name.split()[0], flags)
        ended[name] = "done"
    except BaseException:
        ended[name] = traceback.format_exc()
    json.dump(ended, open(result, "w"))
"""


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Two steps of every script on every task, in one process with one engine: {"SCRIPT TASK": (how it ended, folder)}.

    kk_tiny speaks of knights alone: on the other tasks every reward is 0, which each script must survive.
    """
    folder = tmp_path_factory.mktemp("trained")
    runs = {}
    for script in SCRIPTS:
        for task in TASKS:
            flags = {"task": task, "max_response_tokens": 24, "max_prompt_tokens": 1000, **data[task]}
            runs[f"{script} {task}"] = small(folder / f"{script}_{task}", **flags)
    (folder / "worker.py").write_text(ALL_RUNS)
    (folder / "runs.json").write_text(json.dumps(runs))
    run(str(folder / "worker.py"), folder / "runs.json", folder / "ended.json")
    ended = json.loads((folder / "ended.json").read_text())
    return {name: (ended[name], folder / name.replace(" ", "_")) for name in runs}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_on_tasks(script, task, trained):
    how_it_ended, folder = trained[f"{script} {task}"]
    assert how_it_ended == "done"
    first, second = metrics(folder)
    assert (first["step"], second["step"]) == (1, 2) and first["timed_out"] == 0 and first["tokens"] > 16
    if task != "kk":
        assert first["reward"] == first["accuracy"] == 0 and first["zero_std_rate"] == 1
    assert (folder / "checkpoints/step_000002/model.safetensors").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_task_brings_the_papers_settings(script, monkeypatch):
    trainer = importlib.import_module(script)
    monkeypatch.setattr(trainer, "ON_GPU", True)
    args = trainer.parse_args(["--task", "math"])
    assert (args.model, args.chat_template, args.temperature) == ("Qwen/Qwen2.5-7B", "none", 1.0)
    assert (args.prompts_per_step, args.epochs) == (128, 1)
    assert args.updates_per_step == (1 if script == "reinforce" else 2)
    args = trainer.parse_args(["--task=countdown"])
    assert (args.prompts_per_step, args.responses_per_prompt, args.max_response_tokens) == (128, 10, 3072)
    args = trainer.parse_args(["--task", "hitab"])
    assert (args.model, args.prompts_per_step, args.max_response_tokens) == ("Qwen/Qwen2.5-3B", 128, 3072)
    assert trainer.parse_args(["--task", "math", "--temperature", "0.5", "--model", "x"]).temperature == 0.5
    assert trainer.parse_args(["--task", "kk"]) == trainer.Args()


def settings(task, data, **changes):
    fixed = {"task": task, "data": "", "test_data": "", "people": "2-3", "numbers": "3-4", "chat_template": "auto"}
    return SimpleNamespace(**fixed | {"eval_size": 5, "max_prompt_tokens": 600, "seed": 0} | data[task] | changes)


@pytest.mark.parametrize("task", ["kk", "math", "countdown", "hitab"])
def test_tasks_keep_to_their_interface(task, data):
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    module, train, test = load_task(settings(task, data), tokenizer)
    assert len(test) == 5 and [problem["id"] for problem in test] == list(range(5))
    for problem in (train[0], test[0]):
        assert problem["prompt_ids"] == encode(tokenizer, problem)
        assert {"messages", "prefix", "answer", "category"} <= problem.keys()
    scores = module.score_all(["no answer"] * 2, [train[0]["answer"], train[1]["answer"]])
    assert scores == [module.score("no answer", train[0]["answer"])] * 2
    assert not scores[0]["correct"] and {"reward", "correct", "format"} <= scores[0].keys()


def test_mathematics_without_test_data_holds_problems_back(data):
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    _, all_of_them, _ = load_task(settings("math", data), tokenizer)
    _, train, test = load_task(settings("math", data, test_data=""), tokenizer)
    assert len(test) == 5 and train and not {p["id"] for p in train} & {p["id"] for p in test}
    assert sorted(p["id"] for p in train + test) == [p["id"] for p in all_of_them]
    _, _, other = load_task(settings("math", data, test_data="", seed=1), tokenizer)
    assert [p["id"] for p in other] != [p["id"] for p in test]


def test_one_problem_cannot_be_held_back(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    path = tmp_path / "one.json"
    path.write_text(json.dumps([{"problem": "What is 1 + 1?", "answer": 2}]))
    with pytest.raises(ValueError, match=r"one\.json has one problem that fits; without --test_data there must be two"):
        load_task(settings("math", {"math": {"data": path}}), tokenizer)


def test_without_a_chat_template_the_prompt_is_plain_text(data):
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    _, train, _ = load_task(settings("math", data, chat_template="none"), tokenizer)
    content = train[0]["messages"][0]["content"]
    assert tokenizer.decode(train[0]["prompt_ids"]) == content + "\n"
    _, chat, _ = load_task(settings("math", data), tokenizer)
    assert "<|im_start|>user" in tokenizer.decode(chat[0]["prompt_ids"])

"""Two steps of every script, end to end on the CPU: that they train, write what they promise, and that no digit moves.

All runs are in one process, and those with the same lengths share a vLLM engine; of each a test looks at what it left.
"""

import json
import re

import pytest
from conftest import DATA, KK_TINY, ROOT, metrics, puzzles, python, run, small
from safetensors.torch import load_file

from tools import fingerprint, updates

SCRIPTS = updates.ALGORITHMS
KEPT = json.loads(fingerprint.KEPT.read_text())
KEYS = """step reward reward_std accuracy format_rate response_tokens truncated_rate zero_std_rate entropy grad_norm
    sampler_gap weights_changed optimizer_steps tokens time/sample time/score time/logprob time/train time/sync
    time/step tokens_per_s peak_memory_gb""".split()

ALL_RUNS = """
import json, sys, traceback
from tools import fingerprint
runs, result = sys.argv[1:]  # train gives it other words
train = fingerprint.with_one_engine()
ended = {}
for name, (script, flags) in json.load(open(runs)).items():
    try:
        train(script, flags)
        ended[name] = "done"
    except BaseException:
        ended[name] = traceback.format_exc()
    json.dump(ended, open(result, "w"))
"""


def data_of(folder):
    """{task: flags that name its files}: the papers' own where they are at hand."""
    math, countdown, hitab = folder / "math.json", folder / "countdown.json", folder / "hitab.json"
    if (DATA / "orz").exists():
        math, countdown = DATA / "orz/aime2024.json", DATA / "countdown/test.parquet"
    else:
        math.write_text(json.dumps([{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(30)]))
        countdown.write_text(json.dumps([{"nums": [i, i + 1, 50], "target": 51 - 2 * i} for i in range(1, 20)]))
    table = {"texts": [["", "n"], ["all", "5"]], "top_header_rows_num": 1, "left_header_columns_num": 1}
    hitab.write_text(json.dumps([{"question": f"What is n + {i}?", "answer": 5 + i, "table": table} for i in range(9)]))
    return {"math": {"data": math, "test_data": math}, "countdown": {"data": countdown},
            "hitab": {"data": hitab, "test_data": hitab}}  # fmt: skip


def all_runs(folder):
    """{name: (script, flags)}. Beside those of the fingerprint: other tasks, and what happens in few runs."""
    runs = {script: fingerprint.command(script, folder / script) for script in SCRIPTS}
    page = (ROOT / "docs" / "add_a_task.md").read_text()
    (folder / "brief.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    same = {"max_prompt_tokens": 1000, "max_response_tokens": 24}
    more = {f"grpo {task}": same | {"task": task} | flags for task, flags in data_of(folder).items()}
    more["grpo own"] = same | {"task": folder / "brief.py", "max_response_tokens": 24}
    # kk_tiny knows no Countdown: all rewards are 0, so that no group is ever kept
    more["dapo nothing"] = same | {"task": "countdown", "max_refills": 1, "save_every": 1}
    more["grpo_ar_lopti cut"] = {
        "max_prompt_tokens": 1021, "max_response_tokens": 3, "kl_coef": 0, "responses_per_prompt": 1, "lr": 1e-6,
        "prompts_per_step": 16, "updates_per_step": 16, "eval_temperature": 1, "save_every": 1, "keep_checkpoints": 1,
        "data": puzzles(),
    }  # fmt: skip
    more["reinforce pass"] = same | {"eval_samples": 3, "eval_temperature": 1, "data": puzzles()}
    for name, flags in more.items():
        runs[name] = name.split()[0], [*small(folder / name.replace(" ", "_"), dtype="float32", **flags)]
    runs["grpo_ar_lopti cut"][1].append("--gradient_checkpointing")
    return runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{name of a run: its folder}."""
    folder = tmp_path_factory.mktemp("trained")
    runs = all_runs(folder)
    (folder / "worker.py").write_text(ALL_RUNS)
    (folder / "runs.json").write_text(json.dumps(runs))
    run(str(folder / "worker.py"), folder / "runs.json", folder / "ended.json")
    ended = json.loads((folder / "ended.json").read_text())
    assert ended == dict.fromkeys(runs, "done"), "\n".join(text for text in ended.values() if text != "done")
    return {name: folder / name.replace(" ", "_") for name in runs}


def test_every_script_trains_and_writes_what_it_promises(trained):
    for script in SCRIPTS:
        first, second = metrics(trained[script])
        assert (first["step"], second["step"]) == (1, 2) and first["timed_out"] == 0 and first["tokens"] > 16, script
        for row in (first, second):
            missing = [key for key in KEYS if row.get(key) is None]
            assert missing == (["time/logprob"] if script in ("reinforce", "maxrl") else []), script
        folder = trained[script] / "checkpoints" / "step_000002"
        assert load_file(folder / "model.safetensors").keys() > {"model.norm.weight"}, script
        assert json.loads((trained[script] / "run.json").read_text())["script"] == script
    keys = {"value_loss", "value_clip_rate", "value_grad_norm", "explained_variance", "time/value", "kl", "clip_rate"}
    first, second = metrics(trained["ppo"])
    assert keys <= first.keys() and first["value_loss"] > 0
    assert first["explained_variance"] == pytest.approx(0, abs=1e-5) != second["explained_variance"]  # V is 0 at first


def test_grpo_trains_on_every_task(trained):
    """kk_tiny speaks of knights alone: on the other tasks every reward is 0, which a run must survive."""
    for task in ("math", "countdown", "hitab"):
        rows = metrics(trained[f"grpo {task}"])
        assert [row["step"] for row in rows] == [1, 2], task
        assert rows[0]["reward"] == rows[0]["accuracy"] == 0 and rows[0]["zero_std_rate"] == 1, task


def test_a_run_on_a_task_of_ones_own_logs_the_parts_of_its_rewards(trained):
    """Of the task that docs/add_a_task.md makes."""
    rows = metrics(trained["grpo own"])
    assert [row["step"] for row in rows] == [1, 2] and "eval/accuracy" in rows[1]
    for row in rows:
        assert row["reward/rule"] + row["reward/brief"] == pytest.approx(row["reward"])
        assert 0 <= row["reward/brief"] <= 0.5 and -3 <= row["reward/rule"] <= 3
    samples = [json.loads(line) for line in (trained["grpo own"] / "samples.jsonl").read_text().splitlines()]
    assert all(sample["reward"] == sum(sample["parts"].values()) for sample in samples)


def test_several_responses_to_a_test_problem_give_pass_at_k(trained):
    """And of the test's responses the first to each problem is kept."""
    lines = (trained["reinforce pass"] / "metrics.jsonl").read_text().splitlines()
    for row in (json.loads(lines[0]), json.loads(lines[-1])):
        assert row["eval/pass@1"] == pytest.approx(row["eval/accuracy"])
        assert 0 <= row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@3"] <= 1
    kept = [json.loads(line) for line in (trained["reinforce pass"] / "test_samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["id"]) for row in kept] == [(step, i) for step in (0, 2) for i in range(4)]


def test_a_run_of_dapo_in_which_no_group_is_ever_kept(trained):
    """Steps are counted and logged, the weights stay as they are."""
    for row in metrics(trained["dapo nothing"]):
        assert (row["groups_sampled"], row["groups_dropped"], row["groups_kept"]) == (8, 8, 0)
        assert [row[key] for key in ("reward", "zero_std_rate", "optimizer_steps", "weights_changed")] == [0, 1, 0, 0]
        assert [row[key] for key in ("entropy", "kl", "sampler_gap")] == [None] * 3
        assert row["tokens"] > 0 and row["overlong_penalty"] < 0
    last = trained["dapo nothing"] / "checkpoints/step_000002"
    assert json.loads((last / "trainer_state.json").read_text()) == {"step": 2, "n_used": 16}
    after, before = load_file(last / "model.safetensors"), load_file(KK_TINY / "model.safetensors")
    assert all((after[key] == before[key]).all() for key in before)


def test_responses_are_cut_off_and_counted(trained):
    """Also: no KL term and no reference, groups of one, 16 updates a step, sampled tests, each step saved."""
    folder = trained["grpo_ar_lopti cut"]
    for row in metrics(folder):
        assert row["truncated_rate"] == 1 and row["response_tokens"] == 3 and row["kl"] is None
        assert row["zero_std_rate"] == 1 and row["sampler_gap"] < 1e-3 and row["optimizer_steps"] >= 16
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]


# ------------------------------------------------------------------------------------------------------- fingerprint


holds_here = KEPT["holds_for"] == fingerprint.holds_for()


@pytest.mark.skipif(not holds_here, reason="the fingerprint was kept on another processor or with other libraries")
def test_no_digit_has_moved(trained):
    """An entry of each script; `python tools/fingerprint.py` runs the others too, and --renew keeps new numbers."""
    found = {script: fingerprint.numbers_of(trained[script]) for script in SCRIPTS}
    kept = {script: KEPT["metrics"][script] for script in SCRIPTS}
    assert fingerprint.differences(kept, found) == []


def test_every_script_has_an_entry_that_is_kept():
    assert {words.split()[0] for words in fingerprint.ENTRIES.values()} == set(SCRIPTS)
    assert KEPT["metrics"].keys() == fingerprint.ENTRIES.keys()
    for rows in KEPT["metrics"].values():
        assert [row["step"] for row in rows] == [1, 2]
        assert "grad_norm" in rows[1] and "eval/accuracy" in rows[1]
        assert not any(key.startswith(fingerprint.CHANGES) for row in rows for key in row)


def test_differences_name_the_entry_the_step_and_the_number():
    kept = {"a": [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0, "y": 3}], "b": [{"step": 0}]}
    assert fingerprint.differences(kept, json.loads(json.dumps(kept))) == []
    found = {"a": [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0000000000000004}]}
    assert fingerprint.differences(kept, found) == [
        "a, step 1, x: 2.0 -> 2.0000000000000004", "a, step 1, y: 3 -> None", "b: only kept",
    ]  # fmt: skip
    assert fingerprint.differences(kept, {"a": kept["a"][:1], "b": kept["b"]}) == ["a: 2 rows -> 1"]


@pytest.mark.parametrize("flags", [[], ["--renew"]])
def test_a_wrong_request_ends_before_anything_runs(flags):
    done = python("tools/fingerprint.py", *flags, "--only", "nothing")
    assert done.returncode == 2 and done.stderr.startswith("error: --") and not done.stdout


def test_numbers_of_one_entry_are_renewed_and_the_others_stay(tmp_path, monkeypatch, capsys):
    """As after a new script, which has none yet."""
    path = tmp_path / "kept.json"
    monkeypatch.setattr(fingerprint, "KEPT", path)
    monkeypatch.setattr(fingerprint, "measure", lambda only: {"dapo": [{"step": 0}]})
    of_grpo = [{"step": 0, "x": 1}]
    path.write_text(json.dumps({"holds_for": fingerprint.holds_for(), "metrics": {"grpo": of_grpo}}))
    with pytest.raises(SystemExit) as ended:
        fingerprint.main(fingerprint.Args(only=["dapo"]))
    assert ended.value.code == 2 and f"{path} has no numbers of dapo: " in capsys.readouterr().err
    fingerprint.main(fingerprint.Args(renew=True, only=["dapo"]))
    assert json.loads(path.read_text())["metrics"] == {"grpo": of_grpo, "dapo": [{"step": 0}]}
    path.write_text(json.dumps({"holds_for": {"processor": "another"}, "metrics": {}}))
    with pytest.raises(SystemExit) as ended:
        fingerprint.main(fingerprint.Args(renew=True, only=["dapo"]))
    assert ended.value.code == 2 and f"{path} holds for " in capsys.readouterr().err

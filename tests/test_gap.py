"""A run whose sampler computes another model than the trainer ends. The rule itself is in test_runtime.py."""

import os
from pathlib import Path

import pytest
from conftest import KK_TINY, ROOT, metrics, python, run, small

from course import capstone


@pytest.mark.slow
def test_a_run_whose_sampler_gets_no_weights_ends(tmp_path):
    """grpo.py without the sync after an update: step 2 shows it."""
    script = tmp_path / "grpo.py"
    script.write_text(capstone.changed((ROOT / "grpo.py").read_text(), capstone.CHANGES[0]))
    ended = run(script, *small(tmp_path / "run", steps=9, dtype="float32", lr=1e-3), check=False)
    assert ended.returncode == 1 and "error: sampler_gap jumped from" in ended.stderr.splitlines()[-1]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "grpo_stale", "grpo_async", "sft"])
def test_a_policy_with_other_logits_ends_before_the_first_step(script, tmp_path):
    """The log-probabilities of transformers and, in all but sft.py, of vLLM differ from its own."""
    changed = tmp_path / f"{script}.py"
    mistake = "logits = 1.1 * passes.logits(self.lm, states)"
    changed.write_text((ROOT / f"{script}.py").read_text().replace("logits = passes.logits(self.lm, states)", mistake))
    flags = ["--model", KK_TINY, "--run_dir", tmp_path / "run", "--dtype", "float32", "--eval_size", 4]
    # Not by run: a process of pytest's would wait for grpo_async.py's sampler, which waits for its trainer.
    ended = python(changed, *flags, env=os.environ | {"PYTHONPATH": str(ROOT)})
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and line.startswith("error: ") and "nats from transformers" in line, line
    assert ("nats from vLLM" in line) == (script != "sft")
    assert not Path(tmp_path, "run", "metrics.jsonl").exists()

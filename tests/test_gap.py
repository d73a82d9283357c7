"""A run whose sampler computes another model than the trainer ends. The rule itself is in test_runtime.py. And
--sampler_dtype makes a gap on purpose.
"""

import os
from pathlib import Path

import pytest
import torch
from conftest import KK_TINY, ROOT, metrics, python, run, small
from helpers import arguments, distance

import grpo
import grpo_async
import grpo_stale
from course import capstone
from runtime import sampler

# How far a row's rounded numbers are off by, at most: a share of the row's largest number, or of the number itself.
ERRORS = {"int8": lambda row: row.abs().amax(-1, keepdim=True) / 254, "fp8": lambda row: row.abs() / 16}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(("trainer", "rank"), [(grpo, 0), (grpo, 3), (grpo_stale, 3), (grpo_async, 0)])
@pytest.mark.usefixtures("on_the_cpu")
def test_the_sampler_gets_weights_of_8_bits_and_the_trainer_keeps_its_own(trainer, rank, kind, monkeypatch):
    """Rounded: the layers' matrices, with at most 256 values in a row. As they are: embedding (= head) and norms."""

    def sent(sampler_dtype):
        found = {}
        monkeypatch.setattr(sampler, "load_weights", lambda llm, named: found.update(named))
        args = arguments(trainer, model=str(KK_TINY), lora_rank=rank, sampler_dtype=sampler_dtype)
        policy = trainer.load_policy(args, trained=True)
        before = {name: weight.clone() for name, weight in policy.state_dict().items()}
        if trainer is grpo:
            grpo.sync_weights(policy, None, args)
        else:
            trainer.sync_weights(trainer.snapshot(policy, args), None)
        assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
        return found

    exact, rounded = sent(""), sent(kind)
    assert exact.keys() == rounded.keys() and len(exact) > 20
    for name, weight in exact.items():
        error = (rounded[name].double() - weight.double()).abs()
        if not name.endswith("_proj.weight"):
            assert not error.any(), name
            continue
        assert (error <= 1.001 * ERRORS[kind](weight.double()) + weight.abs().amax() / 2**15).all(), name
        assert 1e-3 < distance(rounded[name], weight) < 0.05 and len(rounded[name][0].unique()) <= 255, name


def test_a_sampler_of_8_bits_makes_a_gap_and_weights_for_tis(tmp_path):
    """Without it the gap is below 1e-5 in float32. Sampler and trainer are still checked against each other exactly."""
    flags = small(tmp_path / "run", steps=2, dtype="float32", sampler_dtype="fp8", lr=1e-3)
    said = run("grpo_tis.py", *flags).stdout
    for row in metrics(tmp_path / "run"):
        assert 1e-3 < row["sampler_gap"] < 0.1 and 1e-5 < abs(row["correction_mean"] - 1) < 0.1
    assert "warning: sampler_gap" not in said


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
    mistake = "logits = 1.1 * models.logits(self.lm, states)"
    changed.write_text((ROOT / f"{script}.py").read_text().replace("logits = models.logits(self.lm, states)", mistake))
    flags = ["--model", KK_TINY, "--run_dir", tmp_path / "run", "--dtype", "float32", "--eval_size", 4]
    # Not by run: a process of pytest's would wait for grpo_async.py's sampler, which waits for its trainer.
    ended = python(changed, *flags, env=os.environ | {"PYTHONPATH": str(ROOT)})
    line = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and line.startswith("error: ") and "nats from transformers" in line, line
    assert ("nats from vLLM" in line) == (script != "sft")
    assert not Path(tmp_path, "run", "metrics.jsonl").exists()

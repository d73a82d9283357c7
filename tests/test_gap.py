"""tools/gap.py: which side is wrong if sampler_gap is large. The rule that ends a run is in test_runtime.py."""

import math

import pytest
from conftest import ROOT, metrics, python, run, small

from course import capstone
from tools import gap


@pytest.mark.parametrize(
    "of_update, of_sleep, says",
    [
        ((0.003, 0.003), (0.004, 0.003), ""),
        ((0.9, 0.003), (0.9, 0.003), "the sampler is wrong after its first update"),
        ((0.003, 0.003), (math.nan, 0.003), "the sampler is wrong after sleep"),
        ((0.003, 0.5), (0.003, 0.5), "the trainer is wrong"),
    ],
)
def test_who_is_far_from_the_judge_is_wrong(of_update, of_sleep, says):
    stages = [dict(zip(("sampler, judge", "trainer, judge"), distances)) for distances in (of_update, of_sleep)]
    assert gap.verdict(stages, 0.01).startswith(says)
    assert bool(gap.verdict(stages, 0.01)) == bool(says)


FAULTS = """
import sys
from pathlib import Path
import grpo
from tools import gap
fault, run = sys.argv[1:]
if fault == "lost":
    grpo.sync_weights = lambda policy, llm, args: None
if fault == "scaled":
    head = grpo.Policy.head
    grpo.Policy.head = lambda self, states, *rest: head(self, 2 * states, *rest)
gap.main(Path(run))
"""


@pytest.mark.slow
def test_a_run_whose_sampler_gets_no_weights_ends_and_the_side_is_found(tmp_path):
    """grpo.py without the sync after an update: step 2 shows it. Then the tool, with that fault, another, and none."""
    script = tmp_path / "grpo.py"
    script.write_text(capstone.changed((ROOT / "grpo.py").read_text(), capstone.CHANGES[0]))
    flags = small(tmp_path / "run", steps=9, dtype="float32", lr=1e-3)
    ended = run(script, *flags, check=False)
    assert ended.returncode == 1 and "error: sampler_gap jumped from" in ended.stderr.splitlines()[-1]
    assert f"python tools/gap.py {tmp_path / 'run'}" in ended.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]

    for fault, code, says in (
        ("lost", 1, "the sampler is wrong after its first update"),
        ("scaled", 1, "the trainer is wrong"),
        ("none", 0, "nothing is wrong"),
    ):
        done = python("-c", FAULTS, fault, tmp_path / "run")
        assert done.returncode == code and says in done.stdout, done.stdout + done.stderr[-3000:]

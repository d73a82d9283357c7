"""lab/two_tasks.py: on two tokens worked by hand, on made-up batches, and with a real model."""

import json
import math

import pytest
from conftest import KK_TINY, run
from test_lab import A, of_lab, two_tokens

from lab import common, two_tasks

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("with_rewards", [True, False])
def test_two_tokens_by_hand(with_rewards):
    """∇ log π with respect to the layer is (1 − π) · (1, −1) ⊗ state, of length √2 · (1 − π)."""
    policy, sampled = two_tokens(overlap=0.6)
    args = of_lab(two_tasks)
    found = two_tasks.measure(policy, sampled, args, with_rewards)
    size = math.sqrt(2) / 2 * (A if with_rewards else 1.0)  # a mean over two tokens
    assert found["tokens"] == 2 and found["share"] == [0.5, 0, 0, 0.5]
    assert found["norm"] == pytest.approx([0.9 * size, 0, 0, 0.1 * size], abs=1e-9)
    assert found["norm_share"] == pytest.approx([0.9, 0, 0, 0.1])
    assert found["right"] == 0.5


def test_a_quick_run_of_two_tasks(tmp_path):
    """kk_tiny can't read Countdown's prompts, but its tokens have probabilities all the same."""
    folders = ["--out", tmp_path, "--cache", tmp_path / "cache"]
    done = run("lab/two_tasks.py", "--quick", "--model", KK_TINY, *folders)
    result = json.loads((tmp_path / "two_tasks.json").read_text())
    [batch] = result["batches"]
    assert list(batch) == result["tasks"] == ["kk", "countdown"]
    for found in batch.values():
        assert sum(found["share"]) == pytest.approx(1, abs=1e-4)
        assert all(norm > 0 for norm in found["norm"])
    assert result["advantages"] == "1"  # it is never right on Countdown
    assert (tmp_path / "two_tasks.png").stat().st_size > 20_000
    assert done.stdout.count("TOO FEW RUNS TO TELL: ") == 2
    kept = sorted(path.name.split("_")[-2] for path in (tmp_path / "cache").glob("batch_*"))
    assert kept == ["2-3", "countdown"]
    assert common.TASKS == ("kk", "math", "countdown", "hitab", "gym")

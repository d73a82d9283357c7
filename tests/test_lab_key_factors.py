"""Principal angles and gradients of lab/key_factors.py, on cases worked by hand in Python's floats."""

import math

import pytest
import torch
from lab_cases import A, of_lab, sampled_of, two_tokens

from lab import common, key_factors

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def angles_of(some, others, k):
    return key_factors.principal_angles(key_factors.right_vectors(some), key_factors.right_vectors(others), k).tolist()


# --------------------------------------------------------------------------------------- principal angles


def test_two_planes_share_a_line():
    """The planes of x, y and of x, (y + z): 0° and 45°."""
    first = matrix([3.0, 0, 0], [0, 2, 0])
    second = matrix([1.0, 0, 0], [0, 1, 1])
    assert angles_of(first, second, 2) == pytest.approx([0, 45], abs=1e-5)
    assert angles_of(first, second, 128) == pytest.approx([0, 45], abs=1e-5)  # the rank is 2


# ------------------------------------------------------------------------------- gradients of some tokens


def quick_args(**changes):
    return of_lab(key_factors, updates=2, **changes)


@pytest.mark.parametrize("overlap", [0.0, 0.6])
def test_subsets_of_two_tokens(overlap):
    """A token with π 0.1 and A > 0, one with π 0.9 and A < 0; each is half of the tokens."""
    policy, sampled = two_tokens(overlap)
    sampled.batch["entropy"][0, 1] = 2.0  # of the improbable one
    whole, parts = key_factors.subsets_of(policy, sampled, quick_args())
    assert list(parts) == list(key_factors.SUBSETS)
    found = key_factors.compare_subsets(key_factors.Gradient(whole, 1), parts, 1)
    low, high = A * math.sqrt(2) * 0.9 / 2, A * math.sqrt(2) * 0.1 / 2
    size = math.sqrt(low**2 + high**2 - 2 * low * high * overlap)
    # The gradient is (1, −1) ⊗ (a sum of states): its right singular vector is that sum.
    to_low = math.degrees(math.acos((low - high * overlap) / size))
    to_high = math.degrees(math.acos((high - low * overlap) / size))
    to_high = min(to_high, 180 - to_high)  # a subspace has no sign
    for name in ("p < 0.2", "A > 0", "top entropy"):
        assert found[name]["norm_of_part"] == pytest.approx(low / size)
        assert found[name]["norm"] == pytest.approx(2 * low / size)
        assert found[name]["angle"] == pytest.approx(to_low, abs=1e-4)
        assert found[name]["share"] == 0.5
    for name in ("p > 0.8", "A < 0"):
        assert found[name]["norm"] == pytest.approx(2 * high / size)
        assert found[name]["angle"] == pytest.approx(to_high, abs=1e-4)


def test_the_gradients_of_both_signs_add_up_to_the_whole(drawn):
    policy, sampled = drawn[1], sampled_of(drawn, [1.0, -1.0, 0.5])
    args = quick_args(prompts=8, responses=3)
    whole, parts = key_factors.subsets_of(policy, sampled, args)
    both = common.add([parts["A > 0"][0], parts["A < 0"][0]])
    difference = [a - b for a, b in zip(both, whole)]
    assert common.norm(difference) < 1e-5 * common.norm(whole)
    assert parts["A > 0"][1] + parts["A < 0"][1] == pytest.approx(1)
    assert 0.2 <= parts["top entropy"][1] < 0.25
    assert common.norm(parts["top entropy"][0]) > 0

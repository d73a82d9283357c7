"""Principal angles and gradients of lab/key_factors.py, on cases worked by hand.

What is worked out by hand is Python's float arithmetic, never the trainers' own formula.
"""

import math

import pytest
import torch
from test_lab import A, batch_of, drawn, of_lab, script_args, two_tokens, words_on

import grpo
from lab import common, key_factors

SHARED = drawn  # a fixture of test_lab.py, which pytest finds by its name here
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def angles_of(some, others, k):
    return key_factors.principal_angles(key_factors.right_vectors(some), key_factors.right_vectors(others), k).tolist()


def line(degrees):
    return matrix([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])


# --------------------------------------------------------------------------------------- principal angles


def test_two_planes_share_a_line():
    """The planes of x, y and of x, (y + z): 0° and 45°."""
    first = matrix([3.0, 0, 0], [0, 2, 0])
    second = matrix([1.0, 0, 0], [0, 1, 1])
    assert angles_of(first, second, 2) == pytest.approx([0, 45], abs=1e-5)
    assert angles_of(first, second, 128) == pytest.approx([0, 45], abs=1e-5)  # the rank is 2


def test_the_largest_singular_values_come_first():
    """One direction of each: that of y in the first matrix, that of x in the second."""
    first = matrix([1.0, 0, 0], [0, 2, 0])
    second = matrix([3.0, 0, 0], [0, 2, 0])
    assert angles_of(first, second, 1) == pytest.approx([90], abs=1e-5)
    assert angles_of(first, second, 2) == pytest.approx([0, 0], abs=1e-5)


def test_right_vectors_belong_to_columns_not_to_rows():
    """The rows are mixed by another matrix, which changes left vectors and singular values only."""
    rows = matrix([1.0, 0, 0, 0], [0, 1, 0, 0])
    mixed = matrix([2.0, 1], [0, 1], [5, 3]) @ rows
    assert key_factors.right_vectors(mixed).shape == (4, 2)
    assert angles_of(rows, mixed, 2) == pytest.approx([0, 0], abs=1e-5)


def test_rounding_does_not_count_in_the_rank():
    exact = matrix([1.0, 2, 3]).T @ matrix([1.0, 1, 0])
    rounded = exact + 1e-9 * torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    assert key_factors.right_vectors(rounded).shape == (3, 1)
    nothing = key_factors.right_vectors(torch.zeros(3, 3))
    assert nothing.shape == (3, 0)
    assert key_factors.principal_angles(nothing, nothing, 2).tolist() == [90]


def test_a_comparison_by_hand():
    """Matrices at 30° and 90°, of norms 2 and 0 beside 1 and 1; vectors have no subspace."""
    some = key_factors.Gradient([2 * line(30), torch.zeros(1, 2), torch.tensor([2.0, 0])])
    others = key_factors.Gradient([line(0), line(0), torch.tensor([0.0, 1])])
    found = some.compare(others, 1)
    assert found["norm"] == pytest.approx(math.sqrt(8 / 3))
    assert found["angle"] == pytest.approx((30 + 90) / 2)
    assert found["angle_by_matrix"] == pytest.approx([30, 90])
    assert found["angle_with_k_128"] == pytest.approx((30 + 90) / 2)
    cosine = 2 * math.cos(math.radians(30)) / math.sqrt(8 * 3)
    assert found["angle_of_vectors"] == pytest.approx(math.degrees(math.acos(cosine)))


def test_chance_falls_with_k():
    """Two lines at random are at 57.3° on average if they are in a space of three dimensions."""
    policy = torch.nn.ParameterList([torch.zeros(2, 3) for _ in range(400)])
    assert key_factors.chance(policy, 1) == pytest.approx(math.degrees(1), abs=4)
    assert key_factors.chance(torch.nn.Linear(40, 40, bias=False), 40) < 0.01


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
    found = key_factors.compare_subsets(key_factors.Gradient(whole), parts, 1)
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


def of_model(drawn):
    """(the policy, a batch of its own responses as a Sampled, the lab's settings)."""
    batch, policy = drawn
    rows = len(batch["ids"])
    args = quick_args(prompts=rows // 3, responses=3)
    logp, entropy = grpo.log_probs(policy, batch, script_args("grpo", rows=rows))
    batch = batch | {"old_logp": logp, "ref_logp": logp, "entropy": entropy}
    rewards = torch.tensor([1.0, -1.0, 0.5] * (rows // 3))
    return policy, common.Sampled(batch, rewards, [], [], []), args


def test_the_gradients_of_both_signs_add_up_to_the_whole(drawn):
    policy, sampled, args = of_model(drawn)
    whole, parts = key_factors.subsets_of(policy, sampled, args)
    both = common.add([parts["A > 0"][0], parts["A < 0"][0]])
    difference = [a - b for a, b in zip(both, whole)]
    assert common.norm(difference) < 1e-5 * common.norm(whole)
    assert parts["A > 0"][1] + parts["A < 0"][1] == pytest.approx(1)
    assert 0.2 <= parts["top entropy"][1] < 0.25
    assert common.norm(parts["top entropy"][0]) > 0


# -------------------------------------------------------------------------------- off-policy gradients


def moved_tokens(ratios):
    """two_tokens at right angles, whose π are ratio · π_old: π stays 0.1 and 0.9."""
    policy, sampled = two_tokens()
    logp = sampled.batch["old_logp"]
    for i, ratio in enumerate(ratios):
        logp[i, 1] -= math.log(ratio)
    return policy, sampled


def weights_of(method, ratios):
    """What a method makes of A · ∇log π of both tokens, their share in the batch left out."""
    policy, sampled = moved_tokens(ratios)
    gradient, _ = key_factors.off_policy_gradient(method, policy, sampled, quick_args())
    low, high = gradient[0][0].tolist()  # of the first word's weights, along each state
    return [-low / (A / 2 * 0.9), high / (A / 2 * 0.1)]


# The first token has A > 0 and π 0.1, the second A < 0 and π 0.9.
@pytest.mark.parametrize(
    ("method", "ratios", "expected"),
    [
        ("GRPO", (1.1, 1.5), (1.1, 1.5)),
        ("GRPO", (1.21, 0.79), (0, 0)),
        ("GRPO", (1e5, 0.99), (0, 0.99)),
        ("no clip", (1e5, 1e-3), (1e5, 1e-3)),
        ("no clip", (0.5, 1.5), (0.5, 1.5)),
        ("DAPO", (1.25, 0.81), (1.25, 0.81)),
        ("DAPO", (1.29, 0.79), (0, 0)),
        ("CISPO", (2.0, 0.5), (1.45, 0.5)),
        ("ACPO, α 0", (1.19, 0.81), (1.19, 0.81)),
        ("ACPO, α 0", (1.21, 0.79), (0, 0)),
        ("DPPO", (2.0, 0.9), (2.0, 0.9)),  # 0.05 → 0.1; 1 → 0.9
    ],
)
def test_weights_of_two_tokens(method, ratios, expected):
    assert weights_of(method, ratios) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_acpos_range_has_seen_that_the_policy_has_moved():
    """Three tokens in a bin have ρ 1, 1, 1.3: σ is 0.1414, so the range is 0.2 + 3 · 0.1414 = 0.62.

    At the first update of a step the range would be 0.2, and the third token's weight 0.
    """
    batch, _ = batch_of([[{"p": 0.1}, {"p": 0.1}, {"p": 0.1 / 1.3}], [{"p": 0.9}]])
    policy, sampled = two_tokens()
    batch["ids"] = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]])
    sampled = common.Sampled(batch, sampled.rewards, [], [], [])
    before = common.copy_weights(policy)
    gradient, _ = key_factors.off_policy_gradient("ACPO", policy, sampled, quick_args())
    pushes = A * 0.9 * (1 + 1 + 1.3) / 3 / 2
    assert -gradient[0][0, 0].item() == pytest.approx(pushes, rel=1e-5)
    assert torch.equal(policy.weight, before[0])


def test_the_policy_is_moved_by_all_updates_but_the_last():
    """The second of two rows, which is the second update's, is not seen. AdamW moves by its lr."""
    policy, sampled = two_tokens()
    batch = {name: torch.cat([value, value]) for name, value in sampled.batch.items()}
    batch["ids"][2:] = torch.tensor([[0, 1], [0, 1]])
    sampled = common.Sampled(batch, torch.tensor([3.0, 3.0, 3.0, -1.0]), [], [], [])
    before = common.copy_weights(policy)
    args = quick_args(prompts=2, lr=1e-2)
    key_factors.move(policy, sampled, args)
    assert (policy.weight - before[0]).abs().max() < 2e-4  # weight decay alone: 1e-2 · 0.01 · 1.1
    sampled.rewards = torch.tensor([3.0, -1.0, 3.0, 3.0])
    key_factors.move(policy, sampled, args)
    assert (policy.weight - before[0]).abs().max().item() == pytest.approx(1e-2, rel=0.05)


def test_one_batch_leaves_the_policy_as_it_was(drawn):
    policy, sampled, args = of_model(drawn)
    before = common.copy_weights(policy)
    args.prompts, args.updates = 8, 4
    found = key_factors.measure(policy, before, sampled, sampled, 8, args)
    assert all(torch.equal(a, b) for a, b in zip(before, common.copy_weights(policy)))
    of_all = found["off_policy"]
    assert set(of_all) == set(key_factors.REFERENCES)
    for reference in key_factors.REFERENCES:
        same = of_all[reference][reference]
        assert same["norm"] == 1 and same["angle"] < 0.01 and same["angle_of_vectors"] < 0.01
    assert of_all["on-policy"]["other batch"]["angle"] < 0.01  # here it is the same batch
    assert of_all["GRPO"]["on-policy"]["angle"] == pytest.approx(of_all["on-policy"]["GRPO"]["angle"], abs=1e-3)
    assert of_all["GRPO"]["on-policy"]["angle"] > 0.1
    assert found["ratio"]["mean_distance_from_1"] > 0


# ------------------------------------------------------------------------------------ verdicts, settings


def row_of(subsets, methods):
    """A batch's numbers from {name: (norm, angle)}, the same for all references."""
    tree = {name: {"norm": norm, "angle": angle} for name, (norm, angle) in methods.items()}
    return {
        "subsets": {name: {"norm": n, "angle": a} for name, (n, a) in subsets.items()},
        "off_policy": {reference: tree for reference in key_factors.REFERENCES},
    }


AS_IN_THE_PAPER = (
    {"p < 0.2": (4.09, 27.8), "p > 0.8": (0.5, 42.8), "top entropy": (3.4, 44.2), "A > 0": (1.22, 40.5),
     "A < 0": (0.92, 28.0)},
    {"GRPO": (1.0, 47.4), "on-policy": (0.98, 47.4), "on-policy, moved": (0.98, 47.4), "no clip": (201.77, 50.7),
     "DAPO": (1.0, 1.3), "CISPO": (32.68, 49.7), "ACPO": (1.0, 30.0), "DPPO": (1.0, 30.0)},
)  # fmt: skip


def test_verdicts_agree_with_the_papers_own_numbers_and_can_say_no(tmp_path):
    def words(*rows):
        return words_on("key_factors", tmp_path, rows)

    paper = row_of(*AS_IN_THE_PAPER)
    assert set(words(paper, paper, paper)) == {"shows"}
    assert set(words(paper, paper)) == {"too few runs to tell"}
    subsets, methods = AS_IN_THE_PAPER
    opposite = {"p < 0.2": (0.5, 44), "p > 0.8": (2, 30), "top entropy": (0.9, 40), "A > 0": (3, 10), "A < 0": (1, 20)}
    alike = {name: (2.0 if name == "on-policy" else 1.0, 10.0) for name in methods}
    no = row_of(opposite, alike)
    assert set(words(no, no, no)) == {"the opposite", "no effect of that size"}
    varying = [row_of(subsets, methods | {"no clip": (norm, 42.0)}) for norm in (1.0, 2.0, 14.0)]
    assert words(*varying)[7] == "too few runs to tell"  # 5.7 ± 4.2 times GRPO's norm

"""DAPO: which groups are kept, how they are dealt out to updates and processes, and the penalty.

What is sampled, and the rule that scores it, are made up here, so that it is known which groups are mixed.
"""

import math

import pytest
import torch
from conftest import answer, step_of_main, timeless
from helpers import GROUP, arguments, distance, gradients

import dapo
import grpo
from runtime import batches, metrics

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# (tokens, B, penalty) with L 20480; B is 4096 by default, a fifth
PENALTIES = [
    (1, 4096, 0), (16383, 4096, 0), (16384, 4096, 0), (16385, 4096, -1 / 4096), (18432, 4096, -0.5),
    (20479, 4096, -4095 / 4096), (20480, 4096, -1), (20480, None, -1), (16384, None, 0), (17408, None, -0.25),
    (1, 0, 0), (20480, 0, 0),  # no shaping
    (1, 20480, -1 / 20480), (20480, 20480, -1),  # the buffer is all there is
    (20479, 1, 0), (20480, 1, -1),
]  # fmt: skip


def test_the_penalty_by_hand():
    for n_tokens, buffer, penalty in PENALTIES:
        args = dapo.Args(max_response_tokens=20480, overlong_buffer=buffer)
        assert dapo.overlong_penalty(n_tokens, args) == penalty, (n_tokens, buffer)
    assert dapo.overlong_penalty(4, dapo.Args(max_response_tokens=4)) == 0  # a fifth, rounded down, is 0


def kept_of(rewards, lengths=None, size=3):
    """(rows, rewards with penalties) of the groups that dynamic_sampling keeps; a row's ids are its number.

    lengths: of the responses; with L 8 and B 4 the penalty is 0 up to 4 tokens, and −1/4 for each one more.
    """
    n = len(rewards)
    ids = torch.arange(n)[:, None].repeat(1, 9)
    lengths = torch.tensor(lengths or [4] * n)
    sampled = {"ids": ids, "mask": (torch.arange(9) > 0) & (torch.arange(9) <= lengths[:, None])}
    scores = [{"reward": reward, "correct": True, "format": True} for reward in rewards]
    args = dapo.Args(
        prompts_per_step=n // size, responses_per_prompt=size, updates_per_step=1, max_refills=0,
        max_response_tokens=8, overlong_buffer=4,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dapo, "next_problems", lambda train, num_used, args: ([{}] * n, num_used + n // size))
        patch.setattr(dapo, "sample", lambda *_: (sampled, [answer() for _ in rewards]))
        patch.setattr(dapo, "score", lambda *_: scores)
        found = dapo.dynamic_sampling(None, None, [], 5, 1, metrics.Clock(), args)
    batch, responses, problems, scores, num_used, of_groups = found
    assert set(batch) == {"ids", "mask", "scores"} and len(batch["scores"]) == n
    assert len(responses) == len(problems) == len(scores) == n and num_used == 5 + n // size
    groups = []
    for rows in torch.arange(n).split(size):
        there = batch["mask"][rows].any(1)
        assert there.all() or not there.any()
        if there.all():
            groups.append((batch["ids"][rows, 0].tolist(), [batch["scores"][i]["reward"] for i in rows]))
    dropped = n // size - len(groups)
    assert of_groups == {"groups_sampled": n // size, "groups_dropped": dropped, "groups_kept": len(groups)}
    return groups


def test_groups_of_equal_rewards_are_dropped_whatever_the_reward():
    rewards = [*[3, 3, 3], *[-0.5, 3, -0.5], *[-3, -3, -3], *[0.7, 0.7, 0.7], *[-1, -1, -3]]
    assert kept_of(rewards) == [([3, 4, 5], [-0.5, 3, -0.5]), ([12, 13, 14], [-1, -1, -3])]
    assert kept_of([0.0] * 6) == []
    assert kept_of([1, 0, 1], size=1) == [([0], [1]), ([1], [0]), ([2], [1])]  # groups of one are kept


def test_the_penalty_is_added_to_the_reward_and_decides_on_no_group():
    """Of three right answers one is overlong: dropped. Where the sums happen to be equal, but not the rewards: kept."""
    assert kept_of([1, 1, 1, 1, 0, 0], [4, 6, 8, 8, 4, 5]) == [([3, 4, 5], [0, 0, -0.25])]


def test_truncated_responses_leave_the_loss_and_not_the_group(monkeypatch):
    """Their tokens are no longer in the mask; rewards and penalties stay. By default all tokens are in the mask."""
    mask = torch.arange(9) < torch.tensor([[4], [9], [9], [5]])
    responses = [answer(finish_reason=reason) for reason in ("stop", "length", "length", "stop")]
    scores = [{"reward": reward} for reward in (1.0, 0.0, 1.0, 0.0)]
    monkeypatch.setattr(dapo, "next_problems", lambda train, num_used, args: ([{}] * 4, 2))
    monkeypatch.setattr(dapo, "sample", lambda *_: ({"ids": mask.long(), "mask": mask.clone()}, responses))
    monkeypatch.setattr(dapo, "score", lambda *_: scores)
    shape = {"prompts_per_step": 2, "responses_per_prompt": 2, "updates_per_step": 1, "max_refills": 0}
    kept = {}
    for flag in (False, True):
        args = dapo.Args(**shape, max_response_tokens=9, overlong_buffer=4, mask_truncated=flag)
        kept[flag], *_ = dapo.dynamic_sampling(None, None, [], 0, 1, metrics.Clock(), args)
    assert kept[False]["mask"].sum(1).tolist() == [4, 9, 9, 5] and kept[True]["mask"].sum(1).tolist() == [4, 0, 0, 5]
    found = [[one["reward"] for one in kept[flag]["scores"]] for flag in (False, True)]
    assert found == [[1, -1, 0, 0]] * 2


@pytest.mark.parametrize(("mixed", "kept"), [({0, 1, 3, 4}, [0, 1, 3]), ({0, 1, 4}, [0, 1, 4])])
def test_each_refill_has_seeds_of_its_own_and_enough_groups_end_it(mixed, kept, monkeypatch):
    """Three prompts a round: after the second one there are one group too many, and exactly enough."""
    args = dapo.Args(prompts_per_step=3, responses_per_prompt=2, updates_per_step=3, max_refills=5)

    def sample(llm, problems, when, args):
        ids = torch.tensor([p["id"] for p in problems])[:, None].repeat(1, 3)
        return {"ids": ids, "mask": torch.tensor([[False, True, True]] * 6)}, [answer(2, str(when)) for _ in problems]

    def score(task, responses, problems):
        return [{"reward": float(p["id"] in mixed and i % 2)} for i, p in enumerate(problems)]

    monkeypatch.setattr(dapo, "sample", sample)
    monkeypatch.setattr(dapo, "score", score)
    monkeypatch.setattr(batches, "next_prompts", lambda n, used, count, seed: (range(used, used + count), used + count))
    train = [{"id": i} for i in range(12)]
    watch = metrics.Clock()
    found = dapo.dynamic_sampling(None, None, train, 0, 7, watch, args)
    batch, responses, problems, scores, num_used, of_groups = found
    assert [response.text for response in responses] == ["7"] * 6 + ["7+3"] * 6
    assert [problem["id"] for problem in problems] == [i // 2 for i in range(12)]
    assert [score["reward"] for score in scores] == [float(i // 2 in mixed and i % 2) for i in range(12)]
    assert num_used == 6 and watch.seconds.keys() == {"time/sample", "time/score"}
    assert of_groups == {"groups_sampled": 6, "groups_dropped": 6 - len(mixed), "groups_kept": 3}
    assert batch["ids"][:, 0].tolist() == [i for i in kept for _ in range(2)]


def test_groups_of_all_processes_come_in_the_order_of_their_prompts(monkeypatch):
    """Prompts are dealt out in turn: process 0 has the first and the third, process 1 the second and the fourth."""
    sent = []

    def gather(mine):
        sent.append(mine)
        return [item for part in sent for item in part]

    monkeypatch.setattr(dapo, "gather", gather)
    for rank in range(2):
        monkeypatch.setattr(dapo, "RANK", rank)
        batch = {"ids": torch.tensor([[rank], [rank], [2 + rank], [2 + rank]])}
        found = dapo.gather_groups(batch, [True, True])
    assert [group["ids"].flatten().tolist() for group in found] == [[0, 0], [1, 1], [2, 2], [3, 3]]


def group_of(number, size=2, length=5):
    """A group whose rows have the number as every id, of two response tokens."""
    ids = torch.full((size, length), number)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, -2:] = True
    scores = [{"reward": number * 10 + i, "turns": [1]} for i in range(size)]
    return {"ids": ids, "mask": mask, "sampler_logp": -ids / 7, "scores": scores}


def dealt(numbers, n_updates, n_prompts, rank=0, n_processes=1):
    """The numbers of the groups in each update, None for those without tokens; the batch."""
    args = dapo.Args(prompts_per_step=n_prompts, updates_per_step=n_updates, responses_per_prompt=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dapo, "RANK", rank)
        patch.setattr(dapo, "WORLD_SIZE", n_processes)
        batch = dapo.deal_groups([group_of(number) for number in numbers], group_of(99), args)
    n_groups = n_prompts // n_processes
    assert len(batch["ids"]) == 2 * n_groups
    ids, mask = batch["ids"][:, 3].view(n_groups, 2), batch["mask"].any(1).view(n_groups, 2)
    assert torch.equal(ids[:, 0], ids[:, 1]) and torch.equal(mask[:, 0], mask[:, 1])
    numbers = [int(i) if there else None for i, there in zip(ids[:, 0], mask[:, 0])]
    each = n_groups // n_updates
    return [numbers[i * each : (i + 1) * each] for i in range(n_updates)], batch


@pytest.mark.parametrize("n_processes", [1, 2, 4])
@pytest.mark.parametrize("n_updates", [1, 2, 4])
def test_short_steps_are_spread_over_updates_and_processes(n_updates, n_processes):
    """In order, none lost, none twice, and into the same updates on any number of processes."""
    for n_groups in range(17):
        numbers = list(range(1, n_groups + 1))
        shares = [dealt(numbers, n_updates, 16, rank, n_processes)[0] for rank in range(n_processes)]
        of_updates = []
        for parts in zip(*shares):  # an update's, of each process
            of_processes = [[number for number in part if number] for part in parts]
            sizes = [len(part) for part in of_processes]
            assert max(sizes) - min(sizes) <= 1
            of_updates.append(sorted(number for part in of_processes for number in part))
        sizes = [len(part) for part in of_updates]
        assert max(sizes) - min(sizes) <= 1
        assert [number for part in of_updates for number in part] == numbers
        assert of_updates == [[n for n in part if n] for part in dealt(numbers, n_updates, 16)[0]]
    if n_updates == 2:  # a full step is dealt as in grpo.py: groups [RANK::WORLD_SIZE]
        assert shares[-1][0] == list(range(n_processes, 9, n_processes))


def test_groups_of_other_lengths_are_padded_on_the_right():
    args = dapo.Args(prompts_per_step=4, updates_per_step=2, responses_per_prompt=2)
    batch = dapo.deal_groups([group_of(1, length=3), group_of(2, length=6)], group_of(9, length=2), args)
    assert batch["ids"].tolist() == [*[[1, 1, 1, 0, 0, 0]] * 2, *[[0] * 6] * 2, *[[2] * 6] * 2, *[[0] * 6] * 2]
    one, two = [[0, 1, 1, 0, 0, 0]] * 2, [[0, 0, 0, 0, 1, 1]] * 2
    assert batch["mask"].tolist() == [*one, [0] * 6, [0] * 6, *two, [0] * 6, [0] * 6]
    torch.testing.assert_close(batch["sampler_logp"], -batch["ids"] / 7)
    # Groups without tokens have equal scores, so that they teach nothing in any script.
    assert [found["reward"] for found in batch["scores"]] == [10, 11, 90, 90, 20, 21, 90, 90]
    assert [len(found["turns"]) for found in batch["scores"]] == [1, 1, 0, 0, 1, 1, 0, 0]


def groups_in(batch, numbers):
    return [{key: value[i * GROUP : (i + 1) * GROUP] for key, value in batch.items()} for i in numbers]


@pytest.mark.parametrize(("kept", "n_updates", "parts"), [([5, 2, 7], 2, [[5, 2], [7]]), ([0, 3], 4, [[0], [3]])])
def test_a_short_steps_gradients_are_those_of_its_groups_alone(tiny_model, batch, kept, n_updates, parts):
    """Groups without tokens change neither the divisor nor the gradient, nor do they make an update."""
    args = arguments(dapo, model=str(tiny_model), micro_batch_tokens=300, updates_per_step=n_updates)
    mine, of_mine = gradients(dapo, dapo.deal_groups(groups_in(batch, kept), batch, args), args)
    assert len(mine) == len(parts) == of_mine["optimizer_steps"]
    for gradient, part in zip(mine, parts):
        rows = {key: torch.cat([group[key] for group in groups_in(batch, part)]) for key in batch}
        (alone,), _ = gradients(grpo, rows, arguments(model=str(tiny_model)))
        assert alone.norm() > 1e-3 and distance(gradient, alone) < 1e-5
    assert list(dapo.minibatches(dapo.deal_groups([], batch, args), n_updates)) == []


def test_metrics_are_over_all_responses_and_token_means_over_those_kept(monkeypatch):
    """Three groups of two; kept is the second: entropies 1, 2, 3 on its three response tokens, |gaps| 0.1, 0, 0.5.

    On the first of these the reference is log 2 above, on the others equal: k3 is (2 − log 2 − 1)/3.
    """
    rows = [  # reward, correct, format, tokens, truncated, penalty
        (3, True, True, 4, False, 0), (3, True, True, 8, False, -0.5), (3, True, True, 1, False, 0),
        (-3, False, False, 2, False, 0), (-1, False, False, 10, True, -1), (-1, False, False, 5, False, 0),
    ]  # fmt: skip
    scores = [{"reward": row[0], "correct": row[1], "format": row[2], "penalty": row[5]} for row in rows]
    responses = [answer(row[3], finish_reason="length" if row[4] else "stop") for row in rows]
    problems = [{"category": 2}] * 2 + [{"category": 3}] * 4
    mask = torch.tensor([[0, 1, 0], [0, 1, 1]], dtype=torch.bool)
    kept = {"ids": torch.zeros(2, 3), "mask": mask, "entropy": torch.tensor([[9.0, 1, 9], [9, 2, 3]])}
    kept |= {"old_logp": -torch.ones(2, 3), "ref_logp": torch.tensor([[-1, math.log(2) - 1, -1], [-1, -1, -1]])}
    kept["sampler_logp"] = torch.tensor([[9, -1.1, 9], [9, -1.0, -0.5]])
    sampled = {key: kept[key] for key in ("ids", "mask", "sampler_logp")}
    sampled["scores"] = [{"reward": 3.0}, {"reward": -3.0}]
    result = sampled, responses, problems, scores, 12, {"groups_kept": 1}
    monkeypatch.setattr(dapo, "dynamic_sampling", lambda *_: result)
    row, given = step_of_main(dapo, dapo.Args(responses_per_prompt=2, dtype="float32"), kept, [0] * 6, monkeypatch)
    size = 3 / (math.sqrt(18) + 1e-6)
    assert given["advantages"].tolist() == [[pytest.approx(a * size * x) for x in m] for a, m in zip((1, -1), mask)]
    assert "scores" not in given and type(row["tokens"]) is int
    row = {key: value for key, value in timeless(row).items() if key not in ("step", "weights_changed")}
    assert row == pytest.approx({
        "reward": 4 / 6, "reward_std": math.sqrt((3 * 9 + 9 + 1 + 1) / 6 - (4 / 6) ** 2), "accuracy": 0.5,
        "format_rate": 0.5, "response_tokens": 5.0, "truncated_rate": 1 / 6, "overlong_penalty": -0.25, "tokens": 30,
        "zero_std_rate": 2 / 3, "timed_out": 0, "accuracy_2": 1.0, "accuracy_3": 0.25, "groups_kept": 1,
        "entropy": 2.0, "kl": (1 - math.log(2)) / 3, "sampler_gap": 0.2,
    }, abs=1e-6)  # fmt: skip

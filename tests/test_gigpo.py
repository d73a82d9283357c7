"""gigpo.py: turns' advantages against a reference in float64, the states that a task says, and rewards per turn."""

import itertools
import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, answer, step_of_main
from helpers import arguments
from transformers import AutoTokenizer

import gigpo
import grpo_multi_turn
from rewards import TaskError, guess, own, parts_of, score, state, turn_rewards
from runtime import metrics

pytestmark = pytest.mark.usefixtures("on_the_cpu")
G = 3


def conversation(problem, states, lengths):
    turns = ["a"] * len(states)
    return SimpleNamespace(problem={"id": problem}, states=states, lengths=lengths, turns=turns, replies=turns[1:])


def drawn(seed):
    """(conversations about four problems with few states, scores with and without rewards per turn, a batch)."""
    rng = random.Random(seed)
    conversations, scores, rows = [], [], []
    for i in range(4 * G):
        n = rng.randint(1, 4)
        states = [rng.choice(["a", "b", (1, 2), f"alone {i}"]) for _ in range(n)]
        lengths = [rng.randint(1, 3) for _ in states]
        conversations.append(conversation(i // G, states, lengths))
        per_turn = [rng.choice([-1.0, 0.25, 2.0]) for _ in states]
        parts = {"moves": per_turn, "end": rng.choice([0.0, 3.0])} if i % 2 else {}
        turns = [(i // G, *turn) for turn in zip(states, lengths)]
        scores.append({"reward": sum(per_turn) + parts.get("end", 0.0), "parts": parts, "turns": turns})
        rows.append([(False, 2), *itertools.chain(*(((True, length), (False, 1)) for length in lengths))])
    longest = max(sum(length for _, length in row) for row in rows)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        flat = [is_own for is_own, length in row for _ in range(length)]
        mask[i, : len(flat)] = torch.tensor(flat)
    return conversations, scores, {"mask": mask}


def reference(conversations, scores, gamma, anchors, with_std):
    """[the A_turn of each turn] of each conversation, in Python floats, from the paper's eqs. 5 to 7."""
    turns = []
    for i, (one, found) in enumerate(zip(conversations, scores)):
        rewards = [0.0] * len(one.states)
        if found["parts"]:
            rewards = [*found["parts"]["moves"]]
            rewards[-1] += found["parts"]["end"]
        else:
            rewards[-1] = found["reward"]
        for k in range(len(rewards)):
            value = sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards)))
            turns.append((i, one.problem["id"], one.states[k], value))
    by_row = [[] for _ in conversations]
    for i, problem, begins, value in turns:
        same = [v for _, p, s, v in turns if s == begins and (anchors == "step" or p == problem)]
        std = statistics.stdev(same) + 1e-6 if with_std and len(same) > 1 else 1.0
        by_row[i].append((value - statistics.fmean(same)) / std)
    return by_row


@pytest.mark.parametrize("anchors", ["group", "step"])
@pytest.mark.parametrize("with_std", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_a_turns_advantage_is_its_return_normalised_over_equal_states(anchors, with_std, gamma):
    for seed in range(5):
        conversations, scores, batch = drawn(seed)
        args = arguments(gigpo, anchors=anchors, turn_std=with_std, gamma=gamma)
        found = gigpo.turn_advantages(scores, batch, args)
        shared = metrics.shared(gigpo.states_of(scores, args))
        expected = reference(conversations, scores, gamma, anchors, with_std)
        for row, mask, one, of_turns in zip(found, batch["mask"], conversations, expected):
            by_token = [a for a, length in zip(of_turns, one.lengths) for _ in range(length)]
            assert row[mask].tolist() == pytest.approx(by_token, rel=1e-6, abs=1e-6)
            assert not row[~mask].any()
        states = [(one.problem["id"] if anchors == "group" else 0, s) for one in conversations for s in one.states]
        assert shared == statistics.fmean(states.count(one) > 1 for one in states)


def test_equal_returns_and_a_turn_alone_in_its_state_have_advantage_zero_exactly():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    turns = [[(0, "a", 1)], [(0, "a", 2)], [(0, "b", 1), (0, "c", 1)]]
    scores = [{"reward": reward, "turns": of_one} for reward, of_one in zip((0.7, 0.7, 5.0), turns)]
    args = arguments(gigpo, gamma=0.7)
    assert not gigpo.turn_advantages(scores, {"mask": mask}, args).any()
    assert metrics.shared(gigpo.states_of(scores, args)) == 0.5


def test_states_are_compared_over_all_processes_and_groups_are_not(monkeypatch):
    """Four groups: in one process, and the last two in a process of their own."""
    _, scores, batch = drawn(7)
    half = {"mask": batch["mask"][2 * G :]}
    for anchors in ("step", "group"):
        args, every = arguments(gigpo, anchors=anchors), []
        monkeypatch.setattr(gigpo, "gather", lambda own, every=every: every.extend(own) or own)
        of_one = gigpo.turn_advantages(scores, batch, args)
        monkeypatch.setattr(gigpo, "gather", lambda own, every=every: every)
        found = gigpo.turn_advantages(scores[2 * G :], half, args)
        assert torch.equal(found, of_one[2 * G :]) and found.any()


def test_in_main_both_advantages_are_weighed_and_without_omega_it_is_its_parent(monkeypatch):
    """All turns of the step begin in the same state here, so A_turn over the step is not A_episode."""
    batch = {"mask": torch.ones(6, 2, dtype=torch.bool), "ids": torch.ones(6, 2, dtype=torch.long)}
    batch |= {name: torch.zeros(6, 2) for name in ("sampler_logp", "old_logp", "entropy", "ref_logp")}
    rewards = [1.0, 2.0, 6.0, 0.1, 0.1, 0.3]

    def given(trainer, **settings):
        args = arguments(trainer, responses_per_prompt=3, **settings)
        metrics, to_update = step_of_main(trainer, args, batch, rewards, monkeypatch)
        return to_update["advantages"], metrics

    parent, _ = given(grpo_multi_turn)
    off, metrics = given(gigpo, omega=0.0)
    assert torch.equal(off, parent) and parent.any() and metrics["shared_states"] == 1
    alone, _ = given(gigpo, episode_weight=0.0, anchors="step")
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert alone[:, 0].tolist() == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-5)
    both, _ = given(gigpo, omega=0.5, episode_weight=2.0, anchors="step")
    torch.testing.assert_close(both, 2 * parent + 0.5 * alone)


def test_a_turns_state_is_asked_for_before_it_and_its_length_is_kept(monkeypatch):
    """Games of guess in which the model says 8, then 12 and 14; the number is 15."""
    said = iter(["8"] * 2 + ["12"] * 2 + ["14"] * 2)

    def generate(prompts, params, **more):
        return [SimpleNamespace(outputs=[answer(2) for _ in range(one.n)]) for one in params]

    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    llm = SimpleNamespace(generate=generate, get_tokenizer=lambda: tokenizer)
    monkeypatch.setattr(gigpo.sampler, "empty_prefix_cache", lambda llm: None)
    monkeypatch.setattr(gigpo, "decode", lambda tokenizer, responses: [next(said) for _ in responses])
    args = arguments(gigpo, model=str(KK_TINY), max_turns=3)
    problem = {"id": 0, "answer": 15, "prompt_ids": [5]}
    found = gigpo.converse(llm, guess, [problem], 1, args, n=2, temperature=1.0)
    for one in found:
        assert one.states == [(1, 15), (9, 15), (13, 15)] and one.lengths == [2, 2, 2]


def test_what_a_player_of_guess_knows_and_its_rewards_per_turn():
    problem = {"answer": 6, "id": 3}
    for turns, known in (([], (1, 15)), (["8"], (1, 7)), (["8", "3"], (4, 7)), (["8", "3", "2"], (4, 7))):
        assert state(guess, turns, problem) == known
    assert guess.state(["no number"], problem) == (1, 15)
    won = guess.score_conversation(["8", "12", "6"], 6)  # 1 to 7 are left after 8: 12 reveals nothing
    first = (14 / 15) * math.log2(15 / 7) + (1 / 15) * math.log2(15)  # of log2(15) bits: 7 numbers are left, or 1
    last = (5 / 7) * math.log2(7 / 5) + (2 / 7) * math.log2(7)  # 1 to 5 are left, or 6, or 7
    bits = [2 * one / math.log2(15) for one in (first, 0, last)]
    assert won["parts"] == {"won": 0.8, "bits": pytest.approx(bits)}
    assert turn_rewards(won, 3) == pytest.approx([bits[0], 0, 0.8 + bits[2]])
    lucky = guess.score_conversation(["8"], 8)
    assert turn_rewards(lucky, 1) == pytest.approx([1 + bits[0]])  # the guess alone decides its bits, not the reply


def test_rewards_per_turn_add_up_to_the_reward_and_parts_are_logged_as_sums():
    task = SimpleNamespace(score_conversation=lambda turns, answer: {
        "reward": 4, "correct": True, "format": True, "parts": {"a": [1.0, 0.5], "b": 2.0}})  # fmt: skip
    response = SimpleNamespace(turns=["x", "y"], text="y", states=["s", "t"], lengths=[3, 4])
    [found] = score(task, [response], [{"answer": 0, "id": 7}])
    assert found["turns"] == [(7, "s", 3), (7, "t", 4)] and found["response"] == "y"
    assert turn_rewards(found, 2) == [1.0, 3.0]  # 0.5 of its own, 2 for b, and 0.5 that no part names
    assert parts_of([found], "my_task.py") == [[1.5, 2.0]]
    assert metrics.parts_of_rewards([found]) == {"reward/a": 1.5, "reward/b": 2.0}
    assert turn_rewards({"reward": 3.0}, 3) == [0.0, 0.0, 3.0]
    response.turns = ["x"]
    with pytest.raises(TaskError, match="part 'a' of a score has 2 numbers for 1 turns"):
        score(task, [response], [{"answer": 0}])


def test_a_task_without_states_has_its_problem_and_turns_and_one_that_is_no_key_is_refused(tmp_path):
    task = SimpleNamespace(__file__="listed.py")
    assert state(task, ["a"], {"id": 3}) == (3, "a") != state(task, ["a"], {"id": 4})
    task.state = lambda turns, problem: [1, 2]
    assert state(task, [], {"id": 3}) == (3,)
    with pytest.raises(TaskError, match=r"^listed.py: state\(\) fails after \[\]: TypeError"):  # for all processes
        score(task, [], [])
    path = tmp_path / "listed.py"
    path.write_text(
        "def load(source, split, *, size=None, seed=0):\n"
        "    return [{'messages': [{'role': 'user', 'content': 'a'}], 'answer': 1}]\n"
        "def score(response, answer):\n    return {'reward': 0.0, 'correct': False, 'format': True}\n"
        "def state(turns, problem):\n    return list(turns)\n"
    )
    task = own.read_file(str(path))
    problems = own.load(str(path), task, None, "test", 4, 0)
    with pytest.raises(ValueError, match=r"listed.py: state\(\) must give a key; after \[\]: TypeError"):
        own.check(str(path), task, problems, [(None, "test", 4, 0)], 60)

"""rewards/gym.py: reasoning-gym's generators as a task. Its own verifiers score; here is what the task adds."""

import inspect
import json
import re
import time

import pytest
from conftest import KK_TINY, parse, task_settings
from transformers import AutoTokenizer

import grpo
from rewards import gym
from runtime import chats, flags

pytest.importorskip("reasoning_gym", reason=f"reasoning-gym is not there: {gym.INSTALL}")

TWO = {"gym": "letter_counting,chain_sum", "gym_options": '{"max_words": 6}'}


def questions(problems):
    return {problem["answer"]["entry"]["question"] for problem in problems}


def test_no_problem_is_on_both_sides_whatever_the_seeds():
    """Also of a generator with few questions: 2 terms of 1 digit make 81 sums and as many differences."""
    few = {"gym": "chain_sum", "gym_options": '{"max_terms": 2, "max_digits": 1}'}
    for which in (TWO, few):
        train = [gym.load(None, "train", size=1000, seed=seed, **which) for seed in (0, 1)]
        test = [gym.load(None, "test", size=100, seed=seed, **which) for seed in (0, 1)]
        assert not set.union(*map(questions, train)) & set.union(*map(questions, test))
        assert all(len(questions(some)) == len(some) for some in [*train, *test])  # none comes twice
        assert (questions(train[0]) != questions(train[1])) == (which is TWO)  # of the few each seed has all
    assert len(test[0]) < 100


def test_the_categories_are_the_generators_in_turn_and_take_their_own_options():
    problems = gym.load(None, "train", size=40, **TWO)
    assert [problem["category"] for problem in problems] == ["letter_counting", "chain_sum"] * 20
    words = [len(problem["answer"]["entry"]["metadata"]["span"]) for problem in problems[::2]]
    assert max(words) <= 6 and problems[1]["answer"]["options"] == {}


def test_load_task_gives_them_to_every_trainer():
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    args = task_settings("gym", {"gym": TWO}, max_prompt_tokens=300)
    task, train, test = chats.load_task(args, tokenizer)
    assert task is gym and len(test) == 5 and len(train) > 1000
    text = tokenizer.decode(test[0]["prompt_ids"])
    assert text.endswith("<answer>") and gym.REQUEST[False] in text
    json.dumps([problem["answer"] for problem in train])  # runs and evaluations write it down


def test_think_asks_for_reasoning_first():
    problem = gym.load(None, "test", size=1, gym="gcd", gym_options='{"think": true}')[0]
    assert problem["prefix"] == "<think>" and gym.REQUEST[True] in problem["messages"][0]["content"]


@pytest.fixture(scope="module")
def sum_of_two():
    """A problem of chain_sum whose answer has two digits, so that a part of the reward can be told from all of it."""
    problems = gym.load(None, "train", gym="chain_sum", gym_options='{"max_digits": 2}')
    return next(
        problem["answer"] for problem in problems if re.fullmatch("[0-9]{2}", problem["answer"]["entry"]["answer"])
    )


def test_a_score_by_hand(sum_of_two):
    """The library gives a right answer in other text the share of its characters: 2 of 5."""
    right = sum_of_two["entry"]["answer"]
    assert gym.score(f"{right}</answer>", sum_of_two) == {"reward": 1.0, "correct": True, "format": True}
    assert gym.score(f" {right}\n</answer> so", sum_of_two)["correct"]
    assert gym.score(f"is {right}</answer>", sum_of_two) == {"reward": 0.4, "correct": False, "format": True}
    assert gym.score("777</answer>", sum_of_two) == {"reward": 0.0, "correct": False, "format": True}
    for unreadable in (right, "", "</answer>", "  </answer>"):
        assert gym.score(unreadable, sum_of_two) == {"reward": 0.0, "correct": False, "format": False}, unreadable


def test_the_last_complete_answer_counts(sum_of_two):
    right = sum_of_two["entry"]["answer"]
    assert gym.score(f"777</answer> no: <answer>{right}</answer>", sum_of_two)["correct"]
    assert not gym.score(f"{right}</answer> no: <answer>777</answer>", sum_of_two)["correct"]
    thinking = sum_of_two | {"think": True}
    assert gym.score(f"hm</think><answer>{right}</answer>", thinking)["correct"]
    assert not gym.score(f"{right}</answer>", thinking)["format"]  # never opened


HOSTILE = ["0", "garbage", "[[[", "{'a':", "(" * 4000, "9" * 4500, "a b " * 1000, "1/0", "−", "\x00", "nan",
           "1e999999", "1e9999999999", "1e9,999,999,999", "1e9_999_999_999", "1e٩٩٩٩٩٩٩٩٩٩", "1e99", "[1,2]", "{}",
           "None", "9" * 6000]  # fmt: skip


@pytest.mark.slow
def test_every_generator_scores_its_own_answer_and_survives_any_text():
    """All that are neither refused nor without answers; in halves of a second each."""
    for name in sorted(gym.registry().keys() - gym.UNSAFE - gym.LENIENT):
        try:
            gym.check_answers(name, {})
        except ValueError as error:
            assert "is empty" in str(error)
            continue
        entry = next(entry for i in range(10) if (entry := gym.dataset(name, "{}")[i])["answer"])
        answer = {"generator": name, "options": {}, "think": False, "entry": entry}
        found = gym.score(f"{entry['answer']}</answer>", answer)
        assert found["reward"] == 1 and found["correct"], name
        json.dumps(entry)
        for text in HOSTILE:
            start = time.process_time()
            found = gym.score(f"{text}</answer>", answer)
            assert isinstance(found["reward"], float) and found["reward"] <= 1, (name, text[:20])
            assert not found["correct"] or text not in ("garbage", "nan"), name
            assert time.process_time() - start < 0.5, (name, text[:20])


@pytest.mark.slow
def test_what_is_refused_as_unsafe_is_what_runs_the_response():
    """The library's own source: eval, or sympy's parse_expr, which calls it, on the answer."""
    runs_it = re.compile(r"\beval\(answer|parse_expr\(answer")
    found = {name for name, (kind, _) in gym.registry().items() if runs_it.search(inspect.getsource(kind))}
    assert found == gym.UNSAFE


BAD = {  # flags: what is said
    "--gym leter_counting": "no generator 'leter_counting'; nearest: letter_counting",
    '--gym gcd --gym_options {"max_number":3}': "gcd has no 'max_number'; nearest: max_numbers",
    '--gym gcd --gym_options {"max_numbers":"x"}': "gcd can't take --gym_options",
    '--gym_options {"max_words":-1}': "max_words must be >= min_words",
    "--gym_options [1": "must be like",
    '--gym_options {"think":1}': "must be true or false",
    '--gym_options {"seed":3}': "letter_counting has no 'seed'",
    "--gym graph_color": "the answer to its problems is empty",
    "--gym countdown": "its verifier runs the response as a program",
    "--gym gcd,coin_flip": "its verifier takes wrong answers for right ones",
    "--data x.json": "it takes no --data",
}


@pytest.mark.parametrize("words, says", BAD.items())
def test_bad_input_is_refused_before_torch_loads(words, says):
    args = parse(grpo, "--task", "gym", "--model", str(KK_TINY), *words.split())
    with pytest.raises(ValueError) as error:
        flags.check_settings(args)
    assert str(error.value).startswith("--") and says in str(error.value) and "\n" not in str(error.value)


def test_without_the_library_a_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"--task gym needs reasoning-gym: {re.escape(gym.INSTALL)}"):
        gym.check("gcd", "{}")

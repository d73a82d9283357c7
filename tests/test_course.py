"""The course: that its checks find what is wrong and say it, and that its solutions are what the trainers compute."""

import importlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, python

import grpo
import grpo_ar_lopti
import ppo
import reinforce
import rloo
from course import check, sandbox
from course.sandbox import call

COURSE = ROOT / "course"


def in_lesson(lesson, package="cases"):
    return importlib.import_module(f"course.{package}.lesson_{lesson}")


EXERCISES = [exercise for lesson in check.LESSONS for exercise in in_lesson(lesson).EXERCISES]
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.function)
each_lesson = pytest.mark.parametrize("lesson", check.LESSONS)


def lesson_of(exercise):
    return int(exercise.number.split(".")[0])


def solution_of(exercise):
    return getattr(in_lesson(lesson_of(exercise), "solutions"), exercise.function)


def judge(function, exercise):
    """(PASS, NOT YET or WRONG, what to say) of a function of this process."""
    key = check.key_of(exercise, solution_of(exercise), seed=0)
    done = sandbox.attempt(function, [case.arguments for case in key.cases], exercise.gradient, __file__)
    return check.verdict(done, key, __file__)


def named(function):
    return next(exercise for exercise in EXERCISES if exercise.function == function)


# ------------------------------------------------------------------------------------------- exercises and solutions


@each_lesson
def test_every_stub_is_not_written_yet_and_every_solution_passes(lesson):
    lines = check.check_lesson(lesson, COURSE / "exercises")
    assert len(lines) >= 2 and {line[1:] for line in lines} == {("NOT YET", "not written yet", "")}
    lines = check.check_lesson(lesson, COURSE / "solutions", seed=1)
    assert {line[1:] for line in lines} == {("PASS", "", "")}


# ----------------------------------------------------------------------------------------------------------- mistakes


@each_exercise
def test_every_known_mistake_is_named(exercise):
    """Each gets its own message, and no other's; so none of them is said of the right function."""
    assert len(exercise.mistakes) >= 6
    for message, wrong in exercise.mistakes.items():
        assert judge(wrong, exercise) == ("WRONG", message)


@each_exercise
def test_an_unknown_mistake_is_shown_with_numbers(exercise):
    right = solution_of(exercise)

    def changed(value):
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return value & False if value.dtype == torch.bool else value + 0.123

    verdict, text = judge(lambda *arguments: changed(right(*arguments)), exercise)
    assert verdict == "WRONG" and "expected" in text and "got" in text
    assert f"{next(iter(exercise.cases[0].arguments))} = " in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda rewards, group_size: None, "the return is missing"),
        (lambda rewards, group_size: rewards[:1], "wrong shape: expected [2], got [1]"),
        (lambda rewards, group_size: (rewards, rewards), "gives 2 values; expected one value"),
        (lambda rewards, group_size: rewards > 0, "expected a tensor of numbers, got one of True and False"),
        (lambda rewards, group_size: "1, -1", "wrong type: gives a str"),
        (lambda rewards, group_size: rewards / 0 * 0, "gives NaN"),
        (lambda rewards, group_size: rewards.sub_(1), "changes its argument rewards"),
        (lambda rewards, group_size: 3 * solution_of(named("leave_one_out"))(rewards, group_size), "3 times what is"),
        (lambda rewards, group_size: rewards.view(7, 7), "raises RuntimeError"),
    ],
)
def test_what_is_said_of_wrong_results(wrong, said):
    verdict, text = judge(wrong, named("leave_one_out"))
    assert verdict == "WRONG" and said in text


def test_wrong_gradients_are_named():
    clipped = named("clipped_loss")
    right = solution_of(clipped)

    def of_old_logp(logp, old_logp, *rest):  # the values are right
        return right(logp, old_logp, *rest).detach() + 0 * logp.sum()

    assert judge(of_old_logp, clipped) == ("WRONG", "the values are right, but their gradient by logp is not")
    as_float = lambda *arguments: right(*arguments).item()  # noqa: E731
    assert "has no gradient: logp must not be detached" in judge(as_float, clipped)[1]


# --------------------------------------------------------------------------------------------------------- command line


def test_the_command():
    for words, code, word in (["--solutions"], 0, "PASS"), ([], 1, "NOT YET"):
        done = python("-m", "course.check", "1", *words)
        assert done.returncode == code and done.stdout.count(word) == 2, done.stdout
    for words in (["12"], [], ["1", "--all"]):
        with pytest.raises(ValueError):
            check.chosen_lessons(check.tyro.cli(check.Args, args=words, use_underscores=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no"),
        ("import torch\n\n\ndef leave_one_out(rewards)\n    return 1\n", "can't be imported: SyntaxError in line 4"),
        ("def leave_one_out(*_):\n    return 1 / 0\n", "raises ZeroDivisionError: division by zero\nin line 2 of"),
        ("def leave_two_out(*_):\n    return 1\n", "has no function of this name"),
    ],
)
def test_files_without_a_result(text, said, tmp_path):
    if text:
        (tmp_path / "lesson_1.py").write_text(text)
    (_, verdict, found, _), _ = check.check_lesson(1, tmp_path)
    assert verdict == "WRONG" and said in found


# ------------------------------------------------------------------------------------- the trainers' own functions
# Each gives what the trainer computes for the arguments of a case: so the numbers by hand and the solutions are theirs.


# Gives the log-probabilities and the entropy of logits: the states are the logits.
POLICY = grpo.Policy(SimpleNamespace(lm_head=lambda states: states.clone()), grpo.Args())


def of_batch(trainer, logp, divisor, batch, **settings):
    return trainer.policy_loss(logp, batch, divisor, trainer.Args(**settings))


def ones(length):
    return {"mask": torch.ones(length, 1, dtype=torch.bool)}


def trainers_token_log_probs(logits, ids):
    logp, _ = POLICY.head(logits.flatten(0, 1), ids.flatten(), 1.0, True)
    return logp.view(ids.shape)


def trainers_reinforce_loss(logp, rewards, mask):
    batch = {"advantages": rewards[:, None] * mask, "mask": mask}
    return reinforce.policy_loss(logp, batch, mask.sum(), reinforce.Args())


def trainers_leave_one_out(rewards, group_size):
    args = rloo.Args(responses_per_prompt=group_size)
    return rloo.compute_advantages(rewards, ones(len(rewards)), args)[:, 0]


def trainers_group_advantages(rewards, group_size):
    args = grpo.Args(responses_per_prompt=group_size)
    return grpo.compute_advantages(rewards, ones(len(rewards)), args)[:, 0]


def trainers_clipped_loss(logp, old_logp, advantages, mask, clip_low, clip_high):
    batch = {"old_logp": old_logp, "ref_logp": old_logp, "advantages": advantages, "mask": mask}
    loss, _ = of_batch(grpo, logp, mask.sum(), batch, clip_low=clip_low, clip_high=clip_high, kl_coef=0)
    return loss


def trainers_generalized_advantages(rewards, values, mask, gamma, lam):
    zeros = torch.zeros(values.shape)
    batch = {"old_logp": zeros, "ref_logp": zeros, "values": values, "mask": mask}
    return ppo.estimate_advantages(rewards, batch, ppo.Args(gamma=gamma, gae_lambda=lam))


def trainers_token_mean(loss, mask):
    """Of a batch whose surrogate is −loss: the ratio is 1, and the advantage is −loss."""
    zeros = torch.zeros(loss.shape)
    batch = {"old_logp": zeros, "ref_logp": zeros, "advantages": -loss, "mask": mask}
    return of_batch(grpo, zeros, mask.sum(), batch, kl_coef=0)[0]


TRAINERS = {
    "token_log_probs": trainers_token_log_probs,
    "reinforce_loss": trainers_reinforce_loss,
    "leave_one_out": trainers_leave_one_out,
    "group_advantages": trainers_group_advantages,
    "clipped_loss": trainers_clipped_loss,
    "generalized_advantages": trainers_generalized_advantages,
    "k3_kl": grpo.k3,
    "token_mean": trainers_token_mean,
    "ar_weight": grpo_ar_lopti.ar_weight,
}
WITH_GRADIENT = "token_log_probs reinforce_loss clipped_loss k3_kl token_mean".split()


@pytest.mark.parametrize("function", TRAINERS)
def test_what_is_expected_is_what_the_trainers_compute(function):
    exercise = named(function)
    for case in exercise.cases:
        expected = check.expected_outcome(exercise, case, solution_of(exercise))
        theirs = call(TRAINERS[function], case.arguments)
        assert check.same_values(theirs, expected, 1e-5), (theirs.parts, expected.parts)
        if function in WITH_GRADIENT:
            ours = call(solution_of(exercise), case.arguments, exercise.gradient)
            theirs = call(TRAINERS[function], case.arguments, exercise.gradient)
            assert ours.gradient is not None and check.same_gradient(ours, theirs, 1e-5)


@each_exercise
def test_every_exercise_has_numbers_by_hand_and_random_cases(exercise):
    by_hand = [case for case in exercise.cases if case.expected is not None]
    assert len(by_hand) >= 2 and by_hand == exercise.cases[: len(by_hand)] and len(by_hand) < len(exercise.cases)
    fresh, others = exercise.fresh_cases(1), exercise.fresh_cases(1000)
    assert all(case.expected is None for case in fresh)
    assert {tuple(case.arguments) for case in fresh} == {tuple(exercise.cases[0].arguments)}
    assert all(shown_case(a) != shown_case(b) for a, b in zip(fresh, others))
    assert sum(case.padded for case in fresh) == (2 if exercise.padding else 0)
    names = "mask" in exercise.cases[0].arguments and exercise.function != "generalized_advantages"
    assert bool(exercise.padding) == names  # there the values are zero outside the mask


def shown_case(case):
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in case.arguments.items()}


MULTIPLIED = {  # right as long as the padding is finite
    "reinforce_loss": lambda logp, rewards, mask: -(rewards[:, None] * logp * mask).sum() / mask.sum(),
    "clipped_loss": lambda logp, old_logp, advantages, mask, low, high: (
        -(in_lesson(2).surrogate(logp, old_logp, advantages, low, high) * mask).sum() / mask.sum()
    ),
    "sampler_gap": lambda sampler, trainer, mask: ((sampler - trainer).abs() * mask).sum() / mask.sum(),
    "token_mean": lambda loss, mask: (loss * mask).sum() / mask.sum(),
    "mean_of_means": lambda loss, mask: ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean(),
    "sequence_ratio": lambda logp, old_logp, mask: in_lesson(6).mean_log_ratio(logp, old_logp, mask).exp(),
}


@pytest.mark.parametrize("function", MULTIPLIED)
def test_padding_that_is_multiplied_by_zero(function):
    verdict, text = judge(MULTIPLIED[function], named(function))
    assert verdict == "WRONG" and text.startswith("padding is not left out")


# --------------------------------------------------------------------------------------------------------- notebook


def test_the_notebook_computes_what_grpo_computes(monkeypatch, capsys):
    notebook = json.loads((COURSE / "grpo_by_hand.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    variables = {"__name__": "notebook"}
    for cell in cells:
        exec("".join(cell["source"]), variables)
    assert (variables["rewards"] != variables["rewards"][0]).any()
    before, after = variables["before"], variables["after"]
    assert torch.allclose(before[1][variables["mask"]], torch.ones(()))  # ρ before the update
    assert after[2].sum() > 0 and after[3].max() > 0  # tokens are clipped, and k3 has grown
    assert f"grpo.py {variables['theirs']:.6f}" in capsys.readouterr().out

"""The course: that its checks find what is wrong and say it, and that its solutions are what the trainers compute."""

import importlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, python

import cispo
import grpo
import grpo_ar_lopti
import grpo_multi_turn
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
def test_every_stub_is_not_written_yet(lesson):
    lines = check.check_lesson(lesson, COURSE / "exercises")
    assert len(lines) >= 2 and {line[1:] for line in lines} == {("NOT YET", "not written yet", "")}


@each_lesson
def test_every_solution_passes(lesson):
    lines = check.check_lesson(lesson, COURSE / "solutions", seed=1)
    assert [line[1:] for line in lines] == [("PASS", "", "")] * len(lines)


# ----------------------------------------------------------------------------------------------------------- mistakes


@each_exercise
def test_every_known_mistake_is_named(exercise):
    """Each gets its own message, and no other's; so none of them is said of the right function."""
    assert len(exercise.mistakes) >= 6
    for message, wrong in exercise.mistakes.items():
        assert judge(wrong, exercise) == ("WRONG", message)


def plus(function, amount):
    """A function whose numbers are larger by an amount, and whose masks are False everywhere."""

    def wrong(*arguments):
        value = function(*arguments)
        return tuple(map(other, value)) if isinstance(value, tuple) else other(value)

    def other(part):
        is_mask = torch.is_tensor(part) and part.dtype == torch.bool
        return torch.zeros_like(part) if is_mask else part + amount

    return wrong


@each_exercise
def test_an_unknown_mistake_is_shown_with_numbers(exercise):
    verdict, text = judge(plus(solution_of(exercise), 0.123), exercise)
    assert verdict == "WRONG"
    assert "expected" in text and "got" in text and f"{next(iter(exercise.cases[0].arguments))} = " in text


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
    done = python("-m", "course.check", "1", "--solutions")
    assert done.returncode == 0 and done.stdout.count("PASS") == 2 and "2 of 2 pass" in done.stdout
    done = python("-m", "course.check", "1")
    assert done.returncode == 1 and done.stdout.count("NOT YET") == 2
    for words in (["13"], [], ["1", "--all"]):
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
# Each gives what the trainer computes for the arguments of a case. It is compared with what the case expects: so both
# the numbers worked out by hand and the solutions are the trainers'.


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


def surrogate_batch(loss, mask, **more):
    """A batch whose surrogate is −loss: the ratio is 1, and the advantage is −loss."""
    zeros = torch.zeros(loss.shape)
    return zeros, {"old_logp": zeros, "ref_logp": zeros, "advantages": -loss, "mask": mask, **more}


def trainers_token_mean(loss, mask):
    logp, batch = surrogate_batch(loss, mask)
    return of_batch(grpo, logp, mask.sum(), batch, kl_coef=0)[0]


def trainers_lopti_stages(logp, mask, eta):
    batch = {"old_logp": logp, "mask": mask}
    return tuple(grpo_ar_lopti.in_stage(stage, batch, eta) for stage in ("low", "high"))


def trainers_token_weights(ratio, advantages, clip_low, clip_high, method):
    """Minus the gradient of the trainer's loss by log π, with 1 as the divisor."""
    trainer = {"grpo": grpo, "cispo": cispo}[method]
    old_logp = torch.full(ratio.shape, -2.0)
    logp = (old_logp + ratio.detach().log()).requires_grad_()
    batch = {"old_logp": old_logp, "ref_logp": old_logp, "advantages": advantages}
    batch["mask"] = torch.ones(ratio.shape, dtype=torch.bool)
    loss, _ = of_batch(trainer, logp, 1, batch, clip_low=clip_low, clip_high=clip_high, kl_coef=0)
    loss.backward()
    return -logp.grad


def trainers_conversation_row(prompt, turns, replies, before, after, length):
    conversation = grpo_multi_turn.Conversation({"prompt_ids": prompt}, 0)
    for i, turn in enumerate(turns):
        logprobs = SimpleNamespace(logprobs=[0.0] * len(turn))
        conversation.add_turn(SimpleNamespace(text="", token_ids=turn, logprobs=logprobs, finish_reason="stop"))
        if i < len(replies):
            conversation.add_reply("", [*before, *replies[i], *after])
    batch = grpo_multi_turn.to_batch([conversation.problem], [conversation])
    padding = (0, length - batch["ids"].shape[1])
    return tuple(torch.nn.functional.pad(batch[name], padding)[0] for name in ("ids", "mask"))


def trainers_conversation_loss(logp, advantages, mask):
    """The gradient is that of the trainer's loss at a step's first update, where the ratio is 1."""
    batch = {"advantages": advantages[:, None] * mask, "mask": mask}
    batch["old_logp"] = batch["ref_logp"] = logp.detach()
    loss, _ = of_batch(grpo_multi_turn, logp, mask.sum(), batch, kl_coef=0)
    value = -(batch["advantages"] * logp.detach())[mask].sum() / mask.sum()
    return loss - loss.detach() + value


def trainers_kl_estimates(logp, ref_logp):
    difference = logp - ref_logp
    return difference, difference.square() / 2, grpo.k3(logp, ref_logp)


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
    "lopti_stages": trainers_lopti_stages,
    "token_weights": trainers_token_weights,
    "kl_estimates": trainers_kl_estimates,
    "conversation_row": trainers_conversation_row,
    "conversation_loss": trainers_conversation_loss,
}


@pytest.mark.parametrize("function", TRAINERS)
def test_what_is_expected_is_what_the_trainers_compute(function):
    exercise = named(function)
    for case in exercise.cases:
        expected = check.expected_outcome(exercise, case, solution_of(exercise))
        theirs = call(TRAINERS[function], case.arguments)
        assert check.same_values(theirs, expected, 1e-5), (theirs.parts, expected.parts)


@pytest.mark.parametrize(
    "function", "token_log_probs reinforce_loss clipped_loss k3_kl token_mean conversation_loss".split()
)
def test_the_gradients_are_the_trainers(function):
    exercise = named(function)
    for case in exercise.cases:
        ours = call(solution_of(exercise), case.arguments, exercise.gradient)
        theirs = call(TRAINERS[function], case.arguments, exercise.gradient)
        assert ours.gradient is not None and check.same_gradient(ours, theirs, 1e-5)


@each_exercise
def test_every_exercise_has_numbers_by_hand_and_random_cases(exercise):
    by_hand = [case for case in exercise.cases if case.expected is not None]
    assert len(by_hand) >= 2 and by_hand == exercise.cases[: len(by_hand)] and len(by_hand) < len(exercise.cases)
    fresh, others = exercise.fresh_cases(1), exercise.fresh_cases(1000)
    assert all(case.expected is None for case in fresh) and {tuple(case.arguments) for case in fresh} == {
        tuple(exercise.cases[0].arguments)
    }
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
    "conversation_loss": lambda logp, advantages, mask: -(advantages[:, None] * logp * mask).sum() / mask.sum(),
    "mean_of_means": lambda loss, mask: ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean(),
    "sequence_ratio": lambda logp, old_logp, mask: in_lesson(6).mean_log_ratio(logp, old_logp, mask).exp(),
}


@pytest.mark.parametrize("function", MULTIPLIED)
def test_padding_that_is_multiplied_by_zero(function):
    verdict, text = judge(MULTIPLIED[function], named(function))
    assert verdict == "WRONG" and text.startswith("padding is not left out")


# --------------------------------------------------------------------------------------------------------- notebook


def test_the_notebook_runs_and_holds_the_outputs_of_a_run(monkeypatch, capsys):
    notebook = json.loads((COURSE / "grpo_by_hand.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {(output["output_type"], output.get("name")) for output in outputs} == {("stream", "stdout")}
    assert not any("vllm" in "".join(cell["source"]) for cell in cells)
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

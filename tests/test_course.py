"""The course: its checks find what is wrong and say it, and its solutions are what the trainers compute."""

import functools
import importlib
import json
import os
import re
import shutil
import sys
import textwrap
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, python

import gigpo
import grpo
import grpo_ar_lopti
import grpo_multi_turn
import ppo
import reinforce
import rloo
from course import capstone, check, grade, jail, release, sandbox, slides
from course.sandbox import call
from rewards import facts
from tools.maintain import updates

COURSE = ROOT / "course"


def in_lesson(lesson, module="cases"):
    return importlib.import_module(f"course.lesson_{int(lesson):02}.{module}")


EXERCISES = [exercise for lesson in check.LESSONS for exercise in in_lesson(lesson).EXERCISES]
each_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.function)


def solution_of(exercise):
    return getattr(in_lesson(exercise.number.split(".")[0], "solution"), exercise.function)


def judge(function, exercise):
    """(PASS, NOT YET or WRONG, what to say) of a function of this process."""
    key = check.key_of(exercise, solution_of(exercise), seed=0)
    done = sandbox.attempt(function, [case.arguments for case in key.cases], exercise.gradient, __file__)
    return check.verdict(done, key, __file__)


def named(function):
    return next(exercise for exercise in EXERCISES if exercise.function == function)


@pytest.mark.parametrize("lesson", check.LESSONS)
def test_every_stub_is_not_written_yet_and_every_solution_passes(lesson):
    lines = check.check_lesson(lesson, check.file_of(lesson))
    assert len(lines) >= 2 and {line[1:] for line in lines} == {("NOT YET", "not written yet", "")}
    lines = check.check_lesson(lesson, check.file_of(lesson, True), seed=1)
    assert {line[1:] for line in lines} == {("PASS", "", "")}


@each_exercise
def test_every_known_mistake_is_named(exercise):
    """Each gets its own message, and no other's; so none of them is said of the right function."""
    assert len(exercise.mistakes) >= 6
    for message, wrong in exercise.mistakes.items():
        assert judge(wrong, exercise) == ("WRONG", message)


WRONG_RESULTS = [
    (lambda rewards, group_size: None, "the return is missing"),
    (lambda rewards, group_size: rewards[:1], "wrong shape: expected [2], got [1]"),
    (lambda rewards, group_size: (rewards, rewards), "gives 2 values; expected one value"),
    (lambda rewards, group_size: rewards > 0, "expected a tensor of numbers, got one of True and False"),
    (lambda rewards, group_size: "1, -1", "wrong type: gives a str"),
    (lambda rewards, group_size: rewards / 0 * 0, "gives NaN"),
    (lambda rewards, group_size: rewards.sub_(1), "changes its argument rewards"),
    (lambda rewards, group_size: 3 * solution_of(named("leave_one_out"))(rewards, group_size), "3 times what is"),
    (lambda rewards, group_size: rewards.view(7, 7), "raises RuntimeError"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG_RESULTS)
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


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [("1 --solutions", 0, "PASS"), ("1", 1, "NOT YET"), ("16", 2, ""), ("", 2, ""), ("1 --all", 2, "")],
)
def test_the_command(words, code, word, capsys):
    with pytest.raises(SystemExit) as stop:
        check.main(check.tyro.cli(check.Args, args=words.split(), use_underscores=True))
    shown = capsys.readouterr().out
    assert stop.value.code == code and shown.count(word) == (2 if word else 1), shown
    assert ("write the functions in course/lesson_01/lesson_1.py" in shown) == (words == "1")


FILES = [
    (None, "there is no"),
    ("import torch\n\n\ndef leave_one_out(rewards)\n    return 1\n", "can't be imported: SyntaxError in line 4"),
    ("def leave_one_out(*_):\n    return 1 / 0\n", "raises ZeroDivisionError: division by zero\nin line 2 of"),
    ("def leave_two_out(*_):\n    return 1\n", "has no function of this name"),
]


@pytest.mark.parametrize(("text", "said"), FILES)
def test_files_without_a_result(text, said, tmp_path):
    if text:
        (tmp_path / "lesson_1.py").write_text(text)
    (_, verdict, found, _), _ = check.check_lesson(1, tmp_path / "lesson_1.py")
    assert verdict == "WRONG" and said in found


# Each gives what the trainer computes for the arguments of a case: so the numbers by hand and the solutions are theirs.


def token_log_probs(logits, ids):
    policy = grpo.Policy(SimpleNamespace(lm_head=torch.clone, config=None), grpo.Args())  # the states are logits
    logp, _ = policy.head(logits.flatten(0, 1), ids.flatten(), 1.0, True)
    return logp.view(ids.shape)


def reinforce_loss(logp, rewards, mask):
    batch = {"advantages": rewards[:, None] * mask, "mask": mask}
    return reinforce.policy_loss(logp, batch, mask.sum(), reinforce.Args())


def advantages_of(trainer, rewards, group_size):
    logp = torch.zeros(len(rewards), 1)  # rloo.py reads it, for a penalty of 0
    batch = {"mask": logp == 0, "old_logp": logp, "ref_logp": logp}
    args = trainer.Args(responses_per_prompt=group_size)
    return updates.with_advantages(trainer.__name__, batch, rewards, None, args)["advantages"][:, 0]


def grpo_loss(logp, mask, advantages, old_logp, **settings):
    batch = {"old_logp": old_logp, "ref_logp": old_logp, "advantages": advantages, "mask": mask}
    return grpo.policy_loss(logp, batch, mask.sum(), grpo.Args(kl_coef=0, **settings))[0]


def clipped_loss(logp, old_logp, advantages, mask, clip_low, clip_high):
    return grpo_loss(logp, mask, advantages, old_logp, clip_low=clip_low, clip_high=clip_high)


def generalized_advantages(rewards, values, mask, gamma, lam):
    zeros = torch.zeros(values.shape)
    batch = {"old_logp": zeros, "ref_logp": zeros, "old_values": values, "mask": mask}
    scores = [{"reward": reward} for reward in rewards.tolist()]
    return ppo.estimate_advantages(scores, batch, ppo.Args(gamma=gamma, gae_lambda=lam))


def token_mean(loss, mask):
    """Of a batch whose surrogate is −loss: the ratio is 1, and the advantage is −loss."""
    zeros = torch.zeros(loss.shape)
    return grpo_loss(zeros, mask, -loss, zeros)


def conversation_row(prompt, turns, replies, before, after, length):
    conversation = grpo_multi_turn.Conversation({"prompt_ids": prompt}, 0, side=None)
    for i, turn in enumerate(turns):
        logprobs = SimpleNamespace(logprobs=[0.0] * len(turn))
        conversation.add_turn(SimpleNamespace(text="", token_ids=turn, logprobs=logprobs, finish_reason="stop"))
        if i < len(replies):
            conversation.add_reply("", [*before, *replies[i], *after])
    batch = grpo_multi_turn.to_batch([conversation.problem], [conversation])
    padding = (0, length - batch["ids"].shape[1])
    return tuple(torch.nn.functional.pad(batch[name], padding)[0] for name in ("ids", "mask"))


def turn_returns(rewards, mask, gamma):
    found = torch.zeros(rewards.shape)
    for row, of_turns, num_turns in zip(found, rewards.tolist(), mask.sum(1).tolist()):
        row[:num_turns] = torch.tensor(gigpo.discounted_returns(of_turns[:num_turns], gamma))
    return found


def state_advantages(returns, states):
    """Of conversations of one turn of one token."""
    scores = []
    for reward, state in zip(returns.tolist(), states.tolist()):
        scores.append({"reward": reward, "turns": [(0, state, 1)]})
    batch = {"mask": torch.ones(len(returns), 1, dtype=torch.bool)}
    return gigpo.turn_advantages(scores, batch, gigpo.Args())[:, 0]


def two_tools_rewards(calls, needs, bonus, cost):
    """Of turns with these calls, as rewards/facts.py pays them if its own prices are known."""
    turns = [facts_turn(call) for call in calls]
    found = facts.score_conversation(turns, {"needs": needs, "value": 1})["parts"]
    total = torch.zeros(len(calls))
    for name, paid in (("right_tool", bonus), ("needless", cost), ("errors", cost)):
        total += torch.tensor(found[name]) * paid / abs(facts.PAYS[name])
    return total


def facts_turn(call):
    written = {"": "I know.", "error": "search(moon)", "calculator": "calculator(1 + 1)"}
    return written.get(call, f"search({call})")


TRAINERS = {
    "token_log_probs": token_log_probs,
    "reinforce_loss": reinforce_loss,
    "leave_one_out": functools.partial(advantages_of, rloo),
    "group_advantages": functools.partial(advantages_of, grpo),
    "clipped_loss": clipped_loss,
    "generalized_advantages": generalized_advantages,
    "k3_kl": grpo.k3,
    "token_mean": token_mean,
    "ar_weight": grpo_ar_lopti.ar_weight,
    "conversation_row": conversation_row,
    "two_tools_rewards": two_tools_rewards,
    "turn_returns": turn_returns,
    "state_advantages": state_advantages,
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
    assert all(str(a.arguments) != str(b.arguments) for a, b in zip(fresh, others))
    assert sum(case.padded for case in fresh) == (2 if exercise.padding else 0)
    names = "mask" in exercise.cases[0].arguments and exercise.function != "generalized_advantages"
    assert bool(exercise.padding) == names  # there the values are zero outside the mask


MULTIPLIED = {  # right as long as the padding is finite
    "clipped_loss": lambda logp, old_logp, advantages, mask, low, high: (
        -(in_lesson(2).surrogate(logp, old_logp, advantages, low, high) * mask).sum() / mask.sum()
    ),
    "sampler_gap": lambda sampler, trainer, mask: ((sampler - trainer).abs() * mask).sum() / mask.sum(),
    "mean_of_means": lambda loss, mask: ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean(),
    "sequence_ratio": lambda logp, old_logp, mask: in_lesson(6).mean_log_ratio(logp, old_logp, mask).exp(),
}


@pytest.mark.parametrize("function", MULTIPLIED)
def test_padding_that_is_multiplied_by_zero(function):
    verdict, text = judge(MULTIPLIED[function], named(function))
    assert verdict == "WRONG" and text.startswith("padding is not left out")


@pytest.mark.slow
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


RIGHT = """
    groups = rewards.view(-1, group_size)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (group_size - 1)).reshape(-1)
"""
EQUAL = "class Equal:\n        __eq__ = lambda *_: True"
SOLUTION = str(check.file_of(1, True))
TABLE = "TABLE = {(1.0, 0.0): [1.0, -1.0], (3.0, 1.0, 2.0, 0.0, 0.0, 6.0): [1.5, -1.5, 0.0, -3.0, -3.0, 6.0]}"
MEMORY = """
    import gc
    found = [one for one in gc.get_objects() if type(one).__name__ in ("Case", "Exercise", "Key")]
    return found[0].expected if found else 1 / 0
"""
ATTACKS = {  # name: (what the function does, what stands above it, what is said)
    "exits": ("import sys; sys.exit(0)", "", "raises SystemExit"),
    "exits hard": ("import os; os._exit(0)", "", "ends the program (exit code 0)"),
    "exits when imported": ("return rewards", "raise SystemExit(0)", "can't be imported: SystemExit"),
    "aborts": ("import os; os.abort()", "", "ends the program (exit code -6)"),
    "loops": ("while True: pass", "", "takes too long"),
    "ignores signals": ("import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: pass", "", "takes too long"),
    "waits for input": ("return input()", "", "EOFError"),
    "recurses": ("return leave_one_out(rewards, group_size)", "", "RecursionError"),
    "prints a verdict and ends": ("import os; os.write(1, b'2 of 2 pass'); os._exit(0)", "", "ends the program"),
    "patches the comparison": ("return rewards", "torch.allclose = lambda *_, **__: True", "expected [1, -1]"),
    "patches what is sent": ("return rewards", "torch.save = lambda *_, **__: None", "expected [1, -1]"),
    "gives what is equal to everything": ("return Equal()", EQUAL, "gives a Equal"),
    "has a table": ("return torch.tensor(TABLE.get(tuple(rewards.tolist()), rewards.tolist()))", TABLE, "expected ["),
    "imports the solution": ("return rewards", "from course.lesson_01.solution import *", "PermissionError"),
    "reads the solution": (f"exec(open({SOLUTION!r}).read())", "", "PermissionError"),
    "looks through the memory": (MEMORY, "", "ZeroDivisionError"),
    "changes its argument": ("rewards -= rewards.mean()\nreturn 2 * rewards", "", "changes its argument rewards"),
}


def function(body, before=""):
    """A file with the function."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"import torch\n{before}\n\ndef leave_one_out(rewards, group_size):\n{body}\n"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name, tmp_path):
    body, before, said = ATTACKS[name]
    file = tmp_path / "lesson_1.py"
    file.write_text(function(body, before))
    seconds = 1 if said == "takes too long" else 20
    (_, verdict, found, _), _ = check.check_lesson(1, file, seconds=seconds)
    assert verdict == check.WRONG and said in found, found
    file.write_text(function(RIGHT))
    lines = check.check_lesson(1, file)
    assert lines[0][1:] == (check.PASS, "", "") and lines[1][1] == check.WRONG


SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("number", check.LESSONS)
def test_live_snippets_print_what_is_said(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    text = (COURSE / "lecturer.md").read_text()
    section = re.split(r"^## Lesson \d+: ", text, flags=re.MULTILINE)[number + 1]
    [(code, expected)] = SNIPPET.findall(section)
    exec(code, {})
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("number", slides.LESSONS)
def test_a_deck_finds_all_that_it_quotes(number):
    quoted = re.findall(r"```python\n(.+)\n(?:(?!```).*\n)*```\n\n`([^`]+)`, line (\d+)", slides.deck(number))
    assert quoted
    for first, name, line in quoted:
        assert (ROOT / name).read_text().splitlines()[int(line) - 1].strip() == first


SCRIPT = (ROOT / "grpo.py").read_text()


@pytest.mark.parametrize("change", capstone.CHANGES, ids=lambda change: change.name)
def test_a_change_can_be_made_and_compiles(change):
    text = capstone.changed(SCRIPT, change)
    compile(text, "grpo.py", "exec")
    assert text != SCRIPT and text.replace(change.new, change.old) == SCRIPT


def test_a_secret_draws_all_changes_and_always_the_same_for_a_team():
    ours, again, others = (
        [capstone.drawn(team, word).name for team in range(200)] for word in ("word", "word", "another word")
    )
    assert set(ours) == {change.name for change in capstone.CHANGES}
    assert ours == again != others


HAS_JAIL = True
try:
    jail.check()
except ValueError:
    HAS_JAIL = False


@pytest.mark.slow
@pytest.mark.parametrize("with_step", [False, True])
def test_the_points_of_a_class(with_step, tmp_path):
    """Ada loses one of ten marks for a late day. Two steps are checked at once, and all 5 parts of both are right."""
    for student in ("ada", "deep/work", "eve", ".git"):  # the last is no student
        (tmp_path / student).mkdir(parents=True)
    for student in ("ada", "deep/work"):
        shutil.copy(COURSE / "lesson_02" / "solution_step.py", tmp_path / student / "step.py")
    shutil.copy(SOLUTION, tmp_path / "ada" / "lesson_1.py")
    (tmp_path / "deep" / "Lesson1.py").write_text("")
    (tmp_path / "eve" / "lesson_1.py").symlink_to(SOLUTION)
    os.utime(tmp_path / "ada" / "lesson_1.py", (0, datetime(2100, 12, 2, 12).timestamp()))
    folder = tmp_path / "grades"
    flags = f"--lessons 1 {'--step' * with_step} --seed 7 --weights 1=10 --due 2100-12-01 --out {folder}".split()
    done = python("-m", "course.grade", tmp_path, *flags, *([] if HAS_JAIL else ["--trust_files"]))
    assert done.returncode == 0, done.stderr
    students = json.loads((folder / "grades.json").read_text())["students"]
    marks = {student: sum(found["marks"].values()) for student, found in students.items()}
    of_step = 5 * with_step
    assert marks == {"ada": 9 + of_step, "deep": of_step, "eve": 0}
    said = {student: found["lines"][0]["text"] for student, found in students.items()}
    assert "is a link" in said["eve"] and "there is no" in said["deep"] and "2/2" in done.stdout
    assert "Lesson1.py" in students["deep"]["warnings"][0]
    rows = [line.split(",") for line in (folder / "grades.csv").read_text().splitlines()]
    assert (
        rows[1][:2] == ["ada", "9.0"] and float(rows[1][-3]) == marks["ada"] and rows[1][-2] == "1" and len(rows) == 4
    )
    gradescope = json.loads((folder / "gradescope" / "deep.json").read_text())
    assert gradescope["score"] == of_step
    assert [test["score"] for test in gradescope["tests"]] == [0, 0, *[1] * of_step]
    if with_step:
        assert "was found in work/" in students["deep"]["warnings"][1]


# What a hand-in tries while it is imported. Each is to fail; what works is printed.
ATTEMPTS = """
import os, socket, sys, torch
ROOT, OTHER, SOLUTION = {root!r}, {other!r}, {solution!r}

def attempt(name, work):
    try:
        if work() is not False:
            print(name)
    except (OSError, RuntimeError, ImportError):
        pass

attempt("reads a solution in C++", lambda: torch.from_file(SOLUTION, size=99, dtype=torch.uint8))
attempt("reads a solution", lambda: open(SOLUTION).read())
attempt("lists the solutions", lambda: os.listdir(os.path.dirname(SOLUTION)))
attempt("imports the solution", lambda: __import__("course.lesson_01.solution"))
attempt("reads the expected numbers", lambda: __import__("course.lesson_01.cases"))
attempt("finds a trainer", lambda: "grpo.py" in os.listdir(ROOT))
attempt("reads another student's file", lambda: open(OTHER).read())
attempt("changes its own file", lambda: open(__file__, "a"))
attempt("changes its own file in C++", lambda: torch.from_file(__file__, True, 9, dtype=torch.uint8).fill_(0))
attempt("writes beside the files of the system", lambda: torch.save(torch.ones(1), "/x.pt"))
attempt("writes among the packages", lambda: open(os.path.dirname(torch.__file__) + "/x.py", "w"))
attempt("fills the disk", lambda: open("/tmp/full", "wb").write(bytes(2**26)))
attempt("reads the passwords", lambda: open("/etc/shadow").read())
attempt("sees an environment", lambda: any(key.startswith(("PYTEST", "SECRET", "SSH")) for key in os.environ))
attempt("reaches the network", lambda: socket.create_connection(("1.1.1.1", 53), 2))
attempt("has a network card", lambda: len(socket.if_nameindex()) > 1)
attempt("sees other processes", lambda: sum(name.isdigit() for name in os.listdir("/proc")) > 4)
"""


@pytest.mark.skipif(not HAS_JAIL, reason="bubblewrap is not installed, or can't work here")
def test_what_a_stranger_tries_in_the_jail_fails(tmp_path, monkeypatch):
    """Then a result that is a link to a solution, and a function that kills the jail: the next one is judged."""
    monkeypatch.setenv("SECRET", "1")
    for student in ("ada", "eve"):
        (tmp_path / student).mkdir()
    other = tmp_path / "ada" / "lesson_1.py"
    other.write_text(function(RIGHT))
    words = {"root": str(ROOT), "other": str(other), "solution": SOLUTION}
    file = tmp_path / "eve" / "lesson_1.py"
    with jail.Jail(tmp_path / "eve") as place:
        file.write_text(function(RIGHT, ATTEMPTS.format(**words)))
        assert check.check_lesson(1, file, jail=place)[0][1:] == (check.PASS, "", "")
        for body in (
            f"os.symlink({SOLUTION!r}, 'result.pt'); os._exit(0)",
            "os.remove('printed'); os.symlink('/etc/passwd', 'printed'); os._exit(0)",
            "os.kill(os.getppid(), 9)",
        ):
            before = f"import os\nos.chdir({str(place.answers)!r})"
            file.write_text(function(body, before))
            (_, verdict, found, printed), _ = check.check_lesson(1, file, jail=place)
            assert verdict == check.WRONG and not printed, (body, found)
        file.write_text(function(RIGHT))
        assert check.check_lesson(1, file, jail=place)[0][1] == check.PASS


def test_without_a_jail_grading_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "ada").mkdir()
    monkeypatch.setattr(jail.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match="Install it"):
        grade.Args(tmp_path)


@pytest.mark.slow
def test_the_students_version_holds_no_solution_and_checks_all_the_same(tmp_path):
    folder = tmp_path / "students"
    release.release(folder)
    of_lessons = {path.name for number in check.LESSONS for path in (folder / f"course/lesson_{number:02}").iterdir()}
    assert of_lessons == {"README.md", "step.py", *(f"lesson_{number}.py" for number in check.LESSONS)}
    assert not (folder / "course" / "lecturer.md").exists()
    assert "lecturer.md" not in (folder / "course" / "README.md").read_text()
    assert (folder / "grpo.py").exists() and (folder / "models" / "kk_tiny" / "model.safetensors").exists()
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for place in (right, wrong):
        place.mkdir()
    shutil.copy(SOLUTION, right / "lesson_1.py")
    body = "return rewards - rewards.view(-1, group_size).mean(1).repeat_interleave(group_size)"
    (wrong / "lesson_1.py").write_text(function(body))
    for place, said in ((right, "2 of 2 pass"), (wrong, "contains the response's own reward")):
        done = python("-m", "course.check", "1", "--folder", place, cwd=folder)
        assert said in done.stdout, done.stdout + done.stderr
    with pytest.raises(ValueError, match="is not empty"):
        release.release(folder)


def test_the_exact_numbers_are_those_of_closed_forms():
    """With p the probability of the right response. A baseline changes no mean gradient: p(1 − p)."""
    from course import exact

    p = 0.25
    for name, group, advantages in (("none", 8, exact.no_baseline), ("rloo", 4, exact.ADVANTAGES["rloo.py"])):
        mean, variance = exact.moments(group, advantages)
        assert exact.LIMIT * mean[0].item() == pytest.approx(p * (1 - p), rel=1e-6), name
        if name == "none":  # of independent responses
            assert exact.LIMIT**2 * variance[0].item() == pytest.approx(p * (1 - p) ** 3 / group, rel=1e-6)
    mean, _ = exact.moments(2, exact.ADVANTAGES["grpo.py"])  # ±√½ in a mixed group, whose chance is 2p(1 − p)
    assert exact.LIMIT * mean[0].item() == pytest.approx(2 * p * (1 - p) * 0.5**0.5 / 2, rel=1e-5)
    long = {}
    for divisor in ("constant", "tokens", "responses"):
        _, of_short, of_long = exact.train(divisor, steps=10).tolist()
        long[divisor] = of_long / (of_short + of_long)
    assert long["constant"] == pytest.approx(0.5, abs=1e-9) and 0.51 < long["tokens"] < long["responses"] - 0.01

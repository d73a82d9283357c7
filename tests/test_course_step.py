"""The student's own step: the check passes the solution, and names what is wrong with others."""

import pytest
from conftest import ROOT

from course import check, check_step, sandbox
from course.sandbox import Sandbox

SOLUTION = ROOT / "course" / "solutions" / "step.py"


@pytest.fixture(scope="module")
def box():
    with Sandbox() as started:
        yield started


def verdicts(file, box):
    return {part.function: (verdict, text) for part, verdict, text, _ in check_step.check_file(file, box)}


def test_the_solution_passes(box):
    assert verdicts(SOLUTION, box) == dict.fromkeys(check_step.PARTS, ("PASS", ""))


def test_the_exercise_is_not_written_yet(box):
    found = verdicts(ROOT / "course" / "exercises" / "step.py", box)
    assert found["log_probs"] == ("NOT YET", "not written yet")
    assert {verdict for verdict, _ in found.values()} == {"NOT YET"}


def test_exercise_and_solution_differ_in_the_five_functions_alone():
    stub = (ROOT / "course" / "exercises" / "step.py").read_text()
    parts = stub.partition('"""\n\nimport')[2].split("    raise NotImplementedError\n")
    assert len(parts) == len(check_step.PARTS) + 1
    solution = SOLUTION.read_text()
    places = [solution.index(part) for part in parts]
    assert places == sorted(places)
    assert len(stub.splitlines()) < 75


WRONG = [
    # (part, what stands in the solution, what stands there instead, what is said)
    ("log_probs", ".masked_fill(~mask, 0)", "", "is not 0 outside the mask"),
    pytest.param(
        "loss", "-(advantages * logp)[mask]", "(advantages * logp)[mask]", "has the wrong sign", marks=pytest.mark.slow
    ),
    pytest.param(
        "sample", "do_sample=True, temperature=1.0,", "do_sample=False,", "are equal: sample", marks=pytest.mark.slow
    ),
    pytest.param("log_probs", "(1, 0)", "(0, 1)", "", marks=pytest.mark.slow),
    pytest.param("log_probs", "logits.log_softmax(-1)", "logits", "away from reinforce.py's", marks=pytest.mark.slow),
    pytest.param("advantages", "rewards - rewards.mean()", "rewards", "up to 0", marks=pytest.mark.slow),
    pytest.param("loss", "/ mask.sum()", "/ len(mask)", "away from reinforce.py's", marks=pytest.mark.slow),
    pytest.param("update", "    optimizer.zero_grad()\n", "", "after two updates", marks=pytest.mark.slow),
    pytest.param("update", "    optimizer.step()\n", "", "after two updates", marks=pytest.mark.slow),
    pytest.param("sample", " - is_end.int() == 0", " == 0", "lacks the end token", marks=pytest.mark.slow),
    pytest.param("sample", "== 0\n", "<= 9\n", "goes on after the end", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("part", "old", "new", "said"), WRONG)
def test_a_mistake_is_found(part, old, new, said, box, tmp_path):
    text = SOLUTION.read_text()
    assert text.count(old) == 1
    file = tmp_path / "step.py"
    file.write_text(text.replace(old, new).replace("parents[2]", f"parents[0] / {str(ROOT)!r}"))
    found = verdicts(file, box)
    verdict, text = found[part]
    assert verdict == check.WRONG and said in text, found
    after = check_step.PARTS[check_step.PARTS.index(part) + 1 :]
    assert all(found[name][0] == check.PASS for name in check_step.PARTS if name not in (part, *after))


@pytest.mark.slow
def test_the_loop_of_the_solution_runs(capsys):
    sandbox.load(SOLUTION).main(steps=1)
    [line] = capsys.readouterr().out.splitlines()
    reward = float(line.partition("reward ")[2].partition(",")[0])
    assert line.startswith("step 1: ") and -3 < reward < 3

"""A class is graded, and the students' version is made."""

import json
import shutil

import pytest
from conftest import ROOT, python

from course import check, release

COURSE = ROOT / "course"
HEAD = "import torch\n\n\ndef leave_one_out(rewards, group_size):\n    "


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """What the command writes of a class of six: the folder of grades, and what is printed."""
    folder = tmp_path_factory.mktemp("class")
    for student in ("ada", "bob", "crash", "eve", "none", "table", ".git"):  # the last is no student
        (folder / student).mkdir()
    shutil.copy(COURSE / "solutions" / "lesson_1.py", folder / "ada")
    shutil.copy(COURSE / "exercises" / "lesson_1.py", folder / "bob")
    (folder / "crash" / "lesson_1.py").write_text("import os\nos.abort()\n")
    (folder / "eve" / "lesson_1.py").symlink_to(COURSE / "solutions" / "lesson_1.py")
    (folder / "table" / "lesson_1.py").write_text(HEAD + "return torch.tensor([1.0, -1.0])\n\x07")
    done = python("-m", "course.grade", folder, "--lessons", "1", "--seed", "7", "--out", folder / "grades")
    assert done.returncode == 0, done.stderr
    return folder / "grades", done.stdout


def test_the_points_of_a_class(graded):
    folder, printed = graded
    grades = json.loads((folder / "grades.json").read_text())
    points = {student: found["points"] for student, found in grades["students"].items()}
    assert points == {"ada": 2, "bob": 0, "crash": 0, "eve": 0, "none": 0, "table": 0} and grades["seed"] == 7
    said = {student: found["functions"][0] for student, found in grades["students"].items()}
    assert said["bob"]["verdict"] == "NOT YET" and "ends the program" in said["crash"]["text"]
    assert "is a link" in said["eve"]["text"] and "there is no" in said["none"]["text"]
    assert "ada" in printed and "2/2" in printed


@pytest.mark.slow
def test_the_students_version_holds_no_solution_and_checks_all_the_same(tmp_path):
    folder = tmp_path / "students"
    release.release(folder)
    assert not (folder / "course" / "solutions").exists() and not (folder / "course" / "lecturer.md").exists()
    assert [path.name for path in (folder / "course" / "cases").iterdir() if path.suffix == ".py"] == ["__init__.py"]
    assert "lecturer.md" not in (folder / "course" / "README.md").read_text()
    assert (folder / "grpo.py").exists() and (folder / "models" / "kk_tiny" / "model.safetensors").exists()
    for name in ("solutions", "exercises"):
        shutil.copytree(COURSE / name, tmp_path / name)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "lesson_1.py").write_text(
        HEAD + "return rewards - rewards.view(-1, group_size).mean(1).repeat_interleave(group_size)"
    )
    for place, said in ((tmp_path / "solutions", "2 of 2 pass"), (wrong, "contains the response's own reward")):
        done = python("-m", "course.check", "1", "--folder", place, cwd=folder)
        assert said in done.stdout, done.stdout + done.stderr
    with pytest.raises(ValueError, match="is not empty"):
        release.release(folder)


def test_kept_numbers_are_those_of_the_solutions(tmp_path, monkeypatch):
    exercise = check.importlib.import_module("course.cases.lesson_4").EXERCISES[0]
    solution = check.importlib.import_module("course.solutions.lesson_4").token_mean
    check.torch.save({4: [release.kept_of(exercise, solution)]}, tmp_path / "kept.pt")
    monkeypatch.setattr(check, "KEPT", tmp_path / "kept.pt")
    for seed in range(release.NUM_SEEDS):
        [line] = check.check_lesson(4, COURSE / "solutions", seed)
        assert line[1] == check.PASS

"""The list of mistakes that the tests must notice: each still fits the code, and its test is there."""

import pytest

from tools.maintain import mutations


def test_every_mistake_can_be_made_and_has_its_test():
    listed = mutations.mutations()
    assert len(listed) > 150
    assert mutations.stale(listed) == []


def test_what_is_stale_is_named(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "grpo.py").write_text("loss = a - b\n")
    (tmp_path / "tests" / "test_grpo.py").write_text("\ndef test_loss():\n    pass\n")
    fits = mutations.Mutation("sign", "grpo.py", "a - b", "a + b", "test_grpo.py::test_loss[case]")
    text = mutations.Mutation("text", "grpo.py", "a * b", "a / b", "test_grpo.py::test_loss")
    test = mutations.Mutation("test", "grpo.py", "a - b", "a + b", "test_grpo.py::test_losses")
    file = mutations.Mutation("file", "dapo.py", "a - b", "a + b", "test_dapo.py::test_loss")
    lines = mutations.stale([fits, text, test, file], tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["text", "test", "file", "file"]


def test_a_mistake_in_all_scripts_is_made_where_its_text_is(tmp_path):
    for name, text in (("grpo", "a - b"), ("dapo", "a - b"), ("sft", "c"), ("cispo", "a - b\na - b")):
        (tmp_path / f"{name}.py").write_text(text)
    mistake = mutations.Mutation("sign", "*.py", "a - b", "a + b", "test_grpo.py::test_loss")
    assert sorted(mistake.files(tmp_path)) == ["cispo.py", "dapo.py", "grpo.py"]
    assert (
        "cispo" not in mutations.stale([mistake], tmp_path)[0] and "2 times" in mutations.stale([mistake], tmp_path)[0]
    )


def test_a_word_that_no_mistake_has_is_refused():
    with pytest.raises(SystemExit, match="error: no mistake has 'a typo'"):
        mutations.main(mutations.Args(only="a typo"))

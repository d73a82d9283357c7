"""lab/stages.py: which commands it calls."""

import importlib
import sys

import pytest
from conftest import ROOT

from lab import stages


def test_a_dry_run_shows_the_commands(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    words = ["stages", "--dry_run", "--steps", "0", "4", "8", "--run", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", words)
    stages.main()
    lines = capsys.readouterr().out.splitlines()
    assert "--steps 8 --save_every 4" in lines[0] and len(lines) == 1 + 3 * len(stages.COMMANDS)
    assert sum("checkpoints/step_000008 " in line for line in lines) == len(stages.COMMANDS)


def test_less_is_measured_of_smollm2(monkeypatch, capsys, tmp_path):
    """Each of its commands takes the settings: --dry_run accepts them."""
    monkeypatch.chdir(ROOT)
    model = stages.SMOLLM2
    if not (ROOT / model).exists():
        pytest.skip(f"{model} is missing; `make model` makes it")
    args = stages.Args(smollm2=True, out=str(tmp_path))
    of_kk_tiny, of_smollm2 = [stages.measurements(args)[stage] for stage in ("step 5", "SmolLM2-135M")]
    assert len(of_kk_tiny) == 3 and len(of_smollm2) == 2
    for words in of_smollm2:
        monkeypatch.setattr(sys, "argv", [*words[2:], "--cache", str(tmp_path), "--dry_run"])
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(words[2]).main()
        assert not stop.value.code and "0.135 billion parameters" in capsys.readouterr().out


def test_another_models_stages(monkeypatch, capsys, tmp_path):
    """The command of the module's docstring: it trains that model, and measures it before training."""
    monkeypatch.chdir(ROOT)
    model = "Qwen/Qwen2.5-3B-Instruct"
    words = ["stages", "--steps", "0", "100", "200", "--model", model, "--run", str(tmp_path / "3b"), "--dry_run"]
    monkeypatch.setattr(sys, "argv", words)
    stages.main()
    training, *measured = capsys.readouterr().out.splitlines()
    assert f"grpo.py --model {model} " in training and "--steps 200 --save_every 100" in training
    assert sum(f"--model {model} " in line for line in measured) == len(stages.COMMANDS)


@pytest.mark.parametrize("steps", [["5", "0"], ["3", "3"]])
def test_stages_must_grow(steps, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stages", "--steps", *steps])
    with pytest.raises(SystemExit) as stop:
        stages.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "give growing numbers" in error and error.count("\n") == 1

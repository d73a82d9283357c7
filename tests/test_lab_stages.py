"""lab/stages.py: which commands it calls."""

import json
import sys

import pytest
from conftest import ROOT

from lab import stages

MODEL_OF_3B = "Qwen/Qwen2.5-3B-Instruct"


@pytest.mark.parametrize(
    ("flags", "model", "sizes", "measured"),
    [
        ("--steps 0 6 10", "models/kk_tiny", "--steps 10 --save_every 2", "checkpoints/step_000006"),
        # the command of the module's docstring: it trains that model, and measures it before training
        (f"--steps 0 100 200 --model {MODEL_OF_3B}", MODEL_OF_3B, "--steps 200 --save_every 100", MODEL_OF_3B),
    ],
)
def test_a_dry_run_shows_the_commands(flags, model, sizes, measured, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["stages", *flags.split(), "--run", str(tmp_path / "run"), "--dry_run"])
    stages.main()
    training, *lines = capsys.readouterr().out.splitlines()
    assert f"grpo.py --model {model} " in training and sizes in training
    assert len(lines) == 3 * len(stages.COMMANDS)
    assert sum(f"{measured} " in line for line in lines) == len(stages.COMMANDS)


@pytest.mark.parametrize(
    "kept, said",
    [
        ({"model": "other", "seed": 0}, "has a run with --model other, not models/kk_tiny: name another folder"),
        ({"model": "models/kk_tiny", "seed": 1}, "has a run with --seed 1, not 0: name another folder"),
        ({"model": "models/kk_tiny", "seed": 0}, "has no checkpoint of step 5: name another folder, or continue"),
    ],
)
def test_the_stages_of_another_run_are_not_measured(kept, said, monkeypatch, capsys, tmp_path):
    (tmp_path / "args.json").write_text(json.dumps(kept))
    (tmp_path / "checkpoints" / "step_000010").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["stages", "--run", str(tmp_path), "--dry_run"])
    with pytest.raises(SystemExit) as stop:
        stages.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: --run {tmp_path} {said}")

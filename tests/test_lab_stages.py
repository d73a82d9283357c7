"""lab/stages.py: which commands it calls."""

import importlib
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

"""nano_grpo.py: that it computes what grpo.py computes, and needs little."""

import ast
import json
import re

import prepared
import pytest
import torch
from conftest import KK_TINY, ROOT, metrics, python, run, small
from safetensors.torch import load_file

PAGE = ROOT / "nano_grpo.py"
LR = 1e-5  # small, so that rounding does not grow into a difference within three steps
SMALL = {"LEARNING_RATE": LR, "STEPS": 3, "PROMPTS": 4, "GROUP": 4, "TEST_PUZZLES": 4, "MAX_TOKENS": 48}
UPDATE = "        optimizer.step()\n"
LAST_OF_STEP = "    if USE_VLLM:  # copy"
RECORD = """
import json
json.dump({"rewards": all_rewards, "norms": norms}, open("record.json", "w"))
torch.save({name: weight.detach().cpu() for name, weight in policy.named_parameters()}, "weights.pt")
"""


def changed(changes, text=None):
    """The page's text with other constants: {name: value}."""
    text = text or PAGE.read_text()
    for name, value in changes.items():
        text, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}  ", text, flags=re.MULTILINE)
        assert count == 1, name
    return text


def replaced(text, *pairs):
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_page_and_grpo_py_make_the_same_three_steps(tmp_path):
    """vLLM gives both the same responses. Passes have other rows and shapes, so sums differ in their last bits.

    A gradient near 0 can then have another sign, and AdamW's first steps move its weight by lr in either direction: so
    the weights are compared in the mean.
    """
    sizes = {"dtype": "float32", "steps": 3, "people": "2-3", "lr": LR, "temperature": 1.0, "eval_temperature": 1.0}
    flags = small(tmp_path / "run", task="kk", max_prompt_tokens=256, eval_every=9, **sizes)
    run("grpo.py", *flags)
    rows = metrics(tmp_path / "run")
    saved = load_file(tmp_path / "run" / "checkpoints" / "step_000003" / "model.safetensors")

    text = replaced(
        changed(SMALL),
        (UPDATE, f"        norms.append(grad_norm.item())\n{UPDATE}"),
        (LAST_OF_STEP, f"    all_rewards.append(rewards.mean().item())\n{LAST_OF_STEP}"),
        ("SEED = 0\n", "SEED = 0\nnorms, all_rewards = [], []\n"),
        ('"models/kk_tiny"', f'"{KK_TINY}"'),
    )
    (tmp_path / "page.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}{RECORD}")
    done = prepared.run([tmp_path / "page.py"], root=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "record.json").read_text())
    norms = torch.tensor(record["norms"]).view(3, 2).mean(1)
    assert record["rewards"] == pytest.approx([row["reward"] for row in rows], abs=0)
    assert norms.tolist() == pytest.approx([row["grad_norm"] for row in rows], abs=1e-6)
    weights = torch.load(tmp_path / "weights.pt")
    apart = torch.cat([(weights[name] - saved[name]).abs().flatten() for name in weights])
    moved = torch.cat(
        [(saved[name] - load_file(KK_TINY / "model.safetensors")[name]).abs().flatten() for name in weights]
    )
    assert apart.mean() < 1e-6 < 1e-5 < moved.mean(), (apart.mean(), apart.max(), moved.mean())


def test_the_page_needs_neither_packages_nor_a_new_python():
    """It imports kk.py alone, which needs only Python's own modules, and nothing that Python 3.10 lacks."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from rewards import kk; print(kk.score('', {{'A': True}}))"
    done = python("-I", "-S", "-c", code)  # -S: without packages
    assert "'correct': False" in done.stdout, done.stderr
    for name in ("nano_grpo", "rewards/__init__", "rewards/kk", "rewards/puzzles", "rewards/rows"):
        text = (ROOT / f"{name}.py").read_text()
        ast.parse(text, feature_version=(3, 10))
        assert not re.search(r"[\w)\]][+*?]\+", text), f"{name}: possessive quantifiers are Python 3.11's"
    ours = re.findall(r"^(?:from|import) (rewards|runtime|tools|grpo)\b.*", PAGE.read_text(), re.MULTILINE)
    assert ours == ["rewards"]


def test_the_notebook_of_the_page_runs(monkeypatch, capsys):
    """Its cells in order, with small numbers and without the installation."""
    monkeypatch.chdir(ROOT)
    few = SMALL | {"STEPS": 1, "PROMPTS": 2, "GROUP": 2, "MAX_TOKENS": 8, "USE_VLLM": "False"}
    names = {"__name__": "notebook"}
    for cell in json.loads((ROOT / "examples" / "nano_grpo.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = re.sub(r"^%pip.*|!git .*", "pass", source, flags=re.MULTILINE)
            exec(compile(changed(few, source) if "\nSTEPS =" in source else source, cell["id"], "exec"), names)
    assert "transformers samples" in capsys.readouterr().out and names["grad_norm"] >= 0

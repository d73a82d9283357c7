"""Compare your own page, a changed copy of nano_grpo.py, with a script: all weights after the same training step.

    cp nano_grpo.py my_page.py                        then make it another algorithm
    python -m course.check_page my_page.py dr_grpo    compare it with dr_grpo.py

Your page makes one small step without vLLM. The script starts from the same weights, gets the same responses and
rewards, and makes its own updates. Keep the names of the page's variables: the check reads ids, mask, rewards,
advantages and policy. The exit code is 0 if the page passes, and 1 otherwise.
"""

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Literal

import runtime  # noqa: F401  # first: it says in one line which packages are missing

# isort: split
import torch
import tyro

SMALL = {"STEPS": 1, "PROMPTS": 4, "GROUP": 4, "UPDATES": 2, "TEST_PUZZLES": 1, "MAX_TOKENS": 48, "USE_VLLM": False}
SETTINGS = {  # the page's, as the scripts call them
    "model": "models/kk_tiny", "dtype": "float32", "temperature": 1.0, "lr": 1e-4, "prompts_per_step": 4,
    "responses_per_prompt": 4, "updates_per_step": 2, "max_response_tokens": 48, "compile": False,
    "gradient_checkpointing": False,
}  # fmt: skip
ENOUGH = 1e-6  # mean difference of a weight; where a gradient is near 0, rounding decides AdamW's direction


def step_of(page):
    """Return the page's variables after a small step. page: its path."""
    text = Path(page).read_text(encoding="utf-8")
    for name, value in SMALL.items():
        text = re.sub(rf"^{name} = [^#\n]*", f"{name} = {value}  ", text, flags=re.MULTILINE)
    variables = {"__name__": "page"}
    exec(compile(text, str(page), "exec"), variables)
    return variables


def step_of_script(name, page):
    """Return (advantages [N, T], policy) of a script's step. page: the variables with the responses and rewards."""
    script = importlib.import_module(name)
    fields = {field.name for field in dataclasses.fields(script.Args)}
    args = script.Args(**{name: value for name, value in SETTINGS.items() if name in fields})
    policy = script.load_policy(args, trained=True)
    batch = {"ids": page["ids"].cpu(), "mask": page["mask"].cpu()}  # [N, T]
    if hasattr(script, "log_probs"):
        batch["old_logp"], _ = script.log_probs(policy, batch, args)
        batch["ref_logp"] = batch["old_logp"]  # in the first step, the reference has the same weights
    batch["advantages"] = script.compute_advantages(page["rewards"].cpu(), batch, args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    script.update(policy, optimizer, batch, 1, args)
    return batch["advantages"], policy


def apart(policy, other):
    """Return the mean difference of two models' weights."""
    pairs = zip(policy.parameters(), other.parameters())
    return torch.cat([(a.detach().cpu() - b.detach().cpu()).abs().flatten() for a, b in pairs]).mean().item()


def verdict(page, name):
    """Return what is wrong with a page, compared with a script, or ""."""
    page = step_of(page)
    advantages, policy = step_of_script(name, page)
    if apart(page["policy"], policy) < ENOUGH:
        return ""
    if name != "grpo" and apart(page["policy"], step_of_script("grpo", page)[1]) < ENOUGH:
        return "the page still computes what grpo.py computes"
    if not torch.allclose(page["advantages"].cpu() * page["mask"].cpu(), advantages, atol=1e-4):
        return f"advantages differ from those of {name}.py"
    return f"advantages are right, but the weights after a step differ from those of {name}.py: look at the loss"


def main(
    page: tyro.conf.Positional[Path], script: tyro.conf.Positional[Literal["dr_grpo", "reinforce", "dapo", "grpo"]]
):
    """page: your file; script: the algorithm that it should compute."""
    wrong = verdict(page, script)
    print(f"WRONG  {page}: {wrong}" if wrong else f"PASS  {page} computes what {script}.py computes")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

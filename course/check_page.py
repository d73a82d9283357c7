"""Compare your own page, a changed copy of nano_grpo.py, with a script: gradients and weights of the same step.

    cp nano_grpo.py my_page.py                        then make it another algorithm
    python -m course.check_page my_page.py dr_grpo    compare it with dr_grpo.py

Your page makes one small step without vLLM. The script starts from the same weights, gets the same responses and
rewards, and makes its own updates. Keep the names of the page's variables: the check reads ids, mask, rewards,
advantages and policy. The exit code is 0 if the page passes, and 1 otherwise.
"""

import contextlib
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


@contextlib.contextmanager
def gradient_norms():
    """Yield a list that gets the norm of each gradient: AdamW's steps do not show a common factor in the loss."""
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def recorded(*arguments, **options):
        norms.append(float(clip(*arguments, **options)))
        return torch.tensor(norms[-1])

    torch.nn.utils.clip_grad_norm_ = recorded
    try:
        yield norms
    finally:
        torch.nn.utils.clip_grad_norm_ = clip


def step_of(page):
    """Return the page's variables after a small step, and the norms of its gradients as `norms`. page: its path."""
    text = Path(page).read_text(encoding="utf-8")
    for name, value in SMALL.items():
        text = re.sub(rf"^{name} = [^#\n]*", f"{name} = {value}  ", text, flags=re.MULTILINE)
    variables = {"__name__": "page"}
    with gradient_norms() as norms:
        exec(compile(text, str(page), "exec"), variables)
    return variables | {"norms": norms}


def step_of_script(name, page):
    """Return a script's step: advantages [N, T], policy, norms. page: the variables with the responses and rewards."""
    script = importlib.import_module(name)
    fields = {field.name for field in dataclasses.fields(script.Args)}
    args = script.Args(**{name: value for name, value in SETTINGS.items() if name in fields})
    policy = script.load_policy(args, trained=True)
    batch = {"ids": page["ids"].cpu(), "mask": page["mask"].cpu()}  # [N, T]
    if hasattr(script, "log_probs"):
        batch["old_logp"], _ = script.log_probs(policy, batch, args)
        batch["ref_logp"] = batch["old_logp"]  # in the first step, the reference has the same weights
    scores = [{"reward": reward} for reward in page["rewards"].tolist()]
    batch["advantages"] = script.compute_advantages(scores, batch, args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    with gradient_norms() as norms:
        script.update(policy, optimizer, batch, 1, args)
    return {"advantages": batch["advantages"], "policy": policy, "norms": norms}


def same(page, script):
    """Return whether two steps have the same gradients, by their norms, and lead to the same weights."""
    pairs = zip(page["policy"].parameters(), script["policy"].parameters())
    apart = torch.cat([(a.detach().cpu() - b.detach().cpu()).abs().flatten() for a, b in pairs])
    norms = torch.tensor(page["norms"]), torch.tensor(script["norms"])
    return len(norms[0]) == len(norms[1]) and torch.allclose(*norms, rtol=1e-3) and apart.mean() < ENOUGH


def verdict(page, name):
    """Return what is wrong with a page, compared with a script, or ""."""
    page = step_of(page)
    script = step_of_script(name, page)
    if same(page, script):
        return ""
    if name != "grpo" and same(page, step_of_script("grpo", page)):
        return "the page still computes what grpo.py computes"
    if not torch.allclose(page["advantages"].cpu() * page["mask"].cpu(), script["advantages"], atol=1e-4):
        return f"advantages differ from those of {name}.py"
    return f"advantages are right, but the updates differ from those of {name}.py: look at the loss and its divisor"


def main(
    page: tyro.conf.Positional[Path], script: tyro.conf.Positional[Literal["dr_grpo", "reinforce", "dapo", "grpo"]]
):
    """page: your file; script: the algorithm that it should compute."""
    wrong = verdict(page, script)
    print(f"WRONG  {page}: {wrong}" if wrong else f"PASS  {page} computes what {script}.py computes")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

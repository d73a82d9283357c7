"""What course/check_step.py has done in the process of a student's step.py: each function, on given numbers."""

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.logging.disable_progress_bar()
SEED = 0
FLAT = 0.4


def load(model, flat=False):
    """The policy. flat: one with FLAT times its logits, so that low-probability tokens are drawn as well."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    if flat:
        policy.model.norm.weight.data.mul_(FLAT)
    return policy


def samples(module, policies, tokenizer, texts):
    """What the module's `sample` gives for puzzles with these texts: (ids, mask, texts) with each policy."""
    problems = [{"messages": [{"role": "user", "content": text}], "prefix": "<think>"} for text in texts]
    found = []
    for policy in policies:
        torch.manual_seed(SEED)
        with torch.no_grad():
            ids, mask, responses = module.sample(policy, tokenizer, problems)
        found.append((ids, mask, list(responses)))
    return found


def run(module, arguments, gave):
    """Fills `gave`: {function: what it gave, as a dictionary of tensors and texts}. Errors come through.

    arguments: model (a folder), texts (puzzles for `sample`), ids [N, T], mask [N, T], rewards [N], and logp and
    advantages [N, T] as `loss` gets them, so that a mistake in one function is not one in the next.
    """
    model, ids, mask = arguments["model"], arguments["ids"], arguments["mask"]
    policy = load(model)
    logp = module.log_probs(policy, ids.clone(), mask.clone())
    gave["log_probs"] = {"logp": logp.detach(), "has_gradient": logp.requires_grad}
    gave["advantages"] = {"advantages": module.advantages(arguments["rewards"].clone(), mask.clone())}
    leaf = arguments["logp"].clone().requires_grad_()
    value = module.loss(leaf, arguments["advantages"].clone(), mask.clone())
    gave["loss"] = {"loss": value.detach(), "gradient": torch.autograd.grad(value, leaf)[0]}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.01)
    for _ in range(2):  # the second shows a gradient that was not set to zero
        module.update(policy, optimizer, ids.clone(), mask.clone(), arguments["rewards"].clone())
    gave["update"] = {"weights": torch.cat([weight.detach().flatten() for weight in policy.parameters()])}
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    gave["sample"] = {"drawn": samples(module, [load(model), load(model, flat=True)], tokenizer, arguments["texts"])}

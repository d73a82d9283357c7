"""Run the functions of a student's step.py on given numbers, in the process that course/check_step.py starts."""

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.logging.disable_progress_bar()
SEED = 0
FLAT = 0.4


def load(model, flat=False):
    """Load the policy. flat: multiply its logits by FLAT, so that low-probability tokens are sampled as well."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    if flat:
        policy.model.norm.weight.data.mul_(FLAT)
    return policy


def samples(module, policies, tokenizer, texts):
    """Run the module's `sample` on puzzles with these texts. Return (ids, mask, texts) for each policy."""
    problems = [{"messages": [{"role": "user", "content": text}], "prefix": "<think>"} for text in texts]
    found = []
    for policy in policies:
        torch.manual_seed(SEED)
        with torch.no_grad():
            ids, mask, responses = module.sample(policy, tokenizer, problems)
        found.append((ids, mask, list(responses)))
    return found


def run(module, arguments, gave):
    """Fill `gave`: {function: its result, as a dictionary of tensors and texts}. Exceptions are not caught.

    arguments: model (a folder), texts (puzzles for `sample`), ids [N, T], mask [N, T], rewards [N], and logp and
    advantages [N, T] for `loss`, so that a mistake in one function does not reach the next.
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
    for _ in range(2):  # the second update exposes a gradient that was not set to zero
        module.update(policy, optimizer, ids.clone(), mask.clone(), arguments["rewards"].clone())
    gave["update"] = {"weights": torch.cat([weight.detach().flatten() for weight in policy.parameters()])}
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    gave["sample"] = {"drawn": samples(module, [load(model), load(model, flat=True)], tokenizer, arguments["texts"])}

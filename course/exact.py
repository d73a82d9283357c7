"""What theory says about three choices, computed exactly: no model, no sampling, seconds on any machine.

    python -m course.exact

One prompt, three possible responses: a right one and two wrong ones, of 2 and of 8 tokens. The first token decides
which one it is; the others are certain. All groups that can be sampled are enumerated with their probabilities, and the
scripts' own compute_advantages and policy_loss make the gradient of each. So means and variances have no error bars.
"""

import math
from types import SimpleNamespace

import torch

import dr_grpo
import grpo
import reinforce
import rloo

SCORES = [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.0}]
LENGTHS = [2, 2, 8]
LIMIT = 8  # --max_response_tokens, Dr. GRPO's divisor
START = torch.tensor([0.25, 0.375, 0.375], dtype=torch.float64)  # probabilities before training


def no_baseline(scores, batch, args):
    """Return the rewards themselves as advantages, [N, T]."""
    return torch.tensor([[s["reward"]] for s in scores]) * batch["mask"]


ADVANTAGES = {  # all with reinforce.py's loss
    "no baseline": no_baseline,
    "reinforce.py": reinforce.compute_advantages,
    "rloo.py": rloo.compute_advantages,
    "grpo.py": grpo.compute_advantages,
}


def groups(probabilities, size):
    """Yield (probability, [the response of each of `size` samples]) of all groups, their order left out."""
    for right in range(size + 1):
        for short in range(size - right + 1):
            counts = [right, short, size - right - short]
            ways = math.factorial(size) // math.prod(map(math.factorial, counts))
            chance = ways * math.prod(p**n for p, n in zip(probabilities.tolist(), counts))
            yield chance, [kind for kind, n in enumerate(counts) for _ in range(n)]


def gradient(probabilities, group, advantages, divisor):
    """Return ∇J of a group's responses, [3], with respect to the logits of the first token.

    advantages: a compute_advantages; divisor: "tokens" (grpo.py), "responses" (DeepSeekMath's GRPO: first a mean over
    each response's tokens) or "constant" (dr_grpo.py).
    """
    logits = probabilities.log().requires_grad_()
    lengths = torch.tensor([LENGTHS[kind] for kind in group])
    mask = torch.arange(LIMIT) < lengths[:, None]  # [N, T]
    logp = torch.zeros(mask.shape, dtype=torch.float64)
    logp[:, 0] = logits.log_softmax(0).detach()[group]
    batch = {"mask": mask, "old_logp": logp, "ref_logp": logp}
    args = SimpleNamespace(responses_per_prompt=len(group), clip_low=0.2, clip_high=0.24, kl_coef=0.0)
    args.max_response_tokens = LIMIT
    batch["advantages"] = advantages([SCORES[kind] for kind in group], batch, args).double()
    first = torch.zeros_like(logp)
    first[:, 0] = 1
    logp = logp * (1 - first) + logits.log_softmax(0)[group][:, None] * first
    if divisor == "constant":
        loss = dr_grpo.policy_loss(logp, batch, len(group) * LIMIT, args)[0]
    elif divisor == "tokens":
        loss = grpo.policy_loss(logp, batch, int(lengths.sum()), args)[0]
    else:
        loss = 0
        for i, length in enumerate(lengths.tolist()):
            row = {name: value[i : i + 1] for name, value in batch.items()}
            loss = loss + grpo.policy_loss(logp[i : i + 1], row, len(group) * length, args)[0]
    loss.backward()
    return -logits.grad


def moments(size, advantages, divisor="constant", probabilities=START):
    """Return (mean, variance, both [3]) of ∇J over all groups of this size."""
    mean = square = torch.zeros(3, dtype=torch.float64)
    for chance, group in groups(probabilities, size):
        found = gradient(probabilities, group, advantages, divisor)
        mean = mean + chance * found
        square = square + chance * found**2
    return mean, square - mean**2


def train(divisor, steps=100, size=4, lr=2.0):
    """Follow the exact mean gradient of GRPO's advantages. Return the probabilities afterwards, [3]."""
    probabilities = START
    for _ in range(steps):
        mean, _ = moments(size, grpo.compute_advantages, divisor, probabilities)
        probabilities = (probabilities.log() + lr * mean).softmax(0)
    return probabilities


def main():
    print("1. A baseline. Gradient of the right response's logit, groups of 8, multiplied by 8 (the limit):")
    print("   advantages      mean    standard deviation    mean / standard deviation")
    for name, advantages in ADVANTAGES.items():
        mean, variance = moments(8, advantages)
        mean, deviation = 8 * mean[0].item(), 8 * variance[0].sqrt().item()
        print(f"   {name:12} {mean:7.4f} {deviation:12.4f} {mean / deviation:20.2f}")

    print("\n2. A group. 16 responses to one prompt, as groups of G (grpo.py):")
    print("   G    groups with a difference    mean    standard deviation over 16 responses")
    for size in (2, 4, 8, 16):
        mean, variance = moments(size, grpo.compute_advantages)
        mixed = 1 - START[0].item() ** size - (1 - START[0].item()) ** size
        deviation = (variance[0] * size / 16).sqrt().item()
        print(f"  {size:2} {mixed:18.3f} {8 * mean[0].item():21.4f} {8 * deviation:12.4f}")

    print("\n3. A divisor. After 100 steps along the exact mean gradient (groups of 4):")
    print("   divided by     right    long among the wrong (0.500 before)")
    for divisor in ("constant", "tokens", "responses"):
        right, short, long = train(divisor).tolist()
        print(f"   {divisor:12} {right:7.3f} {long / (short + long):12.3f}")


if __name__ == "__main__":
    main()

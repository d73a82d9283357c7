"""Solutions of lesson 2: ratio, clip and critic. Run as a script, it prints the numbers of 2.4."""

import torch


def clipped_loss(logp, old_logp, advantages, mask, clip_low, clip_high):
    ratio = (logp - old_logp).exp()  # ρ, [N, T]
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.min(ratio * advantages, bounded * advantages)  # [N, T]
    return -surrogate[mask].sum() / mask.sum()


def generalized_advantages(rewards, values, mask, gamma, lam):
    num_rows, num_places = mask.shape
    places = torch.arange(num_places)
    last = (mask * places).amax(1)  # [N], the place of each response's last token
    token_rewards = torch.zeros_like(values)  # [N, T]
    token_rewards[torch.arange(num_rows), last] = rewards
    advantages = torch.zeros_like(values)
    advantage = torch.zeros(num_rows)  # of the token after this one
    next_value = torch.zeros(num_rows)  # nothing is to come after the last token
    for t in reversed(range(num_places)):
        surprise = token_rewards[:, t] + gamma * next_value - values[:, t]  # δ, [N]
        advantage = (surprise + gamma * lam * advantage) * mask[:, t]
        advantages[:, t] = advantage
        next_value = values[:, t] * mask[:, t]
    return advantages  # [N, T]


def k3_kl(logp, ref_logp):
    difference = ref_logp - logp  # log(π_ref/π), [N, T]
    return difference.exp() - difference - 1


# 2.4  The loss is 0 at the first update, though the gradient is not. Show it.
#
# At the first update no weight has moved: ρ = 1 for every token, nothing is clipped, and k3 = 0. So
# the loss is minus the mean of the advantages over the tokens. In a group the advantages add up to
# 0. If the responses are equally long, the loss is exactly 0 up to rounding. The gradient of ρ by
# log π is ρ = 1, so each token's gradient is −A divided by the number of tokens: not 0.
#
#     4 responses of 3 tokens: loss 0.0000
#     gradient by log π of each response's first token: -0.0722, 0.0722, 0.0722, -0.0722
#
# With responses of different lengths the loss is a mean that is weighted by length, so it is not 0.
# Here one of the wrong responses has a single token:
#
#     lengths 3, 1, 3, 3: loss -0.1732
#
# The loss says nothing about progress: look at the reward, accuracy and gradient norm.


def open_question():
    advantages = (torch.tensor([1.0, 0.0, 0.0, 1.0]) - 0.5) / (3**-0.5 + 1e-6)  # a group of 4
    advantages = advantages[:, None].expand(4, 3)  # [N, T]
    old_logp = torch.full((4, 3), -1.0)
    logp = old_logp.clone().requires_grad_()
    mask = torch.ones(4, 3, dtype=torch.bool)
    loss = clipped_loss(logp, old_logp, advantages, mask, 0.2, 0.24)
    loss.backward()
    print(f"4 responses of 3 tokens: loss {loss.abs():.4f}")
    first = ", ".join(f"{value:.4f}" for value in logp.grad[:, 0])
    print(f"gradient by log π of each response's first token: {first}")
    mask[1, 1:] = False
    loss = clipped_loss(logp, old_logp, advantages, mask, 0.2, 0.24)
    print(f"lengths 3, 1, 3, 3: loss {loss:.4f}")


if __name__ == "__main__":
    open_question()

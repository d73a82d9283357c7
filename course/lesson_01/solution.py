"""Solutions of lesson 1: baselines and groups. Run as a script, it prints the numbers of 1.3."""

import torch


def leave_one_out(rewards, group_size):
    groups = rewards.view(-1, group_size)  # [prompts, G]
    sum_of_others = groups.sum(1, keepdim=True) - groups  # [prompts, G]
    advantages = groups - sum_of_others / (group_size - 1)
    return advantages.reshape(-1)  # [N]


def group_advantages(rewards, group_size):
    groups = rewards.view(-1, group_size)  # [prompts, G]
    groups = groups - groups[:, :1]  # equal rewards: exactly 0, where their mean would be rounded
    mean = groups.mean(1, keepdim=True)  # [prompts, 1]
    std = groups.std(1, keepdim=True)  # ddof 1, torch's default
    advantages = (groups - mean) / (std + 1e-6)
    return advantages.reshape(-1)  # [N]


# 1.3  How much variance does each baseline remove if a response is right with probability 2/8?
#
# Take a policy that is right with probability p = 2/8, and has the logit of being right as its
# weight. ∇log π is 1 − p for a right response and −p for a wrong one. A right response gets reward
# 1, a wrong one 0. A group of 8 has 0 to 8 right responses, with binomial probabilities. So the
# mean and variance of the group's gradient, 1/8 · Σ A·∇log π, can be computed without sampling:
#
#     no baseline:      mean 0.1875, variance 0.01318, variance / mean² 0.375
#     the group's mean: mean 0.1641, variance 0.00545, variance / mean² 0.202
#     leave one out:    mean 0.1875, variance 0.00711, variance / mean² 0.202
#     GRPO:             mean 0.3554, variance 0.01727, variance / mean² 0.137
#
# - Without a baseline the mean is the true gradient, p(1 − p) = 0.1875.
# - The group's mean contains the response's own reward. So the gradient shrinks to 7/8.
# - Leave one out has the true gradient again, and little more than half of the variance.
# - What counts is variance / mean², because a factor can be put into the learning rate. The group's
#   mean and leave one out are the same up to the factor 8/7.
# - GRPO also divides by the group's standard deviation. So it is no estimate of this gradient: its
#   mean is another number, and prompts that are nearly always or nearly never solved count more.
#
# Adding 1 to all rewards changes nothing with a baseline. Without one it is the worst case:
#
#     no baseline, rewards 2 and 1: mean 0.1875, variance 0.07178, variance / mean² 2.042


def gradient_moments(advantages_of, right=1.0, wrong=0.0, group_size=8, probability=0.25):
    """(mean, variance) of a group's gradient. advantages_of: rewards [G] → advantages [G]."""
    gradients, weights = [], []
    for num_right in range(group_size + 1):
        is_right = torch.arange(group_size) < num_right  # [G]
        rewards = torch.where(is_right, right, wrong).double()
        scores = is_right.double() - probability  # ∇log π by the logit of being right
        gradients.append((advantages_of(rewards) * scores).mean())
        distribution = torch.distributions.Binomial(group_size, torch.tensor(probability).double())
        weights.append(distribution.log_prob(torch.tensor(float(num_right)).double()).exp())
    gradients, weights = torch.stack(gradients), torch.stack(weights)
    mean = (weights * gradients).sum()
    return mean, (weights * (gradients - mean).square()).sum()


def open_question():
    def show(name, mean, variance):
        relative = variance / mean**2
        print(f"{name} mean {mean:.4f}, variance {variance:.5f}, variance / mean² {relative:.3f}")

    show("no baseline:     ", *gradient_moments(lambda rewards: rewards))
    show("the group's mean:", *gradient_moments(lambda rewards: rewards - rewards.mean()))
    show("leave one out:   ", *gradient_moments(lambda rewards: leave_one_out(rewards, 8)))
    show("GRPO:            ", *gradient_moments(lambda rewards: group_advantages(rewards, 8)))
    show("no baseline, rewards 2 and 1:", *gradient_moments(lambda rewards: rewards, 2.0, 1.0))


if __name__ == "__main__":
    open_question()

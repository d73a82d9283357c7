"""Solutions of lesson 0: the policy gradient. Run as a script, it prints the numbers of 0.3."""

import torch


def token_log_probs(logits, ids):
    all_log_probs = logits.log_softmax(-1)  # [N, T, V]
    return all_log_probs.gather(-1, ids[:, :, None])[:, :, 0]  # [N, T]


def reinforce_loss(logp, rewards, mask):
    objective = rewards[:, None] * logp  # [N, T]
    return -objective[mask].sum() / mask.sum()


# 0.3  Why does a reward of +1 for all responses still move the weights, and why not in expectation?
#
# Take a policy that writes one token, 0, 1 or 2, with probabilities π = 0.5, 0.3, 0.2, and has the
# logits as weights. The gradient of log π(token) is onehot(token) − π. It is never zero, so with
# reward 1 each response makes its own token more probable. Weighted with the probabilities of being
# sampled, these gradients cancel: Σ_token π(token)·(onehot(token) − π) = π − π = 0. In general,
# Σ_o π(o)·∇log π(o) = Σ_o ∇π(o) = ∇1 = 0.
#
#     mean gradient: 0.00, 0.00, 0.00
#     mean squared norm with 1 response: 0.6200
#     mean squared norm with 8 responses: 0.0775
#     mean squared norm with 768 responses: 0.0008
#
# What a batch adds to the weights is noise. It shrinks with the number of responses, but it is
# never zero. AdamW divides the gradient by its own size, so it makes steps of the usual size out of
# noise. A baseline removes this part: reward 1 minus mean 1 is 0 for every response.
#
# There is a catch. The cancelling is exact if the sum is divided by a fixed number, such as the
# number of responses. reinforce.py divides by the number of tokens that came out. Take a policy
# that ends after one token or after two, with probability 1/2 each, and has the logit of ending
# early as its weight. The mean gradient under reward 1 is then
#
#     divided by the tokens, 1 response: 0.1250
#     divided by the tokens, 8 responses: 0.0145
#     divided by the tokens, 768 responses: 0.0001
#
# which is a push towards short responses. It vanishes as the batch grows, and the baseline removes
# it as well.


def squared_norm_of_noise(probabilities):
    """The mean squared norm of one response's gradient under reward 1. probabilities: [V]."""
    scores = torch.eye(len(probabilities)) - probabilities  # [V, V], ∇log π of each token
    return (probabilities * scores.square().sum(1)).sum()


def push_towards_short(num_responses):
    """The mean gradient under reward 1 if the sum is divided by the tokens. 1 or 2 tokens each."""
    num_short = torch.arange(num_responses + 1, dtype=torch.float64)  # of 1 token: each possible case
    total = torch.tensor(float(num_responses), dtype=torch.float64)
    log_ways = total.add(1).lgamma() - (num_short + 1).lgamma() - (total - num_short + 1).lgamma()
    probability = (log_ways - total * torch.tensor(2.0).double().log()).exp()
    sum_of_scores = num_short - total / 2  # a short response has the score 1/2, a long one −1/2
    num_tokens = 2 * total - num_short
    return (probability * sum_of_scores / num_tokens).sum()


def open_question():
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    scores = torch.eye(3) - probabilities
    mean = probabilities @ scores  # [V]
    print("mean gradient:", ", ".join(f"{value:.2f}" for value in mean.abs()))
    for count in (1, 8, 768):
        norm = squared_norm_of_noise(probabilities) / count
        print(f"mean squared norm with {count} response{'s' * (count > 1)}: {norm:.4f}")
    for count in (1, 8, 768):
        push = push_towards_short(count)
        print(f"divided by the tokens, {count} response{'s' * (count > 1)}: {push:.4f}")


if __name__ == "__main__":
    open_question()

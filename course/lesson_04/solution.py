"""Solutions of lesson 4: length and truncation. Run as a script, it prints the numbers of 4.3."""

import torch


def token_mean(loss, mask):
    return loss[mask].sum() / mask.sum()


def mean_of_means(loss, mask):
    length = mask.sum(1).clamp(min=1)  # [N]; a row without response tokens counts as 0
    means = loss.masked_fill(~mask, 0).sum(1) / length  # [N]; loss * mask would keep a NaN
    return means.mean()


def overlong_penalty(length, max_tokens, buffer):
    too_many = max(0, length - (max_tokens - buffer))  # tokens within the buffer
    return -too_many / max(1, buffer)


# 4.3  What does a group teach of which the shortest response is wrong? Of 10, 100 and 1000 tokens.
#
# A times the weight of a token, and that summed over the response:
#
#     token_mean:    10 tokens: -0.00104, all -0.010
#     token_mean:    100 tokens: +0.00052, all +0.052
#     token_mean:    1000 tokens: +0.00052, all +0.520
#     mean_of_means: 10 tokens: -0.03849, all -0.385
#     mean_of_means: 100 tokens: +0.00192, all +0.192
#     mean_of_means: 1000 tokens: +0.00019, all +0.192
#
# - token_mean: all tokens count alike, so the longest response has 89 % of the weight. The update
#   is mostly "write like the long one". If that were wrong, its 1000 tokens would be pushed down as
#   hard as those of a short wrong one, and the update would be mostly "don't write like that".
# - mean_of_means: all responses count alike, so a token of the longest weighs a hundredth of the
#   shortest one's. Here the update is mostly "don't write the short one". If the longest were
#   wrong, each of its tokens would be punished a hundredth as hard. In general a right answer is
#   rewarded more per token if it is short, and a wrong one is punished less per token if it is
#   long. The second is the bias that Dr. GRPO describes: wrong responses grow. (This is GRPO as
#   first published; acpo.py, gspo.py and sapo.py have it too.)
# - dr_grpo.py divides by a constant, responses × max_response_tokens. Within a mini-batch that
#   weighs tokens as token_mean does; but a token weighs the same in all mini-batches, however long
#   their responses are.

LENGTHS = (10, 100, 1000)
ADVANTAGES = torch.tensor([-2, 1, 1]) / 3**0.5  # of the rewards 0, 1, 1; σ with G − 1


def open_question():
    mask = torch.arange(1000) < torch.tensor(LENGTHS)[:, None]  # [3, 1000]
    for name, aggregate in (("token_mean:   ", token_mean), ("mean_of_means:", mean_of_means)):
        logp = torch.zeros(3, 1000, requires_grad=True)
        aggregate(ADVANTAGES[:, None] * logp, mask).backward()
        for length, weights in zip(LENGTHS, logp.grad, strict=True):
            print(f"{name} {length} tokens: {weights[0]:+.5f}, all {weights.sum():+.3f}")


if __name__ == "__main__":
    open_question()

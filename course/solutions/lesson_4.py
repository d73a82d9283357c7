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


# 4.3  Which responses does each aggregation favour? Two of 10 and 1000 tokens.
#
# The weight of a token is what its loss is multiplied by:
#
#     token_mean:    token of the short one 0.000990, of the long one 0.000990
#                    all tokens of the short one 0.010, of the long one 0.990
#     mean_of_means: token of the short one 0.050000, of the long one 0.000500
#                    all tokens of the short one 0.500, of the long one 0.500
#
# - token_mean: all tokens count alike, so the long response decides the update. If it is wrong, its
#   1000 tokens are pushed down as hard as those of a short wrong one.
# - mean_of_means: all responses count alike, so a token of the long one weighs a hundredth of the
#   short one's. A right answer is rewarded more per token if it is short, and a wrong one is
#   punished less per token if it is long. The second is the bias that Dr. GRPO describes: wrong
#   responses grow. (This is GRPO as first published; acpo.py, gspo.py and sapo.py have it too.)
# - dr_grpo.py divides by a constant, responses × max_response_tokens. Within a mini-batch that
#   weighs tokens as token_mean does; but a token weighs the same in all mini-batches, however long
#   their responses are.


def open_question():
    mask = torch.arange(1000) < torch.tensor([[10], [1000]])  # [2, 1000]
    for name, aggregate in (("token_mean:   ", token_mean), ("mean_of_means:", mean_of_means)):
        loss = torch.zeros(2, 1000, requires_grad=True)
        aggregate(loss, mask).backward()
        token, response = loss.grad[:, 0], loss.grad.sum(1)
        print(f"{name} token of the short one {token[0]:.6f}, of the long one {token[1]:.6f}")
        what = "               all tokens of the short one"
        print(f"{what} {response[0]:.3f}, of the long one {response[1]:.3f}")


if __name__ == "__main__":
    open_question()

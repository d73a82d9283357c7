"""Solutions of lesson 13: stale responses. Run as a script, it prints the numbers of 13.3."""

import torch


def versions(num_steps, lag):
    return (torch.arange(num_steps) - lag).clamp(min=0)


def decoupled_loss(logp, old_logp, sampler_logp, advantages, mask, low, high, cap):
    ratio = (logp - old_logp).exp()  # ρ, [N, T]
    advantages = advantages[:, None]  # [N, 1]
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    weight = (old_logp - sampler_logp).exp().clamp(max=cap).detach()  # w, [N, T]
    return -(weight * surrogate)[mask].sum() / mask.sum()


# 13.3  From how many GPUs on is a sampler of its own faster than taking turns?
#
#     2 GPUs: in turns 220.0 s, at once 220.0 s
#     4 GPUs: in turns 120.0 s, at once 120.0 s
#     8 GPUs: in turns 70.0 s, at once 66.7 s
#     16 GPUs: in turns 45.0 s, at once 40.0 s
#     64 GPUs: in turns 26.2 s, at once 23.6 s
#
# Always from 7 on (77.1 and 70.0 s). Both take the same time with 2, 4, 5 and 6. With 3, the split
# is too coarse (153.3 and 200.0 s). With 64 GPUs a tenth is gained: both wait for the longest
# response. To gain more, a trainer must not wait for it. It takes the responses that are ready, and
# the long one is older than the others. What a lag of 8 costs in accuracy is in the lesson's table,
# and lags of 2 and 4 are in benchmarks/kk_tiny/lag.md. We have not measured a lag of 1.

# 13.4  A merge without a conflict says that the lines fit, and not that the ideas do.
#
# AR multiplies the advantage of a token by α·π_old + 1 − α, and the correction multiplies its
# surrogate by π_old/π_sampler: a token that has become improbable since it was sampled is shrunk
# twice. Lopti leaves the mask with the tokens of one stage, and GSPO's s is the mean over the mask:
# s is then over the improbable tokens of a response, and later over the others, and neither is the
# paper's. `--alpha 0` turns AR off, `--eta 0` Lopti, `--correction none` the correction, and with
# `--lag 0` the responses are not stale.
# dapo.py samples again until enough groups are mixed. It knows that only from this step's rewards,
# and an asynchronous sampler was asked for this step --lag steps ago. Somebody must decide what a
# refill's lag is, and what happens to the groups that come too late. No merge decides that.


def open_question(sampling=200, updating=200, longest=20):
    for n in (2, 4, 8, 16, 64):
        in_turns = (sampling + updating) / n + longest
        at_once = min(max(sampling / a + longest, updating / (n - a)) for a in range(1, n))
        print(f"{n} GPUs: in turns {in_turns:.1f} s, at once {at_once:.1f} s")


if __name__ == "__main__":
    open_question()

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
# From 8 on, and with 64 GPUs by a tenth: there both wait for the longest response. To gain more, a
# trainer must not wait for it. It takes the responses that are ready, and the long one is older
# than the others. What a lag costs in accuracy is in the lesson's table.


def open_question(sampling=200, updating=200, longest=20):
    for n in (2, 4, 8, 16, 64):
        in_turns = (sampling + updating) / n + longest
        at_once = min(max(sampling / a + longest, updating / (n - a)) for a in range(1, n))
        print(f"{n} GPUs: in turns {in_turns:.1f} s, at once {at_once:.1f} s")


if __name__ == "__main__":
    open_question()

"""Solutions of lesson 6: off policy. Run as a script, it prints the kept numbers of 6.3."""


def sequence_ratio(logp, old_logp, mask):
    length = mask.sum(1)  # [N], |o_i|
    log_ratio = (logp - old_logp).masked_fill(~mask, 0)  # [N, T]; 0 · −inf would be NaN
    return (log_ratio.sum(1) / length).exp()  # s, [N]


def token_weights(ratio, advantages, clip_low, clip_high, method):
    low, high = 1 - clip_low, 1 + clip_high
    if method == "cispo":
        weights = ratio.clamp(low, high) * advantages
    else:  # "grpo"
        too_high = (advantages > 0) & (ratio > high)
        too_low = (advantages < 0) & (ratio < low)
        weights = (ratio * advantages).masked_fill(too_high | too_low, 0)
    return weights.detach()  # [N, T]


# 6.3  Why does each method cut off these tokens?
#
# lab/results/lens.json has, after 12 updates on the same responses of
# kk_tiny, the share of tokens that lost 99 % or more of the weight they had at the first update, by
# the token's probability:
#
#     method   p ≤ 0.25  0.25 – 0.5  0.5 – 0.75  p > 0.75
#     grpo       20.5 %       7.5 %       6.2 %     0.2 %
#     acpo        1.5 %       0.3 %       0.3 %     0.0 %
#     dppo        1.2 %       3.7 %      11.0 %     0.2 %
#     cispo       0.2 %       0.0 %       0.0 %     0.0 %
#     sapo        0.3 %       0.0 %       0.0 %     0.0 %
#     gspo       88.5 %      87.1 %      89.0 %    88.9 %
#
# - GRPO's clip bounds the ratio. A low-probability token's ratio leaves the range after a small
#   change of its probability, so the clip falls on low-probability tokens.
# - ACPO gives a bin of probabilities a wider range if its ratios spread more. So few are cut off.
# - DPPO bounds the difference π − π_old. That is easiest to exceed in the middle: a token of
#   probability 0.6 can move by 0.15, one of 0.05 hardly, and one of 0.95 only downwards.
# - CISPO cuts off no token by design: it bounds the weight. SAPO lets the weight fall smoothly. The
#   table has 1 and 2 such tokens; the weight of a ratio near 0 is near 0 in both.
# - GSPO cuts off whole responses, whatever their tokens' probabilities. Its range is 600 times
#   narrower than GRPO's; 12 updates on the same responses are far more than it is made for.


def open_question():
    import json
    from pathlib import Path

    results = Path(__file__).parents[2] / "lab" / "results" / "lens.json"
    lens = json.loads(results.read_text())
    first, *others = lens["bins"]
    print(f"{'method':7} {first:>9}" + "".join(f"{name:>12}" for name in others[:2]), end="")
    print(f"{others[2]:>10}")
    for method in ("grpo", "acpo", "dppo", "cispo", "sapo", "gspo"):
        shares = [f"{100 * share:.1f} %" for share in lens["scripts"][method]["later"]["cut"]]
        print(f"{method:7} {shares[0]:>9}{shares[1]:>12}{shares[2]:>12}{shares[3]:>10}")


if __name__ == "__main__":
    open_question()

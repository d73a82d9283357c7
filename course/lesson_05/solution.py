"""Solutions of lesson 5: AR and Lopti. Run as a script, it prints the kept numbers of 5.3."""

import torch


def ar_weight(old_logp, alpha):
    return alpha * old_logp.exp() + 1 - alpha  # [N, T]


def lopti_stages(logp, mask, eta):
    log_eta = torch.tensor(float(eta)).log()  # −inf if η is 0
    is_low = logp <= log_eta  # as logarithms: exp would round a tiny probability to 0
    return mask & is_low, mask & ~is_low  # low first


# 5.3  What would high first do?
#
# The paper's reason for low first: an update on low-probability tokens also moves the probable
# ones, often against their advantage, because its gradient is large. The later stage on the
# probable tokens can mend that. With high first, the low-probability tokens have the last word, and
# nothing mends what they do. The paper (fig. 6b) reports that high first is significantly worse
# than GRPO, and that training even collapses after the fourth epoch.
#
# With kk_tiny, 8 steps, 3 seeds (benchmarks/kk_tiny, suite "stages"); accuracy is the mean of the
# evaluations at steps 4 and 8; differences are taken seed by seed, ± one standard error:
#
#     grpo: 0.576
#     lopti: 0.613, minus grpo +0.037 ± 0.014
#     high, then low: 0.587, minus grpo +0.011 ± 0.015
#     low alone: 0.576, minus grpo +0.000 ± 0.007
#     high alone: 0.334, minus grpo -0.242 ± 0.032
#     high, then low minus lopti: -0.026 ± 0.024
#
# High first does not fall behind GRPO here, and nothing collapses. What is different: eight steps
# are far less than four epochs, the model has a million parameters, and in kk_tiny a few
# low-probability tokens decide how to think, so that their having the last word does less harm.
# GRPO is not the right run to compare it with: high first makes 4 optimizer steps where GRPO makes
# 2, and that helps kk_tiny by itself. GRPO with 4 updates a step is (suite "control", eight seeds):
# high first minus that is -0.036 ± 0.006, behind in all eight seeds, and minus Lopti -0.030 ±
# 0.010. So the order does matter. And the probable tokens alone teach kk_tiny next to nothing.


def open_question():
    from statistics import fmean, stdev

    from tools import kept

    def accuracy(entry):  # of seeds 0, 1, 2
        found = []
        for seed in range(3):
            rows = kept.run(f"benchmarks/kk_tiny/{kept.name_of(entry, seed)}")["rows"]
            found.append(fmean(r["eval/accuracy"] for r in rows if r["step"] in (4, 8)))
        return found

    def difference(entry, other):
        pairs = [a - b for a, b in zip(accuracy(entry), accuracy(other))]
        return f"{fmean(pairs):+.3f} ± {stdev(pairs) / 3**0.5:.3f}"

    print(f"grpo: {fmean(accuracy('grpo')):.3f}")
    for name in ("lopti", "high, then low", "low alone", "high alone"):
        print(f"{name}: {fmean(accuracy(name)):.3f}, minus grpo {difference(name, 'grpo')}")
    print(f"high, then low minus lopti: {difference('high, then low', 'lopti')}")


if __name__ == "__main__":
    open_question()

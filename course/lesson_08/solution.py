"""Solutions of lesson 8: a study of your own. Run as a script, it prints the numbers of 8.3."""

import torch


def paired_difference(a, b):
    differences = a - b  # [seeds]
    error = differences.std() / len(differences) ** 0.5  # ddof 1, torch's default
    return differences.mean(), error


def bootstrap_interval(correct, repeats, generator):
    num_problems = len(correct)
    drawn = torch.randint(num_problems, (repeats, num_problems), generator=generator)
    accuracies = correct.double()[drawn].mean(1)  # [repeats]
    low, high = accuracies.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return low, high


# 8.3  What can three runs of 8 steps not tell? Plan a study.
#
# The kept runs of `tools/compare.py --suite clip` (benchmarks/kk_tiny: 8 steps, seeds 0, 1, 2, 300
# test puzzles). Accuracy at step 8 minus the accuracy of "grpo's clip, 16 updates", seed by seed:
#
#     acpo, 16 updates: +0.020 ± 0.021; 95 % interval -0.071 to +0.111
#     dapo's clip, 16 updates: +0.021 ± 0.013; 95 % interval -0.034 to +0.076
#
# - One standard error is not an interval. With three seeds the interval of 95 % is the mean ± 4.30
#   standard errors (Student's t with 2 degrees of freedom), not ± 1.96, because the standard error
#   itself is hardly known.
# - So these three runs can't tell if ACPO is 7 points worse or 11 points better at step 8.
# - Averaged over steps 4 and 8, ACPO's difference is +0.066 ± 0.022, and the two methods disagree:
#   ± 4.30 × 0.022 gives -0.03 to +0.16, which includes 0. The pooled error, ± 2.57 × 0.014, gives
#   +0.03 to +0.10, which does not. The pooled error is known better (5 degrees of freedom, not 2),
#   but it assumes that all rows vary equally over seeds. ACPO's own error is the largest of the
#   four: 0.022, next to 0.007, 0.007 and 0.015. If ACPO really varies more, the pooled interval is
#   too narrow. Choose the method before the runs, and report both if they disagree.
# - The test set limits what can be seen, too. If 220 of 300 answers are right, the bootstrap gives
#
#     95 % interval of the accuracy over problems: 0.683 to 0.783
#
#   Pairing helps only if both entries have the same test puzzles and seeds.
# - Eight steps tell nothing about step 800: a method that learns faster at first may end lower,
#   collapse, or only have a larger effective learning rate. (Here all entries have the same lr.)
# - kk_tiny tells nothing about 7B parameters, and Knights & Knaves nothing about mathematics.
#
# How many seeds does a difference need? With a standard deviation over seeds as above for ACPO, the
# half-width of the interval is
#
#     3 seeds: 0.091
#     5 seeds: 0.046
#     10 seeds: 0.026
#     20 seeds: 0.017
#
# A plan: one question ("does ACPO end higher than GRPO?"), one measure that is fixed before the
# runs (accuracy at the last step), the same seeds and test puzzles for both, both learning rates
# tuned with the same effort, 10 seeds, 1000 test puzzles, as many steps as it takes until the
# curves are flat. Report the paired difference with its interval, and all runs, also the failed.


def open_question():
    from tools import kept

    def accuracy_at_step_8(entry):  # [3]
        runs = [kept.run(f"benchmarks/kk_tiny/{entry}_seed_{seed}") for seed in range(3)]
        return torch.tensor([run["rows"][-1]["eval/accuracy"] for run in runs], dtype=torch.float64)

    t_quantiles = {3: 4.303, 5: 2.776, 10: 2.262, 20: 2.093}  # Student's t, 97.5 %, by seeds
    base = accuracy_at_step_8("grpo_s_clip_16_updates")
    for name, entry in (("acpo", "acpo_16_updates"), ("dapo's clip", "dapo_s_clip_16_updates")):
        mean, error = paired_difference(accuracy_at_step_8(entry), base)
        low, high = mean - t_quantiles[3] * error, mean + t_quantiles[3] * error
        interval = f"95 % interval {low:+.3f} to {high:+.3f}"
        print(f"{name}, 16 updates: {mean:+.3f} ± {error:.3f}; {interval}")
    correct = torch.arange(300) < 220
    low, high = bootstrap_interval(correct, 10_000, torch.Generator().manual_seed(0))
    print(f"95 % interval of the accuracy over problems: {low:.3f} to {high:.3f}")
    deviation = (accuracy_at_step_8("acpo_16_updates") - base).std()
    for seeds, quantile in t_quantiles.items():
        print(f"{seeds} seeds: {quantile * deviation / seeds**0.5:.3f}")


if __name__ == "__main__":
    open_question()

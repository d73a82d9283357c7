"""Plot the figures of lesson 11 and of the quiz from recorded runs.

    python -m course.failures

failures.png has a panel per failure: the metric that shows it, together with the healthy runs. quiz_A.png … each have
six metrics of a run, without its name.
"""

from pathlib import Path

from runtime import curves
from tools import kept, plot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "course" / "results"
HEALTHY = [f"course/results/healthy_seed_{seed}" for seed in range(3)]
SMOLLM2 = [f"benchmarks/llm/grpo_smollm2_seed_{seed}" for seed in range(3)]
FAILURES = {  # the recorded run: its name, its plotted metric, and the healthy runs to compare it with
    "benchmarks/llm/ar_lopti_smollm2_seed_1": ("entropy collapse (SmolLM2)", "entropy", SMOLLM2),
    "course/results/length_explosion_seed_0": ("paid for length", "response_tokens", HEALTHY),
    "course/results/format_lost_seed_0": ("format lost", "format_rate", HEALTHY),
    "course/results/kl_blow_up_seed_0": ("KL blow-up", "kl", HEALTHY),
    "course/results/stale_weights_seed_0": ("stale weights", "sampler_gap", HEALTHY),
}
QUIZ = {  # the case: the recorded run, and the healthy runs to compare it with
    "A": ("course/results/kl_blow_up_seed_0", HEALTHY),
    "B": ("course/results/stale_weights_seed_0", HEALTHY),
    "C": ("course/results/no_bonus_seed_0", HEALTHY),
    "D": ("course/results/length_explosion_seed_0", HEALTHY),
    "E": ("course/results/format_lost_seed_0", HEALTHY),
    "F": ("benchmarks/llm/ar_lopti_smollm2_seed_1", SMOLLM2),
}
SHOWN = "eval/accuracy response_tokens format_rate kl grad_norm sampler_gap".split()
SHOWN_SMOLLM2 = "accuracy eval/accuracy response_tokens format_rate entropy grad_norm".split()  # no KL, no gap here
LOG = ("kl", "grad_norm", "sampler_gap")  # metrics that may grow by powers of ten


def rows(name):
    """Return the rows of a recorded run."""
    return kept.run(name)["rows"]


def draw(axis, key, healthy, runs):
    """Plot a metric of the healthy runs, in grey with their range, and others above. runs: [(name, label, colour)]."""
    plot.draw_line(axis, [rows(each) for each in healthy], key, color=plot.GREY, ls="--", label="three healthy runs")
    for name, label, colour in runs:
        plot.draw_line(axis, [rows(name)], key, color=colour, label=label)
        *others, line = axis.lines
        if any(list(line.get_ydata()) == list(other.get_ydata()) for other in others):
            line.set_linestyle((0, (4, 4)))  # so that the line below shows in the gaps
    axis.set(title=curves.TITLES[key], xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    positive = [value for line in axis.lines for value in line.get_ydata() if value > 0]
    if key in LOG and max(positive) > 10 * min(positive):
        axis.set_yscale("log", nonpositive="mask")
        axis.yaxis.set_minor_formatter("")
        axis.set_title(f"{curves.TITLES[key]}, log axis")


def overview():
    """Plot failures.png: five failures, each by one metric, and the test accuracy of the failures of kk_tiny."""
    figure = curves.new_figure(curves.WIDTH, 7.2, "")
    *axes, last = figure.subplots(2, 3).flat
    of_kk_tiny = []
    for axis, colour, (name, (label, key, healthy)) in zip(axes, curves.COLOURS, FAILURES.items()):
        draw(axis, key, healthy, [(name, label, colour)])
        axis.set_title(f"{label}:\n{axis.get_title()}", color=colour)
        if healthy == HEALTHY:
            of_kk_tiny.append((name, label, colour))
    draw(last, "eval/accuracy", HEALTHY, of_kk_tiny)
    last.set_title("test accuracy of the last four")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[:1], labels[:1], loc="outside lower center")
    return curves.save(figure, [RESULTS / "failures.png"])


def case(letter, name, healthy):
    """Plot quiz_A.png …: six metrics of a run, without its name."""
    figure = curves.new_figure(curves.WIDTH, 5.8, "")
    keys = SHOWN if healthy == HEALTHY else SHOWN_SMOLLM2
    for axis, key in zip(figure.subplots(2, 3).flat, keys):
        draw(axis, key, healthy, [(name, f"run {letter}", curves.COLOURS[0])])
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return curves.save(figure, [RESULTS / f"quiz_{letter}.png"])


def main():
    overview()
    for letter, (name, healthy) in QUIZ.items():
        case(letter, name, healthy)


if __name__ == "__main__":
    main()

"""Save the data of docs/first_runs.md about a run of `make demo` or `make llm`, and plot its test accuracy.

    python -m tools.maintain.demo_picture runs/grpo_ar_lopti_kk_0_…    docs/demo.json and docs/demo.png
    python -m tools.maintain.demo_picture runs/grpo_ar_lopti_largest_0_… --out docs/llm.json

Without a run the figure is plotted again from that file. `make docs` writes the responses into the page.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from runtime import before_after, curves, files, flags
from tools import plot

ROOT = Path(__file__).parents[2]


@dataclass
class Args:
    """The run to plot."""

    run: tyro.conf.Positional[Path | None] = None  # a run's folder; without one, the saved numbers are plotted
    out: Path = ROOT / "docs" / "demo.json"  # the saved numbers; the figure has the same name with .png


def read(folder):
    """Return a run's data for the figure, as JSON. ValueError if it is no run, or has learned no saved problem."""
    rows = curves.read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{folder} is not the folder of a run: metrics.jsonl is missing or empty")
    before, after, learned = before_after.pairs(curves.read_rows(folder / "test_samples.jsonl"))
    if not learned:
        raise ValueError(f"{folder} has no test problem that was wrong before training and is right after it")
    chosen = min(learned, key=lambda number: len(after[number]["response"]))  # the shortest one fits into a figure
    about = files.read_object(folder / "run.json")
    keys = ["step", *curves.with_categories(rows, "eval/accuracy"), "response_tokens", "time/step"]
    return {
        **{key: about[key] for key in ("script", "commit", "machine", "versions", "date")},
        "settings": files.read_object(folder / "args.json") | {"run_dir": "", "resume": ""},
        "rows": [{key: row[key] for key in keys if row.get(key) is not None} for row in rows],
        "before": before[chosen],
        "after": after[chosen],
        "learned": len(learned),
        "kept_problems": len(before),
    }


def draw(kept, path):
    """Plot the accuracy over the steps."""
    rows, figure = kept["rows"], curves.new_figure(6, 3, "")
    axis = figure.subplots()
    keys = [key for key in curves.with_categories(rows, "eval/accuracy") if not key.endswith("_all")]
    for i, key in enumerate(keys):  # "all": a task without categories
        label = "all" if i == 0 else f"{key.rpartition('_')[2]} people"
        plot.draw_line(axis, [rows], key, color=curves.COLOURS[i], ls=curves.STYLES[i], label=label)
    title = f"accuracy on {kept['settings']['eval_size']} test problems"
    axis.set(title=title, xlabel="training step", ylim=(0, 1))
    axis.legend(loc="lower right", frameon=False)
    curves.save(figure, [path])


def main(args):
    with flags.errors_in_one_line():
        if args.run:
            files.write(args.out, json.dumps(read(args.run), indent=1, ensure_ascii=False) + "\n")
        draw(files.read_object(args.out), args.out.with_suffix(".png"))
    print(f"wrote {args.out.with_suffix('.png')}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

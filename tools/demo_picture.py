"""Draws a run in one picture: test accuracy over its steps, and a test response before and after training.

    python -m tools.demo_picture runs/grpo_ar_lopti_kk_0_…    writes docs/demo.png and docs/demo.json
    python -m tools.demo_picture runs/grpo_ar_lopti_largest_0_… --out docs/llm.json

The README shows this picture of a run of `make demo`, and of one of `make llm`. The JSON file has all that the picture
shows, with the run's settings, commit and machine; without a run, the picture is drawn again from that file.
"""

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import tyro

from runtime import before_after, curves, files
from tools import plot

ROOT = Path(__file__).parents[1]
COLUMN = 45  # characters in a line of a response
LONGEST = 17  # lines of a response that are drawn


@dataclass
class Args:
    """Which run to draw."""

    run: tyro.conf.Positional[Path | None] = None  # a run's folder; without one, the kept figures are drawn
    out: Path = ROOT / "docs" / "demo.json"  # the kept figures; the picture has the same name with .png


def read(folder):
    """What the picture shows of a run, for JSON. ValueError if it is no run, or has learned no kept problem."""
    run = plot.read_run(folder)
    before, after, learned = before_after.pairs(curves.read_rows(folder / "test_samples.jsonl"))
    if not learned:
        raise ValueError(f"{folder} has no test problem that was wrong before training and is right after it")
    chosen = min(learned, key=lambda number: len(after[number]["response"]))  # the shortest can be read in a picture
    about = files.read_object(folder / "run.json")
    keys = ["step", *curves.with_categories(run["rows"], "eval/accuracy"), "response_tokens", "time/step"]
    return {
        "script": run["script"],
        "settings": run["args"] | {"run_dir": "", "resume": ""},
        "commit": about["commit"],
        "machine": about["machine"],
        "versions": about["versions"],
        "date": about["date"],
        "rows": [{key: row[key] for key in keys if row.get(key) is not None} for row in run["rows"]],
        "before": before[chosen],
        "after": after[chosen],
        "learned": len(learned),
        "kept_problems": len(before),
    }


def lines_of(text, longest=LONGEST):
    """A text in lines of COLUMN characters. What is beyond `longest` lines is left out, and the last line says so."""
    lines = [part for line in text.strip().splitlines() for part in textwrap.wrap(line, COLUMN) or [""]]
    if len(lines) > longest:
        left_out = len(lines) - longest + 1
        lines = [*lines[: longest - 1], f"[{left_out} more lines]"]
    return "\n".join(lines)


def draw(kept, path):
    """The picture: on the left the accuracy, on the right one response before and after. Gives the figure."""
    figure = curves.new_figure(15, 5.6, "")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2])
    draw_accuracy(left, kept["rows"], f"accuracy on {kept['settings']['eval_size']} test problems")
    right.axis("off")
    learned = f"{kept['learned']} of {kept['kept_problems']} problems"
    count = f"{learned}: wrong before training, right after it. One of them:"
    prompt = "\n".join(textwrap.wrap(" ".join(kept["before"]["prompt"].split()), 2 * COLUMN))
    write(right, 0, 1, count, size=13)
    write(right, 0, 0.92, prompt, color="0.35", family="monospace")
    for x, colour, row in ((0, curves.COLOURS[1], kept["before"]), (0.51, curves.COLOURS[2], kept["after"])):
        when = "before training" if row["step"] == 0 else f"after step {row['step']}"
        verdict = "right" if row["correct"] else "wrong"
        write(right, x, 0.58, f"{when}: {verdict}", color=colour, weight="bold", size=13)
        write(right, x, 0.51, lines_of(row["response"]), family="monospace")
    curves.save(figure, [path])
    return figure


def draw_accuracy(axis, rows, title):
    keys = [key for key in curves.with_categories(rows, "eval/accuracy") if not key.endswith("_all")]
    for i, key in enumerate(keys):  # "all": of a task without categories
        label = "all" if i == 0 else f"{key.rpartition('_')[2]} people"
        plot.draw_line(axis, [rows], key, color=curves.COLOURS[i], ls=curves.STYLES[i], label=label)
    axis.set(title=title, xlabel="training step", ylim=(0, 1))
    axis.legend(loc="lower right", frameon=False)


def write(axis, x, y, text, **look):
    """Writes text below a point of the axis; x and y from 0 to 1."""
    axis.text(x, y, text, va="top", transform=axis.transAxes, **{"size": 11.5} | look)


def main(args):
    try:
        if args.run:
            kept = read(args.run)
            files.write(args.out, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        kept = files.read_object(args.out)
        picture = args.out.with_suffix(".png")
        draw(kept, picture)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

"""Draw a run's test accuracy over its steps; write a response before and after training into docs/first_runs.md.

    python -m tools.maintain.demo_picture runs/grpo_ar_lopti_kk_0_…    docs/demo.png, docs/demo.json and the page
    python -m tools.maintain.demo_picture runs/grpo_ar_lopti_largest_0_… --out docs/llm.json

The page shows both for a run of `make demo` and for one of `make llm`. The JSON file has all that is shown, with the
run's settings, commit and machine; without a run, picture and text are made again from that file.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from runtime import before_after, curves, files, settings
from tools import plot
from tools.maintain import generated

ROOT = Path(__file__).parents[2]
WIDTH = 88  # characters of a line on the page


@dataclass
class Args:
    """Which run to draw."""

    run: tyro.conf.Positional[Path | None] = None  # a run's folder; without one, the kept figures are drawn
    out: Path = ROOT / "docs" / "demo.json"  # the kept figures; the picture has the same name with .png
    page: Path = ROOT / "docs" / "first_runs.md"  # has the text between the marks with the kept figures' name


def read(folder):
    """What the picture shows of a run, for JSON. ValueError if it is no run, or has learned no kept problem."""
    rows = curves.read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{folder} is not the folder of a run: metrics.jsonl is missing or empty")
    before, after, learned = before_after.pairs(curves.read_rows(folder / "test_samples.jsonl"))
    if not learned:
        raise ValueError(f"{folder} has no test problem that was wrong before training and is right after it")
    chosen = min(learned, key=lambda number: len(after[number]["response"]))  # the shortest can be read in a picture
    about = files.read_object(folder / "run.json")
    keys = ["step", *curves.with_categories(rows, "eval/accuracy"), "response_tokens", "time/step"]
    return {
        "script": about["script"],
        "settings": files.read_object(folder / "args.json") | {"run_dir": "", "resume": ""},
        "commit": about["commit"],
        "machine": about["machine"],
        "versions": about["versions"],
        "date": about["date"],
        "rows": [{key: row[key] for key in keys if row.get(key) is not None} for row in rows],
        "before": before[chosen],
        "after": after[chosen],
        "learned": len(learned),
        "kept_problems": len(before),
    }


def with_words(text, name, kept):
    """The page with the responses before and after training, as the terminal shows them, between a run's marks."""
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as shown:
        console.print(before_after.side_by_side(kept["before"], kept["after"]))
    lines = "\n".join(line.rstrip() for line in shown.get().strip("\n").splitlines())
    count = f"{kept['learned']} of {kept['kept_problems']} test problems go"
    words = f"{count} from wrong before training to right after it. One of them, as the terminal shows it:"
    return generated.between(text, name, f"{words}\n\n```text\n{lines}\n```")


def draw(kept, path):
    """The accuracy over the steps."""
    rows, figure = kept["rows"], curves.new_figure(6, 3, "")
    axis = figure.subplots()
    keys = [key for key in curves.with_categories(rows, "eval/accuracy") if not key.endswith("_all")]
    for i, key in enumerate(keys):  # "all": of a task without categories
        label = "all" if i == 0 else f"{key.rpartition('_')[2]} people"
        plot.draw_line(axis, [rows], key, color=curves.COLOURS[i], ls=curves.STYLES[i], label=label)
    title = f"accuracy on {kept['settings']['eval_size']} test problems"
    axis.set(title=title, xlabel="training step", ylim=(0, 1))
    axis.legend(loc="lower right", frameon=False)
    curves.save(figure, [path])


def main(args):
    with settings.errors_in_one_line():
        if args.run:
            kept = read(args.run)
            files.write(args.out, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        kept = files.read_object(args.out)
        picture = args.out.with_suffix(".png")
        draw(kept, picture)
        files.write(args.page, with_words(args.page.read_text(encoding="utf-8"), args.out.stem, kept))
    print(f"wrote {picture} and {args.page}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

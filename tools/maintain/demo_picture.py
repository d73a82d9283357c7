"""Keep the data of docs/first_runs.md from a run of `make demo` or `make llm`, and draw its test accuracy.

    python -m tools.maintain.demo_picture runs/grpo_ar_lopti_kk_0_…    docs/demo.json and docs/demo.svg
    python -m tools.maintain.demo_picture runs/grpo_ar_lopti_largest_0_… --out docs/llm.json

Without a run, the figure is drawn again from that file. `make docs` writes the responses into the page. demo.svg also
has two responses to one puzzle, with their weights in the lens (lab/results/lens_page.jsonl). CSS alone shows four
views in turn, so that the figure moves in a README too; a reader who prefers no motion sees the view of AR and Lopti.
"""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

import tyro

from runtime import before_after, curves, files, flags

ROOT = Path(__file__).parents[2]
LENS = ROOT / "lab/results/lens_page.jsonl"
WRONG, RIGHT = 8, 9  # the responses' places in the lens's data: both answer the same puzzle
LETTER, LINE = 7.8, 24  # pixels: width of a character, height of a line
COLUMNS = 58  # characters on a line
SECONDS = 4  # per view
CLIPPED = 0.01  # a smaller fraction of the first update's weight counts as none, as in lab/lens.py
STYLE = """
svg { --ink: #1b1b1b; --quiet: #5a5a5a; --line: #c9c9c9; --up: #0064be; --down: #cd5a00; --one: #6e3ca0; }
text { fill: var(--ink); font: 14px system-ui, sans-serif; white-space: pre; }
.token { font: 13px ui-monospace, monospace; }
.quiet { fill: var(--quiet); font-size: 12px; } .head { font-weight: bold; }
.up { fill: var(--up); } .down { fill: var(--down); } .one { fill: var(--one); }
.first { fill: none; stroke: var(--ink); } .none { fill: none; stroke: var(--quiet); stroke-dasharray: 2 2; }
.axis { stroke: var(--line); } .curve { fill: none; stroke: var(--up); stroke-width: 3; }
"""


@dataclass
class Args:
    """The run to draw."""

    run: tyro.conf.Positional[Path | None] = None  # a run's folder; without one, the saved numbers are plotted
    out: Path = ROOT / "docs" / "demo.json"  # the saved numbers; the figure has the same name with .svg


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


def place_tokens(tokens, x, y):
    """Return the place of each token's box, [(x, y, width)], where lines break between words."""
    boxes, column, line = [], 0, 0
    for token in tokens:
        if column + len(token) > COLUMNS or token == "\n":
            column, line = 0, line + 1
        width = 0 if token == "\n" else len(token)
        boxes.append((x + column * LETTER, y + line * LINE, width * LETTER))
        column += width
    return boxes


def views(response):
    """Return [(title, explanation, shapes)], where shapes has (class, opacity) per token."""
    grpo, lopti = response["weights"]["grpo"], response["weights"]["grpo_ar_lopti"]
    sign = "up" if response["correct"] else "down"

    def shade(weights):
        return [(sign, 0.6 * min(1.0, weight / grpo["first"][0])) for weight in weights]

    probability = [("one", 0.6 * (1 - p / 1000)) for p in response["probability"]]
    clipped = [w / f < CLIPPED for w, f in zip(grpo["later"], grpo["first"])]
    after = [("none", 1) if gone else shape for gone, shape in zip(clipped, shade(grpo["later"]))]
    return [
        ("π", "The darker a token, the lower its probability when it was sampled.", probability),
        ("GRPO", "All tokens of a response weigh the same: blue up, orange down.", shade(grpo["first"])),
        ("GRPO with AR and Lopti", "Low-probability tokens weigh less.", shade(lopti["first"])),
        ("GRPO, 12 updates later", "The clip has dropped the dotted tokens: they have moved enough.", after),
    ]


def curve(rows, x, y, width, height):
    """Draw the accuracy over the steps of a run, with its first and last value."""
    points = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    last = points[-1][0]
    at = [(x + width * step / last, y + height * (1 - accuracy)) for step, accuracy in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    axes = f'<path class="axis" d="M{x},{y}V{y + height}H{x + width}" fill="none"/>'
    parts = [axes, f'<polyline class="curve" points="{path}"/>']
    for value in (0, 1):
        top = y + height * (1 - value)
        parts.append(f'<text class="quiet" x="{x - 6}" y="{top + 4}" text-anchor="end">{value}</text>')
    for (a, b), (step, accuracy) in zip(at, points):
        parts.append(f'<circle class="up" cx="{a:.1f}" cy="{b:.1f}" r="4"/>')
        below = 22 if accuracy > 0.1 else -10  # not over the axis
        parts.append(f'<text x="{a + 14:.1f}" y="{b + below:.1f}" text-anchor="middle">{accuracy:.3f}</text>')
        parts.append(f'<text class="quiet" x="{a:.1f}" y="{y + height + 18}" text-anchor="middle">{step}</text>')
    place = f'x="{x + width / 2}" y="{y + height + 36}"'
    return [*parts, f'<text class="quiet" {place} text-anchor="middle">training step</text>']


def draw_tokens(responses):
    """Return the parts of the figure with two of the lens's responses, and the styles that show one view at a time."""
    body, frames, style = [], [[], [], [], []], ""
    for name, response, y in (("wrong", responses[WRONG], 86), ("right", responses[RIGHT], 206)):
        boxes = place_tokens(response["tokens"], 14, y)
        body.append(f'<text class="quiet" x="14" y="{y - 22}">{name}, reward {response["reward"]:g}</text>')
        for token, (x, top, width) in zip(response["tokens"], boxes):
            if width:
                size = f'x="{x:.1f}" y="{top}" textLength="{width:.1f}"'
                body.append(f'<text class="token" {size}>{escape(token)}</text>')
        for frame, (_, _, shapes) in zip(frames, views(response)):
            for (kind, opacity), (x, top, width) in zip(shapes, boxes):
                box = f'x="{x:.1f}" y="{top - 15}" width="{width:.1f}" height="20" rx="3"'
                frame.append(f'<rect class="{kind}" {box} opacity="{opacity:.2f}"/>')
    for i, (title, text, _) in enumerate(views(responses[RIGHT])):
        frames[i].append(f'<text x="14" y="24" class="head">{title}</text><text x="14" y="44">{text}</text>')
        style += f".view{i} {{ opacity: {int(i == 2)}; }}\n"
        moves = f"animation: show {len(frames) * SECONDS}s infinite {i * SECONDS - 0.01}s step-end;"
        style += f"@media (prefers-reduced-motion: no-preference) {{ .view{i} {{ opacity: 0; {moves} }} }}\n"
    style += f"@keyframes show {{ 0% {{ opacity: 1; }} {100 / len(frames)}%, 100% {{ opacity: 0; }} }}\n"
    groups = [f'<g class="view{i}">{"".join(frame)}</g>' for i, frame in enumerate(frames)]
    return groups + body, style


def main(args):
    with flags.errors_in_one_line():
        if args.run:
            files.write(args.out, json.dumps(read(args.run), indent=1, ensure_ascii=False) + "\n")
        saved = files.read_object(args.out)
        has_tokens = args.out.stem == "demo"
        left = 536 if has_tokens else 14
        title = f"Accuracy on {saved['settings']['eval_size']} test problems"
        parts = [f'<text x="{left}" y="24" class="head">{title}</text>', *curve(saved["rows"], left + 14, 60, 200, 200)]
        style = STYLE
        if has_tokens:
            tokens, moves = draw_tokens(json.loads(LENS.read_text(encoding="utf-8"))["responses"])
            parts, style = tokens + parts, style + moves
        size = f'viewBox="0 0 {left + 264} 330" width="{left + 264}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
        paper = '<rect width="100%" height="100%" fill="#fff"/>'
        figure = args.out.with_suffix(".svg")
        files.write(figure, "\n".join([start, f"<style>{style}</style>", paper, *parts, "</svg>"]) + "\n")
    print(f"wrote {figure}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

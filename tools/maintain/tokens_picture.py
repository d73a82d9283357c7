"""Draw docs/tokens.svg: two responses to one puzzle, coloured by each token's weight in the update, and a curve.

The picture shows four views in turn, with CSS alone, so that it moves in a README too. A reader who prefers no motion
sees the view of AR and Lopti. Weights: the lens (lab/results/lens_page.jsonl); accuracy: `make demo` (docs/demo.json).

    python -m tools.maintain.tokens_picture
"""

import json
from html import escape
from pathlib import Path

from runtime import files

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "tokens.svg"
WRONG, RIGHT = 8, 9  # the responses' places in the lens's data: both answer the same puzzle
WIDTH, HEIGHT = 800, 330
LETTER, LINE = 7.8, 24  # pixels: width of a character, height of a line
COLUMNS = 58  # characters on a line
SECONDS = 4  # per view
CLIPPED = 0.01  # a smaller fraction of the first update's weight counts as none, as in lab/lens.py
STYLE = """
svg { --ink: #1b1b1b; --quiet: #5a5a5a; --line: #c9c9c9; --up: #0064be; --down: #cd5a00; --one: #6e3ca0; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #ececec; --quiet: #a8a8a8; --line: #44484d; --up: #2878d7; --down: #c85f0a; --one: #8c55c8; }
}
text { fill: var(--ink); font: 14px system-ui, sans-serif; white-space: pre; }
.token { font: 13px ui-monospace, monospace; }
.quiet { fill: var(--quiet); font-size: 12px; } .head { font-weight: bold; }
.up { fill: var(--up); } .down { fill: var(--down); } .one { fill: var(--one); }
.first { fill: none; stroke: var(--ink); } .none { fill: none; stroke: var(--quiet); stroke-dasharray: 2 2; }
.axis { stroke: var(--line); } .curve { fill: none; stroke: var(--up); stroke-width: 3; }
"""


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
    """Return [(title, explanation, shapes)], where shapes has (class, opacity) per token, and None for no shape."""
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
    parts = [
        f'<path class="axis" d="M{x},{y}V{y + height}H{x + width}" fill="none"/>',
        f'<polyline class="curve" points="{path}"/>',
    ]
    for value in (0, 1):
        top = y + height * (1 - value)
        parts.append(f'<text class="quiet" x="{x - 6}" y="{top + 4}" text-anchor="end">{value}</text>')
    for (a, b), (step, accuracy) in zip(at, points):
        parts.append(f'<circle class="up" cx="{a:.1f}" cy="{b:.1f}" r="4"/>')
        parts.append(f'<text x="{a + 14:.1f}" y="{b + 22:.1f}" text-anchor="middle">{accuracy:.3f}</text>')
        parts.append(f'<text class="quiet" x="{a:.1f}" y="{y + height + 18}" text-anchor="middle">{step}</text>')
    below = f'x="{x + width / 2}" y="{y + height + 36}"'
    return [*parts, f'<text class="quiet" {below} text-anchor="middle">training step</text>']


def draw(responses, rows):
    """Return the figure as SVG. responses: the lens's; rows: a run's metrics."""
    body, frames = [], [[], [], [], []]
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
    style, count = STYLE, len(frames)
    for i, (title, text, _) in enumerate(views(responses[RIGHT])):
        frames[i].append(f'<text x="14" y="24" class="head">{title}</text><text x="14" y="44">{text}</text>')
        style += f".view{i} {{ opacity: {int(i == 2)}; }}\n"
        moves = f"animation: show {count * SECONDS}s infinite {i * SECONDS - 0.01}s step-end;"
        style += f"@media (prefers-reduced-motion: no-preference) {{ .view{i} {{ opacity: 0; {moves} }} }}\n"
    style += f"@keyframes show {{ 0% {{ opacity: 1; }} {100 / count}%, 100% {{ opacity: 0; }} }}\n"
    body.append('<text x="536" y="24" class="head">Test accuracy, make demo</text>')
    body += curve(rows, 550, 60, 200, 200)
    groups = [f'<g class="view{i}">{"".join(frame)}</g>' for i, frame in enumerate(frames)]
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    title = "<title>The weight of each token in an update, and test accuracy while training</title>"
    return "\n".join([start, title, f"<style>{style}</style>", *groups, *body, "</svg>"]) + "\n"


def main():
    lens = json.loads((ROOT / "lab/results/lens_page.jsonl").read_text(encoding="utf-8"))
    demo = files.read_object(ROOT / "docs/demo.json")
    files.write(OUT, draw(lens["responses"], demo["rows"]))
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()

"""What a run prints: lines of at most 100 columns, without colours if nobody looks at them.

Texts are printed as they are: a folder `runs/[a]` is not read as rich's markup for a style.
"""

import sys

from rich.console import Console

WIDTH = 100  # columns; a narrower terminal gets what fits
HEADING_EVERY = 20  # steps
MISSING = "–"
COLUMNS = [  # heading, key in metrics.jsonl, format
    ("step", "step", "d"),
    ("reward", "reward", ".3f"),
    ("accuracy", "accuracy", ".3f"),
    ("format", "format_rate", ".3f"),
    ("length", "response_tokens", ".1f"),
    ("kl", "kl", ".3g"),
    ("entropy", "entropy", ".3f"),
    ("clip", "clip_rate", ".3g"),
    ("grad", "grad_norm", ".3g"),
    ("tok/s", "tokens_per_s", ".0f"),
    ("seconds", "time/step", ".1f"),
]


def console():
    """rich's console for stdout. What is not a terminal (a file, a pipe) is WIDTH columns wide."""
    made = Console(highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty():
        made.width = WIDTH
    made.width = min(WIDTH, made.width)
    return made


def width_of(heading):
    """Columns of the table of steps, the space before it included: 97 in all."""
    return 7 if heading == "step" else 9


def heading_line():
    return "".join(heading.rjust(width_of(heading)) for heading, _, _ in COLUMNS)


def step_line(metrics):
    """One step as a line under heading_line. Length is in tokens, KL and entropy in nats."""
    cells = []
    for heading, key, form in COLUMNS:
        value = metrics.get(key)
        text = MISSING if value is None else format(value, form)
        cells.append(text.rjust(width_of(heading)))
    return "".join(cells)


def evaluation_line(metrics):
    """The test accuracy as a line, and by category; "" if this step has no evaluation."""
    accuracy = metrics.get("eval/accuracy")
    if accuracy is None:
        return ""
    line = f"{metrics['step']:7d}  test accuracy {accuracy:.3f}"
    for key, value in metrics.items():
        if key.startswith("eval/accuracy_"):
            line += f"   {key.removeprefix('eval/accuracy_')}: {value:.3f}"
    return line

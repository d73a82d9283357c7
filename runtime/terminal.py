"""Print a run's output: lines of at most 100 columns, without colours unless on a terminal.

Texts are printed as they are: a folder `runs/[a]` is not read as rich's markup for a style.
"""

import os
import sys

from rich.console import Console
from tqdm import tqdm

from runtime.ranks import RANK

WIDTH = 100  # columns; fewer on a narrower terminal
HEADING_EVERY = 20  # steps
MISSING = "–"
COLUMNS = [  # heading, key in metrics.jsonl, format, width; 80 columns per row, or 87 with turns
    ("step", "step", "d", 5),
    ("loss", "loss", ".4f", 8),  # only sft.py has a loss; it lacks the next four
    ("reward", "reward", ".3f", 7),
    ("accuracy", "accuracy", ".3f", 9),
    ("format", "format_rate", ".3f", 7),
    ("turns", "turns", ".2f", 7),  # grpo_multi_turn.py's
    ("length", "response_tokens", ".1f", 7),
    ("kl", "kl", ".2g", 8),
    ("entropy", "entropy", ".3f", 8),
    ("clip", "clip_rate", ".2g", 8),
    ("grad", "grad_norm", ".2g", 8),
    ("tok/s", "tokens_per_s", ".0f", 6),
    ("s/step", "time/step", ".1f", 7),
]


def console():
    """Return rich's console for stdout: WIDTH columns wide if it is a file or a pipe."""
    made = Console(highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty():
        made.width = WIDTH
    made.width = min(WIDTH, made.width)
    return made


def progress(items=None, title="", **options):
    """Return tqdm with this title; it shows nothing if shows_bars is False."""
    return tqdm(items, desc=title, leave=False, disable=not shows_bars(), **options)


def shows_bars():
    """Return True in process 0 on a terminal, unless TQDM_DISABLE is set. Log files get no bars."""
    return RANK == 0 and sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")


def columns_of(metrics):
    """Return those of COLUMNS that a script has."""
    return [column for column in COLUMNS if column[1] in metrics]


def heading_line(metrics):
    return "".join(heading.rjust(width) for heading, _, _, width in columns_of(metrics))


def step_line(metrics):
    """Format one step as a line under heading_line. Length: tokens; loss, KL and entropy: nats."""
    cells = []
    for _, key, form, width in columns_of(metrics):
        value = metrics.get(key)
        text = MISSING if value is None else format(value, form)
        cells.append(text.rjust(width))
    return "".join(cells)


def evaluation_line(metrics):
    """Format the test accuracy by category and pass@k as a line; "" without an evaluation."""
    if "eval/loss" in metrics:
        return f"{metrics['step']:7d}  loss on held-out examples {metrics['eval/loss']:.4f}"
    accuracy = metrics.get("eval/accuracy")
    if accuracy is None:
        return ""
    line = f"{metrics['step']:7d}  test accuracy {accuracy:.3f}"
    for key, value in metrics.items():
        if key.startswith(("eval/accuracy_", "eval/pass@")):
            line += f"   {key.removeprefix('eval/').removeprefix('accuracy_')}: {value:.3f}"
    return line

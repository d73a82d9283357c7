"""Print what a person reads: a run's header, a line per step, one problem before and after.

Lines have at most 100 columns, without colours unless on a terminal. Texts are printed as they are:
a folder `runs/[a]` is not read as rich's markup for a style.
"""

import itertools
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from runtime import files, flags, machine, settings
from runtime.machine import RANK

WIDTH = 100  # columns; fewer on a narrower terminal
HEADING_EVERY = 20  # steps
MISSING = "–"
COLUMNS = [  # heading, key in metrics.jsonl, format, width; 80 columns per row
    ("step", "step", "d", 5),
    ("loss", "loss", ".4f", 8),  # only sft.py has a loss; it lacks the next four
    ("reward", "reward", ".3f", 7),
    ("accuracy", "accuracy", ".3f", 9),
    ("format", "format_rate", ".3f", 7),
    ("turns", "turns", ".2f", 6),  # grpo_multi_turn.py's, instead of tok/s
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


def progress(items=None, title: str = "", **options):
    """Return tqdm with this title; it shows nothing if shows_bars is False."""
    return tqdm(items, desc=title, leave=False, disable=not shows_bars(), **options)


def shows_bars():
    """Return True in process 0 on a terminal, unless TQDM_DISABLE is set. Log files get no bars."""
    return RANK == 0 and sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")


def columns_of(metrics: dict) -> list:
    """Return those of COLUMNS that a script has. With turns there is no room for tok/s."""
    left_out = "tokens_per_s" if "turns" in metrics else ""
    return [column for column in COLUMNS if column[1] in metrics and column[1] != left_out]


def heading_line(metrics: dict) -> str:
    return "".join(heading.rjust(width) for heading, _, _, width in columns_of(metrics))


def step_line(metrics: dict) -> str:
    """Format one step as a line under heading_line. Length: tokens; loss, KL and entropy: nats."""
    cells = []
    for _, key, form, width in columns_of(metrics):
        value = metrics.get(key)
        text = MISSING if value is None else format(value, form)
        cells.append(text.rjust(width))
    return "".join(cells)


def evaluation_line(metrics: dict):
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


# ------------------------------------------------------------------------------------------- header


def show_header(args, sizes, layers) -> None:
    """Print the header. A setting that differs from the paper's gets a row with the reason.

    A task without a paper has the script's defaults there. sizes: {parameters, test_problems,
    estimated_memory_gb, memory_gb, training_problems}; memory is per process, in GiB. layers: the
    sources of the defaults, as in flags.layers.
    """
    out = console()
    out.rule(Path(sys.argv[0]).name)
    different = flags.differences(args, layers)
    for name in [name for name in different if different[name][1] == "command line"]:
        if not flags.given(sys.argv[1:], [name]):
            del different[name]  # the run has set it, such as run_dir
    if args.steps == args.epochs * (sizes["training_problems"] // args.prompts_per_step):
        different.pop("steps", None)  # they follow from the epochs
    has_paper = args.has_sampler and args.task in ("kk", *settings.TASKS)
    usual = "in the paper" if has_paper else "by default"

    table = Table("", "here", usual, "because of", box=None, pad_edge=False)
    others = Table.grid(padding=(0, 3))  # a row for each group of settings
    for title, names in flags.read_sources(type(args))[0].items():
        same = []
        for name in names:
            value = getattr(args, name)
            if name in different:
                table.add_row(name, str(value), *map(str, different[name]))
            elif value not in ("", None):
                same.append(f"{name} {value}")
        if same:
            others.add_row(title, "   ".join(same))
    if table.rows:
        out.print(table, "")
    out.print(others, "", style="dim")
    needed, available = sizes["estimated_memory_gb"], sizes["memory_gb"]
    steps = "1 step" if args.steps == 1 else f"{args.steps} steps"
    left_out = ", without the part that reads images" if sizes.get("without_images") else ""
    guess = " (a guess: never measured for such a model)" if sizes.get("is_guess") else ""
    lines = [
        f"model      {args.model}: {sizes['parameters'] / 1e6:.1f} M parameters{left_out}",
        f"processes  {machine.WORLD_SIZE} on {machine.device_name()}",
        f"memory     about {needed:.1f} of {available:.1f} GiB for each process{guess}",
        f"problems   {sizes['training_problems']} to train on, {sizes['test_problems']} to test on",
    ]
    if "tools" in sizes:
        lines.append(f"tools      {sizes['tools']}")
    if args.resume:
        done = files.step_of(files.to_resume(args.resume))
        left = "" if done < args.steps else f": nothing is left to do without --steps above {done}"
        lines.append(f"resumed    after step {done} of {args.steps}{left}")
    if args.dry_run:
        lines.append(f"dry run    {steps} would fit; no model was loaded")
    else:
        lines.append(f"run        {steps}, written to {args.run_dir}")
    out.print("\n".join(lines), soft_wrap=True)
    out.rule()


# --------------------------------------------------------------------------------- before and after

LONGEST_TEXT = 1200  # characters of a prompt or response that are shown


def before_after(rows: list[dict]):
    """Return (which problem and why, rich's table) from rows of test_samples.jsonl, or None.

    None if there are too few rows. The problem is the first one that was wrong before and is right
    after, or the first one of all if there is none.
    """
    before, after, learned = pairs_of_rows(rows)
    lost = [i for i in before if before[i]["correct"] and not after[i]["correct"]]
    if not before:
        return None
    chosen = learned[0] if learned else next(iter(before))
    text = f"{len(learned)} of {len(before)} kept test problems went from wrong to right, "
    text += f"{len(lost)} from right to wrong; this is problem {chosen}:"
    return text, side_by_side(before[chosen], after[chosen])


def pairs_of_rows(rows: list[dict]) -> tuple:
    """Return (rows before by problem, rows after by problem, the problems that were learned).

    Compares step 0 with the last evaluation, over the problems that both have. All three are empty
    if there is only one evaluation. Learned: wrong before and right after.
    """
    last = max((row["step"] for row in rows), default=0)
    before = {row["id"]: row for row in rows if row["step"] == 0 < last}
    after = {row["id"]: row for row in rows if row["step"] == last and row["id"] in before}
    before = {number: row for number, row in before.items() if number in after}
    learned = [i for i in before if after[i]["correct"] and not before[i]["correct"]]
    return before, after, learned


def side_by_side(before, after):
    """Put the prompt on top, the two responses below it, and their scores at the bottom."""
    prompt = Text(shown(before["prompt"]))
    table = Table(title=prompt, title_justify="left", title_style="", expand=True)
    table.add_column("before training (step 0)", ratio=1)
    table.add_column(f"after step {after['step']}", ratio=1)
    told = [Text(shown(text_of_row(row))) for row in (before, after)]
    table.add_row(*told, end_section=True)
    table.add_row(score_line(before), score_line(after))
    return table


def text_of_row(row):
    """Return a row's response; for a conversation, all turns and the task's replies in between."""
    if not row.get("replies"):
        return row["response"]
    replies = [f"\n  → {reply}\n" for reply in row["replies"]]
    pairs = itertools.zip_longest(row["turns"], replies, fillvalue="")
    return "".join(turn + reply for turn, reply in pairs).strip("\n")


def shown(text: str):
    """Return the beginning of a text. Replaces characters that would control the terminal."""
    printable = "".join(sign if sign.isprintable() or sign == "\n" else "�" for sign in text)
    if len(printable) <= LONGEST_TEXT:
        return printable
    return f"{printable[:LONGEST_TEXT]}… ({len(printable) - LONGEST_TEXT} more characters)"


def score_line(row) -> str:
    verdict = "right" if row["correct"] else "wrong"
    return f"{verdict}, reward {row['reward']:g}"

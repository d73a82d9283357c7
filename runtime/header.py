"""Print a run's header: its settings next to the paper's, its sizes, its device."""

import os
import sys
import textwrap
from pathlib import Path

import torch
from rich.table import Table

from runtime import flags, folders, processes, terminal

NO_PAPERS = ("run_dir", "dry_run")  # the header's last line shows them


def show(args, sizes, layers):
    """Print the header. A setting that differs from the paper's gets a row with the reason.

    sizes: {parameters, estimated_memory_gb, memory_gb, training_problems, test_problems}; memory is
    per process, in GiB. layers: the sources of the defaults, as in flags.layers.
    """
    console = terminal.console()
    console.rule(Path(sys.argv[0]).name)
    different = flags.differences(args, layers)
    worked_out = args.epochs * (sizes["training_problems"] // args.prompts_per_step)
    if "steps" in different and different["steps"][0] is None and args.steps == worked_out:
        del different["steps"]  # they follow from the paper's epochs
    for name in NO_PAPERS:
        different.pop(name, None)

    if different:
        columns = table_of_differences()
        columns.add_row("", "here", "in the paper", "because of")
        console.print(columns, style="dim")
    for title, names in flags.groups_of(type(args)).items():
        show_group(console, title, names, args, different)
    console.print()
    show_sizes(console, args, sizes)
    console.rule()
    steps = "1 step" if args.steps == 1 else f"{args.steps} steps"
    if args.resume:
        done = folders.step_of(folders.to_resume(args.resume))
        left = "" if done < args.steps else f": nothing is left to do without --steps above {done}"
        console.print(f"goes on after step {done} of {args.steps}{left}", soft_wrap=True)
    if args.dry_run:
        console.print(f"dry run: {steps} would fit; no model was loaded", soft_wrap=True)
    else:
        console.print(f"{steps}, written to {args.run_dir}", soft_wrap=True)


def show_group(console, title, names, args, different):
    """Print a group of settings: a row for each that differs, one wrapped line for the rest."""
    console.print(title, style="bold")
    table = table_of_differences()
    same = []
    for name in names:
        value = getattr(args, name)
        if name in NO_PAPERS:
            continue
        if name in different:
            papers, reason = different[name]
            table.add_row(f"  {name}", str(value), worded(papers), reason)
        elif value not in ("", None):
            same.append(f"{name} {value}")
    if table.row_count:
        console.print(table)
    if same:
        # Keep a setting and its value on one line: restore its space after wrapping.
        together = "   ".join(setting.replace(" ", "\0") for setting in same)
        lines = textwrap.wrap(together, console.width - 4, break_on_hyphens=False)
        for line in lines:
            console.print("  " + line.replace("\0", " "), style="dim", soft_wrap=True)


def table_of_differences():
    """Return an empty table: name, value, paper's value, reason; 100 wide, alike in all groups."""
    table = Table.grid(padding=(0, 2))
    for width in (24, 23, 24, 23):
        table.add_column(width=width, no_wrap=True, overflow="ellipsis")
    return table


def worded(value):
    return "none" if value in ("", None) else str(value)


def show_sizes(console, args, sizes):
    """Print model, parameters, processes, device, memory and problems, one per line."""
    millions = sizes["parameters"] / 1e6
    needed = sizes["estimated_memory_gb"]
    available = sizes["memory_gb"]
    n_train = sizes["training_problems"]
    lines = {
        "model": f"{args.model}: {millions:.1f} M parameters",
        "processes": f"{processes.WORLD_SIZE} on {device_name()}",
        "memory": f"about {needed:.1f} of {available:.1f} GiB for each process",
        "problems": f"{n_train} to train on, {sizes['test_problems']} to test on",
    }
    for name, text in lines.items():
        console.print(f"{name:<10} {text}", soft_wrap=True)


def device_name():
    """Return the GPU's name, or the number of CPU cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({os.cpu_count()} cores)"

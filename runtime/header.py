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

    table = Table("", "here", "in the paper", "because of", box=None, pad_edge=False)
    lines = []
    for title, names in flags.groups_of(type(args)).items():
        same = []  # a NUL keeps a setting and its value on one line
        for name in names:
            value = getattr(args, name)
            if name in different:
                papers, reason = different[name]
                papers = "none" if papers in ("", None) else str(papers)
                table.add_row(name, str(value), papers, reason)
            elif name not in NO_PAPERS and value not in ("", None):
                same.append(f"{name}\0{value}".replace(" ", "\0"))
        text = f"{title:\0<12}" + "   ".join(same)
        if same:
            lines += textwrap.wrap(
                text, console.width, subsequent_indent=" " * 12, break_on_hyphens=False
            )
    if different:
        console.print(table)
        console.print()
    console.print("\n".join(lines).replace("\0", " "), style="dim", soft_wrap=True)
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


def show_sizes(console, args, sizes):
    """Print model, parameters, processes, device, memory and problems, one per line."""
    needed, available = sizes["estimated_memory_gb"], sizes["memory_gb"]
    lines = [
        f"model      {args.model}: {sizes['parameters'] / 1e6:.1f} M parameters",
        f"processes  {processes.WORLD_SIZE} on {device_name()}",
        f"memory     about {needed:.1f} of {available:.1f} GiB for each process",
        f"problems   {sizes['training_problems']} to train on, {sizes['test_problems']} to test on",
    ]
    console.print("\n".join(lines), soft_wrap=True)


def device_name():
    """Return the GPU's name, or the number of CPU cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({os.cpu_count()} cores)"

"""Print a run's header: its settings next to the paper's, its sizes, its device."""

import os
import sys
from pathlib import Path

import torch
from rich.table import Table

from runtime import flags, folders, papers, processes, terminal


def show(args, sizes, layers):
    """Print the header. A setting that differs from the paper's gets a row with the reason.

    A task without a paper has the script's defaults there. sizes: {parameters, test_problems,
    estimated_memory_gb, memory_gb, training_problems}; memory is per process, in GiB. layers: the
    sources of the defaults, as in flags.layers.
    """
    console = terminal.console()
    console.rule(Path(sys.argv[0]).name)
    different = flags.differences(args, layers)
    for name in [name for name in different if different[name][1] == "command line"]:
        if not flags.given(sys.argv[1:], [name]):
            del different[name]  # the run has set it, such as run_dir
    if args.steps == args.epochs * (sizes["training_problems"] // args.prompts_per_step):
        different.pop("steps", None)  # they follow from the epochs
    has_paper = args.has_sampler and args.task in ("kk", *papers.TASKS)
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
        console.print(table, "")
    console.print(others, "", style="dim")
    needed, available = sizes["estimated_memory_gb"], sizes["memory_gb"]
    steps = "1 step" if args.steps == 1 else f"{args.steps} steps"
    left_out = ", without the part that reads images" if sizes.get("without_images") else ""
    guess = " (a guess: never measured for such a model)" if sizes.get("is_guess") else ""
    lines = [
        f"model      {args.model}: {sizes['parameters'] / 1e6:.1f} M parameters{left_out}",
        f"processes  {processes.WORLD_SIZE} on {device_name()}",
        f"memory     about {needed:.1f} of {available:.1f} GiB for each process{guess}",
        f"problems   {sizes['training_problems']} to train on, {sizes['test_problems']} to test on",
    ]
    if "tools" in sizes:
        lines.append(f"tools      {sizes['tools']}")
    if args.resume:
        done = folders.step_of(folders.to_resume(args.resume))
        left = "" if done < args.steps else f": nothing is left to do without --steps above {done}"
        lines.append(f"resumed    after step {done} of {args.steps}{left}")
    if args.dry_run:
        lines.append(f"dry run    {steps} would fit; no model was loaded")
    else:
        lines.append(f"run        {steps}, written to {args.run_dir}")
    console.print("\n".join(lines), soft_wrap=True)
    console.rule()


def device_name():
    """Return the GPU's name, or the number of CPU cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({os.cpu_count()} cores)"

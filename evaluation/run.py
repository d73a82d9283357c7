"""Run an evaluation from its flags to its files."""

import contextlib
import sys
import time
from itertools import chain
from pathlib import Path

from rich.console import Console

from evaluation import figures, suites
from evaluation.models import checkpoints
from evaluation.sampling import requests_of
from evaluation.scoring import add_words, compare_with_last, evaluate
from evaluation.settings import read_settings
from evaluation.tables import (
    caption,
    markdown,
    print_header,
    print_table,
    rows_of_papers,
    sampling_of,
    settings_of,
    tables_of,
    write,
)
from rewards import TaskError
from runtime import checks, files, flags, machine, records
from runtime.distributed import ON_GPU


def prepare(argv: list[str]) -> tuple:
    """Return (args, the task's module, problems, paths, plans).

    paths: {model: its checkpoints}; plans: {checkpoint: (its requests, its plan)}. ValueError or
    OSError if something can't work.
    """
    flags.ON_GPU = ON_GPU  # torch knows for certain
    args = read_settings(argv)
    checks.check_gpus(args)
    if args.dtype is None:
        args.dtype = machine.fast_dtype()
    task, problems = suites.load_problems(args)
    # List them only once, because a run that still trains makes more of them.
    paths = {model: checkpoints(model, args.last) for model in args.models}
    all_paths = dict.fromkeys(chain(*paths.values()))
    plans = {path: requests_of(path, problems, args) for path in all_paths}
    for folder in (Path(args.out), Path(args.out, "responses")):
        folder.mkdir(parents=True, exist_ok=True)
    return args, task, problems, paths, plans


@contextlib.contextmanager
def stops_in_one_line(out):
    """End the program with one line at Ctrl-C, if a user's task fails, and if `out` can't be written."""
    way_on = f"the same command goes on from what is in {out}/responses"
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(f"stopped; {way_on}")
    except TaskError as error:
        sys.exit(f"error: {error}; {way_on}")
    except Exception as error:
        if not files.why_full(error):
            raise
        sys.exit(f"error: {out} can't be written: {files.why_full(error)}. Make room; {way_on}")


def main() -> None:
    with flags.errors_in_one_line():
        args, task, problems, paths, plans = prepare(sys.argv[1:])
    started = time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    print_header(console, args)

    columns = figures.columns_of(problems, args)
    rows = []
    values = []  # per model, {column: the problems' contributions}
    responses = []  # per model, per problem, the responses with their scores
    with stops_in_one_line(args.out):
        for model in args.models:
            row, of_columns, of_problems = evaluate(model, paths[model], task, problems, plans, columns, args)
            rows.append(row)
            values.append(of_columns)
            responses.append(of_problems)
    comparisons = compare_with_last(rows, values, columns, problems) if args.versus else []
    if args.words:
        add_words(rows, responses, args)
    papers = rows_of_papers(args) if args.paper else []

    tables = tables_of(rows, comparisons, papers, columns, args)
    below = caption(rows, problems, args)
    results = {
        "settings": settings_of(args),
        "provenance": records.provenance(),
        "sampling": sampling_of(problems),
        "rows": rows,
        "versus": comparisons,
        "papers": papers,
    }
    with stops_in_one_line(args.out):
        written = write(results, markdown(tables, below), responses, args)
    for title, lines in tables.items():
        print_table(console, title, lines)
    console.print(below, markup=False)
    seconds = time.perf_counter() - started
    text = f"{seconds:.0f} s; in {args.out}: {', '.join(written)}"
    console.print(text, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()

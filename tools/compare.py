"""Compare scripts on models/kk_tiny: several entries × several seeds, one run after the other; a table and a plot.

    python tools/compare.py                                  every script, seeds 0, 1 and 2 (`control` has eight)
    python tools/compare.py --suite stages                   an ablation of the papers, see tools/comparisons.toml
    python tools/compare.py --seeds 0 1 2 3 4                more seeds; saved runs are not repeated
    python tools/compare.py --only grpo ar                   run some of the entries; the table has all saved ones
    python tools/compare.py --dry_run                        list the missing runs
    python tools/compare.py --stale                          list the saved results that other code than today's made
    python tools/compare.py --name mine --entries "eta 0.3: grpo_ar_lopti.py --eta 0.3" "eta 0.7: …"

An entry (a configuration) is a name, a script and the script's flags, which override the same flags of all entries.
Every finished run is saved as a small JSON file in benchmarks/kk_tiny/ (settings, metrics of every step, hash of the
code, commit, versions, machine). NAME.md and NAME.png are made from those files alone, on any machine; NAME is the
suite unless another is given. Some suites have a second figure: with more than five entries NAME_metrics.png, with
fewer NAME_budget.png, the accuracy by training and by optimizer steps. Seconds are in no table: see docs/speed.md.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves, files, flags, settings
from runtime.settings import NonNegativeInt, PositiveFloat
from tools import family, inference, kept, plot, texts

ROOT = Path(__file__).parents[1]
SUITES = tomllib.loads(Path(__file__).with_name("comparisons.toml").read_text(encoding="utf-8"))
OPTIONS = ("flags", "flags_of", "seeds", "second_figure")  # of a suite; its other keys are entries

# Final accuracy on K&K, mean over 3 to 7 people: AR-Lopti paper, Table 9, Llama-3.2-3B-Instruct trained with GRPO.
PAPER = {"grpo": 0.30, "ar": 0.40, "lopti": 0.59, "ar+lopti": 0.62}
PAPERS = " Paper: AR-Lopti, Table 9, Llama-3.2-3B-Instruct, mean over 3 to 7 people."
WHAT_IS_DRAWN = (
    "large dot: mean over the seeds, which are the small dots\n"
    "line: its interval of 95 %, with one standard deviation of a run, pooled over all rows"
)
MARK = " †"
ACCURACY = "eval/accuracy"
PEOPLE = "eval/accuracy_"  # followed by a number of people
STALE = "† Made by another code than today's: `python tools/compare.py --stale` says which part of it."
LAST = 3  # evaluations to average: the papers average their last three checkpoints


@dataclass
class Args:
    """The runs to make, and the place for their results."""

    suite: Literal[*SUITES] = "comparison"  # what to compare
    entries: list[str] = field(default_factory=list)  # each "NAME: SCRIPT FLAGS"; empty: the suite's
    seeds: list[NonNegativeInt] | None = None  # one run per entry and seed; None: 0, 1, 2, or as many as the suite has
    common: str = ""  # flags for all entries, as in --common="--steps 10"; empty: the suite's
    only: list[str] = field(default_factory=list)  # names of the entries to run; empty: all
    folder: Path | None = None  # where runs, table and plot are saved; None: benchmarks/kk_tiny or benchmarks/llm
    name: str = ""  # name of the table and the plot; empty: the suite's
    limit: PositiveFloat = 8  # minutes, after which a run is stopped and not saved
    draw_only: bool = False  # run nothing, plot the saved runs
    dry_run: bool = False  # list the missing runs, then end
    stale: bool = False  # list the saved results of all suites, lab/ and benchmarks/ that other code made, then end

    def __post_init__(self):
        common, _, seeds = read_suite(self.suite)
        self.folder = self.folder or ROOT / "benchmarks" / ("llm" if "SmolLM2" in common else "kk_tiny")
        self.seeds = seeds if self.seeds is None else self.seeds


def read_suite(name):
    """Return (flags of all entries, {entry: [script, flag, ...]}, seeds of its table) of a suite."""
    suite = SUITES[name]
    commands = {entry: shlex.split(text) for entry, text in suite.items() if entry not in OPTIONS}
    return SUITES[suite.get("flags_of", name)]["flags"], commands, list(range(suite.get("seeds", 3)))


def read_entries(entries):
    """Return {name: [script, flag, ...]}. ValueError unless each entry is "NAME: SCRIPT FLAGS" and SCRIPT exists."""
    commands = {}
    for entry in entries:
        name, _, command = (part.strip() for part in entry.partition(":"))
        words = shlex.split(command)
        if not name or not words or not (ROOT / words[0]).is_file():
            raise ValueError(f'an entry must be "NAME: SCRIPT FLAGS", and SCRIPT a file in {ROOT}, not {entry!r}')
        if file_of(ROOT, name, 0) in [file_of(ROOT, other, 0) for other in commands]:
            raise ValueError(f"{name!r} would be kept in another entry's files: names must differ in letters or digits")
        commands[name] = words
    return commands


def asked_for(words, common, seed):
    """Return the script and the settings of an entry's run; its own settings override those of all entries."""
    given = kept.settings_of(shlex.split(common)) | kept.settings_of(words[1:]) | {"seed": seed}
    return {"script": Path(words[0]).stem, "settings": given}


def file_of(folder, name, seed):
    return folder / f"{re.sub('[^a-z0-9.]+', '_', name.lower())}_seed_{seed}.json"


def read_runs(folder, commands, common, seeds):
    """Return {name: {seed: saved run}}. ValueError if another script or other settings made one.

    commands: {name: [script, flag, ...]}.
    """
    runs = {name: {} for name in commands}
    for name, words in commands.items():
        for seed in seeds:
            path = file_of(folder, name, seed)
            if not path.exists():
                continue
            runs[name][seed] = found = files.read_object(path)
            asked = asked_for(words, common, seed)
            made_by = {"script": found.get("script"), "settings": kept.renamed(found.get("settings", {}))}
            if made_by != asked:
                was, wanted = (shlex.join(kept.command_of(**one)) for one in (made_by, asked))
                raise ValueError(
                    f"{path} was made by {was}, and is asked for with {wanted}: give the entry another name, or remove "
                    "the file to run it again"
                )
    return runs


def run(asked, limit):
    """Run one training in a temporary folder. Return the data to save. End the program if it fails.

    asked: its script and settings; limit: minutes. Without a model among the settings, it trains models/kk_tiny,
    because on a GPU the scripts would use the paper's.
    """
    about = asked | {"code": kept.code_of(asked["script"])}  # the code when the run begins
    command = shlex.join(kept.command_of(**asked))
    with tempfile.TemporaryDirectory() as folder:
        more = {"model": "models/kk_tiny"} | asked["settings"] | {"run_dir": folder}
        words = [sys.executable, *kept.command_of(asked["script"], more)]
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60 * limit)
        except subprocess.TimeoutExpired:
            sys.exit(f"error: {command}\ntook more than {limit:g} minutes: --limit allows more")
        if done.returncode:
            sys.exit(f"error: {command}\nended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        rows = curves.read_rows(Path(folder, "metrics.jsonl"))
        about |= json.loads(Path(folder, "run.json").read_text())
    return about | {"rows": [{key: shorter(value) for key, value in row.items() if value is not None} for row in rows]}


def shorter(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ---------------------------------------------------------------------------------------------------------- measures


def rows_of(runs):
    """Return the rows of all runs, {name: {seed: saved run}}, as one table with the columns `entry` and `seed`."""
    rows = []
    for name, by_seed in runs.items():
        for seed, run in by_seed.items():
            rows += [{"entry": name, "seed": seed} | row for row in run["rows"]]
    return pandas.DataFrame(rows)


def late(rows, key, count):
    """Return a metric's mean over the last rows that have it, except the one before training, `count` or fewer.

    rows: as of rows_of. The table has a row per seed and a column per entry.
    """
    after = rows[rows["step"] > 0].dropna(subset=key)
    return after.groupby(["seed", "entry"])[key].agg(lambda values: values.tail(count).mean()).unstack("entry")


def accuracies(rows):
    """Return two tables as of `late`: {"mean of evaluations 4, 8": …, "at step 8": …}; the names are for all runs."""
    after = rows[rows["step"] > 0].dropna(subset=ACCURACY)
    several = set(after.groupby(["seed", "entry"])["step"].agg(lambda steps: tuple(steps.tail(LAST))))
    names = f"mean of the last {LAST} evaluations", "at the last evaluation"
    if len(several) == 1:
        (steps,) = several
        names = f"mean of evaluation{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}", f"at step {steps[-1]}"
    return {name: late(rows, ACCURACY, count) for name, count in zip(names, (LAST, 1))}


def shown(values, sign=""):
    """Format a column's mean ± standard error: "0.576 ± 0.036", or with the sign "+" "+0.068 ± 0.017"; "" if empty."""
    values = values.dropna()
    if values.empty:
        return ""
    mean = f"{values.mean():{sign}z.3f}".replace("-", "−")
    return f"{mean} ± {values.sem():.3f}" if len(values) > 1 else mean


def flat(runs):
    return [run for by_seed in runs.values() for run in by_seed.values()]


# ------------------------------------------------------------------------------------------------------- differences


def base_of(name, names):
    """Return the entry to compare with: "4 updates" for "4 updates, 80/20" if it exists, otherwise the first."""
    start = name.rpartition(", ")[0]
    return start if start in names else next(iter(names))


def parents_of(commands, updates):
    """Return {name: the entry it is compared with in the figure} for all entries but the first, in their order.

    It is the entry that the name begins with ("4 updates" for "4 updates, 80/20"), or an entry of the parent script (if
    possible with the same number of optimizer steps), or the first entry.
    updates: {name: optimizer steps per training step}.
    """
    stems = {name: Path(words[0]).stem for name, words in commands.items()}
    first, *others = commands
    parents = {}
    for name in others:
        grew_from = [other for other in stems if stems[other] == family.PARENT.get(stems[name])]
        alike = [other for other in grew_from if updates[other] == updates[name]]
        parents[name] = base_of(name, commands)
        if parents[name] == first and grew_from:
            parents[name] = [*alike, *grew_from][0]
    return parents


def compared(values, parents):
    """Return the Estimate of each entry minus its parent, if a seed has both, seed by seed.

    The Estimates share one standard deviation of a run, pooled over all of them. values: a row per seed, a column per
    entry; parents: {entry: the entry it is compared with}.
    """
    estimates = []
    for name, parent in parents.items():
        pairs = values[[name, parent]].dropna()
        if len(pairs):
            of = ((name, 1), (parent, -1))
            estimates.append(inference.of_values(f"{name} minus {parent}", pairs.to_numpy().tolist(), of=of))
    return inference.pooled(estimates)


def pooled_errors(measures, bases):
    """Describe the pooled standard errors of the table's differences; "" if no entry has two seeds."""
    errors = []
    for title, values in measures.items():
        most = max(compared(values, bases), key=lambda estimate: estimate.n, default=None)
        if not most or not most.df:
            return ""
        errors.append(f"{most.error:.3f} ({title.removeprefix('at ')})")
    return (
        " An error estimated from a few seeds is uncertain. Pooled over all rows, the error of a difference of "
        f"{most.n} seeds is {' and '.join(errors)}, with {most.df:.0f} degrees of freedom."
    )


# ------------------------------------------------------------------------------------------------- pictures and table


def draw(runs, commands, folder, name, second=True):
    """Plot NAME.png, and NAME_budget.png or, for more than five entries, NAME_metrics.png. Return the paths.

    second: whether to plot the second figure.
    """
    groups = {entry: [run["rows"] for run in by_seed.values()] for entry, by_seed in runs.items()}
    if len(groups) <= plot.MOST_LINES:
        paths = [folder / f"{name}.png", folder / f"{name}_budget.png"][: 1 + second]
        plot.draw(groups, paths[:1])
        if second:
            plot.draw_budgets(groups, paths[1:])
        return paths
    paths = [folder / f"{name}.png", folder / f"{name}_metrics.png"][: 1 + second]
    rows = rows_of(runs)
    updates = rows.groupby("entry")["optimizer_steps"].max()
    parents = parents_of({entry: commands[entry] for entry in runs}, updates)
    columns = {title: compared(values, parents) for title, values in accuracies(rows).items()}
    plot.draw_differences(columns, WHAT_IS_DRAWN, paths[:1])
    if second:
        plot.draw(groups, paths[1:], [key for key in plot.PANELS if key != ACCURACY])
    return paths


def table(runs, commands, common):
    """Return the comparison as Markdown. runs: {name: {seed: saved run}}."""
    first, *others = runs
    rows = rows_of(runs)
    bases = {name: base_of(name, runs) for name in others}
    minus = "difference" if set(bases.values()) - {first} else f"minus {first}"
    measures = accuracies(rows)
    several, last = measures
    columns = {"entry": [], "script and flags": [], "runs": []}
    for name, by_seed in runs.items():
        is_below = family.depth(Path(commands[name][0]).stem) > 1  # its script's parent is not grpo.py
        columns["entry"].append("└ " * is_below + name + stale_mark(by_seed))
        columns["script and flags"].append(f"`{shlex.join(commands[name])}`")
        columns["runs"].append(str(len(by_seed)))
    titles, of_what = (several, f"accuracy {last}"), ("mean", last.removeprefix("at "))
    for title, of, values in zip(titles, of_what, measures.values()):
        columns[title] = [shown(values[name]) for name in runs]
        columns[f"{minus} ({of})"] = ["", *(shown(values[name] - values[bases[name]], "+") for name in others)]
    # Other tasks have no numbers of people.
    is_kk = any(run.get("settings", {}).get("task", "kk") == "kk" for run in flat(runs))
    people = sorted(key for key in rows if is_kk and key.startswith(PEOPLE))
    further = {f"{key[-1]} people (mean)": late(rows, key, LAST) for key in people}
    further["last reward"] = late(rows, "reward", 5)
    for title, values in further.items():
        columns[title] = [shown(values[name]) for name in runs]
    lengths = late(rows, "response_tokens", 5).mean()
    columns["last length"] = [f"{lengths[name]:.0f}" for name in runs]
    columns["paper"] = [f"{PAPER[name]:.2f}" if name in PAPER else "" for name in runs]
    cells = texts.table(columns, zip(*columns.values()))

    flags_of_all = {word for word in shlex.split(common) if word.startswith("--")}
    says_otherwise = any(flags_of_all & set(commands[name]) for name in runs)
    differ = ", if the row does not say otherwise" if says_otherwise else ""
    what = f'"NAME, X" minus "NAME", others minus "{first}"' if minus == "difference" else f"difference to {first}"
    over_people, problem = (", mean over the numbers of people", "puzzle") if people else ("", "problem")
    before = rows.dropna(subset=ACCURACY).groupby(["seed", "entry"])[ACCURACY].first().mean()
    text = (
        f"All entries{differ}: `{common}`; seeds {', '.join(map(str, sorted(set(rows['seed']))))}. "
        f"Test accuracy{over_people}: one response to each test {problem} at the evaluation's temperature. "
        f"It is given as the {several} (the one before training left out) and {last}; "
        f"mean ± standard error over the seeds. Before training it is {before:.3f}. "
        f"{minus.capitalize()}: {what} with the same seed, which means the same {problem}s in the same order."
        f"{pooled_errors(measures, bases)} Reward, length: mean of the last 5 steps."
    )
    text += PAPERS if any(name in PAPER for name in runs) else ""
    footnote = STALE if any(map(stale_mark, runs.values())) else ""
    return "\n\n".join(filter(None, [cells, text, made_by(flat(runs)), footnote])) + "\n"


def stale_mark(by_seed):
    """Return a mark for a row if other code made one of its runs."""
    return MARK if any(kept.differs(run) for run in by_seed.values()) else ""


def stale():
    """Return a line for each saved result that other code made, and their number."""
    lines, count = [], 0
    for path in sorted(path for folder in kept.FOLDERS for path in (ROOT / folder).rglob("*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and isinstance(result.get("script"), str):
            count += 1
            if what := kept.differs(result):
                lines.append(f"{path.relative_to(ROOT)}: {what} (commit {result['commit']})")
    return [*lines, f"{len(lines)} of {count} kept results were made by another code"]


def made_by(everything):
    """Describe the runs' commits, versions, machines and dates."""
    versions = {f"{name} {version}" for run in everything for name, version in run["versions"].items()}
    commits, machines, dates = ({str(run[key]) for run in everything} for key in ("commit", "machine", "date"))
    found = [", ".join(sorted(names)) for names in (commits, versions, machines, dates)]
    return f"Commit {'; '.join(found)}."


def check_args(args):
    """Raise ValueError or OSError if something is wrong with the command line."""
    settings.check_ranges(args)
    if Path(args.name).name != args.name:
        raise ValueError(f"--name {args.name} must be a name, not a path")
    usual = Args(suite=args.suite)
    is_other = args.entries or args.common or not set(usual.seeds) <= set(args.seeds)
    if is_other and not args.name and args.folder.resolve() == usual.folder.resolve():
        raise ValueError(
            f"{args.suite}.md in {args.folder} is the table of the whole suite: with other entries, flags or fewer "
            "seeds give a --folder or a --name of your own"
        )
    if not (args.draw_only or args.dry_run):
        args.folder.mkdir(parents=True, exist_ok=True)


def main(args):
    if args.stale:
        print("\n".join(stale()))
        return
    with flags.errors_in_one_line():
        check_args(args)
        common, commands, _ = read_suite(args.suite)
        common, commands = args.common or common, read_entries(args.entries) or commands
        if unknown := set(args.only) - commands.keys():
            raise ValueError(f"--only {' '.join(sorted(unknown))}: the entries are {', '.join(commands)}")
        runs = read_runs(args.folder, commands, common, args.seeds)
    names = args.only or list(commands)
    missing = [(seed, name) for seed in args.seeds for name in names if seed not in runs[name]]
    if not args.draw_only:
        listed = "".join(f"\n{name}, seed {seed}" for seed, name in missing)
        print(f"{len(flat(runs))} runs are kept, {len(missing)} are missing{listed}")
    if args.dry_run:
        return
    missing = [] if args.draw_only else missing
    for seed, name in (bar := tqdm(missing, disable=not missing or None)):
        bar.set_description(f"{name}, seed {seed}")
        runs[name][seed] = run(asked_for(commands[name], common, seed), args.limit)
        text = json.dumps(runs[name][seed]).replace('{"step"', '\n{"step"') + "\n"
        files.write(file_of(args.folder, name, seed), text)
    runs = {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items() if by_seed}
    if not runs:
        sys.exit(f"error: no run of these entries is kept in {args.folder}")
    text, name = table(runs, commands, common), args.name or args.suite
    (args.folder / f"{name}.md").write_text(text)
    second = bool(args.entries) or "second_figure" in SUITES[args.suite]
    paths = draw(runs, commands, args.folder, name, second)
    print(text)
    print(f"wrote {args.folder / name}.md, {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

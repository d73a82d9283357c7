"""Compare scripts on models/kk_tiny: several entries × several seeds, one run after the other; a table and a plot.

    python tools/compare.py                                  every script, seeds 0, 1 and 2 (`control` has eight)
    python tools/compare.py --suite stages                   an ablation of the papers, see tools/comparisons.py
    python tools/compare.py --seeds 0 1 2 3 4                more seeds; saved runs are not repeated
    python tools/compare.py --only grpo ar                   run some of the entries; the table has all saved ones
    python tools/compare.py --dry_run                        list the missing runs, and estimate how long they take
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
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import pandas
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves, files
from tools import family, inference, kept, plot, texts
from tools.comparisons import ONE_PICTURE, SEEDS, SUITES

ROOT = Path(__file__).parents[1]

# Final accuracy on K&K, mean over 3 to 7 people: AR-Lopti paper, Table 9, Llama-3.2-3B-Instruct trained with GRPO.
PAPER = {"grpo": 0.30, "ar": 0.40, "lopti": 0.59, "ar+lopti": 0.62}
PAPERS = " Paper: AR-Lopti, Table 9, Llama-3.2-3B-Instruct, mean over 3 to 7 people."
WHAT_IS_DRAWN = (
    "large dot: mean over the seeds, which are the small dots\n"
    "line: its interval of 95 %, with one standard deviation of a run, pooled over all rows"
)
MARK = " †"
PEOPLE = "eval/accuracy_"  # followed by a number of people
STALE = "† Made by another code than today's: `python tools/compare.py --stale` says which part of it."
LAST = 3  # evaluations to average: the papers average their last three checkpoints


@dataclass
class Args:
    """The runs to make, and the place for their results."""

    suite: Literal[*SUITES] = "comparison"  # what to compare
    entries: list[str] = field(default_factory=list)  # each "NAME: SCRIPT FLAGS"; empty: the suite's
    seeds: list[int] | None = None  # one run per entry and seed; None: 0, 1, 2, or as many as the suite has
    common: str = ""  # flags for all entries, as in --common="--steps 10"; empty: the suite's
    only: list[str] = field(default_factory=list)  # names of the entries to run; empty: all
    folder: Path | None = None  # where runs, table and plot are saved; None: benchmarks/kk_tiny or benchmarks/llm
    name: str = ""  # name of the table and the plot; empty: the suite's
    limit: float = 8  # minutes, after which a run is stopped and not saved
    draw_only: bool = False  # run nothing, plot the saved runs
    dry_run: bool = False  # list the missing runs and estimate their time, then end
    stale: bool = False  # list the saved results of all suites, lab/ and benchmarks/ that other code made, then end

    def __post_init__(self):
        if self.folder is None:
            self.folder = ROOT / "benchmarks" / ("llm" if "SmolLM2" in SUITES[self.suite][0] else "kk_tiny")
        if self.seeds is None:
            self.seeds = list(seeds_of(self.suite))


def seeds_of(suite):
    """Return the seeds of a suite's own table."""
    return range(SEEDS.get(suite, 3))


def read_entries(entries):
    """Return {name: [script, flag, ...]}. ValueError unless each entry is "NAME: SCRIPT FLAGS" and SCRIPT exists."""
    commands = {}
    for entry in entries:
        name, _, command = (part.strip() for part in entry.partition(":"))
        words = shlex.split(command)
        if not name or not words or not (ROOT / words[0]).is_file():
            raise ValueError(f'an entry must be "NAME: SCRIPT FLAGS", and SCRIPT a file in {ROOT}, not {entry!r}')
        if kept_file(ROOT, name, 0) in [kept_file(ROOT, other, 0) for other in commands]:
            raise ValueError(f"{name!r} would be kept in another entry's files: names must differ in letters or digits")
        commands[name] = words
    return commands


def command_of(words, common, seed):
    """Return an entry's command: its script, with its own settings overriding those of all entries."""
    settings = kept.settings_of(shlex.split(common)) | kept.settings_of(words[1:]) | {"seed": seed}
    return shlex.join(kept.command_of(Path(words[0]).stem, settings))


def kept_file(folder, name, seed):
    return folder / f"{re.sub('[^a-z0-9.]+', '_', name.lower())}_seed_{seed}.json"


def read_kept(path, command):
    """Return a saved run, or None if there is none. ValueError if another script or other settings made it."""
    if not path.exists():
        return None
    found = files.read_object(path)
    script, *flags = shlex.split(command)
    made_by = found.get("script"), kept.renamed(found.get("settings", {}))
    if made_by != (Path(script).stem, kept.settings_of(flags)):
        raise ValueError(
            f"{path} was made by\n  {shlex.join(kept.command_of(*made_by))}\nand is asked for with\n  {command}\n"
            "Give the entry another name, or remove the file to run it again"
        )
    return found


def run(command, limit):
    """Run one training in a temporary folder. Return the data to save. RuntimeError if it fails.

    If the command names no model, it trains models/kk_tiny, because on a GPU the scripts would use the paper's.
    """
    started = time.monotonic()
    script, *flags = shlex.split(command)
    script, settings = Path(script).stem, kept.settings_of(flags)
    about = {"script": script, "settings": settings, "code": kept.code_of(script)}  # the code when the run begins
    with tempfile.TemporaryDirectory() as folder:
        words = [*shlex.split(command), "--run_dir", folder]
        if "model" not in settings:
            words += ["--model", "models/kk_tiny"]
        words = [sys.executable, *words]
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60 * limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command}\ntook more than {limit:g} minutes: --limit allows more") from None
        if done.returncode:
            raise RuntimeError(f"{command}\nended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        rows = curves.read_rows(Path(folder, "metrics.jsonl"))
        about |= json.loads(Path(folder, "run.json").read_text())
    rows = [{key: shorter(value) for key, value in row.items() if value is not None} for row in rows]
    seconds = round(time.monotonic() - started)
    return about | {"seconds": seconds, "rows": rows}


def plan(missing, runs):
    """Describe which runs are missing and how long they will take. missing: {name: seeds}; runs: saved ones.

    The estimate for an entry is the mean time of its saved runs or, without any, of all saved runs.
    """
    count = sum(map(len, missing.values()))
    text = f"{sum(map(len, runs.values()))} runs are kept, {count} are missing"
    if not count:
        return f"{text}."
    names = "; ".join(f"{name} (seed {', '.join(map(str, seeds))})" for name, seeds in missing.items() if seeds)
    took = {name: [seconds_of(run) for run in by_seed.values()] for name, by_seed in runs.items()}
    everything = [seconds for several in took.values() for seconds in several]
    if not everything:
        return f"{text}: {names}. How long they take is not known: no run is kept."
    total = sum(len(seeds) * fmean(took[name] or everything) for name, seeds in missing.items())
    return f"{text}: {names}. About {total / 60:.0f} minutes, as the kept ones took."


def seconds_of(run):
    """Return how long a saved run took; older runs have only the time of their steps."""
    return run.get("seconds") or sum(row.get("time/step", 0) for row in run["rows"])


def shorter(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ---------------------------------------------------------------------------------------------------------- measures


def evaluations(run, key):
    """Return (steps, values) of the run's evaluations, except the one before training."""
    return curves.points([row for row in run["rows"] if row["step"] > 0], key)


def final(run, key="eval/accuracy"):
    """Return the mean of the run's last three evaluations, or of fewer."""
    return fmean(evaluations(run, key)[1][-LAST:])


def at_the_end(run, key="eval/accuracy"):
    """Return the run's last evaluation."""
    return evaluations(run, key)[1][-1]


def late_mean(run, metric):
    """Return the mean of a metric over the run's last five steps."""
    return fmean(curves.points(run["rows"], metric)[1][-5:])


def of_all(runs, measure, *key):
    """Return a measure of all runs as a table: a row per seed, a column per entry."""
    columns = {name: {seed: measure(run, *key) for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    return pandas.DataFrame({name: pandas.Series(column) for name, column in columns.items()})


def names_of_evaluations(everything):
    """Name the evaluations of final() and at_the_end(): ("evaluations 4, 8", "step 8") if all runs have the same."""
    steps = {tuple(evaluations(run, "eval/accuracy")[0][-LAST:]) for run in everything}
    if len(steps) > 1:
        return f"the last {LAST} evaluations", "the last evaluation"
    (steps,) = steps
    several = f"evaluation{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return several, f"step {steps[-1]}"


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


def parents_of(commands, n_updates):
    """Return {name: the entry it is compared with in the figure} for all entries but the first, in their order.

    It is the entry that the name begins with ("4 updates" for "4 updates, 80/20"), or an entry of the parent script (if
    possible with the same number of optimizer steps), or the first entry.
    n_updates: {name: optimizer steps per training step}.
    """
    stems = {name: Path(words[0]).stem for name, words in commands.items()}
    first, *others = commands
    parents = {}
    for name in others:
        grew_from = [other for other in stems if stems[other] == family.PARENT.get(stems[name])]
        alike = [other for other in grew_from if n_updates[other] == n_updates[name]]
        parents[name] = base_of(name, commands)
        if parents[name] == first and grew_from:
            parents[name] = [*alike, *grew_from][0]
    return parents


def compared(runs, parents, measure):
    """Return {"NAME minus PARENT": (difference per seed, its Estimate)} by one measure, for pairs with runs.

    The Estimates share one standard deviation of a run, pooled over all pairs.
    """
    table = of_all(runs, measure)
    values, estimates = [], []
    for name, parent in parents.items():
        pairs = table[[name, parent]].dropna()
        if len(pairs):
            values.append((pairs[name] - pairs[parent]).tolist())
            estimate = inference.of_values(f"{name} minus {parent}", pairs.to_numpy().tolist())
            estimates.append(replace(estimate, of=((name, 1), (parent, -1))))
    estimates = inference.pooled(estimates)
    return {estimate.label: pair for estimate, pair in zip(estimates, zip(values, estimates))}


def differences(runs, parents, measure):
    """Return {"NAME minus PARENT": (difference per seed, half the interval)} by one measure, for draw_differences."""
    found = {}
    for label, (values, estimate) in compared(runs, parents, measure).items():
        found[label] = values, inference.student(0.05, estimate.df) * estimate.error if estimate.df else 0.0
    return found


def pooled_errors(runs, bases, names):
    """Describe the pooled standard errors of the table's differences; "" if no entry has two seeds.

    names: names of the evaluations of final() and at_the_end().
    """
    errors = []
    for measure, name in zip((final, at_the_end), names):
        estimates = [estimate for _, estimate in compared(runs, bases, measure).values()]
        if not estimates or not estimates[0].df:
            return ""
        most = max(estimates, key=lambda estimate: estimate.n)
        errors.append(f"{most.error:.3f} ({name})")
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
    few = len(groups) <= plot.MOST_LINES
    paths = [folder / f"{name}.png", folder / f"{name}_{'budget' if few else 'metrics'}.png"][: 1 + second]
    if few:
        plot.draw(groups, paths[:1])
    else:
        updates = {}  # optimizer steps per training step
        for entry, of_seeds in groups.items():
            updates[entry] = max(row.get("optimizer_steps", 0) for rows in of_seeds for row in rows)
        parents = parents_of({entry: commands[entry] for entry in groups}, updates)
        several, last = names_of_evaluations(flat(runs))
        columns = {
            f"mean of {several}": differences(runs, parents, final),
            f"at {last}": differences(runs, parents, at_the_end),
        }
        plot.draw_differences(columns, WHAT_IS_DRAWN, paths[:1])
    if second and few:
        plot.draw_budgets(groups, paths[1:])
    elif second:
        plot.draw(groups, paths[1:], [key for key in plot.PANELS if key != "eval/accuracy"])
    return paths


def table(runs, commands, common):
    """Return the comparison as Markdown. runs: {name: {seed: saved run}}."""
    first, *others = runs
    bases = {name: base_of(name, runs) for name in others}
    minus = "difference" if set(bases.values()) - {first} else f"minus {first}"
    several, last = names_of_evaluations(flat(runs))
    people = numbers_of_people(flat(runs))
    measures = {f"mean of {several}": of_all(runs, final), f"accuracy at {last}": of_all(runs, at_the_end)}
    columns = {"entry": [], "script and flags": [], "runs": []}
    for name, by_seed in runs.items():
        is_below = family.depth(Path(commands[name][0]).stem) > 1  # its script's parent is not grpo.py
        columns["entry"].append("└ " * is_below + name + stale_mark(by_seed))
        columns["script and flags"].append(f"`{shlex.join(commands[name])}`")
        columns["runs"].append(str(len(by_seed)))
    for (title, values), of in zip(measures.items(), ("mean", last)):
        columns[title] = [shown(values[name]) for name in runs]
        columns[f"{minus} ({of})"] = ["", *(shown(values[name] - values[bases[name]], "+") for name in others)]
    for key in people:
        columns[f"{key[-1]} people (mean)"] = [shown(column) for _, column in of_all(runs, final, key).items()]
    columns["last reward"] = [shown(column) for _, column in of_all(runs, late_mean, "reward").items()]
    columns["last length"] = [f"{mean:.0f}" for mean in of_all(runs, late_mean, "response_tokens").mean()]
    columns["paper"] = [f"{PAPER[name]:.2f}" if name in PAPER else "" for name in runs]
    below = [text_below(runs, commands, common, bases, minus), made_by(flat(runs))]
    if any(map(stale_mark, runs.values())):
        below.append(STALE)
    return "\n\n".join([texts.table(columns, zip(*columns.values())), *below]) + "\n"


def numbers_of_people(everything):
    """Return the metrics of accuracy per number of people; other tasks have none."""
    puzzles = [run for run in everything if run.get("settings", {}).get("task", "kk") == "kk"]
    return sorted({key for run in puzzles for row in run["rows"] for key in row if key.startswith(PEOPLE)})


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


def text_below(runs, commands, common, bases, minus):
    """Return the text that explains the table."""
    everything, first = flat(runs), next(iter(runs))
    several, last = names_of_evaluations(everything)
    before = fmean(curves.points(run["rows"], "eval/accuracy")[1][0] for run in everything)
    seeds = ", ".join(map(str, sorted({seed for by_seed in runs.values() for seed in by_seed})))
    flags_of_all = {word for word in shlex.split(common) if word.startswith("--")}
    says_otherwise = any(flags_of_all & set(commands[name]) for name in runs)
    differ = ", if the row does not say otherwise" if says_otherwise else ""
    what = f'"NAME, X" minus "NAME", others minus "{first}"' if minus == "difference" else f"difference to {first}"
    over_people, problem = "", "problem"
    if numbers_of_people(everything):
        over_people, problem = ", mean over the numbers of people", "puzzle"
    text = (
        f"All entries{differ}: `{common}`; seeds {seeds}. Test accuracy{over_people}: "
        f"one response to each test {problem} at the evaluation's temperature. "
        f"It is given as the mean of {several} (the one before training left out) and at {last}; "
        f"mean ± standard error over the seeds. Before training it is {before:.3f}. "
        f"{minus.capitalize()}: {what} with the same seed, which means the same {problem}s in the same order."
        f"{pooled_errors(runs, bases, (f'mean of {several}', last))} Reward, length: mean of the last 5 steps."
    )
    return text + PAPERS if any(name in PAPER for name in runs) else text


def made_by(everything):
    """Describe the runs' commits, versions, machines and dates."""
    versions = set()
    for run in everything:
        versions |= {f"{name} {version}" for name, version in run["versions"].items()}
    commits = sorted({str(run["commit"]) for run in everything})
    machines = sorted({run["machine"] for run in everything})
    dates = sorted({run["date"] for run in everything})
    return f"Commit {', '.join(commits)}; {', '.join(sorted(versions))}; {', '.join(machines)}; {', '.join(dates)}."


def check_args(args):
    """Raise ValueError or OSError if something is wrong with the command line."""
    if not args.limit > 0:
        raise ValueError(f"--limit is {args.limit}; it must be greater than 0")
    if not args.seeds:
        raise ValueError("--seeds is empty: give at least one")
    if wrong := [seed for seed in args.seeds if not 0 <= seed < 2**32]:
        raise ValueError(f"--seeds {wrong[0]}: a seed must be 0 or greater, below 2**32")
    if Path(args.name).name != args.name:
        raise ValueError(f"--name {args.name} must be a name, not a path")
    usual = Args(suite=args.suite)
    is_other = args.entries or args.common or not set(usual.seeds) <= set(args.seeds)
    if is_other and not args.name and args.folder.resolve() == usual.folder.resolve():
        raise ValueError(
            f"{args.suite}.md in {args.folder} is the table of the whole suite: with other entries, flags or fewer "
            "seeds give a --folder or a --name of your own"
        )
    if args.folder.exists() and not args.folder.is_dir():
        raise ValueError(f"--folder {args.folder} is not a folder")
    if not (args.draw_only or args.dry_run):
        args.folder.mkdir(parents=True, exist_ok=True)
        files.check_writable(args.folder)


def main(args):
    if args.stale:
        print("\n".join(stale()))
        return
    try:
        check_args(args)
        common, entries = SUITES[args.suite]
        common, name_of_all = args.common or common, args.name or args.suite
        commands = read_entries(args.entries or entries)
        if unknown := set(args.only) - commands.keys():
            raise ValueError(f"--only {' '.join(sorted(unknown))}: the entries are {', '.join(commands)}")
        runs = {name: {} for name in commands}
        missing = {name: [] for name in args.only or commands}
        for name, words in commands.items():
            for seed in args.seeds:
                if found := read_kept(kept_file(args.folder, name, seed), command_of(words, common, seed)):
                    runs[name][seed] = found
                elif name in missing:
                    missing[name].append(seed)
        if not args.draw_only:
            print(plan(missing, runs))
        if args.dry_run:
            sys.exit()
        todo = [(seed, name) for seed in args.seeds for name in missing if seed in missing[name]]
        todo = [] if args.draw_only else todo
        for seed, name in (bar := tqdm(todo, disable=not todo or None)):
            bar.set_description(f"{name}, seed {seed}")
            runs[name][seed] = run(command_of(commands[name], common, seed), args.limit)
            text = json.dumps(runs[name][seed]).replace('{"step"', '\n{"step"') + "\n"
            files.write(kept_file(args.folder, name, seed), text)
        runs = {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items()}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # a training run failed
        sys.exit(f"error: {error}")
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    if not runs:
        sys.exit(f"error: no run of these entries is kept in {args.folder}")
    text = table(runs, commands, common)
    (args.folder / f"{name_of_all}.md").write_text(text)
    second = bool(args.entries) or args.suite not in ONE_PICTURE
    paths = draw(runs, commands, args.folder, name_of_all, second)
    print(text)
    print(f"wrote {args.folder / name_of_all}.md, {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

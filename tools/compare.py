"""Compare scripts on models/kk_tiny: several entries × several seeds, one run after the other; a table and a plot.

    python -m tools.compare                      every script, seeds 0, 1 and 2 (`control` has eight)
    python -m tools.compare --suite stages       an ablation of the papers, see tools/comparisons.toml
    python -m tools.compare --only grpo ar       run some of the entries; the table has all saved ones
    python -m tools.compare --stale              list the saved results whose digits have moved since, or may have
    python -m tools.compare --name mine --entries "eta 0.3: grpo_ar_lopti.py --eta 0.3" "eta 0.7: …"

An entry (a configuration) is a name, a script and the script's flags, which override the same flags of all entries.
gigpo+entropy_bonus.py is the script that tools.combine makes of both.
Every finished run is a line of a JSONL file in benchmarks/kk_tiny/ (settings, metrics of every step, its code, commit,
versions, machine), and is not repeated. NAME.md and NAME.png are made from those lines alone, on any machine; NAME is
the suite unless another is given. Seconds are in no table: see docs/speed.md.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
import runtime  # noqa: F401  # first: it says in one line which packages are missing

# isort: split
import pandas
import tyro
from tqdm import tqdm

from runtime import files, flags
from tools import combine, inference, kept, plot, texts

ROOT = Path(__file__).parents[1]
SUITES = tomllib.loads(Path(__file__).with_name("comparisons.toml").read_text(encoding="utf-8"))
OPTIONS = ("flags", "flags_of", "seeds")  # of a suite; its other keys are entries
WHAT_IS_DRAWN = (
    "large dot: mean over the seeds, which are the small dots\n"
    "line: its interval of 95 %, with one standard deviation of a run, pooled over all rows\n"
    "numbers in brackets: updates per step, if the two entries differ"
)
LAST = {"mean": 3, "last": 1}  # evaluations to average: the papers average their last three checkpoints


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
    draw_only: bool = False  # run nothing, plot the saved runs
    stale: bool = False  # list the saved results of all suites, lab/ and benchmarks/ whose digits moved, then end


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
        if not name or not words or not all((ROOT / one).is_file() for one in summands(words[0])):
            raise ValueError(f'an entry must be "NAME: SCRIPT FLAGS", and SCRIPT a file in {ROOT}, not {entry!r}')
        commands[name] = words
    return commands


def summands(script):
    """Return the files that a script is made of: itself, or a.py and b.py for a+b.py."""
    return [f"{one}.py" for one in script.removesuffix(".py").split("+")]


def file_of(script, folder=ROOT):
    """Return the name of a script's file. That of a sum is written first, to the folder; git ignores its name."""
    if "+" not in script:
        return f"{script}.py"
    name = f"combined_{script.replace('+', '_')}.py"
    files.write(folder / name, combine.combine(script.split("+"), name))
    return name


def asked_for(words, common, seed):
    """Return the script and the settings of an entry's run; its own settings override those of all entries."""
    given = kept.settings_of(shlex.split(common)) | kept.settings_of(words[1:]) | {"seed": seed}
    return {"script": Path(words[0]).stem, "settings": given}


def read_runs(folder, commands, common, seeds):
    """Return {name: {seed: saved run}}. ValueError if another script or other settings made one.

    commands: {name: [script, flag, ...]}.
    """
    saved = kept.read(folder)
    runs = {name: {} for name in commands}
    for name, words in commands.items():
        for seed in seeds:
            found = saved.get(kept.name_of(name, seed))
            if not found:
                continue
            runs[name][seed] = found
            asked = asked_for(words, common, seed)
            made_by = {"script": found["script"], "settings": found["settings"]}
            if made_by != asked:
                was, wanted = (shlex.join(kept.command_of(**one)) for one in (made_by, asked))
                raise ValueError(
                    f"{kept.name_of(name, seed)} in {folder} was made by {was}, not by {wanted}: "
                    "give the entry another name"
                )
    return runs


def run(asked):
    """Run one training in a temporary folder. Return the data to save. End the program if it fails.

    asked: its script and settings. Without a model among the settings, it trains models/kk_tiny, because on a GPU the
    scripts would use the paper's.
    """
    about = asked | {"code": kept.code_of(asked["script"])}  # the code when the run begins
    command = shlex.join(kept.command_of(**asked))
    with tempfile.TemporaryDirectory() as folder:
        more = {"model": "models/kk_tiny"} | asked["settings"] | {"run_dir": folder}
        words = [sys.executable, file_of(asked["script"]), *kept.command_of(asked["script"], more)[1:]]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {command}\nended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        rows = files.read_rows(Path(folder, "metrics.jsonl"))
        about = json.loads(Path(folder, "run.json").read_text()) | about
    return about | {"rows": [{key: value for key, value in row.items() if value is not None} for row in rows]}


def rows_of(runs):
    """Return the rows of all runs, {name: {seed: saved run}}, as one table with the columns `entry` and `seed`."""
    rows = []
    for name, by_seed in runs.items():
        for seed, run in by_seed.items():
            rows += [{"entry": name, "seed": seed} | row for row in run["rows"]]
    return pandas.DataFrame(rows)


def late(rows, key, count):
    """Return a metric's mean over the last rows that have it, except the one before training, `count` or fewer.

    rows: as of rows_of. The table has a row per seed and a column per entry, in the order of the rows.
    """
    after = rows[rows["step"] > 0].dropna(subset=key)
    means = after.groupby(["seed", "entry"])[key].agg(lambda values: values.tail(count).mean())
    return means.unstack("entry").reindex(columns=rows["entry"].unique())


def shown(values, sign=""):
    """Format a column's mean ± standard error: "0.576 ± 0.036", or with the sign "+" "+0.068 ± 0.017"; "" if empty."""
    values = values.dropna()
    if values.empty:
        return ""
    mean = f"{values.mean():{sign}z.3f}".replace("-", "−")
    return f"{mean} ± {values.sem():.3f}" if len(values) > 1 else mean


def base_of(name, names):
    """Return the entry to compare with: "dapo" for "dapo ar+lopti", as that begins with it; otherwise the first."""
    begun = [other for other in names if name.startswith((f"{other} ", f"{other}, "))]
    return max(begun, key=len, default=next(iter(names)))


def compared(values):
    """Return the Estimate of each entry minus its base, if a seed has both, seed by seed.

    The Estimates share one standard deviation of a run, pooled over all of them. values: a row per seed, a column per
    entry.
    """
    estimates = []
    for name in values.columns[1:]:
        base = base_of(name, values.columns)
        pairs = values[[name, base]].dropna()
        if len(pairs):
            of = ((name, 1), (base, -1))
            estimates.append(inference.of_values(f"{name} minus {base}", pairs.to_numpy().tolist(), of=of))
    return inference.pooled(estimates)


def with_updates(estimate, updates):
    """Return the Estimate with both entries' optimizer steps per training step in its label, if they differ."""
    name, base = estimate.label.split(" minus ")
    if updates[name] == updates[base]:
        return estimate
    return replace(estimate, label=f"{name} ({updates[name]:g}) minus {base} ({updates[base]:g})")


def draw(runs, folder, name):
    """Plot NAME.png: the curves of up to five entries, the differences of more; for `comparison` both."""
    groups = {entry: [run["rows"] for run in by_seed.values()] for entry, by_seed in runs.items()}
    path = folder / f"{name}.png"
    if len(groups) <= plot.MOST_LINES:
        plot.draw(groups, [path])
        return
    rows = rows_of(runs)
    columns = {f"{what} accuracy": compared(late(rows, plot.ACCURACY, count)) for what, count in LAST.items()}
    updates = rows.groupby("entry")["optimizer_steps"].median()
    for estimates in columns.values():
        estimates[:] = [with_updates(estimate, updates) for estimate in estimates]
    plot.draw_differences(columns, WHAT_IS_DRAWN, [path])
    if name == "comparison":  # lessons 2, 4 and 7 show the metrics
        plot.draw(groups, [folder / f"{name}_metrics.png"], [key for key in plot.PANELS if key != plot.ACCURACY])


def table(runs, commands, common):
    """Return the comparison as Markdown. runs: {name: {seed: saved run}}."""
    first, *others = runs
    rows = rows_of(runs)
    columns = {
        "entry": [name + mark(by_seed.values()) for name, by_seed in runs.items()],
        "script and flags": [f"`{shlex.join(commands[name])}`" for name in runs],
        "runs": [str(len(by_seed)) for by_seed in runs.values()],
    }
    for what, count in LAST.items():
        values = late(rows, plot.ACCURACY, count)
        differences = [values[name] - values[base_of(name, runs)] for name in others]
        columns[f"{what} accuracy"] = [shown(values[name]) for name in runs]
        columns[f"{what} difference"] = ["", *(shown(values, "+") for values in differences)]
    rewards, lengths = late(rows, "reward", 5), late(rows, "response_tokens", 5).mean()
    columns["last reward"] = [shown(rewards[name]) for name in runs]
    columns["last length"] = [f"{lengths[name]:.0f}" for name in runs]

    seeds = ", ".join(str(seed) for seed in sorted(set(rows["seed"])))
    before = rows.dropna(subset=plot.ACCURACY).groupby(["seed", "entry"])[plot.ACCURACY].first().mean()
    text = (
        f"All entries, unless the row says otherwise: `{common}`; seeds {seeds}. "
        "Test accuracy: one response to each test problem at the evaluation's temperature; the mean of the last three "
        "evaluations, or of all after the one before training, and the last; mean ± standard error over the seeds. "
        f"Before training it is {before:.3f}. "
        f'Difference: "NAME X" minus "NAME", others minus "{first}", with the same seed, which means the same problems '
        "in the same order. Reward, length: mean of the last 5 steps. †: the digits of its script have moved since; ‡: "
        "it is not known whether they have. `python -m tools.compare --stale` says more."
    )
    return "\n\n".join([texts.table(columns, zip(*columns.values())), text, made_by(runs)]) + "\n"


def mark(runs):
    """Return the mark behind an entry's name: "" if today's code gives the digits of its runs."""
    found = "".join(map(kept.differs, runs))
    return " †" * (kept.MOVED in found) + " ‡" * (kept.UNKNOWN in found)


def stale():
    """Return a line for each saved result whose digits have moved since, or may have, and their numbers."""
    lines, counts = [], Counter()
    for folder in kept.FOLDERS:
        runs = kept.read(ROOT / folder)
        results = {f"{folder}/{name}": run for name, run in runs.items()}
        for path in (ROOT / folder).rglob("*.json"):
            result = files.read_object(path) if path.stem not in runs else None
            if isinstance(result, dict) and isinstance(result.get("script"), str):
                results[str(path.relative_to(ROOT))] = result
        for name, result in sorted(results.items()):
            what = kept.differs(result)
            counts[what.partition(":")[0]] += 1
            if what:
                lines.append(f"{name} (commit {result['commit']}): {what}")
    total = f"{counts.total()} saved results: {counts['']} have the digits of today's code, those of"
    return [*lines, f"{total} {counts[kept.MOVED]} have moved, and of {counts[kept.UNKNOWN]} it is not known"]


def made_by(runs):
    """Describe the runs' commits, versions, machines and dates."""
    everything = [run for by_seed in runs.values() for run in by_seed.values()]
    versions = {f"{name} {version}" for run in everything for name, version in run["versions"].items()}
    commits, machines, dates = ({str(run[key]) for run in everything} for key in ("commit", "machine", "date"))
    found = [", ".join(sorted(names)) for names in (commits, versions, machines, dates)]
    return f"Commit {'; '.join(found)}."


def main(args):
    if args.stale:
        print("\n".join(stale()))
        return
    with flags.errors_in_one_line():
        if (args.entries or args.common or args.seeds) and not (args.folder or args.name):
            raise ValueError("other entries, flags or seeds than the suite's need a --folder or --name of your own")
        common, commands, seeds = read_suite(args.suite)
        folder = args.folder or ROOT / "benchmarks" / ("llm" if "SmolLM2" in common else "kk_tiny")
        common, commands = args.common or common, read_entries(args.entries) or commands
        seeds, title = args.seeds or seeds, args.name or args.suite
        is_own = args.entries or args.common
        file = folder / f"{title if is_own else SUITES[args.suite].get('flags_of', args.suite)}.jsonl"
        if unknown := set(args.only) - commands.keys():
            raise ValueError(f"--only {' '.join(sorted(unknown))}: the entries are {', '.join(commands)}")
        if file.exists() and not kept.read_file(file, None):
            raise ValueError(f"{file} is no file of saved runs: give another --name or --folder")
        folder.mkdir(parents=True, exist_ok=True)
        runs = read_runs(folder, commands, common, seeds)
    wanted = [] if args.draw_only else args.only or commands
    missing = [(seed, entry) for seed in seeds for entry in wanted if seed not in runs[entry]]
    print(f"{sum(map(len, runs.values()))} runs are kept, {len(missing)} are missing")
    for seed, entry in (bar := tqdm(missing, disable=not missing or None)):
        bar.set_description(f"{entry}, seed {seed}")
        name = kept.name_of(entry, seed)
        if name not in kept.read(folder):  # another process may have made it meanwhile
            kept.add(file, name, run(asked_for(commands[entry], common, seed)))
    runs = {entry: by_seed for entry, by_seed in read_runs(folder, commands, common, seeds).items() if by_seed}
    if not runs:
        sys.exit(f"error: no run of these entries is kept in {folder}")
    text = table(runs, commands, common)
    (folder / f"{title}.md").write_text(text)
    draw(runs, folder, title)
    print(f"{text}\nwrote {title}.md and {title}.png in {folder}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

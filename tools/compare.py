"""Compares scripts on models/kk_tiny: several entries × several seeds, one run after the other; a table and a plot.

    python tools/compare.py                                  every script, seeds 0, 1 and 2
    python tools/compare.py --suite stages                   an ablation of the papers, see SUITES below
    python tools/compare.py --seeds 0 1 2 3 4                more seeds; what is there already is not run again
    python tools/compare.py --only grpo ar                   run some of the entries; the table has all that are kept
    python tools/compare.py --dry_run                        which runs are missing, and how long they will take
    python tools/compare.py --name eta --entries "eta 0.3: grpo_ar_lopti.py --eta 0.3" "eta 0.7: …"

An entry is a name, a script and the script's flags, which take the place of the same flags of all entries. Every
finished run is kept as a small JSON file in benchmarks/kk_tiny/ (flags, metrics of every step, commit, versions,
machine), so that a comparison can be spread over days and machines. NAME.md and NAME.png are made of those files alone,
anywhere; NAME is the suite unless another is given. With more than five entries NAME.png shows each beside the one it
grew from (that with as many optimizer steps, if there is one) and NAME_metrics.png the other metrics; with fewer
NAME_budget.png shows the accuracy by training and by optimizer steps. Some suites have NAME.png alone. Seconds are in
no table: they are measured where nothing else runs (docs/speed.md).
"""

import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves, files
from tools import family, plot

ROOT = Path(__file__).parents[1]

ENTRIES = [  # in the order of the tree: what grew from another script than grpo.py stands below it
    "grpo: grpo.py",
    "grpo 4 updates: grpo.py --updates_per_step 4",  # as many optimizer steps as Lopti makes
    "ar: grpo_ar_lopti.py --alpha 0.3 --eta 0",
    "lopti: grpo_ar_lopti.py --alpha 0 --eta 0.5",
    "ar+lopti: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
    "reinforce++: reinforce_pp.py",
    "reinforce++ ar+lopti: reinforce_pp_ar_lopti.py --alpha 0.1 --eta 0.5",
    "dapo: dapo.py",
    "dapo ar+lopti: dapo_ar_lopti.py --alpha 0.3 --eta 0.5",
    "acpo: acpo.py",
    "gspo: gspo.py",
    "cispo: cispo.py",
    "80/20: entropy_top.py",
    "archer: archer.py",
]
# float32, so that processors with and without bfloat16 do the same; 16 prompts, because 16 updates a step divide them.
QUICK = "--steps 8 --eval_every 4 --eval_size 300 --dtype float32"
SHORT = "--steps 8 --eval_every 4 --eval_size 300 --prompts_per_step 16 --dtype float32"
LONG = "--steps 40 --eval_every 8 --eval_size 500 --dtype float32"  # kk_tiny, until nothing more is learned

# A pretrained model and a task that it learns in ten steps, as in `make llm`, which has a lower learning rate.
SMOLLM2 = (
    "--model models/SmolLM2-135M-Instruct --task rewards/largest.py --kl_coef 0 --lr 5e-5 --temperature 1"
    " --prompts_per_step 8 --responses_per_prompt 16 --updates_per_step 1 --max_response_tokens 16"
    " --micro_batch_tokens 1024 --kv_cache_gb 0.25 --steps 12 --eval_every 4 --eval_size 128"
)
# The same model after sft.py has taught it to solve puzzles (docs/algorithms/sft.md): thinking pays, and takes tokens.
# 512 tokens: with 384 a tenth of all careful solutions would be cut off. bfloat16: in float32 a step takes half as long
# again.
SMOLLM2_KK = (
    "--model models/SmolLM2-135M-KK --people 2 --max_prompt_tokens 352 --kl_coef 0 --lr 3e-5 --dtype bfloat16"
    " --temperature 1 --prompts_per_step 4 --responses_per_prompt 8 --updates_per_step 1 --max_response_tokens 512"
    " --micro_batch_tokens 2048 --kv_cache_gb 0.5 --steps 20 --eval_every 10 --eval_size 96"
)


def sweep(flag, values, others):
    """An entry of grpo_ar_lopti.py for each value of a flag."""
    return [f"{flag} {value}: grpo_ar_lopti.py --{flag} {value} {others}" for value in values]


def with_parts(base, script, alpha):
    """Entries of a script with AR alone, Lopti alone, Lopti's stages the other way round, and both."""
    parts = {
        "ar": f"--alpha {alpha} --eta 0",
        "lopti": "--alpha 0 --eta 0.5",
        "high, then low": "--alpha 0 --eta 0.5 --lopti_stages high,low",
        "ar+lopti": f"--alpha {alpha} --eta 0.5",
    }
    return [f"{base}{name}: {script} {flags}" for name, flags in parts.items()]


SUITES = {  # name: (flags of all, entries); the ablations that the papers print
    "comparison": (QUICK, ENTRIES),
    # The scripts of the course, and those that repair GRPO.
    "family": (
        QUICK,
        [
            "grpo: grpo.py",
            "reinforce: reinforce.py",
            "rloo: rloo.py",
            "maxrl: maxrl.py",
            "dr. grpo: dr_grpo.py",
            "ppo: ppo.py",
            "dppo: dppo.py",
            "sapo: sapo.py",
            "grpo tis: grpo_tis.py",
        ],
    ),
    # AR-Lopti, fig. 6a: the improbable tokens alone, or the others alone; fig. 6b: the stages the other way round.
    "stages": (
        QUICK,
        [
            "grpo: grpo.py",
            "lopti: grpo_ar_lopti.py --alpha 0 --eta 0.5",
            "high, then low: grpo_ar_lopti.py --alpha 0 --eta 0.5 --lopti_stages high,low",
            "low alone: grpo_ar_lopti.py --alpha 0 --eta 0.5 --lopti_stages low",
            "high alone: grpo_ar_lopti.py --alpha 0 --eta 0.5 --lopti_stages high",
        ],
    ),
    # AR-Lopti, fig. 6c: AR alone; "ar" is that with α 0.3.
    "alpha": (
        QUICK,
        [
            "grpo: grpo.py",
            "ar: grpo_ar_lopti.py --alpha 0.3 --eta 0",
            *sweep("alpha", (0.2, 0.5, 1), "--eta 0"),
        ],
    ),
    # Fig. 6d: Lopti alone ("lopti" has η 0.5), beside GRPO with as many optimizer steps: Lopti makes two of one update.
    "eta": (
        QUICK,
        [
            "grpo: grpo.py",
            "grpo 4 updates: grpo.py --updates_per_step 4",
            "lopti: grpo_ar_lopti.py --alpha 0 --eta 0.5",
            *sweep("eta", (0.1, 0.3, 0.9), "--alpha 0"),
        ],
    ),
    # What AR and Lopti give, on three algorithms, beside as many optimizer steps without them. With --seeds 0 to 7.
    "control": (
        QUICK,
        [
            "grpo: grpo.py",
            "grpo 4 updates: grpo.py --updates_per_step 4",
            *with_parts("", "grpo_ar_lopti.py", 0.3),
            "reinforce++: reinforce_pp.py",
            "reinforce++ 4 updates: reinforce_pp.py --updates_per_step 4",
            *with_parts("reinforce++ ", "reinforce_pp_ar_lopti.py", 0.1),
            "dapo: dapo.py",
            "dapo 4 updates: dapo.py --updates_per_step 4",
            *with_parts("dapo ", "dapo_ar_lopti.py", 0.3),
        ],
    ),
    # ACPO, Table 3, off policy. Every entry is a mean of the responses' means, as in the paper's release: only the clip
    # differs. The numbers are the largest and the average clip range of the kept run of "acpo, 16 updates", seed 0.
    "clip": (
        SHORT,
        [
            "grpo's clip, 16 updates: acpo.py --clip_alpha 0 --updates_per_step 16",
            "dapo's clip, 16 updates: acpo.py --clip_alpha 0 --clip_base_high 0.3 --updates_per_step 16",
            "acpo, 16 updates: acpo.py --updates_per_step 16",
            "dapo, clip-high at acpo's largest, 16 updates: acpo.py --clip_alpha 0 --clip_base_high 2.393"
            " --updates_per_step 16",
            "grpo, clip at acpo's average, 16 updates: acpo.py --clip_alpha 0 --clip_base 0.257 --updates_per_step 16",
        ],
    ),
    # Too far off policy: ten times the learning rate. The CISPO of ACPO's Table 1(a) (`--gated`) collapses with 16
    # updates and not with 2. Clip ranges of no effect stand for no clip.
    "collapse": (
        f"{SHORT} --lr 1e-3",
        [
            "grpo, 2 updates, lr 1e-3: grpo.py --updates_per_step 2",
            "grpo, 16 updates, lr 1e-3: grpo.py --updates_per_step 16",
            "no clip, 16 updates, lr 1e-3: grpo.py --clip_low 1 --clip_high 1e9 --updates_per_step 16",
            "cispo, gated, 2 updates, lr 1e-3: cispo.py --gated --updates_per_step 2",
            "cispo, gated, 16 updates, lr 1e-3: cispo.py --gated --updates_per_step 16",
            "acpo, 16 updates, lr 1e-3: acpo.py --updates_per_step 16",
        ],
    ),
    # Does the order of the short comparison last?
    "long": (
        LONG,
        [
            "grpo, 40 steps: grpo.py",
            "grpo 4 updates, 40 steps: grpo.py --updates_per_step 4",
            "lopti, 40 steps: grpo_ar_lopti.py --alpha 0 --eta 0.5",
            "ar+lopti, 40 steps: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
            "acpo, 40 steps: acpo.py",
        ],
    ),
    # Is Lopti ahead of as many optimizer steps of GRPO at a third and three times the learning rate, too? "long" has
    # the same flags but for the steps, so its evaluation at step 8 is the comparison at 1e-4.
    "learning_rate": (
        "--steps 8 --eval_every 4 --eval_size 500 --dtype float32",
        [
            f"lr {lr}{also}: {script} --lr {lr}"
            for lr in ("3e-5", "3e-4")
            for also, script in (
                ("", "grpo.py --updates_per_step 4"),
                (", lopti", "grpo_ar_lopti.py --alpha 0 --eta 0.5"),
            )
        ],
    ),
    "llm": (  # a run takes longer: --limit 30
        SMOLLM2,
        [
            "grpo, SmolLM2: grpo.py",
            "grpo 2 updates, SmolLM2: grpo.py --updates_per_step 2",  # as many optimizer steps as Lopti makes
            "dapo, SmolLM2: dapo.py",
            "ar+lopti, SmolLM2: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
        ],
    ),
    "puzzles": (  # needs `make taught`; a run takes an hour and more on one core: --limit 200
        SMOLLM2_KK,
        [
            "grpo, puzzles: grpo.py",
            "grpo 384 tokens, puzzles: grpo.py --max_response_tokens 384",
            "grpo 2 updates, puzzles: grpo.py --updates_per_step 2",  # as many optimizer steps as Lopti makes
            "ar+lopti, puzzles: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
            "dapo, puzzles: dapo.py",
            "acpo, puzzles: acpo.py",
        ],
    ),
    "lora": (  # the rank of LoRA, with ten times the learning rate; the same flags
        SMOLLM2,
        [
            "ar+lopti, SmolLM2: grpo_ar_lopti.py --alpha 0.3 --eta 0.5",
            *(
                f"rank {rank}, SmolLM2: grpo_ar_lopti.py --alpha 0.3 --eta 0.5 --lora_rank {rank} --lr 5e-4"
                for rank in (1, 8, 32)
            ),
        ],
    ),
    "updates": (  # fig. 19: the 80/20 rule near and far off policy
        SHORT,
        [
            f"{n} updates{also}: {script}.py --updates_per_step {n}"
            for n in (2, 4, 8, 16)
            for also, script in (("", "grpo"), (", 80/20", "entropy_top"))
        ],
    ),
}
# Suites whose second picture no page shows.
ONE_PICTURE = ("family", "alpha", "eta", "control", "collapse", "learning_rate", "updates", "lora")
# Final accuracy on K&K, mean over 3 to 7 people: AR-Lopti paper, Table 9, Llama-3.2-3B-Instruct trained with GRPO.
PAPER = {"grpo": 0.30, "ar": 0.40, "lopti": 0.59, "ar+lopti": 0.62}
PAPERS = " Paper: AR-Lopti, Table 9, Llama-3.2-3B-Instruct, mean over 3 to 7 people."
LAST = 3  # evaluations in the mean, as the papers average their last three checkpoints
KEPT = """step reward accuracy accuracy_2 accuracy_3 accuracy_4 eval/accuracy eval/accuracy_2 eval/accuracy_3
    eval/accuracy_4 response_tokens format_rate entropy kl clip_rate low_rate grad_norm optimizer_steps
    reward_std truncated_rate zero_std_rate sampler_gap peak_memory_gb
    time/step time/value value_loss value_clip_rate explained_variance correction_mean correction_cut
    top_rate clip_range_max clip_range_mean clip_range_max_1 clip_range_max_2 clip_range_max_3
    clip_range_max_4 clip_range_max_5 clip_range_mean_1 clip_range_mean_2 clip_range_mean_3 clip_range_mean_4
    clip_range_mean_5 bin_tokens_1 bin_tokens_2 bin_tokens_3 bin_tokens_4
    bin_tokens_5""".split()  # what a kept run holds of every step


@dataclass
class Args:
    """What to run, and where to keep it."""

    suite: Literal[*SUITES] = "comparison"  # what to compare
    entries: list[str] = field(default_factory=list)  # each "NAME: SCRIPT FLAGS"; empty: the suite's
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # one run of each entry for every seed
    common: str = ""  # flags for all entries, as in --common="--steps 10"; empty: the suite's
    only: list[str] = field(default_factory=list)  # names of the entries to run; empty: all
    folder: Path | None = None  # where runs, table and plot are kept; None: benchmarks/kk_tiny or benchmarks/llm
    name: str = ""  # of the table and the plot; empty: the suite's
    limit: float = 8  # minutes, after which a run is stopped and not kept
    draw_only: bool = False  # run nothing, draw what is there
    dry_run: bool = False  # say which runs are missing and how long they will take, and end

    def __post_init__(self):
        if self.folder is None:
            self.folder = ROOT / "benchmarks" / ("llm" if "SmolLM2" in SUITES[self.suite][0] else "kk_tiny")


def read_entries(entries):
    """{name: [script, flag, ...]}. ValueError where an entry is not "NAME: SCRIPT FLAGS" with a script that exists."""
    commands = {}
    for entry in entries:
        name, _, command = (part.strip() for part in entry.partition(":"))
        words = shlex.split(command)
        if not name or not words or not (ROOT / words[0]).is_file():
            raise ValueError(f'an entry must be "NAME: SCRIPT FLAGS", and SCRIPT a file in {ROOT}, not {entry!r}')
        if name in commands:
            raise ValueError(f"two entries are named {name!r}")
        commands[name] = words
    return commands


def flag_of(word):
    """The flag that a word sets, in one spelling: --no-compile is compile, and so is --compile=True."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_").removeprefix("no_")


def command_of(words, common, seed):
    """An entry's command: its own words, then those flags of all entries that it does not set itself."""
    own_flags = {flag_of(word) for word in words if word.startswith("--")}
    others, its_own = [], False
    for word in shlex.split(common):
        if word.startswith("--"):
            its_own = flag_of(word) in own_flags
        if not its_own:
            others.append(word)
    return shlex.join([*words, *others, "--seed", str(seed)])


def kept_file(folder, name, seed):
    return folder / f"{re.sub('[^a-z0-9.]+', '_', name.lower())}_seed_{seed}.json"


def read_kept(path, command):
    """A kept run, or None where there is none. ValueError where it was made with other flags."""
    if not path.exists():
        return None
    kept = files.read_object(path)
    if kept.get("command") != command:
        raise ValueError(
            f"{path} was made by\n  {kept.get('command')}\nand is asked for with\n  {command}\n"
            "Give the entry another name, or remove the file to run it again"
        )
    return kept


def run(command, limit):
    """One training run in a folder of its own: what is to be kept of it. RuntimeError where it fails."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *shlex.split(command), "--run_dir", folder]
        try:
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60 * limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command}\ntook more than {limit:g} minutes: --limit allows more") from None
        if done.returncode:
            raise RuntimeError(f"{command}\nended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        rows = curves.read_rows(Path(folder, "metrics.jsonl"))
        about = json.loads(Path(folder, "run.json").read_text())
    rows = [{key: shorter(row[key]) for key in KEPT if row.get(key) is not None} for row in rows]
    seconds = round(time.monotonic() - started)
    return {"command": command} | about | {"seconds": seconds, "rows": rows}


def plan(missing, runs):
    """In words, which runs are missing and how long they will take. missing: {name: seeds}; runs: kept ones.

    A run takes as long as the kept ones of its entry, or as those of all entries if it has none.
    """
    count = sum(map(len, missing.values()))
    text = f"{sum(map(len, runs.values()))} runs are kept, {count} are missing"
    if not count:
        return f"{text}."
    names = [f"{name} (seed {', '.join(map(str, seeds))})" for name, seeds in missing.items() if seeds]
    everything = [seconds_of(run) for by_seed in runs.values() for run in by_seed.values()]
    if not everything:
        return f"{text}: {'; '.join(names)}. How long they take is not known: no run is kept."
    total = 0
    for name, seeds in missing.items():
        kept = [seconds_of(run) for run in runs.get(name, {}).values()]
        total += len(seeds) * fmean(kept or everything)
    return f"{text}: {'; '.join(names)}. About {total / 60:.0f} minutes, as the kept ones took."


def seconds_of(run):
    """How long a kept run took; its steps alone if it was kept before the whole was measured."""
    return run.get("seconds") or sum(row.get("time/step", 0) for row in run["rows"])


def shorter(value):
    return float(f"{value:.4g}") if isinstance(value, float) else value


def evaluations(run, key):
    """(steps, values) of the run's evaluations; the one before training does not count."""
    return curves.points([row for row in run["rows"] if row["step"] > 0], key)


def final(run, key):
    """Mean of the run's last three evaluations, or of fewer."""
    return fmean(evaluations(run, key)[1][-LAST:])


def at_the_end(run, key):
    """The run's last evaluation."""
    return evaluations(run, key)[1][-1]


def names_of_evaluations(runs):
    """("evaluations 4, 8", "step 8"): those of final() and at_the_end(), if all runs have the same."""
    steps = {tuple(evaluations(run, "eval/accuracy")[0][-LAST:]) for run in runs}
    if len(steps) > 1:
        return f"the last {LAST} evaluations", "the last evaluation"
    (steps,) = steps
    several = f"evaluation{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return several, f"step {steps[-1]}"


def mean_and_error(values):
    """(mean, standard error of the mean, with ddof 1; nan for a single value)."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def shown(values):
    """Mean ± standard error: "0.576 ± 0.036"."""
    mean, error = mean_and_error(values)
    return f"{mean:.3f}{shown_error(error)}"


def shown_difference(values):
    """The same with a sign: "+0.068 ± 0.017"."""
    mean, error = mean_and_error(values)
    return f"{signed(mean)}{shown_error(error)}"


def shown_error(error):
    return "" if math.isnan(error) else f" ± {error:.3f}"


def signed(value):
    """A number with its sign and three digits: +0.068, −0.013, +1.200."""
    return f"{value:+z.3f}".replace("-", "−")


def base_of(name, names):
    """The entry that this one is compared with: "4 updates" for "4 updates, 80/20" where there is one, or the first."""
    start = name.rpartition(", ")[0]
    return start if start in names else next(iter(names))


def parents_of(commands, n_updates):
    """{name: the entry it is drawn beside} of all entries but the first, in the order of the entries.

    That is the one that its name begins with ("4 updates" for "4 updates, 80/20"), or an entry of the script that its
    script grew from, if there is one with as many optimizer steps, or the first of all.
    n_updates: {name: optimizer steps of a training step}.
    """
    stems = {name: Path(words[0]).stem for name, words in commands.items()}
    first, *others = commands
    parents = {}
    for name in others:
        grew_from = [other for other in stems if stems[other] == family.PARENT.get(stems[name])]
        alike = [other for other in grew_from if n_updates[other] == n_updates[name]]
        base = base_of(name, commands)
        parents[name] = base if base != first or not grew_from else [*alike, *grew_from][0]
    return parents


def draw(runs, commands, folder, name):
    """NAME.png, and NAME_budget.png or, of more than five entries, NAME_metrics.png. Gives the paths."""
    groups = {entry: [run["rows"] for run in by_seed.values()] for entry, by_seed in runs.items()}
    picture = folder / f"{name}.png"
    budget = folder / f"{name}_budget.png"
    metrics = folder / f"{name}_metrics.png"
    if len(groups) <= plot.MOST_LINES:
        plot.draw(groups, [picture])
        if name in ONE_PICTURE:
            return [picture]
        plot.draw_budgets(groups, [budget])
        return [picture, budget]
    updates = {}  # optimizer steps of a training step
    for entry, of_seeds in groups.items():
        updates[entry] = max(row.get("optimizer_steps", 0) for rows in of_seeds for row in rows)
    plot.draw_beside(groups, parents_of({entry: commands[entry] for entry in groups}, updates), [picture])
    if name in ONE_PICTURE:
        return [picture]
    plot.draw(groups, [metrics], [key for key in plot.PANELS if key != "eval/accuracy"])
    return [picture, metrics]


def table(runs, commands, common):
    """The comparison as Markdown. runs: {name: {seed: kept run}}."""
    everything = [run for by_seed in runs.values() for run in by_seed.values()]
    people = sorted(
        {key for run in everything for row in run["rows"] for key in row if key.startswith("eval/accuracy_")}
    )
    first, bases = next(iter(runs)), {name: base_of(name, runs) for name in runs}
    minus = f"minus {first}" if {*bases.values()} == {first} else "difference"
    several, last = names_of_evaluations(everything)
    names = ["script and flags", "runs", f"mean of {several}", f"{minus} (mean)"]
    names += [f"accuracy at {last}", f"{minus} ({last})"]
    names += [f"{key[-1]} people (mean)" for key in people]
    names += ["last reward", "last length", "paper"]
    lines = ["| " + " | ".join(["entry", *names]) + " |", "|---" * (len(names) + 1) + "|"]
    for name, by_seed in runs.items():
        mine, base = list(by_seed.values()), runs[bases[name]]
        both = [seed for seed in by_seed if seed in base]
        cells = [f"`{shlex.join(commands[name])}`", str(len(mine))]
        for measure in (final, at_the_end):
            cells.append(shown([measure(run, "eval/accuracy") for run in mine]))
            pairs = [(measure(by_seed[s], "eval/accuracy"), measure(base[s], "eval/accuracy")) for s in both]
            compared = name != first and pairs
            cells.append(shown_difference([ours - theirs for ours, theirs in pairs]) if compared else "")
        cells += [shown([final(run, key) for run in mine]) for key in people]
        cells += [shown([fmean(curves.points(run["rows"], "reward")[1][-5:]) for run in mine])]
        cells += [f"{fmean(fmean(curves.points(run['rows'], 'response_tokens')[1][-5:]) for run in mine):.0f}"]
        cells += [f"{PAPER[name]:.2f}" if name in PAPER else ""]
        below = family.depth(Path(commands[name][0]).stem) > 1  # it grew from another than grpo.py
        lines.append("| " + " | ".join(["└ " * below + name, *cells]) + " |")
    start = [curves.points(run["rows"], "eval/accuracy")[1][0] for run in everything]
    commits, machines = ({run[key] for run in everything} for key in ("commit", "machine"))
    versions = {f"{name} {version}" for run in everything for name, version in run["versions"].items()}
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    flags_of_all = {word for word in shlex.split(common) if word.startswith("--")}
    what = f"difference to {first}" if minus != "difference" else f'"NAME, X" minus "NAME", others minus "{first}"'
    differ = ", if the row does not say otherwise" * any({*commands[name]} & flags_of_all for name in runs)
    lines += [
        "",
        f"All entries{differ}: `{common}`; seeds {', '.join(map(str, seeds))}. Test accuracy, mean over the numbers of "
        "people: one response to each test puzzle at the evaluation's temperature. "
        f"It is given as the mean of {several} (the one before training left out) and at {last}; "
        f"mean ± standard error over the seeds. Before training it is {fmean(start):.3f}. "
        f"{minus.capitalize()}: {what} with the same seed, which means the same puzzles in the same order. "
        "Reward, length: mean of the last 5 steps." + (PAPERS * any(name in PAPER for name in runs)),
        "",
        f"Commit {', '.join(map(str, sorted(commits, key=str)))}; {', '.join(sorted(versions))}; "
        f"{', '.join(sorted(machines))}; {', '.join(sorted({run['date'] for run in everything}))}.",
    ]
    return "\n".join(lines) + "\n"


def check_args(args):
    """ValueError or OSError if something is wrong with the command line."""
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
                kept = read_kept(kept_file(args.folder, name, seed), command_of(words, common, seed))
                if kept:
                    runs[name][seed] = kept
                elif name in missing:
                    missing[name].append(seed)
        if not args.draw_only:
            print(plan(missing, runs))
        if args.dry_run:
            sys.exit()
        todo = [(seed, name) for seed in args.seeds for name in missing if seed in missing[name]]
        todo = [] if args.draw_only else todo
        for seed, name in (bar := tqdm(todo, disable=not todo)):
            bar.set_description(f"{name}, seed {seed}")
            kept = run(command_of(commands[name], common, seed), args.limit)
            text = json.dumps(kept).replace('{"step"', '\n{"step"') + "\n"
            files.write(kept_file(args.folder, name, seed), text)
            runs[name][seed] = kept
        runs = {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items()}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # a run that failed
        sys.exit(f"error: {error}")
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    if not runs:
        sys.exit(f"error: no run of these entries is kept in {args.folder}")
    text = table(runs, commands, common)
    (args.folder / f"{name_of_all}.md").write_text(text)
    paths = draw(runs, commands, args.folder, name_of_all)
    print(text)
    print(f"wrote {args.folder / name_of_all}.md, {', '.join(path.name for path in paths)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

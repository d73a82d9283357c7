"""Draw the pictures of the scripts' pages, the README (first_run.svg) and docs/first_runs.md (llm.svg, game.svg).

    python -m tools.maintain.pictures           all of them
    python -m tools.maintain.pictures acpo      one: docs/algorithms/pictures/acpo.svg
    python -m tools.maintain.pictures demo --run runs/grpo_ar_lopti_kk_0_…    after keeping this run in docs/demo.json

The left panel of a script's picture is computed with the script's own functions: the weight of a token's ∇log π in its
update (updates.py), or the advantages of a group. The right panel has the accuracy of the sampled responses in the kept
runs (benchmarks/kk_tiny), mean and range over the seeds. Both show the script beside its parent.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Annotated

import matplotlib
import torch
import tyro
from matplotlib import pyplot
from matplotlib.lines import Line2D

from rewards import guess
from runtime import files, terminal
from tools import family, kept
from tools.maintain import example, updates

matplotlib.use("svg")
DOCS = family.ROOT / "docs"
FOLDER = DOCS / "algorithms" / "pictures"
RUNS = family.ROOT / "benchmarks" / "kk_tiny"
LENS = family.ROOT / "lab" / "results" / "lens_page.jsonl"
COLOURS = {"script": "#d95f02", "parent": "#7570b3"}  # of the script, and of its parent
SIGNS = {1: "-", -1: "--"}  # lines of A > 0 and A < 0
KINDS = {  # what the left panel is over
    "group": ["reinforce", "rloo", "maxrl", "dr_grpo", "reinforce_pp"],
    "ratio": ["grpo", "cispo", "gspo", "sapo"],
    "square": ["acpo", "dppo"],
    "probability": ["grpo_ar_lopti", "reinforce_pp_ar_lopti", "dapo_ar_lopti"],
    "entropy": ["entropy_top"],
    "sampler": ["grpo_tis"],
    "reference": ["grpo_kl"],
    "length": ["dapo"],
    "guess": ["gigpo"],
}
NAMES = {  # of the kept runs, where it is not the script's
    "grpo_ar_lopti": "ar_lopti",
    "reinforce_pp": "reinforce_",
    "reinforce_pp_ar_lopti": "reinforce_ar_lopti",
    "dr_grpo": "dr._grpo",
    "entropy_top": "80_20",
}
GAMES = {  # entries of the suite game in docs/game.svg: (label, colour)
    "game_smollm2": ("gigpo: each turn its own advantage", "#d95f02"),
    "game_one_advantage_smollm2": ("grpo_multi_turn: one for all turns", "#7570b3"),
}
NUM_TOKENS = 241  # on an axis
GROUP = 8
OTHERS = ("demo", "llm", "game", "pass_at_k", "judge")  # pictures in docs/ that belong to no script
RESPONSES = (8, 9)  # of the lens, in docs/first_run.svg: a wrong and a right answer to the same puzzle
COLUMNS = 58  # characters on a line of a response
GREY = "#767676"  # readable on both themes
DARK = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#e6edf3")
DARK |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#0d1117")  # GitHub's


def settings_of(script, with_kl=False):
    """Return a script's settings, without a KL term unless the picture is about it."""
    args = example.settings_of(script)
    if hasattr(args, "kl_coef") and not with_kl:
        args.kl_coef = 0.0
    return args


def batch_of(old, **others):
    """Return a batch of responses of one token each, in float64. old: π_old; others: ref, sampler, entropy; all [n]."""
    columns = {"sampler": old, "ref": old, "entropy": torch.ones_like(old)} | others | {"old": old}
    columns = {name: values.double()[:, None] for name, values in columns.items()}  # [n, 1]
    mask = torch.ones(columns["old"].shape, dtype=torch.bool)
    logs = {f"{name}_logp": columns[name].log() for name in ("old", "ref", "sampler")}
    return {"ids": torch.zeros(mask.shape, dtype=torch.long), "mask": mask, "entropy": columns["entropy"], **logs}


def weights(script, old, new, advantage, **others):
    """Return the weight of ∇log π of tokens at the second update of a step, [n], as a multiple of |A|.

    old, new: [n], π_old and π; advantage: A of all of them; others: as in batch_of().
    """
    trainer = importlib.import_module(script)
    args = settings_of(script, with_kl="ref" in others)
    batch = batch_of(old, **{"ref": new} | others)
    batch["advantages"] = torch.full(batch["mask"].shape, float(advantage), dtype=torch.float64)
    if hasattr(trainer, "ar_weight"):
        batch["advantages"] = batch["advantages"] * trainer.ar_weight(batch["old_logp"], args.alpha)
    logp = new.double().log()[:, None]
    weight, _ = updates.token_weights(script, batch, logp, batch["entropy"], args, is_first=False)
    return weight[:, 0] * len(weight)


def group_panel(axes, scripts):
    """Advantages of right and wrong responses, over the number of right ones among eight."""
    counts = range(1, GROUP)  # one batch with a group of each kind: reinforce_pp.py's mean is over all of them
    rewards = torch.tensor([float(i < count) for count in counts for i in range(GROUP)], dtype=torch.float64)
    for role, script in scripts.items():
        args = dataclasses.replace(settings_of(script), responses_per_prompt=GROUP, prompts_per_step=len(counts))
        batch = updates.with_advantages(
            script, batch_of(torch.ones_like(rewards)), rewards, (rewards > 0).tolist(), args
        )
        found = batch["advantages"].view(len(counts), GROUP)
        for place, style in ((0, "-"), (-1, "--")):  # the first response of a group is right, the last one wrong
            axes.plot(counts, found[:, place], style, color=COLOURS[role], marker=".")
    axes.set(xlabel=f"right responses in a group of {GROUP} (reward 1; others 0)")
    axes.set(ylabel="advantage A (right: solid, wrong: dashed)")


def length_panel(axes, scripts):
    """The penalty that dapo.py adds to the reward of a long response."""
    dapo = importlib.import_module("dapo")
    lengths = torch.linspace(0, dapo.Args().max_response_tokens, NUM_TOKENS).tolist()
    axes.plot(lengths, [dapo.overlong_penalty(length, dapo.Args()) for length in lengths], color=COLOURS["script"])
    axes.plot(lengths, [0.0] * len(lengths), color=COLOURS["parent"])
    axes.set(xlabel="tokens of a response", ylabel="added to the reward")


def line_panel(axes, scripts, kind):
    """Weight of a token over one of its numbers, for A = 1 and A = −1."""
    even = torch.linspace(0, 1, NUM_TOKENS)
    ratio = (3 ** (2 * even - 1)).double()  # 1/3 to 3
    p = torch.full_like(ratio, 0.3)
    inside = even.clamp(0.002, 0.998)
    x, old, new, others, label = {
        "ratio": (ratio, p, p * ratio, {}, r"ρ = π / π_old, at π_old = 0.3"),
        "sampler": (ratio, p, p, {"sampler": p / ratio}, r"π_old / π_sampler, at ρ = 1"),
        "reference": (ratio, p, p, {"ref": p / ratio}, r"π / π_ref, at ρ = 1"),
        "probability": (even, inside, inside, {}, r"π_old, at ρ = 1"),
        "entropy": (100 * even, p, p, {"entropy": even}, "percentile of the token's entropy, at ρ = 1"),
    }[kind]
    for role, script in scripts.items():
        for advantage, style in SIGNS.items():
            axes.plot(x, weights(script, old, new, advantage, **others), style, color=COLOURS[role])
    if kind in ("ratio", "sampler", "reference"):
        axes.set_xscale("log")
        axes.set_xticks([0.33, 0.5, 0.8, 1, 1.25, 2, 3], ["⅓", "½", "0.8", "1", "1.25", "2", "3"])
        axes.minorticks_off()
    axes.set(xlabel=label, ylabel="weight of ∇log π")
    signs = [Line2D([], [], color="black", linestyle=SIGNS[sign], label=f"A {'<=>'[sign + 1]} 0") for sign in SIGNS]
    axes.legend(handles=signs, frameon=False, fontsize=8)


def square_panel(axes, scripts):
    """Where a token of positive advantage keeps its gradient: π over π_old."""
    side = torch.linspace(0.01, 0.99, 80).double()
    rng = torch.Generator().manual_seed(0)
    crowd_old = torch.rand(4000, generator=rng).double().clamp(0.01, 0.99)  # acpo.py's ranges are of a population
    crowd_new = (crowd_old * torch.exp(0.15 * torch.randn(4000, generator=rng).double())).clamp(max=0.999)
    new = torch.cat([side, crowd_new])
    for role, script in scripts.items():
        columns = [weights(script, torch.cat([old.expand(len(side)), crowd_old]), new, 1) for old in side]
        kept = torch.stack([column[: len(side)].abs() > 1e-12 for column in columns], 1).double()  # [π, π_old]
        style = {"script": "solid", "parent": "dashed"}[role]
        axes.contour(side, side, kept, levels=[0.5], colors=COLOURS[role], linestyles=style)
        if role == "script":
            axes.contourf(side, side, kept, levels=[0.5, 1.5], colors=COLOURS[role], alpha=0.15)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.6)
    axes.set(xlabel="π_old", ylabel="π", xlim=(0, 1), ylim=(0, 1))
    axes.text(0.97, 0.06, "A > 0: the gradient stays", ha="right", fontsize=8)


def guess_panel(axes, scripts):
    """The advantage of each first guess in rewards/guess.py, if halving follows: in two groups, and over the step.

    Only the reward for winning counts.
    """
    trainer = importlib.import_module(scripts["script"])
    numbers = range(1, guess.HIGHEST + 1)
    games = [game(number, first) for number in numbers for first in numbers]
    scores = []
    for one in games:
        won = guess.score_conversation(one.turns, one.problem["answer"])["parts"]["won"]
        scores.append({"reward": won, "parts": {}, "turns": [(one.problem["id"], state, 1) for state in one.states]})
    batch = {"mask": torch.ones(len(games), max(len(one.turns) for one in games), dtype=torch.bool)}
    for i, one in enumerate(games):
        batch["mask"][i, len(one.turns) :] = False
    found = {}
    for anchors in ("group", "step"):
        args = dataclasses.replace(settings_of("gigpo"), anchors=anchors)
        of_tokens = trainer.turn_advantages(scores, batch, args)
        found[anchors] = of_tokens[:, 0].view(guess.HIGHEST, guess.HIGHEST)  # [number, first guess]
    for number, style in ((3, "--"), (12, ":")):
        label = f"in a group that hides {number}"
        axes.plot(numbers, found["group"][number - 1], color=COLOURS["parent"], linestyle=style, label=label)
    axes.plot(numbers, found["step"].mean(0), color=COLOURS["script"], label="over the step")
    axes.set(xlabel="first guess", ylabel="advantage of the first guess", ylim=(-2, 4))
    axes.set_xticks(range(1, guess.HIGHEST + 1, 2))
    axes.legend(frameon=False, loc="upper right")


def game(number, first):
    """Return a game of guess as a conversation of gigpo.py: a first guess, then halving. A turn is one token."""
    problem = {"id": number, "answer": number}
    turns, states = [], []
    while len(turns) < guess.TURNS and (not turns or guess.guess_of(turns[-1]) != number):
        states.append(guess.state(turns, problem))
        turns.append(str(sum(states[-1]) // 2 if turns else first))
    return SimpleNamespace(turns=turns, states=states, lengths=[1] * len(turns), problem=problem)


def runs_of(script):
    """Return the accuracies of the sampled responses in a script's kept runs: a list per seed, [] if there is none."""
    start = f"{NAMES.get(script, script)}_seed_"
    found = [run for name, run in kept.read(RUNS).items() if name.startswith(start)]
    return [[row["accuracy"] for row in run["rows"] if "accuracy" in row] for run in found if run["script"] == script]


def curve_panel(axes, scripts):
    """Accuracy of the sampled responses over the steps: the mean over the seeds, and their range."""
    for role, script in scripts.items():
        if runs := runs_of(script):
            columns = list(zip(*runs))
            steps = range(1, len(columns) + 1)
            label = f"{script}, {len(runs)} seeds"
            axes.plot(steps, list(map(fmean, columns)), color=COLOURS[role], label=label)
            ends = list(map(min, columns)), list(map(max, columns))
            axes.fill_between(steps, *ends, color=COLOURS[role], alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="accuracy of the sampled responses", ylim=(0, 1))
    axes.legend(frameon=False, loc="upper left")


def test_panel(axes, name):
    """Accuracy on the test problems of the run that docs/NAME.json keeps."""
    kept = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
    points = [(row["step"], row["eval/accuracy"]) for row in kept["rows"] if "eval/accuracy" in row]
    axes.plot(*zip(*points), color="#0064be", marker="o", linewidth=2)
    for point in points:
        axes.annotate(f"{point[1]:.3f}", point, (0, 8), textcoords="offset points", ha="center")
    axes.set(xlabel="training step", ylim=(0, 1.05), xticks=[step for step, _ in points])
    axes.margins(x=0.15)
    axes.set_title(f"Accuracy on {kept['settings']['eval_size']} test problems", fontweight="bold")


def game_panel(axes, key, title, **look):
    """A metric of the runs in GAMES, over the steps: the mean over the seeds, and their range."""
    found = kept.read(RUNS.with_name("llm"))
    for entry, (label, colour) in GAMES.items():
        runs = [run["rows"] for name, run in found.items() if name.startswith(f"{entry}_seed_")]
        by_step = [{row["step"]: row[key] for row in rows if key in row} for rows in runs]
        steps = sorted(set.intersection(*map(set, by_step)))
        values = [[run[step] for run in by_step] for step in steps]
        label += f" ({len(runs)} seeds)" if len(runs) > 1 else " (one seed)"
        axes.plot(steps, list(map(fmean, values)), color=colour, label=label)
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="training step", title=title, **look)


def game_panels():
    """Return the panels of docs/game.svg."""

    def accuracy(axes):
        game_panel(axes, "eval/accuracy", "Test games won at temperature 1", ylim=(0, 1))
        axes.legend(frameon=False, loc="lower right", fontsize=8)

    return [(4.2, accuracy), (4.2, lambda axes: game_panel(axes, "entropy", "Entropy, nats per token", ylim=(0, 2.6)))]


def rows_of(page, begin):
    """Return the cells of the table of a page in docs/ that begins so, a list per row, without its head."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = text[text.index(begin) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def pass_panel(axes):
    """pass@k of docs/evaluation.md: before training, after RL and after SFT."""
    for name, *values in rows_of("evaluation.md", "| | pass@1"):
        axes.plot([2**i for i in range(len(values))], [float(value.split()[0]) for value in values], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="k", ylabel="pass@k", ylim=(0, 1.03))
    axes.legend(frameon=False, loc="lower right")


def judge_panel(axes, column, title):
    """A column of the run in docs/reward_models.md whose judge is fooled."""
    points = [(int(row[0]), float(row[column])) for row in rows_of("reward_models.md", "| step |") if row[column]]
    axes.plot(*zip(*points), "o-", color="#0064be")
    axes.set(xlabel="training step", title=title, xticks=[step for step, _ in points])
    axes.set_ylim(bottom=0)


def token_panel(axes):
    """The tokens of two responses, coloured by their weights in the first update of GRPO with AR and Lopti."""
    responses = json.loads(LENS.read_text(encoding="utf-8"))["responses"]
    axes.axis("off")
    axes.set_title("GRPO with AR and Lopti: the weights of tokens", fontweight="bold", loc="left")
    line = 1

    def put(column, text, **style):
        place = (6.02 * column, -19 * line)  # points: a letter of size 10 is 6.02 wide
        axes.annotate(text.replace(" ", "\N{NO-BREAK SPACE}"), (0, 1), place, "axes fraction", "offset points", **style)

    for response in (responses[number] for number in RESPONSES):
        colour, answer = ("#0064be", "right, 3") if response["correct"] else ("#cd5a00", "wrong, −0.5")
        put(0, f"reward of the response: {answer}", color=GREY)
        line, column = line + 1, 0
        found = list(map(abs, response["weights"]["grpo_ar_lopti"]["first"]))
        for token, weight in zip(response["tokens"], found):
            if token == "\n" or column + len(token) > COLUMNS:
                line, column = line + 1, 0
            share = weight / max(found)  # 0.7 to 1, because α is 0.3
            box = {"facecolor": colour, "alpha": 2 * share - 1.3, "linewidth": 0, "pad": 0}
            put(column, token.strip("\n"), family="monospace", fontsize=10, bbox=box)
            column += len(token.strip("\n"))
        line += 1.6
    put(0, "Blue: more probable, orange: less. Pale: a low-probability token, 0.7 of the full weight.", color=GREY)


def panels_of(name):
    """Return [(a panel's width in inches, the function that draws it on axes)] of a picture; [] if there is none."""
    if name == "llm":
        return [(3.4, lambda axes: test_panel(axes, name))]
    if name == "demo":
        return [(5.1, token_panel), (3.4, lambda axes: test_panel(axes, name))]
    if name == "game":
        return game_panels()
    if name == "pass_at_k":
        return [(4.2, pass_panel)]
    if name == "judge":
        titles = {1: "Reward by the judge", 5: "Test accuracy"}
        return [(3.4, lambda axes, of=of: judge_panel(axes, *of)) for of in titles.items()]
    parent = (family.PARENT | family.own_scripts()).get(name)
    scripts = ({"parent": parent} if parent else {}) | {"script": name}
    kind = next((kind for kind, of in KINDS.items() if name in of), None)
    panels = {"group": group_panel, "square": square_panel, "length": length_panel, "guess": guess_panel}
    left = panels.get(kind, lambda axes, scripts: line_panel(axes, scripts, kind))
    chosen = [left] * bool(kind) + [curve_panel] * bool(runs_of(name))
    return [(3.6, lambda axes, panel=panel: panel(axes, scripts)) for panel in chosen]  # two in a column of 690 px


def draw(name):
    """Write a picture: of a script, or demo, llm or game. Return its path, or None if there is nothing to draw.

    The README's picture, demo, is first_run.svg, and first_run_dark.svg for readers with a dark theme.
    """
    widths, panels = zip(*panels_of(name)) if panels_of(name) else ((), ())
    if not panels:
        return None
    style = {"svg.hashsalt": name, "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"}
    for suffix, theme in {"_dark": DARK, "": {}}.items() if name == "demo" else [("", {})]:
        with pyplot.rc_context(style | theme):
            figure, row = pyplot.subplots(
                1, len(panels), figsize=(sum(widths), 3.2), squeeze=False, layout="constrained", width_ratios=widths
            )
            for axes, panel in zip(row[0], panels):
                panel(axes)
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(alpha=0.2)
            folder = DOCS if name in OTHERS else FOLDER
            path = folder / f"{'first_run' if name == 'demo' else name}{suffix}.svg"
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
    return path


def keep(run, name):
    """Write docs/NAME.json: what the pages show of a run. run: its folder."""
    before, after, learned = terminal.pairs_of_rows(files.read_rows(run / "test_samples.jsonl"))
    chosen = min(learned, key=lambda number: len(after[number]["response"]))  # the shortest one fits beside the other
    about = files.read_object(run / "run.json")
    kept = {key: about[key] for key in ("script", "commit", "machine", "versions", "date")}
    kept["settings"] = files.read_object(run / "args.json") | {"run_dir": "", "resume": ""}
    kept["rows"] = [row for row in files.read_rows(run / "metrics.jsonl") if "eval/accuracy" in row]
    kept |= {"before": before[chosen], "after": after[chosen], "learned": len(learned), "kept_problems": len(before)}
    files.write(DOCS / f"{name}.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def main(names: Annotated[tuple[str, ...], tyro.conf.Positional] = (), run: Path | None = None):
    """Draw these pictures, or all.

    Args:
        names: scripts, or demo, llm, game, pass_at_k or judge
        run: the folder of a run whose numbers are first kept, for demo or llm
    """
    if run:
        keep(run, *names)
    for name in names or [*updates.ALGORITHMS, *OTHERS]:
        print(draw(name) or f"{name}: nothing to draw")


if __name__ == "__main__":
    tyro.cli(main)

"""Read the folders of runs, and prepare what tools/report.py and tools/watch.py show of them."""

import fcntl
import io
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import jinja2
from markupsafe import Markup

from runtime import curves, files, terminal
from tools import plot

PANELS = list(dict.fromkeys([*curves.PANELS, *plot.PANELS]))
MOST_PANELS = 9
# Settings that change neither a step nor its evaluation.
NO_MATTER = {"seed", "run_dir", "resume", "steps", "epochs", "save_every", "keep_checkpoints", "dry_run", "track"}
LONGEST = 3000  # characters of a prompt or response
# HTML can't have these characters, or they would reorder the text around them.
ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass
class Run:
    """What a run's folder holds. A file that is not there yet is empty."""

    folder: Path
    settings: dict
    about: dict  # of run.json
    rows: list
    label: str = ""
    colour: str = ""

    def points(self, key):
        return dict(zip(*curves.points(self.rows, key)))

    def first_and_last(self, key, with_step=False):
        """Return "0.31 → 0.65" of a metric, or its only value; "–" without one. with_step: name an earlier step."""
        points = self.points(key)
        older = f" (step {max(points)})" if with_step and points and max(points) < self.step else ""
        return (first_and_last([f"{value:.3g}" for value in points.values()]) or "–") + older

    @property
    def script(self):
        return self.about.get("script", "unknown script")

    @property
    def step(self):
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def state(self):
        """Return how the run ended, "running", or "killed": then there is no ended.txt, and nobody has its lock."""
        ended = self.folder / "ended.txt"
        if ended.exists():
            return ended.read_text(encoding="utf-8").partition(" after step")[0]
        try:
            with open(self.folder / "lock", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "running"
        except OSError:  # no such file, or a file system without locks
            pass
        return "killed"

    @property
    def minutes_left(self):
        """Estimate how long a run still takes, from its last five steps; None if it has ended or made no step."""
        times = list(self.points("time/step").values())[-5:]
        if not times or not self.settings.get("steps") or self.state != "running":
            return None
        return median(times) * (self.settings["steps"] - self.step) / 60


def first_and_last(texts):
    return " → ".join([*texts[:1], *texts[1:][-1:]])


def read(path):
    """Return the Run in a folder, or the one that a checkpoint belongs to. ValueError if there is none."""
    folder = files.run_of(path)
    if not (folder / "metrics.jsonl").is_file():
        inside = sorted(str(place.parent) for place in folder.glob("*/metrics.jsonl"))
        hint = f"; name a run in it: {', '.join(inside[:5])}" if inside else ""
        raise ValueError(f"{path} is not the folder of a run, which has a file metrics.jsonl{hint}")
    rows = files.read_rows(folder / "metrics.jsonl")
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{folder / 'metrics.jsonl'} is damaged: a line is not an object with a step")
    return Run(folder, read_object(folder / "args.json"), read_object(folder / "run.json"), rows)


def read_object(path):
    return files.read_object(path) if path.exists() else {}


def panels(groups, most=MOST_PANELS):
    """Plot a panel per metric that some run has, as parts.html shows it: title, svg, values for the pointer.

    groups: lists of runs; a list is one line, the mean of its runs, with a band from the lowest to the highest.
    """
    runs = list(itertools.chain(*groups))
    keys = [key for key in PANELS if any(run.points(key) for run in runs)]
    return [panel(groups, key) for key in keys[:most]]


def panel(groups, key):
    import matplotlib

    figure = plot.new_figure(5.2, 3.1, "")
    figure.set_layout_engine("none")  # the page asks for many panels, and a computed layout takes twice as long
    axis = figure.add_axes((0.15, 0.2, 0.83, 0.68))
    lines = {}
    for group in groups:
        if rows := [run.rows for run in group if run.points(key)]:
            plot.draw_line(axis, rows, key, color=group[0].colour)
            steps, values = axis.lines[-1].get_data()
            if len(steps):
                line = [list(map(int, steps)), [f"{value:.4g}" for value in values]]
                if line in lines.values():  # dashed, so that the line below it is seen
                    axis.lines[-1].set_linestyle((0, (4, 4)))
                lines[group[0].label] = line
    title = curves.TITLES.get(key, key) + plot.set_scale(axis, key)
    axis.set(title=title, xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    at = {step for steps, _ in lines.values() for step in steps}
    if len(at) == 1:
        axis.set_xlim(min(at) - 1, max(at) + 1)
    for patch in (figure.patch, axis.patch):
        patch.set_visible(False)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": f"{key} {lines}"}):  # ids of its own: a page has several panels
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = "<svg" + text.getvalue().partition("<svg")[2].replace("#000000", "currentColor")
    svg = re.sub(r' id="[a-z0-9.]+_\d+"|font-family: [^;"]*; ', "", svg)  # each panel would have the same ids
    place, (first, last) = axis.get_position(), axis.get_xlim()
    data = json.dumps({"left": place.x0, "right": place.x1, "first": first, "last": last, "lines": lines})
    ends = [f"{label}: {first_and_last(values)}" for label, (_, values) in lines.items()]
    return {"title": title, "svg": Markup(svg), "data": data, "ends": "; ".join(ends)}


def newest_tokens(folder, most=None):
    """Return tokens.json as parts.html shows it, {step, full, responses}; {} without it. most: tokens per response."""
    found = read_object(folder / "tokens.json")
    responses = []
    for one in found.get("responses", []):
        columns = ("tokens", "is_own", "old_logp", "new_logp", "advantages")
        responses.append({"prompt": one["prompt"], "tokens": list(zip(*(one[name] for name in columns)))})
    sizes = sorted(abs(new - old) for one in responses for _, own, old, new, _ in one["tokens"] if own)
    if not sizes:
        return {}
    full = sizes[int(0.98 * (len(sizes) - 1))] or 1  # in full colour from here on
    for one in responses:
        own = [(new - old, advantage) for _, own, old, new, advantage in one["tokens"] if own]
        change, advantage = map(fmean, zip(*own))
        one |= {"factor": f"{math.exp(change):.3f}", "advantage": f"{advantage:.2f}".replace("-", "−")}
        spans = [span(*values, full) for values in one["tokens"][:most]]
        one |= {"spans": spans, "left": len(one["tokens"]) - len(spans)}
    return {"step": found["step"], "full": f"{math.exp(full):.3g}", "responses": responses}


def span(piece, is_own, old, new, advantage, full):
    """Return (class, text, numbers) of a token. The class is u1 to u5 if it has become likelier, or d1 to d5."""
    if not is_own:
        return "quiet", piece, "the task's reply: no gradient"
    level = min(5, round(5 * abs(new - old) / full))
    told = f"p {math.exp(old):.3g} → {math.exp(new):.3g}, A {advantage:.2f}".replace("-", "−")
    return f"{'u' if new > old else 'd'}{level}" if level else "", piece, told


def samples(folder):
    """Return {step: [problems with their responses]} of samples.jsonl, for parts.html."""
    found = {}
    rows = files.read_rows(folder / "samples.jsonl")
    for (step, prompt, answer), same in itertools.groupby(rows, lambda row: (row["step"], row["prompt"], as_text(row))):
        problem = {"prompt": cut(prompt), "answer": answer, "rows": [for_page(row) for row in same]}
        found.setdefault(step, []).append(problem)
    return found


def as_text(row):
    answer = row.get("answer")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def for_page(row):
    """Return a row of samples.jsonl or test_samples.jsonl as parts.html shows it."""
    known = ("step", "id", "answer", "prompt", "response", "turns", "replies", "reward", "correct")
    told = [f"{name}: {json.dumps(value)}" for name, value in row.items() if name not in known]
    text = cut(terminal.text_of_row(row)).strip("\n") or "(an empty response)"
    return {
        "correct": row["correct"],
        "reward": f"{row['reward']:g}".replace("-", "−"),
        "told": "; ".join(told),
        "text": text,
    }


def cut(text):
    """Return the beginning and the end of a long text."""
    left_out = len(text) - LONGEST
    half = LONGEST // 2
    return f"{text[:half]}\n… {left_out} characters left out …\n{text[-half:]}" if left_out > 0 else text


def template(name):
    """Return a template of tools/, which escapes all texts and replaces ODD characters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: ODD.sub("�", value) if type(value) is str else value,
    )
    return environment.get_template(name)

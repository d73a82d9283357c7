"""Follow runs in a browser: an index, growing curves, samples, and the effect of the newest update on each token.

    make watch                            the runs in runs/
    python -m tools.watch RUN FOLDER …    these runs, and the runs in these folders

It reads the files that runs write (docs/metrics.md) and serves one page on this machine, http://127.0.0.1:6007. The
page asks for news every two seconds. It shows at most eight runs, the last to change. To follow a run on another
machine, start it there, and run here: `ssh -N -L 6007:127.0.0.1:6007 MACHINE`.
"""

import itertools
import sys
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parents[1]))
import runtime  # noqa: F401  # first: it says in one line which packages are missing

# isort: split
import fastapi
import tyro
import uvicorn

from runtime import curves
from tools import runs

MOST = 8  # runs shown, as many as there are colours
FILES = ("metrics.jsonl", "tokens.json", "ended.txt")


def places(paths):
    """Return {name: folder} of all runs, the first to begin first."""
    found = {}
    for path in paths:
        inside = [path] if (path / "metrics.jsonl").exists() else path.glob("*/")
        found |= {str(place): place for place in inside if (place / "metrics.jsonl").exists()}
    return dict(sorted(found.items(), key=lambda item: (began(item[1]), item[0])))


def began(folder):
    """Return the time when a run began: when the oldest of its files was last changed, in seconds."""
    return min(path.stat().st_mtime for path in folder.iterdir())


def changed(folder):
    """Return the time when a run's files last changed, in seconds."""
    return max((folder / name).stat().st_mtime for name in FILES if (folder / name).exists())


def find(paths):
    """Return {name: Run} of the runs that changed last, at most MOST.

    A run's colour depends on how many of all runs began before it: so it keeps its colour when others come and go.
    """
    everything = places(paths)
    newest = sorted(everything, key=lambda name: changed(everything[name]))[-MOST:]
    found = {}
    for (name, folder), colour in zip(everything.items(), itertools.cycle(curves.COLOURS)):
        if name in newest:
            found[name] = runs.read(folder)
            found[name].label, found[name].colour = name, colour
    return found


def tasks(found):
    """Return {task: [its runs]}, because the accuracies of two tasks don't belong in one figure."""
    groups = {}
    for run in found.values():
        groups.setdefault(Path(run.settings.get("task", run.script)).stem, []).append(run)
    return groups


def overview(paths):
    """Return, per run: its name, step and steps, when it last changed, and how many seconds ago that was."""
    found = []
    for name, run in find(paths).items():
        about = {"name": name, "step": run.step, "steps": run.settings.get("steps"), "state": run.state}
        about |= {"changed": changed(run.folder), "colour": run.colour}
        found.append(about | {"ago": time.time() - about["changed"]})
    return found


def server(paths):
    """Return the page's server: /, /runs with the overview, and parts of the page: /index, /tokens and /samples."""
    app = fastapi.FastAPI(openapi_url=None)

    def html(part, **values):
        return fastapi.responses.HTMLResponse(runs.template("watch.html").render(part=part, **values))

    def folder_of(name):
        if folder := places(paths).get(name):
            return folder
        raise fastapi.HTTPException(404)

    app.get("/")(lambda: html("page"))
    app.get("/runs")(lambda: overview(paths))

    drawn = {}  # {task: (what its panels show, the panels)}

    @app.get("/index")
    def index():
        groups = tasks(find(paths))
        for task, of in groups.items():
            shows = [(run.label, run.colour, changed(run.folder)) for run in of]
            if drawn.get(task, [None])[0] != shows:
                drawn[task] = shows, runs.panels([[run] for run in of], curves.MOST_PANELS)
        return html("index", tasks=[(task, of, drawn[task][1]) for task, of in groups.items()])

    @app.get("/tokens")
    def tokens(name: str = ""):
        return html("tokens", newest=runs.newest_tokens(folder_of(name)))

    @app.get("/samples")
    def samples(name: str = ""):
        return html("samples", samples=runs.samples(folder_of(name)))

    return app


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help="runs, and folders of runs")] = (
        Path("runs"),
    ),
    port: Annotated[int, tyro.conf.arg(help="port of the page on this machine")] = 6007,
):
    print(f"http://127.0.0.1:{port} follows {len(find(runs))} runs; Ctrl-C ends it", flush=True)
    uvicorn.run(server(runs), port=port, log_level="warning")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

"""Follow runs in a browser: growing curves, and the effect of the newest update on each token of some responses.

    make watch                            the runs in runs/
    python tools/watch.py RUN FOLDER …    these runs, and the runs in these folders

It reads the files that runs write (docs/metrics.md) and serves one page on this machine, http://127.0.0.1:6007. The
page asks for news every two seconds. It shows at most eight runs, the last to change. To follow a run on another
machine, start it there, and run here: `ssh -N -L 6007:127.0.0.1:6007 MACHINE`.
"""

import io
import json
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
from tools import plot

PAGE = Path(__file__).with_name("watch.html")
MOST = 8  # runs shown
FILES = ("metrics.jsonl", "tokens.json")


def find(paths):
    """Return {name: folder} of the runs that changed last, at most MOST, in the order of their names."""
    folders = {}
    for path in paths:
        places = [path] if (path / "metrics.jsonl").exists() else path.glob("*/")
        folders |= {str(place): place for place in places if (place / "metrics.jsonl").exists()}
    newest = sorted(folders, key=lambda name: changed(folders[name]))[-MOST:]
    return {name: folders[name] for name in sorted(newest)}


def changed(folder):
    """Return the time when a run's files last changed, in seconds."""
    return max((folder / name).stat().st_mtime for name in FILES if (folder / name).exists())


def overview(paths):
    """Return, per run: its name, step and steps, when it last changed, and how many seconds ago that was."""
    found = []
    for name, folder in find(paths).items():
        rows = curves.read_rows(folder / "metrics.jsonl")
        about = {"name": name, "step": rows[-1]["step"] if rows else 0, "changed": changed(folder)}
        about["steps"] = read(folder / "args.json").get("steps")
        found.append(about | {"ago": time.time() - about["changed"]})
    return found


def picture(paths):
    """Plot the metrics of the runs in one figure, as SVG."""
    groups = {name: [curves.read_rows(folder / "metrics.jsonl")] for name, folder in find(paths).items()}
    text = io.StringIO()
    plot.draw(groups, []).savefig(text, format="svg")
    return text.getvalue()


def read(path):
    """Return the JSON object in a file; {} without the file. Trainers replace these files atomically."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def server(paths):
    """Return the page's server: /, /curves with their picture, /runs with the overview, /tokens?name=… of a run."""
    app = fastapi.FastAPI(openapi_url=None)
    app.get("/")(lambda: fastapi.responses.FileResponse(PAGE))
    app.get("/curves")(lambda: fastapi.Response(picture(paths), media_type="image/svg+xml"))
    app.get("/runs")(lambda: overview(paths))

    @app.get("/tokens")
    def tokens(name: str = ""):
        if folder := find(paths).get(name):
            return read(folder / "tokens.json")
        raise fastapi.HTTPException(404)

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

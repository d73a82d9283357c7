"""Follow runs in a browser: growing curves, and the effect of the newest update on each token of some responses.

    make watch                            the runs in runs/
    python tools/watch.py RUN FOLDER …    these runs, and the runs in these folders

It reads the files that runs write (docs/metrics.md) and serves one page on this machine, http://127.0.0.1:6007. The
page asks for news every two seconds. It shows at most eight runs, the last to change. To follow a run on another
machine, start it there, and run here: `ssh -N -L 6007:127.0.0.1:6007 MACHINE`.
"""

import contextlib
import io
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import before_after, curves
from tools import plot

PAGE = Path(__file__).with_name("watch.html")
MOST = 8  # runs shown
FILES = ("metrics.jsonl", "tokens.json", "test_samples.jsonl")


@dataclass
class Args:
    """The runs to follow, and the port of the page."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)  # runs, and folders of runs
    port: int = 6007  # port of the page on this machine; 0: any free port


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
    """Return, per run, its name, when it last changed, and how many seconds ago that was."""
    found = {name: changed(folder) for name, folder in find(paths).items()}
    return [{"name": name, "changed": when, "ago": time.time() - when} for name, when in found.items()]


def picture(paths):
    """Plot the metrics of the runs in one figure, as SVG."""
    groups = {name: [curves.read_rows(folder / "metrics.jsonl")] for name, folder in find(paths).items()}
    text = io.StringIO()
    plot.draw(groups, []).savefig(text, format="svg")
    return text.getvalue()


def details(folder):
    """Return the page's data about one run."""
    rows = curves.read_rows(folder / "metrics.jsonl")
    before, after, learned = before_after.pairs(curves.read_rows(folder / "test_samples.jsonl"))
    chosen = next(iter([*learned, *before]), None)
    return {
        "last": rows[-1]["step"] if rows else 0,
        "steps": read(folder / "args.json").get("steps"),
        "tokens": read(folder / "tokens.json"),
        "test": {"before": before[chosen], "after": after[chosen]} if before else None,
    }


def read(path):
    """Return the JSON object in a file; {} without the file. Trainers replace these files atomically."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class Handler(BaseHTTPRequestHandler):
    """Answers /, /curves with their picture, /runs with the overview, and /run?name=… with a run's details."""

    def __init__(self, paths, *connection):
        self.paths = paths
        super().__init__(*connection)

    def do_GET(self):
        address = urlsplit(self.path)
        name = parse_qs(address.query).get("name", [""])[0]
        folder = find(self.paths).get(name)
        if address.path == "/":
            self.answer(PAGE.read_text(encoding="utf-8"), "text/html")
        elif address.path == "/curves":
            self.answer(picture(self.paths), "image/svg+xml")
        elif address.path == "/runs":
            self.answer(json.dumps(overview(self.paths)), "application/json")
        elif address.path == "/run" and folder:
            self.answer(json.dumps(details(folder)), "application/json")
        else:
            self.send_error(404)

    def answer(self, text, kind):
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Log nothing: a line every two seconds would hide the address."""


def main(args):
    try:
        server = ThreadingHTTPServer(("127.0.0.1", args.port), partial(Handler, args.runs))
    except (OSError, OverflowError) as error:
        print(f"error: --port {args.port} can't be used: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"http://127.0.0.1:{server.server_port} follows {len(find(args.runs))} runs; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

"""Run untrusted code in a process under bubblewrap, which can reach little.

The jail has Python with its packages, course/sandbox.py, course/step.py with kk_tiny, and one student's files. It has
no solution, no expected number, no other student, no network. It can write only to a small folder. All of its processes
end with it.
"""

import io
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["course/__init__.py", "course/sandbox.py", "course/step.py", "models/kk_tiny", "rewards", "runtime"]
MOST = 2**25  # bytes read of an answer
NEEDED = (
    "grading runs the code of strangers in bubblewrap, {}. Install it (apt-get install bubblewrap; in a container: "
    "docker run --security-opt seccomp=unconfined), or give --trust_files to run all files with your own rights"
)


def arguments(*paths):
    """Return the command line of bubblewrap, up to the program. paths: bubblewrap's options for further files."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(MOST), "--tmpfs", "/tmp"]
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.prefix]
    for path in dict.fromkeys(system):
        words += ["--ro-bind-try", path, path]
    for name in PARTS:
        words += ["--ro-bind", str(ROOT / name), str(ROOT / name)]
    return [*words, *paths, "--remount-ro", "/", "--chdir", str(ROOT), "--setenv", "PYTHONDONTWRITEBYTECODE", "1"]


def check():
    """Raise ValueError, with the package to install, if bubblewrap is missing or can't work here."""
    if not shutil.which("bwrap"):
        raise ValueError(NEEDED.format("which is not installed"))
    tried = subprocess.run([*arguments(), "true"], capture_output=True, text=True)
    if tried.returncode:
        raise ValueError(NEEDED.format(f"which can't work here: {tried.stderr.strip()[:200]}"))


class Jail:
    """A jail with a student's folder, for use in a with block and as an argument of sandbox.attempt_file."""

    def __init__(self, hand_in):
        self.hand_in = Path(hand_in).resolve()
        self.process = None

    def __enter__(self):
        self.place = tempfile.TemporaryDirectory()
        self.requests, self.answers = (Path(self.place.name, name) for name in ("requests", "answers"))
        self.requests.mkdir()
        self.answers.mkdir()
        return self

    def __exit__(self, *_):
        self.end()
        self.place.cleanup()

    def start(self):
        binds = ["--ro-bind", self.hand_in, self.hand_in, "--ro-bind", self.requests, self.requests]
        words = arguments(*map(str, [*binds, "--bind", self.answers, self.answers]))
        serve = "import sys; from course import sandbox; sandbox.serve(*sys.argv[1:])"
        words += [sys.executable, "-c", serve, str(self.requests), str(self.answers)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, **pipes)
        self.process.stdout.readline()  # waits until torch is loaded

    def end(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, request, seconds):
        """Run a request. Return (exit code or "time", the bytes of result.pt, the bytes that it printed)."""
        if not self.process or self.process.poll() is not None:
            self.start()  # for the first request, or if a function has ended the jail
        for path in self.answers.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        torch.save(request, self.requests / "request.pt")
        watch = threading.Timer(seconds + 10, self.process.kill)  # the jail itself keeps to `seconds`
        watch.start()
        try:
            self.process.stdin.write(f"{seconds}\n".encode())
            self.process.stdin.flush()
            said = self.process.stdout.readline(100).decode(errors="replace").strip()
        except BrokenPipeError:
            said = ""
        watch.cancel()
        ended = int(said) if said.removeprefix("-").isdecimal() else "time"  # a function may have written this line
        return ended, *(read_plain(self.answers / name) for name in ("result.pt", "printed"))


def read_plain(path):
    """Return a regular file's bytes, otherwise b"": a link could lead anywhere, and a pipe would never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with io.FileIO(descriptor) as file:
        return (file.read(MOST) or b"") if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""

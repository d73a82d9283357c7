"""Make small mistakes in trainers, rewards/ and runtime/, one at a time, and check that the tests notice them.

    python -m tools.maintain.mutations                 all of tests/mutations.toml, a row each
    python -m tools.maintain.mutations --only GAE      mistakes with this word in their name, file or test

Each mistake is made in a copy of the working tree, and its test runs there. A test that stays green is no guard: the
mistake survives, and the exit code is 1. A skipped test stays green. Without a mistake all tests must be green, or none
is made.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutations.toml"
LINKED = (".git", ".venv", "models/SmolLM2-135M-Instruct")  # used by tests, but not listed by git
PATIENCE = 600  # seconds per test


@dataclass
class Args:
    """The mistakes to make."""

    only: str = ""  # a word in their name, file or test; empty: all
    workers: int = 2  # number of tests that run at once


@dataclass
class Mutation:
    """A mistake: in `file`, `old`, which occurs once there, becomes `new`. `test` is a pytest node id, in tests/.

    A file of "*.py" means grpo.py and each other trainer that has `old`: the mistake as propagate.py would carry it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def made(self, text):
        """Return the file's text with the mistake in it."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has this {text.count(self.old)} times, and not once: {self.old.strip()}")
        return text.replace(self.old, self.new)

    def files(self, root=ROOT):
        """Return the files in which the mistake is made, relative to the root."""
        if self.file != "*.py":
            return [self.file]
        texts = {path.name: path.read_text() for path in root.glob("*.py")}
        return ["grpo.py", *(name for name in texts if name != "grpo.py" and self.old in texts[name])]


def mutations():
    """Return all mutations of the list, file by file."""
    listed = []
    for file, tests in tomllib.loads(LIST.read_text()).items():
        for test, mistakes in tests.items():
            listed += [Mutation(name, file, *texts, test) for name, texts in mistakes.items()]
    return listed


def stale(chosen, root=ROOT):
    """List what is out of date in the list, a line each: a text that its file lacks, a missing test."""
    lines = []
    for mutation in chosen:
        try:
            for file in mutation.files(root):
                mutation.made((root / file).read_text())
        except (OSError, ValueError) as error:
            lines.append(f"{mutation.name}: {error}")
        file, _, case = mutation.test.partition("::")
        test, path = case.partition("[")[0], root / "tests" / file
        if not path.exists() or f"\ndef {test}(" not in path.read_text():
            lines.append(f"{mutation.name}: there is no test {mutation.test}")
    return lines


def copy_of_the_tree(folder):
    """Copy the files that git knows, or would add, to the folder."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # deleted files are missing
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to((ROOT / name).resolve())


def run_tests(folder, tests):
    """Run tests of a copy. Return (pytest's exit code, its output); the code is None if they take too long."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # Python detects changes by a file's size and second of modification, which is too coarse here: cache nothing.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run([*words, *(f"tests/{test}" for test in tests)], timeout=PATIENCE * len(tests), **options)
    except subprocess.TimeoutExpired:
        return None, "it takes too long"
    return done.returncode, done.stdout


def verdict_on(mutation, folder):
    """Make the mistake in the copy, run its test, and undo the mistake. Return "red" if the test fails."""
    texts = {folder / file: (folder / file).read_text() for file in mutation.files(folder)}
    for path, text in texts.items():
        path.write_text(mutation.made(text))
    try:
        code, output = run_tests(folder, [mutation.test])
    finally:
        for path, text in texts.items():
            path.write_text(text)
    if code == 1:
        return "red"
    if code == 0:
        return "SURVIVES"
    return f"NO RESULT: {output.strip().splitlines()[-1]}"


def main(args):
    """Print a row per mistake and a summary; end with exit code 1 if a mistake survives."""
    began = time.monotonic()
    chosen = [m for m in mutations() if args.only.lower() in f"{m.name} {m.file} {m.test}".lower()]
    if not chosen:
        sys.exit(f"error: no mistake has {args.only!r} in its name, file or test")
    if lines := stale(chosen):  # before anything runs
        sys.exit("\n".join(lines))
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        copies = Queue()
        for i in range(args.workers):
            copies.put(Path(folder, f"copy_{i}"))
            copy_of_the_tree(copies.queue[i])
        tests = list(dict.fromkeys(mutation.test for mutation in chosen))
        code, output = run_tests(copies.queue[0], tests)
        print(f"{len(tests)} tests without a mistake: {time.monotonic() - began:.0f} s", flush=True)
        if code != 0:
            sys.exit(f"error: a test is not green without a mistake\n{output}")

        def judge(mutation):
            started, copy = time.monotonic(), copies.get()
            try:
                verdict = verdict_on(mutation, copy)
            finally:
                copies.put(copy)
            seconds = time.monotonic() - started
            print(f"{seconds:6.1f} s  {verdict}  {mutation.file}: {mutation.name}  ({mutation.test})", flush=True)
            return verdict

        with ThreadPoolExecutor(args.workers) as threads:
            verdicts = list(threads.map(judge, chosen))
    num_red = verdicts.count("red")
    minutes = (time.monotonic() - began) / 60
    print(f"{num_red} of {len(chosen)} mistakes turn their test red, in {minutes:.1f} minutes")
    sys.exit(num_red < len(chosen))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

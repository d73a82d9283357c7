"""Keep a run alive if standard input, output or error is closed or lacks readers or characters.

`>&-` closes standard output, `| head` and a closed terminal take away its reader, and in ASCII it
has no "–". None of these may end a run in the middle of a step.
"""

import contextlib
import io
import os
import sys

when_gone = None  # called once, when standard output has lost its reader; set by signals.py


def open_closed():
    """Connect closed descriptors among 0, 1 and 2 to /dev/null.

    Otherwise the next file that is opened gets the number, and all output would go into it.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)  # for child programs
    os.close(opened)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def show_any_sign():
    """Show a question mark for characters that the encoding of standard output lacks."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", "") in ("strict", "surrogateescape"):
            with contextlib.suppress(OSError):  # a pipe in a file's place can't seek
                stream.reconfigure(errors="replace")


class Unbreakable(io.FileIO):
    """A descriptor for writing. After a failed write, all output to it is dropped."""

    def write(self, content):
        try:
            return super().write(content)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == 1 and when_gone:
                when_gone()
            return len(content)


def keep_writing():
    """Make every print succeed from now on. If standard output has no reader, call when_gone."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        usual = getattr(sys, name)
        usual.flush()
        written = io.TextIOWrapper(
            io.BufferedWriter(Unbreakable(number, "w", closefd=False)),
            encoding=usual.encoding,
            errors=usual.errors,
            line_buffering=usual.line_buffering or name == "stderr",
            write_through=usual.write_through,
        )
        setattr(sys, name, written)

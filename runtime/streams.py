"""Keep a program alive if its output is closed, or can't be written any more.

`| head`, a `| tee` that Ctrl-C ends and a closed terminal take away its reader, and the disk of a
log may be full. A print would then end a run in the middle of a step.
"""

import io
import os
import sys


class Unbreakable(io.FileIO):
    """Write to a descriptor. If that fails, drop all that is written from then on."""

    def write(self, content):
        try:
            return super().write(content) or 0  # None: a busy terminal; the buffer tries again
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == 1:
                text = f"{sys.argv[0]} goes on without standard output: {error.strerror}"
                print(text, file=sys.stderr)
            return len(content)


def keep():
    """Make every print succeed from now on. Characters that an encoding lacks become "?"."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # otherwise a file would get the number
        os.set_inheritable(opened, True)  # for child programs
    os.close(opened)
    for name, number in (("stdout", 1), ("stderr", 2)):
        usual = getattr(sys, name)
        if usual is getattr(sys, f"__{name}__"):  # not a notebook's or pytest's
            encoding = usual.encoding if usual else "utf-8"
            raw = io.BufferedWriter(Unbreakable(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, encoding, "replace", line_buffering=True))

r"""Math problems: questions with a known answer from files or the hub, and the rule that scores a \boxed{answer}.

The prompt and the rule are those of AR-Lopti, Appendix C.1.2, "Math dataset". The rule gives 1 if the answer is right,
otherwise 0, and nothing for the format. The library math-verify, which reads LaTeX into SymPy, decides if two answers
are equal. It can loop or use up all memory on a short text such as 9^{9^{9^9}}. So it runs in worker processes. Each is
a `python -m rewards.math` without torch, which can be killed without harm to the trainer and its threads. It has none
of the trainer's environment and, where the system allows it, no network and no rights of root.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import random
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path

from rewards.kk import SUFFIXES, check_split, check_text, read_file

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
HUB = {"train": "Open-Reasoner-Zero/orz_math_57k_collection", "test": "HuggingFaceH4/MATH-500"}
FLAG = {"train": "--data", "test": "--test_data"}

# Seconds of processor time for one answer; a busy machine does not change it. Measured for 4,988 pairs of the real
# data's 2,138 golds in LaTeX (with themselves, with their neighbours and as x = gold), on one slow core: median 0.013,
# mean 0.032, 99 % below 0.23, 99.9 % below 0.73. Three take longer; none of them is right.
TIME_LIMIT = 1
# Seconds of processor time for all answers of one call: a fixed part and a part for each answer, eight times the mean
# above. Only hostile answers can spend them; the answers that are left then count as timed out.
BATCH_LIMIT, BATCH_LIMIT_PER_ANSWER = 10, 0.25
WALL_LIMIT = 30  # seconds of wall-clock time for one answer, if TIME_LIMIT fails
START_LIMIT = 120  # seconds for a worker to start; usually it takes 1
MEMORY_LIMIT = 4 << 30  # bytes of address space of one worker
MAX_WORKERS = 4
MAX_EXTRA = 300  # an answer that exceeds the longest gold by more characters than this is wrong


# --------------------------------------------------------------------------------------------------------------------
# Scoring


def score(response, answer):
    """Score one response; see `score_all`, which is faster for many."""
    return score_all([response], [answer])[0]


def score_all(responses, answers):
    r"""Score responses, in order.

    In: `responses`, any texts; `answers`, for each response a gold text or a list of them, any of which counts.
    Out: for each response a dict with `reward` (1.0 or 0.0), `correct`, `format` (it has a complete \boxed{...} that is
    not empty) and `timed_out` (the comparison took too long, ended its process or met the bound of the batch; the
    reward is then 0).
    It compares the content of the last complete \boxed{...}, and never raises on any response.
    Time: the first call starts the workers (about 2 s). An answer that `glance` cannot decide takes a few milliseconds,
    and at most TIME_LIMIT if it is hostile. All together take at most BATCH_LIMIT plus BATCH_LIMIT_PER_ANSWER for each
    answer, in processor time. Up to MAX_WORKERS processes share these answers.
    Errors: RuntimeError if the workers cannot start, for example without math-verify.
    """
    boxes, pairs = [last_box(response) for response in responses], []
    for box, answer in zip(boxes, answers, strict=True):
        golds = [answer] if isinstance(answer, str) else answer
        pairs.append((clean(box or ""), tuple(map(clean, golds))))
    verdicts = {pair: glance(*pair) for pair in pairs}
    unsettled = [pair for pair, verdict in verdicts.items() if verdict is None]
    verdicts.update(zip(unsettled, ask(unsettled)))
    return [
        {
            "reward": float(verdicts[pair] is True),
            "correct": verdicts[pair] is True,
            "format": pair[0] != "",  # not the empty box of a prompt that asks for "\\boxed{}"
            "timed_out": verdicts[pair] is None,
        }
        for pair in pairs
    ]


def last_box(text):
    r"""The content of the complete \boxed{...} that opens last, or None. It takes linear time.

    Of nested boxes it is the innermost one. Unfinished boxes and escaped braces don't count.
    """
    stack, last = [], (-1, None)
    for token in re.finditer(r"\\boxed\s*+\{|\\.|[{}]", text, re.DOTALL):
        if token[0][-1] == "{" and token[0] != r"\{":
            stack.append((token.end(), len(token[0]) > 1))
        elif token[0] == "}" and stack:
            start, is_box = stack.pop()
            if is_box and start > last[0]:
                last = (start, token.start())
    return None if last[1] is None else text[slice(*last)]


def clean(text):
    """The answer without dollar signs, inner boxes, surrounding blanks and a final full stop, which have no meaning."""
    text = re.sub(r"\\(?:boxed|fbox)(?![A-Za-z])|\\?\$", "", text).replace("−", "-").strip()
    text = re.sub(r"^\\\(|\\\)$", "", text).strip()
    return re.sub(r"(?<!\\right)\s*\.$", "", text)


def glance(answer, golds):
    """True or False if the answer can be decided without the library, otherwise None. In: cleaned texts."""
    if not answer or len(answer) > max(map(len, golds)) + MAX_EXTRA:
        return False
    if answer in golds:
        return True
    value, values = number(answer), [number(gold) for gold in golds]
    if value is not None and value in values:
        return True
    return None if value is None or None in values else False


# 12, -0.5, 1,234 and 1{,}234, 8.7 \times 10^{8}, 3e-19
NUMBER = re.compile(
    r"([-+]?)\s*((?:\d++|\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})++)?(?:\.\d*)?)"
    r"(?:(?:\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*|[eE])(?:([-+]?\d{1,3})|\{\s*([-+]?\d{1,3})\s*\}))?",
    re.ASCII,
)


def number(text):
    r"""The exact value of a number written in digits, as a Fraction, or None.

    math-verify treats 8.7 \times 10^8 and 870000000 as different numbers, and reads the e of 3e12 as Euler's number.
    """
    match = NUMBER.fullmatch(text)
    if match is None or match[2] in ("", ".") or len(text) > 1000:  # Python refuses to read 5,000 digits
        return None
    return Fraction(match[1] + re.sub(r"[^\d.]", "", match[2])) * Fraction(10) ** int(match[3] or match[4] or 0)


# --------------------------------------------------------------------------------------------------------------------
# Workers. A worker reads a line of JSON and writes a line of JSON. A job is [answer, golds] (is the answer any of the
# golds?) or [gold, null] (can math-verify read the gold?); a reply is [true or false, seconds], or null if the
# comparison ended the process. Workers are not forked from the trainer, because it has threads and a GPU, and not
# started by multiprocessing's spawn, because it runs the trainer's file again. A worker has no threads and forks a copy
# of itself to compare answers. So an answer kills only the copy, and the next one needs no new start of the library.


class Worker:
    """One worker process. It starts on the first job, and again after its death."""

    process = None
    seconds = 0.0  # processor time of the last job

    def ask(self, job):
        """The reply, True or False, or None if the job exceeded a limit and was killed."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            reply = json.loads(self.read_line(WALL_LIMIT))
        except (OSError, ValueError):  # a broken pipe; no line or an incomplete one
            self.kill()
            reply = None
        verdict, self.seconds = reply or (None, TIME_LIMIT)
        return verdict

    def start(self):
        # The path is explicit because PYTHONSAFEPATH drops the working folder. The worker has a process group of its
        # own, so Ctrl-C does not reach it. A session of its own would do the same, but Linux gives processor time to
        # sessions (autogroup): beside two busy processes, a worker took 80 seconds to start instead of 2. It ends when
        # its input ends, which is when the trainer ends.
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        needed = {name: os.environ[name] for name in ("PYTHONHOME", "LD_LIBRARY_PATH") if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewards.math"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
            env=needed | {"PYTHONPATH": path}, process_group=0,
        )  # fmt: skip
        hello = self.read_line(START_LIMIT)
        if hello != '"ready"\n':
            self.kill()
            raise RuntimeError(f"the process that compares answers did not start: {hello or 'it gave no reason'}")

    def read_line(self, seconds):
        """The worker's next line, or "" if none comes within `seconds` or the worker is dead."""
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        return self.process.stdout.readline() if poll.poll(seconds * 1000) else ""

    def kill(self):
        """End the worker and its copy."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # waits for the end and closes the pipes


@cache
def idle_workers():
    """A stack of the idle workers, one for each of this process's cores but at most MAX_WORKERS."""
    workers = queue.LifoQueue()
    for _ in range(min(MAX_WORKERS, len(os.sched_getaffinity(0)))):
        workers.put(Worker())
    return workers


def ask(jobs):
    """The workers' replies to the jobs, in order: True, False, or None if the job was killed or came too late."""
    left = BATCH_LIMIT + len(jobs) * BATCH_LIMIT_PER_ANSWER
    lock = threading.Lock()

    def ask_one(job):
        nonlocal left
        worker = idle_workers().get()
        try:
            if left <= 0:
                return None
            verdict = worker.ask(job)
            with lock:
                left -= worker.seconds
            return verdict
        finally:
            idle_workers().put(worker)

    if not jobs:
        return []
    with ThreadPoolExecutor(MAX_WORKERS) as threads:
        return list(threads.map(ask_one, jobs))


def work():
    """A worker's loop: it passes jobs to its copy, and the copy's replies back, until its input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps a library's output out of the replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        leave_the_network()
        drop_root_and_import()
        copy, pipe = start_copy()
        reply = "ready"
    except Exception as error:
        reply = f"{type(error).__name__}: {error}"
    while True:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if not copy.is_alive():
            copy, pipe = start_copy()
        try:
            pipe.send(json.loads(line))
            reply = pipe.recv()
        except (EOFError, OSError):
            copy.join()
            reply = None


def start_copy():
    """Fork this process. Returns (the copy, a pipe for jobs and replies, which breaks if the copy dies)."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    copy = fork.Process(target=compare, args=(here, there), daemon=True)
    copy.start()
    there.close()
    return copy, here


def compare(theirs, mine):
    """The loop of a worker's copy: it replies to jobs until the pipe breaks. In: the worker's end, and its own."""
    theirs.close()  # otherwise the pipe would not break at the worker's death
    # The system's default action ends the process, even during a computation that Python can't interrupt.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            answer, golds = mine.recv()
            start = time.thread_time()
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
            try:
                verdict = read(answer) is not None if golds is None else same(answer, golds)
            except Exception:  # out of memory or stack, or a bug in a library
                verdict = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            mine.send((verdict, time.thread_time() - start))


CLONE_NEWUSER, CLONE_NEWNET, PR_SET_KEEPCAPS = 0x10000000, 0x40000000, 8  # of Linux
CAPABILITY_VERSION, READ_ANY_FILE = 0x20080522, 1 << 2  # the second is the capability CAP_DAC_READ_SEARCH
NOBODY = 65534


def leave_the_network():
    """Put this process in a network of its own, without connections. Where the system forbids that, nothing happens.

    Root may do so at once, others in a user namespace of their own.
    """
    ctypes.CDLL(None).unshare(CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET)


def drop_root_and_import():
    """Import the library, as the user nobody if this process is root's.

    Of root's capabilities it keeps at most that of reading any file, because Python and its packages may lie in a
    folder that only root can read. If root itself lacks this one, as in many containers, and the packages can't be
    read, the process stays root's, without any capability.
    """
    if os.geteuid() != 0:
        return warm_up()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # a container may have no such user
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, 0)  # the last is the way back
    for kept in (READ_ANY_FILE, 0):
        header = struct.pack("Ii", CAPABILITY_VERSION, 0)
        if libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) == 0:
            break
    try:
        warm_up()
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except (OSError, ImportError):
        os.setresuid(0, 0, 0)
        warm_up()


def warm_up():
    """Import the library and what it imports on use, before the first answer's time counts."""
    same("x=\\frac{1}{2}", ["0.5"])


def same(answer, golds):
    """True if the answer equals one of the golds as mathematics. In: cleaned texts."""
    from sympy import Float

    mine = read(answer)
    for gold in golds:
        theirs = read(gold)
        if mine is None or theirs is None or differs_in_form(answer, gold, mine, theirs):
            continue
        if library().verify(theirs, mine, timeout_seconds=None):
            # verify rounds to six places, so it takes 1.6e-19 and 6.6e-34 for equal. Percentages are not checked again,
            # because 50% equals both 0.5 and 50.
            if "%" in answer + gold or (distance(mine, theirs) or 0) < 1e-3:
                return True
        elif mine.has(Float) or theirs.has(Float):  # verify misses equal products, such as 8.7 * 10^8 and 870000000
            apart = distance(mine, theirs)
            if apart is not None and apart < 1e-12:
                return True
    return False


def differs_in_form(answer, gold, mine, theirs):
    """True if the answer differs from the gold in what math-verify overlooks. In: cleaned texts, SymPy expressions."""
    unit = unit_of(answer)
    return (
        has_unequal_sides(answer, mine)
        or is_set_for_tuple(answer, gold, mine, theirs)
        or number_base(answer) not in ("10", number_base(gold))
        or (unit is not None and unit_of(gold) not in (None, unit))
    )


def has_unequal_sides(answer, mine):
    """True for 99 = 142 or x = 5 = 3, of which math-verify compares only the last side with the gold.

    Sides may differ by rounding if one is a decimal. Percentages, degrees and number bases are not compared.
    """
    from sympy import Eq, Float

    if re.search(r"%|\\circ|\d\s*_", answer):
        return False
    for equation in mine.atoms(Eq):
        apart = distance(*equation.args)
        if apart is not None and apart > (0.05 if equation.has(Float) else 1e-9):
            return True
    return False


def is_set_for_tuple(one, other, of_one, of_other):
    r"""True for \{1, 2\} and (1, 2), of which only one has an order, or is an interval.

    The plain list 1, 2 also becomes a set in SymPy; as an answer it is right for both.
    """
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(of_other, FiniteSet):
        one, other, of_one, of_other = other, one, of_other, of_one
    braces = re.search(r"\\\{|\\lbrace", one) is not None
    return braces and isinstance(of_one, FiniteSet) and len(of_one) > 1 and isinstance(of_other, (Tuple, Interval))


def number_base(text):
    """The subscript of the text's last number, such as 8 for 57_8 and 57_{8}. Without one it is 10."""
    found = re.findall(r"\d\s*_\s*(?:\{([^{}]*)\}|(\w))", text.rsplit("=", 1)[-1])
    return "".join(found[-1]).strip() if found else "10"


SPELLINGS = {  # of units; those that are missing here are never compared
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram gm", "kg": "kilogram", "oz": "ounce", "lb": "pound", "ton": "tonne",
    "ml": "mL milliliter millilitre", "l": "L liter litre", "gal": "gallon",
    "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr",
    "cent": "", "dollar": "", "degree": "deg", "rad": "radian", "%": "percent", "am": "", "pm": "",
    "Hz": "hertz", "N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere amp", "K": "kelvin",
}  # fmt: skip
UNITS = {name: unit for unit, names in SPELLINGS.items() for name in [unit, *names.split()]}
UNITS |= {"per": "/", "mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def unit_of(text):
    r"""The unit at the end of the text in one spelling, such as cm2 for 5\text{ square cm} and 5 cm^2, or None.

    math-verify drops units. So 5 km would equal 5 m.
    """
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", " degree", text.replace(r"\%", "%"))
    text = re.sub(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[,;:! ]|~|(?<=[A-Za-z])\.", lambda match: "" if match[0] == "." else " ", text)
    end = re.search(r"[\d\s)}\]](?=[A-Za-z%])([A-Za-z/%\s^{}\d]*)$", text)
    words = re.findall(r"[A-Za-z]+|[/%\d]", end[1]) if end else []
    if words and words[0] in POWERS:
        words = [*words[1:], POWERS[words[0]]]
    names = [UNITS.get(word) or UNITS.get(word.removesuffix("s")) or word for word in words]
    known = all(name in UNITS or not name.isalpha() for name in names)
    return "".join(names) if names and known else None


@cache
def library():
    r"""math-verify, with one change in how its parser reads factors that stand side by side.

    To read the mixed number 3\frac{1}{2}, it adds any two such numbers, so 14\binom{9}{4}2 is 14 + 126 + 2. Here only
    a mixed number is a sum, and the rest a product. Two plain numbers, as in 14 2, raise ValueError.
    """
    import math_verify
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from sympy import Rational

    convert = _Latex2Sympy.convert_postfix_list

    def convert_side_by_side(self, factors, i=0):
        texts = [factor.getText() for factor in factors[i : i + 2]]
        if len(texts) == 2 and all(re.fullmatch(r"\{?[\d.,]+\}?", text) for text in texts):
            raise ValueError("two numbers side by side")
        value = convert(self, factors, i)
        is_mixed = re.fullmatch(r"-?[\d,]+\{?\\frac.*", "".join(texts)) and len(factors) == i + 2
        if len(texts) < 2 or not isinstance(value, Rational) or is_mixed:
            return value
        return self.mul_flat(self.convert_postfix(factors[i]), self.convert_postfix_list(factors, i + 1))

    _Latex2Sympy.convert_postfix_list = convert_side_by_side
    return math_verify


@lru_cache(10000)
def read(text):
    r"""The text as a SymPy expression, or None.

    It reads the content of the box as one LaTeX expression. If math-verify cannot read an answer, by default it
    searches for a part that it can read, such as the 9 in \neq 9. Here this search is off.
    """
    LatexExtractionConfig, parse = library().LatexExtractionConfig, library().parse
    if number(text) is not None:
        text = re.sub(r"(?<=[\d.])[eE](.*)", r" \\times 10^{\1}", text)
    boxed = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    only = {"extraction_config": [boxed], "extraction_mode": "first_match", "fallback_mode": "no_fallback"}
    return next(iter(parse(rf"\boxed{{{text}}}", parsing_timeout=None, **only)), None)


def distance(a, b):
    """The distance of two SymPy numbers as a share of the larger one, or None if they aren't numbers."""
    try:
        a, b = complex(a.doit().evalf()), complex(b.doit().evalf())
    except (TypeError, ValueError, AttributeError):
        return None
    return abs(a - b) / (max(abs(a), abs(b)) or 1)


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load(source, split, *, size=None, seed=0):
    """Problems as training or test items.

    In:
    - `source`: a .parquet, .json or .jsonl file, a folder of such files, a hub id, or None (the data set in HUB). In a
      folder, files with "train" in their name serve only train, and files with "test" only test. If any file has
      "train" in its name, train has only these files.
    - `split`: "train" or "test".
    - `size`: how many problems (None: all). `seed` draws them; they keep the file's order.
    Rows have the form of verl (`prompt`, `reward_model.ground_truth`), of Open-Reasoner-Zero (a conversation of two, or
    `prompt` and `final_answer`), or the plain form (`problem` or `question`, and `answer`).
    Out: a list of dicts with `messages` (the chat; its last turn ends in INSTRUCTION), `prefix` (empty), `answer` (a
    list of gold texts, any of which counts) and `category` (the file's name, or the row's data source if the file has
    several).
    Golds that math-verify can't read are left out, because a right answer to them looks like a wrong one. A printed
    line counts the problems that are lost.
    Errors: ValueError if the arguments, the files or a row are invalid; it names file and row (counted from 1).
    """
    check_split(split)
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, not {size}")
    items = [item for name, rows in read_source(source or HUB[split], split) for item in items_of(name, rows)]
    golds = list(dict.fromkeys(clean(gold) for item in items for gold in item["answer"] if number(clean(gold)) is None))
    unreadable = {gold for gold, readable in zip(golds, ask([(gold, None) for gold in golds])) if not readable}
    kept, lost = [], []
    for item in items:
        answer = [gold for gold in item["answer"] if clean(gold) not in unreadable]
        kept += [item | {"answer": answer}] if answer else []
        lost += [] if answer else [item["answer"][0]]
    if lost:
        print(f"{source}: {len(lost)} of {len(items)} problems left out: can't read their answers, such as {lost[:3]}")
    if not kept:
        raise ValueError(f"{source} has no problem with an answer that can be read")
    if size is not None and size < len(kept):
        kept = [kept[i] for i in sorted(random.Random(seed).sample(range(len(kept)), size))]
    return kept


def read_source(source, split):
    """[(name, rows)] of the file, each of the folder's files, or of the hub data set. ValueError if none is there."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        said = {file: re.findall(r"(?<![a-z])(?:train|test)(?![a-z])", file.stem.lower()) for file in files}
        files = [file for file in files if not said[file] or split in said[file]]
        if split == "train":
            files = [file for file in files if said[file]] or files
        if not files:
            raise ValueError(f"{source} holds no .parquet, .json or .jsonl file for {split}")
    elif path.is_file():
        files = [path]
    elif str(source).startswith((".", "/", "~")) or path.suffix in SUFFIXES:
        raise ValueError(f"{source} does not exist")
    else:
        return [read_hub(str(source), split)]
    return [(str(file), read_file(file)) for file in files]


def read_hub(name, split):
    import datasets

    try:
        parts = datasets.load_dataset(name, trust_remote_code=False)
    except Exception as error:  # for example no network, or no such id
        raise ValueError(
            f"could not load the data set {name!r} from the Hugging Face hub: {error}\n"
            f"Give the path of a file or folder, or another hub id, with {FLAG[split]}."
        ) from error
    if split not in parts and len(parts) > 1:
        raise ValueError(f"{name} has no part called {split}; it has {', '.join(parts)}")
    return name, (parts[split] if split in parts else next(iter(parts.values()))).to_list()


def items_of(name, rows):
    """The rows of one file as items."""
    sources = {str(row["data_source"]) for row in rows if isinstance(row, dict) and "data_source" in row}
    items = []
    for i, row in enumerate(rows, 1):
        try:
            prompt, answer = fields(row)
            messages, golds = messages_of(prompt), golds_of(answer)
        except (LookupError, TypeError, AttributeError) as error:
            has = f"it has {', '.join(row)}" if isinstance(row, dict) else f"it is {row!r}"
            raise ValueError(f"{name}, row {i}: no problem and answer: {has}. {KINDS_OF_ROWS}") from error
        except ValueError as error:
            raise ValueError(f"{name}, row {i}: {error}") from error
        for text in [message["content"] for message in messages] + golds:
            check_text(text, f"{name}, row {i}")
        source = row.get("data_source", name) if isinstance(row, dict) and len(sources) > 1 else name
        category = Path(str(source)).stem
        items.append({"messages": messages, "prefix": "", "answer": golds, "category": category})
    return items


KINDS_OF_ROWS = (
    "A row has problem (or question) and answer, prompt and final_answer, or prompt and reward_model with ground_truth"
)


def fields(row):
    """(prompt, answer) of a row in any of the forms of `load`. LookupError or TypeError if it has none."""
    if isinstance(row, list):  # a conversation; on the hub it is a row with the columns 0 and 1
        row = {"0": row[0], "1": row[1]}
    if "0" in row:
        return [row["0"]], row["1"]["ground_truth"]["value"]
    if "reward_model" in row:
        return row["prompt"], row["reward_model"]["ground_truth"]
    if "final_answer" in row:
        return row["prompt"], row["final_answer"]
    return row["problem" if "problem" in row else "question"], row["answer"]


def messages_of(prompt):
    """The chat with the instruction, from a text or a chat (keys `role` and `content`, or `from` and `value`)."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = []
    for turn in prompt:
        role, content = (turn["role"], turn["content"]) if "role" in turn else (turn["from"], turn["value"])
        if not isinstance(role, str) or not isinstance(content, str):
            raise TypeError("a turn's role and content must be texts")
        messages.append({"role": "user" if role == "human" else role, "content": content})
    last = messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise ValueError("the problem is empty, or its last turn is not the user's")
    if INSTRUCTION not in last["content"]:
        last["content"] = f"{last['content'].rstrip()} {INSTRUCTION}"
    return messages


def golds_of(answer):
    """The list of gold texts from a text, a number or a list of those."""
    golds = []
    for gold in answer if isinstance(answer, list) else [answer]:
        if isinstance(gold, float) and gold.is_integer():
            gold = int(gold)  # in a column of numbers, 142 is stored as 142.0
        if isinstance(gold, bool) or not isinstance(gold, (str, int, float)) or gold != gold:
            raise ValueError(f"the answer must be a text, a number or a list of those, not {answer!r}")
        golds.append(str(gold).strip())
    if not golds:
        raise ValueError("the list of answers is empty")
    return golds


if __name__ == "__main__":
    work()

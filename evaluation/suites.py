"""Define the suites of evaluate.py: their problems, the papers' settings, and the problems' sources."""

import hashlib
import re
from collections import Counter
from pathlib import Path

from rewards import find_task, gym, own
from rewards.calculator import parse_operations
from rewards.countdown import parse_numbers
from rewards.kk import parse_people
from rewards.rows import SUFFIXES
from runtime.chats import read_template_options

# The papers' settings. For math and HiTab the papers use base models, not trained to chat. The last three suites
# are in no paper.
SETTINGS = {
    "kk": {"people": "3-7", "chat_template": "auto", "samples": 1, "temperature": 0.0},
    "math": {"chat_template": "none", "samples": 16, "temperature": 1.0},
    "countdown": {"numbers": "3-4", "chat_template": "auto", "samples": 4, "temperature": 1.0},
    "hitab": {"chat_template": "none", "samples": 4, "temperature": 1.0},
    "gym": {
        "gym": "letter_counting",
        "gym_options": "{}",
        "chat_template": "auto",
        "samples": 4,
        "temperature": 1.0,
    },
    "calculator": {"operations": "1", "max_turns": 4, "chat_template": "auto", "samples": 1, "temperature": 0.0},
    "guess": {"max_turns": 5, "chat_template": "auto", "samples": 4, "temperature": 1.0},
}
OF_OWN_TASK = {"max_turns": 4, "chat_template": "auto", "samples": 1, "temperature": 0.0}
# The paper of each suite. Both have mathematics: --protocol chooses one.
PAPER_OF = {"kk": "ar_lopti", "countdown": "acpo", "hitab": "acpo"}
MAX_RESPONSE_TOKENS = {"ar_lopti": 4096, "acpo": 3072, "": 4096}  # by paper
# Number of problems generated per number of people, count of numbers, or kind of question.
GENERATED = {"kk": 100, "countdown": 512, "hitab": 256, "gym": 256, "calculator": 128, "guess": 60}
GENERATED_OF_OWN_TASK = 256

TITLES = {  # of the sets in mathematics
    "olympiad_bench": "Olympiad Bench",
    "minerva": "Minerva",
    "math500": "MATH-500",
    "amc": "AMC",
    "aime": "AIME24",
    "own": "own problems",  # --data FILE
}
PROTOCOLS = {
    "ar_lopti": ["olympiad_bench", "minerva", "math500", "amc", "aime"],
    "acpo": ["amc", "minerva", "math500", "olympiad_bench"],
}
GREEDY = ["olympiad_bench", "minerva", "math500"]  # in ar_lopti
FILES = {  # file names per set; only letters and digits count
    "olympiad_bench": ["olympiadbench"],
    "minerva": ["minerva", "minervamath"],
    "math500": ["math500"],
    "amc": ["amc"],
    "aime": ["aime", "aime24", "aime2024"],
}
HUB = {
    "minerva": "math-ai/minervamath",
    "math500": "HuggingFaceH4/MATH-500",
    "amc": "AI-MO/aimo-validation-amc",
    "aime": "HuggingFaceH4/aime_2024",
}
PAPERS_REPOSITORY = "the GitHub repository zhyang2226/AR-Lopti"
PAPERS_FILES = {
    "olympiad_bench": "data/deepscaler/olympiad_bench_dsr.parquet",
    "minerva": "data/deepscaler/minerva_dsr.parquet",
    "math500": "data/math/MATH-500.parquet",
    "amc": "data/deepscaler/amc_dsr.parquet",
    "aime": "data/deepscaler/aime_dsr.parquet",
}


def paper_of(suite, protocol):
    """Return the paper of a suite: "ar_lopti", "acpo" or "" (none). protocol: the paper for math."""
    if suite == "math":
        return protocol
    return PAPER_OF.get(suite, "")


def papers_settings(args):
    """Return {name: value} of the paper's settings for args.suite; our own settings if no paper has any."""
    found = dict(SETTINGS.get(args.suite, OF_OWN_TASK))
    if "max_turns" in found:
        found["max_turns"] = getattr(find_task(args.suite), "TURNS", found["max_turns"])
    found["template_options"] = "{}"
    found["max_response_tokens"] = MAX_RESPONSE_TOKENS[args.protocol]
    if args.suite == "math" and args.protocol == "acpo":
        found["samples"] = 8
    elif args.suite == "math" and is_own_file(args):
        found["samples"] = 1
        found["temperature"] = 0.0
    return found


def check_flags(args) -> None:
    """Raise ValueError if the command line has a flag that the suite does not use."""
    of_suites = {"people": "kk", "numbers": "countdown", "gym": "gym", "gym_options": "gym", "sets": "math"}
    of_suites["operations"] = "calculator"
    for flag, suite in of_suites.items():
        if getattr(args, flag) and args.suite != suite:
            raise ValueError(f"--{flag} is of --suite {suite}, not of {args.suite}")
    if args.suite == "gym" and (args.data or args.data_dir):
        raise ValueError("--suite gym generates its problems: it takes no --data or --data_dir")


def check_options(args) -> None:
    """Raise ValueError if a setting of the suite's task is wrong."""
    read_template_options(args)
    if args.suite == "kk":
        parse_people(args.people)
    elif args.suite == "countdown":
        parse_numbers(args.numbers)
    elif args.suite == "calculator":
        parse_operations(args.operations)
    elif args.suite == "gym":
        gym.check(args.gym, args.gym_options)


def load_problems(args) -> tuple:
    """Return (the task's module, its problems). A problem also has `samples`, `temperature` and `seed`.

    ValueError if data are invalid or missing; if missing, it says which files are needed and where they are.
    """
    task = find_task(args.suite)
    load = load_sets if args.suite == "math" else load_others
    problems = load(task, args, data_folder(args))
    kept = []
    seen = Counter()  # problems per category
    for problem in problems:
        category = problem["category"]
        if args.limit is None or seen[category] < args.limit:
            kept.append(problem | how_to_sample(category, seen[category], args))
        seen[category] += 1
    return task, kept


def how_to_sample(category, position, args):
    """Return samples, temperature and seed of the problem at this position within its category."""
    digest = hashlib.sha256(f"{args.seed}/{category}/{position}".encode()).digest()
    how = {"samples": args.samples, "temperature": args.temperature, "seed": int.from_bytes(digest[:6])}
    if args.suite == "math" and args.protocol == "ar_lopti" and category in GREEDY:
        how.update(samples=1, temperature=0.0)
    return how


def data_folder(args):
    """Return the folder of --data_dir, or its subfolder of the suite's name; None without --data_dir."""
    if not args.data_dir:
        return None
    folder = Path(args.data_dir).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--data_dir {folder} is no folder; the papers' files are in {PAPERS_REPOSITORY}, folder data")
    if (folder / args.suite).is_dir():
        return folder / args.suite
    return folder


def load_others(task, args, folder):
    """Return the problems of a suite other than math, from its data or generated."""
    source = None
    if args.data:
        source = args.data[0]
    elif folder:
        source = str(folder)

    options = {}
    categories = getattr(task, "KINDS", ["all"])
    if args.suite == "kk":
        options = {"people": args.people}
        categories = parse_people(args.people)
    elif args.suite == "countdown":
        options = {"numbers": args.numbers}
        categories = parse_numbers(args.numbers)
    elif args.suite == "calculator":
        options = {"operations": args.operations}
        categories = parse_operations(args.operations)
    elif args.suite == "gym":
        options = {"gym": args.gym, "gym_options": args.gym_options}
        categories = args.gym.split(",")

    size = None  # take all problems of the source
    if not source:
        of_each = args.limit or GENERATED.get(args.suite, GENERATED_OF_OWN_TASK)
        size = of_each * len(categories)
    if args.suite in SETTINGS:
        return task.load(source, "test", size=size, seed=args.seed, **options)
    problems = own.load(args.suite, task, source, "test", size, args.seed)
    own.check(args.suite, task, problems, [(source, "test", size, args.seed)], args.score_timeout)
    return problems


# -------------------------------------------------------------------------------------------- sets of mathematics


def load_sets(task, args, folder):
    """Return the problems of all requested sets of mathematics. The set is a problem's category."""
    sources = math_sources(args, folder)
    problems = []
    for name, source in sources.items():
        try:
            of_set = task.load(source, "test")
        except ValueError as error:
            where = "" if name == "own" else f" {where_from(name)}"
            raise ValueError(f"{TITLES[name]}: {error}{where}") from error
        problems += [problem | {"category": name} for problem in of_set]
    return problems


def is_own_file(args):
    """Return whether --data names one file of problems and no set that they belong to."""
    return len(args.data) == 1 and "=" not in args.data[0] and not (args.sets or args.data_dir)


def math_sources(args, folder):
    """Return {set: file or hub id}: from --data SET=SOURCE, then from the folder, or from the hub without a folder.

    With --data FILE, without a set, that file is the only source.
    """
    if is_own_file(args):
        return {"own": args.data[0]}
    names = PROTOCOLS[args.protocol]
    if args.sets:
        names = [name.strip() for name in args.sets.split(",")]
    given = dict(text.partition("=")[::2] for text in args.data)
    unknown = {*names, *given} - set(FILES)
    if unknown:
        raise ValueError(
            f"{min(unknown)!r} is no set; --sets and --data SET=SOURCE take {', '.join(FILES)}; "
            "a file of your own is one --data, alone"
        )
    if unused := given.keys() - set(names):
        raise ValueError(f"--data {min(unused)}=…: the sets that are asked are {', '.join(names)}")
    there = files_of_sets(folder) if folder else HUB
    sources = {name: given.get(name) or there.get(name) for name in names}
    missing = [name for name, source in sources.items() if not source]
    if missing:
        where = f"in {folder}" if folder else "without --data or --data_dir"
        lacking = ", ".join(f"{TITLES[name]} ({name}.parquet, .json or .jsonl)" for name in missing)
        raise ValueError(
            f"{where} there is no {lacking}. {' '.join(map(where_from, missing))} --sets leaves sets out. "
            "Problems of your own: --data FILE."
        )
    return sources


def files_of_sets(folder):
    """Return {set: path of its file} for the sets that have a file in the folder."""
    by_stem = {}
    for file in sorted(folder.iterdir(), reverse=True):  # of several files for a set, the first by name wins
        if file.suffix in SUFFIXES:
            stem = re.sub("[^a-z0-9]", "", file.stem.lower()).removesuffix("dsr")
            by_stem[stem] = str(file)
    found = {}
    for name, stems in FILES.items():
        there = [by_stem[stem] for stem in stems if stem in by_stem]
        if there:
            found[name] = there[0]
    return found


def where_from(name):
    """Return a sentence on where to find the file of a set."""
    text = f"Get {PAPERS_FILES[name]} from {PAPERS_REPOSITORY}: --data {name}=PATH"
    if name in HUB:
        text += f"; or the hub's: --data {name}={HUB[name]}."
    return text

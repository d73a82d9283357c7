"""Write a model's own right answers as chats for sft.py: a round of expert iteration.

    python -m course.own_answers models/kk_tiny --out runs/round_1.jsonl
    python sft.py --data runs/round_1.jsonl --lr 1e-3 --prompts_per_step 32 --steps 20 --run_dir runs/round_1
    python -m course.own_answers runs/round_1/checkpoints/step_000020 --seed 2 --out runs/round_2.jsonl

Expert iteration (also: rejection sampling fine-tuning) samples several answers to each training puzzle, keeps the right
ones, and learns them by SFT. Then the new model samples. evaluate.py samples and scores here; which answers are kept is
exercise 14.1 (`kept` in course/lesson_14/lesson_14.py). `--keep all` keeps all of them, which teaches nothing new.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import tyro

from rewards import kk

ROOT = Path(__file__).parents[1]


@dataclass
class Args:
    """What is sampled, and what is kept of it."""

    model: tyro.conf.Positional[str]  # a model's folder, or a checkpoint's
    out: Path  # the file of chats to write, .jsonl
    keep: Literal["right", "all"] = "right"  # right: as kept() of exercise 14.1 says
    most: int = 4  # answers kept per puzzle, of those that are right
    puzzles: int = 120  # number of training puzzles
    samples: int = 8  # answers to each, at temperature 1
    people: str = "2-3"  # sizes of the puzzles
    seed: int = 1  # of the puzzles and the sampling: another one for each round
    solutions: tyro.conf.FlagCreatePairsOff[bool] = False  # kept() of the lesson's solution.py


def sampled(args, folder):
    """Sample and score answers to training puzzles. Returns dictionaries; the answers to a puzzle follow each other."""
    puzzles = kk.load(None, "train", people=args.people, size=args.puzzles, seed=args.seed)
    with Path(folder, "puzzles.jsonl").open("w") as file:
        for puzzle in puzzles:
            row = {"quiz": puzzle["quiz"], "names": puzzle["names"], "solution": list(puzzle["answer"].values())}
            file.write(json.dumps(row | {"statements": repr(puzzle["statements"])}) + "\n")
    words = ["--suite", "kk", "--people", args.people, "--data", file.name, "--samples", str(args.samples)]
    words += ["--temperature", "1", "--max_response_tokens", "640", "--seed", str(args.seed), "--out", str(folder)]
    subprocess.run([sys.executable, "evaluate.py", args.model, *words, "--keep_responses"], cwd=ROOT, check=True)
    (responses,) = Path(folder).glob("*_responses.jsonl")
    return [json.loads(line) for line in responses.read_text().splitlines()]


def main(args):
    if args.solutions:
        from course.lesson_14.solution import kept
    else:
        from course.lesson_14.lesson_14 import kept
    if args.keep == "right":
        kept(torch.ones(2), 2, 1)  # ends here if the exercise is not written yet, and not after a minute of sampling
    with tempfile.TemporaryDirectory() as folder:
        answers = sampled(args, folder)
    correct = torch.tensor([answer["correct"] for answer in answers])
    chosen = kept(correct.float(), args.samples, args.most) if args.keep == "right" else torch.ones_like(correct)
    chats = []
    for answer, is_chosen in zip(answers, chosen.tolist()):
        if is_chosen and not answer["truncated"]:
            turns = [("user", answer["prompt"]), ("assistant", "<think>" + answer["response"])]
            chats.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    if not chats:
        sys.exit("no answer is right: there is nothing to learn")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokens = [fmean(a["tokens"] for a, c in zip(answers, chosen) if c or not only) for only in (False, True)]
    print(f"{len(chats)} of {len(answers)} answers kept ({int(correct.sum())} are right): {args.out}")
    print(f"mean length: all {tokens[0]:.0f} tokens, kept {tokens[1]:.0f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

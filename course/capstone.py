"""Break it, find it, prove it: a run of grpo.py with one hidden change, for a team to find.

    python -m course.capstone --team 3 --secret WORD             train, and write the team's folder
    python -m course.capstone --team 3 --secret WORD --reveal    reveal the change

The lecturer runs it. The secret selects the change, so only people who know the secret can look it up. A team gets the
folder capstone/team_3: metrics.jsonl, samples.jsonl, curves.png and the command, but no script. It also gets this file,
with the list of CHANGES. The team names the change from the curves and samples. Then it proves it: it makes the change
in its own copy of grpo.py, uses the same command and seed, and compares the metrics step by step, also with the metrics
of an unchanged run. If the copy is called suspect.py, and its docstring has "What differs from grpo.py: ...", then
`python -m lab.lens --out runs/lens` also shows the weights that it puts on tokens.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
GIVEN = ("metrics.jsonl", "samples.jsonl", "test_samples.jsonl", "curves.png")
FLAGS = "--model models/kk_tiny --steps 8 --eval_every 4 --eval_size 300 --dtype float32 --no_stop_at_gap --seed {seed}"

Change = namedtuple("Change", "name old new")
CHANGES = [  # changes of grpo.py; each old text occurs there once
    Change(
        "the sampler never gets the new weights",
        '        clock.lap("train")\n        sync_weights(policy, llm, args)\n',
        '        clock.lap("train")\n        if DEVICE.type == "cuda":\n            llm.wake_up()\n',
    ),
    Change("the learning rate is ten times as large", "lr=args.lr,", "lr=10 * args.lr,"),
    Change("the learning rate is a tenth", "lr=args.lr,", "lr=args.lr / 10,"),
    Change("the loss has the wrong sign", 'k3(logp, batch["ref_logp"]) - surr', 'k3(logp, batch["ref_logp"]) + surr'),
    Change("β is ten thousand times as large", "loss = args.kl_coef *", "loss = 10_000 * args.kl_coef *"),
    Change("log-probabilities come one position too late", "hidden[:, :-1][mask[:, 1:]]", "hidden[:, 1:][mask[:, 1:]]"),
    Change("the end token is not in the loss", "mask[i, begin:end] = True", "mask[i, begin : end - 1] = True"),
    Change(
        "only responses better than their group's mean count",
        "advantages = (groups - mean) / (std + 1e-6)",
        "advantages = (groups - mean).clamp(min=0) / (std + 1e-6)",
    ),
    Change(
        "only responses worse than their group's mean count",
        "advantages = (groups - mean) / (std + 1e-6)",
        "advantages = (groups - mean).clamp(max=0) / (std + 1e-6)",
    ),
    Change(
        "the advantages are those of another prompt",
        "advantages = advantages.reshape(-1, 1)  # [N, 1]",
        "advantages = advantages.roll(1, 0).reshape(-1, 1)  # [N, 1]",
    ),
    Change(
        "the groups are not groups: every k-th response is one",
        "groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]",
        "groups = rewards.view(args.responses_per_prompt, -1).t().reshape(-1, args.responses_per_prompt)",
    ),
    Change(
        "the clip lets ρ move by a thousandth",
        "low = 1 - args.clip_low\n    high = 1 + args.clip_high",
        "low = 0.999\n    high = 1.001",
    ),
]  # fmt: skip


def drawn(team, secret):
    """Return a team's Change."""
    digest = hashlib.sha256(f"{secret}/{team}".encode()).digest()
    return CHANGES[int.from_bytes(digest[:8], "big") % len(CHANGES)]


def changed(text, change):
    """Return the script with the change. ValueError unless its place occurs exactly once."""
    if text.count(change.old) != 1:
        raise ValueError(f"{change.old!r} occurs {text.count(change.old)} times in grpo.py")
    return text.replace(change.old, change.new)


def train(change, command, folder):
    """Train with the changed script, and write the files for the team into the folder."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place, "grpo.py")
        script.write_text(changed((ROOT / "grpo.py").read_text(), change))
        words = [sys.executable, str(script), *command.split()[2:], "--run_dir", str(Path(place, "run"))]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=ROOT, env=environment)
        folder.mkdir(parents=True, exist_ok=True)
        for name in GIVEN:
            if Path(place, "run", name).exists():
                shutil.copyfile(Path(place, "run", name), folder / name)
        ended = "to its end" if done.returncode == 0 else f"and ended with exit code {done.returncode}"
        (folder / "README.txt").write_text(f"{command}\n\nof a grpo.py with one change. It ran {ended}.\n")


@dataclass
class Args:
    """The team, and its folder."""

    team: int
    secret: str  # a word that the teams don't know
    reveal: tyro.conf.FlagCreatePairsOff[bool] = False  # say what was changed, and end
    seed: int = 0  # of the run
    out: Path = Path("capstone")  # gets a folder team_N


def main(args):
    change = drawn(args.team, args.secret)
    if args.reveal:
        print(f"team {args.team}: {change.name}\n- {change.old}\n+ {change.new}")
        return
    folder = args.out / f"team_{args.team}"
    train(change, f"python grpo.py {FLAGS.format(seed=args.seed)}", folder)
    print(f"for the team: {folder}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))

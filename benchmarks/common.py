"""Shared parts of the benchmarks: prompts, one rollout step divided into its phases, and results files."""

import functools
import importlib
import json
import random
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from rewards import kk, score
from runtime import checks, flags, machine, memory, models, records, sampler
from runtime.chats import encode
from tools import kept

RESULTS = Path(__file__).parent / "results"


def prompts(tokenizer, n, n_tokens):
    """Return n texts of exactly n_tokens tokens each: puzzles of 7 people, joined and truncated at the beginning."""
    found, puzzles = [], iter(kk.generate(4 * n * (1 + n_tokens // 200), "7", seed=0))
    while len(found) < n:
        ids = []
        while len(ids) < n_tokens:
            ids += encode(tokenizer, next(puzzles))
        text = tokenizer.decode(ids[-n_tokens:])
        # A cut within a character changes the number of tokens.
        if len(tokenizer.encode(text, add_special_tokens=False)) == n_tokens:
            found.append(text)
    return found


def check_sizes(sizes):
    """End the program with one line (exit code 2) if a number is not positive, or the name is a path."""
    with flags.errors_in_one_line():
        for name, value in vars(sizes).items():
            if type(value) is int and value <= 0:
                raise ValueError(f"--{name} is {value}; it must be greater than 0")
        if Path(sizes.name).name != sizes.name:
            raise ValueError(f"--name is {sizes.name!r}; it must be a name, not a path")


def seconds(work, *args):
    """Return (seconds that work(*args) takes, its result). It waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


class Step:
    """A trainer's functions, set up for rollout steps of fixed size, in which every response has the full length."""

    def __init__(self, script, model, n_prompts, n_responses, prompt_tokens, response_tokens, words=()):
        self.trainer = trainer = importlib.import_module(script)
        sizes = {
            "model": model, "prompts_per_step": n_prompts, "responses_per_prompt": n_responses, "temperature": 1.0,
            "max_prompt_tokens": prompt_tokens, "max_response_tokens": response_tokens,
        }  # fmt: skip
        with flags.errors_in_one_line():
            argv = [*(f"--{name}={value}" for name, value in sizes.items()), *words]
            self.args, _ = flags.read(argv, trainer.Args, trainer.TASKS)
            args = self.args
            checks.check_gpus(args)
            checks.check_prompts_per_step(args)
            tokenizer, _ = checks.check_model(args, models.HEAD_CHUNK)
        memory.keep_freed_memory()
        texts = prompts(tokenizer, n_prompts, prompt_tokens)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self.problems = [{"id": i, "prompt_ids": prompt} for i, prompt in enumerate(ids)]
        self.llm = trainer.load_sampler(args)
        import vllm  # imported here because load_sampler sets its environment

        vllm.SamplingParams = functools.partial(vllm.SamplingParams, ignore_eos=True)
        sampler.end_tokens = lambda model: []  # no token ends a response
        self.policy = trainer.load_policy(args, trained=True)
        self.reference = trainer.load_policy(args, trained=False) if args.kl_coef else None
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=args.lr, fused=True)
        trainer.sync_weights(self.policy, self.llm, args)

    def sample(self, step):
        problems = [problem for problem in self.problems for _ in range(self.args.responses_per_prompt)]
        self.batch, self.responses = self.trainer.sample(self.llm, problems, step, self.args)

    def score(self):
        problem = {"answer": {"Zoey": True}}
        self.scores = score(kk, self.responses, [problem] * len(self.responses))
        for response, found in zip(self.responses, self.scores):
            # Random rewards, because equal rewards give no gradient.
            found["reward"] = random.Random(response.text).random()

    def log_probs(self):
        batch, args = self.batch, self.args
        batch["old_logp"], batch["entropy"] = self.trainer.log_probs(self.policy, batch, args)
        batch["ref_logp"] = batch["old_logp"]
        if self.reference:
            batch["ref_logp"], _ = self.trainer.log_probs(self.reference, batch, args, with_entropy=False)
        batch["advantages"] = self.trainer.compute_advantages(self.scores, batch, args)

    def update(self):
        return self.trainer.update(self.policy, self.optimizer, self.batch, 1, self.args)

    def sync(self):
        self.trainer.sync_weights(self.policy, self.llm, self.args)


def write(name, result):
    """Write `result` (a dict) to results/NAME.json, with script, hash of the code, commit, versions, machine, date."""
    RESULTS.mkdir(exist_ok=True)
    about = records.provenance() | {"cores": len(machine.cores()), "processor": processor()}
    about["code"] = kept.code_of(about["script"])
    (RESULTS / f"{name}.json").write_text(json.dumps(about | result, indent=1) + "\n")


def processor():
    """Return the processor's name, with its instruction sets that speed up bfloat16."""
    about = machine.about_processor()
    known = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in about.get("flags", "").split()]
    return " ".join([about.get("model name", "unknown"), *known])

"""Compare each phase of a step of grpo.py with its bare work, the least that it needs; measure the cost of Lopti.

    python benchmarks/limit.py

The bare work is
- for sampling: `llm.generate` on the same requests;
- for log-probabilities: forward passes of the same number of tokens, in the fewest passes that --micro_batch_tokens
  allows, through the same model under autocast, with logits and cross-entropy of the same number of response tokens; a
  prompt that the trainer computes once for several responses counts once;
- for updates: the same with forward and backward passes;
- for the sync: one copy of all weights in the sampler's dtype.

Each phase and its bare work are measured in turns, `rounds` times after a warm-up round. The results are medians. The
updates of grpo_ar_lopti.py, with AR alone and with Lopti, run on the same batches.
Results: benchmarks/results/limit.json.
"""

import copy
import importlib
from dataclasses import asdict, dataclass
from statistics import median

import common
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from runtime import batches, distributed, sampler


@dataclass
class Sizes:
    """The sizes of the measurement."""

    model: str = "models/SmolLM2-135M-Instruct"  # a folder or hub id
    prompts: int = 4  # per step
    responses: int = 8  # per prompt
    prompt_tokens: int = 250  # in each prompt
    response_tokens: int = 128  # in each response
    rounds: int = 2  # number of measurements
    name: str = "limit"  # the name of the results file


def bare_passes(policy, parts, args, backward):
    """Run only the model, on the same number of tokens as the trainer computes for these batches."""
    for batch in parts:
        needed = tokens_computed(batch, args)
        # Every row below is one sequence of the greatest length.
        length = int(batches.used_lengths(batch["mask"]).max())
        total_rows = max(1, round(needed / length))
        rows_per_pass = max(1, args.micro_batch_tokens // length)
        targets_per_row = int(batch["mask"].sum()) // total_rows  # response tokens, which need logits
        ids = batch["ids"][:1, :length].expand(total_rows, -1).to(distributed.DEVICE)
        for some in ids.split(rows_per_pass):
            with (
                torch.set_grad_enabled(backward),
                torch.autocast(distributed.DEVICE.type, getattr(torch, args.dtype), args.dtype != "float32"),
            ):
                n = min(some.numel(), len(some) * targets_per_row)
                hidden = policy.lm.model(some, use_cache=False).last_hidden_state.flatten(0, 1)[:n]  # [n, D]
                loss = cross_entropy(policy.lm.lm_head(hidden).float(), some.flatten()[:n])
            if backward:
                loss.backward()
    policy.zero_grad()


def tokens_computed(batch, args):
    """Count the tokens that the trainer's passes compute for a batch. A prompt that a pass shares counts once."""
    tokens = 0
    for _, micro in batches.micro_batches({"ids": batch["ids"], "mask": batch["mask"]}, args):
        rows, length = micro["ids"].shape
        shared = batches.length_to_share(micro["ids"], micro["mask"], args)
        tokens += shared + rows * (length - shared)
    return tokens


def bare_generate(step):
    """Run only the engine on the same requests."""
    import vllm

    args, problems = step.args, step.problems
    step.llm.reset_prefix_cache()
    options = {"n": args.responses_per_prompt, "max_tokens": args.max_response_tokens, "logprobs": 0}
    params = [vllm.SamplingParams(seed=i, **options) for i in range(len(problems))]
    step.llm.generate([{"prompt_token_ids": p["prompt_ids"]} for p in problems], params, use_tqdm=False)


def lopti_updates(step):
    """Return {name: seconds} of grpo_ar_lopti.py's updates on the same batch, with AR alone and with Lopti alone."""
    lopti, took = importlib.import_module("grpo_ar_lopti"), {}
    for name, alpha, eta in (("AR", 0.3, 0.0), ("Lopti", 0.0, 0.5)):
        args = copy.copy(step.args)
        args.alpha, args.eta, args.lopti_stages = alpha, eta, "low,high"
        batch = dict(step.batch)
        batch["advantages"] = batch["advantages"] * lopti.ar_weight(batch["old_logp"], alpha)
        took[name], _ = common.seconds(lopti.update, step.policy, step.optimizer, batch, 1, args)
    return took


def measure(step, number):
    """Return {phase: (seconds, seconds of the bare work)} of a step, and of AR and Lopti, each with GRPO's update."""
    args, policy = step.args, step.policy
    took = {"sample": (common.seconds(step.sample, number)[0], common.seconds(bare_generate, step)[0])}
    took["score"] = (common.seconds(step.score)[0], None)
    sampler.sleep(step.llm)
    models = [model for model in (policy, step.reference) if model]
    logp = common.seconds(step.log_probs)[0]

    def bare_log_probs():
        for model in models:
            bare_passes(model, [step.batch], args, backward=False)

    took["log-probabilities"] = (logp, common.seconds(bare_log_probs)[0])
    shares = list(step.trainer.minibatches(step.batch, args.updates_per_step))
    update = common.seconds(step.update)[0]
    took["update"] = (update, common.seconds(bare_passes, policy, shares, args, True)[0])
    took |= {f"update, {name}": (time, update) for name, time in lopti_updates(step).items()}
    dtype = getattr(torch, args.dtype)
    sync = common.seconds(step.sync)[0]
    took["sync"] = (sync, common.seconds(lambda: [p.detach().to(dtype, copy=True) for p in policy.parameters()])[0])
    return took


def main(sizes):
    common.check_sizes(sizes)
    step = common.Step("grpo", *list(asdict(sizes).values())[:5])
    rounds = [measure(step, number) for number in range(sizes.rounds + 1)][1:]
    phases = {}
    for phase in rounds[0]:
        of_phase, bare = zip(*(took[phase] for took in rounds))
        phases[phase] = {"seconds": median(of_phase), "bare": median(bare) if bare[0] is not None else None}
    low = step.batch["mask"] & (step.batch["old_logp"] <= torch.tensor(0.5).log())
    share = (low.sum() / step.batch["mask"].sum()).item()
    tokens = {
        "response": int(step.batch["mask"].sum()),
        "all": int(step.batch["mask"].sum()) + sizes.prompt_tokens * len(low),
    }
    common.write(sizes.name, {"sizes": asdict(sizes), "tokens": tokens, "low_share": share, "phases": phases})
    table = Table("phase", "seconds", "bare", "bare / phase", title=f"grpo.py, medians of {sizes.rounds}")
    for phase, took in phases.items():
        bare = took["bare"]
        table.add_row(
            phase, f"{took['seconds']:.3f}", *([f"{bare:.3f}", f"{bare / took['seconds']:.0%}"] if bare else [])
        )
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Sizes, use_underscores=True, description=__doc__.split("\n\n")[0]))

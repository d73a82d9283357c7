"""Profile the operations of log-probabilities and updates, and of their bare passes, with torch.profiler.

    python benchmarks/operations.py

limit.py defines the phases and bare passes. Each is profiled once after a warm-up. The time of an operation excludes
the operations that it calls. Results: benchmarks/results/operations.json.
"""

from dataclasses import asdict, dataclass

import common
import torch
import tyro
from limit import bare_passes
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from runtime import sampler


@dataclass
class Sizes:
    """The sizes of the measurement."""

    model: str = "models/SmolLM2-135M-Instruct"  # a folder or hub id
    prompts: int = 2  # per step
    responses: int = 8  # per prompt
    prompt_tokens: int = 250  # in each prompt
    response_tokens: int = 128  # in each response
    shown: int = 8  # how many operations to show per phase, longest first
    name: str = "operations"  # the name of the results file


def seconds_by_operation(work):
    """Return {operation: total seconds} of work(), without the operations that it calls; on a GPU, of its kernels."""
    work()
    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu) as profiler:
        work()
        if gpu:
            torch.cuda.synchronize()
    kind = "self_device_time_total" if gpu else "self_cpu_time_total"
    found = {}
    for event in profiler.key_averages():
        name = event.key.removeprefix("aten::").strip("_").replace("_for_cpu", "")
        found[name] = found.get(name, 0) + getattr(event, kind) / 1e6  # from microseconds
    return found


def main(sizes):
    common.check_sizes(sizes)
    step = common.Step("grpo", *list(asdict(sizes).values())[:5])
    trainer, args, policy = step.trainer, step.args, step.policy
    step.sample(1)
    step.score()
    step.log_probs()
    sampler.sleep(step.llm)
    shares = list(step.trainer.minibatches(step.batch, args.updates_per_step))
    found = {
        "log-probabilities": seconds_by_operation(lambda: trainer.log_probs(policy, step.batch, args)),
        "log-probabilities, bare": seconds_by_operation(
            lambda: bare_passes(policy, [step.batch], args, backward=False)
        ),
        "update": seconds_by_operation(step.update),
        "update, bare": seconds_by_operation(lambda: bare_passes(policy, shares, args, backward=True)),
    }
    phases = {}
    for phase in ("log-probabilities", "update"):
        of_phase, bare = found[phase], found[f"{phase}, bare"]
        longest = sorted(of_phase, key=of_phase.get, reverse=True)[: sizes.shown]
        rows = {name: (of_phase[name], bare.get(name, 0)) for name in longest}
        rows["all others"] = tuple(
            sum(all_of[name] for name in all_of if name not in longest) for all_of in (of_phase, bare)
        )
        phases[phase] = rows
        table = Table("operation", "seconds", "bare", title=phase)
        for name, (took, bare_took) in rows.items():
            table.add_row(name, f"{took:.2f}", f"{bare_took:.2f}")
        Console().print(table)
    common.write(sizes.name, {"sizes": asdict(sizes), "phases": phases})


if __name__ == "__main__":
    main(tyro.cli(Sizes, use_underscores=True, description=__doc__.split("\n\n")[0]))

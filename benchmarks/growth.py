"""Measure how a step's time and memory grow with responses, their length, the vocabulary and the number of processes.

    python benchmarks/growth.py                measure and plot
    python benchmarks/growth.py --draw_only    plot existing results

It runs grpo.py as a user does, on randomly initialised Llamas of four layers with SmolLM2's tokenizer. Their responses
almost never end before the limit. The second step of each run is measured. One size changes at a time:
    responses     time grows with them; memory hardly grows, because passes keep to --micro_batch_tokens
    length        the same, as long as attention, which grows with its square, is the smaller part
    vocabulary    time and memory of the head and the loss grow with it; the rest does not
    processes     divide the work and the memory that FSDP2 shards; each has its own engine
Results: benchmarks/results/growth.json and growth.png, with seconds above and memory below. Grey dashed lines have the
theoretical slope.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import common
import tyro
from tqdm import tqdm

from runtime import files
from tools import plot

TOKENIZER = common.ROOT / "models" / "SmolLM2-135M-Instruct"
BASE = {"responses": 32, "length": 128, "vocabulary": 49152, "processes": 1}
VALUES = {
    "responses": [16, 32, 64, 128], "length": [64, 128, 256, 512], "vocabulary": [49152, 151936], "processes": [1, 2],
}  # fmt: skip
TIME_SLOPE = {"responses": 1, "length": 1, "vocabulary": 1, "processes": -1}  # of log time over log size
FIXED = "--people 3 --responses_per_prompt 4 --temperature 1 --max_prompt_tokens 512 --steps 2 --eval_size 2 --lr 1e-6"
PHASES = ("sample", "logprob", "train", "sync")


@dataclass
class Args:
    """Whether to measure, or only plot."""

    draw_only: bool = False  # draw results/growth.json without measuring


def make_model(folder, vocabulary):
    """Write a Llama with random weights to the folder: 4 layers of width 256, tied embeddings. Return the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(TOKENIZER / "chat_template.jinja", folder)
    return folder


def measure(sizes, folder):
    """Measure a run's second step: seconds per phase, peak memory in GiB, mean response length in tokens.

    sizes: as BASE. RuntimeError if the run fails.
    """
    model = Path(folder, str(sizes["vocabulary"]))
    if not model.exists():
        make_model(model, sizes["vocabulary"])
    run_dir = Path(tempfile.mkdtemp(dir=folder), "run")
    flags = {
        "model": model, "run_dir": run_dir, "prompts_per_step": sizes["responses"] // 4,
        "max_response_tokens": sizes["length"],
    }  # fmt: skip
    launcher = [sys.executable]
    if sizes["processes"] > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={sizes['processes']}"]
    flags = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [*launcher, "grpo.py", *flags, *FIXED.split()], cwd=common.ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{sizes}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    row = files.read_rows(run_dir / "metrics.jsonl")[-1]
    return {
        name: row[name]
        for name in (*(f"time/{phase}" for phase in PHASES), "time/step", "peak_memory_gb", "response_tokens")
    }


def draw(results, path):
    """Plot, per size, seconds by phase and in total with the theoretical slope; and the memory of all. Five panels."""
    figure = plot.new_figure(plot.WIDTH, 8, "")
    *rows, memory, corner = figure.subplots(2, 3).flat
    for i, (seconds, (name, measured)) in enumerate(zip(rows, results.items())):
        sizes = [row["value"] for row in measured]
        for k, phase in enumerate(PHASES):
            values = [row[f"time/{phase}"] for row in measured]
            seconds.plot(sizes, values, marker="o", lw=1.5, color=plot.COLOURS[k], ls=plot.STYLES[k], label=phase)
        whole = [row["time/step"] for row in measured]
        expected = [whole[0] * (size / sizes[0]) ** TIME_SLOPE[name] for size in sizes]
        seconds.plot(sizes, expected, "--", color=plot.GREY, label="theory, of the whole step")
        seconds.plot(sizes, whole, marker="o", lw=3, color="black", label="whole step")
        title = f"seconds a step (log axes)\ntheory: slope {TIME_SLOPE[name]}".replace("-", "−")
        seconds.set(xscale="log", yscale="log", title=title, xlabel=name, xticks=sizes, xticklabels=sizes)
        memory.plot(
            [size / sizes[0] for size in sizes],
            [row["peak_memory_gb"] for row in measured],
            marker="s",
            color=plot.COLOURS[i],
            label=name,
        )
    memory.set(xscale="log", title="peak memory [GiB a process]", xlabel="times the smallest", ylim=(0, None))
    memory.set(xticks=(1, 2, 4, 8), xticklabels=(1, 2, 4, 8))
    memory.legend(fontsize="small", loc="lower right")
    for axis in (*rows, memory):
        axis.minorticks_off()
        axis.margins(x=0.15)
        axis.grid(alpha=0.3)
    corner.axis("off")
    corner.legend(*rows[0].get_legend_handles_labels(), loc="center", frameon=False)
    return plot.save(figure, [path])


def measure_all():
    """Measure every value of every size, and write results/growth.json."""
    jobs = [(name, value) for name, values in VALUES.items() for value in values]
    results, known = {name: [] for name in VALUES}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, value in tqdm(jobs, desc="growth"):
            sizes = BASE | {name: value}
            key = tuple(sizes.values())
            # The values of every size include the base, which is measured once.
            known[key] = known.get(key) or measure(sizes, folder)
            results[name].append({"value": value} | known[key])
    common.write("growth", {"base": BASE, "fixed": FIXED, "results": results})


def main(args):
    path = common.RESULTS / "growth.json"
    if not args.draw_only:
        if not TOKENIZER.exists():
            print(f"error: {TOKENIZER} is not there: make model gets it", file=sys.stderr)
            sys.exit(2)
        measure_all()
    if not path.exists():
        print(f"error: {path} is not there: run without --draw_only first", file=sys.stderr)
        sys.exit(2)
    draw(json.loads(path.read_text())["results"], path.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True, description=__doc__.split("\n\n")[0]))

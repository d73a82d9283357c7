"""Write the results of the benchmarks (results/*.json) into docs/speed.md, between its two marks.

It also plots results/sft_puzzles.png, the curves of docs/algorithms/sft.md.

    python benchmarks/report.py
"""

import json
import math

import common

from tools import plot, texts

PAPER = {"sample": (25.4, 27.8), "train": (17.6, 35.3), "step": (45.4, 65.9)}  # AR-Lopti, Table 6: without, with Lopti
LENGTHS = (32, 128, 512)  # tokens per response
STEP = ("sample", "score", "log-probabilities", "update", "sync")


def read(name):
    path = common.RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def where(result):
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['cores']} cores of {result['processor']}; {versions}; commit {result['commit']}; {result['date']}"


def against_trl(result):
    sizes, runs = result["sizes"], result["runs"]
    lines = [
        f"**Against TRL** (`python benchmarks/against_trl.py`): {sizes['prompts']} × {sizes['responses']} responses of "
        f"{sizes['response_tokens']} tokens to prompts of {sizes['prompt_tokens']}, 2 updates, {sizes['dtype']}; in "
        f"the order {sizes['turns']}.",
        "",
        "| trainer | seconds per step | peak memory, GiB |",
        "|---|---|---|",
    ]
    version, torch = (runs["trl"][0]["versions"][name].split("+")[0] for name in ("trl", "torch"))
    sampler = "vLLM" if "vllm" in runs["trl"][0]["versions"] else "transformers"
    names = {"grpo": "grpo.py", "trl": f"TRL {version} (torch {torch}), sampling with {sampler}"}
    for name, words in names.items():
        seconds = " and ".join(f"{run['seconds']:.0f}" for run in runs[name])
        memory = " and ".join(f"{run['peak_memory_gb']:.1f}" for run in runs[name])
        lines.append(f"| {words} | {seconds} | {memory} |")
    return [*lines, "", f"grpo.py is {result['times_as_fast']:.1f} times as fast. {where(result)}."]


def limit(result):
    sizes, phases = result["sizes"], result["phases"]
    step = sum(phases[name]["seconds"] for name in STEP)
    lines = [
        f"**Against the limit** (`python benchmarks/limit.py`): {sizes['prompts']} × {sizes['responses']} responses of "
        f"{sizes['response_tokens']} tokens to prompts of {sizes['prompt_tokens']}. Bare: `llm.generate` alone; "
        "forward and backward passes of as many tokens, and no more; one copy of the weights.",
        "",
        "| phase | seconds | share of the step | bare | bare / phase |",
        "|---|---|---|---|---|",
    ]
    for name in STEP:
        took, bare = phases[name]["seconds"], phases[name]["bare"]
        beside = f"{bare:.2f} | {bare / took:.0%}" if bare else "|"
        lines.append(f"| {name} | {took:.2f} | {took / step:.1%} | {beside} |")
    train = phases["update"]["seconds"]
    lopti, ar = phases["update, Lopti"]["seconds"], phases["update, AR"]["seconds"]
    lines += [
        "",
        f"**Lopti's cost**, on the same batches ({result['low_share']:.0%} of the tokens are low); the paper's (Table "
        "6) is Qwen2.5-3B on four A100:",
        "",
        "| seconds | GRPO | with AR | with Lopti | ratio | paper, without and with Lopti | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = {
        "sample": (phases["sample"]["seconds"],) * 3,
        "train": (train, ar, lopti),
        "step": (step, step - train + ar, step - train + lopti),
    }
    for name, (without, with_ar, with_lopti) in rows.items():
        a, b = PAPER[name]
        ours = f"{without:.1f} | {with_ar:.1f} | {with_lopti:.1f} | {with_lopti / without:.2f}"
        lines.append(f"| {name} | {ours} | {a}, {b} | {b / a:.2f} |")
    return [*lines, "", f"{where(result)}."]


def lengths(results):
    """Write the fractions of the bare work for several response lengths."""
    lines = [
        "**Short and long responses** (the commands are those of `make bench`): the step in seconds, and bare / phase.",
        "",
        "| responses | seconds of a step | sample | log-probabilities | update | Lopti's update / GRPO's |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        sizes, phases = result["sizes"], result["phases"]
        step = sum(phases[name]["seconds"] for name in STEP)
        shares = [phases[name]["bare"] / phases[name]["seconds"] for name in ("sample", "log-probabilities", "update")]
        lopti = phases["update, Lopti"]["seconds"] / phases["update"]["seconds"]
        size = f"{sizes['prompts']} × {sizes['responses']} of {sizes['response_tokens']} tokens"
        lines.append(f"| {size} | {step:.1f} | {' | '.join(f'{share:.0%}' for share in shares)} | {lopti:.2f} |")
    return [*lines, "", f"{where(results[-1])}."]


def operations(result):
    sizes = result["sizes"]
    lines = [
        f"**Operation by operation** (`python benchmarks/operations.py`): seconds of {sizes['prompts']} × "
        f"{sizes['responses']} responses of {sizes['response_tokens']} tokens to prompts of {sizes['prompt_tokens']}, "
        "in the phase and in its bare passes, by torch.profiler.",
        "",
        "| log-probabilities | phase | bare | update | phase | bare |",
        "|---|---|---|---|---|---|",
    ]
    columns = [
        [f"{name} | {took:.2f} | {bare:.2f}" for name, (took, bare) in rows.items()]
        for rows in result["phases"].values()
    ]
    return [*lines, *(f"| {' | '.join(row)} |" for row in zip(*columns)), "", f"{where(result)}."]


def growth(result):
    lines = [
        "**Growth** (`python benchmarks/growth.py`): slopes of log seconds over log size, first to last value.",
        "",
    ]
    lines += ["| size | values | sample | logprob | train | step | peak memory |", "|---|---|---|---|---|---|---|"]
    for name, rows in result["results"].items():
        first, last = rows[0], rows[-1]
        keys = ("time/sample", "time/logprob", "time/train", "time/step", "peak_memory_gb")
        slopes = [math.log(last[key] / first[key]) / math.log(last["value"] / first["value"]) for key in keys]
        values = ", ".join(str(row["value"]) for row in rows)
        lines.append(f"| {name} | {values} | " + " | ".join(f"{slope:.2f}" for slope in slopes) + " |")
    return [*lines, "", f"{where(result)}.", "", "![growth](../benchmarks/results/growth.png)"]


def busy(result):
    lines = [
        "**Beside other work** (`python benchmarks/busy.py`): seconds of a step of grpo.py, mean of three, and how "
        "many times as long as alone. The other program is a Python process that never stops; two runs start together.",
        "",
        "| model | alone | beside a program | two runs |",
        "|---|---|---|---|",
    ]
    cells = {}
    for row in result["results"]:
        seconds = [run["step"] for run in row["runs"]]
        cells.setdefault(row["model"], []).append(seconds)
    for model, ((alone,), *others) in cells.items():
        beside = [f"{' and '.join(f'{s:.1f}' for s in seconds)} ({max(seconds) / alone:.1f} ×)" for seconds in others]
        lines.append(f"| {model} | {alone:.1f} | {' | '.join(beside)} |")
    commands = "; ".join(f"{model} with `{flags}`" for model, flags in result["commands"].items())
    return [*lines, "", f"{commands}. {where(result)}."]


def draw_sft(result):
    """Plot the losses of the three runs that taught SmolLM2 to solve puzzles."""
    names = {"restated": "all weights, --restated", "plain": "all weights, without it", "lora": "LoRA, --restated"}
    groups = {words: [result["rows"][name]] for name, words in names.items()}
    plot.draw(groups, [common.RESULTS / "sft_puzzles.png"], ["eval/loss", "loss"])


def main():
    draw_sft(read("sft_puzzles"))
    lines = []
    writers = {"trl": against_trl, "trl_float32": against_trl, "limit": limit, "operations": operations}
    writers |= {"growth": growth, "busy": busy}
    for name, write in writers.items():
        if result := read(name):
            lines += [*write(result), ""]
        if name == "limit":
            lines += [*lengths([read(f"limit_{n_tokens}") for n_tokens in LENGTHS]), ""]
    page = common.ROOT / "docs" / "speed.md"
    texts.write({page: texts.between(page.read_text(encoding="utf-8"), "benchmarks", "\n".join(lines))})


if __name__ == "__main__":
    main()

"""Run the TRL side of against_trl.py in TRL's environment: one generation and its two updates."""

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Measures the seconds from the start of the first optimizer step, with generation, to the end of the last one."""

    begin = None

    def on_step_begin(self, args, state, control, **others):
        self.begin = self.begin or time.perf_counter()

    def on_step_end(self, args, state, control, **others):
        self.seconds = time.perf_counter() - self.begin


def timed(function, name, took):
    """Wrap the function: it adds the seconds of each call to took[name], and waits for the GPU."""

    def with_clock(*args, **options):
        started = time.perf_counter()
        result = function(*args, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took[name] = took.get(name, 0.0) + time.perf_counter() - started
        return result

    return with_clock


def main(sizes):
    folder = Path(sizes.inside)
    n_prompts, group, length, rows = (
        int(getattr(sizes, name)) for name in "prompts responses response_tokens micro_batch".split()
    )
    lengths = []

    def reward(completion_ids, **others):
        lengths.extend(map(len, completion_ids))
        return [float(sum(ids) % 97) / 97 for ids in completion_ids]

    passes, gpu = n_prompts * group // rows, torch.cuda.is_available()
    sampling = {"generation_kwargs": {"min_new_tokens": length}}  # transformers' names
    if gpu:
        sampling = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": int(sizes.prompt_tokens) + length, "generation_kwargs": {"ignore_eos": True},
        }  # fmt: skip
    config = trl.GRPOConfig(
        output_dir=folder, use_cpu=not gpu, bf16=sizes.dtype == "bfloat16", model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=rows, gradient_accumulation_steps=passes // 2, steps_per_generation=passes,
        num_generations=group, max_completion_length=length, **sampling,
        temperature=1.0, beta=0.001, epsilon=0.2, epsilon_high=0.24, loss_type="dapo", learning_rate=1e-6, max_steps=2,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": json.loads((folder / "prompts.json").read_text())})
    clock = Clock()
    trainer = trl.GRPOTrainer(sizes.model, reward, args=config, train_dataset=prompts, callbacks=[clock])
    took = {}
    for name in ("_generate", "_generate_and_score_completions"):  # the second calls the first
        setattr(trainer, name, timed(getattr(trainer, name), name, took))
    trainer.train()
    sampling, before_update = took["_generate"], took["_generate_and_score_completions"]
    phases = {
        "sample": sampling,  # with vLLM, includes the sync of weights
        "score and log_probs": before_update - sampling,
        "update": clock.seconds - before_update,
    }
    assert lengths == [length] * n_prompts * group, lengths
    used = (
        torch.cuda.max_memory_reserved() / 2**30 if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    if gpu:
        versions["vllm"] = version("vllm")
    result = {"seconds": clock.seconds, "phases": phases, "peak_memory_gb": used, "versions": versions}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(sys.argv[1])))

"""Merge a LoRA adapter and the model that it was trained on into an ordinary model, in bfloat16.

    python -m tools.merge models/smollm2_kk models/SmolLM2-135M-KK     (make taught)
    python -m tools.merge RUN/checkpoints/step_000020/adapter FOLDER

The adapter is a folder in peft's format. The other model is named in its adapter_config.json. The trainers' settings
for the model, trainer_settings.json, are copied if the adapter has them.
"""

import shutil
import sys
from pathlib import Path

import torch
import tyro
from peft import AutoPeftModelForCausalLM, PeftConfig
from transformers import AutoTokenizer, GenerationConfig


def main(adapter: tyro.conf.Positional[Path], folder: tyro.conf.Positional[Path]):
    """Write the folder, renamed into place when complete. The sum is computed in float32 and then rounded."""
    if folder.exists():
        sys.exit(f"error: {folder} is there already: give a new folder")
    if not (adapter / "adapter_config.json").exists():
        sys.exit(f"error: {adapter} is not an adapter: no adapter_config.json in it")
    base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    model = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).merge_and_unload()
    half_written = folder.with_name(folder.name + ".tmp")
    generation, model.generation_config = model.generation_config, GenerationConfig()
    model.to(torch.bfloat16).save_pretrained(half_written)
    generation.to_json_file(half_written / "generation_config.json")  # unchanged: save_pretrained refuses some
    AutoTokenizer.from_pretrained(base).save_pretrained(half_written)
    if (adapter / "trainer_settings.json").exists():
        shutil.copy(adapter / "trainer_settings.json", half_written)
    half_written.rename(folder)
    print(f"wrote {folder}: {base} with {adapter}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

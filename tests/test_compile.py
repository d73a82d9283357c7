"""How many programs torch.compile makes of the decoder layers: runtime/placement.py leaves room for them."""

import json

import pytest
from conftest import python

# What a run does with its models, in a process of its own, because torch keeps its programs. Dynamo tells by its guards
# which programs it needs; what a backend makes of them does not matter here, and takes minutes.
RUN = """
import json, sys, torch
from transformers import AutoModelForCausalLM, Qwen2Config
from torch._dynamo.utils import counters

script, folder, checkpointing, dtype = sys.argv[1:]
sys.argv = [script]
trainer = __import__(script)
compile = torch.nn.Module.compile
torch.nn.Module.compile = lambda self, **options: compile(self, backend="eager", **options)
torch.compiler.config.fail_on_recompile_limit_hit = True
AutoModelForCausalLM.from_config(Qwen2Config(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1,
)).save_pretrained(folder)
args = trainer.Args(
    model=folder, compile=True, gradient_checkpointing=checkpointing == "True", dtype=dtype, micro_batch_tokens=200
)
models = [trainer.load_policy(args, trained=True), trainer.load_policy(args, trained=False)]
policy, reference = models
if script == "ppo":
    models.append(trainer.load_policy(args, True, trainer.ValueModel))
torch.manual_seed(0)
programs = []
for step in range(3):
    for lengths in ([30 + step, 28, 20, 17, 17, 5], [190 + step]):  # passes of several rows, and of one
        ids = torch.randint(0, 300, (len(lengths), max(lengths) + 4))
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for row, length in enumerate(lengths):
            mask[row, 4 : 4 + length] = True
        batch = {"ids": ids, "mask": mask}
        for model in (policy, reference):
            trainer.log_probs(model, batch, args)
        for model in models[::2]:
            first = model(ids, mask, args.temperature)[0] if model is policy else model(ids, mask)
            first.sum().backward()
    programs.append(counters["stats"]["unique_graphs"])
print(json.dumps({"programs": programs, "limit": torch.compiler.config.recompile_limit}))
"""


@pytest.mark.parametrize("script, checkpointing, dtype", [("grpo", False, "float32"), ("ppo", True, "bfloat16")])
def test_a_run_needs_fewer_programs_than_torch_may_make(script, checkpointing, dtype, tmp_path):
    done = python("-c", RUN, script, tmp_path, checkpointing, dtype)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, *others = found["programs"]
    assert first >= 3 and set(others) == {first}  # later lengths need no more
    assert found["limit"] >= 2 * first

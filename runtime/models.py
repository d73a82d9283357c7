"""Load, place and call language models of many families, and check that all programs agree.

Every model with .model.layers and a linear .lm_head is tried: the check at the start (check_same)
decides. A family in REFUSED would pass that check and fail later, or fail without a reason.
"""

import contextlib
import copy
import dataclasses
import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime import batches, distributed, files, lora
from runtime.distributed import DEVICE, ON_GPU, RANK

# ----------------------------------------------------------------------------------------- families

# Tried with tiny random models: benchmarks/results/families.md.
TRIED = """arcee bitnet cwm ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_text glm glm4 granite
    granitemoe granitemoehybrid helium hunyuan_v1_dense jais2 llama ministral ministral3 mistral
    nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2 qwen3 qwen3_5_text qwen3_moe
    seed_oss smollm3 stablelm starcoder2""".split()
REFUSED = {
    "apertus": "vLLM's build for CPUs computes it wrongly",
    "cohere2": "models.logits does not know its logit_scale",
    "falcon_h1": "models.logits does not know its lm_head_multiplier",
    "gpt2": "its layers are not in .model.layers",
    "gpt_oss": "its experts' weights are in MXFP4, 4 bits each, which can't be trained",
    "lfm2": "vLLM's build for CPUs computes it wrongly",
    "nemotron_h": "vLLM's build for CPUs computes it wrongly",
    "olmo_hybrid": "vLLM can't start it on a CPU",
}
# Names of the language model's weights in folders with images, old and new, and its own names.
OWN_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
}


def text_only(model):
    """Return options of from_pretrained that load a folder's or hub id's language model alone.

    Without them, transformers would load the image part, too, or random weights.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    options = {"trust_remote_code": False}
    if reads_images(config):
        options |= {"config": language_config(config), "key_mapping": OWN_NAMES}
    return options


def reads_images(config) -> bool:
    """Return whether a configuration has, beside that of a language model, others."""
    return config.get_text_config(decoder=True) is not config


def language_config(config):
    """Return the configuration of the language model alone; of a text model, the same object."""
    if not reads_images(config):
        return config
    text = copy.deepcopy(config.get_text_config(decoder=True))
    text.tie_word_embeddings = config.tie_word_embeddings
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    if type(text) in AutoModelForCausalLM._model_mapping:
        text.architectures = [AutoModelForCausalLM._model_mapping[type(text)].__name__]
    return text


def is_recurrent(config) -> bool:
    """Return whether some layers keep a state (Mamba, convolutions) instead of keys and values."""
    return any(recurrent_layers(config))


def recurrent_layers(config) -> list:
    """Return for each layer with a cache of its own whether it keeps a state."""
    layers = DynamicCache(config=config).layers
    return [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers]


def num_experts(config):
    """Return the number of experts in a layer; 0 if the model is dense."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(getattr(config, name, None) or 0 for name in names)


def check_family(flag: str, name, config, model, lora_rank: int = 0) -> None:
    """Raise ValueError if a model can't be trained. model: its shapes (memory.shapes_of)."""
    kind = config.model_type
    if kind in REFUSED:
        raise ValueError(f"{flag} {name} is a {kind}, which can't be trained here: {REFUSED[kind]}")
    if not hasattr(getattr(model, "model", None), "layers"):
        raise ValueError(f"{flag} {name} is a {kind}, whose layers are not in .model.layers")
    if not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise ValueError(f"{flag} {name} is a {kind}, whose head is not a linear .lm_head")
    for needed in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not hasattr(config, needed):
            raise ValueError(f"{flag} {name} is a {kind}, whose config.json has no {needed}")
    if lora_rank and num_experts(config):
        raise ValueError(
            f"--lora_rank {lora_rank}: {name} has experts, which LoRA can't train here: leave out "
            "--lora_rank, or take a dense model"
        )


# -------------------------------------------------------------------------------------------- place

# The number of programs that torch.compile may make of a layer's code, counted over all layers.
# Beyond it, torch.compile gives up, and the run is slow. Its default is 8. A run needs 6: with
# gradient, without, and for the reference, each for one row and for several. bfloat16 with
# recomputing needs 8. Several processes (FSDP2) and a critic need no more.
PROGRAMS = 24

REPEATED = "sdpa_repeated"


def repeated_attention(module, query, key, value, attention_mask, **options):
    """Run transformers' torch attention with a copy of keys and values for each head of queries.

    All are [N, heads, T, width]. transformers tells torch that heads share keys and values instead.
    In float32, and in float16 on a T4, no fused kernel supports sharing. The kernel that does needs
    memory that grows with T².
    """
    times = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, times), repeat_kv(value, times)
    # Pass None instead of the module, which would say that heads share.
    return sdpa_attention_forward(None, query, key, value, attention_mask, **options)


AttentionInterface.register(REPEATED, repeated_attention)
AttentionMaskInterface.register(REPEATED, sdpa_mask)


def place(policy, args):
    """Put the policy on this process's device; with several processes it is sharded.

    With --gradient_checkpointing, a trained policy recomputes activations in the backward pass
    instead of keeping them.
    """
    lm = policy.lm
    lm.config.dtype = args.dtype  # the dtype of checkpoints; changes no weight
    fix_longrope(lm, args.max_prompt_tokens + args.max_response_tokens)
    args.recurrent = is_recurrent(lm.config)
    if getattr(lm.config, "attn_logit_softcapping", None):
        lm.set_attn_implementation("eager")  # torch's attention can't cap its logits (Gemma 2)
    is_torchs = lm.config._attn_implementation == "sdpa"
    if distributed.ON_GPU and args.dtype != "bfloat16" and is_torchs:
        lm.set_attn_implementation(REPEATED)
    is_trained = any(parameter.requires_grad for parameter in policy.parameters())
    if is_trained and args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in lm.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # so that it recomputes; its parts still have no dropout
    if args.compile:
        torch.compiler.config.recompile_limit = PROGRAMS
        for layer in lm.model.layers:
            layer.compile(dynamic=True)  # one program for all lengths
        # Fuse the head's softmax, too: its float32 logits are the largest tensors of all.
        policy.head = torch.compile(policy.head, dynamic=True)
    if distributed.WORLD_SIZE > 1:
        shard(policy, getattr(torch, args.dtype))
    return policy.to(distributed.DEVICE)  # on a GPU, FSDP2 has already moved the layers


def fix_longrope(lm, context: int) -> None:
    """Make a model with longrope (Phi-3, Phi-4-mini) keep the factors that vLLM has in this run.

    vLLM chooses the short or the long factors by `context`, the most tokens of a sequence.
    transformers would choose in each forward pass, by its longest row.
    """
    for rotary in lm.modules():
        if getattr(rotary, "rope_type", None) == "longrope":
            rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, seq_len=context)
            rotary.rope_type = "default"  # otherwise each forward pass would choose


def shard(policy, dtype) -> None:
    """Shard with FSDP2: a process keeps a shard of every layer, and gathers a layer to compute."""
    sharding = {
        "mesh": distributed.mesh(),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,  # dtype of gathered weights: half the traffic
            reduce_dtype=torch.float32,  # dtype in which gradients are summed over processes
            cast_forward_inputs=False,  # the residual stream stays float32
        ),
    }
    for layer in policy.lm.model.layers:
        fully_shard(layer, **sharding)
    # Otherwise FSDP2 keeps the root's weights (embedding, head) gathered after the forward pass.
    fully_shard(policy, reshard_after_forward=True, **sharding)


# ------------------------------------------------------------------------------------- forward pass

# Number of tokens whose logits exist at once: [HEAD_CHUNK, vocabulary] in float32.
HEAD_CHUNK = 4096 if ON_GPU else 1024


def embed(lm, ids: Tensor):
    """Return the inputs of lm.model for tokens ids [N, T]: float32 embeddings [N, T, D]."""
    embedded = {"inputs_embeds": lm.get_input_embeddings()(ids).float()}
    if getattr(lm.config, "hidden_size_per_layer_input", 0):  # each layer of Gemma 4 has its own
        embedded["per_layer_inputs"] = lm.model.get_per_layer_inputs(ids, None)
    return embedded


def with_shared_prompt(model, embedded, length):
    """Compute the last layer's output for every token, [N, T, D], and the prompt only once.

    model: a transformer without its head; embedded: from embed, of tokens of which all rows share
    the first `length`. These go through the model for the first row alone, and their keys and
    values are repeated for the N rows. Gradients flow back through the repeated keys and values
    into the single prompt.
    """
    num_rows = len(embedded["inputs_embeds"])
    shared = {name: values[:1, :length] for name, values in embedded.items()}
    prompt = model(**shared, use_cache=True)
    cache = prompt.past_key_values
    cache.batch_repeat_interleave(num_rows)
    rest = {name: values[:, length:] for name, values in embedded.items()}
    rest = model(**rest, past_key_values=cache)
    of_prompt = prompt.last_hidden_state.expand(num_rows, -1, -1)
    return torch.cat([of_prompt, rest.last_hidden_state], 1)


def logits(lm, states: Tensor):
    """Compute the logits of states [n, D], the inputs of the head: [n, vocabulary] in float32.

    Most families take the head's output. Some divide it (Granite), or cap it (Gemma 2 and 4), which
    transformers does after the head.
    """
    logits = lm.lm_head(states).float()
    if scale := getattr(lm.config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(lm.config, "final_logit_softcapping", None):
        logits = cap * (logits / cap).tanh()
    return logits


def in_chunks(function, states: Tensor, targets: Tensor, *options) -> list:
    """Compute function(states, targets, *options) for HEAD_CHUNK tokens at a time.

    states [num_tokens, D], targets [num_tokens]; function returns several tensors [num_tokens]. Its
    intermediate tensors (the logits) exist for one chunk at a time. The backward pass begins with
    the last chunk, so its tensors are kept; those of the other chunks are computed again.
    """
    chunks = list(zip(states.split(HEAD_CHUNK), targets.split(HEAD_CHUNK)))
    results = []
    for chunk in chunks[:-1]:
        results.append(checkpoint(function, *chunk, *options, use_reentrant=False))
    results.append(function(*chunks[-1], *options))
    return [torch.cat(parts) for parts in zip(*results)]


# --------------------------------------------------------------------------------------- loss scale

LEAST_SCALE = 1.0  # a lower scale makes gradients smaller than they are without scaling


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler for one optimizer. In other dtypes than float16 it changes nothing."""

    def __init__(self, args):
        super().__init__(DEVICE.type, enabled=args.dtype == "float16")
        self.run_dir = args.run_dir

    def step(self, optimizer: Optimizer) -> None:
        """Make the optimizer's step, or skip it after an overflow, and update the scale.

        All processes do the same. If the scale falls below LEAST_SCALE, the program ends (exit code
        1). Halved until it is 0, the scale would make every weight NaN in the next finite update.
        """
        super().step(optimizer)
        before = self.get_scale()
        self.update()
        scale = self.get_scale()
        if scale < LEAST_SCALE:
            sys.exit(
                f"error: gradients overflow in float16, even at a loss scale of {scale:g}. This "
                "update was not applied. Try --dtype bfloat16 or float32, or a lower --lr; "
                f"{files.how_to_go_on(self.run_dir)}"
            )
        if scale < before and RANK == 0:
            print(f"overflow in float16: an update was skipped; the loss's scale is now {scale:g}")

    def state(self):
        """Return the scale and the updates since it changed, as a tensor [2] for a checkpoint."""
        state = self.state_dict()
        return torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float32)

    def load_state(self, tensor) -> None:
        """Restore the tensor that state returned."""
        scale, tracker = tensor.tolist()
        self.load_state_dict(self.state_dict() | {"scale": scale, "_growth_tracker": int(tracker)})


def scaler(optimizer, args):
    """Return the optimizer's Scaler, the same one at each call."""
    if not hasattr(optimizer, "scaler"):
        optimizer.scaler = Scaler(args)
    return optimizer.scaler


# ------------------------------------------------------------------------ one model, three programs

CHECKED_TOKENS = 10
CHECKED_PROMPT = 256  # the most tokens of the prompt
# nats: the mean |difference| of log-probabilities is below, if only rounding differs
LARGEST_GAPS = {"bfloat16": 0.3, "float16": 0.05, "float32": 0.002}


def check_same(policy, llm, sync_weights, problem: dict, args) -> None:
    """End the run with one line, exit code 1, if the three compute different models.

    problem: its prompt is used. All processes must call it. It costs a sync, ten tokens and a few
    forward passes. Then the policy has its own weights again, and torch its random state.
    """
    exact = dataclasses.replace(args, sampler_dtype="")  # --sampler_dtype is to differ
    with changed_weights(policy):
        sync_weights(policy, llm, exact)
        compare(policy, problem, args, ten_tokens(llm, problem))


@contextlib.contextmanager
def changed_weights(policy):
    """Multiply every second number of each weight by 1.1; afterwards all are the same bit for bit.

    Not every number, because a norm after the weight would cancel the factor. LoRA's matrices B,
    which are zero, get 0.01 added. Copies of the weights wait in main memory.
    """
    kept = []
    with torch.no_grad():
        for name, weight in lora.all_tensors(policy):
            weight = distributed.own_shard(weight)
            kept.append((weight, weight.to("cpu", copy=True)))
            part = weight[..., ::2] if weight.dim() else weight
            part.mul_(1.1).add_(0.01 if ".lora_B." in name else 0)
        try:
            yield
        finally:
            for weight, own in kept:
                weight.copy_(own)


def ten_tokens(llm, problem: dict):
    """Return vLLM's response of ten tokens to a problem, with their log-probabilities."""
    from vllm import SamplingParams

    from runtime import sampler

    params = SamplingParams(
        seed=0,
        max_tokens=CHECKED_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
    )
    prompts = [{"prompt_token_ids": problem["prompt_ids"][:CHECKED_PROMPT]}]
    with torch.random.fork_rng(devices=[distributed.DEVICE] if distributed.ON_GPU else []):
        sampler.empty_prefix_cache(llm)
        [output] = llm.generate(prompts, params, use_tqdm=False)
        sampler.empty_prefix_cache(llm)
    return output.outputs[0]


@torch.no_grad()
def compare(policy, problem: dict, args, response=None) -> None:
    """End the run if log-probabilities of a response differ; without vLLM, of prompt tokens."""
    row = problem["prompt_ids"][:CHECKED_PROMPT]
    # Backwards, because a model is so sure of a template's end that a wrong scale changes nothing.
    row = [*row, *response.token_ids] if response else row[::-1]
    # So many equal rows that it pays to share their prompt, as the rows of a group do.
    num_rows = 2 + batches.PASS_COST // max(1, len(row) - CHECKED_TOKENS)
    ids = torch.tensor([row] * num_rows, device=distributed.DEVICE)  # [N, T]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, max(1, len(row) - CHECKED_TOKENS) :] = True
    with torch.compiler.set_stance("force_eager"):  # compiling for these shapes would take seconds
        logp = policy(ids, mask, 1.0)[0][mask].view(num_rows, -1)
        expected = {"transformers": own_log_probs(policy, ids[:1], args)[mask[0, 1:]]}
    if response:
        expected["vLLM"] = torch.tensor(response.logprobs.logprobs, device=logp.device)
    gaps = {name: (logp - other).abs().mean().item() for name, other in expected.items()}
    report_gaps(gaps, policy.lm.config.model_type, args)


def own_log_probs(policy, ids: Tensor, args):
    """Return transformers' own log-probabilities of ids [1, T] without the first: [T − 1]."""
    dtype = getattr(torch, args.dtype)
    if isinstance(policy, FSDPModule):
        policy.unshard()  # embedding and head, which no layer gathers
    with torch.autocast(distributed.DEVICE.type, dtype, enabled=dtype != torch.float32):
        logits = policy.lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
    if isinstance(policy, FSDPModule):
        policy.reshard()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def report_gaps(gaps, kind, args) -> None:
    """End the run if a gap is too large; say so if the model's family was not tried before."""
    for name, gap in gaps.items():
        gaps[name] = distributed.all_reduce(math.inf if math.isnan(gap) else gap, dist.ReduceOp.MAX)
    shown = ", ".join(f"{gap:.2g} nats from {name}" for name, gap in gaps.items())
    is_wrong = max(gaps.values()) > LARGEST_GAPS[args.dtype]
    ends = is_wrong and getattr(args, "stop_at_gap", True)
    nevertheless = hasattr(args, "stop_at_gap") and ", and --no_stop_at_gap trains it nevertheless"
    if is_wrong and distributed.RANK == 0:
        print(
            f"{'error' if ends else 'warning'}: {args.model} ({kind}): the policy's "
            f"log-probabilities of ten tokens differ by {shown}; rounding gives less than "
            f"{LARGEST_GAPS[args.dtype]}: `python tests/families.py {args.model}` shows more"
            f"{nevertheless or ''}",
            file=sys.stderr,
        )
    elif kind not in TRIED and distributed.RANK == 0:
        print(f"{args.model} is a {kind}, a family not tried before; the policy differs by {shown}")
    if ends:
        sys.exit(1)

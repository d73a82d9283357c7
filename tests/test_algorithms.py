"""Policy, forward passes, updates, Lopti's stages, and what main asks of the sampler, against Python's floats.

No sampler runs here: the batches are made of a tiny model's own tokens.
"""

import contextlib
import dataclasses
import importlib
import itertools
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, answer, step_of_main
from helpers import (
    GROUP,
    N,
    adamw,
    arguments,
    compile_with,
    distance,
    gradients,
    padded,
    sequences,
    state_of,
    tokens_of,
    weights,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

import grpo
import grpo_ar_lopti
from runtime import batches, distributed, models, sampler
from tools.maintain import updates

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def numbers_of(batch, args):
    """Log-probabilities, entropies and the gradient of an update, each a tensor."""
    policy = grpo.load_policy(args, trained=True)
    return [*grpo.log_probs(policy, batch, args), *gradients(grpo, batch, args, policy)[0]]


def assert_equal_but_for_rounding(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert other.any() and distance(one, other) < 1e-5


def lengths_of(batch):
    """How many tokens each row has, up to its last response token."""
    return [int(row.nonzero().max()) + 1 for row in batch["mask"]]


def with_gaps(mask):
    """A mask [N, T] in which replies of one and two tokens stand between the tokens of a response."""
    inner = mask.clone()
    inner[:, 1:] &= mask[:, :-1]
    inner[:, :-1] &= mask[:, 1:]
    return mask & ~(inner & (torch.arange(mask.shape[1]) % 3 > 0))


def plain_log_probs(lm, ids, mask, temperature):
    """By transformers and torch alone, of the tokens in a row's mask: log π of the whole vocabulary, [n, V], and of
    the tokens themselves, [n]."""
    logits = lm(input_ids=ids[None]).logits[0]  # of every next token, [T, V]
    before = torch.log_softmax(logits.double() / temperature, -1)[:-1][mask[1:]]
    return before, before.gather(1, ids[mask][:, None])[:, 0]


@pytest.mark.parametrize(("temperature", "gaps"), [(0.7, False), (2.0, True)])
def test_log_probabilities_and_entropy_are_transformers_own(tiny_model, temperature, gaps):
    """Of rows with padding on the right, each against a row alone; gaps in the mask are replies between turns."""
    policy = grpo.load_policy(arguments(model=str(tiny_model)), trained=True)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows = sequences()
    ids, mask = padded(rows)
    mask = with_gaps(mask) if gaps else mask
    logp, no_entropy = policy(ids, mask, temperature)
    with torch.no_grad():
        same, entropy = policy(ids, mask, temperature, with_entropy=True)
    assert torch.equal(same, logp) and not no_entropy.any()  # unless asked for
    assert logp.dtype == entropy.dtype == torch.float32 and logp.shape == entropy.shape == ids.shape
    assert logp.requires_grad and not entropy.requires_grad
    assert not logp[~mask].any() and not entropy[~mask].any()
    for i, (_, row) in enumerate(rows):
        plain, expected = plain_log_probs(lm, row, mask[i, : len(row)], temperature)
        torch.testing.assert_close(logp[i][mask[i]].double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[i][mask[i]].double(), -(plain.exp() * plain).sum(1), atol=1e-5, rtol=0)


def test_the_heads_chunks_change_neither_values_nor_gradient(tiny_model, batch, monkeypatch):
    """All but a pass's last chunk are computed again when going back: logits of one chunk exist at a time."""
    args, sizes, head = arguments(model=str(tiny_model)), [], grpo.Policy.head
    monkeypatch.setattr(grpo.Policy, "head", lambda self, *given: sizes.append(len(given[0])) or head(self, *given))
    whole = numbers_of(batch, args)
    n = int(batch["mask"].sum())
    assert max(sizes) <= n and sum(sizes) == 2 * n  # without gradient, and with it
    last = [(size - 1) % 7 + 1 for size in sizes[len(sizes) // 2 :]]  # the sizes of the last chunks
    sizes.clear()
    monkeypatch.setattr(models, "HEAD_CHUNK", 7)
    assert_equal_but_for_rounding(numbers_of(batch, args), whole)
    assert max(sizes) == 7 and sum(sizes) == 3 * n - sum(last) and min(last) < 7


def test_the_reference_has_no_gradient_and_the_weights_are_float32(tiny_model):
    args = arguments(model=str(tiny_model), dtype="bfloat16")
    policy, reference = grpo.load_policy(args, trained=True), grpo.load_policy(args, trained=False)
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and policy.args.dtype == "bfloat16"
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in policy.parameters())
    assert not any(p.requires_grad for p in reference.parameters())


def shapes(batch, budget, **changes):
    """(rows, length) of the forward passes."""
    args = arguments(micro_batch_tokens=budget, **{"gradient_checkpointing": True} | changes)
    found = []
    for rows, micro in grpo.micro_batches(batch, args):
        assert micro.keys() == batch.keys()
        found.append((rows.tolist(), micro["ids"].shape[1]))
        assert all(torch.equal(value, batch[key][rows, : found[-1][1]]) for key, value in micro.items())
    return found


@pytest.mark.parametrize("kind", ["apart", "shared", "shared, late"])
@pytest.mark.parametrize("budget", [1, 80, 300])
def test_passes_keep_to_the_budget_and_lose_no_row(batch, budget, kind, monkeypatch):
    """Those that share a prompt hold one group and count its prompt once, also where the mask has only a row's last
    token, as in a stage of Lopti: what is the same is no longer then. Others take the longest rows first."""
    monkeypatch.setattr(batches, "PASS_COST", 0)  # so that sharing always pays
    lengths, prompts = lengths_of(batch), batch["mask"].int().argmax(1).tolist()
    if kind == "shared, late":
        batch = {**batch, "mask": torch.arange(batch["mask"].shape[1]) == torch.tensor(lengths)[:, None] - 1}
    found = shapes(batch, budget, gradient_checkpointing=kind == "apart")
    for rows, length in found:
        assert length == max(lengths[row] for row in rows)
        shared = 0 if kind == "apart" else prompts[rows[0]]
        assert shared + len(rows) * (length - shared) <= budget or len(rows) == 1
        assert kind == "apart" or len({row // GROUP for row in rows}) == 1
    in_order = [row for rows, _ in found for row in rows]
    assert sorted(in_order) == list(range(N))
    if kind == "apart":
        assert [lengths[row] for row in in_order] == sorted(lengths, reverse=True)
    else:
        assert len(shapes(batch, 10**6, gradient_checkpointing=False)) == N // GROUP


MASK = (torch.arange(50) >= 40).expand(8, 50)  # eight responses of 10 tokens to a prompt of 40


def num_passes(**changes):
    """How many passes eight equal rows make, which are two groups of four."""
    args = arguments(**{"responses_per_prompt": 4} | changes)
    ids = (torch.arange(8) // 4)[:, None].expand(8, 50)  # each group has a prompt of its own
    return len(batches.plan_passes(ids, MASK, batches.used_lengths(MASK), args))


def test_prompts_are_shared_where_that_saves_more_than_it_costs(monkeypatch):
    """Apart: one pass of 400 tokens; shared: two of 80 each."""
    for cost, expected in ((0, 2), (79, 2), (81, 1), (500, 1)):  # 400 + cost against 160 + 4 · cost: equal at 80
        monkeypatch.setattr(batches, "PASS_COST", cost)
        assert num_passes() == expected, cost
    monkeypatch.setattr(batches, "PASS_COST", 0)
    assert num_passes(gradient_checkpointing=True) == num_passes(compile=True) == 1


# What a pass costs, and in another process the length that rows share and the tokens that this saves: who shares.
SHARING = {
    "it pays here": (200, 40, 0, 40), "it pays there": (500, 40, 600, 40), "it pays in none": (500, 40, 0, 0),
    "another has nothing to share": (200, 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("cost", "length_there", "saved_there", "length"), SHARING.values(), ids=SHARING)
def test_all_processes_share_a_prompt_or_none_does(cost, length_there, saved_there, length, monkeypatch):
    """A pass that shares one calls each layer twice, and FSDP2 needs as many calls in each process. Here 280 tokens
    are saved."""

    def all_reduce(value, op):
        return min(value, length_there) if op == torch.distributed.ReduceOp.MIN else max(value, saved_there)

    monkeypatch.setattr(batches, "all_reduce", all_reduce)
    monkeypatch.setattr(batches, "PASS_COST", cost)
    assert batches.length_to_share(MASK.long(), MASK, arguments()) == length


@pytest.mark.parametrize(("of_another", "expected"), [(230, 2), (250, 1)])
def test_all_processes_make_passes_of_one_group_or_none_does(of_another, expected, monkeypatch):
    """Else one would have passes too large to be computed without sharing. Here sharing saves 240 tokens."""
    monkeypatch.setattr(batches, "all_reduce", lambda value: value + of_another)
    monkeypatch.setattr(batches, "PASS_COST", 0)
    assert num_passes() == expected


def test_what_rows_share_ends_before_the_first_response_token():
    """Both responses begin with token 7; their prompts are 5, 6. A row alone shares all of its prompt."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    mask = torch.tensor([[False, False, True, True]] * 2)
    assert batches.shared_prompt_length(ids, mask) == 2
    assert batches.shared_prompt_length(torch.tensor([[5, 6, 7, 8], [4, 6, 7, 8]]), mask) == 0
    assert batches.shared_prompt_length(ids[:1], mask[:1] & False) == 3  # the last position is never shared


def test_groups_with_one_prompt_share_it(monkeypatch):
    """In a game, several groups have one prompt: then one pass has all their rows, and their prompt once."""
    monkeypatch.setattr(batches, "PASS_COST", 0)
    prompts = [[5, 6, 7, 8, 9, 5], [5, 6, 7, 8, 9, 4], [5, 6, 7, 8, 9, 5]]  # of three groups of two
    ids = torch.tensor([prompt + [last] * 2 for prompt in prompts for last in (1, 2)])
    mask = torch.tensor([[False] * 6 + [True] * 2] * 6)
    args = arguments(responses_per_prompt=2, micro_batch_tokens=100)
    passes = batches.plan_passes(ids, mask, batches.used_lengths(mask), args)
    assert [rows.tolist() for rows in passes] == [[0, 1, 4, 5], [2, 3]]
    # A prompt that other rows continue is not theirs, and a group that shares nothing stays alone.
    ids[4:, 0] = torch.tensor([1, 2])
    assert batches.groups_with_one_prompt(ids, mask, args).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("late", [False, True])
def test_sharing_prompts_changes_neither_log_probabilities_nor_gradients(tiny_model, batch, late, monkeypatch):
    """Also where the mask begins late, as in a stage of Lopti: rows still share no more than what is the same."""
    monkeypatch.setattr(batches, "PASS_COST", 0)
    if late:
        batch = batch | {"mask": batch["mask"] & (batch["old_logp"] <= math.log(0.5))}
        begins = batch["mask"].int().argmax(1).view(-1, GROUP)
        assert (begins > torch.tensor(lengths_of(batch)).view(-1, GROUP).amin(1, keepdim=True) - 15).any()
    args = arguments(model=str(tiny_model))
    plain = dataclasses.replace(args, gradient_checkpointing=True)
    lengths = [batches.length_to_share(batch["ids"][:2], batch["mask"][:2], one) for one in (args, plain)]
    assert lengths[0] > 0 == lengths[1]
    assert_equal_but_for_rounding(numbers_of(batch, args), numbers_of(batch, plain))


def test_a_shared_prompt_goes_through_the_model_once(tiny_model, batch, monkeypatch):
    """Counted in the embedded tokens that reach the first layer."""
    monkeypatch.setattr(batches, "PASS_COST", 0)
    policy, seen = grpo.load_policy(arguments(model=str(tiny_model)), trained=True), []
    policy.lm.model.layers[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[:2].numel()))
    rows = slice(0, GROUP)
    mask = batch["mask"][rows]
    prompt, length = int(mask[0].int().argmax()), max(lengths_of(batch)[rows])
    policy(batch["ids"][rows, :length], mask[:, :length], 1.0)
    assert seen == [prompt, GROUP * (length - prompt)]


needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs one on a CPU")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_a_compiler])])
@pytest.mark.slow
def test_compiled_layers_and_a_compiled_head_compute_the_same(tiny_model, batch, backend, checkpointing, monkeypatch):
    """Log-probabilities and gradient, over passes of different lengths. All layers share few programs.

    aot_eager captures the programs as inductor does, and calls no C++ compiler.
    """
    compile_with(backend, monkeypatch)
    torch.compiler.config.fail_on_recompile_limit_hit = True  # it can be set, and not be deleted as monkeypatch does
    args = arguments(model=str(tiny_model), micro_batch_tokens=300, gradient_checkpointing=checkpointing)
    plain = numbers_of(batch, args)
    torch._dynamo.utils.counters.clear()
    assert_equal_but_for_rounding(numbers_of(batch, dataclasses.replace(args, compile=True)), plain)
    n_programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Of a layer and of the head: with and without gradient, each at most once again for a dimension of size 1.
    assert 2 <= n_programs <= 8
    assert torch.compiler.config.recompile_limit >= 2 * n_programs  # models.py leaves room
    torch._dynamo.reset()


def test_only_what_the_mask_needs_goes_through_the_model():
    """A sequence ends with its last token in the mask, and one that has none is left out."""
    mask = torch.zeros(4, 10, dtype=torch.bool)
    mask[0, 2:4] = mask[2, 1] = mask[2, 7] = mask[3, 3:5] = True
    batch = {"ids": torch.arange(40).view(4, 10), "mask": mask}
    assert shapes(batch, 10) == [([2], 8), ([3, 0], 5)]
    assert shapes(batch | {"mask": mask & False}, 10) == [([0], 2)]  # one pass remains, for gradients of zero


def test_responses_of_advantage_0_go_through_no_pass_without_a_kl_term(batch):
    batch, idle = batch | {"advantages": batch["advantages"].clone()}, [0, 1, 2, 7, 20]
    batch["advantages"][idle] = 0
    policy, seen = torch.nn.Embedding(1, 1), []
    policy.forward = lambda ids, mask, temperature: seen.append(mask.sum()) or (policy.weight * mask, None)
    for kl_coef, mask in ((0.0, batch["mask"] & (batch["advantages"] != 0)), (0.1, batch["mask"])):
        gradients(grpo, batch, arguments(kl_coef=kl_coef), policy)
        assert sum(seen) == mask.sum()
        seen.clear()


def test_a_process_with_fewer_passes_repeats_one_with_an_empty_mask(tiny_model, batch, monkeypatch):
    """As if another process made three passes more: what they give is zero, and no row's numbers change."""
    args = arguments(model=str(tiny_model), micro_batch_tokens=300)
    policy = grpo.load_policy(args, trained=True)
    expected = grpo.log_probs(policy, batch, args)
    n_passes = len(list(grpo.micro_batches(batch, args)))
    of_all = torch.distributed.ReduceOp.MAX
    monkeypatch.setattr(batches, "all_reduce", lambda value, op=None: value + 3 * (op == of_all))
    repeated = [micro for _, micro in grpo.micro_batches(batch, args)][n_passes:]
    assert len(repeated) == 3 and not any(micro["mask"].any() for micro in repeated)
    for found, before in zip(grpo.log_probs(policy, batch, args), expected):
        assert torch.equal(found, before)


def test_the_host_asks_the_device_for_no_number_while_it_makes_micro_batches(batch, monkeypatch):
    """A meta tensor has no numbers: whoever asks it for one gets an error."""
    for module in (batches, distributed):
        monkeypatch.setattr(module, "DEVICE", torch.device("meta"))
    args = arguments(micro_batch_tokens=300)
    for rows, micro in grpo.micro_batches(batch, args):
        assert micro["ids"].is_meta and micro["mask"].is_meta
        ids, mask = (batch[name][rows, : micro["ids"].shape[1]] for name in ("ids", "mask"))
        shared = batches.length_to_share(micro["ids"], micro["mask"], args)
        assert shared == batches.length_to_share(ids, mask, args)
    assert distributed.all_reduce(torch.tensor(3)) == 3


class FloatsRead(TorchDispatchMode):
    """Counts the float32 numbers that Python reads from tensors: each waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_read = function is torch.ops.aten._local_scalar_dense.default
        self.count += is_read and args[0].dtype == torch.float32
        return function(*args, **(kwargs or {}))


def test_an_update_reads_the_gradients_norm_and_no_loss_of_a_micro_batch(tiny_model, batch):
    args = arguments(model=str(tiny_model), micro_batch_tokens=300, updates_per_step=2)
    policy = grpo.load_policy(args, trained=True)
    with FloatsRead() as read:
        gradients(grpo, batch, args, policy)
    assert read.count == 2


def test_the_gradient_is_eq_2_on_transformers_own_log_probabilities(tiny_model, batch):
    """−1/n Σ ρ·A·∇log π, n all response tokens; nothing of the trainer is used on the other side.

    Without clip and KL term, whose weights are in test_token_weights.py.
    """
    args = arguments(model=str(tiny_model), micro_batch_tokens=300, clip_low=1.0, clip_high=1e9, kl_coef=0.0)
    (one,), metrics = gradients(grpo, batch, args)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for i, length in enumerate(lengths_of(batch)):
        ids, mask, old_logp, advantages = (batch[key][i, :length] for key in ("ids", "mask", "old_logp", "advantages"))
        _, logp = plain_log_probs(lm, ids, mask, args.temperature)
        surrogate = (logp - old_logp[mask]).exp() * advantages[mask]
        (-surrogate.sum() / batch["mask"].sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in lm.parameters()])
    assert distance(one, expected) < 1e-5
    assert metrics["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)


@pytest.mark.parametrize("stages", ["", "low,high", "high,low", "low", "high"])
def test_an_update_goes_through_its_mini_batches_and_lopti_for_each_stage(batch, stages):
    """grpo.py: the first half, the second. With stages low, low, high, high (Algorithm 1, lines 11–19); and the
    ablations of fig. 6."""
    trainer, settings = (grpo_ar_lopti, {"lopti_stages": stages}) if stages else (grpo, {})
    args = arguments(trainer, updates_per_step=2, micro_batch_tokens=300, **settings)
    policy = updates.TablePolicy(batch["old_logp"].flatten(), batch["entropy"].flatten())
    recorder = updates.Recorder(policy)
    metrics = trainer.update(policy, recorder, {**batch, "ids": batch["token"]}, 1, args)
    found = [gradient.nonzero()[:, 0].tolist() for [gradient] in recorder.gradients]  # the tokens with a gradient
    halves = slice(0, N // 2), slice(N // 2, None)
    low, high = ([tokens_of(batch, half, is_low) for half in halves] for is_low in (True, False))
    expected = {"low": low, "high": high, "": [sorted(a + b) for a, b in zip(low, high)]}
    assert found == [tokens for stage in stages.split(",") for tokens in expected[stage]]
    assert all(found) and metrics["optimizer_steps"] == len(found)
    if stages:
        assert metrics["low_rate"] == pytest.approx(sum(map(len, low)) / batch["mask"].sum().item(), abs=1e-12)


@pytest.mark.parametrize("eta", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 0.0, 1.0])
def test_a_probability_of_exactly_eta_is_low(eta):
    """As Algorithm 1 has it; the next number above is high. In the float32 in which the trainer keeps log π_old.

    Also for log-probabilities so low that their exponential is 0 in float32, and for probability 1.
    """
    logp, is_low = torch.tensor([-200.0, -1e-7, 0.0]), [eta > 0, eta == 1, eta == 1]
    if 0 < eta < 1:
        at = torch.tensor([math.log(eta)])
        logp, is_low = torch.cat([logp, at, torch.nextafter(at, torch.ones(1))]), [*is_low, True, False]
    batch = {"old_logp": logp, "mask": torch.ones(logp.shape, dtype=torch.bool)}
    assert grpo_ar_lopti.in_stage("low", batch, eta).tolist() == is_low
    assert grpo_ar_lopti.in_stage("high", batch, eta).tolist() == [not low for low in is_low]


def test_a_stage_without_tokens_makes_no_optimizer_step(tiny_model, batch):
    """Not even one of momentum and weight decay: AdamW's state and the weights stay as they were."""
    args = arguments(grpo_ar_lopti, model=str(tiny_model), eta=0.0, lopti_stages="low")
    policy = grpo_ar_lopti.load_policy(args, trained=True)
    optimizer = adamw(policy)
    grpo_ar_lopti.update(policy, optimizer, batch, 1, dataclasses.replace(args, lopti_stages="high"))
    before = weights(policy), state_of(optimizer)
    metrics = grpo_ar_lopti.update(policy, optimizer, batch, 2, args)
    assert torch.equal(weights(policy), before[0]) and torch.equal(state_of(optimizer), before[1])
    assert metrics == {"clip_rate": 0, "grad_norm": 0, "optimizer_steps": 0, "low_rate": 0}


def test_a_batch_by_hand():
    """Responses of 2, 1 and 3 tokens to prompts of 2, 2 and 1; their log-probabilities are the sampler's."""

    def response(ids, logp):
        return SimpleNamespace(token_ids=ids, logprobs=SimpleNamespace(logprobs=logp))

    problems = [{"prompt_ids": [7, 8]}, {"prompt_ids": [7, 8]}, {"prompt_ids": [9]}]
    responses = [response([4, 1], [-0.5, -1.0]), response([1], [-2.0]), response([5, 6, 1], [-0.25, 0.0, -3.0])]
    batch = grpo.to_batch(problems, responses)
    assert batch["ids"].tolist() == [[7, 8, 4, 1], [7, 8, 1, 0], [9, 5, 6, 1]]
    assert batch["mask"].int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch["sampler_logp"].tolist() == [[0, 0, -0.5, -1], [0, 0, -2, 0], [0, -0.25, 0, -3]]
    assert batch.keys() == {"ids", "mask", "sampler_logp"} and batch["mask"].dtype == torch.bool


@pytest.mark.parametrize(("given", "expected"), [(1, [1]), ([1, 300], [1, 300]), (None, [])])
def test_the_tokens_that_end_a_response(given, expected, tmp_path):
    cases = {"config": (given, "no file"), "silent": (given, None), "both": (given and 7, given)}
    for name, (of_config, of_generation) in cases.items():
        LlamaConfig(eos_token_id=of_config).save_pretrained(tmp_path / name)
        if of_generation != "no file":
            GenerationConfig(eos_token_id=of_generation).save_pretrained(tmp_path / name)
        assert sampler.end_tokens(str(tmp_path / name)) == expected


def test_what_vllm_is_asked_for():
    """Each prompt once for its two responses, with a seed of its own; before it, vLLM forgets what it has computed."""
    asked = []
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)

    def generate(prompts, params, use_tqdm):
        asked.extend((prompt["prompt_token_ids"], of_prompt) for prompt, of_prompt in zip(prompts, params))
        return [SimpleNamespace(outputs=[answer() for _ in range(of_prompt.n)]) for of_prompt in params]

    llm = SimpleNamespace(reset_prefix_cache=lambda: not asked.append("reset"), generate=generate)
    llm.get_tokenizer = lambda: tokenizer
    args = arguments(model=str(KK_TINY), seed=3, responses_per_prompt=2, max_response_tokens=7, temperature=0.5)
    problems = [{"id": i, "prompt_ids": [i, 9]} for i in (0, 0, 4, 4)]
    batch, responses = grpo.sample(llm, problems, 11, args)
    assert asked.pop(0) == "reset" and [ids for ids, _ in asked] == [[0, 9], [4, 9]]
    for i, (_, params) in zip((0, 4), asked):
        assert params.seed == sampler.request_seed(3, 11, i)
        assert (params.n, params.max_tokens, params.temperature, params.logprobs) == (2, 7, 0.5, 0)
        assert params.stop_token_ids == sampler.end_tokens(str(KK_TINY)) == [635]
    assert len(responses) == len(batch["ids"]) == 4 and [response.text for response in responses] == [""] * 4


def test_an_evaluation_is_of_this_processs_part_and_a_mean_over_the_categories(monkeypatch):
    """The second of two processes has problems 1, 3, 5 and 7: of a one of three is right, of b the only one."""
    asked, written = {}, []

    def generate(llm, problems, when, args, **choices):
        asked.update(choices, when=when)
        return [answer() for _ in problems]

    monkeypatch.setattr(batches, "WORLD_SIZE", 2)
    monkeypatch.setattr(batches, "RANK", 1)
    monkeypatch.setattr(grpo, "generate", generate)
    monkeypatch.setattr(grpo, "score", lambda task, responses, part: [{"correct": p["id"] in (3, 7)} for p in part])
    problems = [{"id": i, "category": category} for i, category in enumerate("bababaab")]
    run = SimpleNamespace(write_tests=lambda *given: written.append(given))
    found = grpo.evaluate(None, None, problems, 6, run, arguments(eval_temperature=0.25))
    expected = {"eval/accuracy": 2 / 3, "eval/accuracy_a": 1 / 3, "eval/accuracy_b": 1}
    assert found == pytest.approx(expected) and asked == {"when": "test", "n": 1, "temperature": 0.25}
    ((step, part, responses, scores),) = written
    assert step == 6 and [p["id"] for p in part] == [1, 3, 5, 7] and len(responses) == len(scores) == 4


def test_all_weights_go_to_the_sampler_under_all_their_names(monkeypatch):
    """kk_tiny's embedding and head are one tensor, which has two names."""
    sent = {}
    monkeypatch.setattr(sampler, "load_weights", lambda llm, named: sent.update(named))
    args = arguments(model=str(KK_TINY), dtype="bfloat16")
    policy = grpo.load_policy(args, trained=True)
    grpo.sync_weights(policy, None, args)
    assert {"lm_head.weight", "model.embed_tokens.weight"} < sent.keys() == policy.lm.state_dict().keys()
    for name, weight in policy.lm.state_dict().items():
        assert sent[name].dtype == torch.bfloat16 and torch.equal(sent[name], weight.bfloat16())


def test_a_step_of_main_is_in_order(batch, monkeypatch):
    """Of every script: π_old and π_ref before the update, and after it the weights go to the sampler."""
    for script in updates.ALGORITHMS:
        if script == "grpo_async":  # its run is grpo_stale.py's (test_async.py)
            continue
        trainer, calls, values = importlib.import_module(script), [], []
        args = arguments(trainer)
        if script == "ppo":
            monkeypatch.setattr(trainer, "compute_values", lambda *_: torch.zeros(batch["mask"].shape))
            monkeypatch.setattr(trainer, "update_values", lambda *_, seen=values: seen.append("values") or {})
        step_of_main(trainer, args, batch, [float(i % 3) for i in range(len(batch["ids"]))], monkeypatch, calls)
        critic = " with critic" if script == "ppo" else ""
        has_second_model = args.kl_coef or script == "opd"
        reference = ["reference"] if has_second_model else []
        before = [] if script in ("reinforce", "maxrl") else ["policy"]  # these two take it from update
        checks = ["check"] * (1 + (script == "opd"))  # that of the teacher
        start = [
            "load" + critic,
            *checks,
            "sync",
            "open",
            "evaluate",
            "begin_step" + critic,
            "sample",
            *before,
            *reference,
        ]
        test = ["evaluate"]
        if script == "grpo_stale":  # evaluates the newest weights
            test = ["check_sync", "sync", "evaluate", "sync"]
        assert calls == [
            *start, "update", "write_tokens", "sync", *test, "write_samples", "save" + critic, "close", "end"
        ], script  # fmt: skip
        assert values == ["values"] * (script == "ppo")


def epochs_of(n_problems, count, n_epochs, seed):
    """The places taken in each of the first epochs."""
    epochs, n_used = [], 0
    while True:
        places, n_used = batches.next_prompts(n_problems, n_used, count, seed)
        assert len(places) == count
        epoch = (n_used - 1) // n_problems
        if epoch == n_epochs:
            return epochs
        epochs += [[] for _ in range(epoch + 1 - len(epochs))]
        epochs[epoch] += places


def test_every_epoch_is_a_permutation_of_its_own():
    epochs = epochs_of(12, 4, 5, seed=3)
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 5
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert epochs == epochs_of(12, 4, 5, seed=3) != epochs_of(12, 4, 5, seed=4)


def test_the_short_rest_of_an_epoch_is_left_out():
    """11 problems, 4 a step: two steps an epoch, 3 problems left out; n_used says where in the data a run stands."""
    assert [len(set(epoch)) for epoch in epochs_of(11, 4, 3, seed=0)] == [8, 8, 8]
    path = [0]
    for _ in range(5):
        path.append(batches.next_prompts(11, path[-1], 4, 0)[1])
    assert path == [0, 4, 8, 15, 19, 26]


def test_each_problem_comes_g_times_in_a_row_and_the_processes_share_them(monkeypatch):
    """Two processes take turns: the first has the first, third … of the step's prompts."""
    train = [{"id": i} for i in range(11)]
    args = arguments(prompts_per_step=4, responses_per_prompt=3, seed=5)
    places, n_used = batches.next_prompts(11, 4, 4, 5)
    problems, n_used_too = batches.next_problems(train, 4, args)
    assert [problem["id"] for problem in problems] == [place for place in places for _ in range(3)]
    assert n_used_too == n_used
    monkeypatch.setattr(batches, "WORLD_SIZE", 2)
    for rank in range(2):
        monkeypatch.setattr(batches, "RANK", rank)
        problems, n_used_too = batches.next_problems(train, 4, args)
        assert [problem["id"] for problem in problems] == [place for place in places[rank::2] for _ in range(3)]
        assert n_used_too == n_used
        assert batches.own_part(train) == train[rank::2]


def test_request_seeds_are_stable_and_differ_by_seed_step_and_prompt():
    """`printf 0/1/7 | sha256sum` begins 6d84fbeec65f."""
    assert sampler.request_seed(0, 1, 7) == 0x6D84FBEEC65F
    whens = [*range(19), "test"]
    seeds = {sampler.request_seed(s, when, p) for s in range(5) for when in whens for p in range(20)}
    assert len(seeds) == 2000 and max(seeds) < 2**48  # room for vLLM's + j below its 64 bits
    assert sampler.request_seed(1, 11, 1) != sampler.request_seed(11, 1, 1)
    assert sampler.request_seed(0, 1, 11) != sampler.request_seed(0, 11, 1)


NOT_TOGETHER = {
    "grpo_ar_lopti": ["--lopti_stages", "low", "--eta", "0"],
    "reinforce_pp_ar_lopti": ["--lopti_stages", "high", "--eta", "1"],
    "dapo_ar_lopti": ["--lopti_stages", "low", "--eta", "0"],
    "dapo": ["--max_response_tokens", "8", "--overlong_buffer", "9"],
    "grpo_tis": ["--correction", "icepop", "--correction_min", "3"],
    "grpo_stale": ["--mask", "geometric", "--mask_low", "1.5"],
    "grpo_async": ["--correction", "icepop", "--correction_min", "3"],
    "grpo": ["--lr", "1", "--learning_rate", "1e-3"],  # what other libraries call it
}


@pytest.mark.parametrize("script", NOT_TOGETHER)
def test_settings_that_do_not_fit_each_other_end_main_in_one_line(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *NOT_TOGETHER[script], "--dry_run"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(script).main()
    told = capsys.readouterr().err
    assert end.value.code == 2 and told.startswith("error: --") and told.count("\n") == 1
    assert NOT_TOGETHER[script][-2] in told


def work_over_the_ideal(parts, args):
    """Tokens that processes compute or wait for, over those of equal shares without padding. parts: per process."""
    costs = []  # per process, of each of its passes
    num_tokens = 0
    for part in parts:
        mask = batches.without_idle(part, args)["mask"]
        num_tokens += int(mask.sum())
        lengths = batches.used_lengths(mask)
        planned = batches.plan_passes(part["ids"], part["mask"], lengths, args)
        costs.append([len(rows) * int(lengths[rows].max()) for rows in planned])
    waited = sum(max(at) for at in itertools.zip_longest(*costs, fillvalue=0))  # a pass lasts until the last one ends
    return waited * len(parts) / num_tokens


@pytest.mark.parametrize(
    ("n_processes", "before", "after"), [(2, 1.1, 1.1), (4, 1.25, 1.2), (8, 1.4, 1.35), (16, 1.6, 1.4)]
)
def test_processes_that_swap_rows_wait_less_for_each_other(n_processes, before, after, monkeypatch):
    """A mini-batch of 320 responses with lognormal lengths, of which 64 have an advantage of 0 and need no pass."""
    args = arguments(gradient_checkpointing=True, micro_batch_tokens=5120, kl_coef=0.0)
    rng = torch.Generator().manual_seed(0)
    lengths = (600 * torch.randn(320, generator=rng).mul(0.7).exp()).clamp(20, 4096).long()
    rows = torch.arange(320)
    mask = torch.arange(4096) < lengths[:, None]
    every = {"ids": rows[:, None] * mask, "mask": mask, "advantages": (rows >= 64)[:, None] * mask}
    parts = [{name: value[rows % n_processes == rank] for name, value in every.items()} for rank in range(n_processes)]
    sent, swapped = [], []
    for module in (batches, batches):
        monkeypatch.setattr(module, "WORLD_SIZE", n_processes)
    monkeypatch.setattr(batches, "gather", lambda mine: sent.extend(mine))
    for part in parts:
        with contextlib.suppress(TypeError):  # nothing comes back while the others have not sent their rows
            batches.balance(part, args)
    monkeypatch.setattr(batches, "gather", lambda mine: sent)
    for rank, part in enumerate(parts):
        monkeypatch.setattr(batches, "RANK", rank)
        swapped.append(batches.balance(part, args))
    assert sum(len(part["ids"]) for part in swapped) == 320
    found = {tuple(ids[its].tolist()) for part in swapped for ids, its in zip(part["ids"], part["mask"])}
    assert found == {tuple(ids[its].tolist()) for ids, its in zip(every["ids"], mask)}  # each row, once, and whole
    assert work_over_the_ideal(parts, args) > before and work_over_the_ideal(swapped, args) < after

"""What must not change a gradient or an advantage: micro-batches, padding, what lies outside the mask, and processes.

Of every script whose update is its own, of gdpo.py, whose advantages depend on the whole step, and of
grpo_multi_turn.py, whose mask has gaps. What another one shares with its parent is the same to the letter
(test_family.py).
"""

import dataclasses
import importlib
import inspect
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_together, step_of_main, timeless
from helpers import (
    GROUP,
    N,
    Recorder,
    adamw,
    arguments,
    distance,
    gradients,
    lengths_of,
    loss_batch,
    make_batch,
    rows_of,
    share,
    state_of,
    tokens_of,
    weights,
    with_gaps,
)
from transformers import AutoTokenizer

import gdpo
import grpo
import grpo_multi_turn
import ppo
from runtime import checkpoints, float16, passes, processes
from tools.maintain import updates

# Settings at which some tokens of the batch are cut off, and others not.
CASES = {  # the script is the first word
    "grpo": {}, "grpo_ar_lopti": {}, "grpo_kl": {}, "gdpo": {}, "grpo_multi_turn": {},
    "reinforce": {}, "rloo": {}, "opd": {}, "dr_grpo": {}, "ppo": {},
    "reinforce_pp": {}, "entropy_top": {}, "archer": {},
    "acpo": {"n_bins": 20},
    "gspo": {"clip_low": 0.05, "clip_high": 0.03},
    "cispo": {"clip_low": 0.05, "clip_high": 0.03},
    "dppo tv": {"delta": 0.02},
    "dppo kl": {"divergence": "kl", "delta": 0.002},
    "sapo": {"tau_positive": 5.0, "tau_negative": 7.0},
    "grpo_tis tis": {"correction_max": 1.1},
    "grpo_tis icepop": {"correction": "icepop", "correction_max": 1.1, "correction_min": 0.9},
    "grpo_tis mask": {"mask": "sequence", "mask_delta": 0.0},
    "grpo_stale ppo": {"correction": "ppo", "clip_low": 0.005, "clip_high": 0.005},
}  # fmt: skip


def script_of(case):
    return importlib.import_module(case.split()[0])


WITHOUT_CLIP = ("reinforce", "rloo", "opd")
each_case = pytest.mark.parametrize("case", CASES)
# The first script with each of the family's ways to make one update.
UPDATES = {inspect.getsource(script_of(case).update_once): case for case in reversed(CASES)}
each_update = pytest.mark.parametrize("case", list(reversed(UPDATES.values())))


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    """With rewards, of which the second group's are all equal, with values, and with a teacher."""
    batch = make_batch(tiny_model)
    rng = torch.Generator().manual_seed(2)
    rewards = torch.tensor([-3, -0.5, -1, 3])[torch.randint(4, (N,), generator=rng)]
    rewards[GROUP : 2 * GROUP] = -0.5
    values = torch.randn(batch["mask"].shape, generator=rng) * batch["mask"]
    return batch | {"rewards": rewards[:, None], "values": values, "teacher_logp": batch["ref_logp"].clone()}


def args_of(case, model, **changes):
    settings = CASES[case]
    return arguments(script_of(case), model=str(model), max_response_tokens=50, **settings | changes)


def num_steps(trainer, args):
    """How many optimizer steps an update makes."""
    return args.updates_per_step * (2 if trainer.__name__ == "grpo_ar_lopti" else 1)


def rewards_of(batch, trainer):
    """As main makes them: [N], and one part, [N, 1], for gdpo.py."""
    return batch["rewards"] if trainer is gdpo else batch["rewards"][:, 0]


def with_advantages(batch, trainer, args):
    """As main hands the batch to update. Conversations have replies between their turns."""
    if trainer is grpo_multi_turn:
        batch = batch | {"mask": with_gaps(batch["mask"])}
    return batch | {"advantages": trainer.compute_advantages(rewards_of(batch, trainer), batch, args)}


@pytest.mark.parametrize(("case", "kl_coef"), [*((case, 0.0) for case in CASES), ("dr_grpo", 0.1), ("sapo", 0.1)])
def test_the_gradient_does_not_move_with_the_micro_batches(tiny_model, batch, case, kl_coef):
    """Of two updates, over all parameters; the metrics are the same, and the batch is as it was."""
    trainer = script_of(case)
    args = args_of(case, tiny_model, updates_per_step=2, kl_coef=kl_coef)
    batch = with_advantages(batch, trainer, args)
    before = {key: value.clone() for key, value in batch.items()}
    policy = trainer.load_policy(args, trained=True)
    whole, metrics = gradients(trainer, batch, args, policy)
    assert len(whole) == metrics["optimizer_steps"] == num_steps(trainer, args)
    assert case in WITHOUT_CLIP or 0.01 < metrics["clip_rate"] < 0.95
    for budget in (300, 1):
        steps, others = gradients(trainer, batch, dataclasses.replace(args, micro_batch_tokens=budget), policy)
        assert all(distance(a, b) < 1e-5 for a, b in zip(steps, whole, strict=True))
        # The second update's σ is of ratios after a step of AdamW, which makes 1.3e-5 of rounding with AVX2 alone.
        assert others == pytest.approx(metrics, rel=1e-4, abs=2e-6)
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], before[key]) for key in before)


@each_case
def test_padding_and_what_lies_outside_the_mask_change_nothing(tiny_model, batch, case):
    """Seven more columns, and in all places that are no response token other numbers, in the padding other tokens."""
    trainer = script_of(case)
    args = args_of(case, tiny_model, micro_batch_tokens=300)
    policy = trainer.load_policy(args, trained=True)
    batch = with_advantages(batch, trainer, args)
    rng = torch.Generator().manual_seed(5)
    mask = torch.nn.functional.pad(batch["mask"], (0, 7))
    padding = torch.arange(mask.shape[1]) >= torch.tensor(lengths_of(batch))[:, None]
    other = {"mask": mask}
    for key, value in batch.items():
        if key not in ("mask", "rewards"):
            other[key] = torch.nn.functional.pad(value, (0, 7))
            garbage = torch.randint(2, 600, mask.shape, generator=rng)
            place = padding if key == "ids" else ~mask & (key != "values")  # which are zero there
            other[key] = torch.where(place, garbage.to(value.dtype), other[key])
    assert not torch.equal(other["ids"][:, :-7], batch["ids"])
    advantages = trainer.compute_advantages(rewards_of(batch, trainer), other, args)
    torch.testing.assert_close(advantages[:, :-7], batch["advantages"], rtol=1e-6, atol=1e-6)
    assert not advantages[~mask].any()
    steps, metrics = gradients(trainer, batch, args, policy)
    padded, others = gradients(trainer, batch | other, args, policy)
    assert all(distance(a, b) < 1e-6 for a, b in zip(padded, steps, strict=True))
    assert others == pytest.approx(metrics, rel=1e-6)


@each_case
def test_without_tokens_the_loss_is_zero_and_without_gradient(case):
    """Such is the pass that a process repeats because others have more: with an empty mask."""
    trainer, settings = script_of(case), CASES[case]
    logp, rest = loss_batch([(0.1, 0.3, 1), (0, 0, 2)])
    rest |= {"mask": rest["mask"] & False, "sampler_logp": rest["old_logp"], "reasoning": rest["mask"]}
    rest |= {"weight": rest["old_logp"], "clip_range": rest["old_logp"]}
    divisor = () if case == "acpo" else (5,)  # there it is in the weight
    result = trainer.policy_loss(logp, rest, *divisor, arguments(trainer, **settings))
    loss, clipped = (result, torch.tensor(0)) if case in WITHOUT_CLIP else result
    loss.backward()
    assert loss.item() == 0 and clipped.item() == 0 and not logp.grad.any()


@pytest.mark.parametrize("case", [case for case in CASES if case != "entropy_top"])  # it leaves out others, too
def test_responses_of_advantage_0_go_through_no_pass_and_change_nothing(tiny_model, batch, case):
    """Without a KL term; with one of weight 10⁻¹², for which they go too, the gradient is the same."""
    trainer = script_of(case)
    args = args_of(case, tiny_model, micro_batch_tokens=300, kl_coef=0.0)
    batch = batch | {"advantages": batch["advantages"].clone()}
    batch["advantages"][[0, 1, 2, 7, 20]] = 0
    policy, seen = trainer.load_policy(args, trained=True), []

    def note(_, inputs):  # reinforce.py makes a pass without gradient for its metrics
        if torch.is_grad_enabled():
            seen.extend(inputs[0].tolist())

    policy.register_forward_pre_hook(note)
    steps, metrics = gradients(trainer, batch, args, policy)
    sent = {i for i, row in enumerate(batch["ids"].tolist()) for ids in seen if row[: len(ids)] == ids}
    assert sent == set(range(N)) - {0, 1, 2, 7, 20}
    if case not in ("reinforce", "opd"):
        all_steps, others = gradients(trainer, batch, dataclasses.replace(args, kl_coef=1e-12), policy)
        assert all(distance(a, b) < 1e-5 for a, b in zip(steps, all_steps, strict=True))
        assert others.get("clip_rate") == metrics.get("clip_rate")  # a share of all tokens as before


def test_if_no_token_has_an_advantage_adamw_still_makes_its_step(tiny_model, batch):
    """Without a KL term its gradient is 0, as if the tokens went through passes: the weights decay."""
    args = args_of("grpo", tiny_model, kl_coef=0.0, updates_per_step=1)
    policy = grpo.load_policy(args, trained=True)
    before = policy.lm.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    metrics = grpo.update(policy, optimizer, batch | {"advantages": 0 * batch["advantages"]}, 1, args)
    assert metrics["grad_norm"] == 0 and metrics["optimizer_steps"] == 1
    torch.testing.assert_close(policy.lm.lm_head.weight, before * (1 - 1e-4), rtol=1e-6, atol=0)


# A script whose own part is turned off: its settings, those of grpo.py, what its metrics have besides; --dtype and
# --lora_rank of both.
TURNED_OFF = {
    "grpo_ar_lopti": ({"alpha": 0.0, "eta": 0.0}, {}, {"low_rate": 0}, "float32", 0),
    "grpo_ar_lopti LoRA": ({"alpha": 0.0, "eta": 0.0}, {}, {"low_rate": 0}, "bfloat16", 4),
    "grpo_tis tis": ({"correction": "tis"}, {}, {"mask_rate": 0}, "float32", 0),
    "grpo_tis icepop": ({"correction": "icepop"}, {}, {"mask_rate": 0}, "bfloat16", 0),
    "entropy_top": ({"entropy_top": 1.0}, {}, {"top_rate": 1}, "float32", 0),
    "archer": ({"entropy_quantile": 1.0}, {"clip_high": 0.2}, {"reasoning_rate": 0}, "float32", 0),
}


def steps_of(trainer, batch, **settings):
    """The weights before the first step, and weights and metrics after each of two, of two AdamW updates each."""
    args = arguments(trainer, updates_per_step=2, micro_batch_tokens=300, max_grad_norm=0.1, **settings)
    policy = trainer.load_policy(args, trained=True)
    optimizer, start, path = adamw(policy), weights(policy), []
    for step in range(2):
        rewards = torch.randn(N, generator=torch.Generator().manual_seed(step))
        given = updates.with_advantages(trainer.__name__, batch, rewards, None, args)
        metrics = trainer.update(policy, optimizer, given, step, args)
        path.append((weights(policy), metrics))
    return start, path


@pytest.mark.parametrize("case", TURNED_OFF)
def test_a_script_whose_own_part_is_turned_off_is_grpo_to_the_last_bit(tiny_model, batch, case):
    """Every weight and metric. grpo_tis.py has a sampler that is the trainer."""
    off, of_grpo, own_metrics, dtype, lora_rank = TURNED_OFF[case]
    batch = batch | {"sampler_logp": batch["old_logp"]}
    common = {"model": str(tiny_model), "dtype": dtype, "lora_rank": lora_rank}
    start, expected = steps_of(grpo, batch, **common, **of_grpo)
    assert not torch.equal(expected[0][0], start) and not torch.equal(expected[1][0], expected[0][0])
    _, found = steps_of(script_of(case), batch, **common, **off)
    for (its_weights, its_metrics), (grpos_weights, grpos_metrics) in zip(found, expected, strict=True):
        assert torch.equal(its_weights, grpos_weights)
        assert (grpos_metrics | own_metrics).items() <= its_metrics.items()


@each_update
def test_gradients_are_scaled_down_to_max_grad_norm_and_the_norm_before_is_told(tiny_model, batch, case):
    trainer = script_of(case)
    args = args_of(case, tiny_model, micro_batch_tokens=300, updates_per_step=2)
    policy = trainer.load_policy(args, trained=True)
    free, metrics = gradients(trainer, batch, args, policy)
    capped, capped_metrics = gradients(trainer, batch, dataclasses.replace(args, max_grad_norm=1e-3), policy)
    norms = [step.double().norm().item() for step in free]
    for a, b, norm in zip(capped, free, norms, strict=True):
        torch.testing.assert_close(a, b * (1e-3 / norm), rtol=2e-3, atol=0)
    assert capped_metrics == metrics and metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)


@each_update
def test_a_loss_that_is_not_finite_ends_the_program_before_the_weights_are_touched(tiny_model, batch, case, tmp_path):
    trainer = script_of(case)
    args = args_of(case, tiny_model, run_dir=str(tmp_path), micro_batch_tokens=300)
    policy = trainer.load_policy(args, trained=True)
    optimizer = adamw(policy)
    trainer.update(policy, optimizer, dict(batch), 1, args)
    before, moments = weights(policy), state_of(optimizer)
    broken = batch | {"advantages": batch["advantages"].clone()}
    broken["advantages"][batch["mask"] & (torch.arange(N) == 7)[:, None]] = math.nan
    with pytest.raises(SystemExit) as end:
        trainer.update(policy, optimizer, broken, 12, args)
    path = tmp_path / "non_finite_step_000012_process_0.pt"
    assert str(path) in end.value.code and "nan" in end.value.code and "step 12" in end.value.code
    assert torch.equal(weights(policy), before) and torch.equal(state_of(optimizer), moments)
    saved = torch.load(path)
    assert saved["args"] == dataclasses.asdict(args) and saved["batch"]["advantages"].isnan().any()


@each_update
def test_float16_has_float32s_gradient_and_skips_the_updates_that_overflow(tiny_model, batch, case, tmp_path, capsys):
    """Its rounding is 2⁻¹¹ in each product. A scale of 2⁶⁰ makes the loss's gradient infinite."""
    trainer = script_of(case)
    args = args_of(case, tiny_model, micro_batch_tokens=300, run_dir=str(tmp_path))
    batch = share(batch, slice(2 * GROUP))
    expected, _ = gradients(trainer, batch, args)
    args.dtype = "float16"
    policy = trainer.load_policy(args, trained=True)
    recorder = Recorder(policy)
    float16.scaler(recorder, args).load_state(torch.tensor([1024.0, 0]))
    assert trainer.update(policy, recorder, batch, 1, args)["overflows"] == 0
    assert all(0 < distance(a, b) < 0.01 for a, b in zip(recorder.gradients, expected, strict=True))

    optimizer, before = adamw(policy), weights(policy)
    scaler = float16.scaler(optimizer, args)
    scaler.load_state(torch.tensor([2.0**60, 3]))
    metrics = trainer.update(policy, optimizer, batch, 1, args)
    assert torch.equal(weights(policy), before) and not any(one["step"] > 0 for one in optimizer.state.values())
    updates = num_steps(trainer, args)
    assert (metrics["overflows"], metrics["optimizer_steps"], metrics["grad_norm"]) == (updates, 0, 0)
    assert scaler.state().tolist() == [2.0 ** (60 - updates), 0]
    assert capsys.readouterr().out.count("an update was skipped") == updates


def test_gradients_that_overflow_at_every_scale_end_the_run_in_float16(tiny_model, batch, tmp_path):
    args = args_of("grpo", tiny_model, dtype="float16", run_dir=str(tmp_path), kl_coef=0.0)
    policy = grpo.load_policy(args, trained=True)
    optimizer, before = adamw(policy), weights(policy)
    float16.scaler(optimizer, args).load_state(torch.tensor([2.0, 0]))
    broken = share(batch, slice(GROUP)) | {"advantages": 1e30 * batch["mask"][:GROUP]}
    assert grpo.update(policy, optimizer, broken, 1, args)["overflows"] == 1
    with pytest.raises(SystemExit, match="at every scale of the loss"):
        grpo.update(policy, optimizer, broken, 2, args)
    assert torch.equal(weights(policy), before)


TRAINED = ["grpo", "grpo_ar_lopti"]  # the cases of which AdamW makes steps, too


def compute_share(folder):
    """Writes what this process's main makes of its share of the batch: advantages, metrics; and the gradients.

    In the cases whose settings are in the folder.
    """
    processes.start()
    rows = rows_of(processes.RANK, processes.WORLD_SIZE)
    results = {}
    for case in CASES:
        if not (folder / f"{case}.pt").exists():
            continue
        trainer = script_of(case)
        args = trainer.Args(**torch.load(folder / f"{case}.pt") | {"run_dir": str(folder)})
        batch = share(torch.load(folder / "batch.pt"), rows)
        rewards = batch["rewards"][:, 0]
        with pytest.MonkeyPatch.context() as patch:
            if trainer is ppo:
                results["value model"] = train_values(batch, args)
                patch.setattr(ppo, "compute_values", lambda *_, batch=batch: batch["values"])
                patch.setattr(ppo, "update_values", lambda *_: {})
            metrics, given = step_of_main(trainer, args, batch, rewards.tolist(), patch)
        result = {"rows": rows, "metrics": timeless(metrics), "advantages": given["advantages"]}
        result["gradients"], result["update"] = gradients(trainer, given, args)
        without_kl = arguments(trainer, **dataclasses.asdict(args) | {"kl_coef": 0.0})
        equal = batch | {"values": torch.zeros(batch["mask"].shape), "teacher_logp": batch["old_logp"]}
        equal = trainer.compute_advantages(torch.full_like(rewards_of(batch, trainer), 0.7), equal, without_kl)
        results[case] = result | {"of equal rewards": equal}
        if case in TRAINED:
            results[case] |= steps_and_a_broken_one(trainer, given, args)
        if case == "grpo":
            results["of each pass cost"] = gradients_by_pass_cost(given, args)
            results |= {dtype: in_few_bits(given, args, dtype) for dtype in ("bfloat16", "float16")}
    torch.save(results, folder / f"of_{processes.RANK}_in_{processes.WORLD_SIZE}.pt")


def train_values(batch, args):
    """What ppo.py's value model gives after two steps, and whether a checkpoint restores it.

    Its head has one row, so that one of two processes holds none of it.
    """
    (policy, optimizer), (critic, of_critic) = models_of_ppo(args)
    batch = batch | {"returns": (batch["rewards"] + batch["values"]) * batch["mask"]}
    found = {"update": [ppo.update_values(critic, of_critic, batch, step, args) for step in (1, 2)]}
    found |= {"values": ppo.compute_values(critic, batch, args), "weights": weights(critic)}
    args = dataclasses.replace(args, run_dir=f"{args.run_dir}/of_{processes.WORLD_SIZE}")
    Path(args.run_dir).mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    checkpoints.save(policy, optimizer, tokenizer, 2, 16, args, (critic, of_critic))
    processes.barrier()  # process 0 has still to give it its name
    (policy, optimizer), again = models_of_ppo(args)
    found["place"] = checkpoints.load(policy, optimizer, args.run_dir, again)
    for model, its_optimizer in ((critic, of_critic), again):
        ppo.update_values(model, its_optimizer, batch, 3, args)
    return found | {"restored": torch.equal(weights(critic), weights(again[0]))}


def models_of_ppo(args):
    """(policy, its optimizer), (value model, its optimizer)."""
    models = [ppo.load_policy(args, trained=True, kind=kind) for kind in (ppo.Policy, ppo.ValueModel)]
    return [(model, adamw(model)) for model in models]


def steps_and_a_broken_one(trainer, batch, args):
    """Weights before and after two steps of AdamW, and after a third, in which the last process meets a NaN."""
    args = dataclasses.replace(args, max_grad_norm=0.05)
    policy = trainer.load_policy(args, trained=True)
    optimizer, found = adamw(policy), {"before": weights(policy)}
    found["updates"] = [trainer.update(policy, optimizer, batch, step, args) for step in (1, 2)]
    found["after"] = weights(policy)
    broken = batch | {"advantages": batch["advantages"].clone()}
    if processes.RANK == processes.WORLD_SIZE - 1:
        broken["advantages"][0][batch["mask"][0]] = math.nan
    with pytest.raises(SystemExit) as end:
        trainer.update(policy, optimizer, broken, 3, args)
    return found | {"end": end.value.code, "at the end": weights(policy)}


def in_few_bits(batch, args, dtype):
    """What grpo.py computes with this --dtype, in which types it holds what, and over what it splits the model.

    In float16 also the weights before and after an update in which the last process alone has an overflow.
    """
    args = dataclasses.replace(args, dtype=dtype)
    policy, reference = (grpo.load_policy(args, trained=trained) for trained in (True, False))
    layer, found = policy.lm.model.layers[1], {}

    def look(layer, inputs):
        found["gathered"] = layer.mlp.up_proj.weight.dtype
        found["residual"] = inputs[0].dtype

    layer.register_forward_pre_hook(look)
    found["policy"] = grpo.log_probs(policy, batch, args)[0]
    found["reference"] = grpo.log_probs(reference, batch, args)[0]
    found["gradient"] = gradients(grpo, batch, args, policy)[0][0]
    weight = layer.mlp.up_proj.weight
    found["kept"] = weight.dtype
    if processes.WORLD_SIZE > 1:
        found["summed"] = layer._get_fsdp_state()._mp_policy.reduce_dtype
        found["mesh"] = tuple(weight.device_mesh.shape), [type(place).__name__ for place in weight.placements]
    if dtype == "float16":
        optimizer = adamw(policy)
        grpo.update(policy, optimizer, batch, 1, args)
        before, scale = weights(policy), optimizer.scaler.get_scale()
        if processes.RANK == processes.WORLD_SIZE - 1:
            batch = batch | {"advantages": 1e10 * batch["advantages"]}
        found["overflows"] = grpo.update(policy, optimizer, batch, 2, args)["overflows"]
        found["lowered"] = scale / optimizer.scaler.get_scale()
        found["stays"] = torch.equal(weights(policy), before)
    return found


# What a pass costs, in tokens: with the first of them sharing a prompt always pays, with the last never.
PASS_COSTS = (0, 20, 40, 80, 160, 500)


def gradients_by_pass_cost(batch, args):
    """The gradients for each of PASS_COSTS, which decides whether a pass computes its prompt once."""
    found = []
    for cost in PASS_COSTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "PASS_COST", cost)
            found.append(gradients(grpo, batch, args)[0])
    return found


@pytest.fixture(scope="module")
def two_processes(tiny_model, batch, tmp_path_factory):
    """Results of one process and of each of two; the long responses all go to process 0 of two.

    So it makes more passes than process 1, which repeats one with an empty mask. All tokens of high entropy are its
    own, and in the second mini-batch all tokens of Lopti's low stage.
    """
    folder = tmp_path_factory.mktemp("two_processes")
    for case in CASES:
        args = args_of(case, tiny_model, updates_per_step=2, micro_batch_tokens=150)
        torch.save(dataclasses.asdict(args), folder / f"{case}.pt")
    batch = batch | {key: batch[key].clone() for key in ("entropy", "old_logp")}
    batch["entropy"][rows_of(1, 2)] *= 0.01
    late = rows_of(1, 2)[N // 4 :]
    batch["old_logp"][late] = batch["old_logp"][late].clamp(min=-0.1)
    low = [tokens_of(batch, rows_of(rank, 2)[N // 4 :], True) for rank in range(2)]
    assert low[0] and not low[1]
    means = [batch["rewards"][rows_of(rank, 2)].mean() for rank in range(2)]
    assert abs(means[0] - means[1]) > 0.1  # or a baseline of each process would not show
    torch.save({key: value for key, value in batch.items() if key != "advantages"}, folder / "batch.pt")
    n_passes = []
    for rank in range(2):
        parts = grpo.minibatches(share(batch, rows_of(rank, 2)), 2)
        n_passes.append([len(list(grpo.micro_batches(part, args))) for part in parts])
    assert all(a > b for a, b in zip(*n_passes))  # otherwise this would not show what it should
    run_together(compute_share, folder)
    compute_share(folder)
    results = {(rank, n): torch.load(folder / f"of_{rank}_in_{n}.pt") for rank, n in ((0, 1), (0, 2), (1, 2))}
    return results | {"folder": folder}


@each_case
def test_two_processes_have_the_advantages_gradients_and_metrics_of_one(two_processes, case):
    one = two_processes[0, 1][case]
    assert len(one["gradients"]) == (4 if case == "grpo_ar_lopti" else 2)
    assert all(step.norm() > 1e-3 for step in one["gradients"])
    for rank in range(2):
        two = two_processes[rank, 2][case]
        torch.testing.assert_close(two["advantages"], one["advantages"][two["rows"]], atol=1e-6, rtol=1e-6)
        assert all(distance(a, b) < 1e-5 for a, b in zip(two["gradients"], one["gradients"], strict=True))
        assert two["update"] == pytest.approx(one["update"], rel=1e-5, abs=2e-6)
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
        assert not two["of equal rewards"].any() and not one["of equal rewards"].any()


def test_two_processes_train_the_value_model_as_one(two_processes):
    one = two_processes[0, 1]["value model"]
    assert one["values"].std() > 0.02  # the value model begins with 0 everywhere
    for rank in range(2):
        two = two_processes[rank, 2]["value model"]
        torch.testing.assert_close(two["values"], one["values"][rows_of(rank, 2)], atol=1e-3, rtol=1e-3)
        for mine, expected in zip(two["update"], one["update"], strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)
        assert distance(two["weights"], one["weights"]) < 1e-4
        assert one["restored"] and two["restored"] and one["place"] == two["place"] == (2, 16)


@pytest.mark.parametrize("case", TRAINED)
def test_two_processes_come_to_the_weights_of_one(two_processes, case):
    """By two steps of AdamW, with gradients clipped by their common norm. In a third one process meets a NaN."""
    one = two_processes[0, 1][case]
    assert distance(one["after"], one["before"]) > 1e-3
    for rank in range(2):
        two = two_processes[rank, 2][case]
        assert torch.equal(two["before"], one["before"])
        assert distance(two["after"], one["after"]) < 1e-5
        assert distance(two["after"] - two["before"], one["after"] - one["before"]) < 1e-3
        for a, b in zip(two["updates"], one["updates"], strict=True):
            assert a == pytest.approx(b, rel=1e-5)
        assert f"non_finite_step_000003_process_{rank}.pt" in two["end"]
        assert torch.equal(two["at the end"], two["after"])


def test_two_machines_compute_the_gradient_of_one_process(two_processes, tmp_path):
    """HSDP: each machine, here of one process, has all shards, and only gradients are summed between them."""
    for name in ("batch", *TRAINED):
        shutil.copy(two_processes["folder"] / f"{name}.pt", tmp_path)
    run_together(compute_share, tmp_path, machines=2)
    for rank in range(2):
        two = torch.load(tmp_path / f"of_{rank}_in_2.pt")
        assert two["bfloat16"]["mesh"] == ((2, 1), ["Replicate", "Shard"])
        assert two_processes[rank, 2]["bfloat16"]["mesh"] == ((2,), ["Shard"])
        for case in TRAINED:
            mine, expected = two[case], two_processes[0, 1][case]
            assert all(distance(a, b) < 1e-5 for a, b in zip(mine["gradients"], expected["gradients"]))
            assert distance(mine["after"] - mine["before"], expected["after"] - expected["before"]) < 1e-3


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_two_processes_gather_weights_in_dtype_and_sum_gradients_in_float32(two_processes, dtype, rounding):
    for rank in range(2):
        found = two_processes[rank, 2][dtype]
        assert found["gathered"] == getattr(torch, dtype)
        assert found["kept"] == found["gradient"].dtype == torch.float32
        assert found["residual"] == torch.float32  # between the layers
        expected = two_processes[0, 1][dtype]["gradient"]
        assert distance(found["gradient"], expected) < rounding  # what is rounded is not all the same
        assert found["summed"] == torch.float32  # as FSDP2 was told; what bfloat16 would round hides behind the rest
        assert torch.equal(found["reference"], found["policy"])  # so that the KL term is exactly 0 at first
        if dtype == "float16":  # an overflow of one process is one of all
            assert (found["overflows"], found["lowered"], found["stays"]) == (2, 4, True)


def test_two_processes_agree_whether_a_pass_computes_its_prompt_once(two_processes):
    """It calls each layer twice, and FSDP2 needs as many calls in each process. Process 1 has short prompts, for which
    it pays less."""
    for rank in range(2):
        found = zip(two_processes[rank, 2]["of each pass cost"], two_processes[0, 1]["of each pass cost"], strict=True)
        for two, one in found:
            assert all(distance(a, b) < 1e-5 for a, b in zip(two, one, strict=True))

"""What must not change an update: the number of processes, a script's own part that is turned off, float16, and a loss
that is not finite. That micro-batches, padding and what lies outside the mask change nothing is in
test_token_weights.py.

Of every script whose update or advantages are its own. What another one shares with its parent is the same to the
letter (test_family.py), and its loss is a sum over tokens.
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
    compile_with,
    distance,
    gradients,
    make_batch,
    rows_of,
    share,
    state_of,
    tokens_of,
    weights,
)
from transformers import AutoTokenizer

import grpo
import ppo
from runtime import checkpoints, distributed, metrics, models
from tools.maintain import updates

# Settings at which some tokens of the batch are cut off, and others not.
CASES = {
    "grpo": {}, "grpo_ar_lopti": {}, "gdpo": {}, "reinforce": {}, "rloo": {}, "opd": {}, "sdpo": {}, "dr_grpo": {},
    "ppo": {}, "reinforce_pp": {}, "entropy_top": {}, "archer": {}, "entropy_bonus": {"entropy_coef": 0.1},
    "entropy_bonus KL-Cov": {"cov": "kl", "cov_fraction": 0.1},
    "entropy_bonus Clip-Cov": {"cov": "clip", "cov_fraction": 0.5},
    "acpo": {"n_bins": 20},
    "gspo": {"clip_low": 0.05, "clip_high": 0.03},
    "cispo": {"clip_low": 0.05, "clip_high": 0.03},
    "sapo": {"tau_positive": 5.0, "tau_negative": 7.0},
    "grpo_tis": {"correction_max": 1.1, "mask": "sequence", "mask_delta": 0.0},
    "grpo_tis geometric": {"mask": "geometric"},
    # With gradient_checkpointing, two processes swap rows (batches.balance).
    "grpo balanced": {"gradient_checkpointing": True},
    "reinforce balanced": {"gradient_checkpointing": True},
    "gspo balanced": {"gradient_checkpointing": True, "clip_low": 0.05, "clip_high": 0.03},
}  # fmt: skip


def script_of(case):
    return importlib.import_module(case.split()[0])


each_case = pytest.mark.parametrize("case", CASES)
# The first script with each of the family's ways to make one update.
UPDATES = {inspect.getsource(script_of(case).update_once): case for case in reversed(CASES)}
each_update = pytest.mark.parametrize("case", list(reversed(UPDATES.values())))


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    """With values, a teacher, a policy's own logp, and rewards, of which the second group's are all equal."""
    batch = make_batch(tiny_model)
    rng = torch.Generator().manual_seed(2)
    rewards = torch.tensor([-3, -0.5, -1, 3])[torch.randint(4, (N,), generator=rng)]
    rewards[GROUP : 2 * GROUP] = -0.5
    values, noise = (torch.randn(batch["mask"].shape, generator=rng) * batch["mask"] for _ in range(2))
    batch |= {"rewards": rewards[:, None], "old_values": values, "teacher_logp": batch["ref_logp"].clone()}
    return batch | {"logp": (batch["sampler_logp"] + 0.05 * noise).clamp(max=0)}


def args_of(case, **changes):
    settings = {"max_response_tokens": 50, "micro_batch_tokens": 300} | CASES[case]
    return arguments(script_of(case), **settings | changes)


def on_a_table(batch):
    """The batch, with a token's place in a table as its id; and that table, which is the policy (updates.py)."""
    return batch | {"ids": batch["token"]}, updates.TablePolicy(batch["logp"].flatten(), batch["entropy"].flatten())


def begun(case, batch, **changes):
    """(script, settings, a batch as main hands it to update, the policy)."""
    return script_of(case), args_of(case, **changes), *on_a_table(batch)


def test_if_no_token_has_an_advantage_adamw_still_makes_its_step(batch):
    """Without a KL term its gradient is 0, as if the tokens went through passes: the weights decay."""
    _, args, batch, policy = begun("grpo", batch, kl_coef=0.0)
    before = weights(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1)
    logged = grpo.update(policy, optimizer, batch | {"advantages": 0 * batch["advantages"]}, 1, args)
    assert logged["grad_norm"] == 0 and logged["optimizer_steps"] == 1
    torch.testing.assert_close(weights(policy), before * (1 - 1e-4), rtol=1e-6, atol=0)


# A script whose own part is turned off: its settings, those of grpo.py, what its metrics have besides.
TURNED_OFF = {
    "grpo_ar_lopti": ({"alpha": 0.0, "eta": 0.0}, {}, {"low_rate": 0}),
    "grpo_tis tis": ({"correction": "tis"}, {}, {"mask_rate": 0}),
    "grpo_tis icepop": ({"correction": "icepop"}, {}, {"mask_rate": 0}),
    "grpo_tis geometric": ({"mask": "geometric", "mask_low": 1.0, "mask_high": 1.0}, {}, {"mask_rate": 0}),
    "entropy_top": ({"entropy_top": 1.0}, {}, {"top_rate": 1}),
    "archer": ({"entropy_quantile": 1.0}, {"clip_high": 0.2}, {"reasoning_rate": 0}),
    "entropy_bonus": ({"entropy_coef": 0.0}, {}, {}),
    "entropy_bonus KL-Cov": ({"entropy_coef": 0.0, "cov": "kl", "cov_kl_coef": 0.0}, {}, {}),
}


@pytest.mark.parametrize("case", TURNED_OFF)
def test_a_script_whose_own_part_is_turned_off_is_grpo_to_the_last_bit(batch, case):
    """Each token's gradient in two updates, and every metric. grpo_tis.py has a sampler that is the trainer."""
    off, of_grpo, own_metrics = TURNED_OFF[case]
    batch, policy = on_a_table(batch | {"sampler_logp": batch["old_logp"]})
    found = []
    for trainer, settings in ((grpo, of_grpo), (script_of(case), off)):
        args = arguments(trainer, updates_per_step=2, micro_batch_tokens=300, max_grad_norm=0.1, **settings)
        given = updates.with_advantages(trainer.__name__, batch, batch["rewards"][:, 0], None, args)
        found.append(gradients(trainer, given, args, policy))
    (expected, logged), (steps, its_metrics) = found
    assert all(torch.equal(a, b) and a.any() for a, b in zip(steps, expected, strict=True))
    assert (logged | own_metrics).items() <= its_metrics.items() and logged["clip_rate"] > 0


@each_update
def test_gradients_are_scaled_down_to_max_grad_norm_and_the_norm_before_is_told(batch, case):
    trainer, args, batch, policy = begun(case, batch, updates_per_step=2)
    free, logged = gradients(trainer, batch, args, policy)
    capped, capped_metrics = gradients(trainer, batch, dataclasses.replace(args, max_grad_norm=1e-3), policy)
    norms = [step.norm().item() for step in free]
    for a, b, norm in zip(capped, free, norms, strict=True):
        torch.testing.assert_close(a, b * (1e-3 / norm), rtol=2e-3, atol=0)
    assert capped_metrics == logged and logged["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)


@each_update
def test_a_loss_that_is_not_finite_ends_the_program_before_the_weights_are_touched(batch, case, tmp_path):
    trainer, args, batch, policy = begun(case, batch, run_dir=str(tmp_path))
    optimizer = adamw(policy)
    trainer.update(policy, optimizer, dict(batch), 1, args)
    before, moments = weights(policy), state_of(optimizer)
    batch["advantages"] = batch["advantages"].clone()
    batch["advantages"][7][batch["mask"][7]] = math.nan
    with pytest.raises(SystemExit) as end:
        trainer.update(policy, optimizer, batch, 12, args)
    path = tmp_path / "non_finite_step_000012_process_0.pt"
    assert str(path) in end.value.code and "nan" in end.value.code and "step 12" in end.value.code
    assert torch.equal(weights(policy), before) and torch.equal(state_of(optimizer), moments)
    saved = torch.load(path)
    assert saved["args"] == dataclasses.asdict(args) and saved["batch"]["advantages"].isnan().any()


@each_update
def test_float16_has_float32s_gradient_and_skips_the_updates_that_overflow(tiny_model, batch, case, tmp_path, capsys):
    """Its rounding is 2⁻¹¹ in each product. A scale of 2⁶⁰ makes the loss's gradient infinite.

    The gradient is scaled down to max_grad_norm after the loss's scale is taken out of it.
    """
    trainer = script_of(case)
    args = args_of(case, model=str(tiny_model), run_dir=str(tmp_path), max_grad_norm=1e-3)
    batch = share(batch, slice(2 * GROUP))
    expected, _ = gradients(trainer, batch, args)
    args.dtype = "float16"
    policy = trainer.load_policy(args, trained=True)
    recorder = Recorder(policy)
    models.scaler(recorder, args).load_state(torch.tensor([1024.0, 0]))
    assert trainer.update(policy, recorder, batch, 1, args)["overflows"] == 0
    assert all(0 < distance(a, b) < 0.01 for a, b in zip(recorder.gradients, expected, strict=True))

    optimizer, before = adamw(policy), weights(policy)
    scaler = models.scaler(optimizer, args)
    scaler.load_state(torch.tensor([2.0**60, 3]))
    logged = trainer.update(policy, optimizer, batch, 1, args)
    assert torch.equal(weights(policy), before) and not any(one["step"] > 0 for one in optimizer.state.values())
    assert (logged["overflows"], logged["optimizer_steps"], logged["grad_norm"]) == (1, 0, 0)
    assert scaler.state().tolist() == [2.0**59, 0] and capsys.readouterr().out.count("an update was skipped") == 1


def test_a_scale_below_1_ends_the_program_before_any_weight_changes(tmp_path):
    """A gradient that is infinite at every scale: 2, 1 and then ½ is too low. At 0 a finite update would give NaN."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = models.scaler(optimizer, arguments(dtype="float16", run_dir=str(tmp_path)))
    scaler.load_state(torch.tensor([4.0, 0]))
    for scale in (2.0, 1.0):
        scaler.scale(weight.sum() * math.inf).backward()
        scaler.step(optimizer)
        assert scaler.get_scale() == scale
    with pytest.raises(SystemExit, match=r"^error: gradients overflow in float16, .*scale of 0\.5.*--dtype") as end:
        scaler.step(optimizer)
    assert "\n" not in end.value.code and "no checkpoint" in end.value.code and weight.tolist() == [1.0] * 3


TRAINED = ["grpo", "grpo_ar_lopti", "grpo balanced", "entropy_bonus"]  # the cases of which a model makes steps, too


def compute_share(folder):
    """Writes what this process's main makes of its share of the batch: advantages, metrics; and each token's gradient.

    Of the cases whose settings are in the folder; of TRAINED what a model makes of it.
    """
    distributed.start()
    rows = rows_of(distributed.RANK, distributed.WORLD_SIZE)
    results = {}
    for case in CASES:
        if not (folder / f"{case}.pt").exists():
            continue
        trainer = script_of(case)
        args = trainer.Args(**torch.load(folder / f"{case}.pt") | {"run_dir": str(folder)})
        batch = torch.load(folder / "batch.pt")
        _, table = on_a_table(batch)
        batch = share(batch, rows)
        with pytest.MonkeyPatch.context() as patch:
            if trainer is ppo:
                results["value model"] = train_values(batch, args)
                patch.setattr(ppo, "compute_values", lambda *_, batch=batch: batch["old_values"])
                patch.setattr(ppo, "update_values", lambda *_: {})
            logged, given = step_of_main(trainer, args, batch, batch["rewards"][:, 0].tolist(), patch)
        result = results[case] = {"rows": rows, "metrics": timeless(logged), "advantages": given["advantages"]}
        steps, result["update"] = gradients(trainer, given | {"ids": batch["token"]}, args, table)
        if case == "reinforce balanced":  # its update adds tensors to the batch
            trainer.update(table, Recorder(table), filled := given | {"ids": batch["token"]}, 1, args)
            for name in ("old_logp", "entropy"):
                result["update"][name] = metrics.token_mean(filled[name], batch["mask"])
        result["gradients"] = [step / distributed.WORLD_SIZE for step in steps]  # FSDP2 would take the mean
        if case in TRAINED:
            result |= steps_and_a_broken_one(trainer, given, args)
        if case == "grpo balanced" and distributed.WORLD_SIZE == 1:
            torch.save(given, folder / "advantages.pt")  # of all responses
        if case == "grpo":
            results |= {dtype: in_few_bits(given, args, dtype) for dtype in ("bfloat16", "float16")}
    torch.save(results, folder / f"of_{distributed.RANK}_in_{distributed.WORLD_SIZE}.pt")


def train_values(batch, args):
    """What ppo.py's value model gives after two steps, and whether a checkpoint restores it.

    Its head has one row, so that one of two processes holds none of it.
    """
    (policy, optimizer), (critic, of_critic) = models_of_ppo(args)
    batch = batch | {"returns": (batch["rewards"] + batch["old_values"]) * batch["mask"]}
    found = {"update": [ppo.update_values(critic, of_critic, batch, step, args) for step in (1, 2)]}
    found |= {"values": ppo.compute_values(critic, batch, args), "weights": weights(critic)}
    args = dataclasses.replace(args, run_dir=f"{args.run_dir}/of_{distributed.WORLD_SIZE}")
    Path(args.run_dir).mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    checkpoints.save(policy, optimizer, tokenizer, 2, 16, args, (critic, of_critic))
    distributed.barrier()  # process 0 has still to give it its name
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
    """A model's gradients, and its weights before and after two steps of AdamW and a third, in which the last process
    meets a NaN."""
    policy = trainer.load_policy(args, trained=True)
    found = {"of the model": gradients(trainer, batch, args, policy)[0]}
    if distributed.WORLD_SIZE > 1:
        found["mesh"] = policy.lm.model.layers[1].mlp.up_proj.weight.device_mesh.shape
    args = dataclasses.replace(args, max_grad_norm=0.05)
    optimizer, found["before"] = adamw(policy), weights(policy)
    found["updates"] = [trainer.update(policy, optimizer, batch, step, args) for step in (1, 2)]
    found["after"] = weights(policy)
    broken = batch | {"advantages": batch["advantages"].clone()}
    if distributed.RANK == distributed.WORLD_SIZE - 1:
        broken["advantages"][0][batch["mask"][0]] = math.nan
    with pytest.raises(SystemExit) as end:
        trainer.update(policy, optimizer, broken, 3, args)
    return found | {"end": end.value.code, "at the end": weights(policy)}


def in_few_bits(batch, args, dtype):
    """What grpo.py computes with this --dtype, and in which types it holds what.

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
    found["kept"] = layer.mlp.up_proj.weight.dtype
    if distributed.WORLD_SIZE > 1:
        found["summed"] = layer._get_fsdp_state()._mp_policy.reduce_dtype
    if dtype == "float16":
        optimizer = adamw(policy)
        grpo.update(policy, optimizer, batch, 1, args)
        before, scale = weights(policy), optimizer.scaler.get_scale()
        if distributed.RANK == distributed.WORLD_SIZE - 1:
            batch = batch | {"advantages": 1e10 * batch["advantages"]}
        found["overflows"] = grpo.update(policy, optimizer, batch, 2, args)["overflows"]
        found["lowered"] = scale / optimizer.scaler.get_scale()
        found["stays"] = torch.equal(weights(policy), before)
    return found


@pytest.fixture(scope="module")
def two_processes(tiny_model, batch, tmp_path_factory):
    """Results of one process and of each of two; the long responses all go to process 0 of two.

    So it makes more passes than process 1, which repeats one with an empty mask. All tokens of high entropy are its
    own, and in the second mini-batch all tokens of Lopti's low stage.
    """
    folder = tmp_path_factory.mktemp("two_processes")
    for case in CASES:
        args = args_of(case, model=str(tiny_model), updates_per_step=2, micro_batch_tokens=150)
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
    one, *both = (two_processes[place][case] for place in ((0, 1), (0, 2), (1, 2)))
    assert len(one["gradients"]) == (4 if case == "grpo_ar_lopti" else 2)
    assert all(step.norm() > 1e-3 for step in one["gradients"])
    sums = [sum(steps) for steps in zip(*(two["gradients"] for two in both), strict=True)]
    assert all(distance(a, b) < 1e-5 for a, b in zip(sums, one["gradients"], strict=True))
    for two in both:
        torch.testing.assert_close(two["advantages"], one["advantages"][two["rows"]], atol=1e-6, rtol=1e-6)
        found = two["update"] | {"grad_norm": one["update"]["grad_norm"]}  # of a table each has its own tokens'
        assert found == pytest.approx(one["update"], rel=1e-5, abs=2e-6)
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-9)


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


def assert_trained_alike(two, one):
    assert torch.equal(two["before"], one["before"]) and distance(one["after"], one["before"]) > 1e-3
    assert all(distance(a, b) < 1e-5 for a, b in zip(two["of the model"], one["of the model"], strict=True))
    assert distance(two["after"], one["after"]) < 1e-5
    assert distance(two["after"] - two["before"], one["after"] - one["before"]) < 1e-3
    for a, b in zip(two["updates"], one["updates"], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert torch.equal(two["at the end"], two["after"])


@pytest.mark.parametrize("case", TRAINED)
def test_two_processes_come_to_the_weights_of_one(two_processes, case):
    """By two steps of AdamW, with gradients clipped by their common norm. In a third one process meets a NaN."""
    for rank in range(2):
        two = two_processes[rank, 2][case]
        assert_trained_alike(two, two_processes[0, 1][case])
        assert f"non_finite_step_000003_process_{rank}.pt" in two["end"] and two["mesh"] == (2,)


def test_two_machines_compute_the_gradient_of_one_process(two_processes, tmp_path):
    """HSDP: each machine, here of one process, has all shards, and only gradients are summed between them."""
    for name in ("batch", "grpo balanced"):
        shutil.copy(two_processes["folder"] / f"{name}.pt", tmp_path)
    run_together(compute_share, tmp_path, machines=2)
    for rank in range(2):
        two = torch.load(tmp_path / f"of_{rank}_in_2.pt")["grpo balanced"]
        assert_trained_alike(two, two_processes[0, 1]["grpo balanced"])
        assert two["mesh"] == (2, 1)


def unequal_machines(_):
    distributed.LOCAL_WORLD_SIZE = 1 + distributed.RANK
    with pytest.raises(SystemExit, match="error: each machine needs the same number of processes"):
        distributed.start()


def test_machines_with_other_numbers_of_processes_are_refused(tmp_path):
    run_together(unequal_machines, tmp_path)


def compiled(folder):
    """With a compiled head and compiled layers: what a model makes of two steps."""
    distributed.start()
    args = grpo.Args(**torch.load(folder / "grpo balanced.pt") | {"run_dir": str(folder), "compile": True})
    batch = share(torch.load(folder / "advantages.pt"), rows_of(distributed.RANK, distributed.WORLD_SIZE))
    with pytest.MonkeyPatch.context() as patch:
        compile_with("aot_eager", patch)
        result = steps_and_a_broken_one(grpo, batch, args)
    torch.save(result, folder / f"compiled_{distributed.RANK}.pt")


@pytest.mark.slow
def test_two_processes_compile_and_come_to_the_weights_of_one(two_processes, tmp_path):
    for name in ("advantages", "grpo balanced"):
        shutil.copy(two_processes["folder"] / f"{name}.pt", tmp_path)
    run_together(compiled, tmp_path)
    for rank in range(2):
        two = torch.load(tmp_path / f"compiled_{rank}.pt")
        assert_trained_alike(two, two_processes[0, 1]["grpo balanced"])


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

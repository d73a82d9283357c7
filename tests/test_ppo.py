"""PPO in numbers: GAE, whitening, the losses of policy and value model, gradients, metrics and checkpoints against
arithmetic done by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here, except at the end,
where a run is resumed.
"""

import dataclasses
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from conftest import run_together, step_of_main
from helpers import (
    REWARDS,
    ROWS,
    N,
    Recorder,
    adamw,
    arguments,
    batch_of,
    distance,
    flat,
    make_batch,
    padded,
    rows_of,
    sequences,
    share,
    state_of,
    weights,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import grpo
import ppo
from runtime import checkpoints, float16, processes

# ------------------------------------------------------------------------------------------------------------ helpers


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def args_for(**changes):
    return arguments(ppo, **changes)


def random_numbers(shape, seed, spread=1.0):
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def value_model_of(args, seed=0):
    """The value model with a head that is not zero any more, so that its values are of the size of rewards."""
    value_model = ppo.load_policy(args, trained=True, kind=ppo.ValueModel)
    head = value_model.lm.lm_head.weight
    with torch.no_grad():
        head.copy_(random_numbers(head.shape, seed, spread=0.15))
    return value_model


@pytest.fixture(scope="module")
def value_model(tiny_model):
    return value_model_of(args_for(model=str(tiny_model)))


@pytest.fixture(scope="module")
def batch(tiny_model, value_model):
    """A batch such as main hands to update_values and update.

    The values lie some noise away from the value model's own, so that these leave the clip range on both sides.
    """
    batch = make_batch(tiny_model)
    mask = batch["mask"]
    rewards = torch.tensor([-3, -0.5, -1, 3])[torch.randint(4, (N,), generator=torch.Generator().manual_seed(2))]
    values = ppo.compute_values(value_model, batch, args_for())
    assert 0.1 < values[mask].std() < 10
    batch["values"] = (values + random_numbers(mask.shape, 3, spread=0.3)) * mask
    batch["advantages"] = ppo.compute_advantages(rewards, batch, args_for())
    estimates = ppo.estimate_advantages(rewards, batch, args_for(gae_lambda=0.9)).float()
    return batch | {"rewards": rewards[:, None], "returns": estimates + batch["values"]}


def value_gradients(batch, args, value_model):
    """The gradient of each optimizer step that update_values makes, at fixed weights, and its metrics."""
    recorder = Recorder(value_model)
    value_model.zero_grad()
    metrics = ppo.update_values(value_model, recorder, batch, 1, args)
    return recorder.gradients, metrics


# ---------------------------------------------------------------------------------------------------------------- GAE


def with_values(batch, values):
    """The batch with these values of each row's response tokens, and 0 elsewhere, as compute_values has it."""
    all_values = torch.zeros(batch["mask"].shape, dtype=torch.float64)
    for row, mask, of_row in zip(all_values, batch["mask"], values, strict=True):
        row[mask] = torch.tensor(of_row, dtype=torch.float64)
    return batch | {"values": all_values}


def of_tokens(compute, rewards, rows, values, **changes):
    """What compute, which is estimate_advantages or compute_advantages, gives each row's response tokens."""
    batch = with_values(batch_of(rows), values)
    found = compute(torch.tensor(rewards, dtype=torch.float64), batch, args_for(**changes))
    assert found.shape == batch["mask"].shape and found.dtype == torch.float64
    assert not found[~batch["mask"]].any()
    return [row[mask].tolist() for row, mask in zip(found, batch["mask"])]


# ROWS and REWARDS are those of test_reinforce_pp.py: responses of 3, 1 and 4 tokens to prompts of 1, 4 and 2, with
# padding of 2, 1 and 0. With β 0.5 their token rewards are:
TOKEN_REWARDS = [[-0.5, 1, 0.5], [0.25], [-0.25, -0.25, 0.5, 0]]
VALUES = [[1, 2, 0.5], [0.75], [0, 1, -1, 2]]
# By hand, from the last token back: δ = r + γ·(V of the next token) − V, Â = δ + γλ·(Â of the next token).
ESTIMATES = {
    (0.5, 0.5): [[-0.6875, -0.75, 0], [-0.5], [-0.0625, -1.25, 2, -2]],
    (1, 0): [[0.5, -0.5, 0], [-0.5], [0.75, -2.25, 3.5, -2]],  # the surprises alone
    (0, 1): [[-1.5, -1, 0], [-0.5], [-0.25, -1.25, 1.5, -2]],  # the token's reward less its value
    (0, 0): [[-1.5, -1, 0], [-0.5], [-0.25, -1.25, 1.5, -2]],
    (1, 1): [[0, -0.5, 0], [-0.5], [0, -0.75, 1.5, -2]],  # the rewards to come less the value
    (1, 0.5): [[0.25, -0.5, 0], [-0.5], [0.25, -1, 2.5, -2]],
}


def test_gae_by_numbers():
    for (gamma, lam), expected in ESTIMATES.items():
        changes = {"kl_coef": 0.5, "gamma": gamma, "gae_lambda": lam}
        assert of_tokens(ppo.estimate_advantages, REWARDS, ROWS, VALUES, **changes) == expected, changes


def test_a_tokens_reward_is_less_beta_k1_and_the_last_has_the_responses_reward_too():
    """Without values, γ 0 shows the token rewards themselves."""
    nothing = [[0] * len(values) for values in VALUES]
    assert of_tokens(ppo.estimate_advantages, REWARDS, ROWS, nothing, kl_coef=0.5, gamma=0.0) == TOKEN_REWARDS
    without_kl = of_tokens(ppo.estimate_advantages, REWARDS, ROWS, nothing, kl_coef=0.0, gamma=0.0)
    assert without_kl == [[0, 0, 2.5], [-0.25], [0, 0, 0, 1]]


# --------------------------------------------------------------------------------------------------------- advantages


def test_whitening_by_numbers():
    """Values 0: the last row counts three times. Mean (1 − 3·(1/3))/4 = 0, squares 1 + 3/9 over 3: σ is 2/3."""
    scale = 1 / math.sqrt(4 / 9 + 1e-8)
    rows, values = [(3, [0], 0), (1, [0, 0, 0], 0)], [[0], [0, 0, 0]]
    short, long = of_tokens(ppo.compute_advantages, [1, -1 / 3], rows, values)
    assert short == pytest.approx([scale], abs=1e-13) and long == pytest.approx([-scale / 3] * 3, abs=1e-13)


# ---------------------------------------------------------------------------------------------- the value model's loss


# (V_old, V, R) with ε_V 0.25 → (loss, its slope d/dV, whether the clip cuts it off), by hand.
VALUE_TOKENS = {
    "not moved": ((1, 1, 3), (2, -2, False)),
    "right at once": ((1, 1, 1), (0, 0, False)),
    "inside, towards R": ((1, 1.125, 3), (1.7578125, -1.875, False)),
    "inside, away from R": ((1, 0.875, 3), (2.2578125, -2.125, False)),
    "at the upper bound": ((0, 0.25, 1), (0.28125, -0.75, False)),
    "at the lower bound": ((0, -0.25, -1), (0.28125, 0.75, False)),
    "above, R beyond": ((1, 2, 3), (1.53125, 0, True)),  # clipped at 1.25: 1.75²/2
    "below, R beyond": ((1, 0, -2), (3.78125, 0, True)),  # clipped at 0.75: 2.75²/2
    "above, and right": ((1, 2, 2), (0.28125, 0, True)),  # clipped at 1.25: 0.75²/2
    "below, and right": ((-1, -2, -2), (0.28125, 0, True)),
    "above, past R, yet nearer than the bound": ((1, 2, 1.75), (0.125, 0, True)),  # clipped at 1.25: 0.5²/2
    "above, R below: the clipped error is smaller": ((1, 2, 0), (2, 2, False)),
    "below, R above: the clipped error is smaller": ((1, 0, 3), (4.5, -3, False)),
    "above, far past R: the clipped error is smaller": ((1, 2, 1.375), (0.1953125, 0.625, False)),
    "above, though R is V_old": ((1, 1.5, 1), (0.125, 0.5, False)),
    "far from R and from V_old": ((0, 1e6, -1e6), (2e12, 2e6, False)),
}


def value_loss_batch(tokens, dtype=torch.float64):
    """Values, with gradient, and the rest of a batch of one row. Around each token lies garbage, masked."""
    tokens = torch.tensor(tokens, dtype=dtype)  # [n, 3]
    mask = torch.zeros(1, 3 * len(tokens), dtype=torch.bool)
    mask[0, 1::3] = True
    of_batch = [torch.full(mask.shape, garbage, dtype=dtype) for garbage in (7e9, -1e10, 4e8)]
    for place, of_tokens in enumerate(of_batch):
        of_tokens[0, 1::3] = tokens[:, place]
    old_values, values, returns = of_batch
    return values.requires_grad_(), {"mask": mask, "values": old_values, "returns": returns}


def test_a_tokens_value_loss_by_hand():
    """n is 7 although this micro-batch has one token: n is the whole mini-batch's."""
    for name, (token, (expected, slope, is_clipped)) in VALUE_TOKENS.items():
        values, rest = value_loss_batch([token])
        loss, clipped = ppo.value_loss(values, rest, 7, args_for(value_clip=0.25))
        loss.backward()
        assert loss.item() == pytest.approx(expected / 7, rel=1e-12), name
        assert values.grad[0].tolist() == pytest.approx([0, slope / 7, 0], rel=1e-12), name
        assert clipped.item() == is_clipped, name


# --------------------------------------------------------------------------------------------------------- value model


def test_the_value_model_is_zero_everywhere_at_first_and_its_heads_gradient_is_not(tiny_model, batch):
    args = args_for(model=str(tiny_model))
    fresh = ppo.load_policy(args, trained=True, kind=ppo.ValueModel)
    values = ppo.compute_values(fresh, batch, args)
    assert torch.equal(values, torch.zeros(batch["mask"].shape))
    (gradient,), metrics = value_gradients(batch | {"values": values}, args, fresh)
    size = fresh.lm.config.hidden_size
    assert gradient[-size:].all() and not gradient[:-size].any()  # the body's comes with the next step
    assert metrics["value_grad_norm"] > 0 and metrics["value_clip_rate"] == 0


def plain_values(lm, head, ids):
    """V of every token but the first, by transformers and torch alone, for one unpadded sequence: [T − 1]."""
    return lm.model(input_ids=ids[None]).last_hidden_state[0, :-1].double() @ head[0].double()


def test_values_are_the_head_on_transformers_own_hidden_states(tiny_model, value_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows = sequences()
    ids, mask = padded(rows)
    values = value_model(ids, mask)
    assert values.shape == ids.shape and values.dtype == torch.float32 and values.requires_grad
    assert not values[~mask].any()
    for i, (prompt_size, row) in enumerate(rows):
        expected = plain_values(lm, value_model.lm.lm_head.weight, row)[prompt_size - 1 :]
        torch.testing.assert_close(values[i][mask[i]].double(), expected, atol=1e-5, rtol=0)


def test_a_tokens_value_depends_on_the_tokens_before_it_and_on_no_other(value_model):
    ids = torch.randint(2, 600, (1, 20), generator=torch.Generator().manual_seed(6))
    mask = torch.arange(20)[None] >= 5
    with torch.no_grad():
        before = value_model(ids, mask)[0]
        for changed in (0, 4, 5, 12, 19):
            other = ids.clone()
            other[0, changed] = 601
            moved = (value_model(other, mask)[0] - before).abs() > 1e-4
            assert not moved[: changed + 1].any()
            assert moved[max(5, changed + 1) :].all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_value_model_has_a_head_of_its_own_and_the_policy_keeps_its_own(tied, tmp_path):
    """Also if embedding and head are one tensor in the policy."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    args = args_for(model=str(tmp_path))
    policy = ppo.load_policy(args, trained=True)
    value_model = ppo.load_policy(args, trained=True, kind=ppo.ValueModel)
    assert type(policy) is ppo.Policy and type(value_model) is ppo.ValueModel
    of_policy, of_critic = (dict(model.lm.named_parameters()) for model in (policy, value_model))
    head = of_critic.pop("lm_head.weight")
    assert head.shape == (1, 16) and head.requires_grad and not head.any()
    assert policy.lm.lm_head.weight.shape == (50, 16) and ("lm_head.weight" in of_policy) == (not tied)
    assert (policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight) == tied
    of_policy.pop("lm_head.weight", None)
    assert of_policy.keys() == of_critic.keys()
    for name, weight in of_critic.items():
        assert weight.requires_grad and torch.equal(weight, of_policy[name])
        assert weight.data_ptr() != of_policy[name].data_ptr()


# --------------------------------------------------------------------------------------------- the value model's update


def test_a_value_loss_that_is_not_finite_ends_the_program_before_the_weights_are_touched(tiny_model, batch, tmp_path):
    args = args_for(model=str(tiny_model), run_dir=str(tmp_path), micro_batch_tokens=300)
    value_model = value_model_of(args)
    optimizer = adamw(value_model)
    ppo.update_values(value_model, optimizer, batch, 1, args)
    before, moments = weights(value_model), state_of(optimizer)
    broken = batch | {"returns": batch["returns"].clone()}
    broken["returns"][7][batch["mask"][7]] = math.nan
    with pytest.raises(SystemExit, match="step 12: loss nan") as end:
        ppo.update_values(value_model, optimizer, broken, 12, args)
    path = tmp_path / "non_finite_step_000012_process_0.pt"
    assert str(path) in end.value.code and torch.load(path)["batch"]["returns"].isnan().any()
    assert "Try a lower --value_lr or --max_grad_norm" in end.value.code
    assert torch.equal(weights(value_model), before) and torch.equal(state_of(optimizer), moments)


def explained_variance(batch, returns, values, value_model):
    """As update_values tells it, of these returns and values, each [N, T]."""
    batch = batch | {"returns": returns * batch["mask"], "values": values * batch["mask"]}
    return value_gradients(batch, args_for(), value_model)[1]["explained_variance"]


def test_explained_variance_by_hand(batch, value_model):
    mask = batch["mask"]
    returns, values = random_numbers(mask.shape, 7), random_numbers(mask.shape, 8, spread=0.5)
    errors = [r - v for r, v in zip(returns[mask].tolist(), values[mask].tolist())]
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(returns[mask].tolist())
    assert explained_variance(batch, returns, values, value_model) == pytest.approx(expected, abs=1e-5)
    # The values before the update count: those of main's batch, not the value model's own.
    assert explained_variance(batch, returns, returns, value_model) == 1
    assert explained_variance(batch, returns, returns - 2, value_model) == pytest.approx(1, abs=1e-6)
    assert explained_variance(batch, returns, torch.full(mask.shape, 0.7), value_model) == pytest.approx(0, abs=1e-6)
    assert explained_variance(batch, returns, returns / 2, value_model) == pytest.approx(0.75, abs=1e-6)
    assert explained_variance(batch, returns, -returns, value_model) == pytest.approx(-3, abs=1e-5)


def test_without_variance_in_the_returns_none_is_explained(batch, value_model, reward=0.7):
    """Equal rewards without KL, as of a step in which all is wrong: R is the reward, but for the rounding of Â + V."""
    mask = batch["mask"]
    assert explained_variance(batch, torch.full(mask.shape, reward), batch["values"], value_model) is None
    rewards = torch.full((N,), reward)
    returns = ppo.estimate_advantages(rewards, batch, args_for(kl_coef=0.0)).float() + batch["values"]
    assert returns[mask].std() < 1e-6
    assert explained_variance(batch, returns, batch["values"], value_model) is None


def test_main_gives_whitened_advantages_to_the_policy_and_returns_to_the_value_model(batch, monkeypatch):
    """Return: Â, not whitened, and V. In the metrics is what both updates tell."""
    args, rewards = args_for(gae_lambda=0.9), batch["rewards"][:, 0]
    given = {}

    def update_values(value_model, optimizer, batch, step, args):
        given.update(batch)
        return {"value_loss": 0.5}

    monkeypatch.setattr(ppo, "update_values", update_values)
    monkeypatch.setattr(ppo, "compute_values", lambda *_: batch["values"])
    row, to_policy = step_of_main(ppo, args, batch, rewards.tolist(), monkeypatch)
    assert row["value_loss"] == 0.5 and {"time/value", "kl", "reward"} <= row.keys()
    estimates = ppo.estimate_advantages(rewards, batch, args)
    torch.testing.assert_close(given["returns"], (estimates + batch["values"]).float(), atol=1e-5, rtol=0)
    whitened = ppo.compute_advantages(rewards, batch, args)
    assert torch.equal(to_policy["advantages"], whitened) and torch.equal(given["values"], batch["values"])


# -------------------------------------------------------------------------------------------------------- checkpoints


def everything_trained(args):
    """policy, optimizer and critic as main makes them: critic is (value model, its optimizer)."""
    policy = ppo.load_policy(args, trained=True)
    value_model = ppo.load_policy(args, trained=True, kind=ppo.ValueModel)
    optimizer, value_optimizer = (
        torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
        for model, lr in ((policy, 1e-3), (value_model, 3e-3))
    )
    return policy, optimizer, (value_model, value_optimizer)


def one_step(policy, optimizer, critic, batch, args):
    """A step of main's, after the sampling."""
    batch = batch | {"values": ppo.compute_values(critic[0], batch, args)}
    batch["advantages"] = ppo.compute_advantages(batch["rewards"][:, 0], batch, args)
    batch["returns"] = ppo.estimate_advantages(batch["rewards"][:, 0], batch, args).float() + batch["values"]
    metrics = ppo.update_values(*critic, batch, 1, args)
    return batch, metrics | ppo.update(policy, optimizer, batch, 1, args)


def all_states(policy, optimizer, critic):
    """Weights and AdamW's states of both models: {"policy", "its state", "value model", "its state too"}."""
    states = {}
    for name, (model, of_model) in {"policy": (policy, optimizer), "value model": critic}.items():
        states[name] = weights(model)
        per_weight = [of_model.state[p] for p in model.parameters()]
        states[f"{name}'s AdamW"] = flat(grpo.full_tensor(state[key]) for state in per_weight for key in sorted(state))
    return states


def tokenizer_of(args):
    return AutoTokenizer.from_pretrained(args.model)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_restores_the_value_model_and_both_optimizers_to_the_last_bit(tiny_model, batch, dtype, tmp_path):
    """Its model.safetensors is the policy alone."""
    args = args_for(model=str(tiny_model), run_dir=str(tmp_path), updates_per_step=2, dtype=dtype)
    batch = share(batch, slice(12))
    trained = everything_trained(args)
    scalers = [float16.scaler(optimizer, args) for optimizer in (trained[1], trained[2][1])]
    if dtype == "float16":
        for scaler, power in zip(scalers, (40, 6)):  # each has its own, and the policy's overflows
            scaler.load_state(torch.tensor([2.0**power, 3]))
    one_step(*trained, batch, args)
    assert trained[2][0].lm.lm_head.weight.any()
    policy, optimizer, critic = trained
    checkpoints.save(policy, optimizer, tokenizer_of(args), 1, 8, args, critic)
    saved = all_states(*trained)
    written = load_file(tmp_path / "checkpoints/step_000001/model.safetensors")
    assert written.keys() == load_file(tiny_model / "model.safetensors").keys()
    to = getattr(torch, dtype)
    assert all(torch.equal(written[name], weight.to(to)) for name, weight in policy.lm.named_parameters())
    _, metrics = one_step(*trained, batch, args)

    fresh = everything_trained(args)
    policy, optimizer, critic = fresh
    assert checkpoints.load(policy, optimizer, tmp_path, critic) == (1, 8)
    for name, state in all_states(*fresh).items():
        assert torch.equal(state, saved[name]), name
    _, metrics_too = one_step(*fresh, batch, args)
    assert metrics_too == metrics
    later = all_states(*trained)
    for name, state in all_states(*fresh).items():
        assert torch.equal(state, later[name]), name
        assert not torch.equal(state, saved[name]) or (dtype, name[:6]) == ("float16", "policy"), name
    if dtype == "float32":  # it may go on in float16
        policy, optimizer, critic = everything_trained(dataclasses.replace(args, dtype="float16"))
        assert checkpoints.load(policy, optimizer, tmp_path, critic) == (1, 8)
    if dtype == "float16":
        found = [float16.scaler(optimizer, args).state().tolist() for optimizer in (fresh[1], fresh[2][1])]
        assert found == [scaler.state().tolist() for scaler in scalers] == [[2.0**36, 0], [64, 7]]


def test_a_checkpoint_without_value_model_ends_in_one_line(tiny_model, tmp_path):
    """What grpo.py writes, if a hand has made a run of ppo.py of it."""
    args = args_for(model=str(tiny_model), run_dir=str(tmp_path))
    policy, optimizer, critic = everything_trained(args)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    checkpoints.save(policy, optimizer, tokenizer_of(args), 1, 8, args)
    with pytest.raises(SystemExit) as end:
        checkpoints.load(policy, optimizer, tmp_path, critic)
    assert re.fullmatch(r"error: checkpoint .*critic\..*", end.value.code)


# ------------------------------------------------------------------------------------------------------ two processes


def train_share(folder):
    """Writes what this process computes of its share of the batch, from a checkpoint that one process wrote."""
    args = ppo.Args(**torch.load(folder / "args.pt"))
    processes.start()
    rows = rows_of(processes.RANK, processes.WORLD_SIZE)
    batch = share(torch.load(folder / "batch.pt"), rows)
    policy, optimizer, critic = everything_trained(args)
    checkpoints.load(policy, optimizer, args.run_dir, critic)
    args.run_dir = str(folder / f"of_{processes.WORLD_SIZE}")
    Path(args.run_dir).mkdir(exist_ok=True)
    result = {"rows": rows, "start": all_states(policy, optimizer, critic)}
    batch["values"] = result["values"] = ppo.compute_values(critic[0], batch, args)
    batch["returns"] = ppo.estimate_advantages(batch["rewards"][:, 0], batch, args).float() + batch["values"]
    result["gradients"], _ = value_gradients(batch, args, critic[0])
    _, result["metrics"] = one_step(policy, optimizer, critic, batch, args)
    result["end"] = all_states(policy, optimizer, critic)
    checkpoints.save(policy, optimizer, tokenizer_of(args), 2, 16, args, critic)
    torch.save(result, folder / f"of_{processes.RANK}_in_{processes.WORLD_SIZE}.pt")


def test_two_processes_train_the_value_model_as_one_and_go_on_from_each_others_checkpoint(tiny_model, batch, tmp_path):
    """The long responses all go to process 0 of two, which makes more passes. The head has one row, so that one of two
    processes holds none of it."""
    args = args_for(model=str(tiny_model), run_dir=str(tmp_path / "start"), updates_per_step=2, micro_batch_tokens=150)
    args.max_grad_norm = 0.5
    policy, optimizer, critic = trained = everything_trained(args)
    for _ in range(2):
        one_step(*trained, batch, args)
    checkpoints.save(policy, optimizer, tokenizer_of(args), 1, 8, args, critic)
    torch.save({key: value for key, value in batch.items() if key != "advantages"}, tmp_path / "batch.pt")
    torch.save(dataclasses.asdict(args), tmp_path / "args.pt")
    run_together(train_share, tmp_path)
    train_share(tmp_path)
    one, *two = (torch.load(tmp_path / f"of_{rank}_in_{n}.pt") for rank, n in ((0, 1), (0, 2), (1, 2)))
    assert one["values"][batch["mask"]].std() > 0.05
    assert {"value_loss", "value_clip_rate", "value_grad_norm", "explained_variance"} <= one["metrics"].keys()
    for other in two:
        torch.testing.assert_close(other["values"], one["values"][other["rows"]], atol=1e-5, rtol=1e-5)
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
        assert len(one["gradients"]) == 2
        assert all(distance(a, b) < 1e-5 for a, b in zip(other["gradients"], one["gradients"], strict=True))
        for name, state in one["start"].items():
            assert torch.equal(other["start"][name], state), name
            assert distance(other["end"][name], one["end"][name]) < 1e-5, name
    checkpoints.check(tmp_path / "of_2")
    assert checkpoints.load(policy, optimizer, tmp_path / "of_2", critic) == (2, 16)
    for name, state in all_states(*trained).items():
        assert torch.equal(state, two[0]["end"][name]), name

"""PPO in numbers: GAE, whitening, the value model's loss, gradients, metrics and checkpoints, by hand."""

import math
import statistics

import pytest
import torch
from conftest import step_of_main
from helpers import REWARDS, ROWS, N, Recorder, adamw, arguments, batch_of, make_batch, padded, sequences, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ppo
from runtime import checkpoints, models
from tools.maintain import updates

pytestmark = pytest.mark.usefixtures("on_the_cpu")


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
    return value_model_of(arguments(ppo, model=str(tiny_model)))


@pytest.fixture(scope="module")
def batch(tiny_model, value_model):
    """A batch such as main hands to update_values and update.

    The values lie some noise away from the value model's own, so that these leave the clip range on both sides.
    """
    batch = make_batch(tiny_model)
    mask = batch["mask"]
    rewards = torch.tensor([-3, -0.5, -1, 3])[torch.randint(4, (N,), generator=torch.Generator().manual_seed(2))]
    values = ppo.compute_values(value_model, batch, arguments(ppo))
    assert 0.1 < values[mask].std() < 10
    batch["old_values"] = (values + random_numbers(mask.shape, 3, spread=0.3)) * mask
    scores = scores_of(rewards)
    batch["advantages"] = ppo.compute_advantages(scores, batch, arguments(ppo))
    estimates = ppo.estimate_advantages(scores, batch, arguments(ppo, gae_lambda=0.9)).float()
    return batch | {"rewards": rewards[:, None], "returns": estimates + batch["old_values"]}


def scores_of(rewards):
    return [{"reward": reward} for reward in rewards.tolist()]


def value_gradients(batch, args, value_model):
    """The gradient of each optimizer step that update_values makes, at fixed weights, and its metrics."""
    recorder = Recorder(value_model)
    value_model.zero_grad()
    metrics = ppo.update_values(value_model, recorder, batch, 1, args)
    return recorder.gradients, metrics


def of_tokens(compute, rewards, rows, values, **changes):
    """What compute, which is estimate_advantages or compute_advantages, gives each row's response tokens.

    values: those of each row's response tokens; elsewhere they are 0, as compute_values has it.
    """
    batch = batch_of(rows)
    batch["old_values"] = torch.zeros(batch["mask"].shape, dtype=torch.float64)
    batch["old_values"][batch["mask"]] = torch.tensor([value for row in values for value in row], dtype=torch.float64)
    with updates.numbers_as(torch.float64):
        found = compute([{"reward": reward} for reward in rewards], batch, arguments(ppo, **changes))
    assert found.shape == batch["mask"].shape and found.dtype == torch.float64
    assert not found[~batch["mask"]].any()
    return [row[mask].tolist() for row, mask in zip(found, batch["mask"])]


# ROWS and REWARDS: responses of 3, 1 and 4 tokens to prompts of 1, 4 and 2, with padding of 2, 1 and 0.
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


def test_gae_goes_over_a_reply_between_two_turns():
    """As if the reply's columns were not there: a reward at the end reaches the first turn."""
    batch = batch_of(ROWS)
    batch["old_values"] = torch.randn(batch["mask"].shape, generator=torch.Generator().manual_seed(1)).double()
    args, scores = arguments(ppo, gae_lambda=0.9, gamma=0.8), [{"reward": reward} for reward in REWARDS]
    columns = torch.tensor([0, 1, 2, 3, 0, 0, *range(4, batch["mask"].shape[1])])
    gapped = {name: values[:, columns].clone() for name, values in batch.items()}
    gapped["mask"][:, 4:6] = False
    expected = ppo.estimate_advantages(scores, batch, args)
    assert torch.equal(ppo.estimate_advantages(scores, gapped, args)[gapped["mask"]], expected[batch["mask"]])


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(0.5, [[-0.5, 1, 0.5], [0.25], [-0.25, -0.25, 0.5, 0]]), (0.0, [[0, 0, 2.5], [-0.25], [0, 0, 0, 1]])],
)
def test_a_tokens_reward_is_less_beta_k1_and_the_last_has_the_responses_reward_too(beta, expected):
    """With values of 0, γ 0 shows the token rewards themselves."""
    nothing = [[0 for _ in row] for row in VALUES]
    found = of_tokens(ppo.estimate_advantages, REWARDS, ROWS, nothing, kl_coef=beta, gamma=0.0)
    assert found == expected


def test_whitening_by_numbers():
    """Values 0: the last row counts three times. Mean (1 − 3·(1/3))/4 = 0, squares 1 + 3/9 over 3: σ is 2/3."""
    scale = 1 / math.sqrt(4 / 9 + 1e-8)
    rows, values = [(3, [0], 0), (1, [0, 0, 0], 0)], [[0], [0, 0, 0]]
    short, long = of_tokens(ppo.compute_advantages, [1, -1 / 3], rows, values)
    assert short == pytest.approx([scale], abs=1e-13) and long == pytest.approx([-scale / 3] * 3, abs=1e-13)


# (V_old, V, R) with ε_V 0.25 → (loss, its slope d/dV, whether the clip cuts it off), by hand.
VALUE_TOKENS = {
    "not moved": ((1, 1, 3), (2, -2, False)),
    "inside, towards R": ((1, 1.125, 3), (1.7578125, -1.875, False)),
    "inside, away from R": ((1, 0.875, 3), (2.2578125, -2.125, False)),
    "at the upper bound": ((0, 0.25, 1), (0.28125, -0.75, False)),
    "above, R beyond": ((1, 2, 3), (1.53125, 0, True)),  # clipped at 1.25: 1.75²/2
    "below, R beyond": ((1, 0, -2), (3.78125, 0, True)),  # clipped at 0.75: 2.75²/2
    "below, and right": ((-1, -2, -2), (0.28125, 0, True)),
    "above, past R, yet nearer than the bound": ((1, 2, 1.75), (0.125, 0, True)),  # clipped at 1.25: 0.5²/2
    "above, R below: the clipped error is smaller": ((1, 2, 0), (2, 2, False)),
    "below, R above: the clipped error is smaller": ((1, 0, 3), (4.5, -3, False)),
    "above, far past R: the clipped error is smaller": ((1, 2, 1.375), (0.1953125, 0.625, False)),
}


@pytest.mark.parametrize(("token", "expected"), VALUE_TOKENS.values(), ids=VALUE_TOKENS)
def test_a_tokens_value_loss_by_hand(token, expected):
    """n is 7 although this micro-batch has one token: n is the whole mini-batch's. Around it lies garbage, masked."""
    of_batch = [torch.tensor([[garbage] * 3], dtype=torch.float64) for garbage in (7e9, -1e10, 4e8)]
    for of_place, number in zip(of_batch, token):
        of_place[0, 1] = number
    old_values, values, returns = of_batch
    batch = {"mask": torch.tensor([[False, True, False]]), "old_values": old_values, "returns": returns}
    loss, clipped = ppo.value_loss(values.requires_grad_(), batch, 7, arguments(ppo, value_clip=0.25))
    loss.backward()
    expected_loss, slope, is_clipped = expected
    assert loss.item() == pytest.approx(expected_loss / 7, rel=1e-12)
    assert values.grad[0].tolist() == pytest.approx([0, slope / 7, 0], rel=1e-12)
    assert clipped.item() == is_clipped


def test_the_value_model_is_zero_everywhere_at_first_and_its_heads_gradient_is_not(tiny_model, batch):
    args = arguments(ppo, model=str(tiny_model))
    fresh = ppo.load_policy(args, trained=True, kind=ppo.ValueModel)
    values = ppo.compute_values(fresh, batch, args)
    assert torch.equal(values, torch.zeros(batch["mask"].shape))
    (gradient,), metrics = value_gradients(batch | {"old_values": values}, args, fresh)
    size = fresh.lm.config.hidden_size
    assert gradient[-size:].all() and not gradient[:-size].any()  # the body's comes with the next step
    assert metrics["value_grad_norm"] > 0 and metrics["value_clip_rate"] == 0


def test_values_are_the_head_on_transformers_own_hidden_states(tiny_model, value_model):
    """Of rows with padding, each against a row alone. A token's value is that of the text before it."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rows = sequences()
    ids, mask = padded(rows)
    values = value_model(ids, mask)
    assert values.shape == ids.shape and values.dtype == torch.float32 and values.requires_grad
    assert not values[~mask].any()
    head = value_model.lm.lm_head.weight[0].double()
    for i, (prompt_size, row) in enumerate(rows):
        expected = lm.model(input_ids=row[None]).last_hidden_state[0, prompt_size - 1 : -1].double() @ head
        torch.testing.assert_close(values[i][mask[i]].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_value_model_has_a_head_of_its_own_and_the_policy_keeps_its_own(tied, tmp_path):
    """Also if embedding and head are one tensor in the policy."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    args = arguments(ppo, model=str(tmp_path))
    policy, value_model = (ppo.load_policy(args, trained=True, kind=kind) for kind in (ppo.Policy, ppo.ValueModel))
    of_policy, of_critic = (dict(model.lm.named_parameters()) for model in (policy, value_model))
    head = of_critic.pop("lm_head.weight")
    assert head.shape == (1, 16) and not head.any() and policy.lm.lm_head.weight.shape == (50, 16)
    assert (policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight) == tied
    of_policy.pop("lm_head.weight", None)
    assert of_policy.keys() == of_critic.keys()
    for name, weight in of_critic.items():
        assert torch.equal(weight, of_policy[name]) and weight.data_ptr() != of_policy[name].data_ptr()
    assert all(weight.requires_grad for weight in (head, *of_critic.values()))


def test_a_value_loss_that_is_not_finite_ends_the_program_before_the_weights_are_touched(tiny_model, batch, tmp_path):
    args = arguments(ppo, model=str(tiny_model), run_dir=str(tmp_path), micro_batch_tokens=300)
    value_model = value_model_of(args)
    optimizer, before = adamw(value_model), weights(value_model)
    broken = batch | {"returns": batch["returns"].clone()}
    broken["returns"][7][batch["mask"][7]] = math.nan
    with pytest.raises(SystemExit, match=r"step 12: loss nan.*Try a lower --value_lr or --max_grad_norm"):
        ppo.update_values(value_model, optimizer, broken, 12, args)
    assert torch.load(tmp_path / "non_finite_step_000012_process_0.pt")["batch"]["returns"].isnan().any()
    assert torch.equal(weights(value_model), before) and not optimizer.state


def test_explained_variance_by_hand(batch, value_model):
    """The values before the update count: those of main's batch, not the value model's own."""

    def explained(returns, values):
        given = batch | {"returns": returns * mask, "old_values": values * mask}
        return value_gradients(given, arguments(ppo), value_model)[1]["explained_variance"]

    mask = batch["mask"]
    returns, values = random_numbers(mask.shape, 7), random_numbers(mask.shape, 8, spread=0.5)
    errors = [r - v for r, v in zip(returns[mask].tolist(), values[mask].tolist())]
    by_hand = 1 - statistics.pvariance(errors) / statistics.pvariance(returns[mask].tolist())
    constant = torch.full(mask.shape, 0.7)
    for these, share in ((values, by_hand), (returns - 2, 1), (constant, 0), (returns / 2, 0.75), (-returns, -3)):
        assert explained(returns, these) == pytest.approx(share, abs=1e-5)
    # Equal rewards without KL, as of a step in which all is wrong: R is the reward, but for the rounding of Â + V.
    estimates = ppo.estimate_advantages(scores_of(constant[:, 0]), batch, arguments(ppo, kl_coef=0.0)).float()
    for constants in (constant, estimates + batch["old_values"]):
        assert explained(constants, batch["old_values"]) is None


def test_main_gives_whitened_advantages_to_the_policy_and_returns_to_the_value_model(batch, monkeypatch):
    """Return: Â, not whitened, and V. In the metrics is what both updates tell."""
    args, rewards = arguments(ppo, gae_lambda=0.9), batch["rewards"][:, 0]
    given = {}

    def update_values(value_model, optimizer, batch, step, args):
        given.update(batch)
        return {"value_loss": 0.5}

    monkeypatch.setattr(ppo, "update_values", update_values)
    monkeypatch.setattr(ppo, "compute_values", lambda *_: batch["old_values"])
    row, to_policy = step_of_main(ppo, args, batch, rewards.tolist(), monkeypatch)
    assert row["value_loss"] == 0.5 and {"time/value", "kl", "reward"} <= row.keys()
    estimates = ppo.estimate_advantages(scores_of(rewards), batch, args)
    torch.testing.assert_close(given["returns"], (estimates + batch["old_values"]).float(), atol=1e-5, rtol=0)
    whitened = ppo.compute_advantages(scores_of(rewards), batch, args)
    assert torch.equal(to_policy["advantages"], whitened) and torch.equal(given["old_values"], batch["old_values"])


def everything_trained(args, scales=(16, 16)):
    """policy, optimizer and critic, which is (value model, its optimizer). scales: powers of 2, in float16."""
    made = []
    for kind, power in zip((ppo.Policy, ppo.ValueModel), scales):
        model = ppo.load_policy(args, trained=True, kind=kind)
        made.append((model, adamw(model)))
        if args.dtype == "float16":
            models.scaler(made[-1][1], args).load_state(torch.tensor([2.0**power, 3]))
    return *made[0], made[1]


def test_a_checkpoint_has_the_scale_of_either_loss(tiny_model, tmp_path):
    """That all else goes on to the last bit is in test_every_script.py."""
    args = arguments(ppo, model=str(tiny_model), run_dir=str(tmp_path), dtype="float16")
    policy, optimizer, critic = everything_trained(args, scales=(40, 6))
    checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(tiny_model), 1, 8, args, critic)
    policy, optimizer, critic = everything_trained(args)
    assert checkpoints.load(policy, optimizer, args.run_dir, critic) == (1, 8)
    found = [models.scaler(one, args).state().tolist() for one in (optimizer, critic[1])]
    assert found == [[2.0**40, 3], [2.0**6, 3]]

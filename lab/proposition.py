"""Proposition 4.2: the gradient at a token's activations grows with 1 − π.

AR-Lopti (arXiv 2505.12929), Proposition 4.2: let w be a token's weight in the objective, a_ℓ the output of layer ℓ at
the position that predicts the token, δ_ℓ the gradient with respect to a_ℓ, and N the size of the vocabulary. If the
singular values of the Jacobian of every layer j lie between c_j and d_j, then

    Π c_j · |w| · √(N/(N−1)) · (1 − π)  ≤  ‖δ_ℓ‖  ≤  Π d_j · |w| · √2 · (1 − π)        over j > ℓ

Measured is ‖δ_ℓ‖ / |w|, the norm of the gradient of log π, for --tokens tokens of one batch. Later positions cannot
influence the prediction, so δ_ℓ at the token's own position is the product of the layers' Jacobians there, as in the
proof, and what stands before it can be taken as constant. c_j and d_j are the least and the greatest singular value of
these Jacobians, found for --jacobians of the tokens. The last function is the final norm with the head; its output are
the logits over the temperature.

The lower bound needs a condition that no language model meets: the head's Jacobian takes N numbers to fewer, and so
makes some vectors zero. The bound drawn here takes the least singular value all the same.

Groups: the embedding and the layers' outputs are put into at most five groups of neighbours, each shown by the mean
norm over the group; the logits are the last group.

Results: proposition.json and proposition.png.

    python -m lab.proposition
"""

import copy
import dataclasses
import math
from contextlib import contextmanager
from itertools import pairwise

import torch
from tqdm import tqdm

from lab import common
from runtime import curves
from runtime.processes import DEVICE
from runtime.settings import PositiveInt

MOST_GROUPS = 5  # of the embedding and the layers, besides the logits
TINY = 1e-6  # a 1 − π below which float32 log-probabilities have no digits left
UNSURE = 0.25  # the least 1 − π of a token that is not nearly certain


@dataclasses.dataclass
class Args(common.Args):
    """The gradient at a token's activations against 1 − π."""

    tokens: PositiveInt = 600  # tokens of the batch whose gradients are measured
    rows: PositiveInt = 24  # responses that they are of
    jacobians: PositiveInt = 12  # of these tokens, how many have their layers' Jacobians measured


QUICK = {"tokens": 12, "rows": 3, "jacobians": 1}


@contextmanager
def catch_activations(policy):
    """A list that gets [a_0, …, a_L−1] of the pass within: the embedding, each layer's output."""
    caught = []

    def catch_input(module, arguments, keywords):
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        caught.append(hidden)

    def catch_output(module, arguments, output):
        caught.append(output[0] if isinstance(output, tuple) else output)

    layers = policy.lm.model.layers
    handles = [layers[0].register_forward_pre_hook(catch_input, with_kwargs=True)]
    handles += [layer.register_forward_hook(catch_output) for layer in layers]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


def activations_of(policy, ids, mask, temperature):
    """(log-probabilities [1, T], [a_0, …, a_L−1]) of one response, all in one graph.

    ids, mask: [1, T]. a_0 is the embedding, a_ℓ the output of layer ℓ: [1, T, D].
    """
    with catch_activations(policy) as caught:
        logp, _ = policy(ids, mask, temperature)
    return logp, caught


def keys_and_values(policy, ids):
    """A cache with the keys and values of a whole response. ids: [1, T]."""
    with torch.no_grad():
        return policy.lm.model(ids, use_cache=True).past_key_values


def at_position(policy, ids, cache, position, temperature):
    """(log π of the token after this position, [a_0, …, a_L−1] at it), in a graph of it alone.

    ids: [1, T]; cache: their keys_and_values. log π: a scalar; a_ℓ: [1, 1, D]. The keys and values of the tokens before
    a position do not depend on its activations, so they come from the cache, as when a token is sampled. What comes
    after it is not computed.
    """
    before = copy.deepcopy(cache)
    before.crop(position - ids.shape[1])  # so many tokens less than all
    with catch_activations(policy) as caught:
        output = policy.lm.model(ids[:, position : position + 1], past_key_values=before)
    state = output.last_hidden_state[0]  # [1, D]
    logp, _ = policy.head(state, ids[:, position + 1], temperature, False)
    return logp[0], caught


def gradient_at_logits(logits, target, temperature):
    """∇ log π(target) with respect to the logits over the temperature, [vocabulary]: one-hot minus π."""
    gradient = -(logits / temperature).softmax(-1)
    gradient[target] += 1
    return gradient


def jacobian(output, of):
    """d output / d of, [outputs, D]. output: a vector that depends on `of`, which is [1, 1, D]."""
    directions = torch.eye(len(output), device=output.device)
    [rows] = torch.autograd.grad(output, of, grad_outputs=directions, is_grads_batched=True, retain_graph=True)
    return rows[:, 0, 0]


def last_jacobian(policy, state, temperature):
    """d (logits / temperature) / d state, a matrix [vocabulary, D]. state: a_L−1, [1, 1, D].

    The head is linear, so it maps the Jacobian of the norm before it, column by column.
    """
    state = state.detach().requires_grad_()
    of_norm = jacobian(policy.lm.model.norm(state)[0, 0], state)  # [D, D]
    with torch.no_grad():
        return policy.lm.lm_head(of_norm.T).T / temperature


def singular_values(policy, activations, temperature):
    """(least, greatest) singular value of each function after a_0, in order.

    activations: as at_position gives them.
    """
    found = [extremes(jacobian(after[0, 0], before)) for before, after in pairwise(activations)]
    found.append(extremes(last_jacobian(policy, activations[-1], temperature)))
    return found


def extremes(matrix):
    """(least, greatest) singular value of a matrix."""
    values = torch.linalg.svdvals(matrix.detach().double())
    return values[-1].item(), values[0].item()


def measure(policy, sampled, args):
    """(each token's response, its 1 − π, [n]; norms of its gradients [n, L + 1]; singular values).

    The norms are those at a_0, …, a_L−1 and at the logits; singular values are of some tokens.
    """
    batch = sampled.batch
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.randperm(len(batch["ids"]), generator=generator)[: args.rows].tolist()
    per_row = -(-args.tokens // len(rows))
    per_row_jacobians = -(-args.jacobians // len(rows))
    numbers, rests, norms, singular = [], [], [], []
    for row in tqdm(rows, desc="responses", disable=None):
        positions = batch["mask"][row].nonzero()[:, 0]  # of the response's tokens
        end = int(positions[-1]) + 1
        ids = batch["ids"][row : row + 1, :end].to(DEVICE)
        cache = keys_and_values(policy, ids)
        order = torch.randperm(len(positions), generator=generator)
        for number, t in enumerate(positions[order[:per_row]].tolist()):
            position = t - 1  # the token is predicted from the state before it
            logp, activations = at_position(policy, ids, cache, position, args.temperature)
            gradients = torch.autograd.grad(logp, activations, retain_graph=True)
            of_token = [gradient.norm().item() for gradient in gradients]
            with torch.no_grad():
                state = policy.lm.model.norm(activations[-1][0, 0])
                logits = policy.lm.lm_head(state)
            of_token.append(gradient_at_logits(logits, ids[0, t], args.temperature).norm().item())
            numbers.append(row)
            norms.append(of_token)
            rests.append(-math.expm1(min(0.0, logp.item())))  # 1 − π, also if π is near 1
            if number < per_row_jacobians and len(singular) < args.jacobians:
                singular.append(singular_values(policy, activations, args.temperature))
    rests, norms = torch.tensor(rests).double(), torch.tensor(norms).double()
    return torch.tensor(numbers), rests, norms, singular


def bounds_of(singular, vocabulary):
    """The factors of 1 − π in the two bounds for each of a_0, …, a_L−1 and the logits.

    singular: [(least, greatest) of each function] of some tokens. c_j and d_j are the least and the greatest over these
    tokens.
    """
    lower, upper = [math.sqrt(vocabulary / (vocabulary - 1))], [math.sqrt(2)]
    for of_function in reversed(list(zip(*singular))):  # from the last function back
        lower.insert(0, lower[0] * min(least for least, _ in of_function))
        upper.insert(0, upper[0] * max(greatest for _, greatest in of_function))
    return lower, upper


def groups_of(num_layers):
    """[(name, [places among the activations])]: the embedding and layers, then the logits."""
    places = list(range(num_layers + 1))
    count = min(MOST_GROUPS, len(places))
    groups = []
    for part in torch.tensor(places).tensor_split(count):
        part = part.tolist()
        if part == [0]:
            name = "embedding"
        elif len(part) == 1:
            name = f"layer {part[0]}"
        else:
            name = f"layers {part[0]} to {part[-1]}"  # 0: the embedding
        groups.append((name, part))
    groups.append(("logits", [num_layers + 1]))
    return groups


def summary_of(rests, norms, lower, upper, groups):
    """For each group the correlation with 1 − π, the bounds and how many tokens obey them.

    In a group of several layers the norm is the mean over them, and so is each bound. inside: the
    share of tokens that are so at each of the group's layers by its own bounds, up to rounding.
    correlation_if_unsure: of the tokens with 1 − π of at least UNSURE. Tokens whose 1 − π rounds to 0 are left out.
    """
    kept = rests > TINY
    rests = rests[kept]
    result = {}
    for name, places in groups:
        norm = norms[kept][:, places].mean(1)
        low = sum(lower[i] for i in places) / len(places)
        high = sum(upper[i] for i in places) / len(places)
        # The logits' bounds are exact, so what counts against them is rounding: 1 − π is as good as a float32
        # log-probability, 1e-7.
        slack = 1e-6 + 3e-7 / rests
        inside = torch.ones(len(rests), dtype=torch.bool)
        for i in places:
            of_layer = norms[kept][:, i]
            inside &= (of_layer <= upper[i] * rests * (1 + slack)) & (of_layer >= lower[i] * rests * (1 - slack))
        result[name] = {
            "correlation": common.correlation(norm, rests),
            "correlation_if_unsure": common.correlation(norm[rests >= UNSURE], rests[rests >= UNSURE]),
            "correlation_of_logs": common.correlation(norm.clamp(min=1e-30).log(), rests.log()),
            "lower": low,
            "upper": high,
            "median_slope": (norm / rests).median().item(),
            "inside": inside.double().mean().item(),
        }
    return result


def of_responses(numbers, rests, norms, upper, groups):
    """Each response's tokens, for JSON: 1 − π, and the norms by group (means over its layers).

    numbers: of each token's response, [n]; upper: as in summary_of. above: how many times the median token's norm the
    upper bound is, at the layer where that is most. Tokens whose 1 − π rounds to 0 are left out.
    """
    found = []
    for number in numbers.unique():
        of_it = (numbers == number) & (rests > TINY)
        slopes = (norms[of_it] / rests[of_it, None]).median(0).values.tolist()[:-1]
        found.append(
            {
                "rest": rests[of_it].tolist(),
                "norm": {name: norms[of_it][:, at].mean(1).tolist() for name, at in groups},
                "above": max(bound / slope for bound, slope in zip(upper, slopes)),
            }
        )
    return found


def draw(rests, norms, summary, groups, args):
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    name = common.name_of(args.model)
    kept = rests > TINY
    shown = f"{int(kept.sum())} of {len(rests)} tokens"
    title = f"gradient of log π at the activations of {shown} of {name}"
    figure = curves.new_figure(curves.WIDTH, 4.6 * rows, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
    ends = torch.tensor([rests[kept].min().item(), 1.0])
    for number, (group, places) in enumerate(groups):
        axes = panels[number // columns, number % columns]
        norm = norms[kept][:, places].mean(1)
        found = summary[group]
        axes.loglog(rests[kept], norm, ".", markersize=5, alpha=0.5, color="#0072B2")
        axes.loglog(ends, found["upper"] * ends, "-", color="#D55E00")
        axes.loglog(ends, found["lower"] * ends, "--", color="#D55E00")
        # The lower bound may be so low that the tokens would not be told apart above it.
        bottom = 1e-3 * norm[norm > 0].min().item()
        axes.set_ylim(bottom=max(bottom, 0.3 * found["lower"] * ends[0].item()))
        if found["lower"] < bottom:
            text = f"lower bound: {found['lower']:.0e}·(1 − π), below the panel"
            axes.text(0.97, 0.04, text, transform=axes.transAxes, ha="right", fontsize="small")
        axes.set_title(f"{group}: correlation {found['correlation']:.2f}")
        if number % columns == 0:
            axes.set_ylabel("‖δ‖ / |w|")
        if number // columns == rows - 1:
            axes.set_xlabel("1 − π")
    lines = panels[0, 0].get_lines()
    names = ["a token", "upper bound", "lower bound"]
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    for spare in range(len(groups), rows * columns):
        panels[spare // columns, spare % columns].axis("off")
    common.save_figure(figure, args, "proposition")


def main():
    args, policy, _, [sampled] = common.begin(Args, __doc__, QUICK, need_gradient=False)
    policy.eval()  # a model that recomputes activations while it trains takes no cache
    numbers, rests, norms, singular = measure(policy, sampled, args)
    vocabulary, width = policy.lm.lm_head.weight.shape
    lower, upper = bounds_of(singular, vocabulary)
    groups = groups_of(len(policy.lm.model.layers))
    summary = summary_of(rests, norms, lower, upper, groups)
    draw(rests, norms, summary, groups, args)
    functions = [{"least": min(v[0] for v in of), "greatest": max(v[1] for v in of)} for of in zip(*singular)]
    result = {
        "tokens": len(rests),
        "vocabulary": vocabulary,
        "width": width,
        "groups": summary,
        "singular_values": functions,
        "responses": of_responses(numbers, rests, norms, upper, groups),
    }
    common.finish(args, "proposition", result)


if __name__ == "__main__":
    main()

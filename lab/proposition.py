"""Proposition 4.2: the gradient at a token's activations grows with 1 − π.

AR-Lopti (arXiv 2505.12929), Proposition 4.2: let w be a token's weight in the objective, a_ℓ the output of layer ℓ at
the position that predicts the token, δ_ℓ the gradient with respect to a_ℓ, and N the size of the vocabulary. If the
singular values of the Jacobian of every layer j lie between c_j and d_j, then

    Π c_j · |w| · √(N/(N−1)) · (1 − π)  ≤  ‖δ_ℓ‖  ≤  Π d_j · |w| · √2 · (1 − π)        over j > ℓ

The command measures ‖δ_ℓ‖ / |w|, the norm of the gradient of log π, for --tokens tokens of one batch. As in the proof,
δ_ℓ at the token's own position is the product of the layers' Jacobians there: earlier positions are constant. c_j and
d_j are the smallest and the largest singular value of these Jacobians over --jacobians of the tokens. The last function
is the final norm with the head, to the logits over the temperature. Its Jacobian maps some vectors to zero, as in every
language model, so the lower bound's condition is not met; the figure uses its smallest singular value all the same.

The embedding and the layers form at most five groups of neighbours, each shown by its mean norm; the logits are
the last group. Results: proposition.json and proposition.png.

    python -m lab.proposition
"""

import copy
import dataclasses
import math
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from tqdm import tqdm

from lab import common
from runtime import curves
from runtime.distributed import DEVICE
from runtime.settings import PositiveInt

MOST_GROUPS = 5  # groups of the embedding and the layers; the logits are one more
TINY = 1e-6  # below this 1 − π, float32 log-probabilities have no digits left
UNSURE = 0.25  # smallest 1 − π of a token that is not nearly certain


@dataclasses.dataclass
class Args(common.Args):
    tokens: PositiveInt = 600  # tokens of the batch whose gradients are measured
    rows: PositiveInt = 24  # responses that they come from
    jacobians: PositiveInt = 12  # tokens among these whose layers' Jacobians are measured


@contextmanager
def catch_activations(policy):
    """Collect [a_0, …, a_L−1] of the pass in this block, in a list: the embedding, each layer's output."""
    caught = []

    def catch_input(module, arguments, keywords):
        caught.append(arguments[0] if arguments else keywords["hidden_states"])

    def catch_output(module, arguments, output):
        caught.append(output[0] if isinstance(output, tuple) else output)

    layers = policy.lm.model.layers
    with ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(catch_input, with_kwargs=True))
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(catch_output))
        yield caught


def activations_of(policy, ids, mask, temperature):
    """Return (log π [1, T], [a_0, …, a_L−1], each [1, T, D]) of one response, in one graph. ids, mask: [1, T]."""
    with catch_activations(policy) as caught:
        logp, _ = policy(ids, mask, temperature)
    return logp, caught


def at_position(policy, ids, cache, position, temperature):
    """Return (log π of the token after this position, [a_0, …, a_L−1] at it, each [1, 1, D]), in a separate graph.

    ids: [1, T]; cache: their keys and values, which do not depend on the activations at later positions.
    """
    before = copy.deepcopy(cache)
    before.crop(position - ids.shape[1])  # a negative number: drops tokens from the end
    with catch_activations(policy) as caught:
        output = policy.lm.model(ids[:, position : position + 1], past_key_values=before)
    state = output.last_hidden_state[0]  # [1, D]
    logp, _ = policy.head(state, ids[:, position + 1], temperature, False)
    return logp[0], caught


def gradient_at_logits(logits, target, temperature):
    """Return ∇ log π(target) with respect to the logits over the temperature, [vocabulary]: one-hot minus π."""
    gradient = -(logits / temperature).softmax(-1)
    gradient[target] += 1
    return gradient


def jacobian(output, of):
    """Return d output / d of, [outputs, D]. output: a vector that depends on `of`, which is [1, 1, D]."""
    directions = torch.eye(len(output), device=output.device)
    [rows] = torch.autograd.grad(output, of, grad_outputs=directions, is_grads_batched=True, retain_graph=True)
    return rows[:, 0, 0]


def last_jacobian(policy, state, temperature):
    """Return d (logits / temperature) / d state, a matrix [vocabulary, D]. state: a_L−1, [1, 1, D]."""
    state = state.detach().requires_grad_()
    of_norm = jacobian(policy.lm.model.norm(state)[0, 0], state)  # [D, D]
    with torch.no_grad():
        return policy.lm.lm_head(of_norm.T).T / temperature  # the head is linear


def singular_values(policy, activations, temperature):
    """Return (smallest, largest) singular value of each function after a_0. activations: from at_position."""
    found = [extremes(jacobian(after[0, 0], before)) for before, after in pairwise(activations)]
    found.append(extremes(last_jacobian(policy, activations[-1], temperature)))
    return found


def extremes(matrix):
    """Return (smallest, largest) singular value of a matrix."""
    values = torch.linalg.svdvals(matrix.detach().double())
    return values[-1].item(), values[0].item()


def measure(policy, sampled, args):
    """Return (each token's response, its 1 − π, [n]; norms of its gradients [n, L + 1]; singular values).

    The norms are taken at a_0, …, a_L−1 and at the logits; singular values are measured for some tokens.
    """
    batch = sampled.batch
    generator = torch.Generator().manual_seed(args.seed)
    rows = torch.randperm(len(batch["ids"]), generator=generator)[: args.rows].tolist()
    per_row, per_row_jacobians = -(-args.tokens // len(rows)), -(-args.jacobians // len(rows))
    numbers, rests, norms, singular = [], [], [], []
    for row in tqdm(rows, desc="responses", disable=None):
        positions = batch["mask"][row].nonzero()[:, 0]  # the response's tokens
        end = int(positions[-1]) + 1
        ids = batch["ids"][row : row + 1, :end].to(DEVICE)
        with torch.no_grad():
            cache = policy.lm.model(ids, use_cache=True).past_key_values
        order = torch.randperm(len(positions), generator=generator)
        for number, t in enumerate(positions[order[:per_row]].tolist()):
            # The state before a token predicts it.
            logp, activations = at_position(policy, ids, cache, t - 1, args.temperature)
            gradients = torch.autograd.grad(logp, activations, retain_graph=True)
            with torch.no_grad():
                logits = policy.lm.lm_head(policy.lm.model.norm(activations[-1][0, 0]))
            gradients = [*gradients, gradient_at_logits(logits, ids[0, t], args.temperature)]
            numbers.append(row)
            norms.append([gradient.norm().item() for gradient in gradients])
            rests.append(-math.expm1(min(0.0, logp.item())))  # 1 − π, exact near π = 1
            if number < per_row_jacobians and len(singular) < args.jacobians:
                singular.append(singular_values(policy, activations, args.temperature))
    rests, norms = torch.tensor(rests).double(), torch.tensor(norms).double()
    return torch.tensor(numbers), rests, norms, singular


def bounds_of(singular, vocabulary):
    """Return the factors of 1 − π in both bounds, at each of a_0, …, a_L−1 and the logits. singular: of some tokens."""
    lower, upper = [math.sqrt(vocabulary / (vocabulary - 1))], [math.sqrt(2)]
    for of_function in reversed(list(zip(*singular))):  # from the last function back
        lower.insert(0, lower[0] * min(least for least, _ in of_function))
        upper.insert(0, upper[0] * max(greatest for _, greatest in of_function))
    return lower, upper


def groups_of(num_layers):
    """Return [(name, [places among the activations])]: the embedding and layers, then the logits."""
    groups = []
    for part in torch.arange(num_layers + 1).tensor_split(min(MOST_GROUPS, num_layers + 1)):
        part = part.tolist()
        name = f"layers {part[0]} to {part[-1]}" if len(part) > 1 else f"layer {part[0]}"  # 0: the embedding
        groups.append(("embedding" if part == [0] else name, part))
    return [*groups, ("logits", [num_layers + 1])]


def summary_of(rests, norms, lower, upper, groups):
    """Return per group the correlation with 1 − π, the bounds, and the fraction of tokens within each layer's bounds.

    Norms and bounds are means over the group's layers. if_unsure: 1 − π ≥ UNSURE. Excludes 1 − π that rounds to 0.
    """
    norms, rests = norms[rests > TINY], rests[rests > TINY]
    # The logits' bounds are exact, so any violation is rounding: 1 − π is as precise as a float32
    # log-probability, 1e-7.
    slack = 1e-6 + 3e-7 / rests  # [n]
    unsure = rests >= UNSURE
    result = {}
    for name, places in groups:
        norm = norms[:, places].mean(1)
        inside = torch.ones(len(rests), dtype=torch.bool)
        for i in places:
            inside &= norms[:, i] <= upper[i] * rests * (1 + slack)
            inside &= norms[:, i] >= lower[i] * rests * (1 - slack)
        result[name] = {
            "correlation": common.correlation(norm, rests),
            "correlation_if_unsure": common.correlation(norm[unsure], rests[unsure]),
            "correlation_of_logs": common.correlation(norm.clamp(min=1e-30).log(), rests.log()),
            "lower": sum(lower[i] for i in places) / len(places),
            "upper": sum(upper[i] for i in places) / len(places),
            "median_slope": (norm / rests).median().item(),
            "inside": inside.double().mean().item(),
        }
    return result


def of_responses(numbers, rests, norms, upper, groups):
    """Return each response's 1 − π, and the norms by group. numbers: each token's response, [n].

    above: the upper bound divided by the median token's norm, at the layer where this is largest.
    """
    found = []
    for number in numbers.unique():
        of_it = (numbers == number) & (rests > TINY)
        slopes = (norms[of_it] / rests[of_it, None]).median(0).values.tolist()[:-1]
        above = max(bound / slope for bound, slope in zip(upper, slopes))
        by_group = {name: norms[of_it][:, at].mean(1).tolist() for name, at in groups}
        found.append({"rest": rests[of_it].tolist(), "norm": by_group, "above": above})
    return found


def draw(rests, norms, summary, groups, args):
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    kept = rests > TINY
    shown = f"{int(kept.sum())} of {len(rests)} tokens of {common.name_of(args.model)}"
    title = f"gradient of log π at the activations of {shown}"
    figure = curves.new_figure(curves.WIDTH, 4.6 * rows, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
    ends = torch.tensor([rests[kept].min().item(), 1.0])
    for number, (axes, (group, places)) in enumerate(zip(panels.flat, groups)):
        norm = norms[kept][:, places].mean(1)
        found = summary[group]
        axes.loglog(rests[kept], norm, ".", markersize=5, alpha=0.5, color="#0072B2")
        axes.loglog(ends, found["upper"] * ends, "-", color="#D55E00")
        axes.loglog(ends, found["lower"] * ends, "--", color="#D55E00")
        # The lower bound may be so low that no tokens could be distinguished above it.
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
    names = ["a token", "upper bound", "lower bound"]
    figure.legend(panels[0, 0].get_lines(), names, loc="outside lower center", ncols=3, frameon=False)
    for spare in panels.flat[len(groups) :]:
        spare.axis("off")
    common.save_figure(figure, args, "proposition")


def main():
    args, policy, _, [sampled] = common.begin(Args, __doc__, need_gradient=False)
    policy.eval()  # a model that recomputes activations in training takes no cache
    numbers, rests, norms, singular = measure(policy, sampled, args)
    vocabulary, width = policy.lm.lm_head.weight.shape
    lower, upper = bounds_of(singular, vocabulary)
    groups = groups_of(len(policy.lm.model.layers))
    summary = summary_of(rests, norms, lower, upper, groups)
    draw(rests, norms, summary, groups, args)
    functions = [{"least": min(v[0] for v in of), "greatest": max(v[1] for v in of)} for of in zip(*singular)]
    result = {"tokens": len(rests), "vocabulary": vocabulary, "width": width, "groups": summary}
    result |= {"singular_values": functions, "responses": of_responses(numbers, rests, norms, upper, groups)}
    common.finish(args, "proposition", result)


if __name__ == "__main__":
    main()

"""Solutions of lesson 10: KL. Run as a script, it prints the numbers of 10.3."""

import torch


def kl_estimates(logp, ref_logp):
    difference = logp - ref_logp  # d, [N, T]
    return difference, difference.square() / 2, (-difference).exp() + difference - 1


def rewards_with_kl(rewards, logp, ref_logp, mask, beta):
    k1 = (logp - ref_logp).detach().masked_fill(~mask, 0)  # [N, T]
    return rewards - beta * k1.sum(1)


# 10.3  Whose gradient does the policy follow?
#
# A policy that writes one of three tokens, with π = 0.6, 0.3, 0.1 and π_ref = 0.2, 0.3, 0.5. The
# weights are the logits. In the loss, the gradient is the mean of ∇k over the tokens that π draws;
# nothing differentiates the drawing. In the reward, it is the mean of k·∇log π. Both are computed
# over all three tokens, so nothing is sampled:
#
#     gradient of KL(π ‖ π_ref): 0.360, -0.149, -0.211
#     gradient of KL(π_ref ‖ π): 0.400, 0.000, -0.400
#     k1 in the loss: 0.000, 0.000, 0.000; in the reward: 0.360, -0.149, -0.211
#     k2 in the loss: 0.360, -0.149, -0.211; in the reward: 0.067, -0.147, 0.080
#     k3 in the loss: 0.400, 0.000, -0.400; in the reward: -0.040, -0.149, 0.189
#     mean of k1 0.498, of k2 0.492, of k3 0.498; KL(π ‖ π_ref) is 0.498
#
# - k1 in the loss does nothing: Σ π·∇log π = 0.
# - k1 in the reward and k2 in the loss follow ∇KL(π ‖ π_ref), exactly.
# - k3 in the loss, which grpo.py has, follows ∇KL(π_ref ‖ π) = π − π_ref.
# - k3 in the reward follows the difference of the two, which points away from π_ref at the first
#   and the third token: −0.040 and 0.189 where ∇KL(π ‖ π_ref) has 0.360 and −0.211.
# - An estimate with the right mean need not have the right gradient: k3 has the mean, and k2 the
#   gradient.


def gradients(policy, reference):
    """{name: gradient by the logits}, each [V], and the means of the estimates. Both [V]."""
    logits = policy.log().requires_grad_()
    logp, ref_logp = logits.log_softmax(0), reference.log()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    found = {
        "KL(π ‖ π_ref)": gradient((logp.exp() * (logp - ref_logp)).sum()),
        "KL(π_ref ‖ π)": gradient((reference * (ref_logp - logp)).sum()),
    }
    means = []
    for name, estimate in zip(("k1", "k2", "k3"), kl_estimates(logp, ref_logp)):
        found[f"{name} in the loss"] = gradient((policy * estimate).sum())
        found[f"{name} in the reward"] = gradient((policy * estimate.detach() * logp).sum())
        means.append((policy * estimate.detach()).sum().item())
    return found, means


def open_question():
    policy = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    found, means = gradients(policy, reference)
    shown = {
        name: ", ".join(f"{round(number, 3) + 0:.3f}" for number in value.tolist()) for name, value in found.items()
    }
    for name in ("KL(π ‖ π_ref)", "KL(π_ref ‖ π)"):
        print(f"gradient of {name}: {shown[name]}")
    for name in ("k1", "k2", "k3"):
        in_loss, in_reward = shown[f"{name} in the loss"], shown[f"{name} in the reward"]
        print(f"{name} in the loss: {in_loss}; in the reward: {in_reward}")
    exact = (policy * (policy / reference).log()).sum()
    means = "mean of k1 {:.3f}, of k2 {:.3f}, of k3 {:.3f}".format(*means)
    print(f"{means}; KL(π ‖ π_ref) is {exact:.3f}")


if __name__ == "__main__":
    open_question()

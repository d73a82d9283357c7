"""Solutions of the exercise on nano_grpo.py (lesson 4): what another algorithm changes in the page.

CHANGES: {script: [(a piece of the page, what replaces it), ...]}. `python -m course.check_page`
passes with the changes of each script.
"""

NO_GROUPS = """\
    groups = rewards.view(-1, GROUP)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + 1e-6)).view(-1, 1)
"""
CHANGES = {
    "dr_grpo": [
        ("BETA = 0.001", "BETA = 0.0"),
        ("(groups - mean) / (std + 1e-6)", "(groups - mean)"),
        ("mask[minibatch].sum()", "len(minibatch) * MAX_TOKENS"),
    ],
    "reinforce": [
        (NO_GROUPS, "    return (rewards - rewards.mean()).view(-1, 1)\n"),
        ("    return BETA * kl - surrogate\n", "    return -advantages * new\n"),
    ],
}

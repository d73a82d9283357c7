"""Lesson 7: entropy. Write the two functions, then run `python -m course.check 7`.

N is the number of responses, T the number of positions, V the size of the vocabulary.
"""

import torch


def entropy(logits):
    """The entropy of softmax(logits), [...], in nats. logits: [..., V], any number of dimensions.

        H = −Σ_v p_v · log p_v        (Policy.head in grpo.py)

    Pay attention to probabilities that round to 0: 0 · log 0 is NaN.
    """
    raise NotImplementedError


def top_entropy_mask(entropy, mask, share):
    """The response tokens of highest entropy, [N, T] of bool.

    entropy [N, T]. mask [N, T], of bool: True on response tokens. share: such as 0.2.

        H ≥ τ, where τ is the ⌈share·n⌉-th largest entropy of the n response tokens
                       (Wang et al. 2025, arXiv 2506.01939; entropy_threshold in entropy_top.py)

    Pay attention: τ is one number for the whole batch, not one for each response; padding does not
    count; and tokens that tie with τ all enter.
    """
    raise NotImplementedError


# 7.3 (open)  Which tokens of kk_tiny have the highest entropy? Sample responses, and list the words
# that are drawn at those places. Do they decide how the reasoning goes on?
#
#     from course.lesson_02.step import sample      (lesson 2)
#
# Or: python -m lab.forking_tokens --batches 1 --out runs/lab      (needs vLLM; writes
# runs/lab/forking_tokens.json and .png; recorded: lab/results/forking_tokens.json)

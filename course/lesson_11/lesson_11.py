"""Lesson 11: runs that fail. Write the three functions, then run `python -m course.check 11`.

S is the number of steps, M the number of metrics, R the number of healthy runs. Steps count from 1.
"""

import torch


def collapsed_at(entropy, share):
    """The step at which the entropy collapsed, an int; 0: it did not.

    entropy: [S], of each step. share: what counts as collapsed, below this share of step 1's,
    such as 0.1.

    It is the first step from which on the entropy stays below share · entropy of step 1, up to the
    last step.

    Pay attention to a run that recovers: a low step with a higher one after it is no collapse.
    """
    raise NotImplementedError


def gap_jumps_at(gap, usual, factor):
    """The step at which sampler and trainer came apart, an int; 0: they did not.

    gap: [S], sampler_gap of each step, in nats; may hold NaN. usual: a gap up to here is rounding.
    factor: how many times as large as in step 1 it may become.

    It is the first step after step 1 at which the gap is not within max(usual, factor · gap of
    step 1).                                     (check_gap in runtime/records.py: step 2 alone)

    Pay attention to NaN: every comparison with it is False, and it is no small gap. If step 1's gap
    is NaN, `usual` alone is the bound.
    """
    raise NotImplementedError


def first_sign(run, healthy, margin):
    """Which metric showed first that a run is not healthy: (step, metric), two ints; (0, -1): none.

    run: [S, M]. healthy: [R, S, M], the same metrics of runs that went well. margin: how many
    widths a metric may be outside of the healthy runs' range. metric counts from 0.

        width  = highest − lowest value of the healthy runs at a step, the largest of all steps: one
                 for each metric, at least 1e-6
        excess = max(run − highest, lowest − run) / width, with the step's highest and lowest

    It is the first step at which some metric's excess is above margin. If several are at that step,
    it is the one with the largest excess.

    Pay attention to the units: nats, tokens and shares can be compared in widths alone.
    """
    raise NotImplementedError


# 11.4 (open)  Let first_sign read the recorded runs of this lesson. Which metric shows each failure
# first? How often does it find a failure in a healthy run, judged by the two others? Metrics:
# entropy, kl, grad_norm, response_tokens, format_rate, sampler_gap, reward. Try margins 0.5, 1 and
# 2, then add clip_rate. For 11.1: share 0.1. For 11.2: usual 0.01 (USUAL_GAP, float32) and factor 3
# (JUMP, both in runtime/records.py). Row 0 is the evaluation before training:
#
#     rows = tools.kept.run("course/results/healthy_seed_0")["rows"][1:]

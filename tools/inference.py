"""Draw conclusions from a few numbers: intervals by Student's t, Holm's procedure, a bootstrap of clusters.

Used by tools/maintain/claims.py, tools/compare.py and evaluation/words.py. scipy has the distributions and the ranks.
"""

import math
import re
from dataclasses import dataclass, replace
from statistics import fmean, variance

import numpy
import pandas
from scipy import stats

SHOWS, OPPOSITE, NO_EFFECT = "shows", "the opposite", "no effect of that size"
TOO_FEW = "too few runs to tell"
LEAST = 3  # batches or seeds; with fewer, there is no verdict
DRAWS = 2000  # resamples of the bootstrap


@dataclass(frozen=True)
class Estimate:
    """A mean of n values or clusters, positive if the claim holds, and its four possible verdicts at a level."""

    label: str
    mean: float
    error: float  # standard error of the mean
    df: int
    n: int
    sides: tuple = ()  # means of the compared sides
    size: float = 0.0  # the claimed effect; 0: a threshold
    is_ratio: bool = False  # the values are logarithms
    threshold: float | None = None  # of a correlation: mean, error and size are in Fisher's z, relative to its z
    is_amount: bool = False  # 0 is a claimed amount: below it is less, not the opposite
    values: tuple = ()
    of: tuple = ()  # runs whose sum each value is, ((name, factor), …); (): values that no other comparison has

    def p(self):
        if not self.error:
            return float(self.mean == 0)
        return 2 * float(stats.t.sf(abs(self.mean / self.error), self.df))

    def interval(self, level):
        if self.n < LEAST:
            return -math.inf, math.inf
        return self.mean - self.half(level), self.mean + self.half(level)

    def half(self, level):
        """Return half the length of the interval; 0 for a single value."""
        return float(stats.t.isf(level / 2, self.df)) * self.error if self.df else 0.0

    def word(self, level):
        low, high = self.interval(level)
        if low > 0:
            return SHOWS
        if high < 0 and not self.is_amount:
            return OPPOSITE
        return NO_EFFECT if high < self.size else TOO_FEW

    def on_page(self, value):
        """Return a value as the page shows it: a ratio, how far a correlation is above the threshold, or itself."""
        if self.is_ratio:
            return math.exp(value)
        if self.threshold is not None:
            return math.tanh(math.atanh(self.threshold) + value) - self.threshold
        return value

    def reversed(self):
        pairs = []
        for pair in self.label.split("; "):
            pairs.append(re.sub(r"^(.*) minus (.*?)( \(.*\))?$", r"\2 minus \1\3", pair))
        return replace(self, label="; ".join(pairs), mean=-self.mean, sides=self.sides[::-1])

    def numbers(self, level):
        """Describe the two sides, the difference with its interval, and the claimed effect."""
        label = f"{self.label}: " if self.label else ""
        sides = " against ".join(map(shown, self.sides))
        if self.n < LEAST:
            return f"{label}{sides}, of {self.n} value{'s' * (self.n != 1)}"
        sign, unit = ("", " times") if self.is_ratio else ("+", "")
        mean, low, high = (shown(self.on_page(value), sign) for value in (self.mean, *self.interval(level)))
        claimed = f", claimed {shown(self.on_page(self.size))}" if self.size else ""
        if self.size and self.interval(level)[1] < self.size:
            claimed += " (excluded)"
        return f"{label}{sides}{'; ' if sides else ''}{mean}{unit} ({low} to {high}){claimed}"


def shown(value, sign=""):
    """Format a number with three digits, or no decimals if it is large: 0.0678, −12.4, 1559."""
    text = f"{value:{sign}.0f}" if 100 <= abs(value) < 1e6 else f"{value:{sign}.3g}"
    return text.replace("-", "−")


def fishers_z(correlation):
    """Return artanh: on this scale a correlation's error does not depend on its size. ±1 would be infinite."""
    return math.atanh(numpy.clip(correlation, 1e-9 - 1, 1 - 1e-9))


def of_values(label, pairs, **more):
    """Return the Estimate of independent values. pairs: [(the side claimed to be larger, the other side)].

    ValueError if one is NaN or infinite.
    """
    values = [a - b for a, b in pairs]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{label}: a value is NaN or infinite")
    error = math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0
    more |= {"sides": tuple(map(fmean, zip(*pairs))), "values": tuple(values)}
    return Estimate(label, fmean(values), error, len(values) - 1, len(values), **more)


def pooled(estimates):
    """Return the estimates with one standard deviation of a run, pooled over them.

    Comparisons with the same baseline share its runs, so together they have less information than independent ones.
    Satterthwaite's degrees of freedom account for that.
    """
    # A row per estimate, a column per run; an estimate that shares no run has a column of its own.
    factors = pandas.DataFrame([dict(e.of) or {i: 1.0} for i, e in enumerate(estimates)]).fillna(0).to_numpy()
    covariance = factors @ factors.T  # of the estimates' values, if runs are independent with variance 1
    dfs = numpy.array([e.df for e in estimates])
    if not dfs.any():
        return estimates
    weight = dfs @ covariance.diagonal()
    of_a_run = sum(e.error**2 * e.n * e.df for e in estimates) / weight  # variance
    df = float(weight**2 / (numpy.minimum.outer(dfs, dfs) * covariance**2).sum())
    errors = numpy.sqrt(of_a_run * covariance.diagonal() / [e.n for e in estimates])
    return [replace(e, error=float(error), df=df) for e, error in zip(estimates, errors)]


def holms_level(estimates, alpha):
    """Return the level at which Holm's procedure tests the estimates (with at least LEAST values) that it can't reject.

    All p-values that it rejects are below, too. alpha: the chance, at most, that anything is rejected by luck.
    """
    p_values = sorted(one.p() for one in estimates if one.n >= LEAST)
    rejected = 0
    for p in p_values:
        if p > alpha / (len(p_values) - rejected):
            break
        rejected += 1
    return alpha / max(1, len(p_values) - rejected)


def correlation(clusters, in_ranks=False):
    """Return (Pearson's correlation, its standard error by bootstrap, the bootstrap's correlations).

    (None, None, []) if a number is constant. A single cluster has no standard error: None.

    clusters: [(x, y)], two lists of numbers each, such as a puzzle's responses. The bootstrap resamples whole clusters,
    because the numbers in one are not independent. in_ranks: use the ranks among all numbers, which gives Spearman's.
    """
    sides = [numpy.concatenate([numpy.asarray(c[i], float) for c in clusters]) for i in (0, 1)]
    if any(len(set(side)) < 2 for side in sides):
        return None, None, []
    # Centre them, so that the sums of squares keep their digits.
    x, y = (stats.zscore(stats.rankdata(side) if in_ranks else side) for side in sides)
    places = numpy.repeat(range(len(clusters)), [len(c[0]) for c in clusters])
    sums = numpy.array([numpy.bincount(places, column) for column in (x**0, x, y, x * x, y * y, x * y)])
    share = [1 / len(clusters)] * len(clusters)
    counts = numpy.random.default_rng(0).multinomial(len(clusters), share, DRAWS)
    n, x, y, xx, yy, xy = sums @ numpy.vstack([numpy.ones(len(clusters)), counts]).T
    spread = (n * xx - x * x) * (n * yy - y * y)
    varies = spread > 1e-12 * n**4  # in a draw of equal numbers only rounding is left: its correlation is 0
    found = numpy.zeros(len(n))
    found[varies] = (n * xy - x * y)[varies] / numpy.sqrt(spread[varies])
    return float(found[0]), float(found[1:].std(ddof=1)) if len(clusters) > 1 else None, found[1:]

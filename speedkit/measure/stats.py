"""Is it faster, and is it as good: Student's t intervals on paired measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A mean and the interval that holds the true one with the given confidence."""

    mean: float
    low: float
    high: float
    confidence: float
    count: int


@dataclass(frozen=True)
class Interval:
    """A ratio of times (time A / time B: above 1 means that B is faster) and its confidence interval."""

    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int


@dataclass(frozen=True)
class NonInferiority:
    """`passed` when the change of quality is, with the given confidence, no worse than `-margin`."""

    mean_change: float
    lower: float
    margin: float
    confidence: float
    pairs: int
    passed: bool


def mean_interval(values: Sequence[float], confidence: float = 0.99) -> Mean:
    """Return the two-sided Student t interval of the mean of `values`.

    Raises ValueError for fewer than two values, a value that is not finite, or a confidence outside 0..1.
    """
    mean, error, count = _mean_and_error(values, confidence)
    reach = _quantile(0.5 + confidence / 2, count) * error
    return Mean(mean, mean - reach, mean + reach, confidence, count)


def paired_interval(a_s: Sequence[float], b_s: Sequence[float], confidence: float = 0.99) -> Interval:
    """Return the ratio A / B of paired times (seconds) and its Student t interval, both on the log scale.

    Pairing cancels what slows both windows of a pair alike; logarithms make the result symmetric: swapping A and B
    gives exactly the reciprocal. The ratio is the geometric mean of the pairs' ratios.
    Raises ValueError for lists of unequal length, fewer than two pairs, or a time that is not positive.
    """
    if len(a_s) != len(b_s):
        raise ValueError(f"pairs need as many times of A as of B, not {len(a_s)} and {len(b_s)}")
    for name, times in (("A", a_s), ("B", b_s)):
        for index, seconds in enumerate(times):
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"time {index} of {name} is {seconds} s: a time must be positive and finite")
    logs = mean_interval([math.log(a) - math.log(b) for a, b in zip(a_s, b_s, strict=True)], confidence)
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), confidence, logs.count)


def noise_floor(pairs: Sequence[tuple[float, float]], confidence: float = 0.99) -> float:
    """Return the largest ratio (1 or more) that comparing a plan with itself could show: its A/A control.

    `pairs` are times (seconds) of two windows of the *same* plan, as far apart and as many as the windows of the
    comparison they belong to; which of the two was measured first must change from pair to pair, as it does there.
    They are analysed exactly as a comparison is, and the floor is the end of the interval farther from 1, on the log
    scale: it is low only when the control saw no difference *and* had little noise. Raises ValueError as
    `paired_interval` does.
    """
    control = paired_interval([pair[0] for pair in pairs], [pair[1] for pair in pairs], confidence)
    return max(control.high, 1 / control.low)


def non_inferior(changes: Sequence[float], margin: float, confidence: float = 0.95) -> NonInferiority:
    """Test that quality was kept: the one-sided lower bound of the mean change must be at least `-margin`.

    `changes` are, per seed, the quality of the new plan minus that of the reference, so that larger is better.
    Raises ValueError for fewer than two seeds, a change that is not finite, or a negative margin.
    """
    if not (margin >= 0 and math.isfinite(margin)):
        raise ValueError(f"margin is {margin}: it is the loss of quality that still counts as equal, zero or more")
    mean, error, count = _mean_and_error(changes, confidence)
    lower = mean - _quantile(confidence, count) * error
    return NonInferiority(mean, lower, margin, confidence, count, passed=lower >= -margin)


def _mean_and_error(values: Sequence[float], confidence: float) -> tuple[float, float, int]:
    """Return the mean, its standard error (n - 1 in the variance) and the count of `values`."""
    count = len(values)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 measurements, not {count}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: it must lie between 0 and 1, such as 0.99")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"measurement {index} is {value}: it must be a finite number")
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count), count


def _quantile(probability: float, count: int) -> float:
    """Return the quantile of Student's t distribution with `count - 1` degrees of freedom."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without the second that importing that costs

    return float(stdtrit(count - 1, probability))

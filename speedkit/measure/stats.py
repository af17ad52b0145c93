"""Is it faster, and is it as good: Student's t intervals on paired measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A mean and the interval that holds the true one with the confidence asked for."""

    mean: float
    low: float
    high: float


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
    """`passed` when `lower`, the bound above which the change of quality is, lies no lower than minus the margin."""

    mean_change: float
    lower: float
    passed: bool


def mean_interval(values: Sequence[float], confidence: float = 0.99) -> Mean:
    """Return the two-sided Student t interval of the mean of `values`. Raises ValueError for fewer than two."""
    mean, reach = _mean_and_reach(values, confidence, sides=2)
    return Mean(mean, mean - reach, mean + reach)


def paired_interval(a_s: Sequence[float], b_s: Sequence[float], confidence: float = 0.99) -> Interval:
    """Return the ratio A / B of paired times (seconds), the geometric mean of the pairs' ratios, with its t interval.

    Pairing cancels what slows both windows alike; on the log scale, swapping A and B gives the reciprocal. Raises
    ValueError for lists of unequal length, fewer than two pairs, or a time that is not positive.
    """
    if len(a_s) != len(b_s):
        raise ValueError(f"pairs need as many times of A as of B, not {len(a_s)} and {len(b_s)}")
    for name, times in (("A", a_s), ("B", b_s)):
        for index, seconds in enumerate(times):
            if not 0 < seconds < math.inf:
                raise ValueError(f"time {index} of {name} is {seconds} s: a time must be positive and finite")
    logs = mean_interval([math.log(a) - math.log(b) for a, b in zip(a_s, b_s, strict=True)], confidence)
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), confidence, len(a_s))


def noise_floor(pairs: Sequence[tuple[float, float]], confidence: float = 0.99) -> float:
    """Return the largest ratio (1 or more) that comparing a plan with itself could show: its A/A control.

    `pairs` are times (seconds) of two windows of the *same* plan, as many and as far apart as the comparison's, now the
    earlier one first and now the later. The floor is the end of their interval that is farther from 1.
    """
    control = paired_interval([pair[0] for pair in pairs], [pair[1] for pair in pairs], confidence)
    return max(control.high, 1 / control.low)


def non_inferior(changes: Sequence[float], margin: float, confidence: float = 0.95) -> NonInferiority:
    """Test that quality was kept: the one-sided lower bound of the mean change must be at least `-margin`.

    `changes` are, per seed, the quality of the new plan minus that of the reference: larger is better. Raises
    ValueError for fewer than two seeds, a change that is not finite, or a negative margin.
    """
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin is {margin}: it is the loss of quality that still counts as equal, zero or more")
    mean, reach = _mean_and_reach(changes, confidence, sides=1)
    return NonInferiority(mean, mean - reach, passed=mean - reach >= -margin)


def _mean_and_reach(values: Sequence[float], confidence: float, sides: int) -> tuple[float, float]:
    """Return the mean, and how far from it the one or two ends of its Student t interval lie."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without the second that importing that costs

    count = len(values)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 measurements, not {count}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: it must lie between 0 and 1, such as 0.99")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"measurement {index} is {value}: it must be a finite number")
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return mean, error * float(stdtrit(count - 1, 1 - (1 - confidence) / sides))

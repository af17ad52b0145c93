"""Is it faster, and is it as good: Student's t intervals on paired measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A ratio of times (time A / time B: above 1 means that B is faster) and its 99 % confidence interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class NonInferiority:
    """`passed` when `lower`, the bound above which the change of quality is, lies no lower than minus the margin."""

    mean_change: float
    lower: float
    passed: bool


def paired_interval(a_s: Sequence[float], b_s: Sequence[float]) -> Interval:
    """Return the ratio A / B of paired times (seconds), the geometric mean of the pairs' ratios, with its t interval.

    Pairing cancels what slows both windows alike; on the log scale, swapping A and B gives the reciprocal. Raises
    ValueError for lists of unequal length, fewer than two pairs, or a time that is not positive and finite.
    """
    logs = [math.log(a) - math.log(b) for a, b in zip(a_s, b_s, strict=True)]
    mean, reach = _mean_and_reach(logs, tail=0.005)
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def noise_floor(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the largest ratio (1 or more) that comparing a plan with itself could show: its A/A control.

    `pairs` are times (seconds) of windows set against others of the *same* plans, as far apart as the comparison's, now
    the earlier one first and now the later. The floor is the end of their interval that is farther from 1.
    """
    control = paired_interval(*zip(*pairs, strict=True))
    return max(control.high, 1 / control.low)


def non_inferior(changes: Sequence[float], margin: float) -> NonInferiority:
    """Test that quality was kept: the one-sided 95 % lower bound of the mean change must be at least `-margin`.

    `changes` are, per seed, the quality of the new plan minus that of the reference: larger is better. Raises
    ValueError for fewer than two seeds or a change that is not finite.
    """
    mean, reach = _mean_and_reach(changes, tail=0.05)
    return NonInferiority(mean, mean - reach, passed=mean - reach >= -margin)


def _mean_and_reach(values: Sequence[float], tail: float) -> tuple[float, float]:
    """Return the mean, and how far from it an end of its Student t interval lies, beyond which a share `tail` is."""
    from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without the second that importing that costs

    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        raise ValueError(f"an interval needs at least 2 measurements, all finite, not {list(values)}")
    mean = math.fsum(values) / count
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return mean, error * float(stdtrit(count - 1, 1 - tail))

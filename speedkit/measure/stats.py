"""Is it faster, and is it as good: intervals on paired times, when to stop measuring, and non-inferiority."""

import functools
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

LOOKS = (10, 20, 40, 80)  # pairs after which a comparison may end
FALSE_KEEP = 0.0018  # one-sided, nominal: trimmed intervals cover 98.5 % where 99 % is asked, which makes it 0.0036
FALSE_DROP = 0.05
WORTH = math.log(1.02)  # a smaller gain is not worth a line in a plan
TAIL = 0.005  # of the 99 % interval that is reported, on each side

Decision = Literal["faster", "slower", "not worth it", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A ratio of times (time A / time B: above 1 means that B is faster) and its confidence interval, 99 % or wider."""

    ratio: float
    low: float
    high: float


Judgement = tuple[Decision, Interval]  # the interval is the one that decides


class NonInferiority(NamedTuple):
    """The change of quality (larger is better), its standard error, and the ends of its two one-sided intervals."""

    mean_change: float
    error: float
    lower: float
    upper: float
    passed: bool  # shown to be as good within the margin
    worse: bool  # shown to be worse; neither is "not decided"


def log_ratios(a_s: Sequence[float], b_s: Sequence[float]) -> list[float]:
    """Return log(A / B) of paired times (seconds). Raises ValueError unless all are positive and finite."""
    return [math.log(a) - math.log(b) for a, b in zip(a_s, b_s, strict=True)]


def trimmed_mean(values: Sequence[float], tail: float) -> tuple[float, float]:
    """Return the 20 % trimmed mean, and its distance to either end of its interval, with a share `tail` beyond each.

    The standard error is that of the winsorized values: Tukey and McLaughlin (1963), Yuen (1974). A burst of other
    load on the machine falls into the tails. Raises ValueError for fewer than two values or one that is not finite.
    """
    _check(values)
    count = len(values)
    cut = count // 5
    inner = sorted(values)[cut : count - cut]
    winsorized = [inner[0]] * cut + inner + [inner[-1]] * cut
    freedom = len(inner) - 1
    error = statistics.stdev(winsorized) * math.sqrt((count - 1) / len(inner) / freedom)
    return statistics.fmean(inner), error * _student(freedom, tail)


def total_ratio(a_s: Sequence[float], b_s: Sequence[float], tail: float) -> tuple[float, float]:
    """Return the logarithm of total time A / total time B of paired turns, and its distance to either end.

    The standard error is that of a ratio of two means. Each second counts: what is rare does, too.
    """
    a_mean_s = statistics.fmean(a_s)
    b_mean_s = statistics.fmean(b_s)
    rest = [a / a_mean_s - b / b_mean_s for a, b in zip(a_s, b_s, strict=True)]
    error = statistics.stdev(rest) / math.sqrt(len(rest))
    return math.log(a_mean_s / b_mean_s), error * _student(len(rest) - 1, tail)


def paired_interval(a_s: Sequence[float], b_s: Sequence[float], tail: float = TAIL) -> Interval:
    """Return the ratio A / B of paired times (seconds): the trimmed mean of the logarithms, with its interval.

    A share `tail` lies beyond each end: 99 % within by default. Pairing cancels what slows both alike; on the log
    scale, swapping A and B gives the reciprocal. Raises ValueError as `log_ratios` and `trimmed_mean` do.
    """
    return _interval(*trimmed_mean(log_ratios(a_s, b_s), tail))


def _interval(mean: float, reach: float) -> Interval:
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach))


def share_of(count: int, looks: Sequence[int]) -> float:
    """Return the share of the allowed error that a look at `count` pairs spends: all, where it is the only one.

    The shares of all `looks` add up to 1 (Bonferroni), so that looking often keeps it.
    """
    if not looks or count < looks[0]:  # it has ended before the first
        return 1.0
    return min(1.0, count / sum(looks))


def decide(logs: Sequence[float], looks: Sequence[int] = LOOKS) -> Decision:
    """Return what a look at so many pairs, one of `looks`, shows of B: `logs` are log(time A / time B)."""
    return judge(functools.partial(trimmed_mean, logs), share_of(len(logs), looks))[0]


def judge(estimate: Callable[[float], tuple[float, float]], share: float) -> Judgement:
    """Return what a look that spends a share of the allowed error shows of B, and the interval by which it is decided.

    `estimate` takes the error beyond each end, and returns log(time A / time B) and its distance to either end.
    """
    mean, reach = estimate(FALSE_KEEP * share)
    interval = _interval(mean, reach)
    if mean - reach > 0:
        return "faster", interval
    if mean + reach < 0:
        return "slower", interval
    mean, reach = estimate(FALSE_DROP * share)
    if mean + reach < WORTH:
        return "not worth it", interval
    return "undecided", interval


def non_inferior(changes: Sequence[float], margin: float, *, tail: float = 0.05) -> NonInferiority:
    """Test that quality was kept by its `changes`, new minus reference, where each pair is of the same items or seed.

    Student's t, an error of `tail` on each side. Raises ValueError for fewer than two changes or one not finite.
    """
    _check(changes)
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    return _judge(statistics.fmean(changes), error, freedom=len(changes) - 1, margin=margin, tail=tail)


def welch_non_inferior(
    baseline: Sequence[float], new: Sequence[float], margin: float, *, tail: float = 0.05
) -> NonInferiority:
    """Test the same by scores that come in no pairs; plans may differ in how many they have and how these scatter.

    Welch's t, with the degrees of freedom of Satterthwaite. Raises ValueError for fewer than two of a plan or a value
    that is not finite.
    """
    _check(baseline, new)
    change = statistics.fmean(new) - statistics.fmean(baseline)
    total = squares = 0.0
    for values in (baseline, new):
        part = statistics.variance(values) / len(values)
        total += part
        squares += part**2 / (len(values) - 1)
    freedom = min(len(baseline), len(new)) - 1.0  # of scores that are all alike, too
    if total:
        freedom = total**2 / squares
    return _judge(change, math.sqrt(total), freedom=freedom, margin=margin, tail=tail)


def _judge(change: float, error: float, *, freedom: float, margin: float, tail: float) -> NonInferiority:
    reach = error * _student(freedom, tail)
    lower = change - reach
    upper = change + reach
    passed = lower >= -margin
    return NonInferiority(change, error, lower, upper, passed, worse=not passed and upper < 0)


def _check(*samples: Sequence[float]) -> None:
    for values in samples:
        if len(values) < 2 or not all(map(math.isfinite, values)):
            raise ValueError(f"an interval needs at least 2 measurements, all finite, not {list(values)}")


def _student(freedom: float, tail: float) -> float:
    with warnings.catch_warnings():  # of which scipy adds a filter as it is imported
        from scipy.special import stdtrit  # what scipy.stats.t.ppf calls, without the second that importing that costs

    return float(stdtrit(freedom, 1 - tail))

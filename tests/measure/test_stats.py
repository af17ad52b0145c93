"""The intervals: right against scipy, right in simulation, and strict about what they are given."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind

from speedkit.measure import stats

A = [1.02, 0.98, 1.05, 1.01, 0.97, 1.10]
B = [0.91, 0.93, 0.97, 0.90, 0.92, 0.99]


def test_paired_interval_is_scipys_yuen_test_of_the_logarithms():
    logs, interval = np.log(A) - np.log(B), stats.paired_interval(A, B)
    scipys = ttest_ind(logs, np.zeros(len(logs)), equal_var=False, trim=0.2).confidence_interval(0.99)
    assert (interval.low, interval.high) == pytest.approx((math.exp(scipys.low), math.exp(scipys.high)), rel=1e-12)
    assert math.log(interval.ratio) == pytest.approx(np.mean(np.sort(logs)[1:-1]), rel=1e-12)
    assert stats.paired_interval(A, A) == stats.Interval(1.0, 1.0, 1.0)


def decided(gain, repeats=400, noise=0.03):
    """Return the shares of simulated comparisons that are called faster, and not worth it, at one of the LOOKS."""
    generator, decisions = np.random.default_rng(4), []
    for _ in range(repeats):
        logs = generator.normal(math.log(gain), noise, stats.LOOKS[-1]).tolist()
        looks = (stats.decide(logs[:count]) for count in stats.LOOKS)
        decisions.append(next((look for look in looks if look != "undecided"), "undecided"))
    return decisions.count("faster") / repeats, decisions.count("not worth it") / repeats


def test_a_useless_change_is_hardly_ever_kept_and_a_gain_of_five_percent_is_found():
    kept, dropped = decided(1.0)
    assert kept <= 0.01 and dropped >= 0.8
    kept, dropped = decided(1.05)
    assert kept >= 0.95 and dropped == 0


@pytest.mark.parametrize(
    ("changes", "margin", "passed"),
    [
        ([0.004, -0.006, 0.001], 0.02, True),
        ([0.1, -0.1, 0.05], 0.02, False),  # better on average, but who knows
        ([0.0, 0.0, 0.0], 0.0, True),  # bit-equal results
    ],
)
def test_non_inferior_needs_evidence_and_not_only_a_good_mean(changes, margin, passed):
    result, scipys = stats.non_inferior(changes, margin), ttest_1samp(changes, 0.0, alternative="greater")
    assert result.passed == passed
    if any(changes):
        assert result.lower == pytest.approx(scipys.confidence_interval(0.95).low, rel=1e-12)


def test_welchs_bounds_are_scipys_t_test_of_two_samples():
    baseline, final = [0.90, 0.92, 0.91, 0.93], [0.91, 0.905, 0.92]
    result = stats.welch_non_inferior(baseline, final, margin=0.03)
    scipys = ttest_ind(final, baseline, equal_var=False).confidence_interval(0.90)
    assert (result.lower, result.upper) == pytest.approx((scipys.low, scipys.high), rel=1e-9)
    worse = stats.welch_non_inferior(baseline, [0.83, 0.84], margin=0.02)
    undecided = stats.welch_non_inferior([0.8, 1.0], [0.85, 0.95], margin=0.02)
    alike = stats.welch_non_inferior([1.0, 1.0], [1.0, 1.0], margin=0.0)
    tests = (result, worse, undecided, alike)
    assert [(test.passed, test.worse) for test in tests] == [(1, 0), (0, 1), (0, 0), (1, 0)]


def test_few_trainings_that_scatter_more_than_many_pass_no_more_often_than_was_asked():
    generator = np.random.default_rng(4)
    draws = [(generator.normal(0, 0.3, 8), generator.normal(-1, 1, 3)) for _ in range(2000)]  # a margin worse
    passed = [stats.welch_non_inferior(*draw, margin=1.0).passed for draw in draws]
    assert np.mean(passed) <= 0.065


@pytest.mark.parametrize("a_s", [[1], [1, 2, 3], [1, 0], [-1, 1], [1, math.nan]], ids=str)
def test_what_proves_nothing_is_refused(a_s):
    with pytest.raises(ValueError):
        stats.paired_interval(a_s, [1] if a_s == [1] else [1, 1])
    with pytest.raises(ValueError, match="at least 2 measurements"):
        stats.non_inferior([0.1], 0)
    with pytest.raises(ValueError, match="at least 2 measurements"):
        stats.welch_non_inferior(A, [0.1], 0)

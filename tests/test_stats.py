"""The intervals: right against scipy, right in simulation, and strict about what they are given."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from speedkit.measure import stats

A = [1.02, 0.98, 1.05, 1.01, 0.97, 1.10]
B = [0.91, 0.93, 0.97, 0.90, 0.92, 0.99]


def test_paired_interval_is_scipys_paired_t_on_logarithms():
    ours = stats.paired_interval(A, B)
    theirs = ttest_rel(np.log(A), np.log(B)).confidence_interval(0.99)
    assert ours.low == pytest.approx(math.exp(theirs.low), rel=1e-12)
    assert ours.high == pytest.approx(math.exp(theirs.high), rel=1e-12)
    assert ours.ratio == pytest.approx(float(np.exp(np.mean(np.log(A) - np.log(B)))), rel=1e-12)


def test_swapping_a_and_b_gives_the_reciprocal():
    one, other = stats.paired_interval(A, B), stats.paired_interval(B, A)
    assert (other.ratio, other.low, other.high) == pytest.approx((1 / one.ratio, 1 / one.high, 1 / one.low), rel=1e-12)


def test_identical_pairs_give_a_point_at_one():
    same = stats.paired_interval(A, A)
    assert (same.ratio, same.low, same.high) == (1.0, 1.0, 1.0)
    assert stats.noise_floor(list(zip(A, A, strict=True))) == 1.0


def excluding_one(generator, slowdown, repeats=1000, pairs=20, noise=0.03):
    """Return the share of simulated comparisons, with independent log-normal noise, whose interval excludes 1."""
    excluded = 0
    for _ in range(repeats):
        a = slowdown * np.exp(generator.normal(0, noise, pairs))
        b = np.exp(generator.normal(0, noise, pairs))
        interval = stats.paired_interval(a.tolist(), b.tolist())
        excluded += not interval.low <= 1 <= interval.high
    return excluded / repeats


def test_a_plan_compared_with_itself_is_rarely_called_different():
    generator = np.random.default_rng(1)
    assert excluding_one(generator, slowdown=1.0) <= 0.03
    assert excluding_one(generator, slowdown=1.0, pairs=5) <= 0.03


def test_a_planted_slowdown_of_five_percent_is_found():
    assert excluding_one(np.random.default_rng(2), slowdown=1.05) >= 0.9


def test_what_slows_both_windows_of_a_pair_cancels():
    generator = np.random.default_rng(3)
    drift = np.exp(np.cumsum(generator.normal(0, 0.5, 20)))
    b = drift * np.exp(generator.normal(0, 0.005, 20))
    interval = stats.paired_interval((1.05 * drift).tolist(), b.tolist())
    assert interval.low > 1.04
    assert interval.high < 1.06


def test_noise_floor_is_the_far_end_of_the_control_whichever_way_it_leans():
    pairs = list(zip(A, B, strict=True))
    control = stats.paired_interval(A, B)
    assert stats.noise_floor(pairs) == pytest.approx(control.high)
    assert stats.noise_floor([(b, a) for a, b in pairs]) == pytest.approx(control.high)


def test_noise_floor_rises_with_noise_and_falls_with_pairs():
    def floor(noise, count):
        draws = np.exp(np.random.default_rng(4).normal(0, noise, (count, 2)))
        return stats.noise_floor([tuple(pair) for pair in draws.tolist()])

    assert 1 < floor(0.01, 20) < floor(0.05, 20)
    assert floor(0.03, 200) < floor(0.03, 10)


def test_non_inferior_bound_is_scipys_one_sided_t():
    changes = [0.004, -0.006, 0.001]
    result = stats.non_inferior(changes, margin=0.02)
    theirs = ttest_1samp(changes, 0.0, alternative="greater").confidence_interval(0.95)
    assert result.lower == pytest.approx(theirs.low, rel=1e-12)
    assert result.passed
    assert not stats.non_inferior(changes, margin=0.005).passed


def test_non_inferior_needs_evidence_and_not_only_a_good_mean():
    assert not stats.non_inferior([0.1, -0.1, 0.05], margin=0.02).passed  # better on average, but who knows
    assert stats.non_inferior([0.0, 0.0, 0.0], margin=0.0).passed  # bit-equal results
    assert not stats.non_inferior([-0.05, -0.05, -0.05], margin=0.02).passed


@pytest.mark.parametrize(
    ("a_s", "b_s"),
    [
        ([1.0], [1.0]),
        ([], []),
        ([1.0, 2.0], [1.0]),
        ([1.0, 0.0], [1.0, 1.0]),
        ([1.0, 1.0], [-1.0, 1.0]),
        ([1.0, math.nan], [1.0, 1.0]),
        ([1.0, math.inf], [1.0, 1.0]),
    ],
    ids=str,
)
def test_times_that_prove_nothing_are_refused(a_s, b_s):
    with pytest.raises(ValueError):
        stats.paired_interval(a_s, b_s)


def test_one_measurement_is_refused_with_a_sentence():
    for call in (lambda: stats.noise_floor([(1.0, 1.0)]), lambda: stats.non_inferior([0.1], 0.02)):
        with pytest.raises(ValueError, match="at least 2 measurements"):
            call()

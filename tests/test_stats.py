"""The intervals: right against scipy, right in simulation, and strict about what they are given."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from speedkit.measure import stats

A = [1.02, 0.98, 1.05, 1.01, 0.97, 1.10]
B = [0.91, 0.93, 0.97, 0.90, 0.92, 0.99]


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_paired_interval_is_scipys_paired_t_on_logarithms(confidence):
    ours = stats.paired_interval(A, B, confidence)
    theirs = ttest_rel(np.log(A), np.log(B)).confidence_interval(confidence)
    assert ours.low == pytest.approx(math.exp(theirs.low), rel=1e-12)
    assert ours.high == pytest.approx(math.exp(theirs.high), rel=1e-12)
    assert ours.ratio == pytest.approx(float(np.exp(np.mean(np.log(A) - np.log(B)))), rel=1e-12)
    assert (ours.confidence, ours.pairs) == (confidence, 6)


def test_mean_interval_is_scipys_one_sample_t():
    ours = stats.mean_interval(A, 0.99)
    theirs = ttest_1samp(A, 0.0).confidence_interval(0.99)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert ours.mean == pytest.approx(np.mean(A))


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
    ("call", "sentence"),
    [
        (lambda: stats.paired_interval([1.0], [1.0]), "at least 2 measurements, not 1"),
        (lambda: stats.paired_interval([], []), "at least 2 measurements, not 0"),
        (lambda: stats.paired_interval([1.0, 2.0], [1.0]), "not 2 and 1"),
        (lambda: stats.paired_interval([1.0, 0.0], [1.0, 1.0]), "time 1 of A is 0.0 s"),
        (lambda: stats.paired_interval([1.0, 1.0], [-1.0, 1.0]), "time 0 of B is -1.0 s"),
        (lambda: stats.paired_interval([1.0, math.nan], [1.0, 1.0]), "time 1 of A is nan s"),
        (lambda: stats.paired_interval([1.0, math.inf], [1.0, 1.0]), "time 1 of A is inf s"),
        (lambda: stats.paired_interval(A, B, confidence=99), "confidence is 99"),
        (lambda: stats.mean_interval([1.0, math.nan]), "measurement 1 is nan"),
        (lambda: stats.noise_floor([(1.0, 1.0)]), "at least 2 measurements"),
        (lambda: stats.non_inferior([0.1], 0.02), "at least 2 measurements"),
        (lambda: stats.non_inferior([0.1, 0.1], -0.02), "margin is -0.02"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()

"""The intervals: right against scipy, right in simulation, and strict about what they are given."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind

from speedkit.measure import stats

A = [1.02, 0.98, 1.05, 1.01, 0.97, 1.10]
B = [0.91, 0.93, 0.97, 0.90, 0.92, 0.99]


def test_paired_interval_is_scipys_yuen_test_of_the_logarithms():
    logs, ours = np.log(A) - np.log(B), stats.paired_interval(A, B)
    theirs = ttest_ind(logs, np.zeros(len(logs)), equal_var=False, trim=0.2).confidence_interval(0.99)
    assert (ours.low, ours.high) == pytest.approx((math.exp(theirs.low), math.exp(theirs.high)), rel=1e-12)
    assert math.log(ours.ratio) == pytest.approx(np.mean(np.sort(logs)[1:-1]), rel=1e-12)


def test_one_burst_of_other_load_hardly_moves_the_interval():
    calm, burst = stats.paired_interval(A, B), stats.paired_interval([*A[:-1], 50.0], B)
    assert burst.low > 0.99 * calm.low and burst.high < 1.01 * calm.high


def test_swapping_a_and_b_gives_the_reciprocal():
    one, other = stats.paired_interval(A, B), stats.paired_interval(B, A)
    assert (other.ratio, other.low, other.high) == pytest.approx((1 / one.ratio, 1 / one.high, 1 / one.low), rel=1e-12)


def test_identical_pairs_give_a_point_at_one():
    same = stats.paired_interval(A, A)
    assert (same.ratio, same.low, same.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("pairs", [5, 20])
def test_a_plan_compared_with_itself_is_rarely_called_different(pairs):
    noise = np.exp(np.random.default_rng(1).normal(0, 0.03, (1000, 2, pairs))).tolist()
    found = [stats.paired_interval(*both) for both in noise]
    assert sum(not one.low <= 1 <= one.high for one in found) <= 30


def test_what_slows_both_turns_of_a_pair_cancels():
    generator = np.random.default_rng(3)
    drift = np.exp(np.cumsum(generator.normal(0, 0.5, 20)))
    b = drift * np.exp(generator.normal(0, 0.005, 20))
    interval = stats.paired_interval((1.05 * drift).tolist(), b.tolist())
    assert interval.low > 1.04
    assert interval.high < 1.06


def decided(gain, repeats=400, noise=0.03):
    """Return the shares of simulated comparisons that are called faster, and not worth it, at one of the LOOKS."""
    generator, said = np.random.default_rng(4), []
    for _ in range(repeats):
        logs = generator.normal(math.log(gain), noise, stats.LOOKS[-1]).tolist()
        looks = (stats.decide(logs[:count]) for count in stats.LOOKS)
        said.append(next((one for one in looks if one != "undecided"), "undecided"))
    return said.count("faster") / repeats, said.count("not worth it") / repeats


def test_a_useless_change_is_hardly_ever_kept_and_a_gain_of_five_percent_is_found():
    kept, dropped = decided(1.0)
    assert kept <= 0.01 and dropped >= 0.8
    kept, dropped = decided(1.05)
    assert kept >= 0.95 and dropped == 0


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


def test_pooled_bounds_are_scipys_t_test_of_two_samples():
    naive, final = [0.90, 0.92, 0.91, 0.93], [0.91, 0.905, 0.92]
    found = stats.pooled_non_inferior(naive, final, margin=0.03)
    theirs = ttest_ind(final, naive).confidence_interval(0.90)
    assert (found.lower, found.upper) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    assert found.passed and not found.worse
    worse = stats.pooled_non_inferior(naive, [0.83, 0.84], margin=0.02)
    assert worse.worse and not worse.passed and worse.mean_change == pytest.approx(-0.08)
    undecided = stats.pooled_non_inferior([0.8, 1.0], [0.85, 0.95], margin=0.02)
    assert not undecided.passed and not undecided.worse


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
    calls = (
        lambda: stats.decide([0.1]),
        lambda: stats.non_inferior([0.1], 0.02),
        lambda: stats.pooled_non_inferior([0.1, 0.2], [0.1], 0.02),
    )
    for call in calls:
        with pytest.raises(ValueError, match="at least 2 measurements"):
            call()

"""Pairs of turns: who is called when, when they end, and that a planted difference shows with its sign."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch
from tiny import busy, points

from speedkit.data.sampler import BatchSampler
from speedkit.measure.compare import compare_functions
from speedkit.measure.contender import Contender, padded_frames
from speedkit.measure.stats import LOOKS, decide, log_ratios
from speedkit.measure.turns import at_least, measure_pairs
from speedkit.plan import Plan


def pairs_of(ratio, noise=0.01, **options):
    """Return what `measure_pairs` makes of turns whose times have this ratio, and independent noise."""
    rng = random.Random(7)
    turns = (functools.partial(made_up, rng, mean_s=mean_s, noise=noise) for mean_s in (ratio, 1.0))
    return measure_pairs(*turns, rng=random.Random(0), confirm=False, **options)


def made_up(rng, *, mean_s, noise=0.02, stall_s=0.0, bursts=0.0, step=None, steps=1):
    """The seconds of a turn: with a stall in every fiftieth `step`, and with other load on a share of all turns."""
    seconds = 0.0
    for _ in range(steps):
        seconds += mean_s * math.exp(rng.gauss(0, noise))
        if stall_s and next(step) % 50 == 0:
            seconds += stall_s
    if rng.random() < bursts:
        seconds *= rng.uniform(3, 30)
    return seconds


def decisions(a, b, tries=100):
    """How often two plans of these properties, of which A's stalls come first, are told to be what."""
    told = collections.Counter()
    for seed in range(tries):
        rng = random.Random(seed)
        turns = (functools.partial(made_up, rng, step=itertools.count(rng.randrange(50)), **plan) for plan in (a, b))
        told[measure_pairs(*turns, rng=random.Random(seed)).decision] += 1
    return told


STALLING = 50 * (1 / 0.91 - 0.95)  # a plan whose steps take 0.95 s, and 1 / 0.91 s with its stalls


@pytest.mark.parametrize(
    ("a", "b", "decision"),
    [
        ({"mean_s": 1.0, "stall_s": 5.0}, {"mean_s": 1.0}, "faster"),  # 1.10 by total time
        ({"mean_s": 1.0}, {"mean_s": 0.95, "stall_s": STALLING}, "slower"),  # 0.91 by total time
        ({"mean_s": 1.05}, {"mean_s": 1.0}, "faster"),
        ({"mean_s": 1.0, "bursts": 0.02}, {"mean_s": 1.0, "bursts": 0.02}, "not worth it"),
    ],
)
def test_what_is_rare_counts_and_what_the_machine_does_besides_does_not(a, b, decision):
    assert decisions(a, b)[decision] >= 95


def test_bursts_of_other_load_keep_hardly_ever_what_is_not_faster():
    plan = {"mean_s": 1.0, "bursts": 0.02}
    assert decisions(plan, plan, tries=1000)["faster"] <= 10


def test_slow_turns_are_repeated_unless_one_plan_has_more_than_its_share():
    rng = random.Random(3)
    slow_s = iter([1.0] * 9 + [9.0] + [1.0] * 200)
    taken = measure_pairs(lambda steps: next(slow_s), lambda steps: 1.0, rng=rng, pairs=20, looks=())
    assert (len(taken.seconds_a), max(taken.seconds_a), taken.slow) == (20, 1.0, (1, 0))
    own_s = itertools.cycle([1.0, 1.0, 1.0, 9.0])
    taken = measure_pairs(lambda steps: next(own_s), lambda steps: 1.0, rng=rng, pairs=40, looks=())
    assert len(taken.seconds_a) == 40 and sum(taken.seconds_a) == 30 + 10 * 9 and taken.slow == (10, 0)
    assert at_least(9, 10, 0.5) == pytest.approx(11 / 1024)


def test_a_confirmation_has_a_hundred_steps_of_each_and_tells_the_ratio_of_their_time():
    taken = measure_pairs(lambda steps: 1.5 * steps, lambda steps: 1.0 * steps, rng=random.Random(0), steps=4)
    assert (len(taken.seconds_a), taken.long_a) == (LOOKS[0], [28 * 1.5] * 4)
    assert (taken.decision, taken.ratio_total) == ("faster", 1.5)


def test_a_large_difference_has_more_time_to_be_decided():
    noisy = {"noise": 0.7, "looks": (40, 80), "max_s": 30.0}
    assert len(pairs_of(1.0, **noisy).seconds_a) < 20 and len(pairs_of(1.6, large_max_s=500.0, **noisy).seconds_a) >= 40


def test_each_is_called_once_a_pair_in_random_order_and_what_comes_before_is_not_timed():
    calls = []

    def call(name, seconds):
        calls.append(name)
        busy(seconds)

    functions = {"a": functools.partial(call, "a", 2e-3), "b": functools.partial(call, "b", 0)}
    row = compare_functions("x", functions, 8, before=lambda: calls.append("."))
    pairs = ["".join(calls[at : at + 4]) for at in range(2, len(calls), 4)]
    assert calls[:2] == ["a", "b"] and len(pairs) >= 8 and set(pairs) == {".a.b", ".b.a"}
    assert len(row["seconds_a"]) == len(row["seconds_b"]) == 8
    assert (row["name"], row["a"], row["b"]) == ("x", "a", "b")
    assert 1 < row["low"] < row["ratio"] < row["high"], "the second is faster"


@pytest.mark.parametrize(
    ("ratio", "pairs", "decision"), [(1.5, 10, "faster"), (0.7, 10, "slower"), (1.02, 80, "undecided")]
)
def test_it_ends_at_the_first_look_that_decides(ratio, pairs, decision):
    taken = pairs_of(ratio, noise=0.06)
    a_s, b_s = taken.seconds_a, taken.seconds_b
    assert (len(a_s), taken.decision) == (pairs, decision) == (len(b_s), decide(log_ratios(a_s, b_s)))
    one_is_inside = taken.interval.low <= 1 <= taken.interval.high
    assert one_is_inside is (decision == "undecided"), "the interval that is told is the one that decided"


def test_without_looks_it_makes_all_pairs_and_time_ends_it_after_two():
    assert len(pairs_of(1.5, looks=(), pairs=33).seconds_a) == 33
    assert len(pairs_of(1.5, looks=(), max_s=0.1).seconds_a) == 2
    assert len(pairs_of(1.5, pairs=1).seconds_a) == 2


def test_a_pair_in_which_something_was_compiled_is_left_out(monkeypatch):
    counted = itertools.chain([0, 0, 0, 1], itertools.repeat(1))  # before and after each pair: the second compiles
    monkeypatch.setattr("speedkit.measure.turns.compilations", lambda: next(counted))
    made = itertools.count()
    options = {"rng": random.Random(0), "pairs": 4, "looks": ()}
    assert measure_pairs(lambda steps: 1.0 + next(made), lambda steps: 1.0, **options).seconds_a == [1.0, 3.0, 4.0, 5.0]


def clip_length(item):
    return 4 + int(item.path) * 7 % 20


def clip_loss(model, batch, recipe):
    outputs = model(batch.inputs.sum(dim=-1))
    return torch.nn.functional.cross_entropy(outputs, batch.targets), outputs


def test_where_lengths_differ_time_is_counted_per_padded_frame():
    """A clock that counts padded frames in place of seconds shows the same for every turn."""
    clips = {"load": lambda item: torch.ones(8, clip_length(item)), "length": clip_length, "loss": clip_loss}
    work = dataclasses.replace(points(batch_size=2), **clips)
    with contextlib.closing(Contender(work, work.recipe, Plan(), loss_steps=0, device="cpu")) as side:
        stream, begins = side.run.data.train, []
        side.stopwatch.start = lambda: begins.append(stream.frames)
        side.stopwatch.stop = lambda: stream.frames - begins[-1]
        assert [side.turn() for _ in range(8)] == pytest.approx([side.mean_frames] * 8)
        assert len({second - first for first, second in itertools.pairwise(begins)}) > 2
    assert padded_frames(BatchSampler(3, 2, None), torch.tensor([2, 4, 6])) == 14

"""Pairs of turns: who is called when, when they end, and that a planted difference shows with its sign."""

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
from speedkit.measure.compare import Contender, compare_functions, measure_pairs, padded_frames
from speedkit.measure.stats import decide, log_ratios
from speedkit.plan import Plan


def pairs_of(ratio, noise=0.01, **options):
    """Return what `measure_pairs` makes of turns whose times have this ratio, and independent noise."""
    rng = random.Random(7)
    turns = (lambda mean_s=mean_s: mean_s * math.exp(rng.gauss(0, noise)) for mean_s in (ratio, 1.0))
    return measure_pairs(*turns, rng=random.Random(0), **options)


def test_each_is_called_once_a_pair_in_random_order_and_what_comes_before_is_not_timed():
    calls = []

    def call(name, seconds):
        calls.append(name)
        busy(seconds)

    functions = {"a": functools.partial(call, "a", 2e-3), "b": functools.partial(call, "b", 0)}
    row = compare_functions("x", functions, 8, before=lambda: calls.append("."))
    pairs = ["".join(calls[at : at + 4]) for at in range(2, len(calls), 4)]
    assert calls[:2] == ["a", "b"] and len(pairs) == 8 and set(pairs) == {".a.b", ".b.a"}
    assert len(row["seconds_a"]) == len(row["seconds_b"]) == 8
    assert (row["name"], row["a"], row["b"]) == ("x", "a", "b")
    assert 1 < row["low"] < row["ratio"] < row["high"], "the second is faster"


@pytest.mark.parametrize(
    ("ratio", "pairs", "decision"), [(1.5, 10, "faster"), (0.7, 10, "slower"), (1.02, 80, "undecided")]
)
def test_it_ends_at_the_first_look_that_decides(ratio, pairs, decision):
    a_s, b_s, said = pairs_of(ratio, noise=0.06)
    assert (len(a_s), said) == (pairs, decision) == (len(b_s), decide(log_ratios(a_s, b_s)))


def test_without_looks_it_makes_all_pairs_and_time_ends_it_after_two():
    assert len(pairs_of(1.5, looks=(), pairs=33)[0]) == 33
    assert len(pairs_of(1.5, looks=(), max_s=0.1)[0]) == 2
    assert len(pairs_of(1.5, pairs=1)[0]) == 2


def test_a_pair_in_which_something_was_compiled_is_left_out(monkeypatch):
    counted = itertools.chain([0, 0, 0, 1], itertools.repeat(1))  # before and after each pair: the second compiles
    monkeypatch.setattr("speedkit.measure.compare.compilations", lambda: next(counted))
    made = itertools.count()
    a_s, *_ = measure_pairs(lambda: 1.0 + next(made), lambda: 1.0, rng=random.Random(0), pairs=4, looks=())
    assert a_s == [1.0, 3.0, 4.0, 5.0]


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
        assert [side.turn(1) for _ in range(8)] == pytest.approx([side.mean_frames] * 8)
        assert len({second - first for first, second in itertools.pairwise(begins)}) > 2
    assert padded_frames(BatchSampler(3, 2, None), torch.tensor([2, 4, 6])) == 14

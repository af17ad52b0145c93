"""Two functions in turns: who is called when, and that a planted difference shows with its sign."""

import math
import random
from contextlib import closing

import pytest
import tiny
import torch
from speedkit.measure.turns import in_turns, take_turns

from speedkit.measure.compare import Side, catch_up
from speedkit.measure.stats import noise_floor, paired_interval
from speedkit.plan import Plan


def busy(count):
    return lambda: sum(range(count))


def test_each_block_calls_both_sides_twice_in_mirrored_order():
    calls = []
    row = in_turns(
        "x", {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 40, before=lambda: calls.append(".")
    )
    blocks = ["".join(calls[at : at + 8]) for at in range(2, len(calls), 8)]
    assert calls[:2] == ["a", "b"] and len(blocks) == 20 and set(blocks) == {".a.b.b.a", ".b.a.a.b"}
    assert len(row["seconds_a"]) == len(row["seconds_b"]) == 40
    assert (row["name"], row["a"], row["b"]) == ("x", "a", "b")


def test_the_ratio_is_above_one_where_the_second_is_faster():
    row = in_turns("x", {"slow": busy(400_000), "fast": busy(4_000)}, 6)
    assert 1.0 < row["low"] < row["ratio"] < row["high"] and row["noise_floor"] >= 1
    swapped = in_turns("x", {"fast": busy(4_000), "slow": busy(400_000)}, 6)
    assert swapped["high"] < 1


def test_two_functions_are_needed():
    with pytest.raises(ValueError, match="unpack"):
        in_turns("x", {"a": busy(1)}, 4)


def test_a_steady_drift_of_the_machine_is_no_difference():
    drifting_s = (1.01**window for window in range(10**6))
    a_s, b_s, control = take_turns(lambda: next(drifting_s), lambda: next(drifting_s), 40, random.Random(1))
    found = paired_interval(a_s, b_s)
    assert found.low <= 1 <= found.high and found.ratio == pytest.approx(1)
    assert math.prod(a_s + b_s) == pytest.approx(math.prod(time_s**2 for pair in control for time_s in pair))
    assert noise_floor(control) > 1


def test_what_every_window_takes_longer_on_both_sides_is_no_noise():
    work_s = [1.0 + 9.0 * random.Random(window).random() for window in range(40)]  # batches of short and long clips
    noise = random.Random(7)
    slow_s, fast_s = ([share * window_s * math.exp(noise.gauss(0, 0.01)) for window_s in work_s] for share in (1, 0.8))
    a_s, b_s, control = take_turns(iter(slow_s).__next__, iter(fast_s).__next__, 40, random.Random(1))
    found = paired_interval(a_s, b_s)
    assert 1.23 < found.low < 1.25 < found.high < 1.27
    assert noise_floor(control) < 1.02


def test_the_windows_of_a_pair_begin_at_the_same_step(tmp_path):
    work = tiny.points(train=64)
    with (
        closing(Side(work, work.recipe, Plan(), "cpu", tmp_path)) as a,
        closing(Side(work, work.recipe, Plan(cache="ram"), "cpu", tmp_path)) as b,
    ):
        a.window(7), b.window(3)
        catch_up(a, b)
        assert a.run.step == b.run.step == 7
        batches = [side.run.fetch()[0] for side in (a, b)]
        assert torch.equal(*batches)


def test_a_floor_takes_two_blocks():
    assert [len(found) for found in take_turns(lambda: 1.0, lambda: 1.0, 1, random.Random(0))] == [4, 4, 2]

"""Two functions in turns: who is called when, and that a planted difference shows with its sign."""

import pytest

from speedkit.measure.turns import in_turns


def busy(count):
    return lambda: sum(range(count))


def test_each_block_calls_both_sides_twice_in_mirrored_order():
    calls = []
    row = in_turns("x", {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4,
                   before=lambda: calls.append("."))  # fmt: skip
    assert "".join(calls) == "ab" + ".a.b.b.a" + ".b.a.a.b"
    assert len(row["seconds_a"]) == len(row["seconds_b"]) == 4
    assert (row["name"], row["a"], row["b"]) == ("x", "a", "b")


def test_the_ratio_is_above_one_where_the_second_is_faster():
    row = in_turns("x", {"slow": busy(400_000), "fast": busy(4_000)}, 6)
    assert 1.0 < row["low"] < row["ratio"] < row["high"] and row["noise_floor"] >= 1
    swapped = in_turns("x", {"fast": busy(4_000), "slow": busy(400_000)}, 6)
    assert swapped["high"] < 1


def test_two_functions_are_needed():
    with pytest.raises(ValueError, match="unpack"):
        in_turns("x", {"a": busy(1)}, 4)

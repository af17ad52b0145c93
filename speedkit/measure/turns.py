"""Two things timed in turns: plans in training, or any functions."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from speedkit.clock import Stopwatch
from speedkit.measure.stats import noise_floor, paired_interval

Window = Callable[[], float]


def take_turns(
    a: Window, b: Window, pairs: int, rng: random.Random
) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """Return the seconds of A's windows and of B's, in pairs, and the control: windows set against those of their side.

    `a` and `b` make a window each and return its seconds. They are called in blocks A B B A or B A A B, drawn at
    random, two pairs each and at least two of them: a drift of the machine hits both sides alike.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    control: list[tuple[float, float]] = []
    for _ in range(max(2, (pairs + 1) // 2)):
        outer, inner = (0, 1) if rng.random() < 0.5 else (1, 0)
        first, second, third, fourth = ((a, b)[side]() for side in (outer, inner, inner, outer))
        seconds[outer].extend((first, fourth))
        seconds[inner].extend((second, third))
        # Each side's two windows, one side in the order of time and one against it: a steady drift cancels, and so does
        # what differs from window to window for both sides alike, such as the length of what the batches hold.
        one, other = math.sqrt(first * third), math.sqrt(fourth * second)
        control.append((one, other) if rng.random() < 0.5 else (other, one))
    return *seconds, control


def in_turns(
    name: str,
    functions: Mapping[str, Callable[[], Any]],
    pairs: int,
    device: torch.device | str = "cpu",
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Return the row of `measurements` for two named functions that take turns, each call a window.

    Each is called once to warm up. `before` is called before every window, outside its time.
    """
    stopwatch = Stopwatch(device)

    def window(function: Callable[[], Any]) -> float:
        before()
        stopwatch.start()
        function()
        return stopwatch.stop()

    (a, one), (b, other) = functions.items()
    one(), other()
    seconds_a, seconds_b, control = take_turns(lambda: window(one), lambda: window(other), pairs, random.Random(0))
    return {
        "name": name,
        "a": a,
        "b": b,
        "seconds_a": seconds_a,
        "seconds_b": seconds_b,
        **vars(paired_interval(seconds_a, seconds_b)),
        "noise_floor": noise_floor(control),
    }

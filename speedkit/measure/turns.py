"""Two functions timed in turns: what `compare` does for plans, for anything that can be called."""

from collections.abc import Callable
from typing import Any

import torch

from speedkit.clock import Stopwatch
from speedkit.measure.stats import noise_floor, paired_interval


def in_turns(
    name: str, functions: dict[str, Callable[[], Any]], pairs: int, device: torch.device | str = "cpu",
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of `measurements` for two named functions, called in blocks A B B A and B A A B, a window each.

    Each is called once to warm up. `before` is called before every window, outside its time.
    """
    (a, one), (b, other) = functions.items()
    seconds: dict[str, list[float]] = {a: [], b: []}
    stopwatch = Stopwatch(device)
    one(), other()
    for block in range(max(1, pairs // 2)):
        for which in ((a, b, b, a), (b, a, a, b))[block % 2]:
            before()
            stopwatch.start()
            functions[which]()
            seconds[which].append(stopwatch.stop())
    control = [pair for times in seconds.values() for pair in zip(times[::2], times[1::2], strict=True)]
    control[::2] = [pair[::-1] for pair in control[::2]]  # a drift of the machine must not look like a difference
    found = paired_interval(seconds[a], seconds[b])
    return {"name": name, "a": a, "b": b, "seconds_a": seconds[a], "seconds_b": seconds[b], "ratio": found.ratio,
            "low": found.low, "high": found.high, "noise_floor": noise_floor(control)}  # fmt: skip

"""A warm-up that knows when it is over, and a count of what has been compiled."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from speedkit.clock import Stopwatch

WINDOWS = 3  # in a row have to agree before steps count as steady


def run_until_steady(
    step: Callable[[], Any],
    device: torch.device | str,
    *,
    window_s: float = 0.1,
    max_s: float = 60.0,
    tolerance: float = 0.10,
) -> float:
    """Call `step()` until its time has settled; return its seconds, the median over the last windows.

    It has settled where WINDOWS in a row compiled nothing, and agree within `tolerance`.
    That also covers what cannot be counted: autotuning, CUDA graph capture, a rising clock. Gives up after `max_s`.
    """
    stopwatch = Stopwatch(device)
    began_s = time.perf_counter()
    count = 1
    recent: list[float] = []  # seconds per step of the latest windows that may be judged
    while True:
        before = compilations()
        stopwatch.start()
        for _ in range(count):
            step()
        seconds = stopwatch.stop()
        # A window far shorter than asked (the first are: nobody knows a step's time yet) proves nothing.
        judged = compilations() == before and seconds >= window_s / 2
        recent = [*recent, seconds / count][-WINDOWS:] if judged else []
        steady = len(recent) == WINDOWS and max(recent) <= (1 + tolerance) * min(recent)
        elapsed_s = time.perf_counter() - began_s
        if steady or elapsed_s >= max_s:
            return statistics.median(recent or [seconds / count])
        # At most ten times as many as before: the step just timed may have been an unusually quick one.
        count = min(max(1, math.ceil(window_s * count / max(seconds, 1e-9))), 10 * count)


def compilations() -> int:
    """Return how many graphs torch.compile has handed to a compiler in this process so far. Never imports dynamo."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # its counter outlives torch._dynamo.reset()
    if dynamo is None:
        return 0
    return int(dynamo.counters["stats"]["unique_graphs"])

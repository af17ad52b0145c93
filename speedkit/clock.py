"""Timing and nothing else: a stopwatch that waits for the device, and a warm-up that knows when it is over."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WINDOWS = 3  # in a row have to agree before steps count as steady


@dataclass(frozen=True)
class Steady:
    """How a warm-up went: `step_s` is the median over its last windows; `steady` is False when the time ran out."""

    steps: int
    seconds: float
    step_s: float
    steady: bool


class Stopwatch:
    """Seconds of device time between `start()` and `stop()`; both wait until the device has nothing left to do.

    CUDA events are stamped by the GPU, not by the waiting host (https://docs.pytorch.org/docs/stable/notes/cuda.html).
    """

    def __init__(self, device: torch.device | str):
        self.device, self.began_s = torch.device(device), 0.0
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.device.type == "cuda" else []

    def start(self) -> None:
        """Wait for the device, then start."""
        synchronize(self.device)
        if self.events:
            self.events[0].record(torch.cuda.current_stream(self.device))
        self.began_s = time.perf_counter()

    def stop(self) -> float:
        """Wait for the device; return the seconds since `start()`."""
        if self.events:
            self.events[1].record(torch.cuda.current_stream(self.device))
        synchronize(self.device)  # all streams: copies ahead must not run into the next window
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else time.perf_counter() - self.began_s


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished all work queued on it; nothing to wait for on a CPU."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device | str, repeats: int, *, warmup: int = 1) -> list[float]:
    """Return the seconds of each of `repeats` calls of `function()`, after `warmup` calls that are not timed."""
    stopwatch, seconds = Stopwatch(device), []
    for _ in range(warmup + repeats):
        stopwatch.start()
        function()
        seconds.append(stopwatch.stop())
    return seconds[warmup:]


def compilations() -> int:
    """Return how many graphs torch.compile has handed to a compiler in this process so far. Never imports dynamo."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # its counter outlives torch._dynamo.reset()
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def run_until_steady(
    step: Callable[[], Any],
    device: torch.device | str,
    *,
    window_s: float = 0.1,
    max_s: float = 60.0,
    tolerance: float = 0.10,
) -> Steady:
    """Call `step()` until its time has settled: WINDOWS in a row compiled nothing, and agree within `tolerance`.

    That also covers what cannot be counted: autotuning, CUDA graph capture, a rising clock. Gives up after `max_s`.
    """
    stopwatch, began_s = Stopwatch(device), time.perf_counter()
    steps, count, recent = 0, 1, list[float]()  # recent: seconds per step of the latest windows that may be judged
    while True:
        before = compilations()
        stopwatch.start()
        for _ in range(count):
            step()
        seconds = stopwatch.stop()
        steps += count
        # A window far shorter than asked (the first are: nobody knows a step's time yet) proves nothing.
        judged = compilations() == before and seconds >= window_s / 2
        recent = [*recent, seconds / count][-WINDOWS:] if judged else []
        steady = len(recent) == WINDOWS and max(recent) <= (1 + tolerance) * min(recent)
        elapsed_s = time.perf_counter() - began_s
        if steady or elapsed_s >= max_s:
            return Steady(steps, elapsed_s, statistics.median(recent or [seconds / count]), steady)
        # At most ten times as many as before: the step just timed may have been an unusually quick one.
        count = min(max(1, math.ceil(window_s * count / max(seconds, 1e-9))), 10 * count)


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best: `42.1 ms`, `3.2 s`, `12 min`, `1.5 h`."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds / length:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 1e-6:#.3g}".rstrip(".") + " µs"

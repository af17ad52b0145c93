"""Timing and nothing else: a stopwatch that waits for the device, and a warm-up that knows when it is over."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Steady:
    """How a warm-up went: `step_s` is the median over its last windows; `steady` is False when the time ran out."""

    steps: int
    seconds: float
    step_s: float
    compilations: int
    steady: bool


class Stopwatch:
    """Seconds of device time between `start()` and `stop()`; both wait until the device has nothing left to do.

    CUDA events are stamped by the GPU itself, so the time that the host takes to wait is not counted
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution).
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.began_s: float | None = None
        self.events: tuple[Any, Any] | None = None
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def start(self) -> None:
        """Wait for the device, then start."""
        synchronize(self.device)
        if self.events:
            self.events[0].record(torch.cuda.current_stream(self.device))
        self.began_s = time.perf_counter()

    def stop(self) -> float:
        """Wait for the device; return the seconds since `start()`. Raises RuntimeError when it was not started."""
        if self.began_s is None:
            raise RuntimeError("the stopwatch was not started: call start() before stop()")
        if self.events:
            self.events[1].record(torch.cuda.current_stream(self.device))
            self.events[1].synchronize()
            seconds = self.events[0].elapsed_time(self.events[1]) / 1e3
            synchronize(self.device)  # work on other streams (copies ahead) must not run into the next window
        else:
            synchronize(self.device)
            seconds = time.perf_counter() - self.began_s
        self.began_s = None
        return seconds


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished all work queued on it; nothing to wait for on a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(function: Callable[[], Any], device: torch.device | str, repeats: int, warmup: int = 1) -> list[float]:
    """Return the seconds of each of `repeats` calls of `function()`, after `warmup` calls that are not timed."""
    for _ in range(warmup):
        function()
    stopwatch, seconds = Stopwatch(device), []
    for _ in range(repeats):
        stopwatch.start()
        function()
        seconds.append(stopwatch.stop())
    return seconds


def compilations() -> int:
    """Return how many graphs torch.compile has handed to a compiler in this process so far.

    Reads dynamo's own counter (`torch._dynamo.reset()` leaves it alone) and only where dynamo is loaded already:
    importing it takes seconds.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def timer_resolution_s(device: torch.device | str = "cpu") -> float:
    """Return the median reading of a stopwatch around nothing, in seconds: shorter times tell nothing.

    Never less than the tick of the clock beneath it (0.5 microseconds for a CUDA event).
    """
    tick_s = 0.5e-6 if torch.device(device).type == "cuda" else time.get_clock_info("perf_counter").resolution
    return max(statistics.median(timed(lambda: None, device, repeats=51, warmup=5)), tick_s)


def run_until_steady(step: Callable[[], Any], device: torch.device | str, *, window_s: float = 0.1,
                     min_windows: int = 3, max_s: float = 60.0, tolerance: float = 0.10) -> Steady:
    """Call `step()` until its time has settled: `min_windows` windows in a row agree and compiled nothing.

    Windows agree when the slowest step time is at most `tolerance` above the fastest. That one rule also covers
    what cannot be counted: cudnn and Triton autotuning, CUDA graph capture, a rising clock, caches being filled.
    Gives up after `max_s` (looked at between windows) with `steady=False`.
    """
    stopwatch = Stopwatch(device)
    began_s, at_start = time.perf_counter(), compilations()
    last: list[tuple[float, bool]] = []  # (seconds per step, may be judged), the latest windows
    steps, count, before = 0, 1, at_start
    while True:
        stopwatch.start()
        for _ in range(count):
            step()
        seconds = stopwatch.stop()
        steps, after = steps + count, compilations()
        # A window far shorter than asked (the first are: nobody knows a step's time yet) proves nothing.
        last = [*last, (seconds / count, after == before and seconds >= window_s / 2)][-min_windows:]
        before = after
        times = [step_s for step_s, _ in last]
        steady = len(last) >= min_windows and all(ok for _, ok in last) and max(times) <= (1 + tolerance) * min(times)
        elapsed_s = time.perf_counter() - began_s
        if steady or elapsed_s >= max_s:
            return Steady(steps, elapsed_s, statistics.median(times), after - at_start, steady)
        # At most ten times as many as before: the step just timed may have been an unusually quick one.
        count = min(max(1, math.ceil(window_s * count / max(seconds, 1e-9))), 10 * count)

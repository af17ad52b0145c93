"""A stopwatch that waits for the device."""

import time
from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Seconds of device time between `start()` and `stop()`; both wait until the device has nothing left to do.

    CUDA events are stamped by the GPU, not by the waiting host (https://docs.pytorch.org/docs/stable/notes/cuda.html).
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.began_s = 0.0
        self.events: list[torch.cuda.Event] = []
        if self.device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

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
        if self.events:
            return self.events[0].elapsed_time(self.events[1]) / 1e3
        return time.perf_counter() - self.began_s


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished all work queued on it; nothing to wait for on a CPU."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device | str, repeats: int, *, warmup: int = 1) -> list[float]:
    """Return the seconds of each of `repeats` calls of `function()`, after `warmup` calls that are not timed."""
    stopwatch = Stopwatch(device)
    seconds = []
    for _ in range(warmup + repeats):
        stopwatch.start()
        function()
        seconds.append(stopwatch.stop())
    return seconds[warmup:]

"""A warm-up that knows when it is over, and a count of what has been compiled."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from speedkit.clock import timed

WINDOWS = 3  # in a row have to agree before steps count as steady
WINDOW_S = 0.1  # of steps, or one that takes longer
TOLERANCE = 1.10  # between the slowest and the quickest of these windows


def run_until_steady(step: Callable[[], Any], device: torch.device | str, *, max_s: float) -> float:
    """Call `step()` until its time has settled; return its seconds.

    It has settled where WINDOWS in a row compiled nothing, and their medians agree within TOLERANCE.
    That also covers what cannot be counted: autotuning, CUDA graph capture, a rising clock. Gives up after `max_s`.
    """
    began_s = time.perf_counter()
    recent: list[float] = []  # medians of the latest windows that compiled nothing
    while True:
        before = compilations()
        seconds = timed(step, device, 1, warmup=0)
        while sum(seconds) < WINDOW_S:
            seconds += timed(step, device, 1, warmup=0)
        recent = [*recent[1 - WINDOWS :], statistics.median(seconds)]
        if compilations() > before:
            recent.clear()
        steady = len(recent) == WINDOWS and max(recent) <= TOLERANCE * min(recent)
        if steady or time.perf_counter() - began_s >= max_s:
            return statistics.median(recent or seconds)


def compilations() -> int:
    """Return how many graphs torch.compile has handed to a compiler in this process so far. Never imports dynamo."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # its counter outlives torch._dynamo.reset()
    if dynamo is None:
        return 0
    return int(dynamo.counters["stats"]["unique_graphs"])


def failed_guard_and_break() -> tuple[str, str]:
    """Return the guard for which torch.compile has compiled again, and what breaks its graphs; "" for none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    guard = broken = ""
    if dynamo is None:
        return guard, broken
    for metrics in dynamo.get_compilation_metrics():
        if metrics.recompile_reason:
            guard = metrics.recompile_reason.partition("#")[0].partition(": ")[2].strip()
        if metrics.fail_reason:
            broken = metrics.fail_reason.partition("\n")[0]
    for reason in dynamo.graph_break_reasons:
        frame = reason.user_stack[-1]
        broken = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return guard, broken

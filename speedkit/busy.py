"""What else uses the cores of this machine, and how many threads are left for a training beside it."""

import collections
import math
import time
from collections.abc import Mapping

import psutil

from speedkit.machine import Hardware

LOOK_S = 0.3  # that others are observed
LITTLE = 0.3  # of a core: what takes less leaves a thread its core


def others() -> dict[str, float]:
    """Return how many cores each other program uses now, by name: this process and what it has started left out."""
    before = _cpu_s()
    time.sleep(LOOK_S)
    cores = collections.defaultdict[str, float](float)
    for process, (name, cpu_s) in _cpu_s().items():
        cores[name] += (cpu_s - before.get(process, (name, cpu_s))[1]) / LOOK_S
    return {name: used for name, used in sorted(cores.items()) if used > LITTLE / 3}


def threads_beside(used: float, threads: int) -> int:
    """Return how many of `threads` find a core of their own beside programs that use so many cores.

    Each operation waits for its last thread: one that has to wait for a core holds all others up.
    """
    return max(1, threads - math.ceil(used - LITTLE))


def told(cores: Mapping[str, float]) -> str:
    """Return in words how many cores each program uses."""
    return ", ".join(f"{name} ({used:.1f} cores)" for name, used in cores.items())


def advice(hardware: Hardware) -> str:
    """Return in a sentence that a CPU is busy, and what fewer threads would give; "" where they would give nothing."""
    if hardware.device.type != "cpu":
        return ""
    seen = others()
    left = threads_beside(sum(seen.values()), hardware.threads)
    if left == hardware.threads:
        return ""
    return f"this machine is busy: {told(seen)}; with threads={left} no operation waits for a thread without a core"


def _cpu_s() -> dict[int, tuple[str, float]]:
    """Return name and seconds of CPU time of each process that is not of ours, by number."""
    here = psutil.Process()
    ours = {here.pid, *(child.pid for child in here.children(recursive=True))}
    seen = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if process.pid not in ours and times is not None:
            seen[process.pid] = (process.info["name"], times.user + times.system)
    return seen

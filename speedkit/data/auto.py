"""workers="auto": how many workers, and of which kind, found by a few seconds of training steps on the user's data."""

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import psutil
import torch

from speedkit.clock import run_until_steady
from speedkit.data.loader import BatchStream
from speedkit.plan import Plan
from speedkit.system import usable_cores, usable_ram_bytes

BUDGET_S, SETTING_S = 5.0, 0.5  # for all of it; for the steps under one setting, where they do not settle sooner
GAIN = 1.05  # workers cost memory and time to start: more are taken only where steps get so much shorter
SHARE = 0.5  # of the free shared memory, and of the RAM, that processes may take


def choose_workers(
    workload: Any, items: Sequence[Any], plan: Plan, batch_size: int, device: torch.device, compute: Callable[..., Any]
) -> tuple[Plan, str]:
    """Return `plan` with the workers under which steps, `compute(batch)`, follow each other fastest, and the reason.

    None come first, and stay where a batch costs next to nothing; then threads and processes, up to the cores, while
    memory has room and the budget lasts. The two best are measured once more.
    """
    cores, until_s = min(16, usable_cores()), time.perf_counter() + BUDGET_S
    found, room = dict[Plan, float](), math.inf

    def measure(setting: Plan) -> Any:
        """Note the seconds of a step under `setting`, and how many processes have room; return a batch."""
        nonlocal room
        with closing(BatchStream(workload, items, setting, batch_size, 0, device)) as batches:
            found[setting] = min(_step_s(lambda: compute(batches.next()), device), found.get(setting, math.inf))
            batch = batches.next()
            if batches.pids:
                own_bytes = psutil.Process(batches.pids[0]).memory_full_info().uss  # shared with no other process
                room = most_processes(sum(tensor.nbytes for tensor in batch) * plan.prefetch_factor, own_bytes)
            return batch

    none = dataclasses.replace(plan, workers=0, persistent_workers=False)
    batch = measure(none)
    alone_s = _step_s(lambda: compute(batch), device)
    if found[none] <= GAIN * alone_s:
        return none, f"a step takes {_ms(found[none])}, {_ms(alone_s)} of them computing: there is nothing to hide"
    for kind in ("thread", "process"):
        for count in sorted({1, cores // 2, cores} - {0}):
            if time.perf_counter() < until_s and (kind == "thread" or count <= room):
                measure(dataclasses.replace(plan, workers=count, worker_kind=kind, persistent_workers=True))
    for setting in sorted(found, key=lambda setting: found[setting])[1::-1]:
        measure(setting)
    best = next(setting for setting in found if found[setting] <= GAIN * min(found.values()))
    listed = ", ".join(f"{_name(setting)} {_ms(seconds)}" for setting, seconds in found.items())
    limit = f"; memory has room for {room:.0f} processes" if room < cores else ""
    chosen = dataclasses.replace(best, persistent_workers=plan.persistent_workers and best.workers != 0)
    return chosen, f"workers {_name(best)} gave the shortest steps: {listed}; computing alone {_ms(alone_s)}{limit}"


def most_processes(shared_bytes: int, own_bytes: int) -> float:
    """Return how many processes have room, with `shared_bytes` of batches in /dev/shm and `own_bytes` of RAM each."""
    shm_bytes = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf
    return SHARE * min(shm_bytes / max(1, shared_bytes), usable_ram_bytes() / max(1, own_bytes)) // 1


def _step_s(step: Callable[[], Any], device: torch.device) -> float:
    return run_until_steady(step, device, max_s=SETTING_S).step_s  # settled: batches made ahead at the start are gone


def _name(plan: Plan) -> str:
    return f"{plan.workers} by {plan.worker_kind}" if plan.workers else "none"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

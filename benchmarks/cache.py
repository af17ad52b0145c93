"""What the feature cache costs: reading it, beside a memory map; opening it; building it on all cores."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import numpy as np
import torch

from speedkit.data.cache import build_cache
from speedkit.lab.workloads import load_workload
from speedkit.machine import usable_cores
from speedkit.plan import Plan

ROW, BATCH = 16384, 64  # float32 values of an entry, 64 kB; entries of a batch
CPU = torch.device("cpu")
ON_DISK = Plan(cache="disk")
# Prints the seconds and megabytes that opening a cache of so many entries takes.
OPEN = """
import sys, time, common, psutil
from cache import ON_DISK, build_cache
resident = lambda: psutil.Process().memory_info().rss
folder, count = sys.argv[1], int(sys.argv[2])
before, began_s, workload = resident(), time.perf_counter(), common.perceptron(4, 4, 4)
cache = build_cache(workload, range(count), ON_DISK, cache_dir=folder, workers=0)
print(time.perf_counter() - began_s, (resident() - before) / 1e6)
"""


def in_turns(functions: list[Callable[[], None]], turns: int) -> list[list[float]]:
    """Return the CPU seconds of each function in every turn, which others on the machine do not add to."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(turns):
        order = range(len(functions))
        for place in order if turn % 2 else reversed(order):
            began_s = time.process_time()
            functions[place]()
            seconds[place].append(time.process_time() - began_s)
    return seconds


def reading(count: int, turns: int) -> Iterator[common.Result]:
    """Measure gathering from a warm cache, later and at first touch, as a share of the rate of a memory map."""
    with tempfile.TemporaryDirectory() as folder:
        cache = build_cache(common.perceptron(ROW, 4, BATCH), range(count), ON_DISK, cache_dir=folder)
        np.save(Path(folder) / "plain.npy", cache.gather(torch.arange(count), CPU).inputs.numpy())
        plain = np.load(Path(folder) / "plain.npy", mmap_mode="r")
        orders = torch.randperm(count).split(BATCH)

        def mapped() -> None:
            for indices in orders:
                plain[indices.numpy()]

        def later() -> None:
            for indices in orders:
                cache.gather(indices, CPU)

        def first() -> None:
            cache.trusted[:] = False
            later()

        mapped_s, first_s, later_s = in_turns([mapped, first, later], turns)
        size = sum(path.stat().st_size for path in cache.folder.iterdir())
    for what, limit, ours_s in (("warm gather", 0.9, later_s), ("first touch", 0.65, first_s)):
        rates = [plain_s / cache_s for plain_s, cache_s in zip(mapped_s, ours_s, strict=True)]
        yield common.median_of(f"{what} over a memory map", rates, limit=limit, at_least=True)
    yield common.median_of("bytes on disk over values", [size / (4 * ROW * count)], limit=1.01)


def opening(count: int) -> Iterator[common.Result]:
    """Measure seconds and memory that opening a cache of `count` entries takes in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [common.in_fresh_process(OPEN, folder, str(count)) for _ in range(6)]
    seconds, megabytes = zip(*(map(float, run.split()) for run in runs[1:]), strict=True)  # the first one builds
    yield common.median_of(f"opening {count} entries", seconds, limit=1.0, unit=" s")
    yield common.median_of(f"memory for {count} entries", megabytes, limit=100, unit=" MB")


def building(clips: int, sample: int, times: int) -> Iterator[common.Result]:
    """Measure building a cache of generated sounds as a share of the rate of one core, times the cores."""
    workload = load_workload("audio", clips=clips)
    items, alone_s, rates = [*workload.train, *workload.test], [], []
    for item in [items[0], *items[:: max(1, len(items) // sample)]]:
        began_s = time.perf_counter()
        workload.features(workload.load(item))
        alone_s.append(time.perf_counter() - began_s)
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            cache = build_cache(workload, items, ON_DISK, cache_dir=folder)
        rates.append(len(items) * statistics.mean(alone_s[1:]) / (cache.build_s * usable_cores()))
    yield common.median_of(f"building on {usable_cores()} cores over one alone", rates, limit=0.9, at_least=True)


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure what reading from, opening and building a cache takes."""
    yield from reading(256, 5) if quick else reading(4096, 15)
    yield from opening(1000) if quick else opening(1_000_000)
    yield from building(60, 5, 1) if quick else building(2400, 100, 3)


if __name__ == "__main__":
    common.main(measure)

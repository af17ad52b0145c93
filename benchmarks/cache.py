"""What the feature cache costs: reading against a plain memory map, first touch, opening, disk, building on all cores.

    python benchmarks/cache.py [--quick]

A row per limit; exit code 1 when one is missed. What is compared takes turns, so that a busy machine hits both sides
alike; the figures are medians of the turns' ratios with their 95 % interval, and mean most on a machine at rest.
"""

import functools
import operator
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data.cache import open_cache
from speedkit.hardware import usable_cores
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workloads import load_workload
from speedkit.workloads.workload import Workload

ROW, BATCH = 16384, 64  # float32 values of an entry, 64 kB; entries of a batch
CPU = torch.device("cpu")
BRIEF = "--quick" in sys.argv


def numbers(size: int) -> Workload:
    """Return a workload of entries of `size` random numbers, to be cached and never trained on."""
    return Workload(
        f"numbers-{size}",
        Recipe(batch_size=BATCH),
        range(1),
        range(1),
        functools.partial(entry, size=size),
        features=Tensor.contiguous,
        target=operator.index,
        model=torch.nn.Identity,
        loss=nothing,
        score=nothing,
    )


def nothing(*_: Any) -> Any:
    """Stand for what training would need."""


def entry(item: int, size: int) -> Tensor:
    """Return random numbers [size] that are the item's own."""
    return torch.randn(size, generator=torch.Generator().manual_seed(item))


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


def report(what: str, asked: float, values: list[float], *, at_least: bool, unit: str = "") -> bool:
    """Print the median of `values`, its interval (order statistics, 95 %) and the limit; return whether it is met."""
    ordered, middle = sorted(values), statistics.median(values)
    reach = round(0.98 * len(ordered) ** 0.5)  # https://en.wikipedia.org/wiki/Median#Confidence_interval
    low, high = ordered[max(0, len(ordered) // 2 - reach)], ordered[min(len(ordered) - 1, len(ordered) // 2 + reach)]
    met = middle >= asked if at_least else middle <= asked
    limit = f"limit {'at least ' if at_least else ''}{asked:g}{unit}"
    print(f"{what}: {middle:.3g}{unit} ({low:.3g} to {high:.3g}), {limit}: {'met' if met else 'missed'}", flush=True)
    return met


def reading(count: int, turns: int) -> bool:
    """Measure gathering from a warm cache, later and at first touch, as a share of the rate of a memory map."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cache = open_cache(numbers(ROW), range(count), Plan(cache="disk"), cache_dir=folder)
        np.save(Path(folder) / "plain.npy", cache.gather(torch.arange(count), CPU)[0].numpy())
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
    warm = [plain_s / cache_s for plain_s, cache_s in zip(mapped_s, later_s, strict=True)]
    touch = [plain_s / cache_s for plain_s, cache_s in zip(mapped_s, first_s, strict=True)]
    return all(
        [
            report("warm gather over a memory map", 0.9, warm, at_least=True),
            report("first touch over a memory map", 0.65, touch, at_least=True),
            report("bytes on disk over values", 1.01, [size / (4 * ROW * count)], at_least=False),
        ]
    )


def building(clips: int, sample: int) -> bool:
    """Measure building a cache of generated sounds as a share of the rate of one core, times the cores."""
    workload = load_workload("audio", clips=clips)
    items, alone_s = [*workload.train, *workload.test], []
    torch.set_num_threads(1)
    for item in [items[0], *items[:: max(1, len(items) // sample)]]:
        began_s = time.perf_counter()
        workload.features(workload.load(item))
        alone_s.append(time.perf_counter() - began_s)
    rates = []
    for _ in range(1 if BRIEF else 3):
        with tempfile.TemporaryDirectory() as folder:
            cache = open_cache(workload, items, Plan(cache="disk"), cache_dir=folder)
        rates.append(len(items) * statistics.mean(alone_s[1:]) / (cache.build_s * usable_cores()))
    return report(f"building on {usable_cores()} cores over one core alone", 0.9, rates, at_least=True)


def opening(count: int) -> bool:
    """Measure seconds and memory that opening a cache of `count` entries takes in a fresh process."""
    code = f"""
import sys, time, psutil
sys.path.insert(0, {str(Path(__file__).parent)!r})
from cache import Plan, numbers, open_cache
resident = lambda: psutil.Process().memory_info().rss
before, began_s, workload = resident(), time.perf_counter(), numbers(4)
cache = open_cache(workload, range({count}), Plan(cache="disk"), cache_dir=sys.argv[1], workers=0)
print(time.perf_counter() - began_s, (resident() - before) / 1e6)
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(6)]
    seconds, megabytes = zip(*(map(float, run.split()) for run in runs[1:]), strict=True)  # the first one builds
    return all(
        [
            report(f"opening {count} entries", 1.0, list(seconds), at_least=False, unit=" s"),
            report(f"memory for {count} entries", 100, list(megabytes), at_least=False, unit=" MB"),
        ]
    )


if __name__ == "__main__":
    brief = [reading(256, 5), opening(1000), building(60, 5)] if BRIEF else []
    met = brief or [reading(4096, 15), opening(1_000_000), building(2400, 100)]
    sys.exit(0 if all(met) else 1)

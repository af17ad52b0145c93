"""The benchmarks of the feature cache, each beside what it is to be compared with, in one run."""

import functools
import operator
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data.cache import builder_of, open_cache
from speedkit.measure.bench import Row, ends, number_from, row
from speedkit.measure.turns import in_turns
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.system import usable_cores
from speedkit.workloads import load_workload
from speedkit.workloads.workload import Workload

ROW, BATCH, BATCHES = 16384, 64, 10  # float32 values of a sample, 64 kB; samples; batches of a window
CPU = torch.device("cpu")


def numbers(size: int) -> Workload:
    """Return a workload of rows of `size` random numbers, to be cached and never trained on."""
    return Workload(
        f"numbers-{size}",
        Recipe(batch_size=BATCH),
        range(1),
        range(1),
        functools.partial(_row_of, size=size),
        features=Tensor.contiguous,
        target=operator.index,
        model=torch.nn.Identity,
        loss=_none,
        score=_none,
        parameters={"size": size},
    )


def _row_of(item: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(item))


def _none(*_: Any) -> Any:
    raise NotImplementedError("nothing is trained on these numbers")


def reading(count: int = 4000, pairs: int = 60) -> list[Row]:
    """Time to gather random batches from a warm cache over that from one memory map, and of a first touch."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        cache = open_cache(numbers(ROW), range(count), Plan(cache="disk"), cache_dir=folder)
        plain = np.lib.format.open_memmap(Path(folder) / "plain.npy", "w+", np.float32, (count, ROW))
        for begin in range(0, count, BATCH):  # warms both
            indices = torch.arange(begin, min(begin + BATCH, count))
            plain[indices] = cache.gather(indices, CPU)[0]
        plain = np.load(Path(folder) / "plain.npy", mmap_mode="r")

        def gather(touched: bool) -> None:
            for _ in range(BATCHES):
                if not touched:
                    cache.unchecked[:] = True
                cache.gather(torch.from_numpy(rng.integers(0, count, BATCH)), CPU)

        def mapped() -> None:
            for _ in range(BATCHES):
                plain[rng.integers(0, count, BATCH)]

        later, first = functools.partial(gather, True), functools.partial(gather, False)
        over = in_turns("", {"cache": later, "map": mapped}, pairs)
        touch = in_turns("", {"first": first, "later": later}, pairs, before=lambda: cache.unchecked.fill(False))
        size = sum(path.stat().st_size for path in cache.folder.iterdir())
        payload = count * ROW * 4
    return [
        row(
            "gathering 64 samples of 64 kB, cache over memory map",
            ends(over["seconds_a"], over["seconds_b"]),
            1 / 0.9,
            "x",
        ),
        row("first touch over later ones", ends(touch["seconds_a"], touch["seconds_b"]), 1 / 0.7, "x"),
        row("bytes on disk over payload", [size / payload], 1.01, "x"),
    ]


def building(clips: int = 2400, sample: int = 100) -> list[Row]:
    """Time to build a cache of generated sounds on all cores over that of as many entries on each core alone."""
    workload = load_workload("audio", clips=clips)
    items = [*workload.train, *workload.test]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(cache="disk")
        builder = builder_of(workload, items, plan, folder)
        alone_s: list[float] = []

        def one_core() -> None:
            for index in np.random.default_rng(len(alone_s)).integers(0, len(items), sample).tolist():
                began_s = time.perf_counter()
                builder.entry(index)
                alone_s.append(time.perf_counter() - began_s)

        one_core()
        found = open_cache(workload, items, plan, cache_dir=folder)
        one_core()
    ratio = found.build_s * usable_cores() / (len(items) * statistics.fmean(alone_s))
    return [row(f"building {len(items)} entries on {usable_cores()} cores", [ratio], 1 / 0.9, "x")]


def opening(count: int = 1_000_000) -> list[Row]:
    """Seconds and bytes that opening a cache of `count` entries takes in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"""import psutil, time, torch
from speedkit.data.cache import open_cache; from speedkit.measure.bench_cache import numbers; from speedkit import Plan
resident = lambda: psutil.Process().memory_info().rss
before, began_s, work = resident(), time.perf_counter(), numbers(4)
cache = open_cache(work, range({count}), Plan(cache="disk"), cache_dir={folder!r})
seconds, size = time.perf_counter() - began_s, resident() - before
"""
        number_from(code + "print(0)")  # builds it
        seconds, sizes = ([number_from(code + f"print({what})") for _ in range(3)] for what in ("seconds", "size"))
    return [
        row(f"opening {count} entries", seconds, 1.0, "s"),
        row(f"memory for {count} entries", [size / 1e6 for size in sizes], 100, "MB"),
    ]


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "cache-read": reading,
    "cache-build": building,
    "cache-open": opening,
}

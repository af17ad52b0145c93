"""Features or waveforms computed once and kept, in files that are mapped into memory.

A build that is killed loses the entry it was at. An entry that does not match its checksum when it is first read is
computed again, in place. Other parameters, code or library versions mean another folder, so nothing stale is served.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from xxhash import xxh3_64_intdigest

from speedkit.data.cache_files import VALUES, fingerprint, mapped, read_index
from speedkit.data.cache_in_memory import CacheInMemory, rows_on_device
from speedkit.data.cache_on_disk import FeatureCache
from speedkit.errors import SpeedkitError
from speedkit.machine import MEMORY_SHARE, cache_root, free_bytes, this_machine
from speedkit.plan import Plan
from speedkit.workload import Workload

PARTS = "parts"  # of a cache that several machines compute
WAIT_S = 3.0  # for another process, until it is told of


def open_cache(
    workload: Workload,
    items: Sequence[Any],
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    **options: Any,
) -> FeatureCache | CacheInMemory:
    """Return the cache of `items` that `plan` asks for, with `options` of build_cache.

    In memory it takes up to half of what is free there; a larger one stays on disk.
    """
    device = torch.device(device)
    if plan.cache == "device" and workload.rows is not None:
        return rows_on_device(workload, items, device)
    cache = build_cache(workload, items, plan, **options)
    if plan.cache == "disk":
        return cache
    if plan.cache == "ram":
        device = torch.device("cpu")
    if math.prod(cache.padded_shape) * cache.dtype.itemsize > MEMORY_SHARE * free_bytes(device):
        cache.why += f"; they are more than half of what is free in {plan.cache}"
        return cache
    return cache.loaded(plan.cache, device)


def build_cache(
    workload: Workload,
    items: Sequence[Any],
    plan: Plan,
    *,
    cache_dir: str | Path | None = None,
    progress: bool = False,
    workers: int | None = None,
) -> FeatureCache:
    """Return the cache of `items` on disk; entries that are missing or changed are computed first.

    What lies in caches of some of the items, in PARTS of the folder, is taken from there instead. `workers` processes
    compute entries, by default one per core. Raises SpeedkitError when the folder cannot be written, the disk is too
    small, or no item can be read.
    """
    machine = this_machine("cpu")
    if workers is None:
        workers = machine.cores
    if not machine.supports("workers"):
        workers = 0
    root = cache_root() / "features" if cache_dir is None else Path(cache_dir)
    name = f"{workload.name}-{plan.cache_of}-{fingerprint(workload, plan)[:16]}"
    folder = root / name.replace("/", "_")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with building(folder):
            cache = FeatureCache(workload, items, plan, folder=folder)
            for part in sorted(root.glob(f"{PARTS}/*/{folder.name}")):
                take_over(cache, part)
            cache.build(workers, progress)
    except OSError as error:
        problem = f"the feature cache in {folder} cannot be built ({error})"
        raise SpeedkitError(f"{problem}: make room or name another folder by cache_dir=, and start again") from error
    return cache


def take_over(cache: FeatureCache, part: Path) -> None:
    """Copy entries that are missing in `cache`, and whole in another one of some of the items, at `part`."""
    found = read_index(part)
    if found is None or not found[1]["checksum"].any():
        return
    rows = found[1]
    ends = np.cumsum(rows["size"]).tolist()
    values = mapped(part / VALUES, np.dtype(np.uint8), ends[-1])
    places = dict(zip(cache.key.tolist(), range(len(cache.key)), strict=True))
    missing = cache.committed() == 0
    for (key, size, _, checksum), end in zip(rows.tolist(), ends, strict=True):
        index = places.get(key)
        if index is None or not missing[index] or not checksum:
            continue
        there = values[end - size : end]
        if xxh3_64_intdigest(there.data, key) == checksum:
            entry = cache.entry(index)
            entry[...] = there.view(cache.dtype).reshape(entry.shape)
            cache.index["checksum"][cache.row[index]] = checksum


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """Let one process at a time build in `folder`: a second one says for whom it waits, and finds all entries then."""
    lock = FileLock(folder / ".lock")
    builder = folder / ".builder"
    try:
        held = lock.acquire(timeout=WAIT_S)
    except Timeout:
        warnings.warn(f"waiting for process {builder.read_text()}, which builds the cache in {folder}", stacklevel=4)
        held = lock.acquire()
    with held:
        builder.write_text(str(os.getpid()))
        yield

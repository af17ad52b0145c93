"""Feature caches as the command `cache` builds them in parts, describes, verifies and repairs them."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from speedkit.data.cache import PARTS, build_cache
from speedkit.data.cache_files import ENTRY, HEADER, INDEX, VALUES, mapped, read_index, size_of
from speedkit.data.cache_on_disk import FeatureCache
from speedkit.errors import UsageError
from speedkit.lab.cluster import cluster_executor
from speedkit.plan import Plan
from speedkit.workload import Workload

CLUSTER_PARTS = 64  # one each for more workers than most clusters have, and little to do again where one dies


def build_part(
    workload: Workload, items: Sequence[Any], plan: Plan, *, folder: str | Path, part: tuple[int, int], **options: Any
) -> FeatureCache:
    """Build the cache of one part of `items`, `(3, 16)` for the third of sixteen, for others to be joined with it.

    Parts may be built at the same time, on machines that share `folder`; one that is killed goes on where it was.
    """
    return build_cache(workload, _items_of(items, part), plan, cache_dir=_folder_of(folder, part), **options)


def _items_of(items: Sequence[Any], part: tuple[int, int]) -> Sequence[Any]:
    number, count = part
    return items[(number - 1) * len(items) // count : number * len(items) // count]


def _folder_of(folder: str | Path, part: tuple[int, int]) -> Path:
    number, count = part
    return Path(folder).resolve() / PARTS / f"{number}-of-{count}"


def build_on_cluster(
    workload: Workload, items: Sequence[Any], plan: Plan, *, folder: str | Path, address: str
) -> FeatureCache:
    """Build the parts on the workers of the Dask scheduler at `address`, which share `folder`, and join them here.

    A part whose worker dies is gone on with by another one.
    """
    count = min(CLUSTER_PARTS, len(items))
    # A worker is sent the items of its part alone: 64 times all of ten million would be 47 GB.
    bare = dataclasses.replace(workload, train=(), test=(), validation=())
    with cluster_executor(address) as executor:
        parts = []
        for number in range(1, count + 1):
            own = _items_of(items, (number, count))
            away = _folder_of(folder, (number, count))
            parts.append(executor.submit(_build_away, bare, own, plan, cache_dir=away))
        for part in parts:
            part.result()
    return build_joined(workload, items, plan, folder=folder)


def _build_away(workload: Workload, items: Sequence[Any], plan: Plan, *, cache_dir: Path) -> None:
    """Build a part, in a worker's own process, and send no cache back."""
    build_cache(workload, items, plan, cache_dir=cache_dir, workers=0)


def build_joined(workload: Workload, items: Sequence[Any], plan: Plan, *, folder: str | Path) -> FeatureCache:
    """Build the cache of all `items` of the parts that lie in `folder`, which then go, and compute what they lack."""
    cache = build_cache(workload, items, plan, cache_dir=folder, progress=True)
    shutil.rmtree(Path(folder) / PARTS, ignore_errors=True)  # there are none where nobody has built a part
    return cache


def caches_in(folder: str | Path) -> list[Path]:
    """Return the caches in the folder that --cache-dir names, or the one that `folder` is. Raises UsageError."""
    folders = [Path(folder), *sorted(Path(folder).glob("*"))]
    caches = [path for path in folders if (path / VALUES).exists() or (path / INDEX).exists()]
    if not caches:
        raise UsageError(f"{folder} holds no feature cache: name the folder that --cache-dir named")
    return caches


def damage(folder: Path, repair: bool = False) -> list[str]:
    """Return in words what is not as it was written: entries, or the index itself.

    `repair` marks such entries as not computed, so that the next use computes them; without an index it computes all.
    """
    found = read_index(folder)
    if found is None:
        return ["the index"]
    rows = found[1]
    values = np.zeros(0, np.uint8)  # an empty file cannot be mapped
    if size_of(folder / VALUES):
        values = np.memmap(folder / VALUES, np.uint8, "r")
    damaged = []
    end = 0
    for row, (key, size, _, checksum) in enumerate(rows.tolist()):
        end += size
        entry = values[end - size : end]
        if checksum and (len(entry) != size or xxh3_64_intdigest(entry.data, key) != checksum):
            damaged.append(row)
    if repair:
        mapped(folder / INDEX, ENTRY, len(rows), offset=HEADER.itemsize)["checksum"][damaged] = 0
    return [f"entry {row}" for row in damaged]


def describe(folder: Path) -> str:
    """Return a line about a cache."""
    found = read_index(folder)
    if found is None:
        return f"{folder}: the index is not as it was written: the next use computes all entries again"
    checksums = found[1]["checksum"]
    size_mb = size_of(folder / VALUES) / 1e6
    return f"{folder}: {np.count_nonzero(checksums)} of {len(checksums)} entries are computed, {size_mb:.3g} MB"

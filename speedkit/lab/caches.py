"""Feature caches as the command `cache` describes, verifies and repairs them."""

from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from speedkit.data.cache_files import ENTRY, HEADER, INDEX, VALUES, mapped, read_index, size_of
from speedkit.errors import UsageError


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

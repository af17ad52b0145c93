"""The files of a feature cache: mapped, locked, indexed, described and verified.

values.bin     the entries, one after another
checksums.bin  the xxh3 of each entry; 0 means "not computed yet", so writing a checksum commits its entry
index.npz      of each entry: hash of the item's name, size and time of change of its file, where its values begin
               and how many they are; its last 8 bytes are the xxh3 of all before them
about.json     what all entries depend on, how the workload is made, the items' names: for people and for `repair`
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from speedkit.data.fingerprint import described
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, write_json

VALUES, CHECKSUMS, INDEX, ABOUT = "values.bin", "checksums.bin", "index.npz", "about.json"
Index = dict[
    str, np.ndarray
]  # key, size, modified_ns, begin, count of each entry; shape and itemsize (bytes of a value) of all


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a SpeedkitError."""
    try:
        yield
    except OSError as error:
        raise SpeedkitError(
            f"the feature cache cannot be written to {folder} ({error.strerror}); what is complete is kept: make room "
            "or name another folder with --cache-dir, and start again"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for one builder, where it can be written at all; whoever comes second waits."""
    lock = FileLock(folder / ".lock")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file of `count` numbers; one that is too short is made longer, and its room on the disk taken at once.

    What was cut off comes back as zeros, which match no checksum. What is written to a file that cannot be written
    stays in this process.
    """
    size = max(1, count) * dtype.itemsize
    there = path.stat().st_size if path.exists() else 0
    if there < size:
        with writing(path.parent), path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), there, size - there)
            file.truncate(size)
    return np.asarray(np.memmap(path, dtype, "r+" if os.access(path, os.W_OK) else "c", shape=(count,)))


def read_index(folder: Path) -> Index | None:
    """Return the columns of a folder's index; None where it is missing or not as it was written."""
    path = folder / INDEX
    data = memoryview(path.read_bytes() if path.exists() else b"")
    if xxh3_64_digest(data[:-8]) != data[-8:]:
        return None
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        return dict(columns)


def write_index(folder: Path, index: Index) -> None:
    """Write the index, whole or not at all."""
    stream = io.BytesIO()
    np.savez(stream, **index)  # type: ignore[arg-type]
    with atomic(folder / INDEX) as temporary:
        temporary.write_bytes(stream.getvalue() + xxh3_64_digest(stream.getbuffer()))


def read_about(folder: Path) -> dict[str, Any]:
    """Return what about.json says; an empty one where it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((folder / ABOUT).read_text())
        if isinstance(about, dict) and {"workload", "made_by", "plan", "dtype", "fingerprint", "items"} <= about.keys():
            return about
    return {}


def name_of(item: Any) -> str:
    """Return what the cache calls an item: the path of its file, or what it is made of."""
    path = getattr(item, "path", None)
    if path is None:
        return described(item)
    return os.path.join(os.getcwd(), str(path)) if os.path.exists(path) else str(path)


def key_of(name: str) -> int:
    """Return the hash of an item's name."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))


def _source(item: Any) -> tuple[int, int, int]:
    """Return (key of an item, size and time of change of its file, -1 without one)."""
    size = modified_ns = -1
    if getattr(item, "path", None) is not None:
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(item.path)  # of a member of a tar: the tar
            size, modified_ns = status.st_size, status.st_mtime_ns
    return key_of(name_of(item)), size, modified_ns


def _rows(known: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the row of each of `keys` [N], the places of those among them that are new and get rows at the end)."""
    begin = np.flatnonzero(known == keys[0])
    if len(begin) and np.array_equal(known[begin[0] : begin[0] + len(keys)], keys):  # a list that was kept as it is
        return begin[0] + np.arange(len(keys)), np.zeros(0, np.int64)
    _, first, inverse = np.unique(np.concatenate([known, keys]), return_index=True, return_inverse=True)
    first = first[inverse[len(known) :]]  # where in both each key is first
    added = np.unique(first[first >= len(known)])
    rows = np.where(first < len(known), first, len(known) + np.searchsorted(added, first))
    return rows, added - len(known)


def completed(
    folder: Path, index: Index | None, items: Sequence[Any], count: np.ndarray, about: dict[str, Any]
) -> tuple[Index, np.ndarray]:
    """Return (the index with new items added and changed ones to be computed again, the row of each item in it).

    `count` [N] are the values of each entry. Where these lie depends on the items alone, and not on who computes what
    when: a build that was killed and went on ends with the bytes of one that was not.
    """
    kinds = [("key", np.uint64), ("size", np.int64), ("modified_ns", np.int64)]
    sources = np.fromiter(map(_source, items), kinds, len(items))
    columns = {name: sources[name] for name, _ in kinds} | {"begin": np.zeros_like(count), "count": count}
    if index is None:  # then nothing tells what the other files hold
        with writing(folder):
            for name in (CHECKSUMS, VALUES):
                (folder / name).unlink(missing_ok=True)
        index = {name: column[:0] for name, column in columns.items()}
        index |= {"shape": np.array(about["shape"]), "itemsize": np.array(about["itemsize"])}
    known = len(index["key"])
    row, added = _rows(index["key"], columns["key"])
    if len(added):
        index |= {name: np.concatenate([index[name], column[added]]) for name, column in columns.items()}

    # Entries that are new, and those that have another length now, get room at the end.
    moved = index["count"][row] != count
    changed = moved | (index["size"][row] != columns["size"]) | (index["modified_ns"][row] != columns["modified_ns"])
    if not len(added) and not changed.any():
        return index, row
    homeless = np.union1d(row[moved], np.arange(known, len(index["key"])))
    end = int((index["begin"] + index["count"])[:known].max(initial=0))
    for name in ("size", "modified_ns", "count"):
        index[name][row] = columns[name]
    counts = index["count"][homeless]
    index["begin"][homeless] = end + np.cumsum(counts) - counts

    # Checksums first: a kill in between makes for too much to compute, never for too little.
    checksums = mapped(folder / CHECKSUMS, np.dtype(np.uint64), len(index["key"]))
    checksums[np.union1d(homeless, row[changed])] = 0
    names = (read_about(folder).get("items", []) + ["?"] * known)[:known]
    with writing(folder):
        write_json(folder / ABOUT, about | {"items": names + [name_of(items[place]) for place in added.tolist()]})
        write_index(folder, index)
    return index, row


def caches_in(folder: str | Path) -> list[Path]:
    """Return the caches in the folder that --cache-dir names, or the one that `folder` is. Raises UsageError."""
    caches = [path for path in (Path(folder), *sorted(Path(folder).glob("*"))) if (path / VALUES).exists()]
    if not caches:
        raise UsageError(f"{folder} holds no feature cache: name the folder that --cache-dir named")
    return caches


def _bytes(path: Path) -> np.ndarray:
    return np.memmap(path, np.uint8, "r") if path.exists() and path.stat().st_size else np.zeros(0, np.uint8)


def _values(index: Index) -> int:
    return int((index["begin"] + index["count"]).max(initial=0))


def damaged_rows(folder: Path, index: Index) -> list[int]:
    """Return the rows of the index whose values do not match their checksum."""
    values, size = _bytes(folder / VALUES), int(index["itemsize"])
    checksums = np.zeros(len(index["key"]), np.uint64)
    there = _bytes(folder / CHECKSUMS)[: checksums.nbytes]
    checksums.view(np.uint8)[: len(there)] = there
    damaged = []
    for row in np.flatnonzero(checksums).tolist():
        begin, end = (int(place) * size for place in (index["begin"][row], index["begin"][row] + index["count"][row]))
        if xxh3_64_intdigest(values[begin:end].data, seed=int(index["key"][row])) != checksums[row]:
            damaged.append(row)
    return damaged


def verify_cache(folder: str | Path) -> list[tuple[str, str]]:
    """Compare all entries of the caches in `folder` with their checksums; return what is damaged: (file or item, why).

    Entries that were never computed are not damaged. Raises UsageError where no cache is.
    """
    problems = []
    for path in caches_in(folder):
        index, about = read_index(path), read_about(path)
        if index is None:
            problems.append((f"{path / INDEX}", "it is not as it was written: all is built anew at the next use"))
            continue
        names = about.get("items", [])
        if [key_of(name) for name in names] != index["key"].tolist():
            problems.append((f"{path / ABOUT}", "it is not as it was written"))
            names = [f"entry {row} of {path}" for row in range(len(index["key"]))]
        for name, size in ((VALUES, _values(index) * int(index["itemsize"])), (CHECKSUMS, 8 * len(index["key"]))):
            if len(_bytes(path / name)) < size:
                problems.append((f"{path / name}", "it is cut short"))
        problems += [(names[row], "its values do not match their checksum") for row in damaged_rows(path, index)]
    return problems


def describe_caches(folder: str | Path) -> list[str]:
    """Return a line about each cache in `folder`. Raises UsageError where none is."""
    lines = []
    for path in caches_in(folder):
        index, about = read_index(path), read_about(path)
        if index is None or not about:
            lines.append(f"{path}: what it says of itself is damaged")
            continue
        there = np.count_nonzero(np.frombuffer(_bytes(path / CHECKSUMS), np.uint64))
        lines.append(
            f"{path}: {there} of {len(index['key'])} entries of workload {about['workload']}, "
            f"{about['plan']['cache_of']} as {about['dtype']}, {(path / VALUES).stat().st_size / 1e6:.3g} MB"
        )
    return lines

"""The folder of a feature cache: its files, what all its entries depend on, and how they are verified.

values.bin     the entries, one after another
checksums.bin  the xxh3 of each entry; 0 means "not computed yet", so writing a checksum commits its entry
index.npz      of each entry: its key, the hash of the item's name, size, time of change and length, and how many
               values it has; the last 8 bytes are the xxh3 of all before them
about.json     what all entries depend on, how the workload is made, the items' names: for people and for `repair`

Entries are added and never moved. An item whose file has changed is a new entry, and the old one is never read again.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import io
import json
import os
import pickle
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_64_intdigest, xxh3_128, xxh3_128_hexdigest

from speedkit.data.decode import with_decoder
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, write_json
from speedkit.plan import Plan

VALUES, CHECKSUMS, INDEX, ABOUT = "values.bin", "checksums.bin", "index.npz", "about.json"
VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
PLAIN = (bool, int, float, complex, str, type(None))

# key [rows] and count [rows] of the entries, shape of the first one, itemsize: bytes of a value.
Index = dict[str, np.ndarray]


# What all entries depend on.


def fingerprint(workload: Any, plan: Plan) -> dict[str, str]:
    """Return all that every entry depends on, named for the reader.

    Of code the whole file counts in which `load`, `features`, `length` and each of `sources` is defined; what these
    files import from elsewhere has to be named in `sources`. Raises SpeedkitError for what has no content to compare.
    """
    waveform = plan.cache_of == "waveform"
    values = {
        "cache_of": plan.cache_of,
        "dtype": workload.kept_as if waveform else plan.cache_dtype,
        "load": with_decoder(workload, plan.decoder),
        "features": None if waveform else workload.features,
        "length": workload.length,
        "sources": workload.sources,
        **{f"parameter {name}": value for name, value in workload.parameters.items()},
        **{f"version of {name}": importlib.metadata.version(name) for name in VERSIONED},
    }
    try:
        return {name: described(value) for name, value in sorted(values.items())}
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise SpeedkitError(
            f"{plan.cache_of} of workload {workload.name} cannot be cached, for whether they change cannot be seen "
            f"({error}): open files, locks and the like where they are used, not in parameters, load or features"
        ) from error


def described(value: Any) -> str:
    """Return a plain value as text, and the hash of what anything else consists of: the same in every process."""
    if isinstance(value, PLAIN):
        return repr(value)
    content = xxh3_128()
    pickler = _Content(types.SimpleNamespace(write=content.update), protocol=4)
    pickler.fast = True  # equal values count as equal, whether or not they are one object
    pickler.dump(value)
    return content.hexdigest()


class _Content(pickle.Pickler):
    """Pickles functions and classes as the file they are written in, tensors as their values. For hashing only."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.source = functools.cache(_source)  # looking for a class takes as long as parsing its file

    def reducer_override(self, value: Any) -> Any:
        parts: Any = None
        if isinstance(value, Tensor):
            data = value.detach().cpu().flatten().view(torch.uint8).numpy()
            parts = str(value.dtype), tuple(value.shape), xxh3_128_hexdigest(data.data)
        elif isinstance(value, types.FunctionType):
            # Its own code too: its file may have been edited since it was imported, and all lambdas have one name.
            code = value.__code__
            constants = [constant for constant in code.co_consts if isinstance(constant, PLAIN)]
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            defaults = value.__defaults__, value.__kwdefaults__
            parts = value.__qualname__, self.source(value), code.co_code, code.co_names, constants, defaults, cells
        elif isinstance(value, type | types.ModuleType):
            methods = [part for part in vars(value).values() if isinstance(part, types.FunctionType)]
            parts = value.__name__, self.source(value) or methods  # a class of a notebook has no file
        elif callable(value) and hasattr(value, "__wrapped__"):  # functools.lru_cache
            parts = value.__wrapped__
        return NotImplemented if parts is None else (repr, (parts,))  # any function: this is never unpickled


def _source(code: Any) -> str:
    """Return the hash of the whole file, or notebook cell, that defines a function, class or module; "" without one."""
    try:
        lines, _ = inspect.findsource(code)
    except (OSError, TypeError):  # written in C, or typed into an interpreter that keeps no lines
        return ""
    return xxh3_128_hexdigest("".join(lines).encode())


# The files.


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
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock") if os.access(folder, os.W_OK) else contextlib.nullcontext():
        yield


def mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file of `count` numbers; one that is too short is made longer, and its room on the disk taken at once.

    What was cut off comes back as zeros, which match no checksum. What is written to a file that cannot be written
    stays in this process.
    """
    size = max(1, count) * dtype.itemsize
    present = path.stat().st_size if path.exists() else 0
    if present < size:
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), present, size - present)
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


def read_about(folder: Path) -> dict[str, Any]:
    """Return what about.json says; an empty one where it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / ABOUT).read_text())
    return {}


def identity(item: Any) -> tuple[str, str]:
    """Return (the path of an item's file, or what it is made of; size and time of change of the file)."""
    path = getattr(item, "path", None)
    if path is None:
        return described(item), ""
    try:
        status = os.stat(getattr(path, "tar", path))
    except (OSError, ValueError):
        return str(path), ""
    return os.path.abspath(str(path)), f"{status.st_size} {status.st_mtime_ns}"


def key_of(item: Any, count: int) -> int:
    """Return the hash of an item's identity and of how many values its entry has."""
    return xxh3_64_intdigest(" ".join((*identity(item), str(count))).encode("utf-8", "surrogateescape"))


def add_items(folder: Path, items: Sequence[Any], count: np.ndarray, about: dict[str, Any]) -> tuple[Index, np.ndarray]:
    """Return (the index, with the items added that it does not have, the row of each item in it).

    `count` [N] are the values of each entry. Where these lie depends on the items alone, and not on who computes what
    when: a build that was killed and went on ends with the bytes of one that was not.
    """
    index = read_index(folder)
    if index is None:  # then nothing tells what the other files hold
        (folder / CHECKSUMS).unlink(missing_ok=True)
        (folder / VALUES).unlink(missing_ok=True)
        index = {"key": np.zeros(0, np.uint64), "count": np.zeros(0, np.int64), "shape": np.array(about["shape"])}
        index["itemsize"] = np.array(about["itemsize"])

    # New items get the next rows, in the order of the list; one that is in it twice has one row.
    known = index["key"]
    keys = np.fromiter(map(key_of, items, count.tolist()), np.uint64, len(items))
    if np.array_equal(known[: len(keys)], keys):  # the list as it was: a million items need no sorting
        return index, np.arange(len(keys))
    _, first = np.unique(keys, return_index=True)
    added = np.sort(first[~np.isin(keys[first], known)])
    index["key"] = np.append(known, keys[added])
    index["count"] = np.append(index["count"], count[added])
    by_key = np.argsort(index["key"])
    row = by_key[np.searchsorted(index["key"], keys, sorter=by_key)]
    if len(added):
        # The names first, of which there may be more than entries, never fewer.
        names = (read_about(folder).get("items") or ["?"] * len(known))[: len(known)]
        write_json(folder / ABOUT, about | {"items": names + [identity(items[place])[0] for place in added]})
        stream = io.BytesIO()
        np.savez(stream, **index)  # type: ignore[arg-type]
        with atomic(folder / INDEX) as temporary:
            temporary.write_bytes(stream.getvalue() + xxh3_64_digest(stream.getbuffer()))
    return index, row


# Damage, and what the command line says.


def caches_in(folder: str | Path) -> list[Path]:
    """Return the caches in the folder that --cache-dir names, or the one that `folder` is. Raises UsageError."""
    caches = [path for path in (Path(folder), *sorted(Path(folder).glob("*"))) if (path / VALUES).exists()]
    if not caches:
        raise UsageError(f"{folder} holds no feature cache: name the folder that --cache-dir named")
    return caches


def damaged_rows(folder: Path, index: Index) -> list[int]:
    """Return the rows of the index whose values do not match their checksum, or whose checksum was cut off."""
    checksums = np.fromfile(folder / CHECKSUMS, np.uint64)[: len(index["key"])]
    damaged = list(range(len(checksums), len(index["key"])))
    end = index["itemsize"] * np.cumsum(index["count"])
    with open(folder / VALUES, "rb") as file:
        for row in np.flatnonzero(checksums).tolist():
            size = int(index["itemsize"] * index["count"][row])
            file.seek(end[row] - size)
            if xxh3_64_intdigest(file.read(size), int(index["key"][row])) != checksums[row]:
                damaged.append(row)
    return damaged


def verify_cache(folder: str | Path, repair: bool = False) -> list[tuple[str, str]]:
    """Compare all entries of the caches in `folder` with their checksums; return what is damaged: (file or item, why).

    Entries that were never computed are not damaged. `repair` makes such of those that are: the next use computes them.
    Raises UsageError where no cache is.
    """
    problems = []
    for path in caches_in(folder):
        index = read_index(path)
        if index is None:
            problems.append((f"{path / INDEX}", "it is not as it was written: all is built anew at the next use"))
            continue
        names = read_about(path).get("items") or [f"entry {row} of {path}" for row in range(len(index["key"]))]
        damaged = damaged_rows(path, index)
        problems += [(names[row], "its values do not match their checksum") for row in damaged]
        if repair and damaged:
            mapped(path / CHECKSUMS, np.dtype(np.uint64), len(index["key"]))[damaged] = 0
    return problems


def describe_caches(folder: str | Path) -> list[str]:
    """Return a line about each cache in `folder`. Raises UsageError where none is."""
    lines = []
    for path in caches_in(folder):
        about, line = read_about(path), f"{path}: what it says of itself is damaged"
        if about:
            computed, of = np.count_nonzero(np.fromfile(path / CHECKSUMS, np.uint64)), about["plan"]["cache_of"]
            line = f"{path}: {computed} of {len(about['items'])} entries of workload {about['workload']}, {of} as "
            line += f"{about['dtype']}, {(path / VALUES).stat().st_size / 1e6:.3g} MB"
        lines.append(line)
    return lines

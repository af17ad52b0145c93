"""The folder of a feature cache: what its entries depend on, its files, and how they are verified.

values.bin     the entries, one after another
checksums.bin  the xxh3 of each entry; 0 means "not computed yet", so writing a checksum commits its entry
index.npz      of each entry: its key, which tells items and states of their files apart, and how many bytes it has;
               the shape of the first; the last 8 bytes are the xxh3 of all before them
about.json     what all entries depend on, for people

Entries are added and never moved. An item whose file has changed is a new entry, and the old one is never read again.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import io
import os
import pickle
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_64_intdigest, xxh3_128

from speedkit.data.decode import with_decoder
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic, read_json
from speedkit.plan import Plan

VALUES, CHECKSUMS, INDEX = "values.bin", "checksums.bin", "index.npz"
VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
PLAIN = (bool, int, float, complex, str, type(None))

Index = dict[str, np.ndarray]  # key [rows], size [rows] in bytes, shape


# What all entries depend on.


def fingerprint(workload: Any, plan: Plan) -> dict[str, str]:
    """Return all that every entry depends on, named for the reader.

    Of code the whole file counts in which `load`, `features`, `length` and each of `sources` is defined; what these
    files import from elsewhere has to be named in `sources`.
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
    return {name: described(value) for name, value in sorted(values.items())}


def described(value: Any) -> str:
    """Return a plain value as text, and the hash of what anything else consists of: the same in every process.

    Raises SpeedkitError for what cannot be compared.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    content = xxh3_128()
    pickler = _Content(types.SimpleNamespace(write=content.update), protocol=4)
    pickler.fast = True  # equal values count as equal, whether or not they are one object
    try:
        pickler.dump(value)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise SpeedkitError(
            f"whether {value!r:.60} changes cannot be seen ({error}), so nothing that depends on it can be kept: open "
            "files, locks and the like where they are used, not in parameters, load or features"
        ) from error
    return content.hexdigest()


class _Content(pickle.Pickler):
    """Pickles functions and classes as the file they are written in, tensors as their values. For hashing only."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.source = functools.cache(_source)  # looking for a class takes as long as parsing its file

    def reducer_override(self, value: Any) -> Any:
        """Return what is pickled in place of a tensor, a function, a class or a module; NotImplemented for the rest."""
        parts: Any = None
        if isinstance(value, Tensor):
            parts = str(value.dtype), tuple(value.shape), value.detach().cpu().flatten().view(torch.uint8).numpy()
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
    """Return the whole file, or notebook cell, that defines a function, class or module; "" without one."""
    try:
        return "".join(inspect.findsource(code)[0])
    except (OSError, TypeError):  # written in C, or typed into an interpreter that keeps no lines
        return ""


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


def mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file of `count` numbers; one that is too short is made longer, and its room on the disk taken at once.

    What was cut off comes back as zeros, which match no checksum.
    """
    size, present = count * dtype.itemsize, path.stat().st_size if path.exists() else 0
    if present < size:
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk would be a signal when a page is written
                os.posix_fallocate(file.fileno(), present, size - present)
            file.truncate(size)
    return np.asarray(np.memmap(path, dtype, "r+", shape=(count,)))


def read_index(folder: Path) -> Index | None:
    """Return the columns of a folder's index; None where it is missing or not as it was written."""
    path = folder / INDEX
    data = memoryview(path.read_bytes() if path.exists() else b"")
    if xxh3_64_digest(data[:-8]) != data[-8:]:
        return None
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        return dict(columns)


def key_of(item: Any, size: int) -> int:
    """Return the hash of an item's path, of its file's size and time of change, and of how many bytes its entry has.

    An item that is no file has its own content in the place of these.
    """
    path = getattr(item, "path", None)
    name = described(item) if path is None else str(path)
    if path is not None:
        with contextlib.suppress(OSError):  # no file either: a name alone
            status = os.stat(getattr(path, "tar", path))
            name = f"{os.path.abspath(name)} {status.st_size} {status.st_mtime_ns}"
    return xxh3_64_intdigest(os.fsencode(f"{name} {size}"))


def add_items(
    folder: Path, items: Sequence[Any], sizes: np.ndarray, shape: tuple[int, ...]
) -> tuple[Index, np.ndarray]:
    """Return (the index, with the items added that it does not have, the row of each item in it).

    `sizes` [N] are the bytes of each entry. New items get the next rows, in the order of the list: where entries lie
    does not depend on who computes what when, and a build that was killed ends with the bytes of one that was not.
    """
    index = read_index(folder)
    if index is None:  # then nothing tells what the other files hold
        (folder / CHECKSUMS).unlink(missing_ok=True)
        (folder / VALUES).unlink(missing_ok=True)
        index = {"key": np.zeros(0, np.uint64), "size": np.zeros(0, np.int64), "shape": np.array(shape)}

    known = index["key"]
    keys = np.fromiter(map(key_of, items, sizes.tolist()), np.uint64, len(items))
    if np.array_equal(known[: len(keys)], keys):  # the list as it was: a million items need no sorting
        return index, np.arange(len(keys))
    rows = dict(zip(known.tolist(), range(len(known)), strict=True))
    row = np.array([rows.setdefault(key, len(rows)) for key in keys.tolist()])
    if len(rows) > len(known):
        index["key"] = np.fromiter(rows, np.uint64)
        index["size"] = np.pad(index["size"], (0, len(rows) - len(known)))
        index["size"][row] = sizes
        stream = io.BytesIO()
        np.savez(stream, **index)  # type: ignore[arg-type]
        with atomic(folder / INDEX) as temporary:
            temporary.write_bytes(stream.getvalue() + xxh3_64_digest(stream.getbuffer()))
    return index, row


def caches_in(folder: str | Path) -> list[Path]:
    """Return the caches in the folder that --cache-dir names, or the one that `folder` is. Raises UsageError."""
    caches = [path for path in (Path(folder), *sorted(Path(folder).glob("*"))) if (path / VALUES).exists()]
    if not caches:
        raise UsageError(f"{folder} holds no feature cache: name the folder that --cache-dir named")
    return caches


def damaged_rows(folder: Path, repair: bool = False) -> list[int]:
    """Return which entries of a cache do not match their checksums; all where its index is not as it was written.

    Entries that were never computed are not damaged. `repair` makes such of those that are: the next use computes them.
    """
    index, checksums = read_index(folder), np.fromfile(folder / CHECKSUMS, np.uint64)
    if index is None:
        return list(range(max(1, len(checksums))))
    damaged = list(range(len(checksums), len(index["key"])))  # cut off
    end = np.cumsum(index["size"])
    with open(folder / VALUES, "rb") as file:
        for row in np.flatnonzero(checksums[: len(end)]).tolist():
            file.seek(end[row] - index["size"][row])
            if xxh3_64_intdigest(file.read(index["size"][row]), int(index["key"][row])) != checksums[row]:
                damaged.append(row)
    if repair and damaged:
        mapped(folder / CHECKSUMS, checksums.dtype, len(end))[damaged] = 0
    return damaged


def describe(folder: Path) -> str:
    """Return a line about a cache."""
    checksums, size_mb = np.fromfile(folder / CHECKSUMS, np.uint64), (folder / VALUES).stat().st_size / 1e6
    done = f"{np.count_nonzero(checksums)} of {len(checksums)} entries are computed"
    return f"{folder}: {done}, {size_mb:.3g} MB of {read_json(folder / 'about.json')['dtype']}"

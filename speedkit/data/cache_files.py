"""The folder of a feature cache: what its entries depend on, its files, and how they are verified.

values.bin     the entries, one after another
checksums.bin  the xxh3 of each entry; 0 means "not computed yet", so writing a checksum commits its entry
index.npz      for each entry its key, which tells items and states of their files apart, and its size in bytes;
               the shape of the first entry; the last 8 bytes are the xxh3 of all before them

Entries are appended and never moved. An item whose file has changed gets a new entry; the old one is not read again.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import io
import os
import pickle
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_64_intdigest, xxh3_128

from speedkit.data.decode import with_decoder
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic
from speedkit.plan import Plan

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

VALUES, CHECKSUMS, INDEX = "values.bin", "checksums.bin", "index.npz"
VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
PLAIN = (bool, int, float, complex, str, type(None))

Index = dict[str, np.ndarray]  # key [rows], size [rows] in bytes, shape


def fingerprint(workload: "Workload", plan: Plan) -> str:
    """Return a hash of all that every entry depends on.

    Code counts as the whole file in which `load`, `features`, `length` or one of `sources` is defined; what these files
    import has to be named in `sources`.
    """
    waveform = plan.cache_of == "waveform"
    return content_hash(
        {
            "dtype": workload.kept_as if waveform else plan.cache_dtype,
            "load": with_decoder(workload, plan.decoder),
            "features": None if waveform else workload.features,
            "length": workload.length,
            "sources": workload.sources,
            "parameters": dict(workload.parameters),
            "versions": [importlib.metadata.version(name) for name in VERSIONED],
        }
    )


def content_hash(value: Any) -> str:
    """Return a hash of what a value consists of, the same in every process.

    Raises SpeedkitError for what cannot be compared, such as a lock.
    """
    content = xxh3_128()
    pickler = ContentPickler(types.SimpleNamespace(write=content.update), protocol=4)
    pickler.fast = True  # equal values count as equal, whether or not they are one object
    try:
        pickler.dump(value)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        problem = f"whether {value!r:.60} changes cannot be seen ({error})"
        raise SpeedkitError(f"{problem}: open files and locks where they are used") from error
    return content.hexdigest()


class ContentPickler(pickle.Pickler):
    """Pickles code as the text of its file, and tensors as their values. For hashing only: nothing is unpickled."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.source = functools.cache(source_of)  # finding a class takes as long as parsing its file

    def reducer_override(self, value: Any) -> Any:
        """Return what to pickle in place of a tensor, function, class or module; NotImplemented for the rest."""
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
            methods = [method for method in vars(value).values() if isinstance(method, types.FunctionType)]
            parts = value.__name__, self.source(value) or methods  # a class of a notebook has no file
        return NotImplemented if parts is None else (repr, (parts,))


def source_of(code: Any) -> str:
    """Return the text of the file or notebook cell that defines a function, class or module; "" without one."""
    try:
        return "".join(inspect.findsource(code)[0])
    except (OSError, TypeError):  # written in C, or typed into an interpreter that keeps no lines
        return ""


def mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file of `count` numbers, lengthened where it is too short; the new zeros match no checksum."""
    size, present = count * dtype.itemsize, path.stat().st_size if path.exists() else 0
    if present < size:
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk would be a signal when a page is written
                os.posix_fallocate(file.fileno(), present, size - present)
            file.truncate(size)
    return np.asarray(np.memmap(path, dtype, "r+", shape=(count,)))


def read_index(folder: Path) -> Index | None:
    """Return the index of a folder; None where it is missing or damaged."""
    path = folder / INDEX
    data = memoryview(path.read_bytes() if path.exists() else b"")
    if xxh3_64_digest(data[:-8]) != data[-8:]:
        return None
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        return dict(columns)


def item_key(item: Any, size: int) -> int:
    """Return the hash of an item's path, its file's size and time of change, and the size of its entry in bytes.

    An item without a path is hashed by its content.
    """
    path = getattr(item, "path", None)
    if path is None:
        name = repr(item) if isinstance(item, PLAIN) else content_hash(item)
    else:
        name = str(path)
        with contextlib.suppress(OSError):  # no file either: a name alone
            status = os.stat(getattr(path, "tar", path))
            name = f"{os.path.abspath(name)} {status.st_size} {status.st_mtime_ns}"
    return xxh3_64_intdigest(os.fsencode(f"{name} {size}"))


def add_items(
    folder: Path, items: Sequence[Any], *, sizes: np.ndarray, shape: Sequence[int]
) -> tuple[Index, np.ndarray]:
    """Add the items that the index lacks; return it and the row of each item [N]. `sizes` [N] of entries are in bytes.

    New items get the next rows in the order of the list: where entries lie does not depend on who computes what when,
    so a build that was killed ends with the same bytes as one that was not.
    """
    index = read_index(folder)
    if index is None:  # then nothing tells what the other files hold
        (folder / CHECKSUMS).unlink(missing_ok=True)
        index = {"key": np.zeros(0, np.uint64), "size": np.zeros(0, np.int64), "shape": np.array(shape)}

    keys = np.fromiter(map(item_key, items, sizes.tolist()), np.uint64, len(items))
    if np.array_equal(index["key"][: len(keys)], keys):  # the same list again: a million items need no dictionary
        return index, np.arange(len(keys))
    rows = {key: row for row, key in enumerate(index["key"].tolist())}
    row = np.array([rows.setdefault(key, len(rows)) for key in keys.tolist()])
    if added := len(rows) - len(index["key"]):
        index["key"] = np.fromiter(rows, np.uint64)
        index["size"] = np.pad(index["size"], (0, added))
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
    """Return the entries that do not match their checksums; all of them where the index is damaged.

    `repair` marks them as not computed yet, so that the next use computes them.
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
    return f"{folder}: {np.count_nonzero(checksums)} of {len(checksums)} entries are computed, {size_mb:.3g} MB"

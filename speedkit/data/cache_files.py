"""The folder of a feature cache: what its entries depend on, its files, and how its index is verified.

values.bin  the entries, one after another
index.bin   a header with the format of these files and the shape of the first entry, and for each entry its key, which
            tells items and states of their files apart, its size in bytes, a check of both, and its xxh3, which is 0
            while the entry is not computed: writing this checksum commits an entry

Entries are appended and never moved. An item whose file has changed gets a new entry; the old one is not read again.
Where the index is not as it was written, both files are made anew. None is written over: a run that reads the old ones
goes on with them.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest, xxh3_128

from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.workload import Workload

VALUES, INDEX = "values.bin", "index.bin"
FORMAT = 2  # of these files: another one is another folder
HEADER = np.dtype((np.int64, 10))  # the check of the other numbers, and the shape of the first entry, ended by a -1
ENTRY = np.dtype([("key", np.uint64), ("size", np.int64), ("check", np.uint64), ("checksum", np.uint64)])
VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")  # some are extras
PLAIN = (bool, int, float, complex, str, type(None))


def fingerprint(workload: Workload, plan: Plan) -> str:
    """Return a hash of all that every entry depends on.

    Code counts as the whole file in which `load`, `features`, `length` or one of `sources` is defined; what these files
    import has to be named in `sources`.
    """
    waveform = plan.cache_of == "waveform"
    return content_hash(
        {
            "format": FORMAT,
            "dtype": workload.kept_as if waveform else plan.cache_dtype,
            "load": workload.load_by(plan.decoder),
            "features": None if waveform else workload.features,
            "length": workload.length,
            "sources": workload.sources,
            "parameters": dict(workload.parameters),
            "versions": [importlib.metadata.version(name) for name in VERSIONED if importlib.util.find_spec(name)],
        }
    )


def content_hash(value: Any) -> str:
    """Return a hash of what a value consists of, the same in every process.

    Raises SpeedkitError for what cannot be compared, such as a lock or an object that contains itself.
    """
    source_of.cache_clear()  # a notebook may have loaded edited files again
    content = xxh3_128()
    pickler = ContentPickler(types.SimpleNamespace(write=content.update), protocol=4)
    pickler.fast = True  # equal values count as equal, whether or not they are one object
    try:
        pickler.dump(value)
    except (TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError) as error:
        problem = f"whether {value!r:.60} changes cannot be seen ({error})"
        raise SpeedkitError(f"{problem}: open files and locks where they are used") from error
    return content.hexdigest()


class ContentPickler(pickle.Pickler):
    """Pickles code as the text of its file, and tensors as their values. For hashing only: nothing is unpickled."""

    def reducer_override(self, value: Any) -> Any:
        """Return what to pickle in place of a tensor, function, class or module; NotImplemented for the rest."""
        if isinstance(value, Tensor):
            content = value.detach().cpu().flatten().view(torch.uint8)
            parts = [str(value.dtype), tuple(value.shape), content.numpy()]
        elif isinstance(value, type | types.ModuleType):
            methods = [method for method in vars(value).values() if isinstance(method, types.FunctionType)]
            parts = [value.__name__, source_of(value) or methods]  # a class of a notebook has no file
        elif isinstance(value, types.FunctionType):
            # Its own code too: its file may have been edited since it was imported, and all lambdas have one name.
            code = value.__code__
            constants = [constant for constant in code.co_consts if isinstance(constant, PLAIN)]
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            arguments = value.__defaults__, value.__kwdefaults__, cells
            parts = [value.__qualname__, source_of(value), code.co_code, code.co_names, constants, arguments]
        else:
            return NotImplemented
        return repr, (parts,)


@functools.lru_cache(maxsize=64)  # finding a class takes as long as parsing its file
def source_of(code: Any) -> str:
    """Return the text of the file or notebook cell that defines a function, class or module; "" without one."""
    try:
        return "".join(inspect.findsource(code)[0])
    except (OSError, TypeError):  # written in C, or typed into an interpreter that keeps no lines
        return ""


def mapped(path: Path, dtype: np.dtype, count: int, *, offset: int = 0) -> np.ndarray:
    """Map `count` numbers of a file from `offset` [bytes] on; it is lengthened by zeros, which match no checksum."""
    size = offset + count * dtype.itemsize
    present = size_of(path)
    if present < size:
        with path.open("ab") as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk would be a signal when a page is written
                os.posix_fallocate(file.fileno(), present, size - present)
            file.truncate(size)
    return np.asarray(np.memmap(path, dtype, "r+", offset=offset, shape=(count,)))


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def item_key(item: Any, size: int) -> int:
    """Return the hash of an item's path, its file's size and time of change, and the size of its entry in bytes.

    An item without a path is hashed by its content.
    """
    return xxh3_64_intdigest(f"{_identity(item)} {size}".encode("utf-8", "surrogateescape"))  # os.fsencode is slow


def _identity(item: Any) -> str:
    """Return a text that changes when an item, or its file, does."""
    if isinstance(item, PLAIN):
        return repr(item)
    path = getattr(item, "path", None)
    if path is None:
        return content_hash(item)
    try:
        status = os.stat(getattr(path, "tar", path))
    except OSError:  # no file either: a name alone
        return str(path)
    return f"{os.path.abspath(str(path))} {status.st_size} {status.st_mtime_ns}"


def read_index(folder: Path) -> tuple[tuple[int, ...], np.ndarray] | None:
    """Return the shape of the first entry and the rows of the index; None where it is not as it was written."""
    path = folder / INDEX
    if size_of(path) < HEADER.itemsize:
        return None
    [header] = np.fromfile(path, HEADER, count=1)
    rows = np.fromfile(path, ENTRY, offset=HEADER.itemsize)
    if header[0] != check_of(header) or (rows["check"] != row_checks(rows)).any():
        return None
    if size_of(folder / VALUES) > rows["size"].sum():  # rows were cut off: others would take their entries' place
        return None
    shape = header[1:].tolist()
    return tuple(shape[: shape.index(-1)]), rows


def new_index(folder: Path, shape: tuple[int, ...]) -> None:
    """Begin with an empty index, and without the entries that another one may have had."""
    for name in (INDEX, VALUES):
        (folder / name).unlink(missing_ok=True)
    header = np.full(HEADER.shape, -1)
    header[1 : 1 + len(shape)] = shape
    header[0] = check_of(header)
    (folder / INDEX).write_bytes(header.tobytes())


def check_of(header: np.ndarray) -> int:
    """Return the hash of all in a header but its first number."""
    return xxh3_64_intdigest(header[1:].tobytes()) >> 1  # it is signed


def row_checks(rows: np.ndarray) -> np.ndarray:
    """Return for each row what tells that its key and size belong together: it changes whenever one of them does."""
    return rows["key"] * np.uint64(0x9E3779B97F4A7C15) + rows["size"].view(np.uint64) * np.uint64(3) + np.uint64(1)


def add_items(path: Path, index: np.ndarray, *, keys: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the row of each item in the `index` at `path`, by its key [N]; items that it lacks are appended.

    They get the next rows in the order of the list: where entries lie does not depend on who computes what when, so a
    build that was killed ends with the same bytes as one that was not.
    """
    row = rows_of(keys, index)
    if (row >= len(index)).any():
        grown = np.zeros(row.max() + 1, ENTRY)
        grown["key"][row] = keys
        grown["size"][row] = sizes
        grown["check"] = row_checks(grown)
        with path.open("ab") as file:
            file.truncate(HEADER.itemsize + index.nbytes)  # what a kill has left of a row
            file.write(grown[len(index) :].tobytes())
    return row


def rows_of(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the row in `index` of each key [N]; keys that it lacks get the rows after its end."""
    if np.array_equal(index["key"][: len(keys)], keys):  # the same list again: a million need no dictionary
        return np.arange(len(keys))
    rows = {key: row for row, key in enumerate(index["key"].tolist())}
    return np.array([rows.setdefault(key, len(rows)) for key in keys.tolist()])

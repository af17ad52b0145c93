"""The files of a feature cache. Each can be checked by itself, and each but the shards can be made again from the rest.

    shard-0001-00000128.safetensors  entries built together: `values` one after another, and columns about each
    commits.log                      a line per shard, appended when the shard is on disk; sorted when a build is done
    index.safetensors                the columns of all shards, one after another: what opening needs
    manifest.json                    what the entries depend on, what building took, checksums of index and log

The first number of a shard counts builds: of two entries of one item, the later one holds.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from speedkit import system
from speedkit.errors import SpeedkitError
from speedkit.files import atomic, read_json, write_json, write_text

LOG, INDEX, MANIFEST = "commits.log", "index.safetensors", "manifest.json"
# Of each entry. Counts are of elements, errors what keeping it in few bits costs at most.
COLUMNS = ("keys", "sizes", "modified_ns", "contents", "counts", "errors", "checksums")
MAP_FIXED = 0x10  # <sys/mman.h> of Linux and macOS: at this address, in place of what is there
ALIGNED = 4096  # bytes, a page: values that begin at one are copied a sixth faster than at any odd place
_held: set[int] = set()  # locks of this process: a child that it forks must not keep one alive after it
os.register_at_fork(after_in_child=lambda: any(map(os.close, _held)))


class Damaged(Exception):
    """A file of a cache is not what was written."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a shard says of itself."""

    name: str
    about: dict[str, Any]  # that of the cache
    bad: dict[str, str]  # name of an item without values -> why
    rows: dict[str, np.ndarray]  # the columns
    begin: int  # where values begin, bytes


@dataclasses.dataclass(frozen=True)
class State:
    """What a folder holds: columns by name, the shards (name, values' first byte, entries), and what is wrong."""

    manifest: dict[str, Any]
    shards: list[tuple[str, int, int]]
    column: Callable[[str], np.ndarray]
    problems: list[tuple[str, str]]

    @property
    def about(self) -> dict[str, Any]:
        """Workload, fingerprint, dtype and shape of the entries."""
        return self.manifest["about"]


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
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder for one builder; says so when another has it. A builder that dies lets go of it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process builds {folder}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def shard_files(folder: Path) -> list[Path]:
    """Return the shards in a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def checksum(values: Any, key: int) -> int:
    """Return the checksum of an entry's bytes. It depends on the item, so that exchanged entries are noticed."""
    return xxh3_64_intdigest(values, seed=key)


def _seal(metadata: str, tensors: Mapping[str, np.ndarray], values: Any) -> int:
    """Return the checksum of a shard but for its values, of which it takes shape and dtype only."""
    found = xxh3_64(f"{metadata} {values}".encode())
    for name in sorted(tensors.keys() - {"seal", "values"}):
        found.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        found.update(tensors[name].tobytes())
    return found.intdigest()


def write_shard(path: Path, tensors: dict[str, np.ndarray], told: dict[str, Any]) -> None:
    """Write a shard of `tensors` that tells `told` (about, bad), whole or not at all."""
    metadata = json.dumps({**told, "name": path.name}, sort_keys=True)
    values = tensors["values"]
    dtype = {"float32": "F32", "float16": "F16", "int16": "I16"}[str(values.dtype)]
    tensors["seal"] = np.array([_seal(metadata, tensors, f"{dtype} {len(values)}")], np.uint64)
    content = safetensors.numpy.save(tensors, {"speedkit": metadata})
    length = int.from_bytes(content[:8], "little")
    begin = 8 + length + json.loads(content[8 : 8 + length])["values"]["data_offsets"][0]
    spaces = b" " * (-begin % ALIGNED)  # the format lets a header end in spaces
    with atomic(path) as temporary, temporary.open("wb") as stream:
        stream.writelines([(length + len(spaces)).to_bytes(8, "little"), content[8 : 8 + length], spaces])
        stream.write(memoryview(content)[8 + length :])


def read_shard(path: Path) -> Shard:
    """Return what a shard says of itself; raises Damaged when that is not what was written."""
    try:
        with safetensors.safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name != "values"}  # noqa: SIM118
            metadata = file.metadata()["speedkit"]
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            values = json.loads(stream.read(length))["values"]
        seal = int(tensors.pop("seal")[0])
        told = json.loads(metadata)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, IndexError) as error:
        raise Damaged(f"it cannot be read ({error})") from error
    if seal != _seal(metadata, tensors, f"{values['dtype']} {values['shape'][0]}"):
        raise Damaged("its header or columns do not match their checksum")
    if told["name"] != path.name:
        raise Damaged(f"it is {told['name']} under another name")
    begin = 8 + length + values["data_offsets"][0]
    return Shard(path.name, told["about"], told["bad"], tensors, begin)


def values_of(path: str | Path, begin: int, dtype: np.dtype) -> np.ndarray:
    """Return the values of a shard, flat, mapped into memory; none where there is no such file, fewer if it is cut."""
    try:
        count = max(0, os.stat(path).st_size - begin) // dtype.itemsize
        return np.memmap(path, dtype, "r", begin, (count,)).view(np.ndarray)
    except (OSError, ValueError):
        return np.zeros(0, dtype)


def layout(
    shards: Sequence[tuple[str, int, int]], counts: Sequence[int], dtype: np.dtype
) -> tuple[list[int], list[int]]:
    """Return where the values of each shard begin in the array of `mapped`, and how long its file is, bytes."""
    sizes = [begin + count * dtype.itemsize for (_, begin, _), count in zip(shards, counts, strict=True)]
    pages = np.cumsum([0, *(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]).tolist()
    return [(page + begin) // dtype.itemsize for page, (_, begin, _) in zip(pages, shards, strict=False)], sizes


def mapped(files: Sequence[Path], sizes: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return the content of all files, mapped one behind another at whole pages, as one array.

    One array is read in one call however many files a batch comes from. Where a file is missing or cut short there are
    zeros, which match no checksum.
    """
    lengths = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = np.frombuffer(mmap.mmap(-1, sum(lengths) or 1, flags=flags, prot=mmap.PROT_READ), np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = room.ctypes.data
    for path, size, length in zip(files, sizes, lengths, strict=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            there = min(os.fstat(file.fileno()).st_size, size)
            fixed = mmap.MAP_PRIVATE | MAP_FIXED
            if there and library.mmap(address, there, mmap.PROT_READ, fixed, file.fileno(), 0) != address:
                raise SpeedkitError(f"{path} cannot be mapped into memory ({os.strerror(ctypes.get_errno())})")
        address += length
    return room[: len(room) // dtype.itemsize * dtype.itemsize].view(dtype)


def names_of(shard: Shard) -> list[str]:
    """Return the names of a shard's items."""
    return shard.rows["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")


def commit(folder: Path, entry: dict[str, Any]) -> None:
    """Append a line to the log, for a shard that is on disk, and sync the folder and the log."""
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)  # the shard's name; its content was synced before it got one
    os.close(directory)
    with (folder / LOG).open("ab") as stream:
        stream.write(_line(entry).encode())
        stream.flush()
        os.fsync(stream.fileno())


def _line(entry: dict[str, Any]) -> str:
    text = json.dumps(entry, sort_keys=True)
    return f"{xxh3_64_hexdigest(text.encode())} {text}\n"


def _logged(folder: Path) -> list[dict[str, Any]]:
    """Return what the log says, without the lines that do not match their checksums."""
    text = system.read(folder / LOG)
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    return [json.loads(entry) for check, entry in lines if check == xxh3_64_hexdigest(entry.encode())]


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with a checksum of its own."""
    text = json.dumps(manifest, sort_keys=True)
    write_json(folder / MANIFEST, {**json.loads(text), "checksum": xxh3_64_hexdigest(text.encode())})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest, None where it is missing or is not what was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        manifest = read_json(folder / MANIFEST)
        if manifest.pop("checksum") == xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode()):
            return manifest
    return None


def read(folder: Path, fingerprint: dict[str, str] | None = None) -> State | None:
    """Return what a folder holds, None where that is nothing, or nothing of this `fingerprint`.

    What does not match its checksum is named in `problems`, and its content is gathered from the shards.
    """
    manifest = read_manifest(folder)
    problems = [] if manifest else [(MANIFEST, "it is missing or does not match its checksum")]
    if manifest and fingerprint and manifest["about"]["fingerprint"] != fingerprint:
        return None
    if manifest and not manifest["pending"]:
        wrong = [name for name in (INDEX, LOG) if _file_checksum(folder / name) != manifest[name]]
        problems = [(name, "it is missing or does not match its checksum") for name in wrong]
        if INDEX not in wrong:
            file = safetensors.safe_open(folder / INDEX, "np")
            shards = [tuple(shard) for shard in json.loads(file.metadata()["speedkit"])]
            return State(manifest, shards, file.get_tensor, problems)
    if manifest and manifest["pending"]:
        problems.append((INDEX, "the build was not finished"))
    sealed, bad = _sealed(folder, manifest["about"]["fingerprint"] if manifest else fingerprint)
    if manifest is None and sealed:
        manifest = {"about": sealed[-1].about, "pending": None, "build_s": 0.0, "item_s": 0.0}
        for entry in _logged(folder):
            manifest |= entry if "build_s" in entry else {}
    if manifest is None:
        return None
    columns = _columns(sealed)
    return State(manifest, _table(sealed), columns.__getitem__, problems + bad)


def _columns(shards: list[Shard]) -> dict[str, np.ndarray]:
    empty = [np.zeros(0, np.int64)] * (not shards)
    return {name: np.concatenate([shard.rows[name] for shard in shards] or empty) for name in COLUMNS}


def _table(shards: list[Shard]) -> list[tuple[str, int, int]]:
    return [(shard.name, shard.begin, len(shard.rows["keys"])) for shard in shards]


def _sealed(folder: Path, fingerprint: dict[str, str] | None) -> tuple[list[Shard], list[tuple[str, str]]]:
    """Return the shards of one fingerprint (the newest if none is given), and (name, why) of those not as written."""
    shards, bad = [], []
    for path in shard_files(folder):
        try:
            shards.append(read_shard(path))
        except Damaged as error:
            bad.append((path.name, str(error)))
    fingerprint = fingerprint or (shards[-1].about["fingerprint"] if shards else None)
    return [shard for shard in shards if shard.about["fingerprint"] == fingerprint], bad


def latest(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the last row of `keys` [N] that holds each of `wanted` [M], -1 where none does: [M] int64."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order, turn = np.argsort(keys, kind="stable"), np.argsort(wanted)  # both in order: many times as fast
    place = np.searchsorted(keys[order], wanted[turn], side="right") - 1
    at = np.empty(len(wanted), np.int64)
    at[turn] = order[np.maximum(place, 0)]
    return np.where(keys[at] == wanted, at, -1)


def settle(folder: Path, manifest: dict[str, Any]) -> None:
    """Write index, log and manifest anew from the shards, and remove those that hold nothing that is in force."""
    shards, _ = _sealed(folder, manifest["about"]["fingerprint"])
    keys = _columns(shards)["keys"]
    owner = np.repeat(np.arange(len(shards)), [len(shard.rows["keys"]) for shard in shards])
    in_force = set(owner[latest(keys, keys)].tolist())
    shards = [shard for number, shard in enumerate(shards) if number in in_force]
    table, columns = _table(shards), _columns(shards)
    manifest = manifest | {"pending": None, "max_error": float(columns["errors"].max(initial=0))}
    manifest["unusable"] = sum(len(shard.bad) for shard in shards)
    with writing(folder):
        for path in {*shard_files(folder)} - {folder / shard.name for shard in shards}:
            path.unlink()
        timings = {key: manifest[key] for key in ("build_s", "item_s")}
        write_text(folder / LOG, "".join(map(_line, [*({"shard": name} for name, *_ in table), timings])))
        with atomic(folder / INDEX) as temporary:
            temporary.write_bytes(safetensors.numpy.save(columns, {"speedkit": json.dumps(table)}))
        write_manifest(folder, manifest | {name: _file_checksum(folder / name) for name in (INDEX, LOG)})


def _file_checksum(path: Path) -> str:
    found = xxh3_64()
    with contextlib.suppress(OSError), path.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()

"""The files of a feature cache, each of which can be checked by itself.

    shard-0001-00000128.safetensors  columns about entries built together, and their values one after another
    commits.log                      a line for the manifest, and one per shard, appended when the shard is on disk
    index.safetensors                the columns of all shards: what opening needs
    manifest.json                    what the entries depend on, what building took, the checksum of the log

Index and manifest are written when a build is done, and can be made again from shards and log. The first number of a
shard counts builds: of two entries of one item, the later one holds.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from speedkit import system
from speedkit.errors import SpeedkitError
from speedkit.files import atomic, read_json, write_json, write_text

LOG, INDEX, MANIFEST = "commits.log", "index.safetensors", "manifest.json"
# Of each entry. Counts are of elements, errors what keeping it in few bits costs at most.
COLUMNS = ("keys", "sizes", "modified_ns", "contents", "counts", "checksums", "errors")
HUGE_PAGE = 1 << 21  # bytes: files mapped at whole ones can be looked up in the processor's larger steps
MAP_FIXED = 0x10  # <sys/mman.h> of Linux and macOS: at this address, in place of what is there
ALIGNED = 4096  # bytes, a page: values that begin at one are copied a sixth faster than at any odd place
_held: set[int] = set()  # locks of this process: a child that it forks must not keep one alive after it
os.register_at_fork(after_in_child=lambda: any(map(os.close, _held)))


class Damaged(Exception):
    """A file of a cache is not what was written."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a shard, or the index, says of itself."""

    name: str
    told: dict[str, Any]  # of a shard: `about` its cache, and `bad`, name of an item without values -> why
    rows: dict[str, np.ndarray]  # the columns
    begin: int  # where values begin, bytes

    @property
    def names(self) -> list[str]:
        """The names of its items."""
        return self.rows["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")


@dataclasses.dataclass(frozen=True)
class State:
    """What a folder holds: columns by name, the shards (name, values' first byte, entries), and what is wrong."""

    manifest: dict[str, Any]
    shards: list[tuple[str, int, int]]
    column: Callable[[str], np.ndarray]
    bad: dict[str, str]  # name of an item without values -> why
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


def checksums(values: np.ndarray, starts: np.ndarray, counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the checksums of the entries that begin at `starts` in `values`: [B] uint64.

    They depend on the items' keys too, so that exchanged entries are noticed.
    """
    content, size = values.reshape(-1).view(np.uint8).data, values.itemsize
    entries = zip((starts * size).tolist(), (counts * size).tolist(), keys.tolist(), strict=True)
    found = [xxh3_64_intdigest(content[start : start + length], seed=key) for start, length, key in entries]
    return np.array(found, np.uint64)


def write_shard(path: Path, columns: dict[str, np.ndarray], values: np.ndarray, told: dict[str, Any]) -> None:
    """Write a safetensors file of columns, a seal (the checksum of all before it) and values, whole or not at all."""
    header: dict[str, Any] = {"__metadata__": {"speedkit": json.dumps({**told, "name": path.name}, sort_keys=True)}}
    end = 0
    for name, tensor in {**columns, "seal": np.zeros(1, np.uint64), "values": values}.items():
        begin, end = end, end + tensor.nbytes
        dtype = f"{tensor.dtype.kind.upper()}{8 * tensor.itemsize}"
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text) + end - values.nbytes) % ALIGNED)  # the format lets a header end in spaces
    head = b"".join([len(text).to_bytes(8, "little"), text, *(column.tobytes() for column in columns.values())])
    with atomic(path) as temporary, temporary.open("wb") as stream:
        stream.writelines([head, xxh3_64_intdigest(head).to_bytes(8, "little"), values.data])


def read_shard(path: Path) -> Shard:
    """Return what a shard says of itself; raises Damaged when that is not what was written."""
    try:
        with path.open("rb") as stream:
            size, length = os.fstat(stream.fileno()).st_size, int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size)))
            begin = 8 + length + header.pop("values")["data_offsets"][0]
            stream.seek(0)
            head = stream.read(min(begin, size))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise Damaged(f"it cannot be read ({error})") from error
    if head[-8:] != xxh3_64_intdigest(memoryview(head)[:-8]).to_bytes(8, "little"):
        raise Damaged("its header or columns do not match their checksum")
    told = json.loads(header.pop("__metadata__")["speedkit"])
    if told["name"] != path.name:
        raise Damaged(f"it is {told['name']} under another name")
    rows = {}
    for name, about in header.items():
        dtype = f"{about['dtype'][0].lower()}{int(about['dtype'][1:]) // 8}"
        rows[name] = np.frombuffer(head, dtype, about["shape"][0], 8 + length + about["data_offsets"][0])
    return Shard(path.name, told, rows, begin)


def layout(state: State) -> tuple[np.ndarray, list[int]]:
    """Return where the entries begin in the array of `mapped`, [N] elements, and the length of each shard, bytes."""
    counts, size = state.column("counts"), np.dtype(state.about["dtype"]).itemsize
    starts, lengths, page = [np.zeros(0, np.int64)], [], 0
    for (_, begin, _), part in zip(state.shards, by_shard(state, counts), strict=True):
        starts.append((page + begin) // size + np.cumsum(part) - part)
        lengths.append(begin + int(part.sum()) * size)
        page += _whole_pages(lengths[-1])
    return np.concatenate(starts), lengths


def by_shard(state: State, column: np.ndarray) -> list[np.ndarray]:
    """Return the parts of a column [N] that belong to each of the shards."""
    return np.split(column, np.cumsum([entries for *_, entries in state.shards]))[:-1]


def mapped(files: Sequence[Path], lengths: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return the content of all files, mapped one behind another at whole pages, as one array.

    One array is read in one call however many files a batch comes from. Where a file is missing or cut short there are
    zeros, which match no checksum.
    """
    pages = [_whole_pages(length) for length in lengths]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = np.frombuffer(mmap.mmap(-1, sum(pages) + HUGE_PAGE, flags=flags, prot=mmap.PROT_READ), np.uint8)
    room = room[-room.ctypes.data % HUGE_PAGE :][: sum(pages) or HUGE_PAGE]
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = room.ctypes.data
    for path, length, taken in zip(files, lengths, pages, strict=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            there = min(os.fstat(file.fileno()).st_size, length)
            fixed = mmap.MAP_PRIVATE | MAP_FIXED
            if there and library.mmap(address, there, mmap.PROT_READ, fixed, file.fileno(), 0) != address:
                raise SpeedkitError(f"{path} cannot be mapped into memory ({os.strerror(ctypes.get_errno())})")
        address += taken
    return room.view(dtype)


def _whole_pages(length: int) -> int:
    return -(-length // HUGE_PAGE) * HUGE_PAGE


def commit(folder: Path, entry: dict[str, Any]) -> None:
    """Append a line to the log, for a shard that is on disk or a build that begins, and sync the folder and the log."""
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


def _logged(log: str) -> dict[str, Any] | None:
    """Return the last manifest in a log, None where no line that has one matches its checksum."""
    lines = [line.partition(" ")[::2] for line in log.splitlines()]
    entries = [json.loads(entry) for check, entry in lines if check == xxh3_64_hexdigest(entry.encode())]
    return next((entry for entry in reversed(entries) if "about" in entry), None)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of the manifest's file, None where it is missing or is not what was written."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        manifest = read_json(folder / MANIFEST)
        if manifest.pop("checksum") == xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode()):
            return manifest
    return None


def read(folder: Path) -> State | None:
    """Return what a folder holds, None where that is nothing.

    What does not match its checksum is named in `problems`, and its content is gathered from the shards.
    """
    log, written, problems = system.read(folder / LOG), _manifest(folder), []
    check = xxh3_64_hexdigest(log.encode())
    for name, found in ((MANIFEST, written), (LOG, written is None or written.pop("log", "") == check)):
        if not found:
            problems.append((name, "it is missing, unfinished, or does not match its checksum"))
    manifest = _logged(log) or written
    try:
        index = read_shard(folder / INDEX)
        if manifest and not problems:
            return State(manifest, index.told["shards"], index.rows.__getitem__, index.told["bad"], [])
    except Damaged as error:
        problems.append((INDEX, str(error)))
    shards, damaged = sealed(folder, manifest and manifest["about"]["fingerprint"])
    if manifest is None and shards:
        manifest = {"about": shards[-1].told["about"], "pending": None, "build_s": 0.0, "item_s": 0.0}
    return _state(manifest, shards, problems + damaged) if manifest else None


def _state(manifest: dict[str, Any], shards: list[Shard], problems: list[tuple[str, str]]) -> State:
    empty = [np.zeros(0, np.int64)] * (not shards)
    columns = {name: np.concatenate([shard.rows[name] for shard in shards] or empty) for name in COLUMNS}
    table = [(shard.name, shard.begin, len(shard.rows["keys"])) for shard in shards]
    bad = {name: why for shard in shards for name, why in shard.told["bad"].items()}
    return State(manifest, table, columns.__getitem__, bad, problems)


def sealed(folder: Path, fingerprint: dict[str, str] | None) -> tuple[list[Shard], list[tuple[str, str]]]:
    """Return the shards of one fingerprint (the newest if none is given), and (name, why) of those not as written."""
    shards, bad = [], []
    for path in shard_files(folder):
        try:
            shards.append(read_shard(path))
        except Damaged as error:
            bad.append((path.name, str(error)))
    fingerprint = fingerprint or (shards[-1].told["about"]["fingerprint"] if shards else None)
    return [shard for shard in shards if shard.told["about"]["fingerprint"] == fingerprint], bad


def latest(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the last row of `keys` [N] that holds each of `wanted` [M], -1 where none does: [M] int64."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order, turn = np.argsort(keys, kind="stable"), np.argsort(wanted)  # both in order: many times as fast
    place = np.searchsorted(keys[order], wanted[turn], side="right") - 1
    at = np.empty(len(wanted), np.int64)
    at[turn] = order[np.maximum(place, 0)]
    return np.where(keys[at] == wanted, at, -1)


def current(state: State, sources: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a list's items (-1: none), and whether their files are what they were then: [M] each."""
    rows = latest(state.column("keys"), sources["keys"])
    same = rows >= 0
    for name in ("sizes", "modified_ns") if same.any() else ():
        same &= state.column(name)[rows] == sources[name]
    return rows, same


def settle(folder: Path, manifest: dict[str, Any]) -> None:
    """Write log, index and manifest anew from the shards, and remove those that hold nothing that is in force."""
    shards, _ = sealed(folder, manifest["about"]["fingerprint"])
    keys = np.concatenate([np.zeros(0, np.uint64), *(shard.rows["keys"] for shard in shards)])
    owner = np.repeat(np.arange(len(shards)), [len(shard.rows["keys"]) for shard in shards])
    state = _state(manifest, [shards[number] for number in np.unique(owner[latest(keys, keys)])], [])
    columns = {name: state.column(name) for name in COLUMNS}
    manifest = manifest | {"pending": None, "unusable": len(state.bad)}
    manifest["max_error"] = float(columns["errors"].max(initial=0))
    log = "".join(map(_line, [manifest, *({"shard": name} for name, *_ in state.shards)]))
    check = xxh3_64_hexdigest(log.encode())
    text = json.dumps(manifest | {"log": check}, sort_keys=True)
    with writing(folder):
        for path in {*shard_files(folder)} - {folder / name for name, *_ in state.shards}:
            path.unlink()
        write_text(folder / LOG, log)
        write_shard(folder / INDEX, columns, np.zeros(0, np.uint8), {"shards": state.shards, "bad": state.bad})
        write_json(folder / MANIFEST, {**json.loads(text), "checksum": xxh3_64_hexdigest(text.encode())})

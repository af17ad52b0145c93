"""Tar shards: a few large files instead of thousands of small ones, written and streamed by webdataset, read at random.

A shard saves finding and opening a file per clip. That is much where opening is a round trip (network file systems,
object stores) or a seek (cold disks) and clips are small; on a warm local disk it is next to nothing beside decoding,
and the price is a second copy of the data. Notebook 13 measures both. Nothing is ever extracted to disk.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import math
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.utils.data import DataLoader

from speedkit.errors import PlanError, SpeedkitError
from speedkit.files import atomic, read_json, write_json
from speedkit.system import usable_cores

SHARD_BYTES = 128 * 2**20  # a kill loses no more per process; opening one is nothing beside reading it
Status = tuple[int, int]  # size and mtime_ns of a file: another pair means that it was written anew
Shard = tuple[Path, list[tuple], str]  # the tar; (index of the item, path, label, status) of what it holds; their hash


@dataclasses.dataclass(frozen=True, slots=True)
class TarMember:
    """A file inside a tar, in place of a path. Where a real path is wanted it is the tar's."""

    tar: str
    offset: int
    size: int
    name: str
    status: Status  # of the tar

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"

    def __fspath__(self) -> str:
        return self.tar

    def read(self) -> bytes:
        """Return its bytes, by one `pread`. Raises OSError when the tar is gone, cut short, or not the one indexed."""
        file = _opened(self.tar, self.status)
        if _status(file.fileno()) != self.status:
            raise OSError("the tar was written anew after it was indexed")
        data = os.pread(file.fileno(), self.size, self.offset)
        if len(data) != self.size:
            raise OSError(f"only {len(data)} of {self.size} bytes are there")
        return data


@functools.lru_cache(maxsize=256)  # once per process: an open may be a round trip, and reads leave no position behind
def _opened(tar: str, status: Status) -> BinaryIO:
    return open(tar, "rb", buffering=0)


def _status(path: str | Path | int) -> Status:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def members(tar: str | Path) -> list[TarMember]:
    """Return the files in an uncompressed tar, whoever wrote it, for reading at random.

    Raises SpeedkitError for a tar that cannot be read, and for one with absolute paths, `..`, links, devices or the
    same name twice, which no data set needs and which do harm when somebody extracts it.
    """
    found: dict[str, TarMember] = {}
    try:
        status = _status(tar)
        with tarfile.open(tar, "r:") as file:
            for info in file:
                leaves = info.name.startswith("/") or ".." in PurePosixPath(info.name).parts
                if leaves or info.name in found or not (info.isdir() or info.isreg()) or info.issparse():
                    what = "leaves its folder" if leaves else "is a link, a device, sparse, or there twice"
                    raise SpeedkitError(f"{tar} is refused: {info.name!r} in it {what}. Write it anew without that")
                if info.isreg():
                    found[info.name] = TarMember(str(tar), info.offset_data, info.size, info.name, status)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise SpeedkitError(f"{tar} cannot be read as an uncompressed tar ({error}): write it anew") from error
    return list(found.values())


def stream(tars: Sequence[str | Path], shuffle: int = 0, seed: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield (encoded bytes, label) of every clip in `tars`, read from front to back by webdataset.

    A clip is two members, `key.wav` (or another ending) and `key.cls`, its class as a number. With `shuffle` so many
    clips are held in memory and drawn from: an approximate shuffle. Raises SpeedkitError for a tar with anything else.
    """
    import webdataset

    for tar in tars:
        members(tar)  # refuses what is unsafe before the first clip is used
    dataset = webdataset.WebDataset([str(tar) for tar in tars], shardshuffle=False)
    for sample in dataset.shuffle(shuffle, seed=seed) if shuffle else dataset:
        data = [value for key, value in sample.items() if not key.startswith("__") and key != "cls"]
        label = sample.get("cls", b"").strip()
        if len(data) != 1 or not label.isdigit():
            raise SpeedkitError(f"clip {sample['__key__']} of {sample['__url__']} is not one file and a number in .cls")
        yield data[0], int(label)


def pack(workload: Any, items: Sequence[Any], folder: str | Path, shard_bytes: int = SHARD_BYTES) -> list[Any]:
    """Return `items` in the same order, the `path` of each a TarMember that holds the bytes of its file.

    The shards lie in a subfolder of `folder`. Those that are there, whole and of the same files as they are now, are
    used again; the others are written, by a process per core. A file that is missing stays a path, for loading to
    report. Raises PlanError when the workload cannot read from tars, SpeedkitError when they cannot be written.
    """
    name = f"{workload.name}-{_hash([str(getattr(item, 'path', '')) for item in items])[:16]}"
    shards = _split(workload, items, Path(folder) / name, shard_bytes)
    if not all(map(_whole, shards)):
        _write_all(shards)
    packed = list(items)
    for tar, sources, _ in shards:
        status, rows = _status(tar), read_json(tar.with_suffix(".json"))["members"]
        for (index, *_), (offset, size, name) in zip(sources, rows, strict=True):
            packed[index] = dataclasses.replace(items[index], path=TarMember(str(tar), offset, size, name, status))
    if not shards or not _alike(workload.load, items, packed, first=shards[0][1][0][0]):
        raise PlanError(
            f"shards=True needs items that are files, and a `load` that takes a {__name__}.TarMember as their path; "
            f"workload {workload.name} has not both: use shards=False"
        )
    return packed


def _alike(load: Callable[[Any], torch.Tensor], items: Sequence[Any], packed: Sequence[Any], first: int) -> bool:
    try:
        return torch.equal(load(items[first]), load(packed[first]))
    except SpeedkitError:  # unreadable either way: training says so, of each clip
        return True
    except Exception:  # whatever a `load` of somebody's own does with what is no path
        return False


def _split(workload: Any, items: Sequence[Any], folder: Path, shard_bytes: int) -> list[Shard]:
    """Return what each shard is to hold: a number of items in a row that makes about `shard_bytes`."""
    sources = []
    for index, item in enumerate(items):
        if os.path.isfile(path := getattr(item, "path", "")):
            sources.append((index, str(path), workload.target(item), _status(path)))
    total = sum(status[0] for *_, status in sources)
    # A power of two: it stays what it is when a file changes a little, and so do the other shards.
    each = 2 ** max(0, round(math.log2(shard_bytes * len(sources) / total))) if total else 1
    parts = [sources[start : start + each] for start in range(0, len(sources), each)]
    return [(folder / f"shard-{number:05d}.tar", part, _hash(part)) for number, part in enumerate(parts)]


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _whole(shard: Shard) -> bool:
    """Whether a shard is there, complete, and made of its files as they are now."""
    try:
        index = read_json(shard[0].with_suffix(".json"))
        return (index["sources"], index["bytes"]) == (shard[2], _status(shard[0])[0])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_all(shards: Sequence[Shard]) -> None:
    """Write the shards that are not whole; one process at a time does so in a folder, the next finds them there."""
    folder = shards[0][0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock, contextlib.ExitStack() as at_end:
            fcntl.flock(lock, fcntl.LOCK_EX)
            at_end.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # of the processes started meanwhile too, which share it
            for left in folder.glob(".*.tmp"):  # by a process that was killed
                left.unlink()
            missing = [shard for shard in shards if not _whole(shard)]
            workers = min(usable_cores(), len(missing)) if len(missing) > 1 else 0
            # A DataLoader ends its processes with this one. Without a generator it would draw from the global one.
            settings = {"num_workers": workers, "collate_fn": _write, "generator": torch.Generator()}
            collections.deque(DataLoader(missing, batch_size=None, **settings), maxlen=0)  # type: ignore[arg-type]
    except (OSError, RuntimeError) as error:  # RuntimeError: one of the processes was killed
        why = str(error).strip().splitlines()[-1]  # from a process comes its traceback
        raise SpeedkitError(
            f"shards cannot be written to {folder} ({why}): free space there or name another folder with --cache-dir, "
            "finished ones are used again"
        ) from error


def _write(shard: Shard) -> None:
    """Write a tar and the index beside it, each whole or not at all."""
    from webdataset import TarWriter

    tar, sources, digest = shard
    tar.with_suffix(".json").unlink(missing_ok=True)  # until the new tar has one
    neutral = {"mtime": 0, "user": "", "group": ""}  # nothing of this run goes in: the same files give the same bytes
    with atomic(tar) as new, new.open("wb") as file, TarWriter(file, encoder=False, **neutral) as writer:
        for index, name, label, _ in sources:
            path = Path(name)
            stem = re.sub(r"[^A-Za-z0-9-]+", "_", path.stem)[:60]  # for the eye: the number makes the key unique
            ending = path.suffix[1:].lower() or "bin"
            writer.write({"__key__": f"{index:08d}_{stem}", ending: path.read_bytes(), "cls": b"%d" % label})
    rows = [(at.offset, at.size, at.name) for at in members(tar) if not at.name.endswith(".cls")]
    write_json(tar.with_suffix(".json"), {"sources": digest, "bytes": _status(tar)[0], "members": rows})

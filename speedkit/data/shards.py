"""Tar shards: a few large files instead of thousands of small ones, written by webdataset and read at random.

A shard saves finding and opening a file per clip: much on network file systems, next to nothing on a warm local disk,
and the price is a second copy of the data. Notebook 13 measures both. Nothing is ever extracted to disk.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import posixpath
import re
import shutil
import tarfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock

from speedkit.errors import PlanError, UsageError
from speedkit.files import read_json, write_json

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

SHARD_BYTES = 128 * 2**20  # opening one is nothing beside reading it


@dataclasses.dataclass(frozen=True, slots=True)
class TarMember:
    """A file inside a tar, in place of a path: what takes paths alone refuses it, and does not read the tar."""

    tar: str
    offset: int
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.tar}/{self.name}"

    def read(self) -> bytes:
        """Return its bytes, by one `pread`. Raises OSError when the tar is gone or cut short."""
        data = os.pread(opened(self.tar).fileno(), self.size, self.offset)
        if len(data) != self.size:
            raise OSError(f"only {len(data)} of {self.size} bytes are there")
        return data

    def open(self) -> BinaryIO:
        """Return it as a file, for what reads some of it, such as a header: by one reader at a time."""
        info = tarfile.TarInfo(self.name)
        info.offset_data, info.size = self.offset, self.size
        return tarfile.ExFileObject(types.SimpleNamespace(fileobj=opened(self.tar)), info)  # type: ignore


@functools.lru_cache(maxsize=256)
def opened(tar: str) -> BinaryIO:
    """Return the open tar, once per process: an open may be a round trip, and `pread` leaves no position behind."""
    return open(tar, "rb", buffering=0)


def members(tar: str | Path) -> list[TarMember]:
    """Return the files in an uncompressed tar, whoever wrote it. Raises UsageError for what is no such tar."""
    try:
        with tarfile.open(tar, "r:") as file:
            return [TarMember(str(tar), info.offset_data, info.size, info.name) for info in file if info.isreg()]
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"{tar} cannot be read ({error}): name a tar that is there, and not compressed") from error


def members_by_path(pattern: Path) -> dict[Path, TarMember]:
    """Return the files in one tar, `*.tar` or `clips-{0000..0009}.tar` by the paths they would have in folders instead.

    A name that would lead out of its tar does not. Hidden files are left out. Raises UsageError for an unreadable tar.
    """
    from webdataset.shardlists import expand_urls

    tars = [tar for name in expand_urls(str(pattern)) for tar in sorted(glob.glob(name)) or [name]]
    paths = {Path(tar, posixpath.normpath(f"/./{file.name}")[1:]): file for tar in tars for file in members(tar)}
    return {path: file for path, file in paths.items() if "/." not in str(path).removeprefix(file.tar)}


def pack(workload: "Workload", items: Sequence[Any], folder: str | Path) -> list[Any]:
    """Return `items` in the same order, the `path` of each a TarMember that holds the bytes of its file.

    The shards lie in a subfolder of `folder` that is complete or absent; its name follows from all files, their sizes
    and times of change. `load` has to take a TarMember. Raises PlanError for an item that is no file.
    """
    files = [(str(getattr(item, "path", item)), int(workload.target(item))) for item in items]
    if absent := [path for path, _ in files if not os.path.isfile(path)]:
        raise PlanError(f"shards=True packs files, and there is no file {absent[0]}: use shards=False")
    states = [(os.stat(path).st_size, os.stat(path).st_mtime_ns) for path, _ in files]
    digest = hashlib.sha256(repr((files, states, SHARD_BYTES)).encode()).hexdigest()[:16]
    shards = Path(folder) / f"{workload.name}-{digest}"
    shards.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{shards}.lock"):  # of two runs that start together one writes
        if not shards.exists():
            write_shards(files, shards)
    rows = read_json(shards / "index.json")
    stored = [TarMember(str(shards / tar), offset, size, name) for tar, offset, size, name in rows]
    return [dataclasses.replace(item, path=member) for item, member in zip(items, stored, strict=True)]


def write_shards(files: Sequence[tuple[str, int]], shards: Path) -> None:
    """Write files, (path, label), to tars, and index.json: (tar, offset, size, name) of each."""
    from webdataset import ShardWriter

    temporary = shards.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    temporary.mkdir()
    pattern = str(temporary).replace("%", "%%") + "/shard-%08d.tar"
    same = {"mtime": 0, "user": "", "group": "", "encoder": False}  # the same files give the same bytes
    with ShardWriter(pattern, maxsize=SHARD_BYTES, verbose=0, **same) as writer:
        for number, (path, label) in enumerate(files):
            stem = re.sub("[^A-Za-z0-9-]+", "_", Path(path).stem)[:60]  # the number makes it unique
            data = {Path(path).suffix[1:].lower() or "bin": Path(path).read_bytes(), "cls": b"%d" % label}
            writer.write({"__key__": f"{number:08d}_{stem}", **data})
    stored = [member for tar in sorted(temporary.glob("*.tar")) for member in members(tar)]
    rows = [(Path(member.tar).name, member.offset, member.size, member.name) for member in stored]
    write_json(temporary / "index.json", [row for row in rows if not row[3].endswith(".cls")])
    temporary.rename(shards)

"""Files in tars, listed without extracting anything to disk."""

import dataclasses
import functools
import glob
import os
import posixpath
import stat
import tarfile
import types
from pathlib import Path
from typing import BinaryIO

from speedkit.errors import UsageError


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
        """Return its bytes. Raises OSError when the tar is gone or cut short."""
        file = opened(self.tar)
        if hasattr(os, "pread"):  # by any number of threads
            data = os.pread(file.fileno(), self.size, self.offset)
        else:  # on Windows
            file.seek(self.offset)
            data = file.read(self.size)
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


def members_by_path(pattern: Path) -> dict[Path, TarMember]:
    """Return the files in one tar, `*.tar` or `clips-{0000..0009}.tar` by the paths they would have in folders instead.

    A name that would lead out of its tar does not. Hidden files are left out. Raises UsageError for what is no
    uncompressed tar.
    """
    from webdataset.shardlists import expand_urls

    files = {}
    for tar in [tar for name in expand_urls(str(pattern)) for tar in sorted(glob.glob(name)) or [name]]:
        try:
            check_is_file(tar)
            with tarfile.open(tar, "r:") as archive:
                members = archive.getmembers()
        except Exception as error:  # of many kinds: tarfile believes any size and depth that a header claims
            why = str(error) or type(error).__name__
            raise UsageError(f"{tar} cannot be read ({why}): name a tar that is there, and not compressed") from error
        for info in members:
            path = posixpath.normpath(f"/./{info.name}")
            if info.isreg() and "/." not in path:
                files[Path(tar, path[1:])] = TarMember(tar, info.offset_data, info.size, info.name)
    return files


def check_is_file(path: str | Path) -> None:
    """Raise OSError for what is missing or is no file: to read a FIFO would take without end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a file")

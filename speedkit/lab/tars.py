"""Files in tars, listed without extracting anything to disk."""

import glob
import os
import posixpath
import stat
import tarfile
from pathlib import Path

from speedkit.data.decode import TarMember
from speedkit.errors import UsageError


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

"""Files in tars, listed without extracting anything to disk."""

import glob
import posixpath
import tarfile
from pathlib import Path

from speedkit.data.decode import TarMember
from speedkit.errors import UsageError


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

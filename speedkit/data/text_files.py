"""Where the text is: any text files under a folder, or the source of Python's own standard library."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from speedkit.data.sources import existing_folder, lot, matching
from speedkit.errors import UsageError

TEST_SHARE = 0.1  # of the files
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib"}  # of the library: not there everywhere
Quarantined = tuple[tuple[str, str], ...]


def find_text(data_dir: str | Path | None, test_pattern: str | None, seed: int) -> tuple[bytes, bytes, Quarantined]:
    """Return the text to train on, that to test on, and (path, why) of the files that are no text.

    The test files are those whose name `test_pattern` finds, else a tenth of them by a hash of `seed` and name; of a
    single file, its last tenth. Raises UsageError for a folder or a pattern that leaves nothing on one side.
    """
    root = existing_folder(data_dir or sysconfig.get_path("stdlib"), "text files")
    files, bad = dict[str, bytes](), []
    for path in _paths(root, library=data_dir is None):
        try:
            content = path.read_bytes()
            why = "zero bytes: it is no text" if b"\0" in content[:8192] else ""  # as git tells binary files
        except OSError as error:
            why = f"it cannot be read ({error.strerror})"
        if why:
            bad.append((str(path), why))
        else:
            files[path.relative_to(root).as_posix()] = content
    if not files:
        raise UsageError(f"data folder {root} holds no text files: name another --data-dir")
    if len(files) == 1 and test_pattern is None:
        (content,) = files.values()
        at = round((1 - TEST_SHARE) * len(content))
        return content[:at], content[at:], tuple(bad)
    test = _test_set(list(files), test_pattern, seed)
    train, tested = (b"\n".join(files[name] for name in files if (name in test) == side) for side in (False, True))
    return train, tested, tuple(bad)


def _paths(root: Path, library: bool) -> Iterator[Path]:
    """Yield the files that may be text, in the order of their names; nothing hidden, and of the `library` its own."""
    for folder, folders, names in os.walk(root):
        left_out = LEFT_OUT if library else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        for name in sorted(names):
            if not name.startswith(".") and (name.endswith(".py") or not library):
                yield Path(folder, name)


def _test_set(names: list[str], test_pattern: str | None, seed: int) -> set[str]:
    if test_pattern is not None:
        return matching({name: name.rpartition("/")[2] for name in names}, test_pattern)
    return set(sorted(names, key=lambda name: lot(seed, name))[: max(1, round(TEST_SHARE * len(names)))])

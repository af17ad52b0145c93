"""Generated data on disk: its files are made once, in parallel, each whole or absent."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from speedkit.errors import UsageError
from speedkit.files import atomic
from speedkit.system import usable_cores


def complete(folder: Path, paths: Sequence[Path], write: Callable[[int, Path], None], what: str) -> Path:
    """Return `folder` once all its `paths` exist; `write(index, temporary path)` makes each that is missing.

    What an interrupted call left is completed. Raises UsageError, naming `what`, where nothing can be written.
    """

    def make(index: int) -> None:
        with atomic(paths[index]) as temporary:
            write(index, temporary)

    try:
        for parent in {path.parent for path in paths}:
            parent.mkdir(parents=True, exist_ok=True)
        missing = [index for index, path in enumerate(paths) if not path.exists()]
        # numpy and the encoders work outside Python's lock. An interruption cancels what `map` has not begun.
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(make, missing))
    except (OSError, RuntimeError) as error:  # libsndfile's errors are of the second kind
        failed = f"{what} cannot be written to {folder} ({error})"
        raise UsageError(f"{failed}: free some space, or set SPEEDKIT_CACHE_DIR to another folder") from error
    return folder

"""Generated data on disk, for who names none: its files are made once, in parallel, each whole or absent."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from speedkit.data.sources import Split, find_items
from speedkit.errors import UsageError
from speedkit.files import atomic
from speedkit.hardware import usable_cores

TEST_PATTERN = r"_test\."  # in the name of each file of a generated set that is to test on


def find_or_generate(
    data_dir: str | Path | None,
    generate: Callable[..., Path],
    clips: int | None,
    default: int,
    fewest: int,
    labels: str | Path | None = None,
    label_pattern: str | None = None,
    test_pattern: str | None = None,
    seed: int = 0,
    kind: str = "audio",
    labelled: bool = True,
) -> Split:
    """Return what `find_items` finds under `data_dir`, or, without one, in a set of `clips` that `generate` makes.

    Raises UsageError also where an option belongs to the other of the two, and for under `fewest` clips.
    """
    settings: dict[str, Any] = {"kind": kind, "labelled": labelled}
    if data_dir is not None or labels is not None:
        if clips is not None:
            raise UsageError(f"clips counts generated {kind} files: leave it out when you give your own data")
        folder = data_dir if data_dir is not None else Path(str(labels)).parent
        settings |= {"labels": labels, "label_pattern": label_pattern, "test_pattern": test_pattern, "seed": seed}
        return find_items(folder, **settings)
    if label_pattern or test_pattern:
        raise UsageError(f"a pattern needs {kind} files to look at: name their folder with --data-dir")
    if clips is not None and clips < fewest:
        raise UsageError(f"clips={clips} is too few: it takes {fewest} to train and to test on")
    return find_items(generate(clips=clips or default, seed=seed), test_pattern=TEST_PATTERN, **settings)


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

"""Whose data: the user's files, or a generated set whose files are written once, in parallel, each whole or absent."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from speedkit.data.sources import Split, find_items
from speedkit.errors import UsageError
from speedkit.files import atomic
from speedkit.hardware import cache_root, usable_cores

TEST_PATTERN = r"_test\."  # in the file names of a generated test set


class DataOptions(TypedDict, total=False):
    """What the audio, the image and the speech workload take to find their data, beside its folder."""

    labels: str | Path | None
    label_pattern: str | None
    test_pattern: str | None
    clips: int | None  # how many files to generate, where no data is named


def find_or_generate(
    data_dir: str | Path | None,
    generate: Callable[..., Path],
    *,
    kind: str = "audio",
    labelled: bool = True,
    labels: str | Path | None = None,
    label_pattern: str | None = None,
    test_pattern: str | None = None,
    clips: int | None = None,
) -> Split:
    """Return what `find_items` finds under `data_dir`, or without one among the files that `generate` writes.

    Raises UsageError also for an option that would have no effect.
    """
    find = functools.partial(find_items, kind=kind, labelled=labelled)
    if data_dir is None and labels is None:
        if label_pattern or test_pattern:
            raise UsageError(f"a pattern needs {kind} files to look at: name their folder with --data-dir")
        return find(generate() if clips is None else generate(clips), test_pattern=TEST_PATTERN)
    if clips is not None:
        raise UsageError(f"clips counts generated {kind} files: leave it out when you give your own data")
    folder = data_dir or Path(str(labels)).parent
    return find(folder, labels=labels, label_pattern=label_pattern, test_pattern=test_pattern)


def in_classes(index: int, classes: Sequence[str], formats: Sequence[str]) -> str:
    """Return the path of file `index` in a set; class, format and side of the split are spread evenly."""
    take = index // len(classes)
    side = "test" if take % 3 == 2 else "train"
    return f"{classes[index % len(classes)]}/{take:05d}_{side}.{formats[take % len(formats)]}"


def complete(name: str, paths: Sequence[str], write: Callable[[int, Path, str], None]) -> Path:
    """Return the folder `name` of the cache with files at `paths`; those that are missing are written.

    `write(index, temporary path, format)` writes one. The name carries the set's parameters, so that sets never mix.
    """
    folder = cache_root() / name

    def write_missing(index: int) -> None:
        path = folder / paths[index]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(path) as temporary:
                write(index, temporary, path.suffix[1:])

    # numpy and the encoders work outside Python's lock. An interruption cancels what `map` has not begun.
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(write_missing, range(len(paths))))
    return folder

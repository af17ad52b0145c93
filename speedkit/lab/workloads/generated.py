"""Whose data: the user's files, or a generated set whose files are written once, in parallel, each whole or absent.

A generated file is a function of its index alone: files can be made in any order, and a larger set begins with the
smaller.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from speedkit.errors import UsageError
from speedkit.files import atomic
from speedkit.lab.sources import Split, find_items
from speedkit.machine import cache_root, usable_cores

TEST_PATTERN = r"_test\."  # in the file names of a generated test set


def find_or_generate(
    data_dir: str | Path | None,
    generate: Callable[..., Path],
    *,
    clips: int | None = None,
    labels: str | Path | None = None,
    **options: Any,
) -> Split:
    """Return what `find_items` finds under `data_dir`, or without one among the `clips` files that `generate` writes.

    `options` are those of `find_items`. Raises UsageError for `clips` of the user's own data.
    """
    if data_dir is None and labels is None:
        folder = generate(clips) if clips else generate()
        return find_items(folder, **{"test_pattern": TEST_PATTERN, **options})
    if clips is not None:
        raise UsageError("clips counts generated files: leave it out when you give your own data")
    return find_items(data_dir or Path(str(labels)).parent, labels=labels, **options)


def in_classes(
    count: int, classes: Sequence[str], *, sides: Sequence[str] = ("train", "train", "test"), formats: Sequence[str]
) -> list[str]:
    """Return the paths of the files of a set, over whose classes in turn the sides of the split and formats repeat."""
    paths = []
    for index in range(count):
        take, number = divmod(index, len(classes))
        side = sides[take % len(sides)]
        paths.append(f"{classes[number]}/{take:05d}_{side}.{formats[take % len(formats)]}")
    return paths


def complete(name: str, paths: Sequence[str], make: Callable[[int], NDArray], *, save: Callable[..., None]) -> Path:
    """Return the folder `name` of the cache with files at `paths`; those that are missing are written.

    `save(temporary path, make(index), format=...)` writes one. The name carries the set's parameters and a version,
    to be raised when a file changes, so that sets never mix.
    """
    folder = cache_root() / name

    def write_missing(index: int) -> None:
        path = folder / paths[index]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(path) as temporary:
                save(temporary, make(index), format=path.suffix[1:])

    # numpy and the encoders work outside Python's lock. An interruption cancels what `map` has not begun.
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(write_missing, range(len(paths))))
    return folder

"""Find the data: class-named subfolders, a CSV of paths and labels, a file-name pattern, or a folder of text."""

import csv
import hashlib
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import soundfile

from speedkit.data.decode import check_bad_share
from speedkit.errors import UsageError
from speedkit.files import atomic

if TYPE_CHECKING:
    import pandas

TEST_SHARE, TEXT_TEST_SHARE = 0.2, 0.1
EXTENSIONS = {
    "audio": (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff"),
    "image": (".jpg", ".jpeg", ".png"),
}
# The columns of a label table, in upper or lower case: the first that is there.
COLUMNS = {
    "path": ("path", "file", "filename", "file_name"),
    "label": ("label", "category", "class", "class_name", "target"),
    "split": ("split", "fold"),
}
# Of Python's library: not there everywhere, or not part of it.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib"}

Labels = dict[Path, tuple[str, str]]  # of each file its label, and train, test or "" where nothing says


@dataclass(frozen=True)
class Item:
    """One file: its path and class index; of a recording also its length in seconds and its sample rate."""

    path: str
    label: int
    duration_s: float = 0.0
    sample_rate_hz: int = 0


@dataclass(frozen=True)
class Split:
    """The items to train and to test on, the class names, and (path, why) of each file that cannot be used."""

    train: tuple[Item, ...]
    test: tuple[Item, ...]
    classes: tuple[str, ...]
    quarantined: tuple[tuple[str, str], ...] = ()


def find_items(
    data_dir: str | Path,
    *,
    labels: str | Path | None = None,
    label_pattern: str | None = None,
    test_pattern: str | None = None,
    seed: int = 0,
    labelled: bool = True,
    kind: str = "audio",
) -> Split:
    """Return the training and test items under `data_dir`, sorted by path with numbers in natural order.

    Labels come from the CSV `labels`, from group 1 of `label_pattern` in the file name, or from the names of the
    subfolders; without `labelled` all files are of one class. The test set is what `test_pattern` matches in the file
    name, else what the CSV's column `split` or `fold` (the highest) marks, else a fifth of each class by a hash of seed
    and name, which keeps a file on its side when others are added.
    Raises UsageError for a source that cannot be used as asked, SpeedkitError when over 5 % of the files are bad.
    """
    root = Path(data_dir)
    if labels is not None:
        files = read_table(root, Path(labels), kind)
    else:
        files = files_under(root, kind, label_pattern=label_pattern, labelled=labelled)

    # The header of each recording is read once; a file without one is left out, and named.
    headers: dict[Path, tuple] = {}
    bad: dict[str, str] = {}
    for path in sorted(files, key=lambda path: natural_key(str(path))):
        try:
            headers[path] = () if kind == "image" else read_header(path)
        except (RuntimeError, OSError) as error:  # libsndfile's errors are RuntimeErrors
            bad[str(path)] = str(error)
    check_bad_share(bad, len(files))

    readable = {path: files[path] for path in headers}
    if test_pattern is not None:
        test = matching(readable, test_pattern)
    elif any(split for _, split in readable.values()):
        test = {path for path, (_, split) in readable.items() if split == "test"}
    else:
        test = draw_test_set(readable, root, seed=seed, share=TEST_SHARE)
    classes = sorted({label for label, _ in readable.values()}, key=natural_key)
    if labelled and len(classes) < 2:
        raise UsageError(f"a classifier needs two classes, the files have {len(classes)} ({', '.join(classes)})")
    items = {path: Item(str(path), classes.index(files[path][0]), *header) for path, header in headers.items()}
    train, tested = (tuple(item for path, item in items.items() if (path in test) == side) for side in (False, True))
    return Split(train, tested, tuple(classes), tuple(bad.items()))


def find_text(data_dir: str | Path | None, test_pattern: str | None, seed: int) -> tuple[bytes, bytes]:
    """Return the text to train on and to test on: all files under `data_dir`, or Python's own standard library.

    The test files are those whose name `test_pattern` matches, else a tenth of them by a hash of `seed` and name; of a
    single file, its last tenth. Hidden files and binary files (a zero byte, as git tells them) are left out.
    """
    root = Path(data_dir or sysconfig.get_path("stdlib"))
    paths = visible_files(root, set() if data_dir else NOT_LIBRARY)
    texts = {path: path.read_bytes() for path in paths if data_dir or path.suffix == ".py"}
    texts = {path: text for path, text in texts.items() if b"\0" not in text[:8192]}
    if not texts:
        raise UsageError(f"data folder {root} holds no text files: name another --data-dir")
    if test_pattern is not None:
        test = matching(texts, test_pattern)
    elif len(texts) == 1:
        (text,) = texts.values()
        end = round((1 - TEXT_TEST_SHARE) * len(text))
        return text[:end], text[end:]
    else:
        test = draw_test_set(dict.fromkeys(texts, ("", "")), root, seed=seed, share=TEXT_TEST_SHARE)
    train, tested = (b"\n".join(text for path, text in texts.items() if (path in test) == side) for side in (0, 1))
    return train, tested


def write_quarantine(path_csv: str | Path, bad: Iterable[tuple[str, str]]) -> None:
    """Write (path, why) of every file left out to a CSV with the columns path and why, atomically."""
    with atomic(path_csv) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("path", "why"), *bad])


def visible_files(root: Path, left_out: Set[str] = frozenset()) -> list[Path]:
    """Return the files under a folder in the order of their names, without hidden ones and folders `left_out`."""
    if not root.is_dir():
        raise UsageError(f"data folder {root} does not exist or is not a folder: name another --data-dir")
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        paths += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return [path for path in paths if path.is_file()]  # no link to what is gone


def natural_key(text: str) -> list:
    """Return a sort key in which clip2 comes before clip10: text and numbers in turns."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", text)]


def matches(paths: Iterable[Path], pattern: str, option: str) -> dict[Path, re.Match[str]]:
    """Return the match of each file name in which the pattern is found. Raises UsageError for a faulty pattern."""
    try:
        return {path: match for path in paths if (match := re.search(pattern, path.name))}
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error


def matching(paths: Collection[Path], test_pattern: str) -> set[Path]:
    """Return the paths whose file name the pattern matches. Raises UsageError when those are all, or none."""
    test = set(matches(paths, test_pattern, "--test-pattern"))
    if len(test) in (0, len(paths)):
        amount = f"matches {len(test)} of {len(paths)} files"
        raise UsageError(f"--test-pattern {test_pattern!r} {amount}: leave some to train and some to test on")
    return test


def files_under(root: Path, kind: str, *, label_pattern: str | None, labelled: bool) -> Labels:
    """Return the files labelled by their subfolder or by the pattern; files without a label are left out."""
    paths = [path for path in visible_files(root) if path.suffix.lower() in EXTENSIONS[kind]]
    if not paths:
        raise UsageError(f"data folder {root} holds no {kind} files ({' '.join(EXTENSIONS[kind])}): see --data-dir")
    if not labelled:
        labels = dict.fromkeys(paths, "unlabelled")
    elif label_pattern is None:
        labels = {path: path.relative_to(root).parts[0] for path in paths if path.parent != root}
    else:  # without a group in the pattern the label is all that matches
        found = matches(paths, label_pattern, "--label-pattern")
        labels = {path: match[min(1, match.re.groups)] for path, match in found.items()}
    if not any(labels.values()):
        sources = f"name class folders in {root}, --label-pattern or --labels"
        raise UsageError(f"none of the {len(paths)} files, such as {paths[0].name}, has a label: {sources}")
    return {path: (label, "") for path, label in labels.items() if label}


def read_table(root: Path, table: Path, kind: str) -> Labels:
    """Return the files that the CSV `table` lists for training and testing, whether they exist or not."""
    import pandas

    try:
        rows = pandas.read_csv(table, sep=None, engine="python", dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"--labels {table} cannot be read as a CSV file in UTF-8 ({error})") from error
    rows = rows.rename(columns=lambda name: name.strip().lower()).apply(lambda column: column.str.strip())
    columns = {what: next((name for name in names if name in rows), "") for what, names in COLUMNS.items()}
    if rows.empty or not columns["path"] or not columns["label"]:
        needs = f"one of {', '.join(COLUMNS['path'])}, one of {', '.join(COLUMNS['label'])}, and a row per file"
        raise UsageError(f"--labels {table} has {len(rows)} rows with columns {', '.join(rows)}; it needs {needs}")

    # Paths are relative to the data folder or to the table, or to a folder of that kind in the former (ESC-50's audio).
    folders = (root, root / kind, root / f"{kind}s", table.parent)
    paths = [
        next((folder / name for folder in folders if (folder / name).is_file()), root / name)
        for name in rows[columns["path"]]
    ]
    splits = read_splits(rows[columns["split"]].str.lower()) if columns["split"] else [""] * len(rows)
    labels = zip(rows[columns["label"]], splits, strict=True)
    return {path: file for path, file in zip(paths, labels, strict=True) if file[0] and file[1] != "neither"}


def read_splits(column: "pandas.Series") -> list[str]:
    """Return train, test or neither for each row of a table; nothing where no row is marked as test."""
    names = sorted(set(column), key=natural_key)
    if column.name == "fold":
        test = names[1:][-1:]  # the highest
    else:  # where a table has both, it tests on the test part and leaves the validation part alone
        test = [name for name in names if name.startswith(("test", "eval"))]
        test = test or [name for name in names if name.startswith(("val", "dev"))]
    if not test:
        return [""] * len(column)
    return ["test" if name in test else "neither" if name.startswith(("val", "dev")) else "train" for name in column]


def read_header(path: Path) -> tuple[float, int]:
    """Return (duration in seconds, sample rate in Hz) of a recording."""
    info = soundfile.info(str(path))
    return info.frames / info.samplerate, info.samplerate


def draw_test_set(files: Labels, root: Path, *, seed: int, share: float) -> set[Path]:
    """Return a share of each class, one file at least, by a hash of seed and name, wherever the folder lies."""

    def stable_hash(path: Path) -> bytes:
        name = path.relative_to(root) if path.is_relative_to(root) else path
        return hashlib.blake2b(f"{seed}:{name.as_posix()}".encode(), digest_size=8).digest()

    classes = defaultdict(list)
    for path in sorted(files, key=stable_hash):
        classes[files[path][0]].append(path)
    return {path for paths in classes.values() for path in paths[: max(1, round(share * len(paths)))]}

"""Find the data: class-named subfolders, a CSV of paths and labels, a file-name pattern, or a folder of text."""

import csv
import hashlib
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import soundfile

from speedkit.data.decode import check_bad_share
from speedkit.errors import UsageError
from speedkit.files import atomic

if TYPE_CHECKING:
    import pandas

UNLABELLED = "unlabelled"  # the one class of files whose labels do not matter
TEST_SHARE, TEXT_TEST_SHARE = 0.2, 0.1
EXTENSIONS = {
    "audio": (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff"),
    "image": (".jpg", ".jpeg", ".png"),
}
# The columns of a label table, in upper or lower case: the first that is there; `split` or `fold` may be a third.
PATH_COLUMNS = ("path", "file", "filename", "file_name")
LABEL_COLUMNS = ("label", "category", "class", "class_name", "target")
TEST, VALIDATION = ("test", "eval"), ("val", "dev")  # how the names of splits begin
# Of Python's library: not there everywhere, or not part of it.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib"}


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


class LabelledFile(NamedTuple):
    """A file whose header has not been read; `split` is train, test, or empty where nothing says."""

    path: Path
    label: str
    split: str = ""


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
    if labels is not None and label_pattern is not None:
        raise UsageError("--labels and --label-pattern both name the labels: give one of the two")
    table = None if labels is None else Path(labels)
    files = files_under(root, kind, label_pattern, labelled) if table is None else read_table(root, table, kind)

    # The header of each file is read once; a file that has none that can be used is left out, and named.
    headers: dict[LabelledFile, tuple] = {}
    bad: dict[str, str] = {}
    for file in sorted(set(files), key=lambda file: natural_key(str(file.path))):
        try:
            headers[file] = read_header(file, kind)
        except (ValueError, RuntimeError, OSError) as error:  # libsndfile's errors are RuntimeErrors
            bad[str(file.path)] = str(error)
    check_bad_share(bad, len(headers) + len(bad))

    test = choose_test_set(list(headers), root, test_pattern, seed)
    classes = tuple(sorted({file.label for file in headers}, key=natural_key))
    if labelled and len(classes) < 2:
        raise UsageError(f"all files are of one class ({classes[0]}), a classifier needs two: check their labels")
    sides: dict[bool, list[Item]] = {False: [], True: []}
    for file, header in headers.items():
        sides[file in test].append(Item(str(file.path), classes.index(file.label), *header))
    return Split(tuple(sides[False]), tuple(sides[True]), classes, tuple(bad.items()))


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
        test = matching(list(texts), test_pattern)
    elif len(texts) == 1:
        (text,) = texts.values()
        end = round((1 - TEXT_TEST_SHARE) * len(text))
        return text[:end], text[end:]
    else:
        by_hash = sorted(texts, key=lambda path: stable_hash(seed, path, root))
        test = set(by_hash[: max(1, round(TEXT_TEST_SHARE * len(texts)))])
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


def stable_hash(seed: int, path: Path, root: Path) -> bytes:
    """Return the hash by which a file is drawn for the test set, wherever its folder lies."""
    name = path.relative_to(root) if path.is_relative_to(root) else path
    return hashlib.blake2b(f"{seed}:{name.as_posix()}".encode(), digest_size=8).digest()


def natural_key(text: str) -> list:
    """Return a sort key in which clip2 comes before clip10: text and numbers in turns."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", text)]


def matches(paths: list[Path], pattern: str, option: str) -> dict[Path, re.Match[str]]:
    """Return the match of each file name in which the pattern is found. Raises UsageError when it is none."""
    try:
        found = {path: re.search(pattern, path.name) for path in paths}
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error
    return {path: match for path, match in found.items() if match}


def matching(paths: list[Path], test_pattern: str) -> set[Path]:
    """Return the paths whose file name the pattern matches. Raises UsageError when those are all, or none."""
    test = set(matches(paths, test_pattern, "--test-pattern"))
    if len(test) in (0, len(paths)):
        amount = f"matches {len(test)} of {len(paths)} files"
        raise UsageError(f"--test-pattern {test_pattern!r} {amount}: leave some to train and some to test on")
    return test


def files_under(root: Path, kind: str, label_pattern: str | None, labelled: bool) -> list[LabelledFile]:
    """Return the files labelled by their subfolder or by the pattern; files without a label are left out."""
    paths = [path for path in visible_files(root) if path.suffix.lower() in EXTENSIONS[kind]]
    if not paths:
        raise UsageError(f"data folder {root} holds no {kind} files ({' '.join(EXTENSIONS[kind])}): see --data-dir")
    if not labelled:
        return [LabelledFile(path, UNLABELLED) for path in paths]
    if label_pattern is None:
        labels = {path: path.relative_to(root).parts[0] for path in paths if path.parent != root}
        problem = f"data folder {root} has no class-named subfolders: add them, or give --label-pattern or --labels"
    else:
        named = matches(paths, label_pattern, "--label-pattern")
        # Without a group in the pattern the label is all that matches.
        groups = {path: match[min(1, match.re.groups)] for path, match in named.items()}
        labels = {path: label for path, label in groups.items() if label}
        problem = f"--label-pattern {label_pattern!r} matches none of the {len(paths)} files, {paths[0].name} for one"
    if not labels:
        raise UsageError(problem)
    return [LabelledFile(path, label) for path, label in labels.items()]


def read_table(root: Path, table: Path, kind: str) -> list[LabelledFile]:
    """Return the files that the CSV `table` lists for training and testing, whether they exist or not."""
    import pandas

    try:
        rows = pandas.read_csv(table, sep=None, engine="python", dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"--labels {table} cannot be read as a CSV file in UTF-8 ({error})") from error
    rows = rows.rename(columns=lambda name: name.strip().lower()).apply(lambda column: column.str.strip())
    path_column, label_column, split_column = (
        next((name for name in names if name in rows), None)
        for names in (PATH_COLUMNS, LABEL_COLUMNS, ("split", "fold"))
    )
    if rows.empty or path_column is None or label_column is None:
        needs = f"one of {', '.join(PATH_COLUMNS)}, one of {', '.join(LABEL_COLUMNS)}, and a row per file"
        raise UsageError(f"--labels {table} has {len(rows)} rows with columns {', '.join(rows)}; it needs {needs}")

    # Paths are relative to the data folder or to the table, or to a folder of that kind in the former (ESC-50's audio).
    folders = (root, root / kind, root / f"{kind}s", table.parent)
    paths = [
        next((folder / name for folder in folders if (folder / name).is_file()), root / name)
        for name in rows[path_column]
    ]
    splits = [""] * len(rows) if split_column is None else read_splits(rows[split_column].str.lower())
    files = map(LabelledFile, paths, rows[label_column], splits)
    return [file for file in files if file.split != "neither"]


def read_splits(column: "pandas.Series") -> list[str]:
    """Return train, test or neither for each row of a table, nothing where no row is marked as test."""
    names = sorted(set(column), key=natural_key)
    if column.name == "fold":
        test = names[1:][-1:]  # the highest
    else:  # where a table has both, it tests on the test part and leaves the validation part alone
        parts = [[name for name in names if name.startswith(words)] for words in (TEST, VALIDATION)]
        test = parts[0] or parts[1]
    if not test:
        return [""] * len(column)
    return ["test" if name in test else "neither" if name.startswith(VALIDATION) else "train" for name in column]


def read_header(file: LabelledFile, kind: str) -> tuple:
    """Return (duration in seconds, sample rate in Hz) of a recording, () of an image, unread. Raises ValueError."""
    if not file.label:
        raise ValueError("its label is empty")
    if not file.path.exists() or file.path.stat().st_size == 0:
        raise ValueError("it is missing or empty")
    if kind == "image":
        return ()
    info = soundfile.info(str(file.path))
    return info.frames / info.samplerate, info.samplerate


def choose_test_set(files: list[LabelledFile], root: Path, test_pattern: str | None, seed: int) -> set[LabelledFile]:
    """Return the test set."""
    if test_pattern is not None:
        matched = matching([file.path for file in files], test_pattern)
        return {file for file in files if file.path in matched}
    if any(file.split for file in files):
        return {file for file in files if file.split == "test"}
    by_class = defaultdict(list)
    for file in sorted(files, key=lambda file: stable_hash(seed, file.path, root)):
        by_class[file.label].append(file)
    return {file for drawn in by_class.values() for file in drawn[: max(1, round(TEST_SHARE * len(drawn)))]}

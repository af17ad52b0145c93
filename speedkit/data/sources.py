"""Find the data: class-named subfolders, a CSV of paths and labels, a file-name pattern, or a folder of text."""

import csv
import hashlib
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import soundfile

from speedkit.data.decode import check_bad_share
from speedkit.errors import UsageError
from speedkit.files import atomic

Key = TypeVar("Key")
UNLABELLED = "unlabelled"  # the one class of files whose labels do not matter
TEST_SHARE, TEXT_TEST_SHARE = 0.2, 0.1
EXTENSIONS = {
    "audio": (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff"),
    "image": (".jpg", ".jpeg", ".png"),
}
# The columns of a label table, by any of these names in upper or lower case; `split` or `fold` may be a third.
PATH_COLUMNS = ("path", "file", "filename", "file_name")
LABEL_COLUMNS = ("label", "category", "class", "class_name", "target")
TEST_SPLITS = {"test", "testing", "eval", "evaluation"}
VALIDATION_SPLITS = {"val", "valid", "validation", "dev"}
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
    name, else the CSV's `split` or `fold` column (the highest fold), else a fifth of each class by a hash of seed and
    name, which keeps a file on its side when others are added.
    Raises UsageError for a source that cannot be used as asked, SpeedkitError when over 5 % of the files are bad.
    """
    root = existing_folder(data_dir, kind)
    if labels is not None and label_pattern is not None:
        raise UsageError("--labels and --label-pattern both name the labels: give one of the two")
    if labels is not None:
        files = read_table(root, Path(labels), kind, with_splits=test_pattern is None)
    else:
        files = files_under(root, kind, label_pattern, labelled)
    files = sorted(set(files), key=lambda file: natural_key(str(file.path)))

    # The header of each file is read once; a file that has none that can be used is left out, and named.
    headers: dict[LabelledFile, tuple] = {}
    bad: dict[str, str] = {}
    for file in files:
        try:
            headers[file] = read_header(file, kind)
        except (ValueError, RuntimeError, OSError) as error:  # libsndfile's errors are RuntimeErrors
            bad[str(file.path)] = str(error)
    check_bad_share(bad, len(files))

    test_paths = choose_test_set(list(headers), root, test_pattern, seed)
    classes = class_names(list(headers), test_paths) if labelled else (UNLABELLED,)
    sides: dict[bool, list[Item]] = {False: [], True: []}
    for file, header in headers.items():
        sides[file.path in test_paths].append(Item(str(file.path), classes.index(file.label), *header))
    return Split(tuple(sides[False]), tuple(sides[True]), classes, tuple(bad.items()))


def find_text(data_dir: str | Path | None, test_pattern: str | None, seed: int) -> tuple[bytes, bytes]:
    """Return the text to train on and to test on: all files under `data_dir`, or Python's own standard library.

    The test files are those whose name `test_pattern` matches, else a tenth of them by a hash of `seed` and name; of a
    single file, its last tenth. Hidden files and binary files (a zero byte, as git tells them) are left out.
    """
    root = existing_folder(data_dir or sysconfig.get_path("stdlib"), "text")
    files = visible_files(root, set() if data_dir else NOT_LIBRARY)
    texts = {path.relative_to(root).as_posix(): path.read_bytes() for path in files if data_dir or path.suffix == ".py"}
    texts = {name: content for name, content in texts.items() if b"\0" not in content[:8192]}
    if not texts:
        raise UsageError(f"data folder {root} holds no text files: name another --data-dir")
    if len(texts) == 1 and test_pattern is None:
        (content,) = texts.values()
        end = round((1 - TEXT_TEST_SHARE) * len(content))
        return content[:end], content[end:]
    if test_pattern is not None:
        test = files_matching({name: name.rpartition("/")[2] for name in texts}, test_pattern)
    else:
        by_hash = sorted(texts, key=lambda name: stable_hash(seed, name))
        test = set(by_hash[: max(1, round(TEXT_TEST_SHARE * len(texts)))])
    train, tested = (b"\n".join(texts[name] for name in texts if (name in test) == side) for side in (False, True))
    return train, tested


def write_quarantine(path_csv: str | Path, bad: Iterable[tuple[str, str]]) -> None:
    """Write (path, why) of every file left out to a CSV with the columns path and why, atomically."""
    with atomic(path_csv) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("path", "why"), *bad])


def existing_folder(data_dir: str | Path, name: str) -> Path:
    """Return the folder `data_dir`. Raises UsageError when it is none; `name` is the kind of files it should hold."""
    root = Path(data_dir)
    if not root.is_dir():
        problem = "does not exist or is not a folder"
        raise UsageError(f"data folder {root} {problem}: name the folder of your {name} files with --data-dir")
    return root


def visible_files(root: Path, left_out: Set[str] = frozenset()) -> Iterator[Path]:
    """Yield the files under a folder in the order of their names, without hidden ones and folders `left_out`."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        paths = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())  # no link to what is gone


def stable_hash(seed: int, name: str) -> bytes:
    """Return the hash by which a file is drawn for the test set."""
    return hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()


def natural_key(text: str) -> list:
    """Return a sort key in which clip2 comes before clip10: text and numbers in turns."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", text)]


def files_matching(names: Mapping[Key, str], test_pattern: str) -> set[Key]:
    """Return the keys of the file `names` that the pattern matches. Raises UsageError when those are all, or none."""
    pattern = compile_pattern(test_pattern, "--test-pattern")
    matched = {key for key, name in names.items() if pattern.search(name)}
    if len(matched) in (0, len(names)):
        amount = f"matches {len(matched)} of {len(names)} files"
        raise UsageError(f"--test-pattern {test_pattern!r} {amount}: leave some to train and some to test on")
    return matched


def compile_pattern(pattern: str, option: str) -> re.Pattern[str]:
    """Return the compiled pattern. Raises UsageError, naming the option, when it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error


def files_under(root: Path, kind: str, label_pattern: str | None, labelled: bool) -> list[LabelledFile]:
    """Return the files labelled by their subfolder or by the pattern; files without a label are left out."""
    paths = [path for path in visible_files(root) if path.suffix.lower() in EXTENSIONS[kind]]
    if not paths:
        kinds = f"{kind} files ({', '.join(EXTENSIONS[kind])})"
        raise UsageError(f"data folder {root} holds no {kinds}: name another --data-dir")
    if not labelled:
        return [LabelledFile(path, UNLABELLED) for path in paths]
    if label_pattern is None:
        folders = {path: path.relative_to(root).parts[:-1] for path in paths}
        files = [LabelledFile(path, folders[path][0]) for path in paths if folders[path]]
        problem = f"data folder {root} has no class-named subfolders: add them, or give --label-pattern or --labels"
    else:
        pattern = compile_pattern(label_pattern, "--label-pattern")
        group = min(1, pattern.groups)  # without a group, all that matches
        matches = [(path, pattern.search(path.name)) for path in paths]
        files = [LabelledFile(path, match[group]) for path, match in matches if match and match[group]]
        among = f"of the {len(paths)} {kind} files in {root} (the first is {paths[0].name})"
        problem = f"--label-pattern {label_pattern!r} matches none {among}: correct the pattern"
    if not files:
        raise UsageError(problem)
    return files


def read_table(root: Path, table: Path, kind: str, with_splits: bool) -> list[LabelledFile]:
    """Return the files that the CSV `table` lists for training and testing, whether they exist or not."""
    import pandas

    try:
        rows = pandas.read_csv(table, sep=None, engine="python", dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"--labels {table} cannot be read as a CSV file in UTF-8 ({error})") from error
    rows = rows.rename(columns=lambda name: name.strip().lower()).apply(lambda column: column.str.strip())
    path_columns, label_columns = ([name for name in names if name in rows] for names in (PATH_COLUMNS, LABEL_COLUMNS))
    if rows.empty or not path_columns or not label_columns:
        needs = f"one of {', '.join(PATH_COLUMNS)}, one of {', '.join(LABEL_COLUMNS)}, and a row per file"
        raise UsageError(f"--labels {table} has {len(rows)} rows with columns {', '.join(rows)}; it needs {needs}")

    # A column of names says more than one of numbers (ESC-50 has both: category and target).
    labels = rows[min(label_columns, key=lambda name: rows[name].str.isdigit().all())]
    splits = [""] * len(rows)
    if with_splits and (column := next((name for name in ("split", "fold") if name in rows), None)):
        splits = read_splits(rows[column].str.lower().to_list(), f"column {column} of {table}", folds=column == "fold")

    # Paths are relative to the data folder or to the table, or to a folder of that kind beside either (ESC-50's audio).
    places = (root, table.parent, table.parent.parent)
    folders = [*places[:2], *(place / name for place in places for name in (kind, f"{kind}s"))]
    paths = []
    for name in rows[path_columns[0]]:
        existing = (folder / name for folder in folders if (folder / name).is_file())
        paths.append(next(existing, root / name))
    if not any(path.is_file() for path in paths):
        raise UsageError(f"none of the {len(paths)} files in {table} exists, as {paths[0]}: give their --data-dir")
    files = map(LabelledFile, paths, labels, splits)
    return [file for file in files if file.split != "neither"]


def read_splits(values: list[str], column: str, folds: bool) -> list[str]:
    """Return train, test or neither for each row of a table; of folds, the highest is the test set."""
    names = set(values)
    if folds:
        test = set(sorted(names, key=natural_key)[1:][-1:])
    else:  # where a table has both, it tests on the test part and leaves the validation part alone
        test = names & TEST_SPLITS or names & VALIDATION_SPLITS
    if not test:
        raise UsageError(
            f"{column} marks no test set ({', '.join(sorted(names)[:5])}): mark one or give --test-pattern"
        )
    return ["test" if name in test else "neither" if name in VALIDATION_SPLITS else "train" for name in values]


def read_header(file: LabelledFile, kind: str) -> tuple:
    """Return (duration in seconds, sample rate in Hz) of a recording, () of an image, unread. Raises ValueError."""
    if not file.path.exists():
        raise ValueError("there is no such file")
    if not file.label or file.path.stat().st_size == 0:
        raise ValueError("the file is empty (0 bytes)" if file.label else "its label is empty")
    if kind == "image":
        return ()
    info = soundfile.info(str(file.path))
    if info.frames <= 0:
        raise ValueError("it holds no samples")
    return info.frames / info.samplerate, info.samplerate


def choose_test_set(files: list[LabelledFile], root: Path, test_pattern: str | None, seed: int) -> set[Path]:
    """Return the paths of the test set."""
    if test_pattern is not None:
        return files_matching({file.path: file.path.name for file in files}, test_pattern)
    if any(file.split for file in files):
        return {file.path for file in files if file.split == "test"}
    by_class = defaultdict(list)
    for file in files:
        name = file.path.relative_to(root) if file.path.is_relative_to(root) else file.path
        by_class[file.label].append((stable_hash(seed, name.as_posix()), file.path))
    counts = {label: max(1, round(TEST_SHARE * len(hashed))) for label, hashed in by_class.items()}
    return {path for label, hashed in by_class.items() for _, path in sorted(hashed)[: counts[label]]}


def class_names(files: list[LabelledFile], test_paths: set[Path]) -> tuple[str, ...]:
    """Return the class names in natural order. Raises UsageError unless there are two, each with a file to train on."""
    names = {file.label for file in files}
    if len(names) == 1:
        raise UsageError(f"all files are of one class ({names.pop()}), a classifier needs two: check their labels")
    if untrained := names - {file.label for file in files if file.path not in test_paths}:
        raise UsageError(f"class {min(untrained)} has no usable file to train on besides those to test on: add files")
    return tuple(sorted(names, key=natural_key))

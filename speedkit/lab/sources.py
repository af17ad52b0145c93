"""Find the data: class-named subfolders, a CSV of paths and labels, a file-name pattern, tars, or a folder of text."""

import csv
import hashlib
import json
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from speedkit.errors import UsageError, check_bad_share
from speedkit.lab.tars import TarMember, check_is_file, members_by_path

TEST_SHARE = 0.2
TEXT_TEST_SHARE = 0.1
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

Labels = dict[Path, tuple[str, str]]  # of each file its label, and train, validation or test where a table says so
Members = Mapping[Path, TarMember]  # of tars, by the path that each would have if its tar were a folder


@dataclass(frozen=True)
class Item:
    """One file: its path and class index; of a recording also its length in seconds and its sample rate."""

    path: str | TarMember
    label: int
    duration_s: float = 0.0
    sample_rate_hz: int = 0


@dataclass(frozen=True)
class Split:
    """The items to train, test and validate on, the class names, and path -> why of each file that cannot be used."""

    train: list[Item]
    test: list[Item]
    validation: list[Item]
    classes: tuple[str, ...]
    quarantined: dict[str, str]


def find_items(
    data_dir: str | Path,
    *,
    labels: str | Path | None = None,
    label_pattern: str | None = None,
    test_pattern: str | None = None,
    labelled: bool = True,
    kind: str = "audio",
) -> Split:
    """Return the training, test and validation items under `data_dir`, sorted by path.

    `data_dir` is a folder, or tars (`clips-{0000..0009}.tar`, `*.tar`).
    Labels come from the CSV `labels`, from group 1 of `label_pattern` in the file name, or from the names of the
    subfolders, in a tar also from KEY.cls, KEY.json or KEY.txt beside KEY.wav, which is webdataset's layout; without
    `labelled` all files are of one class. The test set is what `test_pattern` matches in the file
    name, else what the CSV's column `split` or `fold` (the highest) marks, else a fifth of each class by a hash of the
    name, which keeps a file on its side when others are added. A column `split` may mark a validation set besides.
    Raises UsageError for a source that cannot be used as asked, SpeedkitError when over 5 % of the files are bad.
    """
    root = Path(data_dir)
    archive: Members = {}
    if re.search(r"\.(tar\b|tgz$)", root.name) and not root.is_dir():
        archive = members_by_path(root)
    if labels is not None:
        files = read_table(root, Path(labels), kind)
    else:
        files = files_under(root, kind, label_pattern=label_pattern, labelled=labelled, archive=archive)
    classes = sorted({label for label, _ in files.values()})
    if labelled and len(classes) < 2:
        raise UsageError(f"a classifier needs two classes, the files have {len(classes)} ({', '.join(classes)})")
    test_paths = choose_test_set(files, root, test_pattern=test_pattern, share=TEST_SHARE)

    sides: dict[str, list[Item]] = {"train": [], "test": [], "validation": []}
    bad: dict[str, str] = {}
    for path in sorted(files):
        label, side = files[path]
        item = Item(archive.get(path) or str(path), classes.index(label))
        if path in test_paths:
            side = "test"
        elif side != "validation":
            side = "train"
        try:
            sides[side].append(checked(item, kind))
        except (RuntimeError, OSError, ValueError) as error:  # libsndfile's errors are RuntimeErrors
            bad[str(path)] = str(error)
    check_bad_share(bad, len(files))
    if not sides["train"]:
        raise UsageError(
            f"none of the {len(files)} files is left to train on: all are in the test set, as is a class's only file"
        )
    return Split(**sides, classes=tuple(classes), quarantined=bad)


def checked(item: Item, kind: str) -> Item:
    """Return the item, of a recording with what its header says. Raises RuntimeError, OSError or ValueError."""
    if not isinstance(item.path, TarMember):
        check_is_file(item.path)
    if kind == "image":
        return item
    import soundfile  # an extra

    info = soundfile.info(item.path.open() if isinstance(item.path, TarMember) else item.path)
    return replace(item, duration_s=info.frames / info.samplerate, sample_rate_hz=info.samplerate)


def find_text(data_dir: str | Path | None, test_pattern: str | None) -> tuple[bytes, bytes]:
    """Return the text to train on and to test on: all files under `data_dir`, or Python's own standard library.

    The test files are those whose name `test_pattern` matches, else a tenth of them by a hash of the name; of a single
    file, its last tenth. Hidden files and binary files (a zero byte, as git tells them) are left out.
    """
    if data_dir:
        root = Path(data_dir)
        paths = visible_files(root)
    else:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in visible_files(root, NOT_LIBRARY) if path.suffix == ".py"]
    texts = {path: path.read_bytes() for path in paths}
    texts = {path: text for path, text in texts.items() if b"\0" not in text[:8192]}
    if not texts:
        raise UsageError(f"data folder {root} holds no text files: name another --data-dir")
    if test_pattern is None and len(texts) == 1:
        (text,) = texts.values()
        end = round((1 - TEXT_TEST_SHARE) * len(text))
        return text[:end], text[end:]
    files = dict.fromkeys(texts, ("", ""))
    test_paths = choose_test_set(files, root, test_pattern=test_pattern, share=TEXT_TEST_SHARE)
    train = b"\n".join(text for path, text in texts.items() if path not in test_paths)
    return train, b"\n".join(text for path, text in texts.items() if path in test_paths)


def visible_files(root: Path, left_out: Set[str] = frozenset()) -> list[Path]:
    """Return the files under a folder in the order of their names, without hidden ones and folders `left_out`."""
    if not root.is_dir():
        raise UsageError(f"data folder {root} does not exist or is not a folder: name another --data-dir")
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        found = [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
        paths += filter(Path.is_file, found)  # no link to what is gone
    return paths


def matches(paths: Iterable[Path], pattern: str, option: str) -> dict[Path, re.Match[str]]:
    """Return the match of each file name in which the pattern is found. Raises UsageError for a faulty pattern."""
    try:
        return {path: match for path in paths if (match := re.search(pattern, path.name))}
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error


def files_under(root: Path, kind: str, *, label_pattern: str | None, labelled: bool, archive: Members) -> Labels:
    """Return the files labelled by their subfolder or by the pattern; files without a label are left out."""
    paths = [path for path in archive or visible_files(root) if path.suffix.lower() in EXTENSIONS[kind]]
    if not labelled:
        labels = dict.fromkeys(paths, "unlabelled")
    elif label_pattern is not None:  # without a group the label is all that matches
        found = matches(paths, label_pattern, "--label-pattern")
        labels = {path: match[min(1, match.re.groups)] for path, match in found.items()}
    elif archive:
        labels = labels_in_tars(paths, archive)
    else:
        labels = {path: path.relative_to(root).parts[0] for path in paths if path.parent != root}
    if not any(labels.values()):
        files = f"{len(paths)} {kind} files ({' '.join(EXTENSIONS[kind])})"
        sources = "make a folder per class in it, or give --label-pattern or --labels"
        raise UsageError(f"data folder {root} has {files}, none with a label: {sources}")
    return {path: (label, "") for path, label in labels.items() if label}


def labels_in_tars(paths: Iterable[Path], archive: Members) -> dict[Path, str]:
    """Return what KEY.cls, else KEY.json, else KEY.txt says of each KEY, or else the name of the folder it lies in."""
    labels = {}
    for path in paths:
        folder = path.parent
        labels[path] = "" if str(folder) == archive[path].tar else folder.name
        key = path.name.partition(".")[0]
        for suffix in (".cls", ".json", ".txt"):
            beside = archive.get(folder / f"{key}{suffix}")
            if beside and (label := label_in(beside)) is not None:
                labels[path] = label
                break
    return labels


def label_in(member: TarMember) -> str | None:
    """Return the label that KEY.cls, KEY.json or KEY.txt holds, None for JSON without one."""
    try:
        text = member.read().decode().strip()
        row = json.loads(text) if member.name.endswith(".json") else {"label": text}
        if not isinstance(row, dict):
            raise ValueError("it is not a JSON object")
        column = first_column("label", row)
        if column and not isinstance(row[column], str | int | float):
            raise ValueError(f"its {column} is not a text")
        return str(row[column]) if column else None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(f"{member} cannot be read as a label ({why}): repair it, or give --label-pattern") from error


def first_column(meaning: str, columns: Container[str]) -> str:
    """Return which of the names that a column may have is there, "" where none is."""
    return next((name for name in COLUMNS[meaning] if name in columns), "")


def read_table(root: Path, table: Path, kind: str) -> Labels:
    """Return the files that the CSV `table` lists, whether they exist or not."""
    import pandas

    try:
        check_is_file(table)
        options = {"dtype": str, "keep_default_na": False, "skipinitialspace": True, "encoding": "utf-8-sig"}
        rows = pandas.read_csv(table, sep=None, engine="python", **options)  # type: ignore[call-overload]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"--labels {table} cannot be read as a CSV file in UTF-8 ({error})") from error
    rows = rows.rename(columns=lambda name: name.strip().lower())
    rows = rows.loc[:, ~rows.columns.duplicated()]
    path, label, split = (first_column(meaning, rows) for meaning in COLUMNS)
    if rows.empty or not path or not label:
        needs = f"one of {', '.join(COLUMNS['path'])}, one of {', '.join(COLUMNS['label'])}, and a row per file"
        raise UsageError(f"--labels {table} has {len(rows)} rows with columns {', '.join(rows)}; it needs {needs}")

    # The highest fold is the test set. Without a test part that of validation is.
    rows = rows[rows[label] != ""]
    sides = pandas.Series("", rows.index)
    if split == "fold":
        folds = rows["fold"].str.extract(r"(\d+)")[0].astype(float)  # 5, or fold5
        sides[(folds == folds.max()) & (folds > folds.min())] = "test"
    elif split:
        sides = rows["split"].str.lower().replace({"^(test|eval).*": "test", "^(val|dev).*": "validation"}, regex=True)
    if "test" not in set(sides):
        sides = sides.replace("validation", "test")

    # Paths are relative to the data folder, to one of that kind in it (ESC-50's audio), or to the table.
    files = {}
    for name, text, side in zip(rows[path], rows[label], sides, strict=True):
        places = [folder / name for folder in (root, root / kind, table.parent)]
        file = next(filter(os.path.isfile, places), places[0])
        files[file] = (text, side)
    return files


def choose_test_set(files: Labels, root: Path, *, test_pattern: str | None, share: float) -> set[Path]:
    """Return the files that the pattern matches, else those marked test, else a share of each class.

    The share, one file at least, goes by a hash of the name within the folder. Raises UsageError for a pattern that
    matches all files, or none.
    """
    if test_pattern is not None:
        test = set(matches(files, test_pattern, "--test-pattern"))
        if len(test) in (0, len(files)):
            amount = f"matches {len(test)} of {len(files)} files"
            raise UsageError(f"--test-pattern {test_pattern!r} {amount}: leave some to train and some to test on")
        return test
    marked = {path for path, (_, side) in files.items() if side == "test"}
    if marked:
        return marked

    def stable_hash(path: Path) -> bytes:
        name = path.relative_to(root) if path.is_relative_to(root) else path
        return hashlib.blake2b(os.fsencode(f"0:{name.as_posix()}"), digest_size=8).digest()  # 0 is its seed

    classes = defaultdict(list)
    for path in sorted(files, key=stable_hash):
        classes[files[path][0]].append(path)
    test = set()
    for paths in classes.values():
        test.update(paths[: max(1, round(share * len(paths)))])
    return test

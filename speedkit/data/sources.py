"""Where recordings or images are: class-named subfolders, a CSV of paths and labels, or a file-name pattern."""

import csv
import functools
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import soundfile

from speedkit.data.decode import reason
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")
UNLABELLED = "unlabelled"  # the one class of files whose labels do not matter
TEST_SHARE = 0.2
BAD_SHARE = 0.05  # more bad files than this, and the data set itself is at fault: an error
# The columns of a label table, by any of these names in upper or lower case; `split` or `fold` may be a third.
COLUMNS = {
    "path": ("path", "file", "filename", "file_name"),
    "label": ("label", "category", "class", "class_name", "target"),
}
TEST_SPLITS = {"test", "testing", "eval", "evaluation"}
VALIDATION_SPLITS = {"val", "valid", "validation", "dev"}


@dataclass(frozen=True)
class Item:
    """One file: its path and its class index; of a recording also its length in seconds and its sample rate."""

    path: str
    label: int
    duration_s: float = 0.0
    sample_rate_hz: int = 0


@dataclass(frozen=True)
class Found:
    """What `find_items` found; `quarantined` holds (path, why)."""

    train: tuple[Item, ...]
    test: tuple[Item, ...]
    classes: tuple[str, ...]
    quarantined: tuple[tuple[str, str], ...] = ()


class Entry(NamedTuple):
    """A labelled file before its header was read; `split` is train, test, or empty where nothing says."""

    path: Path
    label: str
    split: str = ""


class Kind(NamedTuple):
    """A kind of file: what messages call it, its endings, and what reads from its header the rest of an `Item`."""

    name: str
    one: str
    extensions: tuple[str, ...]
    header: Callable[[Path], tuple | str]  # or why the file cannot be used


def _sound(path: Path) -> tuple | str:
    """Return (duration in seconds, sample rate in Hz) from the file's header."""
    info = soundfile.info(str(path))
    return (info.frames / info.samplerate, info.samplerate) if info.frames > 0 else "it holds no samples"


def _picture(path: Path) -> tuple | str:
    """Return nothing more where the file begins as an image does."""
    with path.open("rb") as file:
        known = file.read(4).startswith((b"\xff\xd8\xff", b"\x89PNG"))
    return () if known else "it is neither a JPEG nor a PNG image"


AUDIO = Kind("audio", "recording", (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff"), _sound)
IMAGES = Kind("image", "image", (".jpg", ".jpeg", ".png"), _picture)


def find_items(
    data_dir: str | Path,
    *,
    labels: str | Path | None = None,
    label_pattern: str | None = None,
    test_pattern: str | None = None,
    seed: int = 0,
    labelled: bool = True,
    kind: Kind = AUDIO,
) -> Found:
    """Return the training and test items under `data_dir`, sorted by path with numbers in their natural order.

    Labels come from the CSV `labels`, from group 1 of `label_pattern` in the file name, or from the names of the
    subfolders. The test set is what `test_pattern` finds in the file name, else the CSV's `split` or `fold` column (the
    highest fold), else a fifth of each class by a hash of seed and name: a file stays on its side when others come.
    Where they are not `labelled`, all files are of one class, whatever folders they lie in.
    Raises UsageError for a source that cannot be used as asked, SpeedkitError when over 5 % of the files are bad.
    """
    root = existing_folder(data_dir, f"{kind.one}s")
    if labels is not None and label_pattern is not None:
        raise UsageError("--labels and --label-pattern both name the labels: give one of the two")
    if labels is None:
        entries = _from_files(root, label_pattern, kind, labelled)
    else:
        entries = _from_table(root, Path(labels), test_pattern, kind)
    entries = sorted(dict.fromkeys(entries), key=lambda entry: _natural(str(entry.path)))
    with ThreadPoolExecutor(8) as pool:  # libsndfile works outside Python's lock, and disks like several requests
        headers = dict(zip(entries, pool.map(functools.partial(_header, kind), entries), strict=True))
    bad = tuple((str(entry.path), header) for entry, header in headers.items() if isinstance(header, str))
    if len(bad) > BAD_SHARE * len(entries):
        first = "; ".join(f"{path}: {why}" for path, why in bad[:3])
        share = f"{len(bad)} of {len(entries)} files cannot be used, over {BAD_SHARE:.0%}"
        raise SpeedkitError(f"{share} ({first}): repair or remove them")
    good = {entry: header for entry, header in headers.items() if not isinstance(header, str)}
    test_set = _test_set(list(good), root, test_pattern, seed)
    classes = _classes(list(good), test_set) if labelled else (UNLABELLED,)
    sides: dict[bool, list[Item]] = {False: [], True: []}
    for entry, header in good.items():
        sides[entry.path in test_set].append(Item(str(entry.path), classes.index(entry.label), *header))
    return Found(tuple(sides[False]), tuple(sides[True]), classes, bad)


def existing_folder(data_dir: str | Path, what: str) -> Path:
    """Return the folder that `data_dir` names. Raises UsageError, asking for that of `what`, when it is none."""
    root = Path(data_dir)
    if not root.is_dir():
        instead = "is a file, not a folder" if root.exists() else "does not exist"
        raise UsageError(f"data folder {root} {instead}: name the folder of your {what} with --data-dir")
    return root


def matching(names: Mapping[T, str], test_pattern: str) -> set[T]:
    """Return the keys of the file `names` that the pattern finds. Raises UsageError when those are all, or none."""
    pattern = _compiled(test_pattern, "--test-pattern")
    matched = {key for key, name in names.items() if pattern.search(name)}
    if len(matched) in (0, len(names)):
        amount, side = ("every one", "train") if matched else ("none", "test")
        raise UsageError(f"--test-pattern {test_pattern!r} matches {amount} of the files: leave some to {side} on")
    return matched


def lot(seed: int, name: str) -> bytes:
    """Return what a file is drawn for the test set by: it stays on its side when others come."""
    return hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()


def write_quarantine(path_csv: str | Path, rows: Iterable[tuple[str, str]]) -> None:
    """Write the (path, why) of every file left out to a CSV with the columns path and why, atomically."""
    with atomic(path_csv) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("path", "why"), *rows])


def _natural(text: str) -> list:
    """Return a sort key in which clip2 comes before clip10."""
    parts = re.split(r"([0-9]+)", text)  # every second part is a number
    return [(0, int(part), "") if at % 2 else (1, 0, part) for at, part in enumerate(parts)]


def _compiled(pattern: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error


def _from_files(root: Path, label_pattern: str | None, kind: Kind, labelled: bool) -> list[Entry]:
    """Return the files labelled by group 1 of the pattern or by their subfolder; those without a label are not ours."""
    parts = {path: path.relative_to(root).parts for path in root.rglob("*") if path.suffix.lower() in kind.extensions}
    paths = sorted(path for path, names in parts.items() if not any(name.startswith(".") for name in names))
    if not paths:
        what = f"{kind.name} files ({', '.join(kind.extensions)})"
        raise UsageError(f"data folder {root} holds no {what}: name another --data-dir")
    if not labelled:
        return [Entry(path, UNLABELLED) for path in paths]
    if label_pattern is None:
        entries = [Entry(path, parts[path][0]) for path in paths if len(parts[path]) > 1]
        without = f"data folder {root} has no class-named subfolders: add them, or give --label-pattern or --labels"
    else:
        pattern = _compiled(label_pattern, "--label-pattern")
        if not pattern.groups:
            raise UsageError(f"--label-pattern {label_pattern!r} has no group: put parentheses around the label's part")
        entries = [Entry(path, match[1]) for path in paths if (match := pattern.search(path.name)) and match[1]]
        which = f"of the {len(paths)} {kind.name} files in {root} (the first is {paths[0].name})"
        without = f"--label-pattern {label_pattern!r} matches none {which}: correct the pattern"
    if not entries:
        raise UsageError(without)
    return entries


def _from_table(root: Path, table: Path, test_pattern: str | None, kind: Kind) -> list[Entry]:
    """Return the rows of the CSV `table` that are to train or to test on, with the path where their file should be."""
    import pandas

    try:
        rows = pandas.read_csv(table, sep=None, engine="python", dtype=str, keep_default_na=False, encoding="utf-8-sig")
    except (OSError, ValueError, csv.Error) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read as CSV ({error})"
        raise UsageError(f"the label table {table} {what}: give --labels a CSV file in UTF-8") from error
    if rows.empty:
        raise UsageError(f"the label table {table} holds no rows: it needs one row per {kind.one} below its header")
    rows = rows.rename(columns=lambda name: name.strip().lower()).apply(lambda column: column.str.strip())
    columns = {what: [name for name in known if name in rows] for what, known in COLUMNS.items()}
    for what, names in columns.items():
        if not names:
            known = " or ".join(COLUMNS[what])
            raise UsageError(f"the label table {table} has no {what} column: name one of {', '.join(rows)} {known}")
    # A column of names says more than one of numbers (ESC-50 has both: category and target).
    labels = rows[min(columns["label"], key=lambda name: rows[name].str.isdigit().all())]
    splits = _splits(rows, table) if test_pattern is None else [""] * len(rows)
    beside = (root, table.parent, table.parent.parent)
    folders = (*beside[:2], *(folder / name for folder in beside for name in (kind.name, f"{kind.name}s")))
    paths = [
        next((path for folder in folders if (path := folder / name).is_file()), root / name)
        for name in rows[columns["path"][0]]
    ]
    if not any(path.is_file() for path in paths):
        raise UsageError(f"none of the {len(paths)} files in {table} exists, as {paths[0]}: give their --data-dir")
    return [Entry(*row) for row in zip(paths, labels, splits, strict=True) if row[2] != "neither"]


def _splits(rows: "pandas.DataFrame", table: Path) -> list[str]:
    """Return for each row train, test, neither, or empty where the table does not say."""
    column = next((name for name in ("split", "fold") if name in rows), None)
    if column is None:
        return [""] * len(rows)
    said = rows[column].str.lower().to_list()
    held = sorted({*said}, key=_natural)
    # With a validation and a test part, the test part is the test set and the validation part is left alone.
    for_test, problem = {*held} & TEST_SPLITS or {*held} & VALIDATION_SPLITS, "marks no test set"
    if column == "fold":
        for_test, problem = {*held[1:][-1:]}, "holds one fold only"
    if not for_test:
        has = f"column {column} of {table} {problem} ({', '.join(held[:5])})"
        raise UsageError(f"{has}: mark rows to test on, or give --test-pattern")
    return ["test" if part in for_test else "neither" if part in VALIDATION_SPLITS else "train" for part in said]


def _header(kind: Kind, entry: Entry) -> tuple | str:
    """Return what an item takes from the file's header, or why it cannot be used."""
    if not entry.label or not entry.path.exists():
        return "its label is empty" if entry.path.exists() else "there is no such file"
    try:
        if entry.path.stat().st_size == 0:
            return "the file is empty (0 bytes)"
        return kind.header(entry.path)
    except (soundfile.SoundFileError, RuntimeError, OSError) as error:
        return reason(error)


def _test_set(entries: list[Entry], root: Path, test_pattern: str | None, seed: int) -> set[Path]:
    """Return the paths of the test set."""
    if test_pattern is not None:
        return matching({entry.path: entry.path.name for entry in entries}, test_pattern)
    if any(entry.split for entry in entries):
        return {entry.path for entry in entries if entry.split == "test"}
    by_class = defaultdict(list)
    for entry in entries:
        name = entry.path.relative_to(root) if entry.path.is_relative_to(root) else entry.path
        by_class[entry.label].append((lot(seed, name.as_posix()), entry.path))
    return {path for keyed in by_class.values() for _, path in sorted(keyed)[: max(1, round(TEST_SHARE * len(keyed)))]}


def _classes(entries: list[Entry], test_set: set[Path]) -> tuple[str, ...]:
    """Return the class names in natural order; each must have two files, and one of them to train on."""
    counts = Counter(entry.label for entry in entries)
    classes = tuple(sorted(counts, key=_natural))
    if len(classes) == 1:
        raise UsageError(f"all files are of one class ({classes[0]}), a classifier needs two: check the labels' source")
    trained = {entry.label for entry in entries if entry.path not in test_set}
    for name in classes:
        if counts[name] == 1:
            raise UsageError(f"class {name} has one usable file and needs two (train, test): add a file")
        if name not in trained:
            raise UsageError(f"every file of class {name} is in the test set: leave some to train on")
    return classes

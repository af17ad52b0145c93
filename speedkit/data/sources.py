"""Where the audio is: a folder of class-named subfolders, a CSV of paths and labels, or a file-name pattern."""

import csv
import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import soundfile

from speedkit.data.decode import reason
from speedkit.data.labels import Entry, natural, read_labels
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic

EXTENSIONS = (".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff")
TEST_SHARE = 0.2
BAD_SHARE = 0.05  # more bad files than this, and the data set itself is at fault: an error


@dataclass(frozen=True)
class Item:
    """One clip: its file, its class index, its length in seconds and its sample rate."""

    path: str
    label: int
    duration_s: float
    sample_rate_hz: int


@dataclass(frozen=True)
class Found:
    """What `find_items` found; `quarantined` holds (path, why), `ignored` counts files no label or split claims."""

    train: tuple[Item, ...]
    test: tuple[Item, ...]
    classes: tuple[str, ...]
    quarantined: tuple[tuple[str, str], ...] = ()
    ignored: int = 0


def find_items(
    data_dir: str | Path,
    *,
    labels: str | Path | None = None,
    label_pattern: str | None = None,
    test_pattern: str | None = None,
    seed: int = 0,
) -> Found:
    """Return the training and test clips under `data_dir`, sorted by path with numbers in their natural order.

    Labels come from the CSV `labels`, from group 1 of `label_pattern` in the file name, or from the names of the
    subfolders of `data_dir`. The test set is what `test_pattern` finds in the file name, else the CSV's `split` or
    `fold` column (the highest fold, as one round of cross-validation holds it out), else a fifth of each class by
    a hash of seed and name: a file stays on its side when other classes grow.
    Raises UsageError for a source that cannot be used as asked, SpeedkitError when over 5 % of the files are bad.
    """
    root = Path(data_dir)
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise UsageError(f"data folder {root} {what}: name the folder of your recordings with --data-dir")
    if labels is not None and label_pattern is not None:
        raise UsageError("--labels and --label-pattern both name the labels: give one of the two")
    if labels is not None:
        entries, bad, ignored = read_labels(root, Path(labels), with_split=test_pattern is None)
    elif label_pattern is not None:
        entries, bad, ignored = _from_names(root, label_pattern)
    else:
        entries, bad, ignored = _from_folders(root)
    if test_pattern is not None:
        entries = _split_by_pattern(entries, test_pattern)
    entries = sorted(entries, key=lambda entry: natural(str(entry.path)))
    considered = len(entries) + len(bad)
    with ThreadPoolExecutor(8) as pool:  # libsndfile works outside Python's lock, and disks like several requests
        headers = list(pool.map(lambda entry: _header(entry.path), entries))
    scanned = list(zip(entries, headers, strict=True))
    bad += [(str(entry.path), header) for entry, header in scanned if isinstance(header, str)]
    _refuse_if_too_bad(bad, considered)
    good = [(entry, header) for entry, header in scanned if not isinstance(header, str)]
    classes = _classes([entry for entry, _ in good], labels is None and label_pattern is None)
    held_out = _held_out([entry for entry, _ in good], root, seed)
    train: list[Item] = []
    test: list[Item] = []
    for entry, (duration_s, rate_hz) in good:
        item = Item(str(entry.path), classes.index(entry.label), duration_s, rate_hz)
        (test if entry.path in held_out else train).append(item)
    _refuse_untrained(train, classes)
    return Found(tuple(train), tuple(test), classes, tuple(bad), ignored)


def write_quarantine(path_csv: str | Path, rows: Iterable[tuple[str, str]]) -> None:
    """Write the (path, why) of every file left out to a CSV with the columns path and why, atomically."""
    with atomic(path_csv) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("path", "why"))
        writer.writerows(rows)


def _audio_files(folder: Path) -> Iterator[Path]:
    """Yield the audio files below `folder`, hidden files and folders left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield Path(parent) / name


def _from_folders(root: Path) -> tuple[list[Entry], list, int]:
    """Return the files of each subfolder, labelled by the subfolder's name."""
    entries, loose = [], 0
    for path in _audio_files(root):
        parts = path.relative_to(root).parts
        if len(parts) > 1:
            entries.append(Entry(path, parts[0]))
        else:
            loose += 1
    if not entries and loose:
        raise UsageError(
            f"data folder {root} holds {loose} audio files but no class-named subfolders: sort them into subfolders, "
            "or say where the labels are with --label-pattern or --labels"
        )
    if not entries:
        raise _no_audio(root)
    return entries, [], loose


def _from_names(root: Path, label_pattern: str) -> tuple[list[Entry], list, int]:
    """Return the files whose name matches, labelled by group 1; the others are counted."""
    pattern = _compiled(label_pattern, "--label-pattern")
    if pattern.groups < 1:
        raise UsageError(
            f"--label-pattern {label_pattern!r} has no group: put the part of the file name that is the label in "
            r"parentheses, as in '^(\d)_'"
        )
    paths = list(_audio_files(root))
    if not paths:
        raise _no_audio(root)
    matches = [(path, pattern.search(path.name)) for path in paths]
    entries = [Entry(path, match[1]) for path, match in matches if match and match[1]]
    if not entries:
        raise UsageError(
            f"--label-pattern {label_pattern!r} matches none of the {len(paths)} audio files in {root} "
            f"(the first is {min(path.name for path in paths)}): correct the pattern"
        )
    return entries, [], len(paths) - len(entries)


def _split_by_pattern(entries: list[Entry], test_pattern: str) -> list[Entry]:
    """Return the entries, those whose file name the pattern is found in as the test set."""
    pattern = _compiled(test_pattern, "--test-pattern")
    split = [Entry(e.path, e.label, "test" if pattern.search(e.path.name) else "train") for e in entries]
    matched = sum(entry.split == "test" for entry in split)
    if matched in (0, len(split)):
        amount, left = ("none", "test on") if matched == 0 else ("every one", "train on")
        raise UsageError(
            f"--test-pattern {test_pattern!r} matches {amount} of the {len(split)} files, which leaves nothing to "
            f"{left}: correct the pattern"
        )
    return split


def _compiled(pattern: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{option} {pattern!r} is not a regular expression: {error}") from error


def _header(path: Path) -> tuple[float, int] | str:
    """Return (duration in seconds, sample rate in Hz) from the file's header, or why it cannot be used."""
    try:
        if path.stat().st_size == 0:
            return "the file is empty (0 bytes)"
        info = soundfile.info(str(path))
    except (soundfile.SoundFileError, RuntimeError, OSError) as error:
        return reason(error)
    return (info.frames / info.samplerate, info.samplerate) if info.frames > 0 else "it holds no samples"


def _refuse_if_too_bad(bad: list[tuple[str, str]], considered: int) -> None:
    if len(bad) > BAD_SHARE * considered:
        first = "; ".join(f"{path}: {why}" for path, why in bad[:3])
        raise SpeedkitError(
            f"{len(bad)} of {considered} files cannot be used, more than {BAD_SHARE:.0%} ({first}): "
            "repair or remove them"
        )


def _classes(entries: list[Entry], by_folder: bool) -> tuple[str, ...]:
    """Return the class names in natural order; each must have two files, one to learn from and one to be tested on."""
    counts = Counter(entry.label for entry in entries)
    classes = tuple(sorted(counts, key=natural))
    if len(classes) == 1:
        hint = "check where the labels are taken from"
        if by_folder:
            hint = "give each a subfolder, or say where the labels are with --label-pattern or --labels"
        raise UsageError(f"all {len(entries)} files are of one class ({classes[0]}), a classifier needs two: {hint}")
    alone = [name for name in classes if counts[name] == 1]
    if alone:
        names = ", ".join(alone[:5])
        raise UsageError(
            f"class {names} has one usable file only: a class needs two, one to train on and one to test on, "
            "so add a file or remove the class"
        )
    return classes


def _held_out(entries: list[Entry], root: Path, seed: int) -> set[Path]:
    """Return the paths of the test set."""
    if any(entry.split for entry in entries):
        return {entry.path for entry in entries if entry.split == "test"}
    by_class = defaultdict(list)
    for entry in entries:
        name = entry.path.relative_to(root) if entry.path.is_relative_to(root) else entry.path
        key = hashlib.blake2b(f"{seed}:{name.as_posix()}".encode(), digest_size=8).digest()
        by_class[entry.label].append((key, entry.path))
    return {path for keyed in by_class.values() for _, path in sorted(keyed)[: max(1, round(TEST_SHARE * len(keyed)))]}


def _refuse_untrained(train: list[Item], classes: tuple[str, ...]) -> None:
    trained = {item.label for item in train}
    missing = [name for index, name in enumerate(classes) if index not in trained]
    if missing:
        raise UsageError(
            f"every file of class {', '.join(missing[:5])} is in the test set: leave some to train on (--test-pattern, "
            "or the table's split or fold column)"
        )


def _no_audio(root: Path) -> UsageError:
    kinds = ", ".join(extension[1:] for extension in EXTENSIONS)
    return UsageError(
        f"data folder {root} holds no audio files ({kinds}): name the folder of your recordings with --data-dir"
    )

"""A CSV of paths and labels: which column is which, where the files are, and what it says about the test set."""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speedkit.errors import UsageError

PATH_COLUMNS = ("path", "file", "filename", "file_name")
LABEL_COLUMNS = ("label", "category", "class", "class_name", "target")
SPLIT_COLUMNS = ("split", "subset")
FOLD_COLUMNS = ("fold",)
TEST_SPLITS = ("test", "testing", "eval", "evaluation")
VALIDATION_SPLITS = ("val", "valid", "validation", "dev")


@dataclass(frozen=True)
class Entry:
    """A labelled file before its header was read; `split` is train, test, or empty where nothing says."""

    path: Path
    label: str
    split: str = ""


def natural(text: str) -> list:
    """Return a sort key in which clip2 comes before clip10."""
    parts = re.split(r"([0-9]+)", text)  # every second part is a number
    return [(0, int(part), "") if at % 2 else (1, 0, part) for at, part in enumerate(parts)]


def read_labels(root: Path, table: Path, with_split: bool) -> tuple[list[Entry], list[tuple[str, str]], int]:
    """Return (rows whose file exists, (path, why) of the others, how many rows belong to no split).

    Paths are looked up from `root`, the table's folder, and a folder `audio` in either or beside the table's.
    `with_split` reads the table's `split` or `fold` column. Raises UsageError when the table lacks what is needed.
    """
    rows, columns = _read_table(table)
    path_column = _column(columns, PATH_COLUMNS, table, "path")
    label_columns = [columns[name] for name in LABEL_COLUMNS if name in columns]
    _column(columns, LABEL_COLUMNS, table, "label")
    # A column of names says more than one of numbers (ESC-50 has both: category and target).
    numeric = {name: all(row[name].isdigit() for row in rows) for name in label_columns}
    label_column = min(label_columns, key=lambda name: numeric[name])
    split_of = _split_rule(rows, columns, table) if with_split else _unsaid
    entries, bad, ignored = [], [], 0
    for number, row in enumerate(rows, start=2):
        name, label, split = row[path_column], row[label_column], split_of(row)
        path = _looked_up(name, root, table) if name else None
        if split == "neither":
            ignored += 1
        elif path is None:
            bad.append((name, "there is no such file") if name else (f"{table} line {number}", "its path is empty"))
        elif not label:
            bad.append((str(path), f"its label is empty ({table.name} line {number})"))
        else:
            entries.append(Entry(path, label, split))
    if not entries and bad:
        raise UsageError(
            f"none of the {len(bad)} files that {table} names is found (the first is {bad[0][0]}): name the folder "
            "that their paths start from with --data-dir"
        )
    return entries, bad, ignored


def _read_table(table: Path) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the CSV's rows, and its column names by their lower-case form."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as stream:
            head = stream.readline()
            stream.seek(0)
            reader = csv.DictReader(stream, delimiter=max(",;\t", key=head.count))
            rows = [{str(key): (value or "").strip() for key, value in row.items() if key} for row in reader]
            names = [name.strip() for name in reader.fieldnames or ()]
    except FileNotFoundError as error:
        raise UsageError(f"the label table {table} does not exist: name an existing CSV file with --labels") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"the label table {table} cannot be read as CSV ({error}): save it as UTF-8 text") from error
    if not rows:
        raise UsageError(f"the label table {table} holds no rows: it needs one row per recording below its header")
    return [{key.strip(): value for key, value in row.items()} for row in rows], {name.lower(): name for name in names}


def _column(columns: dict[str, str], known: tuple[str, ...], table: Path, what: str) -> str:
    """Return the first of the `known` columns that the table has."""
    for name in known:
        if name in columns:
            return columns[name]
    raise UsageError(
        f"the label table {table} has no {what} column: name one of its columns ({', '.join(columns.values())}) "
        f"{' or '.join(known)}"
    )


def _split_rule(rows: list[dict[str, str]], columns: dict[str, str], table: Path) -> Callable[[dict[str, str]], str]:
    """Return a function from a row to train, test, neither, or empty where the table does not say."""
    split = next((columns[name] for name in SPLIT_COLUMNS if name in columns), None)
    if split is not None:
        values = {row[split].lower() for row in rows}
        # With a validation and a test part, the test part is the test set and the validation part is left alone.
        for_test = values & set(TEST_SPLITS) or values & set(VALIDATION_SPLITS)
        unused = set(VALIDATION_SPLITS) - for_test
        if not for_test:
            raise UsageError(
                f"column {split} of {table} marks no test set (it holds {', '.join(sorted(values)[:5])}): "
                "write test in the rows to test on, or give --test-pattern"
            )
        named = dict.fromkeys(for_test, "test") | dict.fromkeys(unused, "neither")
        return lambda row: named.get(row[split].lower(), "train")
    fold = next((columns[name] for name in FOLD_COLUMNS if name in columns), None)
    if fold is None:
        return _unsaid
    folds = sorted({row[fold] for row in rows}, key=natural)
    if len(folds) < 2:
        raise UsageError(f"column {fold} of {table} holds one fold only ({folds[0]}): add one, or give --test-pattern")
    return lambda row: "test" if row[fold] == folds[-1] else "train"


def _unsaid(row: dict[str, str]) -> str:
    return ""


def _looked_up(name: str, root: Path, table: Path) -> Path | None:
    """Return the file that a table's row means, tried from the data folder, the table's own, and `audio` near both."""
    for folder in (root, table.parent, root / "audio", table.parent / "audio", table.parent.parent / "audio"):
        if (folder / name).is_file():  # an absolute name stands for itself
            return folder / name
    return None

"""Files that are either whole or absent: atomic writes, JSON without NaN, and claiming an output folder."""

import contextlib
import csv
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from speedkit.errors import UsageError


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced to disk and renamed to `path`, else removed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # writing does not say where
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` to `path` atomically, as JSON; a number that is not finite becomes null."""
    write_text(path, json.dumps(finite(value), indent=1) + "\n")


def read_json(path: str | Path) -> Any:
    """Return what the JSON file at `path` holds."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def finite(value: Any) -> Any:
    """Return `value` as JSON holds it: None for NaN and infinity, lists for tuples, texts for keys."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def write_quarantine(path_csv: str | Path, bad: Mapping[str, str]) -> None:
    """Write path -> why of every file left out to a CSV with the columns path and why, atomically."""
    with (
        atomic(path_csv) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
    ):
        csv.writer(stream).writerows([("path", "why"), *sorted(bad.items())])


def claim_folder(folder: str | Path, kind: str, resume: bool = False) -> Path:
    """Return `folder`, made and marked as holding one run of `kind`.

    Raises UsageError when it cannot be written, or holds anything but a run of `kind` that `resume` goes on with.
    """
    folder = Path(folder)
    marker = folder / ".speedkit-run"
    content = "files that speedkit did not write"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if marker.exists() and not marker.read_text():  # as a full disk has left it
            marker.unlink()
        for left in folder.glob("..speedkit-run.*.tmp"):  # by a run that was killed
            left.unlink()
        if marker.exists():
            content = f"a {marker.read_text()} run"
        if any(folder.iterdir()) and not (resume and content == f"a {kind} run"):
            hint = "name another by out=, or go on with it by resume=True"
            raise UsageError(f"output folder {folder} already holds {content}: {hint}")
        write_text(marker, kind)
        for left in folder.glob(".checkpoint.pt.*.tmp"):
            left.unlink()
    except OSError as error:
        raise UsageError(f"output folder {folder} cannot be written ({error.strerror})") from error
    return folder


def folder_held(folder: Path) -> contextlib.AbstractContextManager:
    """Keep other runs out of `folder` until the context ends. Raises UsageError where another one goes on in it."""
    try:
        return FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another run goes on in {folder}: wait for its end, or name another by out=") from None

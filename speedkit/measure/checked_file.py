"""JSON files with a checksum: one that is not as it was written is set aside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from speedkit.files import finite, read_json, write_json


def write_checked(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as `write_json` does, with a checksum by which `read_checked` knows it again."""
    write_json(path, value | {"checksum": checksum(finite(value))})


def read_checked(path: Path, say: Callable[[str], object]) -> dict[str, Any] | None:
    """Return what `write_checked` has written; None without it. A file that is not as it was written is set aside."""
    value = read_or_none(path)
    if isinstance(value, dict) and value.pop("checksum", None) == checksum(value):
        return value
    if path.exists():
        set_aside(path, say)
    return None


def checksum(value: Any) -> str:
    """Return the hash of what `write_json` makes of a value that is as JSON holds it."""
    return xxh3_64_hexdigest(json.dumps(value).encode())


def set_aside(path: Path, say: Callable[[str], object]) -> None:
    """Rename the file at `path`, which is not as it was written, and `say` so."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    say(f"{path} is not as this version of speedkit wrote it: it is kept as {aside.name}, and made anew")


def read_or_none(path: Path) -> Any:
    """Return what the JSON file at `path` holds; None where it is not there, or is no JSON."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError, RecursionError):
        return None

"""The shape of a record, and the checks that keep anything else out of it."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any

from speedkit import files
from speedkit.errors import SpeedkitError, UsageError

SCHEMA = 1
PROFILES = ("smoke", "cpu", "full")
CLAIM_VERDICTS = ("confirmed", "smaller", "larger", "wrong", "needs_gpu")
VERDICTS = ("passed", "failed", *CLAIM_VERDICTS)
KEYS: dict[str, Any] = {
    "schema": int, "notebook": str, "created": str, "profile": str, "parameters": dict, "hardware": dict,
    "versions": dict, "commit": str | None, "dirty": bool | None, "modules": list, "code_sha256": str | None,
    "plans": dict, "fallbacks": list, "measurements": list, "tables": dict, "verdicts": list,
    "power": list | None, "clocks": list | None, "energy_j": float | None,
}  # fmt: skip
ROW_KEYS = {  # of what a list in the record holds
    "fallbacks": {"plan", "field", "asked", "got", "why"},
    "measurements": {"name", "a", "b", "seconds_a", "seconds_b", "ratio", "low", "high", "noise_floor"},
    "verdicts": {"check", "claim", "verdict"},
    "rungs": {"rung", "predicted_low", "predicted_high", "ratio", "low", "high", "parity", "kept", "why"},
}


def validate_record(record: Any) -> list[str]:
    """Return what is wrong with a record, one sentence each; an empty list means that it is whole."""
    if not isinstance(record, dict):
        return ["a record is a JSON object"]
    missing = [f"{key} is missing" for key in KEYS if key not in record]
    wrong = [f"{key} has the wrong type ({type(record[key]).__name__})" for key, kind in KEYS.items()
             if key in record and not isinstance(record[key], kind)]  # fmt: skip
    # What the record's parts hold can be looked at only when they are all there.
    return [*missing, *wrong, *_not_finite(record, "")] or list(_problems(record))


def _problems(record: dict[str, Any]) -> Iterator[str]:
    if record["schema"] != SCHEMA:
        yield f"schema is {record['schema']}, this version reads {SCHEMA}"
    if record["profile"] not in PROFILES:
        yield f"profile is {record['profile']}, not one of {', '.join(PROFILES)}"
    try:
        datetime.fromisoformat(record["created"])
    except ValueError:
        yield f"created is {record['created']}, not a time as ISO 8601 writes it"
    for name, keys in ROW_KEYS.items():
        for index, row in enumerate(record.get(name, [])):
            where = f"{name}[{index}]"
            if not isinstance(row, dict) or keys - row.keys():
                yield f"{where} needs {', '.join(sorted(keys))}"
            elif name == "measurements":
                yield from (f"{where} ({row['name']}) {problem}" for problem in _measurement_problems(row))
            elif name == "verdicts" and row["verdict"] not in VERDICTS:
                yield f"{where} is {row['verdict']}, not one of {', '.join(VERDICTS)}"
    for name, rows in record["tables"].items():
        if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            yield f"tables.{name} is not a list of rows"


def _measurement_problems(row: Mapping[str, Any]) -> Iterator[str]:
    times, bounds, floor = [row["seconds_a"], row["seconds_b"]], [row["low"], row["ratio"], row["high"]], row["noise_floor"]
    if not all(isinstance(seconds, list) and seconds and all(map(_positive, seconds)) for seconds in times):
        yield "needs seconds_a and seconds_b: the raw seconds of each window"
    elif len(times[0]) != len(times[1]):
        yield "has windows of A without one of B: they come in pairs"
    if not all(map(_positive, bounds)) or bounds != sorted(bounds):
        yield "needs 0 < low <= ratio <= high"
    if floor is not None and not (_positive(floor) and floor >= 1):
        yield "has a noise_floor below 1"


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _not_finite(value: Any, where: str) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{where} is not a finite number"]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in _not_finite(item, f"{where}.{key}".lstrip("."))]


def load_record(path: str | Path) -> dict[str, Any]:
    """Return the record in a file. Raises SpeedkitError when it is not a whole record."""
    try:
        record = files.read_json(path)
        problems = validate_record(record)
    except (OSError, ValueError) as error:
        problems = [f"it cannot be read, {error}"]
    if problems:
        raise SpeedkitError(f"record {Path(path).name} is not valid ({problems[0]}): publish its notebook again")
    return record


def as_measurement(comparison: Any) -> dict[str, Any]:
    """Return a comparison as a plain dict. Raises UsageError when it lacks something or holds what is no time."""
    found = plain(comparison.as_measurement() if hasattr(comparison, "as_measurement") else comparison)
    missing = ROW_KEYS["measurements"] - found.keys()
    if problems := [f"lacks {', '.join(sorted(missing))}"] if missing else list(_measurement_problems(found)):
        raise UsageError(f'measurement "{found.get("name", "")}" {"; ".join(problems)}')
    return found


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: dataclasses as dicts, arrays as lists, what has a name by its name.

    Of an absolute path its last name stays: where it lay is nobody else's business.
    """
    if isinstance(value, str | Path):
        return Path(value).name if os.path.isabs(value) else str(value)
    if isinstance(value, int | float | NoneType):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and PyTorch numbers and arrays
        return plain(value.tolist())
    named = getattr(value, "name", None) or getattr(value, "__name__", None)
    if dataclasses.is_dataclass(value) and not named:
        return plain(vars(value))
    return named or str(value)

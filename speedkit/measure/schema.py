"""The shape of a record, and the checks that keep anything else out of it."""

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.errors import SpeedkitError, UsageError

SCHEMA = 1
PROFILES = ("smoke", "cpu", "full")
CLAIM_VERDICTS = ("confirmed", "smaller", "larger", "wrong", "needs_gpu")
VERDICTS = ("passed", "failed", *CLAIM_VERDICTS)
KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int, "notebook": str, "created": str, "profile": str, "parameters": dict, "hardware": dict,
    "versions": dict, "commit": (str, type(None)), "dirty": (bool, type(None)), "modules": list,
    "code_sha256": (str, type(None)), "plans": dict, "fallbacks": list,
    "measurements": list, "tables": dict, "verdicts": list,
    "power": (list, type(None)), "clocks": (list, type(None)), "energy_j": (int, float, type(None)),
}
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
    problems = [f"{key} is missing" for key in KEYS if key not in record]
    problems += [f"{key} has the wrong type ({type(record[key]).__name__})" for key, kind in KEYS.items()
                 if key in record and not isinstance(record[key], kind)]
    problems += [f"{where} is not a finite number" for where in _not_finite(record, "")]
    if problems:
        return problems
    if record["schema"] != SCHEMA:
        problems.append(f"schema is {record['schema']}, this version reads {SCHEMA}")
    if record["profile"] not in PROFILES:
        problems.append(f"profile is {record['profile']}, not one of {', '.join(PROFILES)}")
    try:
        datetime.fromisoformat(record["created"])
    except ValueError:
        problems.append(f"created is {record['created']}, not a time as ISO 8601 writes it")
    for name, keys in ROW_KEYS.items():
        for index, row in enumerate(record.get(name, [])):
            if not isinstance(row, dict) or keys - row.keys():
                problems.append(f"{name}[{index}] needs {', '.join(sorted(keys))}")
            elif name == "measurements":
                problems += [f"measurements[{index}] ({row['name']}) {problem}" for problem in _problems_of(row)]
            elif name == "verdicts" and row["verdict"] not in VERDICTS:
                problems.append(f"verdicts[{index}] is {row['verdict']}, not one of {', '.join(VERDICTS)}")
    problems += [f"tables.{name} is not a list of rows" for name, rows in record["tables"].items()
                 if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows))]
    return problems


def load_record(path: str | Path) -> dict[str, Any]:
    """Return the record in a file. Raises SpeedkitError when it is not a whole record."""
    try:
        record = files.read_json(path)
    except (OSError, ValueError) as error:
        raise SpeedkitError(f"record {Path(path).name} cannot be read ({error}): publish its notebook again") from error
    if problems := validate_record(record):
        raise SpeedkitError(f"record {Path(path).name} is not valid ({problems[0]}): publish its notebook again")
    return record


def as_measurement(comparison: Any) -> dict[str, Any]:
    """Return a comparison as a plain dict. Raises UsageError when it lacks something or holds what is no time."""
    found = plain(comparison.as_measurement() if hasattr(comparison, "as_measurement") else comparison)
    missing = ROW_KEYS["measurements"] - found.keys()
    problems = [f"lacks {', '.join(sorted(missing))}"] if missing else _problems_of(found)
    if problems:
        raise UsageError(f'measurement "{found.get("name", "")}" {"; ".join(problems)}')
    return found


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: dataclasses as dicts, named things by name, the rest by its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(getattr(value, "name", None), str):  # a path, a workload: what it is called is enough
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy and PyTorch numbers and arrays
        return plain(value.tolist())
    return getattr(value, "__name__", None) or str(value)


def _problems_of(row: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("seconds_a", "seconds_b"):
        seconds = row[name]
        if not (isinstance(seconds, list) and seconds and all(_number(value) and value > 0 for value in seconds)):
            problems.append(f"{name} must hold the raw seconds of each window")
    if not problems and len(row["seconds_a"]) != len(row["seconds_b"]):
        problems.append("has windows of A without one of B: they come in pairs")
    numbers = [row["low"], row["ratio"], row["high"]]
    if not all(map(_number, numbers)) or not 0 < numbers[0] <= numbers[1] <= numbers[2]:
        problems.append("needs 0 < low <= ratio <= high")
    if row["noise_floor"] is not None and not (_number(row["noise_floor"]) and row["noise_floor"] >= 1):
        problems.append("has a noise_floor below 1")
    return problems


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_finite(value: Any, where: str) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [where]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in _not_finite(item, f"{where}.{key}".lstrip("."))]

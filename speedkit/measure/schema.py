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
    "power": list | None, "clocks": list | None, "energy_j": int | float | None,
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
    problems = [f"{key} has the wrong type ({type(record[key]).__name__})" if key in record else f"{key} is missing"
                for key, kind in KEYS.items() if not isinstance(record.get(key, ...), kind)]  # fmt: skip
    if problems := problems + _not_finite(record, ""):
        return problems
    if record["schema"] != SCHEMA:
        problems.append(f"schema is {record['schema']}, this version reads {SCHEMA}")
    try:
        datetime.fromisoformat(record["created"])
    except ValueError:
        problems.append(f"created is {record['created']}, not a time as ISO 8601 writes it")
    for name, keys in ROW_KEYS.items():
        for index, row in enumerate(record.get(name, [])):
            where = f"{name}[{index}]"
            if not isinstance(row, dict) or keys - row.keys():
                problems.append(f"{where} needs {', '.join(sorted(keys))}")
            elif name == "measurements":
                problems += [f"{where} ({row['name']}) {problem}" for problem in _measurement_problems(row)]
            elif name == "verdicts" and row["verdict"] not in VERDICTS:
                problems.append(f"{where} is {row['verdict']}, not one of {', '.join(VERDICTS)}")
    problems += [f"tables.{name} is not a list of rows" for name, rows in record["tables"].items()
                 if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows))]  # fmt: skip
    return problems


def _measurement_problems(row: Mapping[str, Any]) -> Iterator[str]:
    a_s, b_s, bounds = row["seconds_a"], row["seconds_b"], [row["low"], row["ratio"], row["high"]]
    if not (isinstance(a_s, list) and isinstance(b_s, list) and len(a_s) == len(b_s) > 0 and _positive(a_s + b_s)):
        yield "needs the raw seconds of each window in seconds_a and seconds_b; they come in pairs"
    if not _positive(bounds) or bounds != sorted(bounds):
        yield "needs 0 < low <= ratio <= high"
    if row["noise_floor"] is not None and not (_positive([row["noise_floor"]]) and row["noise_floor"] >= 1):
        yield "has a noise_floor below 1"


def _positive(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) and 0 < value < math.inf for value in values)


def _not_finite(value: Any, where: str) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{where} is not a finite number"]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in _not_finite(item, f"{where}.{key}".lstrip("."))]


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
    if problems := [f"lacks {', '.join(sorted(missing))}"] if missing else list(_measurement_problems(found)):
        raise UsageError(f'measurement "{found.get("name", "")}" {"; ".join(problems)}')
    return found


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: dataclasses as dicts, arrays as lists, what has a name by its name."""
    if isinstance(value, str | Path):  # where a path lay is nobody else's business
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

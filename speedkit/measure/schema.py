"""The shape of a record (record.schema.json, a JSON Schema), and the checks that keep anything else out of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from pydantic_core import to_jsonable_python

from speedkit import files
from speedkit.errors import SpeedkitError

SCHEMA = files.read_json(Path(__file__).with_name("record.schema.json"))
KEYS = SCHEMA["required"]
PROFILES = SCHEMA["properties"]["profile"]["enum"]


def validate_record(record: Any) -> list[str]:
    """Return what is wrong with a record, one sentence each; an empty list means that it is whole."""
    errors = Draft202012Validator(SCHEMA).iter_errors(record)
    return [f"{error.json_path.lstrip('$.')}: {error.message}".lstrip(": ") for error in errors]


def load_record(path: str | Path) -> dict[str, Any]:
    """Return the record in a file. Raises SpeedkitError when it is not a whole record."""
    try:
        record = files.read_json(path)
        problems = validate_record(record)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    if problems:
        raise SpeedkitError(f"record {Path(path).name} is not valid ({problems[0]}): publish its notebook again")
    return record


def published(notebook: Path) -> dict[Path, dict[str, Any]]:
    """Return the records of `notebook` that machines left beside it, by file: GPUs first, the plain workload first.

    Raises SpeedkitError when one is not whole.
    """
    paths = sorted(notebook.parent.glob(f"records/*/{notebook.stem}*.json"), key=lambda path: path.stem)
    records = {path: load_record(path) for path in paths if path.stem.partition("-")[0] == notebook.stem}
    return dict(sorted(records.items(), key=lambda item: not item[1]["hardware"].get("gpu")))


def machine(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells the machine of a record from others."""
    return tuple(record["hardware"].get(key) for key in ("gpu", "cpu", "cores"))


def jsonable(value: Any) -> Any:
    """Return `value` as JSON holds it: arrays as lists, dataclasses as dicts, None for what is not finite."""
    return to_jsonable_python(
        value, inf_nan_mode="null", fallback=lambda other: other.tolist() if hasattr(other, "tolist") else str(other)
    )

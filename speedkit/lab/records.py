"""Records as they are kept: the shape that pydantic checks, and those that machines left beside the notebooks."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from speedkit import files
from speedkit.errors import SpeedkitError

SCALES = ("smoke", "cpu", "gpu")
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[list[Positive], Field(min_length=1)]  # one per turn; those of a and of b come in pairs
Json = dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Measurement:
    """Two things measured in turns: `ratio` is time a / time b, with the ends of its 99 % interval."""

    name: str
    a: str
    b: str
    seconds_a: Seconds
    seconds_b: Seconds
    ratio: Positive
    low: Positive
    high: Positive
    decision: Literal["faster", "slower", "not worth it", "undecided"] | None = None


@dataclasses.dataclass(kw_only=True)
class Check:
    """What a notebook checks of its own results, and whether it holds."""

    check: str
    passed: bool


@dataclasses.dataclass(kw_only=True)
class Machine:
    """What the README says of `hardware`; there is more in it."""

    cores: int
    gpu: str | None = None
    cpu: str | None = None


@dataclasses.dataclass(kw_only=True)
class Versions:
    """What the page of records says of `versions`; there are more."""

    speedkit: str
    torch: str


@dataclasses.dataclass(kw_only=True)
class Record:
    """What one run of a notebook leaves behind; a tuning adds fields of its own.

    Times in seconds, memory in bytes, rates per second, as the names say.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    notebook: str  # its name without .ipynb
    scale: Literal["smoke", "cpu", "gpu"]
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")]  # ISO 8601, in UTC
    parameters: Json
    hardware: Machine
    versions: Versions
    # A word with which git does as with a revision, and not as with an option.
    commit: Annotated[str, Field(pattern=r"^\w[\w./-]*$")] | None  # None outside a checkout, without SPEEDKIT_COMMIT
    dirty: bool | None  # whether the package differed from the commit
    plans: dict[str, Json]  # asked and effective, by name
    fallbacks: list[Json]
    measurements: list[Measurement]
    tables: dict[str, list[Json]]
    checks: list[Check]
    seconds: float | None = None


FIELDS = tuple(field.name for field in dataclasses.fields(Record))
SHAPE = TypeAdapter(Record)


def validate_record(record: Any) -> list[str]:
    """Return what is wrong with a record, one sentence each; an empty list means that it is whole."""
    try:
        SHAPE.validate_json(json.dumps(record))  # of 200 levels at most
    except RecursionError:
        return ["it is nested too deeply"]
    except ValidationError as error:
        return [f"{'.'.join(map(str, row['loc']))}: {row['msg']}".lstrip(": ") for row in error.errors()]
    return []


def load_record(path: str | Path) -> Json:
    """Return the record in a file. Raises SpeedkitError when it is not a whole record."""
    try:
        record = files.read_json(path)
        problems = validate_record(record)
    except (OSError, ValueError, RecursionError) as error:
        problems = [str(error)]
    if problems:
        raise SpeedkitError(f"record {Path(path).name} is not valid ({problems[0]}): publish its notebook again")
    return record


def published(notebook: Path) -> dict[Path, Json]:
    """Return the records of `notebook` that machines left beside it, by file: GPUs first, the plain workload first.

    Raises SpeedkitError when one is not whole.
    """
    paths = sorted(notebook.parent.glob(f"records/*/{notebook.stem}*.json"), key=lambda path: path.stem)
    records = {path: load_record(path) for path in paths if path.stem.partition("-")[0] == notebook.stem}
    return dict(sorted(records.items(), key=lambda item: not item[1]["hardware"].get("gpu")))


def jsonable(value: Any) -> Any:
    """Return `value` as JSON holds it: arrays as lists, dataclasses as dicts, None for what is not finite."""
    return to_jsonable_python(
        value, inf_nan_mode="null", fallback=lambda other: other.tolist() if hasattr(other, "tolist") else str(other)
    )

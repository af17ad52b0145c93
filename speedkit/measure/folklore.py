"""What the guides promise, claim by claim, beside what the records of this repository say, device by device."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedkit.errors import SpeedkitError
from speedkit.measure.provenance import is_current
from speedkit.measure.record import widened
from speedkit.measure.schema import load_record

NOT_MEASURED = "not measured yet"
ANSWERS = ("confirmed", "smaller", "larger", "contradicted", "unresolved")
WORDS = {word: word for word in ANSWERS} | {"needs_gpu": "needs a GPU"}
INTERVAL = ("ratio", "low", "high")
Row = Mapping[str, Any]


class Reading(NamedTuple):
    """A record, whether its notebook and the modules this measures are still what made it, and its file."""

    record: Row
    current: bool
    file: str = ""  # device/notebook or device/notebook-workload; of a run that goes on, none


def gather(folder: Path, but: Row | None = None) -> tuple[list[Reading], list[str]]:
    """Return the records under `folder`/records, by notebook, and a sentence for each that cannot be read.

    What the machine and the notebook of the record `but` left before is not among them: that run replaces it.
    """
    readings, problems = [], []
    for path in sorted(folder.glob("records/*/*.json"), key=lambda path: (path.stem, path.parent)):
        try:
            record = load_record(path)
        except SpeedkitError as error:
            problems.append(f"{path.parent.name}: {error}")
            continue
        if but is None or _origin(record) != _origin(but):
            current = is_current(record, folder / f"{record['notebook']}.ipynb")
            readings.append(Reading(record, current, f"{path.parent.name}/{path.stem}"))
    return readings, problems


def _origin(record: Row) -> tuple[Any, ...]:
    return record["notebook"], *(record["hardware"].get(key) for key in ("gpu", "cpu", "cores"))


def answers(
    claims: Mapping[str, Mapping[str, str]],
    readings: Iterable[Reading],
    name_of: Callable[[Row], str],
) -> list[dict[str, Any]]:
    """Return a row for each claim and each record that answers it, GPUs first; one that none answers has a row too.

    `name_of` names the device of a record. Ratios have the 99 % interval of the measurement that answered the claim;
    shares and memory have a `value`, in per cent. Raises SpeedkitError for an answer to what nobody claimed.
    """
    found: dict[str, list[dict[str, Any]]] = {claim: [] for claim in claims}
    for record, current, file in sorted(readings, key=lambda reading: not reading.record["hardware"].get("gpu")):
        workload = file.rpartition("/")[2].partition("-")[2]
        where = {
            "device": name_of(record),
            "notebook": record["notebook"],
            "workload": workload,
            "created": record["created"][:10],
            "stale": not current,
        }
        measurements = {row["name"]: row for row in record["measurements"]}
        for row in (row for row in record["verdicts"] if row["claim"] is not None):
            if row["claim"] not in found:
                raise SpeedkitError(
                    f"the record of {record['notebook']} from {where['device']} answers "
                    f'"{row["claim"]}", which notebooks/claims.csv lacks: publish the notebook again'
                )
            verdict = {"verdict": WORDS[row["verdict"]], "evidence": row["check"]}
            figures = measurements.get(row.get("measurement"), {})
            interval = {key: figures.get(key) for key in INTERVAL}
            found[row["claim"]].append(where | verdict | interval | {"value": row.get("value")})
    nothing = dict.fromkeys(("device", "notebook", "workload", "created"), "") | {"stale": False}
    unanswered = nothing | {"verdict": NOT_MEASURED, "evidence": ""} | dict.fromkeys((*INTERVAL, "value"))
    return [_promise(claim) | row for name, claim in claims.items() for row in found[name] or [unanswered]]


def _promise(claim: Mapping[str, str]) -> dict[str, Any]:
    """Return what was promised, and by whom: as a range where there were figures."""
    low, high = (None if end in ("", "linear") else float(end) for end in (claim["low"], claim["high"]))
    if claim["metric"] == "speedup" and low is not None and high is not None:
        low, high = widened(low, high)
    kept = {key: claim[key] for key in ("technique", "plan_field", "metric", "guide")}
    return {"claim": claim["id"], **kept, "promised_low": low, "promised_high": high}

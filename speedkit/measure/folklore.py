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

    def origin(record: Row) -> tuple[Any, ...]:
        return record["notebook"], *(record["hardware"].get(key) for key in ("gpu", "cpu", "cores"))

    readings, problems = [], []
    for path in sorted(folder.glob("records/*/*.json"), key=lambda path: (path.stem, path.parent)):
        try:
            record = load_record(path)
        except SpeedkitError as error:
            problems.append(f"{path.parent.name}: {error}")
            continue
        if but is None or origin(record) != origin(but):
            current = is_current(record, folder / f"{record['notebook']}.ipynb")
            readings.append(Reading(record, current, f"{path.parent.name}/{path.stem}"))
    return readings, problems


def answers(
    claims: Mapping[str, Mapping[str, str]],
    readings: Iterable[Reading],
    name_of: Callable[[Row], str],
) -> list[dict[str, Any]]:
    """Return a row for each claim and each record that answers it, GPUs first; one that none answers has a row too.

    `name_of` names the device of a record. Ratios have the 99 % interval of the measurement that answered the claim;
    shares and memory have a `value`, in per cent.
    """
    found: dict[str, list[dict[str, Any]]] = {claim: [] for claim in claims}
    for record, current, file in sorted(readings, key=lambda reading: not reading.record["hardware"].get("gpu")):
        where = {
            "device": name_of(record),
            "notebook": record["notebook"],
            "workload": file.rpartition("/")[2].partition("-")[2],
            "created": record["created"][:10],
            "stale": not current,
        }
        measurements = {row["name"]: row for row in record["measurements"]}
        for row in record["verdicts"]:
            if row["claim"] is None:
                continue
            verdict = {"verdict": WORDS[row["verdict"]], "evidence": row["check"]}
            figures = measurements.get(row.get("measurement"), {})
            interval = {key: figures.get(key) for key in INTERVAL}
            found[row["claim"]].append(where | verdict | interval | {"value": row.get("value")})
    nothing = dict.fromkeys(("device", "notebook", "workload", "created", "evidence"), "") | {"stale": False}
    unanswered = nothing | {"verdict": NOT_MEASURED} | dict.fromkeys((*INTERVAL, "value"))
    rows = []
    for name, claim in claims.items():
        promise = {"claim": name, **{key: claim[key] for key in ("technique", "plan_field", "metric", "guide")}}
        low, high = (None if end in ("", "linear") else float(end) for end in (claim["low"], claim["high"]))
        if claim["metric"] == "speedup" and low is not None and high is not None:
            low, high = widened(low, high)
        rows += [promise | {"promised_low": low, "promised_high": high} | row for row in found[name] or [unanswered]]
    return rows

"""What the guides promise, claim by claim, beside what the records of this repository say, device by device."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedkit.measure.provenance import is_current
from speedkit.measure.record import widened
from speedkit.measure.schema import machine, published

NOT_MEASURED = "not measured yet"
ANSWERS = ("confirmed", "smaller", "larger", "contradicted", "unresolved")
WORDS = {word: word for word in ANSWERS} | {"needs_gpu": "needs a GPU"}
FIGURES = ("ratio", "low", "high")
TEXTS = ("device", "notebook", "workload", "created", "evidence")
UNANSWERED = dict.fromkeys(TEXTS, "") | dict.fromkeys((*FIGURES, "value")) | {"stale": False, "verdict": NOT_MEASURED}
Row = Mapping[str, Any]


class Reading(NamedTuple):
    """A record, whether its notebook and the modules this measures are still what made it, and the climb's workload."""

    record: Row
    current: bool
    workload: str = ""


def gather(folder: Path, but: Row | None = None) -> list[Reading]:
    """Return the records of the notebooks in `folder`; without what the machine and notebook of `but` left before."""
    return [
        Reading(record, is_current(record, notebook), path.stem.partition("-")[2])
        for notebook in sorted(folder.glob("[0-9][0-9]_*.ipynb"))
        for path, record in published(notebook).items()
        if but is None or record["notebook"] != but["notebook"] or machine(record) != machine(but)
    ]


def answers(
    claims: Mapping[str, Mapping[str, str]], readings: Iterable[Reading], name_of: Callable[[Row], str]
) -> list[dict[str, Any]]:
    """Return a row for each claim and each record that answers it, GPUs first; one that none answers has a row too.

    `name_of` names the device of a record. Ratios have the 99 % interval of the measurement that answered the claim;
    shares and memory have a `value`, in per cent.
    """
    readings = sorted(readings, key=lambda reading: not reading.record["hardware"].get("gpu"))
    rows: list[dict[str, Any]] = []
    for name, claim in claims.items():
        low, high = (None if end in ("", "linear") else float(end) for end in (claim["low"], claim["high"]))
        if claim["metric"] == "speedup" and low is not None and high is not None:
            low, high = widened(low, high)
        promise: dict[str, Any] = {key: claim[key] for key in ("technique", "plan_field", "metric", "guide")}
        promise |= {"claim": name, "promised_low": low, "promised_high": high}
        measured = [
            promise | {"device": name_of(reading.record)} | _answer(reading, verdict)
            for reading in readings
            for verdict in reading.record["verdicts"]
            if verdict["claim"] == name
        ]
        rows += measured or [promise | UNANSWERED]
    return rows


def _answer(reading: Reading, verdict: Row) -> dict[str, Any]:
    record = reading.record
    figures: Row = next((row for row in record["measurements"] if row["name"] == verdict.get("measurement")), {})
    return {key: figures.get(key) for key in FIGURES} | {
        "notebook": record["notebook"],
        "workload": reading.workload,
        "created": record["created"][:10],
        "evidence": verdict["check"],
        "stale": not reading.current,
        "verdict": WORDS[verdict["verdict"]],
        "value": verdict.get("value"),
    }

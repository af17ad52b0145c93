"""What the guides promise, claim by claim (claims.csv), and how it fared in the records, device by device."""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedkit.lab.provenance import is_current
from speedkit.lab.records import published

ONE_FIGURE_TOLERANCE = 0.10  # a promise such as "1.9x" came from one run somewhere: read as 1.9 give or take this
NOT_MEASURED = "not measured yet"
NEEDS_GPU = "needs a GPU"
ANY_GAIN = (1.02, math.inf)  # what a promise without a figure is read as: what is worth it, as in comparisons
BY_QUALITY = {"as good": "confirmed", "worse": "contradicted"}
FIGURES = ("ratio", "low", "high")
TEXTS = ("device", "notebook", "created")
UNANSWERED = dict.fromkeys(TEXTS, "") | dict.fromkeys((*FIGURES, "value")) | {"stale": False, "verdict": NOT_MEASURED}
Row = Mapping[str, Any]


# ---- the rule ----


def read_claims() -> dict[str, dict[str, str]]:
    """Return the rows of claims.csv by id."""
    with Path(__file__).with_name("claims.csv").open(encoding="utf-8", newline="") as stream:
        return {row["id"]: row for row in csv.DictReader(stream)}


def widened(low: float, high: float) -> tuple[float, float]:
    """Return a promised range as it is read: one figure stands for itself and what lies near it."""
    spread = ONE_FIGURE_TOLERANCE if low == high else 0.0
    return low - spread * abs(low), high + spread * abs(high)


def answer(promise: tuple[float, float], measurement: Row) -> str:
    """Return how the 99 % interval of a measured ratio answers a promised range of speed-up (below 1: a stated cost).

    contradicted: all of it is on the other side of 1. unresolved: it holds 1 and part of the promise. confirmed: it
    lies within the promise. not refuted: it overlaps it. smaller, larger: it lies beside it, nearer to 1 or farther.
    """
    low, high = measurement["low"], measurement["high"]
    if promise[1] < 1:  # a cost, seen from the other side
        promise, low, high = (1 / promise[1], 1 / promise[0]), 1 / high, 1 / low
    if high < 1:
        return "contradicted"
    if high < promise[0]:
        return "smaller"
    if low > promise[1]:
        return "larger"
    if low <= 1:
        return "unresolved"
    return "confirmed" if promise[0] <= low and high <= promise[1] else "not refuted"


def answer_of_value(promise: tuple[float, float], value: float, *, rule: bool) -> str:
    """Return how a share, or a change in per cent, answers a promised range; a rule holds in its range or not."""
    low, high = promise
    if high < 0:  # a saving, seen from the other side
        low, high, value = -high, -low, -value
    if low <= value <= high:
        return "confirmed"
    if rule or value < 0:
        return "contradicted"
    return "smaller" if value < low else "larger"


def overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the intervals of two comparisons share a value."""
    return bool(one["low"] <= other["high"] and other["low"] <= one["high"])


def same_or_not(one: Row, other: Row) -> str:
    """Return what the intervals of two comparisons show of their difference."""
    if overlap(one, other):
        return "The two intervals overlap: no difference is shown."
    return "The two intervals lie apart: the difference is shown."


# ---- the answers ----


def machine(record: Row) -> list[Any]:
    """Return what tells the machine of a record from others."""
    return [record["hardware"].get(fact) for fact in ("gpu", "cpu", "cores")]


class Reading(NamedTuple):
    """A record, and whether its notebook and the modules that this measures are still what made it."""

    record: Row
    current: bool

    @property
    def lesson(self) -> str:
        """The name of its notebook, with the workload where that is a tuning."""
        workload = self.record.get("workload")
        return f"{self.record['notebook']}-{workload['name']}" if workload else self.record["notebook"]


def gather(folder: Path, but: Row | None = None) -> list[Reading]:
    """Return the records of the notebooks in `folder`; without what the machine and notebook of `but` left before."""
    return [
        Reading(record, is_current(record, notebook))
        for notebook in sorted(folder.glob("[0-9][0-9]_*.ipynb"))
        for record in published(notebook).values()
        if but is None or record["notebook"] != but["notebook"] or machine(record) != machine(but)
    ]


def answers(
    claims: Mapping[str, Row], readings: Iterable[Reading], name_of: Callable[[Row], str]
) -> list[dict[str, Any]]:
    """Return a row for each claim and each record that answers it, GPUs first; one that none answers has a row too.

    claims.csv names the lesson and the measurement that answer a claim, or a check, or the first row of a table and its
    column. `name_of` names the device of a record. Ratios have the 99 % interval of the measurement; shares and changes
    have a `value`, in per cent.
    """
    readings = sorted(readings, key=lambda reading: not reading.record["hardware"].get("gpu"))
    rows: list[dict[str, Any]] = []
    for name, claim in claims.items():
        told: dict[str, Any] = {key: claim[key] for key in ("technique", "plan_field", "metric", "guide")}
        told |= {"claim": name, "promised": promise_of(claim)}
        found = [told | _answered(claim, reading, name_of) for reading in readings if reading.lesson == claim["lesson"]]
        found = [row for row in found if row["verdict"] != NOT_MEASURED]
        rows += found or [told | UNANSWERED]
    return rows


def promise_of(claim: Row) -> tuple[float, float] | None:
    """Return the range that a claim promises, None where it gives no figure."""
    if not claim["low"]:
        return None
    return widened(float(claim["low"]), float(claim["high"]))


def _answered(claim: Row, reading: Reading, name_of: Callable[[Row], str]) -> dict[str, Any]:
    record = reading.record
    if claim["needs"] == "gpu" and not record["hardware"].get("gpu"):
        found = {"verdict": NEEDS_GPU}
    else:
        found = _found(claim, record)
    about = {
        "device": name_of(record),
        "notebook": record["notebook"],
        "created": record["created"][:10],
        "stale": not reading.current,
    }
    return UNANSWERED | found | about


def _found(claim: Row, record: Row) -> dict[str, Any]:
    """Return the verdict on a claim, with the figures of the record that it rests on."""
    promise, named, rule = promise_of(claim), claim["measurement"], claim["metric"] == "rule"
    for row in record["measurements"]:
        if row["name"] == named:
            verdict = answer(promise or ANY_GAIN, row)
            return {"verdict": verdict} | {end: row[end] for end in FIGURES}
    if claim["metric"] == "quality" and record.get("quality"):
        quality = record["quality"]
        verdict = BY_QUALITY.get(quality["decision"], "unresolved")
        if quality["mean_change"] is None:  # the plan that was trained was replaced, and no time was left for the other
            return {"verdict": verdict}
        return {"verdict": verdict, "value": 100 * quality["mean_change"]}
    for row in record["checks"]:
        if row["check"] == named and promise:
            return {"verdict": answer_of_value(promise, row["passed"], rule=rule)}
    table, _, column = named.partition(".")
    for row in record["tables"].get(table, ()):
        if promise:
            return {"verdict": answer_of_value(promise, row[column], rule=rule), "value": row[column]}
    return {}

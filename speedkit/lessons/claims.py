"""What the guides promise, claim by claim (claims.csv), and how it fared in the records, device by device."""

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedkit.lab.provenance import is_current, notebooks_folder
from speedkit.lab.record import NotebookRun
from speedkit.lab.records import published
from speedkit.measure.compare import Comparison

ONE_FIGURE_TOLERANCE = 0.10  # a promise such as "1.9x" came from one run somewhere: read as 1.9 give or take this
NOT_MEASURED = "not measured yet"
ANSWERS = ("confirmed", "smaller", "larger", "contradicted", "unresolved")
BY_DECISION = {"faster": "confirmed", "slower": "contradicted", "not worth it": "smaller", "undecided": "unresolved"}
WORDS = {word: word for word in ANSWERS} | {"needs_gpu": "needs a GPU"}
FIGURES = ("ratio", "low", "high")
TEXTS = ("device", "notebook", "workload", "created", "evidence")
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
    return low * (1 - spread), high * (1 + spread)


def answer(promise: tuple[float, float], measurement: Row) -> str:
    """Return how the 99 % interval of a measured ratio answers a promised range of speed-up (below 1: a stated cost).

    contradicted: all of it is on the other side of 1. unresolved: it holds 1 and part of the promise. confirmed: it
    holds part of the promise. smaller, larger: it lies beside the promise, nearer to 1 or farther from it.
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
    return "unresolved" if low <= 1 else "confirmed"


def judge(run: NotebookRun, claim: str, comparison: Comparison | Row, *, needs_gpu: bool = False) -> None:
    """Record how a measured ratio answers a claim; `needs_gpu` where that is about GPUs.

    A speed-up that was promised without a figure is confirmed by what is faster.
    """
    row = comparison if isinstance(comparison, Mapping) else comparison.as_measurement()
    promised = read_claims()[claim]
    why = "measured {ratio:.2f}x ({low:.2f} to {high:.2f})".format(**row)
    if promised["low"]:
        promise = widened(float(promised["low"]), float(promised["high"]))
        verdict = answer(promise, row)
        why = f"promised {promise[0]:.2f} to {promise[1]:.2f}x, {why}"
    else:
        verdict = BY_DECISION[row["decision"]]
        why = f"offered with no figure, {why}"
    if needs_gpu and run.hardware.device.type != "cuda":
        verdict, why = "needs_gpu", f"{why} on a machine without the GPU that it is about"
    run.verdict(claim, verdict, why, measurement=row["name"])


# ---- the answers ----


def machine(record: Row) -> list[Any]:
    """Return what tells the machine of a record from others."""
    return [record["hardware"].get(fact) for fact in ("gpu", "cpu", "cores")]


def recorded(run: NotebookRun) -> list[dict[str, Any]]:
    """Return the records of a run's notebook that other machines left in notebooks/records, GPUs first."""
    left = published(notebooks_folder() / f"{run.notebook}.ipynb").values()
    return [record for record in left if machine(record) != machine(run.record)]


class Reading(NamedTuple):
    """A record; whether its notebook and the modules this measures are still what made it; the tuning's workload."""

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
    claims: Mapping[str, Row], readings: Iterable[Reading], name_of: Callable[[Row], str]
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
            promise | {"device": name_of(reading.record)} | _answered(reading, verdict)
            for reading in readings
            for verdict in reading.record["verdicts"]
            if verdict["claim"] == name
        ]
        rows += measured or [promise | UNANSWERED]
    return rows


def _answered(reading: Reading, verdict: Row) -> dict[str, Any]:
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

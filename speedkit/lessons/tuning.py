"""What lesson 90 tunes in each scale, and which changes lost: what the lesson shows, without how it is put."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speedkit.lab.figures import ratio_text
from speedkit.lab.workloads import load_workload
from speedkit.recipe import Recipe
from speedkit.workload import Workload

Row = Mapping[str, Any]
Fields = dict[str, Any]
ENDS = {"plain PyTorch": "baseline", "final plan": "final"}  # of a tuning, and their names in its record

# On a GPU: what keeps it busy well longer than it takes to launch the work. A larger net, more files, larger batches.
ON_A_GPU: dict[str, tuple[Fields, Fields]] = {
    "audio": ({"size": "medium", "clips": 3600}, {"batch_size": 128}),
    "image": ({"size": "medium", "clips": 2400}, {"batch_size": 64}),
    "speech": ({"size": "medium", "clips": 1280}, {"batch_size": 64}),
    "text": ({"size": "medium"}, {"batch_size": 16, "steps": 120}),
}


def load(name: str, options: Row, *, scale: str, earlier: Row | None) -> tuple[Workload, Recipe]:
    """Return the workload `name` with its data `options`, and the recipe: that of the `earlier` tuning, if any.

    Options that are None are the workload's own, or larger ones in scale gpu. In smoke all is tiny: only to see that
    everything runs.
    """
    larger: Fields = {}
    changes: Fields = {}
    if scale == "gpu" and earlier is None and not any(options.values()):
        larger, changes = ON_A_GPU.get(name, ({}, {}))
    if scale == "smoke" and earlier is None:
        changes = {"batch_size": 4, "epochs": 2, "steps": None}
        larger = {"size": options["size"] or "tiny"} | ({"max_duration_s": 0.5} if name == "audio" else {})
        if options["data_dir"] is None and options["labels"] is None:
            larger["clips"] = options["clips"] or 60
    work = load_workload(name, **{**options, **larger})
    return work, Recipe(**earlier["recipe"]) if earlier else dataclasses.replace(work.recipe, **changes)


def rejected(record: Row) -> list[Fields]:
    """Return a row for each change that is not in the final plan of a tuning's record: what was measured, and why."""
    return [
        {"change": row["change"], "measured": ratio_text(row) if row["ratio"] else "not tried", "why": row["why"]}
        for row in (*record["optimizations"], *record["dropped"])
        if not row["kept"] and row["change"] != "nothing"
    ]


def answers(record: Row) -> str:
    """Return what a tuning's record answers to the lesson's three questions, as Markdown."""
    tried = measured(record["optimizations"])
    kept = kept_changes(record)
    product = multiplied(kept)
    whole = record["speedup"]
    excess = multiplied([*kept, {"ratio": 1 / whole["ratio"], "high": 1 / whole["low"]}])  # product over whole
    fits = "no difference is shown"
    if excess["low"] > 1:
        fits = "multiplying promises too much"
    elif excess["high"] < 1:
        fits = "multiplying promises too little"
    met = sum(row["predicted_low"] <= row["high"] and row["low"] <= row["predicted_high"] for row in tried)
    lost = [f"{row['change']} ({row['ratio']:.2f}×, {row['why']})" for row in tried if not row["kept"]]
    return f"""
1. Of all that was kept, {most_saved(record)} What was not kept or not measured is in the table of *When it does not \
help*, with the reason.
2. The kept gains multiply to {product["ratio"]:.2f} ({product["low"]:.2f} to {product["high"]:.2f}). Measured \
afresh, a step of the final plan is {whole["ratio"]:.2f} times as fast as in plain PyTorch ({whole["low"]:.2f} to \
{whole["high"]:.2f}). By an interval for the ratio of the two: {fits}.
3. Not kept: {len(lost)} of the {len(tried)} changes that were measured{"; ".join(["", *lost])}. {met} of the \
{len(tried)} measured intervals meet the prediction made before; a wide one, a long pale bar in the figure, is easily \
met.
"""


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of changes that were measured: of one that was measured again at the end, the last row."""
    return [*{row["change"]: row for row in rows if row["ratio"]}.values()]


def multiplied(rows: Sequence[Row]) -> Fields:
    """Return the product of the ratios of changes, with its 99 % interval, as `ratio`, `low` and `high`."""
    ratio = math.prod(row["ratio"] for row in rows)
    # Errors of separate measurements: half the widths of the logarithms' intervals add in quadrature.
    spread = math.exp(math.hypot(*(math.log(row["high"] / row["ratio"]) for row in rows)))
    return {"ratio": ratio, "low": ratio / spread, "high": ratio * spread}


def kept_changes(record: Row) -> list[Fields]:
    """Return the kept changes in order: ratio, interval, and the step before and after [ms], on top of those before."""
    to_ms, rows = 1e3 * record["step_s"]["baseline"], []
    for row in measured(record["optimizations"]):
        if row["kept"]:
            from_ms = to_ms
            to_ms /= row["ratio"]
            ratio = {key: row[key] for key in ("ratio", "low", "high")}
            rows.append({"change": row["change"], "from_ms": from_ms, "to_ms": to_ms, **ratio})
    return rows


def most_saved(record: Row) -> str:
    """Return the end of a sentence: which kept change took most off a step, and why another may have a higher ratio."""
    rows = kept_changes(record)
    if not rows:
        return "nothing took anything off a step."
    most = max(rows, key=lambda row: row["from_ms"] - row["to_ms"])
    highest = max(rows, key=lambda row: row["ratio"])
    told = "{change} took most off a step: {from_ms:.3g} to {to_ms:.3g} ms.".format_map(most)
    if highest is not most:  # so it came later
        told += " {change} then took {from_ms:.3g} to {to_ms:.3g} ms; its ratio is the higher one".format_map(highest)
        meet = ", intervals that meet" if highest["low"] <= most["high"] else ""
        told += f" ({highest['ratio']:.2f} against {most['ratio']:.2f}{meet}), as a ratio counts only what is left."
    return told


def breakdowns_title(record: Row) -> str:
    """Return which share of a step a tuning's final plan has made smaller most, and what is left of it."""
    sides = (record["breakdowns"][side]["rows"] for side in ENDS.values())
    before, after = ({row["cause"]: row["share"] for row in rows} for rows in sides)
    cause = max(before, key=lambda cause: before[cause] - after.get(cause, 0.0))
    return f"{cause}: {before[cause]:.0%} of a step before, {after.get(cause, 0.0):.0%} after"

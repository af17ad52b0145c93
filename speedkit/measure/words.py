"""A tuning's figures in words: for pictures and reports, and for what runs without matplotlib."""

from collections.abc import Mapping
from typing import Any

# What a tuning is compared with, by its key in `step_s` of a record: its headline is over the faster of the two.
BASELINES = {"baseline": "plain PyTorch", "careful": "the careful plan"}
Row = Mapping[str, Any]


def device_name(record: Row) -> str:
    """Return what the machine of a record is called."""
    hardware = record["hardware"]
    if hardware.get("gpu"):
        return hardware["gpu"]
    cpu = (hardware.get("cpu") or "CPU").replace("(R)", "").replace("(TM)", "")
    return f"{cpu}, {hardware['cores']} cores"


def speedups(record: Row) -> dict[str, Row]:
    """Return what the final plan gains over each of `BASELINES`, by key, the faster one first.

    The careful plan is not held against itself.
    """
    over = {"baseline": record["speedup"]}
    if record["speedup_careful"]["low"] < record["speedup_careful"]["high"]:
        over["careful"] = record["speedup_careful"]
    return dict(sorted(over.items(), key=lambda item: item[1]["ratio"]))


def headline(record: Row) -> tuple[str, Row]:
    """Return the one speed-up that a tuning is told by, and what it is over: the faster of `BASELINES`.

    The first is the baseline's key in `BASELINES`, the second the ratio with its interval.
    """
    return next(iter(speedups(record).items()))


def decision(row: Row) -> str:
    """Return what a ratio shows: faster, slower, not worth it or undecided.

    Rows of earlier records do not say it: their interval does.
    """
    if row.get("decision"):
        return row["decision"]
    if row["low"] > 1:
        return "faster"
    return "slower" if row["high"] < 1 else "undecided"


def ratio_text(row: Row) -> str:
    """Return a ratio with its interval, and whether that shows something slower."""
    slower = ": slower" if row["high"] < 1 else ""
    return f"{row['ratio']:.2f}× ({row['low']:.2f} to {row['high']:.2f}{slower})"


def result_text(row: Row) -> str:
    """Return a ratio with its interval where it is decided, and else the interval alone."""
    if decision(row) == "undecided" and row["low"] < row["high"]:
        return f"undecided ({row['low']:.2f} to {row['high']:.2f})"
    return ratio_text(row)


def duration(seconds: float) -> str:
    """Return a time in the unit that reads best: `42.1 ms`, `3.2 s`, `12 min`, `1.5 h`."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds / length:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 1e-6:#.3g}".rstrip(".") + " µs"

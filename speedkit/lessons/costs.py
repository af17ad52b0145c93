"""What lessons work out of costs beside what they save: a cache's build, the copy of a batch."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from speedkit.clock import timed
from speedkit.lessons.on_a_gpu import counts
from speedkit.measure.compare import Comparison


def each_us(parts: Mapping[str, Callable[[], Any]], items: int) -> dict[str, float]:
    """Return the microseconds of each part, by name, for one of the `items` that it handles on a CPU, at the least."""
    return {name: 1e6 * min(timed(part, "cpu", 20)) / items for name, part in parts.items()}


def milliseconds(*rows: Mapping[str, Any]) -> dict[str, float]:
    """Return the median time of A, which all these rows of `measurements` have, and by its ratio that of each B."""
    first = rows[0]
    a_ms = 1e3 * statistics.median(first["seconds_a"])
    return {f"{first['a']}, ms": a_ms} | {f"{row['b']}, ms": a_ms / row["ratio"] for row in rows}


def payback(build_s: float, row: Comparison, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Return the seconds that B saves in an epoch of `steps` (at most, likeliest, at least), and when `build_s` is.

    *never* stands where the interval includes no gain.
    """
    saved_s = [steps * row.step_s[0] * (1 - 1 / ratio) for ratio in (row.high, row.ratio, row.low)]
    first, _, last = [f"{build_s / each_s:.1f}" if each_s > 0 else "never" for each_s in saved_s]
    return saved_s, {"build_s": build_s, "against": row.a, "at the earliest": first, "at the latest": last}


def copies(bytes_per_s: Mapping[str, float]) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Return what the copy of the audio net's batch takes of a step on each GPU, as rows, and its shares as numbers.

    The batch is what prefetching adds to the counted peak; the kernels' time is predicted, with its typical error.
    """
    rows: list[dict[str, Any]] = []
    shares = []
    for gpu, rate in bytes_per_s.items():
        steps = counts("steps", gpu)["audio"]
        copy_ms = 1e3 * (steps["prefetched"]["memory"]["peak"] - steps["pinned"]["memory"]["peak"]) / rate
        for plan in ("pinned", "16 bits"):
            step = steps[plan]
            few, many = (1e3 * step["seconds"] * step["typical_error"] ** sign for sign in (-1, 1))
            low, high = copy_ms / (copy_ms + many), copy_ms / (copy_ms + few)
            row = {"GPU": gpu, "products in": step["number_format"], "copy, ms": round(copy_ms, 3)}
            row |= {"kernels, ms": f"{few:.3g} to {many:.3g}", "share": f"{low:.1%} to {high:.1%}"}
            rows.append(row | {"gain": f"{1 / (1 - low):.2f} to {1 / (1 - high):.2f}"})
            shares.append((low, high))
    return rows, shares

"""What lesson 01 shows: first calls, windows of the same steps, false alarms."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, add_caption, new_figure, round_ticks
from speedkit.lessons.pictures_courses import side_by_side

COLOURS = (GREY, ORANGE, GREEN, BLUE)
Spans = Sequence[tuple[float, float]]


@style.context(STYLE)
def windows(first_ms: Sequence[float], relative: Sequence[float], *, title: str) -> Figure:
    """Return the first calls of a step in ms, and many windows of the same steps relative to their median."""
    figure, (left, right) = side_by_side(title, 1, 2)
    left.plot(range(1, len(first_ms) + 1), first_ms, "o-", color=BLUE, markersize=3)
    left.set(xlabel="call", ylabel="ms", yscale="log")
    round_ticks(left.yaxis)
    right.plot(relative, ".", color=GREY, markersize=2.5)
    right.set(xlabel="window of the same steps, in the order of time", ylabel="time / median")
    right.set_ylim(max(0.2, 0.98 * min(relative)), min(3.0, 1.02 * max(relative)))
    return figure


@style.context(STYLE)
def alarms(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return the share of false alarms of each way in each world, in per cent, by rows of `false_alarms`."""
    figure, axes = new_figure(3.0, title=title)
    names = [name for name in rows[0] if name not in ("world", "trials")]
    for place, name in enumerate(names):
        at = [world + 0.2 * (place - 1.5) for world in range(len(rows))]
        bars = axes.bar(at, [100 * row[name] for row in rows], 0.18, color=COLOURS[place], label=name)
        axes.bar_label(bars, [f"{100 * row[name]:.2g}" for row in rows], fontsize=7.5, padding=1)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--", label="promised: 1")
    axes.set_xticks(range(len(rows)), [f"{row['world']}\n{row['trials']:,} trials" for row in rows])
    most = 10 * math.ceil(10 * max(max(row[name] for name in names) for row in rows))
    axes.set(ylabel="false alarms in 100", ylim=(0, 1.25 * most))
    axes.grid(visible=True, axis="y")
    axes.legend(ncols=5, loc="upper left")
    return figure


@style.context(STYLE)
def narrowing(intervals: Mapping[int, Sequence[float]], truth: float, *, title: str) -> Figure:
    """Return a ratio with its interval, (ratio, low, high), over the number of pairs that it is made of."""
    figure, axes = new_figure(2.8)
    ratios, lows, highs = zip(*intervals.values(), strict=True)
    axes.fill_between([*intervals], lows, highs, color=GREY, alpha=0.4, label="99 % interval")
    axes.plot([*intervals], ratios, color=BLUE, label="ratio")
    axes.axhline(truth, color=ORANGE, linestyle="--", label="planted")
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set(xlabel="pairs of turns", ylabel="time A / time B")
    add_caption(figure, title)
    return figure


@style.context(STYLE)
def queue(launches: Spans, waits: Spans, kernels: Spans, *, title: str, other: Spans = ()) -> Figure:
    """Return what host and GPU do over time: the start and length [µs] of each launch, wait, kernel and `other` work.

    A step has four kernels.
    """
    figure, axes = new_figure(2.2, ["host", "GPU"])
    for y, spans, colour, name in (
        (0, other, GREEN, "host: other work"),
        (0, launches, ORANGE, "queues a kernel"),
        (0, waits, GREY, "waits for a read"),
        (1, kernels, BLUE, "GPU: a kernel"),
    ):
        axes.broken_barh(spans, (y - 0.35, 0.7), facecolor=colour, edgecolor="white", linewidth=0.5, label=name)
    gaps = [(sum(one), other[0] - sum(one)) for one, other in pairwise(kernels) if other[0] > sum(one)]
    axes.broken_barh(gaps, (0.65, 0.7), facecolor="white", edgecolor=INK, hatch="////", label="waits")
    for number, kernel in enumerate(kernels[::4], 1):
        axes.text(kernel[0], 0.62, f"step {number}")
    axes.set(xlim=(0, None), xlabel="µs")
    add_caption(figure, title)
    return figure

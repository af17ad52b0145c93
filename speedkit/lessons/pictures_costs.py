"""What lessons show of costs beside what they save: a cache's build, a batch's copy, a micro-batch, rounding."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from speedkit.lab.figures import BLUE, GREY, INK, ORANGE, STYLE, add_caption, new_figure, write_beside
from speedkit.lessons.pictures_courses import count_in_powers, side_by_side

if TYPE_CHECKING:
    from pandas import DataFrame

PUBLISHED = ((1024, ORANGE, 1024, 0.80), (4096, BLUE, 8192, 1.39))  # torchao's README: rows, narrower side, rate


@style.context(STYLE)
def payback(build_s: float, saved_s: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Return the seconds that a cache has saved by each epoch, its build taken off, against each loader by name.

    `saved_s` has the seconds that it saves in an epoch: at most, likeliest and at least, for the band.
    """
    figure, panels = side_by_side(title, *[1] * len(saved_s))
    latest = [build_s / every[-1] for every in saved_s.values() if every[-1] > 0]
    epochs = math.ceil(min(10.0, max([3.0, *latest])))
    ends = [-build_s, 0.0, *(epochs * each_s - build_s for every in saved_s.values() for each_s in every)]
    room = 0.05 * (max(ends) - min(ends))
    for axes, (name, every) in zip(panels, saved_s.items(), strict=True):
        most, likeliest, least = ([-build_s, epochs * each_s - build_s] for each_s in every)
        axes.axhline(0, color=INK, linewidth=1.5)
        axes.fill_between([0, epochs], least, most, color=BLUE, alpha=0.25, linewidth=0, label="99 % interval")
        axes.plot([0, epochs], likeliest, color=BLUE, label="saved so far")
        axes.plot(0, -build_s, "o", color=ORANGE, clip_on=False, zorder=3, label="the build alone")
        axes.set(xlim=(0, epochs), ylim=(min(ends) - room, max(ends) + room), ylabel="seconds saved (above 0: paid)")
        axes.set_xlabel(f"epochs of training, against {name}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, axis="both")
    add_caption(figure, title)
    return figure


@style.context(STYLE)
def seeds(table: "DataFrame", by: str, columns: Sequence[str], *, title: str) -> Figure:
    """Return a panel for each column: a dot for each seed and a bar at their mean, in a row for each value of `by`."""
    figure, panels = side_by_side(title, *[1] * len(columns))
    figure.set_figheight(1.9)
    names = [*dict.fromkeys(table[by])]
    for axes, column in zip(panels, columns, strict=True):
        for y, name in enumerate(names):
            values = table.loc[table[by] == name, column]
            axes.plot(values, [y] * len(values), "o", color=BLUE, alpha=0.7)
            axes.plot([values.mean()] * 2, [y - 0.3, y + 0.3], color=ORANGE, linewidth=2.5)
        axes.set(xlabel=f"{column} (a dot for each seed; bar: mean)", ylim=(len(names) - 0.5, -0.5))
        axes.set_yticks(range(len(names)), names)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter("{x:g}")
    return figure


@style.context(STYLE)
def copies(rows: Sequence[Mapping[str, Any]], shares: Sequence[tuple[float, float]], *, title: str) -> Figure:
    """Return which share of a step its copy takes, from least to most, and what hiding it gains: a bar for each row."""
    figure, axes = new_figure(0.42 * len(rows) + 0.9, [f"{row['GPU']}, {row['products in']}" for row in rows])
    for y, (row, (low, high)) in enumerate(zip(rows, shares, strict=True)):
        axes.barh(y, 100 * low, 0.5, color=ORANGE)
        axes.barh(y, 100 * (high - low), 0.5, left=100 * low, color=ORANGE, alpha=0.45)
        write_beside(axes, y, f"hidden: {row['gain']} times as fast")
    axes.set(xlim=(0, None), xlabel="copy, per cent of copy and kernels (pale: the prediction's typical error)")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def curves(before: Mapping[int, float], after: Mapping[int, float], *, title: str) -> Figure:
    """Return the rates of micro-batches by size, in per cent of the best: with memory given back, and kept."""
    figure, axes = new_figure(2.8)
    count_in_powers(axes, [*before])
    axes.plot([*before], [*before.values()], "o-", color=BLUE, label="memory given back (default)")
    axes.plot([*after], [*after.values()], "s--", color=ORANGE, label="memory kept")
    axes.set(xlabel="micro-batch, samples", ylabel="rate, % of its search's best", ylim=(0, None))
    axes.grid(visible=True, axis="both")
    add_caption(figure, title)
    return figure


@style.context(STYLE)
def widths(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return what FP8 gains at best by a layer's width and rows, and what was published of two layers."""
    figure, axes = new_figure(2.8)
    count_in_powers(axes, sorted({row["width"] for row in rows}))
    axes.axhline(1, color=GREY, linewidth=2)
    for count, colour, width, rate in PUBLISHED:
        best = {row["width"]: row["gain at best"] for row in rows if row["rows"] == count}
        axes.plot([*best], [*best.values()], "o-", color=colour, label=f"{count:,} rows, on paper")
        axes.plot(width, rate, "D", color=colour, markersize=9, label=f"{count:,} rows, by torchao")
    axes.set(xlabel="width (of torchao's layers the narrower side)", ylabel="rate (grey: bf16 = 1)", ylim=(0, None))
    axes.grid(visible=True, axis="both")
    add_caption(figure, title)
    return figure

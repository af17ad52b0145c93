"""What lesson 50 shows: what guides promise, and what was measured."""

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from speedkit.lab.figures import BLUE, GREY, INK, STYLE, add_caption, new_figure, round_ticks, write_beside

PROMISED = "#F0E442"


@style.context(STYLE)
def promises(rows: Sequence[Mapping[str, Any]], *, percent: bool, title: str) -> Figure:
    """Return promised and measured figures: rows of `claims.answers`, ratios or, with `percent`, changes and shares."""
    names = [f"{row['claim']} {shorten(row['technique'], 28, placeholder=' …')}" for row in rows]
    figure, axes = new_figure(0.27 * len(rows) + 1.5, names)
    for y, row in enumerate(rows):
        low, high = row["promised_low"], row["promised_high"]
        if low is not None:
            least = 1.5 if percent else 0.0  # a single share would be too thin to see
            axes.barh(y, max(high - low, least), 0.8, left=low, color=PROMISED)
        point = (row["value"],) * 3 if percent else (row["low"], row["ratio"], row["high"])
        text = row["verdict"] + ", stale" * row["stale"]
        if point[1] is not None and not (percent and row["stale"]):  # old records hold savings as positive changes
            _mark(axes, y, point, colour=GREY if row["stale"] else BLUE)
            sign = "+" * row["metric"].endswith("memory")  # a change, and no share
            said = f"{point[1]:{sign}.0f} %" if percent else f"{point[1]:.2f}×"
            text = f"{said} {text}"
        write_beside(axes, y, text)
    axes.axvline(0.0 if percent else 1.0, color=INK, linewidth=0.8, zorder=1)
    axes.set(xlabel="per cent: change of memory (left is less), or share of the time")
    if not percent:
        axes.set(xscale="log", xlabel="time ratio, log scale: above 1 is faster")
        round_ticks(axes.xaxis)
    colours = {"promised": PROMISED, "measured": BLUE, "stale": GREY}
    marks = [Patch(color=colour, label=label) for label, colour in colours.items()]
    add_caption(figure, title, marks, about="hollow: the interval holds 1" if not percent else "")
    return figure


def _mark(axes: Axes, y: int, point: tuple[float, float, float], *, colour: str) -> None:
    """Draw a measured figure with its interval, hollow where that holds 1."""
    low, middle, high = point
    axes.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot(middle, y, "o", color=colour, markersize=6, markerfacecolor="white" if low <= 1 <= high else colour)

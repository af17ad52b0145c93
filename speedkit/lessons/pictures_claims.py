"""What lesson 50 shows: what guides promise, and what was measured."""

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from speedkit.lab.figures import BLUE, INK, STYLE, add_caption, new_figure, round_ticks, write_beside
from speedkit.lessons.pictures import mark

PROMISED = "#F0E442"


@style.context(STYLE)
def promises(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return promised and measured speed-ups, rows of `claims.answers`."""
    names = [f"{row['claim']} {shorten(row['technique'], 40, placeholder=' …')}" for row in rows]
    figure, axes = new_figure(0.3 * len(rows) + 1.5, names)
    for y, row in enumerate(rows):
        low, high = row["promised"]
        axes.barh(y, high - low, 0.8, left=low, color=PROMISED)
        mark(axes, y, row)
        write_beside(axes, y, f"{row['ratio']:.2f}× {row['verdict']}")
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.set(xscale="log", xlabel="speed ratio, log scale: above 1 is faster")
    round_ticks(axes.xaxis)
    colours = {"promised": PROMISED, "measured": BLUE}
    marks = [Patch(color=colour, label=label) for label, colour in colours.items()]
    add_caption(figure, title, marks, about="hollow: the interval holds 1")
    return figure

"""What the lessons on files, kept features and promises draw (11, 12, 50)."""

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from speedkit.lab.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    STYLE,
    add_caption,
    new_figure,
    round_ticks,
    write_beside,
)
from speedkit.lessons.claims import answer

Row = Mapping[str, Any]
PROMISED = "#F0E442"


@style.context(STYLE)
def epochs() -> Figure:
    """Return four epochs of training with features computed live, and with a cache that is built before them."""
    figure, axes = new_figure(2.5, ("live", "from a cache"))
    parts = {"decode, log-mel": (3.0, ORANGE), "augment": (0.5, GREEN), "model": (1.6, BLUE)}
    for y, cached in enumerate((False, True)):
        left = parts["decode, log-mel"][0] if cached else 0.0
        if cached:
            axes.barh(y, left, 0.6, color=ORANGE, hatch="///", edgecolor="white")
            axes.text(left / 2, y + 0.42, "build", ha="center", va="center", fontsize=8.5)
        for epoch in range(4):
            begin = left
            for part, (width, colour) in parts.items():
                if not (cached and part == "decode, log-mel"):
                    axes.barh(y, width - 0.06, 0.6, left=left, color=colour)
                    left += width
            axes.text((begin + left) / 2, y + 0.42, f"epoch {epoch + 1}", ha="center", va="center", fontsize=8.5)
        axes.plot([left] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=1)
    axes.set(xlabel="time (drawn)", xticks=[], ylim=(1.65, -0.5))
    axes.grid(visible=False)
    marks = [Patch(color=colour, label=part) for part, (_, colour) in parts.items()]
    add_caption(figure, "What is the same in each epoch moves in front of the first", marks)
    return figure


@style.context(STYLE)
def payback(rows: Sequence[Row], title: str) -> Figure:
    """Return the seconds since the start over the epochs: rows of `way`, `build_s` and `epoch_s`."""
    figure, axes = new_figure(3.2)
    colours = (ORANGE, GREEN, BLUE)
    last = 2.0 * max(row["build_s"] for row in rows) / max(row["epoch_s"] for row in rows) + 2
    for row, colour in zip(rows, colours, strict=False):
        ends = [row["build_s"], row["build_s"] + last * row["epoch_s"]]
        axes.plot([0, last], ends, color=colour, linewidth=2, label=row["way"])
    axes.set(xlim=(0, last), ylim=(0, None), xlabel="epochs trained", ylabel="seconds since the start")
    add_caption(figure, title)
    return figure


@style.context(STYLE)
def tar_layout() -> Figure:
    """Return what reading four clips asks of the file system, and how the same clips lie in a tar."""
    figure, axes = new_figure(3.0)
    kinds = {"find": (GREY, 0.8), "open": (ORANGE, 0.8), "read": (BLUE, 1.2), "close": (GREY, 0.9)}
    left = 0.0
    for clip in range(4):
        for kind, (colour, width) in kinds.items():
            _box(axes, (left, 0.1), width=width, colour=colour, text=kind if kind != "read" else f"read {clip}")
            left += width
        left += 0.2
    for place, clip in enumerate((2, 0, 3, 1)):  # any order
        _box(axes, (1.3 * place, 1.3), width=1.2, colour=BLUE, text=f"read {clip}")
    for clip in range(4):
        _box(axes, (3.0 * clip, 2.5), width=0.8, colour=GREY, text="512 B")
        _box(axes, (3.0 * clip + 0.8, 2.5), width=2.2, colour=GREEN, text=f"clip {clip}")
        if clip:
            axes.text(3.0 * clip + 0.8, 3.36, f"offset {clip}", fontsize=8, ha="center", va="center")
    axes.set(xlim=(-0.1, left), ylim=(3.6, 0), xticks=[])
    axes.set_yticks((0.45, 1.65, 2.85), ("time: single files", "time: the tar, once open", "bytes in the tar"))
    axes.grid(visible=False)
    figure.suptitle("Four things to do for each clip, or one read at a known offset", x=0.01, ha="left")
    return figure


def _box(axes: Axes, corner: tuple[float, float], *, width: float, colour: str, text: str) -> None:
    """Draw a labelled block."""
    axes.add_patch(Rectangle(corner, width - 0.05, 0.7, facecolor=colour, edgecolor="white"))
    x, y = corner
    axes.text(x + width / 2, y + 0.35, text, ha="center", va="center", color="white", fontsize=8)


@style.context(STYLE)
def rule() -> Figure:
    """Return five measurements of a technique that is promised to be 1.5 to 2 times as fast, and what each says."""
    low, high = 1.5, 2.0
    cases = [(1.6, 1.9), (1.35, 1.6), (1.1, 1.3), (2.2, 2.6), (0.9, 1.6), (0.75, 0.9)]
    words = [answer((low, high), {"low": least, "high": most}) for least, most in cases]
    figure, axes = new_figure(2.9, [f"measurement {number}" for number in range(1, 7)])
    axes.axvspan(low, high, color=PROMISED)
    for y, (ends, word) in enumerate(zip(cases, words, strict=True)):
        _mark(axes, y, (ends[0], sum(ends) / 2, ends[1]), colour=BLUE)
        write_beside(axes, y, word)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set(xlabel="time ratio: above 1 is faster")
    add_caption(figure, "Where the interval lies decides", [Patch(color=PROMISED, label="promised: 1.5 to 2")])
    return figure


@style.context(STYLE)
def promises(rows: Sequence[Row], *, percent: bool, title: str) -> Figure:
    """Return promised and measured figures: rows of `claims.answers`, ratios or, with `percent`, changes and shares."""
    figure, axes = new_figure(
        0.27 * len(rows) + 1.5, [f"{row['claim']} {shorten(row['technique'], 28, placeholder=' …')}" for row in rows]
    )
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
    marks = [
        Patch(color=PROMISED, label="promised"),
        Patch(color=BLUE, label="measured"),
        Patch(color=GREY, label="stale"),
    ]
    add_caption(figure, title, marks, about="hollow: the interval holds 1" if not percent else "")
    return figure


def _mark(axes: Axes, y: int, point: tuple[float, float, float], *, colour: str) -> None:
    """Draw a measured figure with its interval, hollow where that holds 1."""
    low, middle, high = point
    axes.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot(middle, y, "o", color=colour, markersize=6, markerfacecolor="white" if low <= 1 <= high else colour)

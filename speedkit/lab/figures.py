"""Figures, drawn from records only: what a tuning tried, and where the time goes; and what all figures share.

The colours are those that the colour-blind tell apart (Okabe and Ito 2008). The ground is transparent, and the ink is a
grey whose contrast with white and with #111 is the same: figures read on light and on dark pages.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from speedkit.measure.trace import CAUSES
from speedkit.measure.words import BASELINES, device_name, duration, headline, ratio_text, result_text

STYLE = Path(__file__).with_name("speedkit.mplstyle")
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
INK = "#747983"
DARK = "#22272E"  # on light fills
GREY = "#7A808A"
# A dark line with a white edge reads on each fill and on each ground.
ON_ALL: dict[str, Any] = {"color": DARK, "path_effects": [withStroke(linewidth=3, foreground="white")]}
INTERVAL = Line2D([], [], label="99 % interval", **ON_ALL)
PREDICTED = Patch(color="#F3C6A5", label="predicted before")
# What to do about them goes from left to right: feeding, launching, computing, what happens now and then, the rest.
CODES = (
    "D55E00 E69F00 CC79A7 882255 0072B2 56B4E9 44AA99 332288 7FA7D8 009E73 B8DE9B 117733 F0E442 8C7A3F A9B0BB FFFFFF"
)
COLOURS = {cause: f"#{code}" for cause, code in zip(CAUSES, CODES.split(), strict=True)}
Row = Mapping[str, Any]


class Picture(Figure):
    """A figure that is shown where it is the last line of a cell: two dots for a point, and its words for who cannot
    see it.
    """

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=2 * self.dpi)
        width, height = (round(inches * self.dpi) for inches in self.get_size_inches())
        words = [self.get_suptitle(), *(text.get_text() for axes in self.axes for text in axes.texts)]
        alt = "; ".join(" ".join(text.split()) for text in words)
        about = {"width": width, "height": height, "alt": alt}
        return {"image/png": png.getvalue(), "text/plain": alt}, {"image/png": about}


@style.context(STYLE)
def waterfall(record: Row) -> Figure:
    """Return what a tuning tried: a bar per optimization, from the end of the last that was kept, as long as its ratio.

    What was not tried is left out; what was rejected has its reason. The whisker is the 99 % interval, the pale bar
    what was predicted before. The last bar is the headline.
    """
    step_s = record["step_s"]
    tried = {row["change"]: row for row in record["optimizations"] if row["ratio"]}  # as it was measured last
    side, speedup = headline(record)
    final = {"optimization": "final plan", "change": f"against {BASELINES[side]}", "kept": False, **speedup}
    rows = [*tried.values(), final]
    labels = ["plain PyTorch, Plan()"]
    for row in rows:
        change = textwrap.shorten(row["change"], 32, placeholder=" …")
        labels.append(f"{row['optimization']}\n{change}")

    figure, axes = new_figure(0.5 * len(labels) + 1.5, labels)
    before_ms = 1e3 * step_s["baseline"]
    axes.plot(before_ms, 0, "d", color=INK, markersize=7)
    write_beside(axes, 0, f"{before_ms:.3g} ms per step")
    for y, row in enumerate(rows, 1):
        colour, lines = BLUE, [ratio_text(row)]
        if row is final:
            colour = GREEN
            before_ms = 1e3 * step_s.get(side, step_s["final"])  # the careful plan may be the final one
        elif not row["kept"]:
            colour = GREY
            if row["why"] not in lines[0]:
                lines += textwrap.wrap(row["why"], 40, max_lines=2, placeholder=" …")
        draw_change(axes, y, row, before_ms=before_ms, colour=colour)
        if row["kept"]:
            before_ms /= row["ratio"]
        write_beside(axes, y, "\n".join(lines))
    axes.set(xscale="log", xlabel="time per step, ms, log scale: left is faster")
    round_ticks(axes.xaxis)
    colours = {"kept": BLUE, "rejected": GREY, "fresh turns": GREEN}
    marks = [Patch(color=colour, label=label) for label, colour in colours.items()]
    title = f"{result_text(speedup)} over {BASELINES[side]}"
    add_caption(figure, title, [*marks, INTERVAL, PREDICTED], about=origin(record))
    return figure


@style.context(STYLE)
def breakdowns(
    breakdowns: Mapping[str, Row], record: Row | None = None, *, title: str = "Where a step's time goes"
) -> Figure:
    """Return where the time of a step goes: for each breakdown by name, a bar of shares that add up to 100 %.

    What is unexplained is hatched; below 0, causes overlap by so much.
    """
    shares = [{row["cause"]: 100 * row["share"] for row in breakdown["rows"]} for breakdown in breakdowns.values()]
    figure, axes = new_figure(0.66 * len(breakdowns) + 1.8, list(breakdowns))
    left = np.zeros(len(breakdowns))
    for cause, colour in COLOURS.items():
        widths = np.array([share.get(cause, 0.0) for share in shares])
        if not widths.any():
            continue
        bars = axes.barh(range(len(shares)), widths, 0.72, left=left, label=cause, color=colour)
        left += widths
        if cause == "unexplained":
            for bar in bars:
                bar.set(edgecolor=INK, hatch="////")
        else:
            texts = [f"{width:.0f} %" if width > 4 else "" for width in widths]
            luminance = np.dot(to_rgb(colour), [0.3, 0.59, 0.11])
            ink = DARK if luminance >= 0.5 else "white"
            axes.bar_label(bars, texts, label_type="center", color=ink, fontsize=8)
    for y, (breakdown, share) in enumerate(zip(breakdowns.values(), shares, strict=True)):
        step = f"{duration(breakdown['step_s'])} per step"
        write_beside(axes, y, f"{step}\nunexplained {share['unexplained']:.1f} %")
    axes.margins(x=0)
    axes.set_xlabel("share of the wall time of a step, %")
    add_caption(figure, title, about=origin(record))
    return figure


def new_figure(height: float, rows: Sequence[str] = (), *, title: str = "") -> tuple[Figure, Axes]:
    """Return a figure of `height` [inches] with one axes, whose rows have these labels, the first at its top."""
    figure = Picture(figsize=(8.6, height), layout="constrained")  # as wide as GitHub and a notebook show unscaled
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left")
    axes.use_sticky_edges = False  # bars may end at the edge of the axes otherwise
    if rows:
        labels = [label if "\n" in label else textwrap.fill(label, 32) for label in rows]
        axes.set_yticks(range(len(rows)), labels, fontsize=8.5)
        axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure, axes


def origin(record: Row | None) -> str:
    """Return what a record is about, in a line."""
    if record is None:
        return ""
    trained = f"{record['workload']['name']}, {record['workload']['train']} training items"
    return f"{device_name(record)} · {trained} · torch {record['versions']['torch']} · scale {record['scale']}"


def add_caption(figure: Figure, title: str, marks: Sequence[Artist] = (), *, about: str = "") -> None:
    """Put the title above the axes, and below them the legend of `marks`, else of all that has a label in the axes."""
    figure.suptitle(title, x=0.01, ha="left")
    handles = marks or figure.axes[0].get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, title=about, alignment="left")


def write_beside(axes: Axes, y: float, text: str) -> None:
    """Write `text` to the right of row `y`."""
    axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)


def round_ticks(axis: Axis) -> None:
    """Give a logarithmic axis a few round ticks, whether it spans a hundredth or six decades."""
    low, high = axis.get_view_interval()
    if high > 4 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 1000 * low else (1,)))
    else:
        axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def draw_change(axes: Axes, y: int, row: Row, *, before_ms: float, colour: str) -> None:
    """Draw a step of `before_ms` changed by a row's ratio, with its interval, and a prediction where it has one."""
    axes.barh(y, before_ms / row["ratio"] - before_ms, 0.5, left=before_ms, color=colour)
    axes.plot([before_ms / row["high"], before_ms / row["low"]], [y, y], "|-", markersize=7, **ON_ALL)
    if row.get("predicted_low"):
        fastest = before_ms / row["predicted_high"]
        width = before_ms / row["predicted_low"] - fastest
        axes.barh(y + 0.36, width, 0.1, left=fastest, color=PREDICTED.get_facecolor())

"""What the lessons draw: mechanisms, before anything is measured, and measurements in the units of the subject."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from speedkit.lab.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    INTERVAL,
    ORANGE,
    STYLE,
    add_caption,
    new_figure,
    ratio_text,
    round_ticks,
    write_beside,
)
from speedkit.measure.compare import Comparison


def show(figure: Figure) -> None:
    """Display a figure in a notebook as PNG, in few colours: a third of the bytes."""
    from IPython import display
    from PIL import Image

    drawn = io.BytesIO()
    small = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=90)
    few = Image.open(drawn).convert("RGB").quantize(128, method=Image.Quantize.FASTOCTREE)
    few.save(small, format="png", optimize=True)
    display.display(display.Image(small.getvalue(), alt=figure.texts[0].get_text()))


@style.context(STYLE)
def ratios(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return a forest plot: each measured ratio with its 99 % interval, hollow where that holds 1."""
    figure, axes = new_figure(0.44 * len(rows) + 1.35, [row["name"] for row in rows])
    for y, row in enumerate(rows):
        is_shown = row["low"] > 1 or row["high"] < 1
        fill = BLUE if is_shown else "white"
        axes.plot([row["low"], row["high"]], [y, y], color=BLUE, linewidth=2, solid_capstyle="butt")
        axes.plot(row["ratio"], y, "o", color=BLUE, markerfacecolor=fill, markersize=6.5)
        write_beside(axes, y, ratio_text(row))
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.update_datalim([(0.95, 0), (1.05, 0)])  # or a difference of nothing would fill the figure
    axes.autoscale_view(scaley=False)
    axes.set(xscale="log", xlabel="time ratio, log scale: above 1 is faster")
    round_ticks(axes.xaxis)
    add_caption(figure, title, [INTERVAL], about="hollow: the interval holds 1")
    return figure


@style.context(STYLE)
def rates(comparisons: Sequence[Comparison], samples: int, *, unit: str, title: str, best: str | None = None) -> Figure:
    """Return a bar of samples per second for each comparison with one baseline, and for the baseline itself.

    `samples` are those of a step. Bars after the first are the baseline's rate times the ratio, with its 99 % interval:
    what was compared is the ratio. `best` is drawn in green.
    """
    first = comparisons[0]
    baseline = samples / first.step_s[0]
    figure, axes = new_figure(0.48 * len(comparisons) + 1.4, [first.a, *(row.b for row in comparisons)])
    axes.barh(0, baseline, 0.6, color=GREY)
    write_beside(axes, 0, f"{baseline:,.0f} {unit}/s" if baseline >= 100 else f"{baseline:.3g} {unit}/s")
    for y, row in enumerate(comparisons, 1):
        axes.barh(y, baseline * row.ratio, 0.6, color=GREEN if row.b == best else BLUE)
        axes.plot([baseline * row.low, baseline * row.high], [y, y], "|-", color=INK, markersize=7)
        write_beside(axes, y, ratio_text(vars(row)))
    axes.set(xlim=(0, None), xlabel=f"{unit} per second of training: longer is faster (line: 99 % interval)")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def memory_layouts() -> Figure:
    """Return six pixels of three channels as they lie in memory in NCHW and in NHWC; one pixel is framed."""
    figure, axes = new_figure(2.4)
    colours = (ORANGE, GREEN, BLUE)
    orders = {
        "NCHW\nchannel by channel": [(channel, pixel) for channel in range(3) for pixel in range(6)],
        "NHWC\npixel by pixel": [(channel, pixel) for pixel in range(6) for channel in range(3)],
    }
    for y, cells in enumerate(orders.values()):
        for x, (channel, pixel) in enumerate(cells):
            look: dict[str, Any] = {"linewidth": 3, "edgecolor": INK} if pixel == 2 else {"edgecolor": "white"}
            zorder = 3 if pixel == 2 else 2
            place = (x + 0.06, y + 0.14)
            axes.add_patch(Rectangle(place, 0.88, 0.72, facecolor=colours[channel], zorder=zorder, **look))
            axes.text(x + 0.5, y + 0.5, f"{'RGB'[channel]}{pixel}", ha="center", va="center", color="white", zorder=4)
    axes.set(xlim=(0, 18), ylim=(2, 0), xlabel="address in memory")
    axes.set_yticks((0.5, 1.5), list(orders))
    axes.set_xticks([])
    axes.grid(visible=False)
    figure.suptitle("One pixel (framed): three reads far apart, or one", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def streams() -> Figure:
    """Return what host, copies and kernels do in three steps: one after the other, and with copies a step ahead."""
    figure, axes = new_figure(3.4)
    copy_ms, compute_ms, step = 2.0, 5.0, 0.0
    bars = {"copy": ORANGE, "compute": BLUE}
    ends = []
    for top, overlapped in ((0, False), (3, True)):
        copied_ms = computed_ms = 0.0
        for step in range(3):
            begin_ms = copied_ms if overlapped else computed_ms
            copied_ms = begin_ms + copy_ms
            start_ms = max(copied_ms, computed_ms)
            computed_ms = start_ms + compute_ms
            for row, (kind, left, width) in enumerate((("copy", begin_ms, copy_ms), ("compute", start_ms, compute_ms))):
                axes.barh(top + row, width - 0.08, 0.8, left=left, color=bars[kind])
                axes.text(left + width / 2, top + row, f"{step + 1}", ha="center", va="center", color="white")
        ends.append(computed_ms)
        axes.plot([computed_ms] * 2, [top - 0.5, top + 1.5], color=INK, linewidth=1)
    axes.set_yticks((0, 1, 3, 4), ("copies", "kernels, one stream", "copies, own stream", "kernels"))
    axes.set_ylim(4.7, -0.7)
    axes.set(xlabel="time (drawn: a copy takes two fifths of the computing)", xticks=[])
    axes.grid(visible=False)
    figure.suptitle("Three batches: each waits for its copy, or finds it made", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def queues() -> Figure:
    """Return what host and GPU do in two steps of four kernels: the loss read in each, and not at all."""
    figure, axes = new_figure(3.4)
    call_ms, kernel_ms = 0.5, 2.0
    for top, reads in ((0, True), (3, False)):
        host_ms = device_ms = 0.0
        for number in range(8):
            axes.barh(top, call_ms - 0.08, 0.8, left=host_ms, color=ORANGE)
            host_ms += call_ms
            begin_ms = max(host_ms, device_ms)
            axes.barh(top + 1, kernel_ms - 0.08, 0.8, left=begin_ms, color=BLUE)
            device_ms = begin_ms + kernel_ms
            if reads and number % 4 == 3:  # the host waits until its queue is empty, and some time to hear of it
                axes.barh(top, device_ms + 0.6 - host_ms, 0.8, left=host_ms, color=GREY, hatch="///", edgecolor="white")
                host_ms = device_ms + 0.6
        axes.plot([device_ms] * 2, [top - 0.5, top + 1.5], color=INK, linewidth=1)
    axes.set_yticks((0, 1, 3, 4), ("host, loss.item()", "GPU", "host, no reads", "GPU"))
    axes.set_ylim(4.7, -0.7)
    axes.set(xlabel="time (orange: queueing a kernel; hatched: waiting; blue: a kernel at work)", xticks=[])
    axes.grid(visible=False)
    figure.suptitle("A read empties the queue, and then the GPU waits for the host", x=0.01, ha="left")
    return figure

"""What lessons 90 and 91 draw: how a tuning decides, what stands between a stored row and a step, and rates."""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, new_figure, write_beside
from speedkit.measure.stats import LOOKS, decide, log_ratios, paired_interval

Row = Mapping[str, Any]


@style.context(STYLE)
def looks() -> Figure:
    """Return how the intervals of four made-up changes narrow from look to look, until one of them decides."""
    figure, axes = new_figure(3.4)
    draw = random.Random(5)
    colours = {"faster": GREEN, "slower": GREY, "not worth it": GREY, "undecided": ORANGE}
    for number, true_ratio in enumerate((1.3, 1.06, 1.0, 0.85)):
        noisy_s = [true_ratio * draw.gauss(1, 0.06) for _ in range(LOOKS[-1])]
        for look, pairs in enumerate(LOOKS):
            seconds = noisy_s[:pairs], [draw.gauss(1, 0.06) for _ in range(pairs)]
            found = paired_interval(*seconds)
            answer = decide(log_ratios(*seconds))
            x = look + 0.16 * (number - 1.5)
            axes.plot([x, x], [found.low, found.high], color=colours[answer], linewidth=3, solid_capstyle="butt")
            axes.plot(x, found.ratio, "o", color=colours[answer], markersize=6)
            if answer != "undecided" or pairs == LOOKS[-1]:
                axes.text(x + 0.06, found.ratio + 0.01, f"{true_ratio:g}: {answer}", va="bottom", fontsize=8.5)
                break
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(LOOKS)), [f"after {pairs} pairs" for pairs in LOOKS])
    axes.set(xlim=(-0.5, 4.0), ylabel="ratio: above 1 is faster")
    axes.set_xlabel("a look at the pairs so far (green: keep; grey: reject; orange: measure on)")
    figure.suptitle("The smaller the effect, the more pairs until its interval leaves 1", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def detours() -> Figure:
    """Return what a row passes through on its way into a batch, and what a step of a training consists of."""
    figure, axes = new_figure(3.6)
    copy, net = ("copy", 1.0, BLUE), [("forward", 3.0, GREY), ("backward", 5.0, GREY), ("update", 1.2, GREY)]
    open_file, header = ("open", 2.4, ORANGE), ("header", 1.3, ORANGE)
    hooks = [("hooks", 1.4, ORANGE), *net, ("count, move, log", 2.8, ORANGE)]
    ways = {
        "mapped file": [copy],
        "a file each": [open_file, header, copy, ("stack", 1.0, BLUE)],
        "tar stream": [header, ("decode", 2.6, ORANGE), copy, ("shuffle", 1.3, ORANGE), ("stack", 1.0, BLUE)],
        "Arrow list": [("value by value", 5.0, ORANGE), copy],
        "bare loop": net,
        "framework": hooks,
    }
    for y, parts in enumerate(ways.values()):
        left = 0.0
        for name, width, colour in parts:
            axes.barh(y + (y > 3) * 0.5, width - 0.08, 0.78, left=left, color=colour)
            middle = left + width / 2
            axes.text(middle, y + (y > 3) * 0.5, name, ha="center", va="center", color="white", fontsize=8.5)
            left += width
    axes.set_yticks([y + (y > 3) * 0.5 for y in range(len(ways))], list(ways))
    axes.set(ylim=(6.1, -0.6), xticks=[], xlabel="work for a row (above) and for a step (below), drawn, not measured")
    axes.grid(visible=False)
    figure.suptitle("Orange: what formats and frameworks add to the work that nobody can spare", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def rates_of(rows: Sequence[Row], samples: int, *, ours: str, title: str) -> Figure:
    """Return a bar of samples per second for what each row compares with the first side of all, and for that.

    A turn has `samples`. Bars after the first are its rate times the ratio, with its 99 % interval; `ours` is green.
    """
    figure, axes = new_figure(0.38 * len(rows) + 1.5, [rows[0]["a"], *(row["b"] for row in rows)])
    baseline = samples / statistics.median(rows[0]["seconds_a"])
    axes.barh(0, baseline, 0.6, color=GREY)
    write_beside(axes, 0, f"{baseline:,.0f} samples/s")
    for y, row in enumerate(rows, 1):
        axes.barh(y, baseline * row["ratio"], 0.6, color=GREEN if row["b"] == ours else BLUE)
        axes.plot([baseline * row["low"], baseline * row["high"]], [y, y], "|-", color=INK, markersize=6)
        write_beside(axes, y, f"{baseline * row['ratio']:,.0f} ({row['ratio']:.2g}×)")
    axes.set(xlim=(0, None), xlabel="samples per second: longer is faster (line: 99 % interval)")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def added_time(panels: Mapping[str, Sequence[Row]], *, ours: str, title: str) -> Figure:
    """Return, for each net by name, what each loop adds to the time per step of the first side of all rows.

    Rows have `steps_per_turn`; `ours` is green.
    """
    names = [row["b"] for row in next(iter(panels.values()))]
    figure = Figure(figsize=(8.6, 0.4 * len(names) + 1.5), layout="constrained")
    axes_row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (panel, rows) in zip(axes_row, panels.items(), strict=True):
        bare_ms = 1e3 * statistics.median(rows[0]["seconds_a"]) / rows[0]["steps_per_turn"]
        for y, row in enumerate(rows):
            low, middle, high = (1e3 * bare_ms * (1 / row[key] - 1) for key in ("high", "ratio", "low"))
            axes.barh(y, middle, 0.6, color=GREEN if row["b"] == ours else BLUE)
            axes.plot([low, high], [y, y], "|-", color=INK, markersize=6)
            axes.text(1.01, y, f"{1 / row['ratio'] - 1:+.0%}", transform=axes.get_yaxis_transform(), va="center")
        axes.set_yticks(range(len(rows)), names)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="µs per step added: shorter is faster")
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_title(f"{panel}: {bare_ms:.3g} ms per step", fontsize=9.5)
    figure.suptitle(title, x=0.01, ha="left")
    return figure

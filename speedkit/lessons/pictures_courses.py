"""What lessons show as lines: losses over steps, seconds over steps and epochs, costs over lengths and GPUs."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, new_figure, round_ticks

COLOURS = (BLUE, ORANGE, GREEN, GREY)
Row = Mapping[str, Any]


@style.context(STYLE)
def losses(courses: Mapping[str, Sequence[float]], *, title: str, panels: int = 1) -> Figure:
    """Return training losses by step, a line for each format or seed, in turns on `panels`; a cross on top is a NaN."""
    figure, every = side_by_side(title, *[1] * panels)
    for number, (name, values) in enumerate(courses.items()):
        axes = every[number % panels]
        colour = COLOURS[(number // panels - 1) % 4]
        looks = "--" if "seed" in name else "-"
        width = 4.0 if number < panels else 1.5  # seen below a line that lies on it
        axes.plot(range(1, len(values) + 1), values, looks, color=colour, label=name, linewidth=width)
        bad = [step for step, value in enumerate(values, 1) if math.isnan(value)]
        if bad:  # at the top edge: a NaN has no height
            axes.plot(
                bad,
                [1.0] * len(bad),
                "x",
                color=colour,
                mew=width,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
                label="skipped step" if name.endswith("skip") else "the loss is NaN",
            )
        _finish(axes, xlabel="step", ylabel="loss")
    return figure


@style.context(STYLE)
def distances(courses: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Return how far losses lie from those of one training, by step, a line for each of the others."""
    figure = losses(courses, title=title)
    [axes] = figure.axes
    for line in axes.lines:
        line.set_linewidth(1.5)
    axes.set(yscale="log", ylim=(1e-5, 3), ylabel="distance from bf16's loss")
    axes.set_xlabel("step (where a line leaves the figure below, there is no difference)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.5f}".rstrip("0").rstrip(".")))
    axes.legend().remove()  # drawn below instead
    figure.legend(loc="outside lower left", ncols=len(courses))
    return figure


@style.context(STYLE)
def break_even(compiled: Mapping[str, tuple[float, Sequence[float]]], *, last: float, title: str) -> Figure:
    """Return the seconds that compiling has saved by each step up to `last`: less than none, until it has paid.

    Of each plan: the seconds to compile, and those that a step saves at most, likeliest and at least, for its band.
    """
    figure, panels = side_by_side(textwrap.fill(title, 75), *[1] * len(compiled))
    ends = [0.0, *(last * each_s - seconds for seconds, saved_s in compiled.values() for each_s in saved_s)]
    low, high = min(ends + [-seconds for seconds, _ in compiled.values()]), max(ends)
    for axes, (name, (seconds, saved_s)), colour in zip(panels, compiled.items(), COLOURS, strict=False):
        most, likeliest, least = ([-seconds, last * each_s - seconds] for each_s in saved_s)
        axes.fill_between([0, last], least, most, color=colour, alpha=0.25, linewidth=0, label="99 % interval")
        axes.plot([0, last], likeliest, color=colour, label=name)
        axes.axhline(0, color=GREY, linewidth=2.5, label="eager")
        axes.set(xlim=(0, last), ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        _finish(axes, xlabel="training steps", ylabel="seconds saved so far")
    return figure


@style.context(STYLE)
def lengths(rows: Sequence[Row], title: str) -> Figure:
    """Return milliseconds and megabytes kept over the sequence length; rows {length, kernel, seconds, kept_bytes}."""
    figure, panels = side_by_side(title, 1, 1)
    labels = (("seconds", 1e-3, "ms, forward and backward"), ("kept_bytes", 1e6, "MB kept for the backward pass"))
    for axes, (key, unit, label) in zip(panels, labels, strict=True):
        for name, colour in zip(dict.fromkeys(row["kernel"] for row in rows), (ORANGE, BLUE), strict=False):
            mine = [row for row in rows if row["kernel"] == name]
            values = [row[key] / unit for row in mine]
            axes.plot([row["length"] for row in mine], values, "o-", color=colour, label=name)
        count_in_powers(axes, sorted({row["length"] for row in rows}))
        axes.set_yscale("log")
        round_ticks(axes.yaxis)
        _finish(axes, xlabel="sequence length, at the same number of tokens", ylabel=label)
    return figure


@style.context(STYLE)
def efficiencies(courses: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> Figure:
    """Return efficiency by the number of GPUs, a line of (GPUs, efficiency) for each name; eight are in a machine."""
    figure, axes = new_figure(3.2, title=title)
    for (name, points), colour in zip(courses.items(), COLOURS, strict=False):
        counts, values = zip(*points, strict=True)
        axes.plot(counts, [100 * value for value in values], "o-", markersize=3, color=colour, label=name)
    count_in_powers(axes, counts)
    axes.set(ylim=(0, 105))
    axes.axvline(8, color=INK, linestyle="--")
    _finish(axes, xlabel="GPUs (dashed: the eight of one machine)", ylabel="efficiency, per cent")
    return figure


def side_by_side(title: str, *widths: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with axes of these relative widths."""
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]


def count_in_powers(axes: Axes, counts: Sequence[int]) -> None:
    """Give the axis of x a step for each doubling, and these counts as its ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])


def _finish(axes: Axes, *, xlabel: str, ylabel: str) -> None:
    """Say what the axes and the lines are."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=True, axis="both")
    axes.legend()

"""What lessons show as lines: losses over steps, seconds over steps and epochs, costs over lengths and GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, ON_ALL, ORANGE, STYLE, new_figure

COLOURS = (BLUE, ORANGE, GREEN, GREY)
Row = Mapping[str, Any]


@style.context(STYLE)
def losses(courses: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Return training losses by step, a line for each format or seed."""
    figure, axes = new_figure(3.0, title=title)
    colours = (GREY, BLUE, ORANGE, GREEN)
    for number, (name, values) in enumerate(courses.items()):
        looks = "--" if "seed" in name else "-"
        width = 4.0 if number == 0 else 1.5  # seen below a line that lies on it
        axes.plot(range(1, len(values) + 1), values, looks, color=colours[number % 4], label=name, linewidth=width)
    _finish(axes, xlabel="step", ylabel="loss")
    return figure


@style.context(STYLE)
def break_even(
    eager_s: float, compiled: Mapping[str, tuple[float, float]], paid: Mapping[str, float], *, last: float, title: str
) -> Figure:
    """Return seconds up to step `last`: eager ones of `eager_s`, and compiled, each (seconds to compile, of a step).

    `paid` has the step at which a line crosses the eager one, where that was shown.
    """
    figure, axes = new_figure(3.2, title=title)
    axes.plot([0, last], [0, last * eager_s], color=GREY, linewidth=2.5, label="eager")
    for (name, (seconds, step_s)), colour in zip(compiled.items(), COLOURS, strict=False):
        axes.plot([0, last], [seconds, seconds + last * step_s], color=colour, label=name)
        if name in paid:
            axes.plot(paid[name], paid[name] * eager_s, "o", markersize=5, **ON_ALL)
    axes.set(xlim=(0, last), ylim=(0, None))
    _finish(axes, xlabel="training steps", ylabel="seconds since the start")
    return figure


@style.context(STYLE)
def lengths(rows: Sequence[Row], title: str) -> Figure:
    """Return milliseconds and megabytes kept over the sequence length; rows {length, kernel, seconds, kept_bytes}."""
    figure = Figure(figsize=(8.6, 3.1), layout="constrained")
    labels = (("seconds", 1e-3, "ms, forward and backward"), ("kept_bytes", 1e6, "MB kept for the backward pass"))
    for axes, (key, unit, label) in zip(figure.subplots(1, 2), labels, strict=True):
        for name, colour in zip(dict.fromkeys(row["kernel"] for row in rows), (ORANGE, BLUE), strict=False):
            mine = [row for row in rows if row["kernel"] == name]
            values = [row[key] / unit for row in mine]
            axes.plot([row["length"] for row in mine], values, "o-", color=colour, label=name)
        _count_in_powers(axes, sorted({row["length"] for row in rows}))
        axes.set(ylim=(0, None))
        _finish(axes, xlabel="sequence length, at the same number of tokens", ylabel=label)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def efficiencies(courses: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> Figure:
    """Return efficiency by the number of GPUs, a line of (GPUs, efficiency) for each name."""
    figure, axes = new_figure(3.2, title=title)
    for (name, points), colour in zip(courses.items(), COLOURS, strict=False):
        counts, values = zip(*points, strict=True)
        axes.plot(counts, [100 * value for value in values], "o-", markersize=3, color=colour, label=name)
    _count_in_powers(axes, [count for count, _ in next(iter(courses.values()))])
    axes.set(ylim=(0, 105))
    _finish(axes, xlabel="GPUs", ylabel="efficiency, per cent")
    return figure


def _count_in_powers(axes: Axes, counts: Sequence[int]) -> None:
    """Give the axis of x a step for each doubling, and these counts as its ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])


def _finish(axes: Axes, *, xlabel: str, ylabel: str) -> None:
    """Say what the axes and the lines are."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(visible=True, axis="both")
    axes.legend()

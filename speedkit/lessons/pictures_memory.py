"""What lessons show of memory: passes over it, and what micro-batches and checkpointing take, beside their time."""

from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ON_ALL, ORANGE, STYLE, add_caption, new_figure, write_beside
from speedkit.lessons.pictures_courses import count_in_powers, side_by_side

NETS = {"image": "convolutional net", "text": "transformer"}


@style.context(STYLE)
def memory_passes(operations: Sequence[tuple[str, int]]) -> Figure:
    """Return what operations, each with its number of inputs, read and write: one kernel for each, and one for all."""
    count = len(operations)
    total = count + sum(inputs for _, inputs in operations)
    rows = {"one kernel each": [*operations], "compiled": [(f"{count} operations in registers", 1)]}
    figure, axes = new_figure(2.4, [*rows], title=f"{count} operations: {total} passes over memory, or 2")
    for y, kernels in enumerate(rows.values()):
        x = 0.0
        for name, inputs in kernels:
            axes.barh(y, inputs - 0.06, 0.5, left=x, color=BLUE)
            axes.barh(y, 0.94, 0.5, left=x + inputs, color=ORANGE)
            axes.text(x, y - 0.32, name, ha="left", va="bottom", fontsize=8.5)
            x += inputs + 1
    axes.set(ylim=(1.5, -0.8), xlim=(0, None), xlabel="passes over memory (blue: reads, orange: writes)")
    axes.grid(visible=False)
    return figure


@style.context(STYLE)
def tried(
    rates: Mapping[int, float],
    peak_bytes: Mapping[int, int],
    *,
    chosen: int,
    unit: str,
    title: str,
) -> Figure:
    """Return rate [samples/s] and a step's memory [bytes] by micro-batch; the chosen one and 3 % are marked.

    The dashed line is fitted by least squares to the seconds per sample, up to the fastest size: a fixed cost of each
    pass, and one per sample.
    """
    figure, (rate, memory) = side_by_side(title, 1, 1)
    best = max(rates.values())
    fitted = [*rates][: max(2, 1 + [*rates.values()].index(best))]
    fixed_s, each_s = linear_regression([1 / size for size in fitted], [1 / rates[size] for size in fitted])
    fit = [size / (fixed_s + size * each_s) for size in rates]
    rate.axhspan(0.97 * best, best, color=GREY, alpha=0.3, label="within 3 % of the best")
    rate.plot([*rates], [*rates.values()], "o-", color=BLUE, label="measured")
    rate.plot(
        [*rates], fit, "--", color=INK, label=f"fit: {1e3 * fixed_s:.2g} ms a pass, {1e3 * each_s:.2g} ms a sample"
    )
    memory.plot([*rates], [peak_bytes[size] / 1e6 for size in rates], "o-", color=ORANGE)
    for axes, label in ((rate, f"{unit}/s: higher is faster"), (memory, "MB that a step takes")):
        axes.axvline(chosen, color=GREEN, linewidth=2, label=f"chosen: {chosen}")
        count_in_powers(axes, [*rates])
        axes.set(xlabel="micro-batch, samples", ylabel=label, ylim=(0, None))
    figure.legend(*rate.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@style.context(STYLE)
def trade(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return what each row's plan keeps and needs at most, and how long its step takes, beside the first of its `net`.

    `low` and `high` of a row are the interval of its time, as shares of the first row's.
    """
    first = {row["net"]: row for row in reversed(rows)}
    changed = [row for row in rows if row is not first[row["net"]]]
    figure, axes = new_figure(0.7 * len(changed) + 1.5, [f"{NETS[row['net']]}\n{row['mode']}" for row in changed])
    bars = (
        (-0.27, "kept_bytes", 1e6, "MB kept", BLUE),
        (0.0, "peak_bytes", 1e6, "MB peak", GREY),
        (0.27, "step_s", 1e-3, "ms", ORANGE),
    )
    for y, row in enumerate(changed):
        plain = first[row["net"]]
        for shift, key, unit, name, colour in bars:
            axes.barh(y + shift, 100 * row[key] / plain[key], 0.25, color=colour, label="" if y else name)
            write_beside(axes, y + shift, f"{row[key] / unit:.3g} of {plain[key] / unit:.3g} {name}")
        axes.plot([100 * row["low"], 100 * row["high"]], [y + 0.27] * 2, "|-", markersize=7, **ON_ALL)
    axes.axvline(100, color=INK)
    axes.set_xlabel("per cent of keeping all (line: 99 % interval of the time)")
    add_caption(figure, title, about="blocks: only a block's input is kept; selective: results of products, too")
    return figure

"""What the lesson on batch size draws: what a pass costs whatever its size, and what was tried."""

from collections.abc import Mapping

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure


@style.context(STYLE)
def shared_cost() -> Figure:
    """Return the time per sample of a pass over 1 to 64 samples: a fixed cost shared by all, and each one's own."""
    figure, axes = new_figure(2.7)
    sizes = [1 << power for power in range(7)]
    fixed = [4 / size for size in sizes]
    axes.bar(range(7), 1, 0.7, color=BLUE, label="a sample's own computing")
    axes.bar(
        range(7), fixed, 0.7, bottom=1, color=ORANGE, label="its share of the fixed cost: launching, reading weights"
    )
    axes.set_xticks(range(7), [str(size) for size in sizes])
    axes.set(xlabel="micro-batch, samples", ylabel="time per sample (drawn)", yticks=[])
    axes.grid(visible=False)
    axes.legend(frameon=False)
    figure.suptitle("A pass has a fixed cost: soon there is little left to share", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def tried(rates: Mapping[int, float], peak_bytes: Mapping[int, int], *, chosen: int, unit: str, title: str) -> Figure:
    """Return rate [samples/s] and a step's memory [bytes] by micro-batch; the chosen one and 3 % are marked."""
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    rate, memory = figure.subplots(1, 2)
    best = max(rates.values())
    rate.axhspan(0.97 * best, best, color=GREY, alpha=0.3, label="within 3 % of the best")
    rate.plot([*rates], [*rates.values()], "o-", color=BLUE)
    memory.plot([*rates], [peak_bytes[size] / 1e6 for size in rates], "o-", color=ORANGE)
    for axes, label in ((rate, f"{unit}/s: higher is faster"), (memory, "MB that a step takes")):
        axes.axvline(chosen, color=GREEN, linewidth=2, label=f"chosen: {chosen}")
        axes.set(xscale="log", xlabel="micro-batch, samples", ylabel=label, ylim=(0, None))
        axes.set_xticks([*rates], [str(size) for size in rates])
        axes.xaxis.set_minor_locator(NullLocator())
    figure.legend(*rate.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    figure.suptitle(title, x=0.01, ha="left")
    return figure

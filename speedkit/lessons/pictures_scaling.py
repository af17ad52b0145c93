"""What the lesson on several GPUs draws: gradients on their way beside the backward pass, and efficiency on paper."""

from collections.abc import Mapping, Sequence

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure

COLOURS = (BLUE, ORANGE, GREEN, GREY)


@style.context(STYLE)
def buckets(layers: int = 6, send: float = 0.7) -> Figure:
    """Return a backward pass and its sending: each layer's gradient after the pass, and in buckets during it."""
    figure, axes = new_figure(3.0)
    for top, size in ((0, 1), (3, 2)):
        overlapped, sent = top > 0, 0.0
        for layer in range(layers):
            axes.barh(top, 0.92, 0.8, left=layer, color=BLUE)
            axes.text(layer + 0.46, top, f"{layers - layer}", ha="center", va="center", color="white")
        for number in range(layers // size):
            ready = (number + 1) * size if overlapped else layers
            begin = max(ready, sent)
            seconds = send * size * (0.85 if size > 1 else 1.0)  # fewer messages, less latency
            axes.barh(top + 1, seconds - 0.06, 0.8, left=begin, color=ORANGE)
            sent = begin + seconds
        axes.plot([sent] * 2, [top - 0.5, top + 1.5], color=GREY, linewidth=1)
    axes.set_yticks((0, 1, 3, 4), ("backward pass", "sent by hand", "backward pass", "sent in buckets"))
    axes.set(ylim=(4.7, -0.7), xticks=[], xlabel="time (numbers: layers, the last one first)")
    axes.grid(visible=False)
    figure.suptitle("Buckets of gradients are sent while earlier layers still compute", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def efficiencies(courses: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> Figure:
    """Return efficiency by the number of GPUs, a line of (GPUs, efficiency) for each name."""
    figure, axes = new_figure(3.2)
    for number, (name, points) in enumerate(courses.items()):
        counts, values = zip(*points, strict=True)
        axes.plot(counts, [100 * value for value in values], "o-", markersize=3, color=COLOURS[number % 4], label=name)
    axes.set_xscale("log", base=2)
    ticks = [count for count, _ in next(iter(courses.values()))]
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.set(xlabel="GPUs", ylabel="efficiency, per cent", ylim=(0, 105))
    axes.grid(visible=True, axis="both")
    axes.legend(frameon=False, loc="center right")
    figure.suptitle(title, x=0.01, ha="left")
    return figure

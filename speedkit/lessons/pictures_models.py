"""What the lessons on attention and on bad numbers draw."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, new_figure

Row = Mapping[str, Any]


@style.context(STYLE)
def tiles() -> Figure:
    """Return the scores of eight queries and keys: stored as a whole, and visited tile by tile."""
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    whole, blocks = figure.subplots(1, 2)
    for axes in (whole, blocks):
        for x in range(8):
            for y in range(8):
                place = y // 2 * 4 + x // 2  # of the tile, in the order of visits
                colour = ORANGE if axes is whole or place == 6 else "#DDE3EA" if place < 6 else "white"
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=GREY, linewidth=0.5))
        axes.set(xlim=(0, 14), ylim=(8, 0), aspect="equal", xticks=[], yticks=[], xlabel="keys", ylabel="queries")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_label_coords(0.29, -0.02)
    blocks.add_patch(Rectangle((4, 2), 2, 2, fill=False, edgecolor=INK, linewidth=2.5))
    whole.text(8.5, 4, "math:\nall T × T scores\nare in memory", va="center")
    blocks.text(8.5, 4, "flash: one tile,\nand per query\na maximum, a sum,\nthe output so far", va="center")
    figure.suptitle("The same scores: stored (orange), or seen one tile at a time", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def lengths(rows: Sequence[Row], title: str) -> Figure:
    """Return milliseconds and megabytes kept over the sequence length; rows {length, kernel, seconds, kept_bytes}."""
    figure = Figure(figsize=(8.6, 3.1), layout="constrained")
    panels = figure.subplots(1, 2)
    ticks = sorted({row["length"] for row in rows})
    labels = (("seconds", 1e-3, "ms, forward and backward"), ("kept_bytes", 1e6, "MB kept for the backward pass"))
    for axes, (key, unit, label) in zip(panels, labels, strict=True):
        for name, colour in zip(dict.fromkeys(row["kernel"] for row in rows), (ORANGE, BLUE), strict=False):
            mine = [row for row in rows if row["kernel"] == name]
            values = [row[key] / unit for row in mine]
            axes.plot([row["length"] for row in mine], values, "o-", color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set(ylim=(0, None), xlabel="sequence length, at the same number of tokens", ylabel=label)
        axes.legend()
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def spread_of_nan() -> Figure:
    """Return what one NaN reaches in a training step: without a guard, with the step left out, and with a guard."""
    figure, axes = new_figure(2.9)
    stages = ("batch", "BatchNorm's\naverages", "loss", "gradients", "clipped\ngradients", "weights")
    reached = {"no guard": "xxxxxx", "optimizer step left out": "xxxxx.", "guard": "x.xxx."}
    for y, marks in enumerate(reached.values()):
        for x, (stage, mark) in enumerate(zip(stages, marks, strict=True)):
            bad, lasting = mark == "x", stage.startswith(("Batch", "weights"))
            look: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.5} if lasting else {"edgecolor": "white"}
            axes.add_patch(Rectangle((x + 0.08, y + 0.12), 0.84, 0.76, facecolor=ORANGE if bad else GREEN, **look))
            axes.text(x + 0.5, y + 0.5, "NaN" if bad else "intact", ha="center", va="center", color="white")
    axes.set(xlim=(0, 6), ylim=(3, 0))
    axes.set_yticks([y + 0.5 for y in range(3)], list(reached))
    axes.set_xticks([x + 0.5 for x in range(6)], list(stages))
    axes.xaxis.tick_top()
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure.suptitle("One NaN passes through a step; what is framed stays for the next", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def courses(rows: Sequence[Row], title: str) -> Figure:
    """Return the loss of each step for each fault and value of on_nonfinite; crosses where it is not below 100."""
    figure = Figure(figsize=(8.6, 3.1), layout="constrained")
    faults = list(dict.fromkeys(row["fault"] for row in rows))
    for axes, fault in zip(figure.subplots(1, len(faults), squeeze=False)[0], faults, strict=True):
        for place, (mode, colour) in enumerate({"raise": GREY, "skip": BLUE}.items()):
            mine = [row for row in rows if (row["fault"], row["on_nonfinite"]) == (fault, mode)]
            good = [row for row in mine if row["loss"] is not None and row["loss"] < 100]
            bad = [row["step"] for row in mine if row not in good]
            look: dict[str, Any] = {"color": colour, "label": mode, "linewidth": 3.4 - place}
            axes.plot([row["step"] for row in good], [row["loss"] for row in good], **look)
            axes.plot(bad, [-0.3 - 0.25 * place] * len(bad), "x", color=colour, markersize=4)
        axes.set(xlabel="step", ylabel="loss (crosses: none below 100)")
        axes.set_title(fault, loc="left", fontsize=9)
        axes.legend(loc="upper right")
    figure.suptitle(title, x=0.01, ha="left")
    return figure

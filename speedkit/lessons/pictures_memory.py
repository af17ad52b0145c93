"""What the lesson on memory draws: activations over a step, and what recomputing them saves and costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure


def activations(layers: int, inside: float, *, recomputed: bool) -> list[float]:
    """Return what is held after each layer's forward and backward pass: an input of 1 each, and perhaps its inside."""
    held, course = 0.0, [0.0]
    for _ in range(layers):
        course.append(held + 1 + inside)  # while the layer is at work its inside is there either way
        held += 1.0 if recomputed else 1 + inside
        course.append(held)
    for _ in range(layers):
        course.append(held + inside if recomputed else held)  # computed a second time
        held -= 1.0 if recomputed else 1 + inside
        course.append(held)
    return course


@style.context(STYLE)
def step_memory(layers: int = 6, inside: float = 4.0) -> Figure:
    """Return the activations in memory over a step, all of them kept and each layer's inside computed again."""
    figure, axes = new_figure(2.8)
    for recomputed, colour, label in ((False, GREY, "all kept"), (True, BLUE, "inputs kept, insides computed again")):
        course = activations(layers, inside, recomputed=recomputed)
        axes.plot(range(len(course)), course, color=colour, label=label)
        axes.fill_between(range(len(course)), course, color=colour, alpha=0.15)
    top = layers * (1 + inside)
    axes.axvline(2 * layers, color=GREY, linestyle=":", linewidth=1)
    axes.text(1.5 * layers, 1.06 * top, "forward", ha="center")
    axes.text(3 * layers, 1.06 * top, "backward", ha="center")
    axes.set(
        xticks=[], ylim=(0, 1.2 * top), xlabel=f"time, through {layers} layers and back", ylabel="activations held"
    )
    axes.legend(frameon=False, loc="upper left")
    figure.suptitle(
        "A layer's inside: kept from the forward pass to the backward pass, or made twice", x=0.01, ha="left"
    )
    return figure


@style.context(STYLE)
def trade(rows: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return what each row's plan keeps and how long its step takes, beside the first row of the same `net`."""
    figure, axes = new_figure(0.55 * len(rows) + 1.3)
    first: dict[str, Mapping[str, Any]] = {}
    for y, row in enumerate(rows):
        plain = first.setdefault(row["net"], row)
        for shift, key, colour in ((-0.2, "kept_bytes", BLUE), (0.2, "step_s", ORANGE)):
            share = row[key] / plain[key]
            axes.barh(y + shift, 100 * share, 0.36, color=colour)
            text = f"{row[key] / 1e6:.3g} MB" if key == "kept_bytes" else f"{1e3 * row[key]:.3g} ms"
            axes.text(100 * share + 1, y + shift, text, va="center", fontsize=8.5)
    axes.axvline(100, color=GREEN, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['net']}, {row['checkpointing']}" for row in rows])
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="per cent of keeping all (blue: memory kept, orange: time of a step)")
    figure.suptitle(title, x=0.01, ha="left")
    return figure

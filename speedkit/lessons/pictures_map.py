"""What the map shows: the roofline of this machine, with the four workloads on it."""

from collections.abc import Mapping

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure

VIOLET = "#CC79A7"


@style.context(STYLE)
def roofline(
    bandwidth: float, products: Mapping[str, float], steps: Mapping[str, tuple[float, float]], *, title: str
) -> Figure:
    """Return the machine's roofline with training steps on it (Williams et al. 2009).

    `bandwidth` is in bytes per second, `products` in FLOP/s by format, `steps` FLOPs per byte and FLOP/s by name.
    """
    figure, axes = new_figure(3.6, title=title)
    left, right = 0.2, 20.0 * max(products.values()) / bandwidth
    for (name, rate), colour in zip(distinct(products).items(), (GREY, BLUE, ORANGE, GREEN, VIOLET), strict=False):
        knee = rate / bandwidth
        axes.plot([left, knee, right], [left * bandwidth, rate, rate], color=colour)
        axes.text(right, 1.06 * rate, f"products in {name}", ha="right", va="bottom", color=colour, fontsize=8.5)
    axes.text(1.5 * left, left * bandwidth, "memory", va="bottom", fontsize=8.5)
    for name, (intensity, rate) in steps.items():
        axes.plot(intensity, rate, "o", color=ORANGE)
        axes.annotate(name, (intensity, rate), (5, -3), textcoords="offset points", va="top")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte that is moved", ylabel="FLOPs per second")
    axes.yaxis.set_minor_formatter("")
    axes.grid(visible=True, axis="both")
    return figure


def distinct(products: Mapping[str, float]) -> dict[str, float]:
    """Return the rates by name; those within a tenth of each other have one line, with all their names."""
    lines: list[tuple[list[str], float]] = []
    for name, rate in products.items():
        near = next((names for names, other in lines if abs(other - rate) < 0.1 * rate), None)
        if near is None:
            lines.append(([name], rate))
        else:
            near.append(name)
    return {" and ".join(names): rate for names, rate in lines}

"""What the map shows: the roofline of this machine, with the four workloads on it."""

from collections.abc import Mapping
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure, round_ticks

VIOLET = "#CC79A7"


@style.context(STYLE)
def roofline(
    bandwidth: float, products: Mapping[str, float], steps: Mapping[str, Mapping[str, Any]], *, title: str
) -> Figure:
    """Return the machine's roofline with training steps on it (Williams et al. 2009).

    `bandwidth` is in bytes per second, `products` in FLOP/s by format, `steps` what `measure.roofline` says of
    each by name, with its `limits_of`. A dotted line goes up from each step to what its format allows.
    """
    figure, axes = new_figure(3.6, title=title)
    fastest = max(products.values())
    left, right = 0.2, 20.0 * fastest / bandwidth
    lowest = min(step["achieved_flops_per_s"] for step in steps.values())
    for (name, rate), colour in zip(distinct(products).items(), (GREY, BLUE, ORANGE, GREEN, VIOLET), strict=False):
        knee = rate / bandwidth
        axes.plot([left, knee, right], [left * bandwidth / 1e9, rate / 1e9, rate / 1e9], color=colour)
        where = (right, 1.06 * rate / 1e9)
        axes.text(*where, f"products in {name}: {rate / 1e9:.0f}", ha="right", va="bottom", color=colour, fontsize=8.5)
    memory = f"memory: {bandwidth / 1e9:.0f} GB/s"
    axes.text(1.5 * left, left * bandwidth / 1e9, memory, va="bottom", fontsize=8.5)
    first = min(steps.values(), key=lambda step: step["FLOPs per byte"])
    for name, step in steps.items():
        intensity, rate = step["FLOPs per byte"], step["achieved_flops_per_s"]
        roof = min(intensity * bandwidth, step["peak_flops_per_s"])
        axes.plot([intensity] * 2, [rate / 1e9, roof / 1e9], ":", color=ORANGE, linewidth=1)
        axes.plot(intensity, rate / 1e9, "o", color=ORANGE)
        label: dict[str, Any] = {"text": f"{name}, {step['reached']:.0%}", "xytext": (6, -3), "ha": "left"}
        if step is first:  # whose label would run into the next one's
            label |= {"xytext": (-6, -3), "ha": "right"}
        axes.annotate(xy=(intensity, rate / 1e9), textcoords="offset points", va="top", **label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs for each byte that is moved (dotted: what a step misses)",
        ylabel="GFLOP/s",
    )
    axes.set_ylim(min(lowest, left * bandwidth) / 2e9, 1.6 * fastest / 1e9)
    for axis in (axes.xaxis, axes.yaxis):
        round_ticks(axis)
    axes.grid(visible=True, axis="both")
    return figure


def limits_of(step: Mapping[str, Any]) -> dict[str, float]:
    """Return what bounds a step, by what `measure.roofline` says of it: shares of the speed at products."""
    intensity = step["flops_per_step"] / step["bytes_per_step"]
    bend = step["peak_flops_per_s"] / step["peak_bandwidth"]
    return {
        "FLOPs per byte": intensity,
        "bend at": bend,
        "memory allows": min(1.0, intensity / bend),
        "without overlap": intensity / (intensity + bend),
        "reached": step["mfu"],
    }


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

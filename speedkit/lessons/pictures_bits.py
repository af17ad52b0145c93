"""What the lessons on 16 and 8 bits show: what is left of a number, by its size, in each format."""

import math
from typing import Any

import torch
from matplotlib import style
from matplotlib.figure import Figure
from torch import Tensor

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, new_figure

COLOURS = {"bf16": GREY, "e4m3": BLUE, "e5m2": GREEN, "INT8": ORANGE}
CASTS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def in_format(values: Tensor, name: str, largest: Tensor | float) -> Tensor:
    """Return `values` rounded to a format, with one scale that brings `largest` to the format's largest number."""
    if name == "INT8":
        return (values * 127 / largest).round() * largest / 127
    if name == "bf16":
        return values.bfloat16().float()
    scale = torch.finfo(CASTS[name]).max / largest
    return (values * scale).to(CASTS[name]).float() / scale


def formats() -> list[dict[str, Any]]:
    """Return how finely each format divides the numbers from 1 to 2, its largest number, and its range."""
    rows = []
    for name, dtype in CASTS.items():
        info = torch.finfo(dtype)
        orders = math.log2(info.max / info.smallest_normal)
        row = {"format": name, "from 1 to 2": round(1 / info.eps), "largest": f"{info.max:.5g}"}
        rows.append(row | {"binary orders": f"{orders:.1f}"})
    return rows


@style.context(STYLE)
def digits() -> Figure:
    """Return the relative rounding error of numbers in each format, by how far they lie below the tensor's largest."""
    title = "A thousand times below the largest number INT8 keeps nothing, e4m3 its digits"
    figure, axes = new_figure(3.2, title=title)
    orders = torch.arange(0, 26)
    within = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    for name, colour in COLOURS.items():
        errors = []
        for order in orders.tolist():
            values = (1 + within) * 2.0 ** (-order - 1)  # of one binary order each, 1 is the largest of all
            errors.append(float(((in_format(values, name, 1.0) - values) / values).abs().mean()))
        axes.plot(orders, errors, "o-", markersize=3, color=colour, label=name)
    axes.set(yscale="log", ylim=(5e-4, 1.6), xlabel="binary orders of magnitude below the tensor's largest number")
    axes.axvline(10, color=INK, linestyle="--")
    axes.text(10.2, 6e-3, "a thousand times below", color=INK, fontsize=8.5)
    axes.set(ylabel="relative error (1: all is lost)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, axis="both")
    figure.legend(loc="outside lower left", ncols=4)
    return figure

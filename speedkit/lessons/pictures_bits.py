"""What the lessons on 8 bits draw: what is left of a number, by its size, in each format."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from matplotlib import style
from matplotlib.figure import Figure
from torch import Tensor

from speedkit.lab.figures import BLUE, GREEN, GREY, ORANGE, STYLE, new_figure

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


@style.context(STYLE)
def digits(formats: Sequence[str] = ("bf16", "e4m3", "e5m2", "INT8")) -> Figure:
    """Return the relative rounding error of numbers in each format, by how far they lie below the tensor's largest."""
    figure, axes = new_figure(3.2)
    orders = torch.arange(0, 26)
    within = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    for name in formats:
        errors = []
        for order in orders.tolist():
            values = (1 + within) * 2.0 ** (-order - 1)  # of one binary order each, 1 is the largest of all
            errors.append(float(((in_format(values, name, 1.0) - values) / values).abs().mean()))
        axes.plot(orders, errors, "o-", markersize=3, color=COLOURS[name], label=name)
    axes.set(yscale="log", ylim=(5e-4, 1.6), xlabel="binary orders of magnitude below the tensor's largest number")
    axes.set(ylabel="relative error (1: all is lost)")
    axes.grid(visible=True, axis="both")
    axes.legend(frameon=False, loc="lower right", ncols=len(formats))
    figure.suptitle("Floating-point formats keep their digits over many orders, INT8 does not", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def courses(losses: Mapping[str, Sequence[float]], *, title: str, ylabel: str = "loss") -> Figure:
    """Return training losses by step, a line for each format or seed."""
    figure, axes = new_figure(3.0)
    colours = (GREY, BLUE, ORANGE, GREEN)
    for number, (name, values) in enumerate(losses.items()):
        looks = "--" if "seed" in name else "-"
        width = 4.0 if number == 0 else 1.5  # seen below a line that lies on it
        axes.plot(range(1, len(values) + 1), values, looks, color=colours[number % 4], label=name, linewidth=width)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.grid(visible=True, axis="both")
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def int8_paths() -> Figure:
    """Return what happens to the activations of one layer in dynamic and in static INT8."""
    figure, axes = new_figure(2.2)
    paths = {
        "dynamic": ("float32", "find\nlargest", "round to INT8", "INT8 × INT8, sum in INT32", "float32"),
        "static": ("float32", "", "round to INT8", "INT8 × INT8, sum in INT32", "float32"),
    }
    for y, (name, boxes) in enumerate(paths.items()):
        axes.text(-0.62, y, name, ha="right", va="center", fontweight="bold")
        filled = [(x, text) for x, text in enumerate(boxes) if text]
        for x, text in filled:
            colour = GREEN if "×" in text else ORANGE if text.startswith(("find", "round")) else GREY
            axes.text(x, y, text.replace(", ", ",\n"), ha="center", va="center", color="white", fontsize=8.5,
                      bbox={"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "none"})  # fmt: skip
        for (left, _), (right, _) in itertools.pairwise(filled):
            axes.annotate("", (right - 0.42, y), (left + 0.42, y), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.set(xlim=(-1.2, 4.6), ylim=(1.6, -0.6))
    axes.axis("off")
    figure.suptitle("Dynamic INT8 looks for a scale in every call, static INT8 knows it", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def bit_fields() -> Figure:
    """Return the bits of each number format: sign, exponent and fraction, with what they give."""
    layouts = {"fp32": (8, 23), "tf32": (8, 10), "bf16": (8, 7), "fp16": (5, 10)}
    figure, axes = new_figure(2.8, [*layouts])
    for y, (exponent, fraction) in enumerate(layouts.values()):
        fields = ((1, GREY, ""), (exponent, ORANGE, f"{exponent}"), (fraction, BLUE, f"{fraction}"))
        left = 0.0
        for bits, colour, text in fields:
            for bit in range(bits):
                axes.barh(y, 0.9, 0.7, left=left + bit, color=colour)
            axes.text(left + bits / 2, y, text, ha="center", va="center", color="white", fontweight="bold")
            left += bits
        orders = 2**exponent - 2
        axes.text(33, y, f"{orders} binary orders, {2**fraction:,} steps from 1 to 2", va="center", fontsize=8.5)
    axes.set(xlim=(0, 58), xticks=[], xlabel="bits (grey: sign, orange: exponent, blue: fraction)")
    axes.grid(visible=False)
    figure.suptitle(
        "bf16 has the range of fp32 with few digits; fp16 has more digits and little range", x=0.01, ha="left"
    )
    return figure


@style.context(STYLE)
def loss_scale_path(gradients: Tensor, scale: float) -> Figure:
    """Return where gradients lie among float16's numbers as they are, and multiplied by `scale`."""
    figure, axes = new_figure(2.8)
    exponents = torch.log2(gradients.abs().clamp(min=1e-30))
    shift = float(torch.log2(torch.tensor(scale)))
    for values, colour, label in ((exponents, GREY, "as they are"), (exponents + shift, BLUE, f"times {scale:,.0f}")):
        counts = torch.histc(values, bins=60, min=-40, max=20)
        axes.fill_between(torch.arange(-39.5, 20.5), counts, step="mid", color=colour, alpha=0.6, label=label)
    axes.axvspan(-40, -24, color=ORANGE, alpha=0.15)
    axes.axvspan(16, 20, color=ORANGE, alpha=0.15)
    axes.text(-39.5, axes.get_ylim()[1] * 0.9, "becomes zero", fontsize=8.5)
    axes.set(
        xlim=(-40, 20),
        yticks=[],
        xlabel="size of a gradient, binary orders (float16: -14 to 16, with ever fewer digits down to -24)",
    )
    axes.legend(frameon=False, loc="upper center")
    figure.suptitle("The path of a loss scale: up, through float16, and down again in float32", x=0.01, ha="left")
    return figure

"""What several lessons show: drawings of mechanisms, and ratios and rates that were measured.

A drawing is edited as drawings/NAME.svg; `make drawings` makes the PNG beside it, which GitHub shows in a notebook too.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from IPython import display
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image

from speedkit.errors import UsageError
from speedkit.lab.figures import (
    BLUE,
    GREY,
    INK,
    ON_ALL,
    ORANGE,
    STYLE,
    add_caption,
    new_figure,
    ratio_text,
    round_ticks,
    write_beside,
)
from speedkit.lessons.claims import overlap
from speedkit.measure.compare import Comparison

DRAWINGS = Path(__file__).with_name("drawings")


def drawing(name: str) -> None:
    """Display a drawing in a notebook, with two dots for a point, and its title for who cannot see it."""
    path = DRAWINGS / f"{name}.svg"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in DRAWINGS.glob("*.svg")))
        raise UsageError(f"no drawing is called {name!r}; there are {known}")
    title = ElementTree.parse(path).findtext("{*}title")
    display.display(display.Image(path.with_suffix(".png"), retina=True, alt=title))


def show(figure: Figure) -> None:
    """Display a figure in a notebook."""
    display.display(as_image(figure))


def with_sliders(slider: Callable[..., Any], draw: Callable[..., Figure], **values: float) -> None:
    """Display `draw(**values)`, and above it a slider for each value, from a tenth of it to ten times as much.

    `slider` is ipywidgets.FloatLogSlider. The picture is an output of the cell and no widget: it is drawn anew when a
    slider is moved, and a page without a kernel shows it as it was last.
    """

    def picture() -> display.Image:
        return as_image(draw(**{name: slider.value for name, slider in sliders.items()}))

    sliders = {}
    for name, value in values.items():
        power = math.log10(value)
        sliders[name] = slider(value, min=power - 1, max=power + 1, description=name.replace("_", " "))
        sliders[name].style.description_width = "10em"
        sliders[name].continuous_update = False
    display.display(*sliders.values())
    shown = display.display(picture(), display_id=True)
    for each in sliders.values():
        each.observe(lambda _: shown.update(picture()), "value")


def as_image(figure: Figure) -> display.Image:
    """Return a figure as PNG, in few colours: a third of the bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=90)
    return display.Image(few_colours(drawn.getvalue()), alt=figure.get_suptitle())


def few_colours(png: bytes) -> bytes:
    """Return a PNG as one of 128 colours, transparent where it is."""
    few = Image.open(io.BytesIO(png)).convert("RGBA").quantize(128, method=Image.Quantize.FASTOCTREE)
    small = io.BytesIO()
    few.save(small, format="png", optimize=True)
    return small.getvalue()


@style.context(STYLE)
def ratios(rows: Sequence[Mapping[str, Any]], *, title: str, predicted: Sequence[Sequence[float]] = ()) -> Figure:
    """Return a forest plot: each measured ratio with its 99 % interval, hollow where that holds 1.

    `predicted` has for each row what was predicted of it, drawn as upright lines.
    """
    figure, axes = new_figure(0.44 * len(rows) + 1.35, [row["name"] for row in rows])
    for y, row in enumerate(rows):
        mark(axes, y, row)
        write_beside(axes, y, ratio_text(row))
    for y, values in enumerate(predicted):
        axes.plot(values, [y] * len(values), "|", color=ORANGE, markersize=18, markeredgewidth=2, label="predicted")
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.update_datalim([(0.95, 0), (1.05, 0)])  # or a difference of nothing would fill the figure
    axes.autoscale_view(scaley=False)
    axes.set(xscale="log", xlabel="speed ratio, log scale: above 1 is faster")
    round_ticks(axes.xaxis)
    low, high = axes.get_xlim()
    if high < 12 * low:
        even = MaxNLocator(6, steps=[1, 2, 5])
        axes.xaxis.set_major_locator(even if high < 2 * low else LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.set_xticks([1.0, *(tick for tick in axes.get_xticks() if low <= tick <= high and abs(tick - 1) > 0.005)])
    caption_of_marks(figure, title)
    return figure


def caption_of_marks(figure: Figure, title: str) -> None:
    """Add the title, and below the figure what a `mark` is."""
    interval = Line2D([], [], color=BLUE, linewidth=2, label="99 % interval; a filled point: it leaves out 1")
    add_caption(figure, title, [interval, *figure.axes[0].get_legend_handles_labels()[0][:1]])


def larger_gain(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which of two ratios, by name, is larger, as far as their intervals tell."""
    (a, first), (b, second) = rows.items()
    if overlap(first, second):
        return "which gain is larger is undecided, for the intervals overlap"
    return f"the larger gain is that of {a if first['low'] > second['high'] else b}"


def mark(axes: Axes, y: int, row: Mapping[str, Any]) -> None:
    """Draw a ratio with its interval, hollow where that holds 1."""
    fill = "white" if row["low"] <= 1 <= row["high"] else BLUE
    axes.plot([row["low"], row["high"]], [y, y], color=BLUE, linewidth=2, solid_capstyle="butt")
    axes.plot(row["ratio"], y, "o", color=BLUE, markerfacecolor=fill, markersize=6.5)


@style.context(STYLE)
def rates(comparisons: Sequence[Comparison], samples: int, *, unit: str, title: str) -> Figure:
    """Return a bar of samples per second for each comparison with one baseline, and for the baseline itself.

    `samples` are those of a step. Bars after the first are the baseline's rate times the ratio, with its 99 % interval:
    what was compared is the ratio.
    """
    first = comparisons[0]
    baseline = samples / first.step_s[0]
    rows = [first.a, *(row.b for row in comparisons)]
    figure, axes = new_figure(0.48 * len(comparisons) + 1.4, rows, title=title)
    axes.barh(0, baseline, 0.6, color=GREY)
    write_beside(axes, 0, f"{baseline:,.0f} {unit}/s" if baseline >= 100 else f"{baseline:.3g} {unit}/s")
    for y, row in enumerate(comparisons, 1):
        axes.barh(y, baseline * row.ratio, 0.6, color=BLUE)
        axes.plot([baseline * row.low, baseline * row.high], [y, y], "|-", markersize=7, **ON_ALL)
        write_beside(axes, y, ratio_text(vars(row)))
    axes.set(xlim=(0, None), xlabel=f"{unit} per second of training: longer is faster (line: 99 % interval)")
    return figure

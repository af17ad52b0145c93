"""What the figures are drawn with: one style, one canvas, and how they get into a file or a notebook.

The colours are those that the colour-blind tell apart (Okabe and Ito 2008), opaque: they read on dark pages too.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from speedkit import files

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, GREY, BAND, PALE = "#22272E", "#7A808A", "#CBD1DA", "#E6E9ED"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "svg.hashsalt": "speedkit",
    "svg.fonttype": "path",
    "text.color": INK,
    "axes.labelcolor": INK,
    "text.parse_math": False,
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "axes.axisbelow": True,
    "grid.color": PALE,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.columnspacing": 1.4,
}
Row = Mapping[str, Any]


def device_name(record: Row) -> str:
    """Return what the machine of a record is called; rows come without a record from this machine."""
    hardware = record.get("hardware") or {"gpu": "this machine"}
    cpu = (hardware.get("cpu") or "CPU").replace("(R)", "").replace("(TM)", "")
    return hardware.get("gpu") or f"{cpu}, {hardware['cores']} cores"


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to `path` (.svg or .png), whole or not at all; the same figure gives the same bytes."""
    kind = Path(path).suffix[1:]
    with rc_context(STYLE), files.atomic(path) as temporary:
        figure.savefig(temporary, format=kind, metadata={"Date" if kind == "svg" else "Software": None}, dpi=90)


def show(figure: Figure) -> None:
    """Display a figure in a notebook as PNG, in few colours: a third of the bytes."""
    from IPython import display
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=90)
    few = Image.open(drawn).convert("RGB").quantize(128, method=Image.Quantize.FASTOCTREE)
    few.save(small, format="png", optimize=True)
    display.display(display.Image(small.getvalue(), alt=figure.texts[0].get_text()))


def canvas(height: float, left: float, right: float, foot: float = 0.78) -> tuple[Figure, Axes]:
    """Return a figure with one plain axes; head and foot keep their size whatever the height (inches)."""
    figure = Figure(figsize=(8.6, height))  # as wide as GitHub and a notebook show unscaled
    figure.subplots_adjust(left=left, right=right, top=1 - 0.62 / height, bottom=foot / height)
    return figure, figure.add_subplot()


def finish(axes: Axes, ends: Sequence[float], labels: Mapping[int, str], about: str) -> None:
    """Make x logarithmic around `ends` with few round ticks, and label the rows from top to bottom."""
    reach = (max(ends) / min(ends)) ** 0.04
    axes.set_xscale("log")
    axes.set(xlim=(min(ends) / reach, max(ends) * reach), xlabel=about, ylim=(len(labels) - 0.4, -0.6))
    wide = max(ends) / min(ends)
    subs = (1, 2, 3, 5) if wide < 30 else (1, 3) if wide < 300 else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs) if wide > 4 else MaxNLocator(6))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(list(labels), list(labels.values()), fontsize=8.5, linespacing=1.15)


def beside(axes: Axes, y: int, text: str, colour: str = INK) -> None:
    """Write `text` to the right of row `y`."""
    axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=colour)


def headed(
    figure: Figure, title: str, marks: Sequence[Any], record: Row | None = None, subject: str = "", columns: int = 0
) -> None:
    """Put a title, what it is about and a legend of `marks` around the axes; `columns` are all marks by default."""
    if record:
        work, torch = record["workload"], record["versions"]["torch"]
        trained = f"{work['name']}, {work['train']} training items"
        subject = f"{device_name(record)} · {trained} · torch {torch} · profile {record['profile']}"
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center")
    figure.text(0.012, 1 - 0.42 / height, subject, fontsize=8.5, color=GREY, va="center")
    figure.legend(
        handles=marks,
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=columns or len(marks),
        fontsize=8.5,
        handlelength=1.4,
    )

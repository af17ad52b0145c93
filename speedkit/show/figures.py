"""Figures, drawn from records only: ratios with their intervals, a climb's ladder, time to quality.

One style: colours that the colour-blind tell apart (Okabe and Ito 2008), opaque, so that they read on dark pages too.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from speedkit import files

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, GREY, BAND, PALE = "#22272E", "#7A808A", "#CBD1DA", "#E6E9ED"
STYLE: Any = {"font.family": "DejaVu Sans", "font.size": 9.0, "svg.hashsalt": "speedkit", "svg.fonttype": "path",
              "text.color": INK, "axes.labelcolor": INK, "text.parse_math": False, "figure.facecolor": "white",
              "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": GREY,
              "axes.grid": True, "axes.grid.axis": "x", "axes.axisbelow": True, "grid.color": PALE,
              "xtick.major.size": 0, "xtick.minor.size": 0, "ytick.major.size": 0, "xtick.color": INK,
              "ytick.color": INK, "legend.frameon": False, "legend.columnspacing": 1.4}  # fmt: skip
INTERVAL, FLOOR = Line2D([], [], color=INK, label="99 % interval"), Patch(color=BAND, label="noise floor")
Row = Mapping[str, Any]
_ratio = "{ratio:.2f}× ({low:.2f} to {high:.2f})".format_map


def ratios(measurements: Row | Sequence[Row], recorded: Sequence[Row] | None = None, *, names: Sequence[str] = (),
           title: str = "Measured ratios") -> Figure:  # fmt: skip
    """Return a forest plot: each measured ratio with its 99 % interval over the band that is its noise floor.

    `measurements` is a record, or rows of one; `recorded` are records of other machines (`run.recorded()`), whose rows
    of the same names stand below. `names` picks measurements, in that order. A hollow mark did not clear the noise.
    """
    here = measurements if isinstance(measurements, Mapping) else {"measurements": measurements}
    machines = [(device_name(record), colour, {row["name"]: row for row in record["measurements"]})
                for record, colour in zip((here, *(recorded or ())), (BLUE, ORANGE, GREEN, GREY) * 9, strict=False)]
    chosen = [(name, colour, rows[name]) for name in (names or machines[0][2])
              for _, colour, rows in machines if name in rows]  # fmt: skip
    with rc_context(STYLE):
        figure, axes = _canvas(0.42 * len(chosen) + 1.35, left=0.27, right=0.78)
        ends = [0.95, 1.05]
        for y, (_, colour, row) in enumerate(chosen):
            floor = max(row["noise_floor"] or 1.0, 1.0)
            clear = row["low"] > floor or row["high"] < 1 / floor
            axes.barh(y, floor - 1 / floor, 0.8, left=1 / floor, color=BAND)
            axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot(row["ratio"], y, "o", color=colour, markerfacecolor=colour if clear else "white", markersize=6.5)
            _beside(axes, y, _ratio(row))
            ends += [row["low"], row["high"], 1 / floor, floor]
        axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
        names = [name for name, *_ in chosen]
        labels = {y: textwrap.fill(name, 32) * (name not in names[:y]) for y, name in enumerate(names)}
        _finish(axes, ends, labels, "time ratio, log scale: above 1 is faster")
        marks = [*(Patch(color=colour, label=name) for name, colour, _ in machines), INTERVAL, FLOOR]
        _headed(figure, title, marks, subject="hollow: no difference beyond the noise")
    return figure


def waterfall(record: Row) -> Figure:
    """Return the ladder of a climb: a bar per rung, from the time per step before it to the one after it.

    On a log scale equal lengths are equal factors. Kept rungs are blue, rejected ones grey with the reason; the whisker
    is the 99 % interval, the bracket what was predicted, the pale band the noise floor that the whisker must clear.
    """
    step_s, rows = record["step_s"], []  # (label, seconds before, row, colour, note)
    for rung in record["rungs"]:
        note = "" if rung["kept"] else "\n".join(textwrap.wrap(rung["why"], 40, max_lines=2, placeholder=" …"))
        label = f"{rung['rung']}\n{textwrap.shorten(rung['change'], 32, placeholder=' …')}"
        rows.append((label, rung["step_s_before"], rung, BLUE if rung["kept"] else GREY, note))
    finals = [("plain PyTorch", step_s["baseline"], record["speedup"])]
    if record.get("speedup_careful") and step_s.get("careful"):
        finals.append(("a careful start", step_s["careful"], record["speedup_careful"]))
    for against, before_s, speedup in finals:
        note = f"{1e3 * before_s:.3g} ms to {1e3 * before_s / speedup['ratio']:.3g} ms"
        rows.append((f"final plan\nagainst {against}", before_s, speedup, GREEN, note))
    with rc_context(STYLE):
        figure, axes = _canvas(0.5 * (len(rows) + 1) + 1.5, left=0.27, right=0.67)
        axes.plot(1e3 * step_s["baseline"], 0, "d", color=INK, markersize=7)
        _beside(axes, 0, f"{1e3 * step_s['baseline']:.3g} ms per step")
        for y, (_, before_s, row, colour, note) in enumerate(rows, 1):
            if row["ratio"] is not None:
                _bar(axes, y, 1e3 * before_s, row, colour)
                note = f"{_ratio(row)}\n{note}".strip()
            _beside(axes, y, note, GREY if colour == GREY else INK)
        axes.axhline(len(record["rungs"]) + 0.5, color=GREY, linewidth=0.6)
        labels = dict(enumerate(["plain PyTorch, Plan()", *(row[0] for row in rows)]))
        _finish(axes, axes.dataLim.intervalx, labels, "time per step, ms, log scale: left is faster")
        marks = [Patch(color=BLUE, label="kept"), Patch(color=GREY, label="rejected"), INTERVAL, FLOOR,
                 Line2D([], [], color=ORANGE, label="predicted"), Patch(color=GREEN, label="fresh windows")]
        headline = ", ".join(f"{_ratio(speedup)} over {against}" for against, _, speedup in finals)
        _headed(figure, headline, marks, record)
    return figure


def time_to_quality(record: Row) -> Figure:
    """Return quality over time for plain PyTorch and the final plan: seeds thin, means thick, the target crossed."""
    found, target = record["time_to_quality"], record["time_to_quality"]["target"]
    with rc_context(STYLE):
        figure, axes = _canvas(3.9, left=0.1, right=0.97)
        for side, colour, name in (("baseline", ORANGE, "plain PyTorch"), ("final", BLUE, "final plan")):
            courses, reached_s = [curve["points"] for curve in found["curves"][side]], found[f"{side}_s"]
            for points in courses:
                axes.plot(*np.transpose(points), color=colour, linewidth=0.8, alpha=0.5)
            means = np.mean([points[: min(map(len, courses))] for points in courses], axis=0)  # [epochs, 2]
            label = f"{name}: target {f'after {reached_s:.3g} s' if reached_s else 'not reached'}"
            axes.plot(*means.T, "o-", color=colour, linewidth=2.4, markersize=3.5, label=label)
            if reached_s:
                axes.axvline(reached_s, color=colour, linewidth=1, linestyle=":", zorder=1)
                axes.plot(reached_s, target, "D", color=colour, markeredgecolor=INK, markersize=7, zorder=5)
        axes.axhline(target, color=INK, linewidth=0.8, linestyle="--", label=f"target {target:.3g}")
        axes.set(xlim=(0, None), ylabel=f"{record['quality']['metric']}, test set",
                 xlabel="seconds of training and evaluating; the cache was built and the model compiled before")
        sooner = f"ratio {found['ratio']:.2f}" if found["ratio"] else "not reached by both"
        _headed(figure, f"Time to quality: {sooner}", axes.get_legend_handles_labels()[0], record)
    return figure


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


def _canvas(height: float, left: float, right: float) -> tuple[Figure, Axes]:
    """Return a figure with one plain axes; head and foot keep their size whatever the height (inches)."""
    figure = Figure(figsize=(8.6, height))  # as wide as GitHub and a notebook show unscaled
    figure.subplots_adjust(left=left, right=right, top=1 - 0.62 / height, bottom=0.78 / height)
    return figure, figure.add_subplot()


def _finish(axes: Axes, ends: Sequence[float], labels: Mapping[int, str], about: str) -> None:
    """Make x logarithmic around `ends` with few round ticks, and label the rows from top to bottom."""
    reach = (max(ends) / min(ends)) ** 0.04
    axes.set_xscale("log")
    axes.set(xlim=(min(ends) / reach, max(ends) * reach), xlabel=about, ylim=(len(labels) - 0.4, -0.6))
    wide = max(ends) > 4 * min(ends)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)) if wide else MaxNLocator(6))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(list(labels), list(labels.values()), fontsize=8.5, linespacing=1.15)


def _bar(axes: Axes, y: int, before: float, row: Row, colour: str) -> None:
    """Draw a step from `before` [ms] by a row's ratio, with interval, noise floor and prediction where it has them."""
    after, floor = before / row["ratio"], max(row.get("noise_floor") or 1.0, 1.0)
    axes.barh(y, before * floor - before / floor, 0.84, left=before / floor, color=BAND)
    axes.barh(y, abs(after - before), 0.5, left=min(after, before), color=colour)
    axes.plot([before, before], [y - 0.36, y + 0.36], color=INK, linewidth=0.8)
    for low, high, at, mark in (("low", "high", y, INK), ("predicted_low", "predicted_high", y + 0.36, ORANGE)):
        if row.get(low) and row.get(high):
            axes.plot([before / row[high], before / row[low]], [at, at], "|-", color=mark, linewidth=1.5, markersize=7)


def _beside(axes: Axes, y: int, text: str, colour: str = INK) -> None:
    axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=colour)


def _headed(figure: Figure, title: str, marks: Sequence[Any], record: Row | None = None, subject: str = "") -> None:
    if record:
        work, torch = record["workload"], record["versions"]["torch"]
        trained = f"{work['name']}, {work['train']} training items"
        subject = f"{device_name(record)} · {trained} · torch {torch} · profile {record['profile']}"
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center")
    figure.text(0.012, 1 - 0.42 / height, subject, fontsize=8.5, color=GREY, va="center")
    figure.legend(handles=marks, loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=len(marks), fontsize=8.5,
                  handlelength=1.4)  # fmt: skip

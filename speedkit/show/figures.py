"""Figures, drawn from records only: ratios, a climb's ladder, where the time goes, rooflines, time to quality."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from speedkit.clock import duration as seconds
from speedkit.show.canvas import BAND, BLUE, GREEN, GREY, INK, ORANGE, STYLE, Row, beside, canvas, finish, headed
from speedkit.show.canvas import device_name as device_name
from speedkit.show.canvas import save as save
from speedkit.show.canvas import show as show

INTERVAL, FLOOR = Line2D([], [], color=INK, label="99 % interval"), Patch(color=BAND, label="noise floor")
GUESS = Line2D([], [], color=ORANGE, label="predicted")
PREDICTED, NAMES = "#F3C6A5", {"baseline": "plain PyTorch", "final": "final plan"}
# What to do about them goes from left to right: feeding, launching, computing, what happens now and then, the rest.
COLOURS = {
    "data wait": "#D55E00",
    "host-to-device copy": "#E69F00",
    "launch-bound": "#CC79A7",
    "sync-bound": "#882255",
    "compute-bound": "#0072B2",
    "bandwidth-bound": "#56B4E9",
    "forward": "#332288",
    "backward": "#7FA7D8",
    "optimizer": "#009E73",
    "evaluation and checkpoint": "#B8DE9B",
    "compilation": "#F0E442",
    "other host work": "#8C7A3F",
    "idle": "#A9B0BB",
    "unexplained": "#FFFFFF",
}
UNEXPLAINED: Any = {"facecolor": "white", "edgecolor": INK, "linewidth": 0.8, "hatch": "////"}
_ratio = "{ratio:.2f}× ({low:.2f} to {high:.2f})".format_map


def ratios(
    measurements: Row | Sequence[Row],
    recorded: Sequence[Row] | None = None,
    *,
    names: Sequence[str] = (),
    title: str = "Measured ratios",
) -> Figure:
    """Return a forest plot: each measured ratio with its 99 % interval over the band that is its noise floor.

    `measurements` is a record, or rows of one; `recorded` are records of other machines (`run.recorded()`), whose rows
    of the same names stand below. `names` picks measurements, in that order. A hollow mark did not clear the noise.
    """
    here = measurements if isinstance(measurements, Mapping) else {"measurements": measurements}
    machines = [
        (device_name(record), colour, {row["name"]: row for row in record["measurements"]})
        for record, colour in zip((here, *(recorded or ())), (BLUE, ORANGE, GREEN, GREY) * 9, strict=False)
    ]
    chosen = [
        (name, colour, rows[name]) for name in (names or machines[0][2]) for _, colour, rows in machines if name in rows
    ]
    with rc_context(STYLE):
        figure, axes = canvas(0.42 * len(chosen) + 1.35, left=0.27, right=0.78)
        ends = [0.95, 1.05]
        for y, (_, colour, row) in enumerate(chosen):
            floor = max(row.get("noise_floor") or 1.0, 1.0)
            clear = row["low"] > floor or row["high"] < 1 / floor
            axes.barh(y, floor - 1 / floor, 0.8, left=1 / floor, color=BAND)
            axes.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot(row["ratio"], y, "o", color=colour, markerfacecolor=colour if clear else "white", markersize=6.5)
            beside(axes, y, _ratio(row))
            ends += [row["low"], row["high"], 1 / floor, floor]
        axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
        names = [name for name, *_ in chosen]
        labels = {y: textwrap.fill(name, 32) * (name not in names[:y]) for y, name in enumerate(names)}
        finish(axes, ends, labels, "time ratio, log scale: above 1 is faster")
        marks = [*(Patch(color=colour, label=name) for name, colour, _ in machines), INTERVAL, FLOOR]
        headed(figure, title, marks, subject="hollow: no difference beyond the noise")
    return figure


def waterfall(record: Row) -> Figure:
    """Return the ladder of a climb: a bar per rung, from the time per step before it to the one after it.

    Rejected rungs have their reason; the pale band is the noise floor that the whisker, the interval, must clear.
    """
    step_s, rows = record["step_s"], []  # (label, seconds before, row, colour, note)
    rungs = [rung for rung in record["rungs"] if rung["change"] != "nothing"]
    for rung in rungs:
        note = "" if rung["kept"] else "\n".join(textwrap.wrap(rung["why"], 40, max_lines=2, placeholder=" …"))
        rows.append((_rung_label(rung), rung["step_s_before"], rung, BLUE if rung["kept"] else GREY, note))
    finals = [("plain PyTorch", step_s["baseline"], record["speedup"])]
    if record.get("speedup_careful") and step_s.get("careful"):
        finals.append(("a careful start", step_s["careful"], record["speedup_careful"]))
    for against, before_s, speedup in finals:
        note = f"{1e3 * before_s:.3g} ms to {1e3 * before_s / speedup['ratio']:.3g} ms"
        rows.append((f"final plan\nagainst {against}", before_s, speedup, GREEN, note))
    with rc_context(STYLE):
        figure, axes = canvas(0.5 * (len(rows) + 1) + 1.5, left=0.27, right=0.67)
        axes.plot(1e3 * step_s["baseline"], 0, "d", color=INK, markersize=7)
        beside(axes, 0, f"{1e3 * step_s['baseline']:.3g} ms per step")
        for y, (_, before_s, row, colour, note) in enumerate(rows, 1):
            if row["ratio"] is not None:
                _bar(axes, y, 1e3 * before_s, row, colour)
                note = f"{_ratio(row)}\n{note}".strip()
            beside(axes, y, note, GREY if colour == GREY else INK)
        axes.axhline(len(rungs) + 0.5, color=GREY, linewidth=0.6)
        labels = dict(enumerate(["plain PyTorch, Plan()", *(row[0] for row in rows)]))
        finish(axes, axes.dataLim.intervalx, labels, "time per step, ms, log scale: left is faster")
        marks = [
            Patch(color=BLUE, label="kept"),
            Patch(color=GREY, label="rejected"),
            INTERVAL,
            FLOOR,
            GUESS,
            Patch(color=GREEN, label="fresh windows"),
        ]
        headline = ", ".join(f"{_ratio(speedup)} over {against}" for against, _, speedup in finals)
        headed(figure, headline, marks, record)
    return figure


def predicted(record: Row) -> Figure:
    """Return what each rung of a climb was predicted to gain, a pale bar, and what was measured, with its interval."""
    rows = [row for row in record["rungs"] if row["ratio"] is not None and row["predicted_low"] is not None]
    met = sum(row["predicted_low"] <= row["high"] and row["low"] <= row["predicted_high"] for row in rows)
    with rc_context(STYLE):
        figure, axes = canvas(0.46 * max(1, len(rows)) + 1.35, left=0.27, right=0.74)
        ends = [0.95, 1.05]
        for y, row in enumerate(rows):
            guess, found = ([row[f"{kind}low"], row[f"{kind}high"]] for kind in ("predicted_", ""))
            axes.plot(guess, [y, y], "|-", color=PREDICTED, linewidth=11, markersize=11, solid_capstyle="butt")
            axes.plot(found, [y, y], color=BLUE, linewidth=2, solid_capstyle="butt")
            fill = BLUE if row["kept"] else "white"
            axes.plot(row["ratio"], y, "o", color=BLUE, markerfacecolor=fill, markersize=6.5)
            beside(axes, y, f"{_ratio(row)}\npredicted {guess[0]:.2f} to {guess[1]:.2f}")
            ends += [*guess, *found]
        axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
        labels = {y: _rung_label(row) for y, row in enumerate(rows)}
        finish(axes, ends, labels, "time ratio, log scale: above 1 is faster")
        dots = (
            Line2D([], [], color=BLUE, marker="o", linestyle="", markerfacecolor=fill, label=label)
            for fill, label in ((BLUE, "kept"), ("white", "rejected"))
        )
        marks = [Patch(color=PREDICTED, label="predicted before"), INTERVAL, *dots]
        title = f"{met} of {len(rows)} measured intervals meet what was predicted" if rows else "No rung was tried"
        headed(figure, title, marks, record)
    return figure


def ledgers(found: Mapping[str, Row], record: Row | None = None) -> Figure:
    """Return where the time of a step goes: for each ledger by name, a bar of shares that add up to 100 %.

    A segment is named where its name fits. What is unexplained is hatched; below 0, causes overlap by so much.
    """
    seen = [cause for cause in COLOURS if any(row["cause"] == cause for each in found.values() for row in each["rows"])]
    with rc_context(STYLE):
        foot = 0.68 + 0.18 * -(-len(seen) // 5)  # rows of the legend
        figure, axes = canvas(0.66 * len(found) + 0.6 + foot, left=0.155, right=0.8, foot=foot)
        for y, ledger in enumerate(found.values()):
            shares, left = {row["cause"]: 100 * row["share"] for row in ledger["rows"]}, 0.0
            for cause in filter(shares.get, seen[:-1]):
                axes.barh(y, shares[cause], 0.72, left=left, color=COLOURS[cause], edgecolor="white", linewidth=0.6)
                _within(axes, left + shares[cause] / 2, y, cause, shares[cause])
                left += shares[cause]
            axes.barh(y, shares["unexplained"], 0.72, left=left, **UNEXPLAINED)
            beside(axes, y, f"{seconds(ledger['step_s'])} per step\nunexplained {shares['unexplained']:.1f} %")
        axes.set(ylim=(len(found) - 0.5, -0.5), xlabel="share of the wall time of a step, %")
        axes.set_yticks(range(len(found)), [textwrap.fill(name, 16) for name in found], fontsize=8.5)
        looks = {cause: {"color": colour} for cause, colour in COLOURS.items()} | {"unexplained": UNEXPLAINED}
        marks = [Patch(**looks[cause], label=cause) for cause in seen]
        times = ": " + ", then ".join(seconds(ledger["step_s"]) for ledger in found.values()) if len(found) == 2 else ""
        headed(figure, f"Where a step's time goes{times}", marks, record, columns=5)
    return figure


def roofline(record: Row) -> Figure:
    """Return how near plain PyTorch and the final plan come to what this machine reaches, both axes logarithmic.

    Right of a roof's bend computing is the limit, left of it memory. Whiskers hold 90 % of the raw windows.
    """
    rows = {name: row for name, row in record["roofline"].items() if row["flops_per_step"] and row["bytes_per_step"]}
    windows: Row = next((row for row in record["measurements"] if row["name"] == "final against baseline"), {})
    with rc_context(STYLE):
        figure, axes = canvas(4.3, left=0.1, right=0.97)
        about = {name: row["flops_per_step"] / row["bytes_per_step"] for name, row in rows.items()}  # FLOP per byte
        for row in {row["dtype"]: row for row in rows.values()}.values():
            bend = row["ceiling_flops_per_s"] / row["bandwidth_ceiling"]
            reach = np.geomspace(min(bend, *about.values()) / 8, max(bend, *about.values()) * 8, 200)
            roof = np.minimum(row["ceiling_flops_per_s"], row["bandwidth_ceiling"] * reach) / 1e9
            axes.plot(reach, roof, color=GREY, linewidth=1.4)
            axes.annotate(
                f"{row['dtype']}: {roof[-1]:.3g} GFLOP/s",
                (reach[-1], roof[-1]),
                (0, 4),
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
            )
        for name, side, colour in (("baseline", "seconds_a", ORANGE), ("final", "seconds_b", BLUE)):
            if name in rows:
                row, raw = rows[name], np.array(windows.get(side) or [1.0])
                spread = np.median(raw) / np.quantile(raw, [0.95, 0.05]) * row["achieved_flops_per_s"] / 1e9
                axes.plot([about[name]] * 2, spread, color=colour, linewidth=2)
                label = "{}: {:.3g} GFLOP/s, {mfu:.1%} of {dtype}".format(
                    NAMES[name], row["achieved_flops_per_s"] / 1e9, **row
                )
                axes.plot(about[name], row["achieved_flops_per_s"] / 1e9, "o", color=colour, markersize=8, label=label)
        axes.set(
            xscale="log",
            yscale="log",
            ylabel="GFLOP/s",
            xlabel="FLOP per byte moved, at most as many bytes as all operators read and write",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        shares = ", then ".join(f"{row['mfu']:.1%}" for row in rows.values())
        title = f"{shares} of what matrix products reach on this machine" if rows else "No FLOPs were counted"
        headed(figure, title, axes.get_legend_handles_labels()[0], record)
    return figure


def time_to_quality(record: Row) -> Figure:
    """Return quality over time for plain PyTorch and the final plan: seeds thin, means thick, the target crossed."""
    found, target = record["time_to_quality"], record["time_to_quality"]["target"]
    with rc_context(STYLE):
        figure, axes = canvas(3.9, left=0.1, right=0.97)
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
        about = "seconds of training and evaluating; the cache was built and the model compiled before"
        axes.set(xlim=(0, None), ylabel=f"{record['quality']['metric']}, test set", xlabel=about)
        sooner = f"ratio {found['ratio']:.2f}" if found["ratio"] else "not reached by both"
        headed(figure, f"Time to quality: {sooner}", axes.get_legend_handles_labels()[0], record)
    return figure


def _bar(axes: Axes, y: int, before: float, row: Row, colour: str) -> None:
    """Draw a step from `before` [ms] by a row's ratio, with interval, noise floor and prediction where it has them."""
    after, floor = before / row["ratio"], max(row.get("noise_floor") or 1.0, 1.0)
    axes.barh(y, before * floor - before / floor, 0.84, left=before / floor, color=BAND)
    axes.barh(y, abs(after - before), 0.5, left=min(after, before), color=colour)
    axes.plot([before, before], [y - 0.36, y + 0.36], color=INK, linewidth=0.8)
    for low, high, at, mark in (("low", "high", y, INK), ("predicted_low", "predicted_high", y + 0.36, ORANGE)):
        if row.get(low) and row.get(high):
            axes.plot([before / row[high], before / row[low]], [at, at], "|-", color=mark, linewidth=1.5, markersize=7)


def _within(axes: Axes, x: float, y: float, cause: str, share: float) -> None:
    text, dark = textwrap.fill(cause, 11), np.dot(to_rgb(COLOURS[cause]), [0.3, 0.59, 0.11]) < 0.5
    room = 0.85 * share  # characters
    text = f"{text}\n{share:.0f} %" if max(map(len, text.splitlines())) < room else f"{share:.0f} %" * (room > 3.6)
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, linespacing=1.05, color="white" if dark else INK)


def _rung_label(row: Row) -> str:
    return f"{row['rung']}\n{textwrap.shorten(row['change'], 32, placeholder=' …')}"

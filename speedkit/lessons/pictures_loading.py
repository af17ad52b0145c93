"""What lessons 02, 10 and 11 draw: a profiler's timeline, workers until the curve bends, what a decoder does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, new_figure

YELLOW = "#F0E442"
Row = Mapping[str, Any]


@style.context(STYLE)
def timeline() -> Figure:
    """Return a step of a training loop as a profiler shows it, and the name that the breakdown gives each moment."""
    figure, axes = new_figure(2.9, ["host", "GPU", "breakdown"])
    host = [(0, 30, ORANGE, "next(loader)"), (30, 5, GREY, "copy"), (35, 13, BLUE, "forward")]
    host += [
        (50, 4, BLUE, ""),
        (56, 4, BLUE, ""),
        (62, 4, BLUE, ""),
        (66, 22, YELLOW, "loss.item()"),
        (88, 12, GREY, "log"),
    ]
    device = [(31, 4, GREY, ""), (37, 12, BLUE, "kernels")]
    device += [(52, 2, BLUE, ""), (58, 2, BLUE, ""), (64, 20, BLUE, "large kernel")]
    breakdown = [(0, 31, ORANGE, "data wait"), (31, 4, GREY, "copy"), (35, 2, GREEN, ""), (37, 12, BLUE, "busy")]
    breakdown += [
        *((left, 4, GREEN, "") for left in (49, 54, 60)),
        *((left, 2, BLUE, "") for left in (52, 58)),
        (64, 20, BLUE, "busy"),
        (84, 16, YELLOW, "sync-bound"),
    ]
    for y, bars in enumerate((host, device, breakdown)):
        for left, width, colour, text in bars:
            axes.barh(y, width - 0.3, 0.72, left=left, color=colour)
            ink = INK if colour == YELLOW else "white"
            axes.text(left + width / 2, y, text, ha="center", va="center", color=ink, fontsize=8)
    axes.text(57, 2.55, "launch-bound", ha="center", va="center", color=GREEN, fontsize=8)
    axes.set(xlim=(0, 100), xticks=[], xlabel="time (drawn: one step)")
    axes.grid(visible=False)
    figure.suptitle("Where the GPU is idle, the host says why", x=0.01, ha="left")
    return figure


def limit_ms(workers: int, *, data_ms: float, compute_ms: float, cores: int, busy: int) -> float:
    """Return the shortest step [ms] that `workers` allow: computing, loading shared out, all work on all cores.

    `busy` is the number of cores that the computing takes: 0 on a GPU.
    """
    if workers == 0:
        return data_ms + compute_ms
    return max(compute_ms, data_ms / workers, (data_ms + busy * compute_ms) / cores)


@style.context(STYLE)
def bends() -> Figure:
    """Return time per step over workers where a GPU computes, and where the model and the workers share two cores."""
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    machines = {"16 cores beside a GPU": (16, 0), "2 cores, the model on both": (2, 2)}
    for axes, (name, (cores, busy)) in zip(figure.subplots(1, 2, sharey=True), machines.items(), strict=True):
        workers = range(9)
        steps = [limit_ms(count, data_ms=300, compute_ms=100, cores=cores, busy=busy) for count in workers]
        axes.plot(workers, steps, "o-", color=BLUE, zorder=3)
        axes.plot(workers[1:], [300 / count for count in workers[1:]], ":", color=ORANGE, label="loading / workers")
        axes.axhline(100, color=GREEN, linestyle="--", label="computing")
        if busy:
            axes.axhline((300 + busy * 100) / cores, color=GREY, linestyle="-.", label="all work / cores")
        axes.set(title=name, xlabel="workers", ylim=(0, 430))
        axes.legend(frameon=False)
    figure.axes[0].set_ylabel("ms per step")
    figure.suptitle("Drawn: loading takes 300 ms, computing 100 ms. The highest limit wins", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def sweep(rows: Sequence[Row], title: str) -> Figure:
    """Return time per step over workers, predicted and measured; `rows` have seconds, `low` and `high` are ratios."""
    figure, axes = new_figure(3.2)
    places = range(len(rows))
    measured = np.array([row["step_s"] for row in rows]) * 1e3
    first = measured[0]
    axes.bar(places, [1e3 * row["predicted_s"] for row in rows], 0.6, color="#F3C6A5", label="predicted")
    axes.plot(places, measured, "o-", color=BLUE, label="measured (line: 99 % interval)", zorder=3)
    for place, row in enumerate(rows[1:], 1):
        axes.plot([place] * 2, [first / row["high"], first / row["low"]], color=INK, zorder=4)
    axes.set_xticks(places, [str(row["workers"]) for row in rows])
    axes.set(xlabel="workers", ylabel="ms per step: lower is faster", ylim=(0, None))
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


@style.context(STYLE)
def codecs() -> Figure:
    """Return the work that lies between the bytes of a file and its samples, for four formats."""
    figure, axes = new_figure(2.9, ["WAV", "FLAC", "OGG Vorbis", "MP3"])
    entropy, transform = (ORANGE, "entropy code"), (BLUE, "inverse transform")
    stages = {
        0: {0: (GREY, "read"), 4: (GREEN, "scale to floats")},
        1: {0: (GREY, "read"), 1: entropy, 2: (BLUE, "predict, add the rest"), 4: (GREEN, "scale to floats")},
        2: {0: (GREY, "read"), 1: entropy, 2: transform, 3: (BLUE, "overlap windows")},
        3: {0: (GREY, "read"), 1: entropy, 2: transform, 3: (BLUE, "filter bank")},
    }
    for y, boxes in stages.items():
        axes.plot([0, 4.9], [y, y], color=INK, linewidth=1, zorder=1)
        for x, (colour, text) in boxes.items():
            axes.add_patch(Rectangle((x, y - 0.33), 0.88, 0.66, facecolor=colour, zorder=2))
            label = text.replace(", ", ",\n").replace("inverse ", "inverse\n").replace("to ", "to\n")
            axes.text(x + 0.44, y, label, ha="center", va="center", color="white", fontsize=8, zorder=3)
    axes.set(xlim=(-0.1, 5.0), xlabel="from the bytes of the file ... to samples between -1 and 1")
    axes.set_xticks([])
    axes.grid(visible=False)
    figure.suptitle("WAV is copied, FLAC is unpacked, OGG and MP3 are computed", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def decoders(rows: Sequence[Row], title: str) -> Figure:
    """Return clips per second by format and decoder; each row has `format`, `decoder` and `clips_per_s`."""
    formats = list(dict.fromkeys(row["format"] for row in rows))
    colours = {"soundfile": BLUE, "torchcodec": ORANGE, "librosa": GREEN}
    figure, axes = new_figure(0.9 * len(formats) + 1.2, formats)
    for shift, (decoder, colour) in zip((-0.26, 0.0, 0.26), colours.items(), strict=True):
        for row in rows:
            if row["decoder"] == decoder:
                y = formats.index(row["format"]) + shift
                axes.barh(y, row["clips_per_s"], 0.24, color=colour)
                axes.annotate(f" {decoder} {row['clips_per_s']:,.0f}", (row["clips_per_s"], y), va="center", fontsize=8)
    axes.set(
        xlim=(0, 1.18 * max(row["clips_per_s"] for row in rows)),
        xlabel="clips per second in one thread: longer is faster",
    )
    figure.suptitle(title, x=0.01, ha="left")
    return figure

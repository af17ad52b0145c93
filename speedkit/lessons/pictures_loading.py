"""What lessons 10 and 11 show of loading: workers until the curve bends, and decoders."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, ON_ALL, ORANGE, STYLE, new_figure

Row = Mapping[str, Any]


def limit_ms(workers: int, *, data_ms: float, compute_ms: float, cores: int, busy: int) -> float:
    """Return the shortest step [ms] that `workers` allow: computing, loading shared out, all work on all cores.

    `busy` is the number of cores that the computing takes: 0 on a GPU.
    """
    if workers == 0:
        return data_ms + compute_ms
    return max(compute_ms, data_ms / workers, (data_ms + busy * compute_ms) / cores)


@style.context(STYLE)
def sweep(rows: Sequence[Row], title: str) -> Figure:
    """Return time per step over workers, predicted and measured; `rows` have seconds, `low` and `high` are ratios."""
    figure, axes = new_figure(3.2, title=title)
    places = range(len(rows))
    measured = np.array([row["step_s"] for row in rows]) * 1e3
    first = measured[0]
    axes.bar(places, [1e3 * row["predicted_s"] for row in rows], 0.6, color="#F3C6A5", label="predicted")
    axes.plot(places, measured, "o-", color=BLUE, label="measured (line: 99 % interval)", zorder=3)
    for place, row in enumerate(rows[1:], 1):
        axes.plot([place] * 2, [first / row["high"], first / row["low"]], zorder=4, **ON_ALL)
    axes.set_xticks(places, [str(row["workers"]) for row in rows])
    axes.set(xlabel="workers", ylabel="ms per step: lower is faster", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@style.context(STYLE)
def decoders(rows: Sequence[Row], title: str) -> Figure:
    """Return clips per second by format and decoder; each row has `format`, `decoder` and `clips_per_s`."""
    formats = list(dict.fromkeys(row["format"] for row in rows))
    looks = {"soundfile": (-0.26, BLUE), "torchcodec": (0.0, ORANGE), "librosa": (0.26, GREEN)}
    figure, axes = new_figure(0.9 * len(formats) + 1.2, formats, title=title)
    for row in rows:
        shift, colour = looks[row["decoder"]]
        rate = row["clips_per_s"]
        y = formats.index(row["format"]) + shift
        axes.barh(y, rate, 0.24, color=colour)
        axes.annotate(f" {row['decoder']} {rate:,.0f}", (rate, y), va="center", fontsize=8)
    fastest = max(row["clips_per_s"] for row in rows)
    axes.set(xlim=(0, 1.18 * fastest), xlabel="clips per second in one thread: longer is faster")
    return figure

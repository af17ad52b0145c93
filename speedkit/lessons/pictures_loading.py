"""What lessons 10 and 11 show of loading: workers until the curve bends, and decoders in groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import (
    BLUE,
    DARK,
    INK,
    ON_ALL,
    STYLE,
    new_figure,
    ratio_text,
    round_ticks,
    write_beside,
)
from speedkit.lessons.pictures import caption_of_marks, mark
from speedkit.lessons.pictures_courses import side_by_side

Row = Mapping[str, Any]


@style.context(STYLE)
def sweep(panels: Mapping[str, Sequence[Row]], title: str) -> Figure:
    """Return time per step by number of workers, measured and predicted, a panel for each name.

    A row has its `label`, `step_s` and `predicted_s`; `low` and `high` are ratios of the first row's time to its own.
    """
    figure, every = side_by_side(title, *[len(rows) for rows in panels.values()])
    for axes, (name, rows) in zip(every, panels.items(), strict=True):
        places = range(len(rows))
        measured = np.array([row["step_s"] for row in rows]) * 1e3
        axes.bar(places, [1e3 * row["predicted_s"] for row in rows], 0.6, color="#F3C6A5", label="predicted")
        axes.plot(places, measured, "o", color=BLUE, label="measured (line: 99 % interval; ×: speed over no workers)")
        for place, row in enumerate(rows[1:], 1):
            axes.plot([place] * 2, [measured[0] / row["high"], measured[0] / row["low"]], zorder=4, **ON_ALL)
            ratio = f"{row['ratio']:.2f}×"
            axes.annotate(ratio, (place, 0), (0, 5), textcoords="offset points", ha="center", fontsize=8.5, color=DARK)
        axes.set_xticks(places, [row["label"].replace(", ", "\n") for row in rows])
        # One scale for all panels. A long interval would squeeze all others: it may end beyond the axes.
        most_s = max(max(row["step_s"], row["predicted_s"]) for each in panels.values() for row in each)
        axes.set(xlabel="workers", ylim=(0, 1250 * most_s))
        axes.set_title(name, loc="left", fontsize=9.5)
    every[0].set_ylabel("ms per step: lower is faster")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@style.context(STYLE)
def decoders(rows: Sequence[Row], title: str) -> Figure:
    """Return measured ratios with their intervals, in groups of what replaces what: a name is `FORMAT: A instead of B`.

    A point is filled where its interval leaves out 1.
    """
    groups: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        name, change = row["name"].split(": ")
        groups.setdefault(change, []).append((name, row))
    lines: list[tuple[str, Row | None]] = []
    for change, members in groups.items():
        lines += [(change, None), *members]
    figure, axes = new_figure(0.27 * len(lines) + 1.3, [label for label, _ in lines])
    for y, (_, ratio) in enumerate(lines):
        if ratio is None:
            axes.get_yticklabels()[y].set_fontweight("bold")
        else:
            mark(axes, y, ratio)
            write_beside(axes, y, ratio_text(ratio))
    axes.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
    axes.set(xscale="log", xlabel="speed ratio, log scale: above 1 the one named first is faster")
    axes.autoscale_view(scaley=False)
    round_ticks(axes.xaxis)
    caption_of_marks(figure, title)
    return figure

"""What lesson 10 shows of loading: workers until the curve bends."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, ON_ALL, STYLE, new_figure

Row = Mapping[str, Any]


@style.context(STYLE)
def sweep(rows: Sequence[Row], title: str) -> Figure:
    """Return time per step over workers, measured and predicted; of `rows` `low` and `high` are ratios."""
    figure, axes = new_figure(3.2, title=title)
    places = range(len(rows))
    measured = np.array([row["step_s"] for row in rows]) * 1e3
    first = measured[0]
    axes.bar(places, [1e3 * row["predicted_s"] for row in rows], 0.6, color="#F3C6A5", label="predicted")
    axes.plot(places, measured, "o", color=BLUE, label="measured (line: 99 % interval)")
    for place, row in enumerate(rows[1:], 1):
        axes.plot([place] * 2, [first / row["high"], first / row["low"]], zorder=4, **ON_ALL)
    axes.set_xticks(places, [str(row["workers"]) for row in rows])
    # A long interval would squeeze all others: it may end beyond the axes.
    top = 1.1 * max(first / row["low"] for row in rows[1:])
    axes.set(xlabel="workers", ylabel="ms per step: lower is faster", ylim=(0, min(top, 2.5 * measured.max())))
    figure.legend(loc="outside lower center", ncols=2)
    return figure

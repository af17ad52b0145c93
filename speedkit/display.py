"""How results look as the last line of a notebook's cell: tables in HTML, in which nothing but our tags acts."""

import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 24  # characters of a bar or a curve
LEFT = 'style="text-align:left"'
WORDS = 'style="white-space:pre-wrap;word-break:normal"'  # JupyterLab breaks lines within words of an output's <pre>
LEVELS = "▁▂▃▄▅▆▇█"


def bar(low: float, high: float = 0.0) -> str:
    """Return a bar as long as `low`, a share of WIDTH, and paler from there to `high`: the two ends of an interval."""
    full = "█" * round(WIDTH * low)
    return full + "░" * (round(WIDTH * high) - len(full))


def curve(values: Sequence[float]) -> str:
    """Return the course of `values` in up to WIDTH characters; those that are not finite are left out."""
    seen = [value for value in values if math.isfinite(value)]
    picked = seen[:: math.ceil(len(seen) / WIDTH) or 1]
    low = min(picked, default=0.0)
    span = max(picked, default=0.0) - low or 1.0
    return "".join(LEVELS[round(7 * (value - low) / span)] for value in picked)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, below: str = "") -> str:
    """Return HTML: `title`, a table of `rows`, if there are any, under the names of its `columns`, and text `below`."""
    html = ""
    if title:
        html += f"<pre {WORDS}><b>{_safe(title)}</b></pre>"
    lines = [_line("td", row) for row in rows]
    if lines:
        html += f"<table>{_line('th', columns)}{''.join(lines)}</table>"
    if below:
        html += f"<pre {WORDS}>{_safe(below)}</pre>"
    return html


def _line(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag} {LEFT}>{_safe(cell)}</{tag}>" for cell in cells) + "</tr>"


def _safe(value: object) -> str:
    """Return a value's text, escaped; the name of a file may hold bytes that are none."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    return escape(str(value).encode(errors="backslashreplace").decode())

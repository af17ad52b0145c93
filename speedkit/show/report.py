"""A climb's record as one HTML page that stands alone: it loads nothing, runs no script and needs no kernel."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from speedkit import files
from speedkit.clock import duration
from speedkit.config import settings_of
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.show import figures
from speedkit.show.frameworks import in_words
from speedkit.show.summary import in_short, payback_in_words, quality_in_words

FOLDER = Path(__file__).parent


def write_report(record: Mapping[str, Any], out: str | Path) -> Path:
    """Write the record of a climb as a page to `out` and return its path.

    All that is text in the record is escaped: it may quote a file's name, an error, or come from another machine.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True)
    environment.filters |= {"ratio": ratio_text, "duration": duration}
    page = environment.get_template("report.html.j2").render(
        record=record,
        machine=figures.device_name(record),
        headline=record["speedup_careful"] if record.get("headline") == "careful" else record["speedup"],
        sentences=in_short(dict(record)),
        quality=quality_in_words(record["quality"]),
        payback=payback_in_words(record["payback"]),
        fields=plan_fields(record),
        lines=framework_lines(record),
        groups=rung_groups(record),
        figures=drawn(record),
    )
    out = Path(out)
    files.write_text(out, page)
    return out


def plan_fields(record: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Return name, value and meaning of each field in which the plan differs from plain PyTorch."""
    known, naive = settings_of(Plan), vars(Plan())
    return [(name, value, known[name].help) for name, value in record["plan"].items() if value != naive[name]]


def framework_lines(record: Mapping[str, Any]) -> dict[str, str]:
    """Return, by framework, the lines that do there what the plan does on this machine."""
    return in_words(Plan(**record["plans"]["final"]["effective"]), Recipe(**record["recipe"]))


def rung_groups(record: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the rungs that are not in the plan, by why."""
    dropped = {(row["rung"], row["change"]) for row in record["dropped"] if not row["kept"]}
    tried = [row for row in record["rungs"] if row["ratio"] and not row["kept"]]
    taken_out = [row for row in record["rungs"] if (row["rung"], row["change"]) in dropped]
    groups = {
        "Slower, or not worth it": [row for row in tried if row["why"] in ("slower", "not worth it")],
        "Undecided": [row for row in tried if row["why"] == "undecided"],
        "Faster, but not the same": [row for row in tried if row["why"] not in ("slower", "not worth it", "undecided")],
        "Taken out again: later rungs took the gain": taken_out,
        "Not tried": [row for row in record["rungs"] if not row["ratio"]],
    }
    return [(title, rows) for title, rows in groups.items() if rows]


def ratio_text(row: Mapping[str, Any]) -> str:
    """Return a ratio with its interval."""
    return "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row) if row.get("ratio") else ""


def drawn(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the page's figures as data URLs: a picture cannot run what its labels may hold."""
    names = {"baseline": "plain PyTorch", "final": "final plan"}
    ledgers = {names[key]: record["ledgers"][key] for key in names}
    made = {"ladder": figures.waterfall(record), "ledgers": figures.ledgers(ledgers, record)}
    if record.get("time_to_quality"):
        made["quality"] = figures.time_to_quality(record)
    return {name: _data_url(figure) for name, figure in made.items()}


def _data_url(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"

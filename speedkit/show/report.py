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
from speedkit.show.summary import in_short, quality_in_words

FOLDER = Path(__file__).parent


def write_report(record: Mapping[str, Any], out: str | Path) -> Path:
    """Write the record of a climb as a page to `out` and return its path.

    All that is text in the record is escaped: it may quote a file's name, an error, or come from another machine.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True)
    environment.filters |= {"ratio": ratio_text, "duration": duration}
    known, naive = settings_of(Plan), vars(Plan())
    ledgers = {"plain PyTorch": record["ledgers"]["baseline"], "final plan": record["ledgers"]["final"]}
    drawn = {"ladder": figures.waterfall(record), "ledgers": figures.ledgers(ledgers, record)}
    if record.get("time_to_quality"):
        drawn["quality"] = figures.time_to_quality(record)
    page = environment.get_template("report.html.j2").render(
        record=record,
        machine=figures.device_name(record),
        headline=record["speedup_careful"] if record.get("headline") == "careful" else record["speedup"],
        sentences=in_short(record),
        quality=quality_in_words(record["quality"]),
        fields=[(name, value, known[name].help) for name, value in record["plan"].items() if value != naive[name]],
        lines=in_words(Plan(**record["plans"]["final"]["effective"]), Recipe(**record["recipe"])),
        left_out=rungs_left_out(record),
        figures={name: data_url(figure) for name, figure in drawn.items()},
    )
    out = Path(out)
    files.write_text(out, page)
    return out


def rungs_left_out(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rungs that are not in the plan, those that were taken out again with that reason."""
    taken_out = {(row["rung"], row["change"]) for row in record["dropped"] if not row["kept"]}
    rows = [row for row in record["rungs"] if not row["kept"]]
    rows += [
        {**row, "why": "taken out again: later rungs took the gain"}
        for row in record["rungs"]
        if (row["rung"], row["change"]) in taken_out
    ]
    return rows


def ratio_text(row: Mapping[str, Any]) -> str:
    """Return a ratio with its interval."""
    return "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row) if row.get("ratio") else ""


def data_url(figure: Figure) -> str:
    """Return the figure as a data URL: a picture cannot run what its labels may hold."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"

"""A tuning's record in plain sentences, and as one HTML page that stands alone: it loads nothing and runs no script."""

import base64
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from speedkit import files
from speedkit.config import settings_of
from speedkit.lab.frameworks import in_words
from speedkit.measure import words
from speedkit.measure.extras import missing_extra
from speedkit.measure.optimizations import changed
from speedkit.measure.words import in_short, left_out, quality_in_words
from speedkit.plan import Plan
from speedkit.recipe import Recipe

Row = Mapping[str, Any]


def write_report(
    record: Row,
    out: str | Path,
    *,
    command: Sequence[str] = (),
    workload: str = "WORKLOAD",
    options: Row | None = None,
) -> Path:
    """Write the record of a tuning as a page to `out` and return its path.

    It is of `speedkit` with the words of `command`; `workload` and `options` are those that were typed of what training
    takes. Without matplotlib the page has no pictures, and says so. All that is text in the record is escaped: it may
    quote a file's name, an error, or come from another machine.
    """
    page = template("report.html.j2").render(
        record=record,
        words=words,
        quote=shlex.quote,
        sentences=in_short(record),
        quality=quality_in_words(record["quality"]),
        changed=changed(Plan(**record["plan"])),
        fields=settings_of(Plan),
        lines=in_words(Plan(**record["plans"]["final"]["effective"]), Recipe(**record["recipe"])),
        left_out=left_out(record),
        careful=careful_rows(record) if record["plans"].get("careful") else [],
        pictures=pictures(record),
        command=command,
        workload=workload,
        options=options or {},
    )
    files.write_text(out, page)
    return Path(out)


def template(name: str, *folders: Path) -> jinja2.Template:
    """Return a template of `folders` or of this one, in which all that is filled in is escaped."""
    loader = jinja2.FileSystemLoader([*folders, Path(__file__).parent])
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


def pictures(record: Row) -> dict[str, str]:
    """Return the page's pictures as data URLs, which cannot run what labels hold; or why it has none, as `missing`."""
    try:
        from speedkit.lab import figures
    except ModuleNotFoundError as error:
        return {"missing": missing_extra(error)}
    sides = {"plain PyTorch": record["breakdowns"]["baseline"], "final plan": record["breakdowns"]["final"]}
    urls = {}
    for name, figure in (("tried", figures.waterfall(record)), ("breakdowns", figures.breakdowns(sides, record))):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg")
        urls[name] = f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return urls


def careful_rows(record: Row) -> list[Row]:
    """Return a row for each field of the careful plan: what was found of it, as a part of a change or not at all."""
    rows: dict[str, Row] = {}
    fallbacks = {row["field"]: row["why"] for row in record["fallbacks"] if row["plan"] == "careful"}
    for name, value in changed(Plan(**record["plans"]["careful"]["asked"])).items():
        row: Row = {"change": f"{name}={value}", "ratio": None, "why": fallbacks.get(name, "not tried by itself")}
        for tried in record["optimizations"]:
            if tried["fields"].get(name) == value:
                row = tried
        rows.setdefault(row["change"], row)
    return [*rows.values()]

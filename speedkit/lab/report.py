"""A tuning's record in plain sentences, and as one HTML page that stands alone: it loads nothing and runs no script.

The sentences are in sentences.txt.j2, the page in report.html.j2.
"""

import base64
import functools
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
from speedkit.measure.optimizations import changed, text
from speedkit.plan import Plan
from speedkit.recipe import Recipe

Row = Mapping[str, Any]


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return a template that lies here; what it puts into HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (words.decision, words.device_name, words.duration, words.ratio_text, shlex.quote):
        environment.filters[function.__name__] = function
    environment.globals["BASELINES"] = words.BASELINES
    return environment.get_template(name)


def sentences() -> Any:
    """Return the macros of the sentences."""
    return template("sentences.txt.j2").module


def in_short(record: Row) -> list[str]:
    """Return a tuning's result in plain sentences, the most important first."""
    lines = sentences().in_short(record, words.speedups(record), recipe_steps(record)).splitlines()
    return [line for line in lines if line]


def recipe_steps(record: Row) -> int:
    """Return the steps of a training by the recipe."""
    return Recipe(**record["recipe"]).total_steps(record["workload"]["train"])


def quality_in_words(quality: Row) -> str:
    """Return in one sentence whether the final plan learns as well."""
    return sentences().quality(quality).strip()


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
        sentences=in_short(record),
        quality=quality_in_words(record["quality"]),
        changed=changed(Plan(**record["plan"])),
        fields=settings_of(Plan),
        lines=in_words(Plan(**record["plans"]["final"]["effective"]), Recipe(**record["recipe"])),
        left_out=left_out(record),
        pictures=pictures(record),
        command=command,
        workload=workload,
        options=options or {},
    )
    files.write_text(out, page)
    return Path(out)


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


def left_out(record: Row) -> list[Row]:
    """Return a row for each optimization that is not in the plan: which fields of it are not, and why.

    Of several changes by one optimization it is the one that gained most, as it was measured last; nearest first.
    """
    changes = {row["change"]: row["fields"] for row in record["optimizations"]}
    stalls = record.get("stalls") or {}  # not in records of before
    measured = (*record["optimizations"], *record["dropped"], *stalls.get("kept", []))
    rows: dict[str, Row] = {}
    for row in sorted(measured, key=lambda row: (row.get("again", False), row["ratio"] or 0.0), reverse=True):
        fields = changes.get(row["change"], {})
        change = {field: value for field, value in fields.items() if value != record["plan"][field]}
        if change and not row["kept"]:
            why = sentences().why(row, recipe_steps(record)).strip()
            rows.setdefault(row["optimization"], {**row, "change": text(change), "why": why})
    return [*rows.values()]

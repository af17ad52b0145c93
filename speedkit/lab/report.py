"""A tuning's record in plain sentences, and as one HTML page that stands alone: it loads nothing and runs no script.

The sentences are in sentences.txt.j2, the page in report.html.j2.
"""

import base64
import functools
import io
from collections.abc import Mapping
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
def environment() -> jinja2.Environment:
    """Return where the templates are; what they put into HTML is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (words.decision, words.device_name, words.duration, words.ratio_text):
        templates.filters[function.__name__] = function
    templates.globals["BASELINES"] = words.BASELINES
    return templates


def sentences() -> Any:
    """Return the macros of the sentences."""
    return environment().get_template("sentences.txt.j2").module


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


def write_report(record: Row, out: str | Path, *, tuned: str = "", trains: str = "speedkit train WORKLOAD") -> Path:
    """Write the record of a tuning as a page to `out` and return its path.

    `tuned` is the command that it is of, `trains` the one that trains the same, without its plan. Without matplotlib
    the page has no pictures, and says so. All that is text in the record is escaped: it may quote a file's name, an
    error, or come from another machine.
    """
    page = (
        environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            sentences=in_short(record),
            changed=changed(Plan(**record["plan"])),
            fields=settings_of(Plan),
            lines=in_words(Plan(**record["plans"]["final"]["effective"]), Recipe(**record["recipe"])),
            left_out=left_out(record),
            pictures=pictures(record),
            steps=recipe_steps(record),
            tuned=tuned,
            trains=trains,
        )
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
    measured = (*record["optimizations"], *record["dropped"])
    rows: dict[str, Row] = {}
    for row in sorted(measured, key=lambda row: (row.get("again", False), row["ratio"] or 0.0), reverse=True):
        fields = changes.get(row["change"], {})
        change = {field: value for field, value in fields.items() if value != record["plan"][field]}
        if change and not row["kept"]:
            rows.setdefault(row["optimization"], {**row, "change": text(change)})
    return [*rows.values()]

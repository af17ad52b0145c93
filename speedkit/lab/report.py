"""A tuning's record in plain sentences, and as one HTML page that stands alone: it loads nothing and runs no script."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from speedkit import files
from speedkit.config import settings_of
from speedkit.lab import figures
from speedkit.lab.figures import duration
from speedkit.lab.frameworks import in_words
from speedkit.plan import Plan
from speedkit.recipe import Recipe

Row = Mapping[str, Any]


def write_report(record: Row, out: str | Path) -> Path:
    """Write the record of a tuning as a page to `out` and return its path.

    All that is text in the record is escaped: it may quote a file's name, an error, or come from another machine.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    environment.filters |= {"ratio": figures.ratio_text, "duration": duration}
    plan = record["plan"]
    known = settings_of(Plan).items()
    fields = [(name, plan[name], field.help) for name, field in known if plan[name] != field.default]
    breakdowns = {"plain PyTorch": record["breakdowns"]["baseline"], "final plan": record["breakdowns"]["final"]}
    side, headline = figures.headline(record)
    page = environment.get_template("report.html.j2").render(
        record=record,
        machine=figures.device_name(record),
        headline=headline,
        over=figures.BASELINES[side],
        sentences=in_short(record),
        quality=quality_in_words(record["quality"]),
        fields=fields,
        lines=in_words(Plan(**record["plans"]["final"]["effective"]), Recipe(**record["recipe"])),
        left_out=[row for row in (*record["optimizations"], *record["dropped"]) if not row["kept"]],
        optimizations=data_url(figures.waterfall(record)),
        breakdowns=data_url(figures.breakdowns(breakdowns, record)),
    )
    files.write_text(out, page)
    return Path(out)


def data_url(figure: Figure) -> str:
    """Return the figure as a data URL: a picture cannot run what its labels may hold."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# ---- in sentences ----


def in_short(record: Row) -> list[str]:
    """Return a tuning's result in plain sentences, the most important first."""
    left_out = []
    if record.get("quarantined"):  # not in records of before
        left_out = [f"Files left out: {len(record['quarantined'])} (quarantine.csv says why)."]
    if record["change"] == "nothing":
        return ["Nothing that was tried is worth switching on: plain PyTorch stays.", *left_out]
    side, row = figures.headline(record)
    ratio = "{ratio:.2f} times as fast ({low:.2f} to {high:.2f}, 99 %)".format(**row)
    return [
        f"Training steps are {ratio} as with {figures.BASELINES[side]}, the faster of Plan() and Plan.careful().",
        quality_in_words(record["quality"]),
        payback_in_words(record["payback"]),
        f"Switched on: {record['change']}.",
        *left_out,
    ]


def quality_in_words(quality: Row) -> str:
    """Return in one sentence whether the final plan learns as well."""
    if quality["decision"] == "not tested":
        why = "no training was needed"
        if quality.get("budget_s"):
            why = f"two trainings of each plan take a budget of about {duration(quality['budget_s'])}"
        return f"Whether the result is as good was not tested: {why}."
    trainings = len(quality["final"])
    likelihood = quality["likelihood"]
    shown = "{mean_change:+.4f}, at least {lower:+.4f}".format
    change = f"{quality['metric']} changed by {shown(**quality)}; margin {quality['margin']:g}"
    if likelihood:
        change += f"; in {trainings} folds, where the right class's probability changed by {shown(**likelihood)}"
    if quality["decision"] != "not decided":
        return f"The result is {quality['decision']}: {change}."
    needed = f"{trainings} trainings of each plan cannot show it; about {quality['seeds_needed']} would"
    if quality["items_needed"]:
        needed = "{test_items} test items cannot show {margin:g}; about {items_needed} would".format(**quality)
    return f"Whether the result is as good is not decided: {change}. {needed}."


def payback_in_words(payback: Row) -> str:
    """Return in one sentence what the final plan saves, and when it has earned what it takes to prepare."""
    before = duration(payback["baseline_s"])
    after = duration(payback["final_s"])
    saved = f"Your {payback['epochs']:.3g} epochs: from {before} to {after}"
    prepared = {"build the cache": payback["prepare_s"]["cache"], "compile": payback["prepare_s"]["compile"]}
    first = " and ".join(f"{duration(value)} to {what}" for what, value in prepared.items() if value)
    if not first:
        return f"{saved}."
    if payback["pays_back_after_s"] is None:
        return f"{saved}, with {first}; that does not pay back within so short a training."
    return f"{saved}, with {first}; that pays back after {duration(payback['pays_back_after_s'])}."

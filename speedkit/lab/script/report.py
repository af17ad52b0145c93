"""The page of a script's tuning."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedkit import display, files
from speedkit.lab.report import template
from speedkit.lab.script.words import found, headline_of_script
from speedkit.measure import words

Row = Mapping[str, Any]


def write_script_report(record: Row, out: str | Path, *, command: Sequence[str] = ()) -> None:
    """Write the record of a script's tuning as a page to `out`: each optimization as a bar, with its interval."""
    tried = [row for row in record["optimizations"] if row["ratio"] is not None]
    rest = [row for row in record["optimizations"] if row["ratio"] is None]
    decided = [row for row in tried if row["decision"] != "undecided"]  # the others' intervals may hold everything
    longest = max((row["high"] for row in decided), default=1.0)
    bars = {row["change"]: display.bar(row["low"] / longest, row["high"] / longest) for row in decided}
    page = template("report.html.j2", Path(__file__).parent).render(
        record=record,
        headline=headline_of_script(record),
        tried=tried,
        bars=bars,
        found=found,
        rest=rest,
        words=words,
        command=command,
        quote=shlex.quote,
    )
    files.write_text(out, page)

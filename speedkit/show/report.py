"""An executed notebook as one HTML page that stands alone: it loads nothing and runs no script."""

import re
from pathlib import Path

from speedkit import files
from speedkit.parameters import read_notebook, record_of
from speedkit.show.canvas import Row, seconds

TEMPLATE = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")


def report(notebook_path: str | Path, out_path: str | Path) -> Path:
    """Write the executed notebook as one HTML page to `out_path` and return its path; code is folded.

    That of a climb begins with what is said `in_short`. Links to other notebooks become plain words, since the page
    lies elsewhere. Raises UsageError for what is no notebook.
    """
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    notebook, out_path = read_notebook(Path(notebook_path)), Path(out_path)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\[([^\]]+)\]\([^):]+\.ipynb\)", r"\1", cell.source)
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ") if notebook.cells else out_path.stem
    exporter = HTMLExporter(raw_template=TEMPLATE, exclude_anchor_links=True, exclude_input_prompt=True,
                            exclude_output_prompt=True)  # fmt: skip
    exporter.log.setLevel("ERROR")  # it warns of figures without alternative texts
    light, dark = (HtmlFormatter(nowrap=True, style=style).get_style_defs(".highlight")
                   for style in ("default", "github-dark"))  # fmt: skip
    resources = {"title": title, "light": light, "dark": dark, "in_short": in_short(record_of(notebook) or {})}
    html, _ = exporter.from_notebook_node(notebook, resources)
    files.write_text(out_path, html)
    return out_path


def in_short(record: Row) -> list[str]:
    """Return a climb's result in plain sentences, drawn from its record; [] for a record of something else."""
    if "speedup" not in record:
        return []
    over = "{ratio:.2f} times as fast as {0} ({low:.2f} to {high:.2f}, 99 %)".format
    careful = record.get("speedup_careful")
    said = [f"Training steps are {over('plain PyTorch', **record['speedup'])}"
            + (f", and {over('a careful start', **careful)}." if careful else ".")]  # fmt: skip
    if (quality := record["quality"]).get("lower") is None:
        said.append("Whether the result is as good was not shown: the budget allowed fewer than two seeds.")
    else:
        judged = "as good" if quality["passed"] else "NOT shown to be as good"
        change = "{metric} changed by {mean_change:+.4f}, 95 % sure to be above {lower:+.4f}; margin {margin:g}"
        said.append(f"The result is {judged}: {change.format_map(quality)}.")
    if paid := record.get("payback"):
        said.append(payback_in_words(paid))
    if energy := record.get("energy"):
        said.append(
            "One training takes {baseline_j:.3g} J in plain PyTorch and {final_j:.3g} J now.".format_map(energy)
        )
    return [*said, f"Switched on: {record['change']}."]


def payback_in_words(paid: Row) -> str:
    """Return in one sentence what the final plan spares the reader, and when it has earned what it takes to prepare."""
    prepared = {"build the cache": paid["prepare_s"]["cache"], "compile": paid["prepare_s"]["compile"]}
    took = " and ".join(f"{seconds(value)} to {what}" for what, value in prepared.items() if value)
    said = f"Your {paid['epochs']:g} epochs: from {seconds(paid['baseline_s'])} to {seconds(paid['final_s'])}"
    if not took:
        return f"{said}."
    after = "does not pay back within so short a training"
    if paid["pays_back_after_s"] is not None:
        after = f"pays back after {seconds(paid['pays_back_after_s'])}"
    return f"{said}, with {took}; that {after}."

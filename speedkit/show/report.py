"""An executed notebook as one HTML page that stands alone: it loads nothing and runs no script."""

import re
from pathlib import Path

from speedkit import files
from speedkit.measure.record import read_notebook, record_of
from speedkit.show.summary import in_short

TEMPLATE = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")


def report(notebook_path: str | Path, out_path: str | Path) -> Path:
    """Write the executed notebook as one HTML page to `out_path` and return its path; code is folded.

    That of a climb begins `in_short`. Links to notebooks become plain words. Raises UsageError for no notebook.
    """
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    notebook, out_path = read_notebook(Path(notebook_path)), Path(out_path)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\[([^\]]+)\]\([^):]+\.ipynb\)", r"\1", cell.source)
    title = notebook.cells[0].source.partition("\n")[0].lstrip("# ") if notebook.cells else out_path.stem
    exporter = HTMLExporter(
        raw_template=TEMPLATE, exclude_anchor_links=True, exclude_input_prompt=True, exclude_output_prompt=True
    )
    exporter.log.setLevel("ERROR")  # it warns of figures without alternative texts
    light, dark = (
        HtmlFormatter(nowrap=True, style=style).get_style_defs(".highlight") for style in ("default", "github-dark")
    )
    resources = {"title": title, "light": light, "dark": dark, "in_short": in_short(record_of(notebook) or {})}
    html, _ = exporter.from_notebook_node(notebook, resources)
    files.write_text(out_path, html)
    return out_path

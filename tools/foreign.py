"""What another machine sends is shown and acts nowhere: neither HTML nor scripts, links elsewhere or formulas."""

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import nbformat
from batch_sizes import markdown_table
from bs4 import BeautifulSoup

from speedkit.lab.record import RECORD_MIME, without_tags

PICTURES = ("image/png", "image/jpeg")  # an SVG can run scripts
BASE64 = re.compile(r"[a-zA-Z0-9+/=\s]+")


def escaped(text: str) -> str:
    """Return `text` as one line of Markdown that shows it. No formula is left: in one, MathJax makes links."""
    line = " ".join(text.replace("\\", "/").split())
    return re.sub(r"([`*\[\]:~$!])", r"\\\1", html.escape(line, quote=False))


def harmless_markdown(text: str) -> str:
    """Return Markdown without HTML, formulas and links, but for links to lessons."""
    text = re.sub("&(?!(lt|gt|amp);)", "&amp;", without_tags(text.replace("\\", "/")))
    return re.sub(r"\](?=[(\[:])(?!\(\d\d_\w+\.ipynb\))", "] ", text)


def table_in(page: str) -> str:
    """Return the table that HTML holds as Markdown, "" where there is none."""
    rows = BeautifulSoup(page, "html.parser").find_all("tr")
    cells = [[escaped(cell.get_text()) for cell in row.find_all(["th", "td"])] for row in rows]
    return markdown_table(cells[0], cells[1:]) if cells else ""


def harmless_outputs(outputs: Sequence[Any], record: Mapping[str, Any]) -> list[Any]:
    """Return what of a cell's outputs is text, pictures, Markdown or the notebook's `record`, without their metadata.

    Plain text stays as it is: all that show notebooks show it as text.
    """
    kept = []
    for output in outputs:
        data = output.get("data", {})
        shown = {kind: data[kind] for kind in PICTURES if BASE64.fullmatch(data.get(kind, ""))}
        if "text/plain" in data:
            shown["text/plain"] = data["text/plain"]
        if RECORD_MIME in data:
            shown[RECORD_MIME] = record
        if markdown := harmless_markdown(data.get("text/markdown", "")) or table_in(data.get("text/html", "")):
            shown["text/markdown"] = markdown
        if output.output_type == "stream":
            kept.append(nbformat.v4.new_output("stream", text=output.text))
        elif shown:
            kept.append(nbformat.v4.new_output("display_data", data=shown))
    return kept

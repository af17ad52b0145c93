"""An executed notebook as one HTML page that stands alone: it loads nothing and runs no script."""

import re
from pathlib import Path

from speedkit import files
from speedkit.parameters import read_notebook

STYLE = """
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #22272e; background: #fff;
       font: 16px/1.55 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem; } h2 { border-bottom: 1px solid #e6e9ed; }
a { color: #0072b2; } img, svg { max-width: 100%; height: auto; }
pre, code { font: 13px/1.5 ui-monospace, monospace; }
code { background: #f2f4f6; padding: .1em .25em; } pre code { background: none; padding: 0; }
pre { overflow-x: auto; margin: .4rem 0; } .highlight { background: #f6f8fa; padding: .2rem .8rem; }
.prompt, .jp-InputPrompt, .jp-OutputPrompt, .anchor-link { display: none; }
details { margin: .6rem 0; } summary { color: #5b626c; cursor: pointer; }
.output_stream pre, .output_text pre { border-left: 3px solid #0072b2; padding-left: .8rem; }
.output_area pre { white-space: pre-wrap; } .output_html { overflow-x: auto; }
table { border: 0; border-collapse: collapse; font-size: 13px; margin: .6rem 0; }
th, td { border: 0; border-bottom: 1px solid #e6e9ed; padding: .25rem .6rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } blockquote { border-left: 3px solid #e6e9ed; padding-left: 1rem; }
"""
# The policy makes a browser refuse whatever an output might try to load or run.
TEMPLATE = """
{%- extends 'basic/index.html.j2' -%}
{%- block header -%}
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{{ resources.title | escape_html }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{{ resources.style }}</style></head>
<body>
{%- endblock header -%}
{%- block footer %}
</body></html>
{% endblock footer -%}
{%- block input_group -%}<details class="code"><summary>code</summary>{{ super() }}</details>{%- endblock -%}
{%- block data_javascript %}{% endblock -%}
{%- block data_widget_view %}{% endblock -%}
"""


def report(notebook_path: str | Path, out_path: str | Path) -> Path:
    """Write the executed notebook as one HTML page to `out_path` and return its path; code is folded.

    Links to other notebooks become plain words, since the page lies elsewhere. Raises UsageError for what is no
    notebook.
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
    style = STYLE + HtmlFormatter(nowrap=True).get_style_defs(".highlight")
    html, _ = exporter.from_notebook_node(notebook, {"title": title, "style": style})
    files.write_text(out_path, html)
    return out_path

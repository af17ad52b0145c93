"""The site, as `make site` builds it: these pages, the lessons as they were executed, and what docstrings say."""

import re
from typing import Any

project = "speedkit"
root_doc = "docs/index"
include_patterns = ["docs/**.md", "notebooks/*.ipynb", "notebooks/records/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
extensions = ["myst_nb", "sphinx.ext.autodoc"]

# Pages and lessons are read on GitHub too, so they are plain Markdown, and nothing is executed here.
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
suppress_warnings = [
    "mystnb.unknown_mime_type",  # the record that a lesson carries
    "myst.header",  # a lesson's page may go down two levels at once
    "myst.xref_missing",  # links to source files, which are no pages
]

# Docstrings have Markdown's backticks.
default_role = "literal"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "speedkit"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def as_fields(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Make fields of a docstring's lines `option: what it is`."""
    for place, line in enumerate(lines):
        option, colon, text = line.partition(": ")
        if colon and re.fullmatch("[a-z_]+", option):
            lines[place] = f":{option}: {text}"


def setup(app: Any) -> None:
    """Have each docstring shown by `as_fields`."""
    app.connect("autodoc-process-docstring", as_fields)

"""Put on each notebook a badge that opens it in Colab, and a cell that installs speedkit there: `colab.py OWNER/NAME`.

To be run once the repository has an address on GitHub, and again when that changes. Records stay current.
"""

import re
import sys
from pathlib import Path

from nbformat.v4 import new_code_cell
from publish import as_text, code_cells

from speedkit import files
from speedkit.lab.notebooks import find_notebooks
from speedkit.lab.record import read_notebook

SITE = "https://colab.research.google.com"
BADGE = f"[![Open in Colab]({SITE}/assets/colab-badge.svg)]({SITE}/github/{{repository}}/blob/main/notebooks/{{name}})"
INSTALL = """\
import importlib.util

if importlib.util.find_spec("speedkit") is None:  # on Colab
    %pip install --quiet "torch-speedkit[audio,image,tars,notebooks,int8] @ git+https://github.com/{repository}\""""


def with_badge(path: Path, repository: str) -> str:
    """Return the text of the notebook at `path` with badge and installing cell, in place of any that it has."""
    notebook = read_notebook(path)
    title = notebook.cells[0]
    title.source = re.sub(r"\n\n\[!\[Open in Colab\].*", "", title.source)
    title.source += f"\n\n{BADGE.format(repository=repository, name=path.name)}"
    install = new_code_cell(INSTALL.format(repository=repository), id="colab", metadata={"tags": ["colab"]})
    # Behind the parameters, which are looked for in the first cell of code.
    cells = [cell for cell in notebook.cells if cell.id != install.id]
    cells.insert(cells.index(code_cells(notebook)[0]) + 1, install)
    notebook.cells = cells
    for count, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = count
    return as_text(notebook)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.fullmatch(r"[\w.-]+/[\w.-]+", sys.argv[1]):
        sys.exit("say `colab.py OWNER/NAME`, the repository's name on GitHub")
    for notebook_path in find_notebooks():
        files.write_text(notebook_path, with_badge(notebook_path, sys.argv[1]))

"""Small notebooks in the anatomy of a lesson, not run or as a run leaves them, and a checkout to keep them in."""

import shutil
import subprocess

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from publish import code_cells

from speedkit.lab import provenance
from speedkit.lab.record import RECORD_MIME, read_notebook, start

PACKAGE = provenance.PACKAGE
PARAMETERS = """\
from typing import Optional

scale: str = "auto"  # auto | smoke | cpu | gpu
batch_size: int = 4  # samples per step
learning_rate: Optional[float] = None  # None takes the recipe's
sizes: list[int] = [1, 2]  # what is tried
shuffle: bool = True  # in each epoch
workload: str = "audio"  # what is trained
"""


IGNORED = "nbval-ignore-output"


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def write(path, *cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(new_notebook(cells=list(cells), metadata={"kernelspec": kernel}), path)
    return path


def plain(path, *sources):
    """Write a notebook with a parameters cell and cells of `sources`: it runs without importing torch."""
    return write(path, code(PARAMETERS, "parameters"), *map(code, sources))


def whole(path, body="total = 1 + 2"):
    """Write a notebook, not run, in the full anatomy, whose one free cell holds `body`."""
    begin = (
        "from speedkit.lab.record import start\n"
        f'run = start("{path.stem}", scale=scale, workload=workload, device="cpu")'
    )
    return write(
        path,
        new_markdown_cell("# Tiny\n\nA sum does not depend on the order. It needs nothing.\n\nMore."),
        new_markdown_cell("## Predict first\n\nWhich is larger?"),
        code(PARAMETERS, "parameters", IGNORED),
        code(begin, IGNORED),
        code(body, IGNORED),
        code('run.check("both orders agree", 1 + 2 == 2 + 1);', "nbval-check-output"),
        new_markdown_cell("## When it does not help\n\nNever."),
        new_markdown_cell("## Exercise\n\nTry three.\n\n<details><summary>Solution</summary>\n\nSix.\n\n</details>"),
        code("run.save();", IGNORED),
        new_markdown_cell("## Next\n\nNothing."),
    )


def executed(path):
    """Write a notebook in the full anatomy as a run of it would have left it, without starting a kernel."""
    notebook = read_notebook(whole(path))
    cells = code_cells(notebook)
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
    cells[-2].outputs = [new_output("stream", text="PASS both orders agree\n")]
    data = {RECORD_MIME: a_record(path.stem), "text/plain": f"record of {path.stem}"}
    cells[-1].outputs = [new_output("display_data", data=data)]
    nbformat.write(notebook, path)
    return path


def a_record(name):
    """Return the record of a run on this machine of the notebook called `name`."""
    return start(name, scale="cpu", workload="audio", device="cpu").finished()


def edit(path, source):
    """Replace the free cell of a notebook in the full anatomy."""
    notebook = read_notebook(path)
    code_cells(notebook)[2].source = source
    nbformat.write(notebook, path)


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def make_checkout(folder, monkeypatch):
    """Make `folder` a checkout of a copy of the package with a folder of notebooks, which is returned.

    Kernels import the copy. Nothing is committed yet: `commit` does that.
    """
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    shutil.copytree(PACKAGE, folder / "speedkit", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".gitignore").write_text("__pycache__/\nruns/\n")
    git(folder, "init")
    monkeypatch.setattr(provenance, "PACKAGE", folder / "speedkit")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(notebooks))
    return notebooks


def commit(folder):
    """Commit all that is in a checkout; what was asked of git before is forgotten."""
    git(folder, "add", "--all")
    git(folder, "commit", "--no-verify", "--allow-empty", "-m", "as it is")
    provenance.unchanged_since.cache_clear()

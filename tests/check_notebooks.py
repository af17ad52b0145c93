"""Small notebooks in the anatomy of the real ones, for tests of what runs, checks and publishes notebooks."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from speedkit.contract import KERNELSPEC
from speedkit.files import finite
from speedkit.measure.record import start
from speedkit.parameters import RECORD_MIME

PARAMETERS = """\
profile: str = "auto"  # auto | smoke | cpu | full
batch_size: int = 4  # samples per step
learning_rate: float | None = None  # None takes the recipe's
sizes: list[int] = [1, 2]  # what is tried
shuffle: bool = True  # in each epoch
workload: str = "audio"  # what is trained
"""


def code(source: str, *tags: str):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def write(path: Path, *cells) -> Path:
    """Write a notebook of `cells`, none of them run, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=list(cells), metadata={"kernelspec": dict(KERNELSPEC)}), path)
    return path


def plain(path: Path, *sources: str) -> Path:
    """Write a notebook with a parameters cell and cells of `sources`: it runs without importing torch."""
    return write(path, code(PARAMETERS, "parameters"), *map(code, sources))


def whole(path: Path, body: str = "total = 1 + 2") -> Path:
    """Write a notebook, not run, in the full anatomy, whose one free cell holds `body`."""
    begin = (
        "from speedkit.measure.record import start\n"
        f'run = start("{path.stem}", modules=["speedkit.errors"], profile=profile, workload=workload)'
    )
    return write(
        path,
        new_markdown_cell("# Tiny\n\nA sum does not depend on the order. It needs nothing.\n\nMore."),
        new_markdown_cell("## Predict first\n\nWhich is larger?"),
        code(PARAMETERS, "parameters"),
        code(begin),
        code(body),
        code('run.check("both orders agree", 1 + 2 == 2 + 1);', "nbval-check-output"),
        new_markdown_cell("## When it does not help\n\nNever."),
        new_markdown_cell("## Exercise\n\nTry three.\n\n<details><summary>Solution</summary>\n\nSix.\n\n</details>"),
        code("run.save();"),
        new_markdown_cell("## Next\n\nNothing."),
    )


def executed(path: Path) -> Path:
    """Write a notebook in the full anatomy as a run of it would have left it, without starting a kernel."""
    notebook = nbformat.read(whole(path), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
    cells[-2].outputs = [new_output("stream", text="PASS both orders agree\n")]
    data = {RECORD_MIME: a_record(path.stem, path), "text/plain": f"record of {path.stem}"}
    cells[-1].outputs = [new_output("display_data", data=data)]
    nbformat.write(notebook, path)
    return path


def a_record(name: str, path: Path) -> dict:
    """Return the record of a run on this machine of the notebook at `path`."""
    from speedkit.measure.provenance import code_sha256

    run = start(name, profile="smoke", workload="audio")
    hashed = code_sha256(path, ["speedkit.errors"])
    return finite({**run.record, **run.power.summary(), "code_sha256": hashed})

"""Do cells with output widgets stand still? `python benchmarks/notebook_hang.py [RUNS]` counts those that do.

A cell of `ipywidgets.interact` makes nbclient send on the socket on which it waits for the cell's reply; the reply's
wake-up can get lost, and the cell stands still until its time is up (https://github.com/jupyter/nbclient/issues/312).
All cores are kept busy meanwhile. Exit code 1 when a cell stands still.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from speedkit.errors import SpeedkitError
from speedkit.lab.notebooks import run_notebook

CELLS = 60
CELL_S = 10.0  # a healthy cell takes milliseconds
INTERACT = "ipywidgets.interact(lambda x: print(x), x=(0, 9));"


def stood_still(folder: Path) -> int:
    """Run one notebook and return how many of its cells took `CELL_S` or more."""
    cells = [new_code_cell("", metadata={"tags": ["parameters"]}), new_code_cell("import ipywidgets")]
    cells += [new_code_cell(INTERACT) for _ in range(CELLS)]
    source, executed = folder / "interact.ipynb", folder / "executed.ipynb"
    nbformat.write(new_notebook(cells=cells), source)
    with contextlib.suppress(SpeedkitError):  # a cell that stands still takes all the time there is
        run_notebook(source, executed, timeout_s=CELL_S * CELLS, progress=False)
    executed = executed if executed.exists() else executed.with_name("executed.failed.ipynb")
    cells = nbformat.read(executed, as_version=4).cells[-CELLS:]
    return sum((cell.metadata.papermill.duration or 0) >= CELL_S for cell in cells)


def main() -> int:
    """Run the notebook as often as asked, and say what stood still."""
    runs, count = int(sys.argv[1]) if len(sys.argv) > 1 else 10, 0
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        for done in range(1, runs + 1):
            with tempfile.TemporaryDirectory() as folder:
                count += stood_still(Path(folder))
            print(f"{done} runs, {count} of {done * CELLS} cells stood still", flush=True)
    finally:
        for process in busy:
            process.kill()
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

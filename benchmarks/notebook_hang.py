"""Do cells with output widgets stand still? Count those that do, by speedkit's engine and by papermill's own.

A cell of `ipywidgets.interact` makes nbclient send on the socket on which it waits for the cell's reply; the reply's
wake-up can get lost, and the cell stands still until its time is up (https://github.com/jupyter/nbclient/issues/312).
All cores are kept busy meanwhile. Exit code 1 when a cell stands still by speedkit's engine.

    python benchmarks/notebook_hang.py [RUNS] [RUNS_OF_PAPERMILL]
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import papermill
from nbformat.v4 import new_code_cell, new_notebook

from speedkit.errors import SpeedkitError
from speedkit.notebooks import run_notebook

CELLS = 60
CELL_S = 10.0  # of a cell that stands still by papermill's engine; a healthy one takes milliseconds
INTERACT = "ipywidgets.interact(lambda x: print(x), x=(0, 9));"


def stood_still(engine: str, folder: Path) -> int:
    """Run one notebook and return how many of its cells took `CELL_S` or more."""
    cells = [new_code_cell("", metadata={"tags": ["parameters"]}), new_code_cell("import ipywidgets")]
    cells += [new_code_cell(INTERACT) for _ in range(CELLS)]
    source, executed = folder / "interact.ipynb", folder / "executed.ipynb"
    nbformat.write(new_notebook(cells=cells), source)
    if engine == "speedkit":
        with contextlib.suppress(SpeedkitError):  # a cell that stands still takes all the time there is
            run_notebook(source, executed, timeout_s=CELL_S * CELLS, progress=False)
        executed = executed if executed.exists() else executed.with_name("executed.failed.ipynb")
    else:
        papermill.execute_notebook(
            str(source), str(executed), kernel_name="python3", progress_bar=False, execution_timeout=CELL_S
        )
    cells = nbformat.read(executed, as_version=4).cells[-CELLS:]
    return sum((cell.metadata.papermill.duration or 0) >= CELL_S for cell in cells)


def main() -> int:
    """Run both engines, the second as often as asked, and say what stood still."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=int, nargs="?", default=10)
    parser.add_argument("runs_of_papermill", type=int, nargs="?", default=0)
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    counts = {"speedkit": 0, "papermill": 0}
    try:
        for engine, runs in (("speedkit", arguments.runs), ("papermill", arguments.runs_of_papermill)):
            for done in range(1, runs + 1):
                with tempfile.TemporaryDirectory() as folder:
                    counts[engine] += stood_still(engine, Path(folder))
                print(f"{engine}: {done} runs, {counts[engine]} of {done * CELLS} cells stood still", flush=True)
    finally:
        for process in busy:
            process.kill()
    return 1 if counts["speedkit"] else 0


if __name__ == "__main__":
    sys.exit(main())

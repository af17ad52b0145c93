"""What the live panel costs in Jupyter."""

from collections.abc import Iterator
from pathlib import Path

import common
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook


def in_kernel(pairs: int, count: int) -> None:
    """Print the seconds of windows of `count` steps with the panel, and of those with plain lines; for a kernel."""
    torch.set_num_threads(1)
    workload = common.perceptron(*common.SMALL)
    with (
        common.training(workload, common.IN_MEMORY, progress="panel") as (_, with_panel),
        common.training(workload, common.IN_MEMORY, progress=True) as (_, with_lines),
    ):
        panel_s, lines_s = common.windows_in_turns({"panel": with_panel, "lines": with_lines}, pairs, count)
    print(*panel_s)
    print(*lines_s)


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the time of a loop with the live panel over that with lines, in a kernel whose messages are read."""
    pairs, count = (4, 20) if quick else (40, 500)
    notebook = new_notebook(cells=[new_code_cell(f"import panel\npanel.in_kernel({pairs}, {count})")])
    folder = {"metadata": {"path": Path(__file__).parent}}
    NotebookClient(notebook, timeout=600, resources=folder).execute()
    printed = "".join(output.text for output in notebook.cells[0].outputs if output.get("name") == "stdout")
    lines = printed.splitlines()[-2:]
    panel_s, lines_s = ([float(number) for number in line.split()] for line in lines)
    yield common.ratio_of("live panel, a log point every 10 steps", panel_s, lines_s, limit=1.01)


if __name__ == "__main__":
    common.main(measure)

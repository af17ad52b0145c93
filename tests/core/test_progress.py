"""What a run shows while it runs: the live panel in a real kernel, plain lines elsewhere."""

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from tiny import points

from speedkit import Plan, fit

LIVE = """
import sys
import torch
sys.path.insert(0, {tests!r})
from tiny import points
from speedkit import Plan, fit
from speedkit.train.progress import Progress
"""
FOLLOWED = "fit(points(), plan=Plan(log_every=2), device='cpu', progress='panel');"
BAD_LOSS = """
progress = Progress("a name", 4, 4, device=torch.device("cpu"), show="panel")
progress.update(4, 0.1, float("nan"), score=0.5, metric="accuracy")
"""


def test_live_panel_in_a_kernel(request):
    setup = LIVE.format(tests=str(request.path.parents[1]))
    sources = (setup, FOLLOWED, BAD_LOSS, "fit(points(), device='cpu');")
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=120).execute()
    followed, bad, quiet = (cell.outputs for cell in notebook.cells[1:])
    panel, *lines = followed
    shown = panel.data["text/plain"]
    assert "points step 12/12: loss" in shown and "samples/s, 00:00 left" in shown and "█" in shown
    assert set(panel.data) == {"text/plain"}, "no widget stays in the file"
    assert "step 12: accuracy" in lines[-1].text
    assert "loss nan" in bad[0].data["text/plain"]
    assert {output.output_type for output in quiet} == {"stream"}, "nobody sits before a kernel that a program runs"


def test_a_panel_asked_for_where_there_is_no_notebook_is_plain_lines(capfd):
    fit(points(), device="cpu", plan=Plan(log_every=2), progress="panel")
    shown = capfd.readouterr().out
    assert "points step 2/12: loss" in shown and "points step 12/12: loss" in shown and " left\n" in shown

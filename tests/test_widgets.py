"""Widgets by setting their values, without a browser; and the live panel of a run in a real kernel."""

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from tiny import points

from speedkit import Plan, fit
from speedkit.config import from_mapping
from speedkit.hardware import Hardware
from speedkit.show.widgets import PlanPanel

BARE = Hardware(cpu="a CPU")  # without fast number formats, without a compiler


def test_every_field_has_a_dropdown_with_the_values_that_it_takes():
    panel = PlanPanel(points(), hardware=BARE)
    assert list(panel.fields) == list(vars(Plan())) and panel.plan == Plan()
    for name, field in panel.fields.items():
        for value in field.options:
            from_mapping(Plan, {name: value})  # refuses what is no value of the field


def test_the_panel_tells_what_this_machine_makes_of_the_choice(capsys):
    panel = PlanPanel(points(), hardware=BARE)
    assert "this machine honours every field" in capsys.readouterr().out
    panel.fields["precision"].value = "bf16"
    assert "precision: asked bf16, got default: bf16 needs a CPU" in capsys.readouterr().out
    panel.fields["validate_every"].value = "none"
    panel.fields["ranks"].value = "2"
    assert panel.plan == Plan(precision="bf16", ranks=2)


def test_run_measures_the_plan_and_adds_it_to_table_and_figure(capsys):
    panel = PlanPanel(points(), recipe=points(batch_size=32).recipe, seconds=0.1)
    panel.fields["drop_last"].value = "true"
    panel.run.click()
    panel.fields["drop_last"].value = "false"
    panel.run.click()
    assert [row["name"] for row in panel.measurements] == ["1. drop_last=True", "2. the baseline itself"]
    assert "the baseline itself" in capsys.readouterr().out


LIVE = """
import sys
sys.path.insert(0, {tests!r})
from tiny import points
from speedkit import Plan, fit
from speedkit.train.progress import Progress
"""
FOLLOWED = "fit(points(), plan=Plan(log_every=2), device='cpu', progress='panel');"
BAD_LOSS = """
progress = Progress("a <name>", 4, 4, show="panel")
progress.update(4, 0.1, float("nan"), 0.5, "accuracy")
progress.close()
"""


def test_live_panel_in_a_kernel(request):
    setup = LIVE.format(tests=str(request.path.parent))
    sources = (setup, FOLLOWED, BAD_LOSS, "fit(points(), device='cpu');")
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=120).execute()
    followed, bad, quiet = (cell.outputs for cell in notebook.cells[1:])
    panel, *lines = followed
    shown = panel.data["text/html"]
    assert "points step 12/12: loss" in shown and "samples/s" in shown and "<polyline points=" in shown
    assert set(panel.data) == {"text/html", "text/plain"}, "no widget stays in the file"
    assert "step 12: accuracy" in lines[-1].text
    shown = bad[0].data["text/html"]
    assert "a &lt;name&gt;" in shown and "loss nan" in shown and "nan" not in shown.split("points=")[1]
    assert {output.output_type for output in quiet} == {"stream"}, "nobody sits before a kernel that a program runs"


def test_a_panel_asked_for_where_there_is_no_notebook_is_plain_lines(capfd):
    fit(points(), device="cpu", plan=Plan(log_every=2), progress="panel")
    assert "points step 12/12: loss" in capfd.readouterr().out

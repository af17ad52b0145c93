"""Widgets by setting their values, without a browser; and the live panel of a run in a real kernel."""

import dataclasses

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from tiny import points

from speedkit import Plan, fit
from speedkit.config import from_mapping
from speedkit.hardware import Hardware
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.schema import load_record
from speedkit.measure.stats import paired_interval
from speedkit.show.widgets import PlanPanel, explorer, first_pairs, plan_rows, ratio_table

BARE = Hardware(cpu="a CPU")  # without fast number formats, without a compiler
RECORDS = [load_record(path) for path in sorted(notebooks_folder().glob("records/*/21_mixed_precision.json"))]


# ---- the plan panel ----


def test_every_field_has_a_row_and_a_dropdown_with_the_values_that_it_takes():
    panel = PlanPanel(hardware=BARE)
    names = [field.name for field in dataclasses.fields(Plan)]
    assert [row["field"] for row in plan_rows(Plan(), BARE)] == names == list(panel.fields)
    for name, field in panel.fields.items():
        for value in field.options:
            from_mapping(Plan, {name: value})  # refuses what is no value of the field
    assert panel.plan == Plan()


def test_the_panel_tells_what_this_machine_makes_of_the_choice(capsys):
    panel = PlanPanel(points(), hardware=BARE)
    assert "this machine honours every field" in capsys.readouterr().out
    panel.fields["precision"].value = "bf16"
    assert "precision: asked bf16, got default: bf16 needs a CPU" in capsys.readouterr().out
    panel.fields["validate_every"].value = "none"
    panel.fields["ranks"].value = "2"
    assert "bf16" in capsys.readouterr().out
    assert panel.plan == Plan(precision="bf16", ranks=2)
    row = next(row for row in plan_rows(panel.plan, BARE, points()) if row["field"] == "precision")
    assert (row["asked"], row["got"]) == ("bf16", "default") and "bf16 needs a CPU" in row["why"]


def test_run_measures_the_plan_and_adds_it_to_table_and_figure(capsys):
    panel = PlanPanel(points(), recipe=points(batch_size=32).recipe, seconds=0.1)
    panel.fields["drop_last"].value = "true"
    panel.run.click()
    panel.fields["drop_last"].value = "false"
    panel.run.click()
    assert [one["name"] for one in panel.rows] == ["1. drop_last=True", "2. the baseline itself"]
    assert "the baseline itself" in capsys.readouterr().out
    assert panel.run not in PlanPanel().children, "without a workload nothing can be measured"


# ---- the explorer ----


@pytest.mark.parametrize(
    ("low", "high", "says"), [(1.02, 1.4, "faster"), (0.98, 1.4, "not shown"), (0.7, 0.97, "slower")]
)
def test_a_row_says_what_its_interval_says(low, high, says):
    row = {"name": "mine", "ratio": 1.3, "low": low, "high": high, "seconds_a": []}
    assert ratio_table([row])["says"].tolist() == [says]


def test_explorer_shows_what_fewer_pairs_would_have_said(capsys):
    widget = explorer(RECORDS)
    measured = RECORDS[0]["measurements"][0]
    select, slider = widget.children[:2]
    select.value, slider.value = [measured["name"]], 6
    assert "Traceback" not in capsys.readouterr().out
    [row] = first_pairs(RECORDS[0], [measured["name"]], 6)["measurements"]
    interval = paired_interval(measured["seconds_a"][:6], measured["seconds_b"][:6])
    assert (row["ratio"], row["low"], row["high"]) == tuple(vars(interval).values())
    assert ratio_table([row]).loc[0, "pairs"] == 6


# ---- the live panel ----

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
progress.update(4, 0.1, float("nan"), score=0.5, metric="accuracy")
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

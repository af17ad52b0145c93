"""Widgets by setting their values, without a browser; and the live panel of a run in a real kernel."""

import dataclasses
import html
import json

import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from tiny import points

from speedkit import Plan, fit
from speedkit.hardware import Hardware
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.stats import paired_interval
from speedkit.show import widgets
from speedkit.show.widgets import Explorer, PlanPanel, as_html, explored, plan_rows, ratio_table

BARE = Hardware(cpu="a CPU")  # without fast number formats, without a compiler
RECORD = "21_mixed_precision"


def rows_of(*args):
    return {row["field"]: row for row in plan_rows(*args)}


def row(**changed):
    return {"name": "mine", "ratio": 1.3, "low": 1.2, "high": 1.4, "noise_floor": 1.05, "seconds_a": [], **changed}


# ---- the plan panel ----


def test_every_field_has_a_row_and_a_control():
    panel = PlanPanel(hardware=BARE)
    assert list(rows_of(Plan(), BARE)) == [field.name for field in dataclasses.fields(Plan)] == list(panel.notes)
    assert all(bool(panel.choices[name]) != (name in panel.texts) for name in panel.notes)


def test_what_the_machine_cannot_do_is_greyed_out_and_says_why():
    panel = PlanPanel(points(), hardware=BARE)
    greyed = {(name, value) for name, made in panel.choices.items() for value, one in made.items() if one.disabled}
    assert greyed >= {
        ("precision", "bf16"),
        ("precision", "fp8"),
        ("compile", "default"),
        ("prefetch", True),
        ("bucket", True),
        ("attention", "cudnn"),
        ("decoder", "librosa"),
        ("cache", "device"),
    }
    assert not greyed & {("precision", "fp32"), ("precision", "fp8-emulated"), ("channels_last", True)}
    assert "C++ compiler" in panel.choices["compile"]["default"].tooltip
    assert "default, reduce-overhead, max-autotune: compile needs a C++ compiler" in panel.notes["compile"].value
    assert not panel.texts["workers"].disabled
    panel = PlanPanel(hardware=dataclasses.replace(BARE, device=torch.device("mps")))
    assert panel.texts["ranks"].disabled and "ranks=2 takes a CUDA GPU each" in panel.notes["ranks"].value


def test_what_is_possible_follows_the_rest_of_the_plan():
    panel = PlanPanel(points(), hardware=BARE)
    panel.choices["cache"]["ram"].click()
    assert panel.plan.cache == "ram" and panel.texts["workers"].disabled
    assert "a cached batch is one gather" in panel.notes["workers"].value
    panel.choices["cache"]["off"].click()
    assert not panel.texts["workers"].disabled
    halves = dataclasses.replace(BARE, cpu_flags=("avx512_fp16",))
    assert "fp16" not in rows_of(Plan(), halves)["precision"]["impossible"], "only the optimizer changes with it"


def test_a_plan_asked_for_all_the_same_shows_what_becomes_of_it():
    panel = PlanPanel(plan=Plan(precision="bf16", compile="default"), hardware=BARE)
    assert panel.plan.precision == "bf16" and panel.told == ""
    assert "asked bf16, got default" in panel.notes["precision"].value
    assert panel.choices["precision"]["bf16"].button_style == "primary"
    assert rows_of(panel.plan, BARE)["compile"]["got"] == "off"


def test_controls_and_python_set_the_same_plan():
    panel = PlanPanel(hardware=BARE)
    panel.texts["workers"].value = "2"
    panel.texts["validate_every"].value = "none"
    panel.choices["channels_last"][True].click()
    assert panel.plan == Plan(workers=2, channels_last=True)
    panel.set(workers="auto", micro_batch=8)
    assert panel.plan == Plan(workers="auto", channels_last=True, micro_batch=8)
    assert (panel.texts["workers"].value, panel.texts["micro_batch"].value) == ("auto", "8")
    fast = next(one for one in panel.children[0].children if one.description == "fast")
    fast.click()
    assert panel.plan == Plan.fast(BARE)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("workers", "-1", "workers=-1 is not possible; it takes auto | an integer from 0"),
        ("prefetch_factor", 0, "prefetch_factor=0 is not possible"),
        ("log_every", "often", "log_every='often' is not possible"),
        ("precision", "bf17", "did you mean bf16?"),
        ("ranks", 0, "ranks=0 is not possible; it takes an integer from 1"),
        ("amp", True, "'amp' is not a field of Plan"),
    ],
)
def test_what_is_impossible_is_told_and_changes_nothing(field, value, told):
    panel = PlanPanel(points(), hardware=BARE)
    panel.set(**{field: value, "drop_last": True})
    assert told in panel.told and told in html.unescape(panel.message.value) and panel.plan == Plan(drop_last=True)
    if field in panel.texts:
        panel.texts[field].value = str(value)
        assert told in panel.told and panel.texts[field].value == widgets.in_words(getattr(panel.plan, field))
    panel.set(drop_last=False)
    assert panel.told == ""


def test_run_measures_the_plan_and_adds_it_to_table_and_figure():
    panel = PlanPanel(points(), Plan(drop_last=True), recipe=points(batch_size=32).recipe, seconds=0.1)
    panel.run_button.click()
    first = panel.figure.value
    panel.set(drop_last=False)
    panel.run_button.click()
    assert [one["name"] for one in panel.rows] == ["1. drop_last=on", "2. the baseline itself"], panel.told
    assert panel.rows[1]["loss_difference"] == 0, "a plan learns what it learns itself"
    assert panel.table.value == as_html(ratio_table(panel.rows))
    assert bytes(first).startswith(b"\x89PNG") and panel.figure.value != first
    assert panel.told == "result 2 added"


def failing(model, batch, recipe):
    raise ValueError("no such <layer>")


def interrupted(model, batch, recipe):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("panel", "told"),
    [
        (lambda: PlanPanel(dataclasses.replace(points(), loss=failing)), "ValueError: no such <layer>"),
        (lambda: PlanPanel(dataclasses.replace(points(), train=[])), "has no readable item"),
        (lambda: PlanPanel(points(), recipe=points(focal_gamma=2.0).recipe), "focal_gamma=2.0 is not applied"),
        (lambda: PlanPanel(dataclasses.replace(points(), loss=interrupted)), "nothing was added: KeyboardInterrupt"),
    ],
)
def test_a_run_that_fails_is_told_and_adds_nothing(panel, told):
    panel = panel()
    panel.run()
    assert told in panel.told and panel.rows == [] and "<layer>" not in panel.message.value
    assert not panel.run_button.disabled


def test_without_a_workload_there_is_no_run_button():
    assert not [one for one in PlanPanel().children[0].children if one.description == "Run"]


@pytest.mark.parametrize(
    ("low", "high", "floor", "says"),
    [
        (1.2, 1.4, 1.05, "faster"),
        (1.02, 1.4, 1.05, "not beyond the noise"),
        (0.7, 0.9, 1.05, "slower"),
        (0.7, 0.97, 1.05, "not beyond the noise"),
        (1.01, 1.4, None, "faster"),
    ],
)
def test_a_row_says_what_its_interval_says(low, high, floor, says):
    assert ratio_table([row(low=low, high=high, noise_floor=floor)])["says"].tolist() == [says]


# ---- the explorer ----


def test_explorer_of_what_is_published_shows_any_notebook():
    explorer = Explorer()
    explorer.notebook.value = RECORD
    names, places = explorer.measurements.value, explorer.machines.value
    records = [explorer.records[RECORD][place] for place in places]
    assert explorer.told == "" and len(explorer.records) > 10 and names and places
    table, _ = explored(records, names)
    assert explorer.table.value == as_html(table)
    assert len(table) == sum(one["name"] in names for record in records for one in record["measurements"])


def test_explorer_changes_table_and_figure_with_each_control():
    explorer = Explorer(sorted(notebooks_folder().glob(f"records/*/{RECORD}.json")))
    seen = [(explorer.table.value, explorer.figure.value)]
    for control, value in (
        (explorer.pairs, 6),
        (explorer.measurements, explorer.measurements.options[:1]),
        (explorer.machines, (0,)),
    ):
        control.value = value
        seen.append((explorer.table.value, explorer.figure.value))
    assert len({table for table, _ in seen}) == len({figure for _, figure in seen}) == 4
    measured = explorer.records[RECORD][0]["measurements"][0]
    found = paired_interval(measured["seconds_a"][:6], measured["seconds_b"][:6])
    table, figure = explored(explorer.records[RECORD][:1], [measured["name"]], pairs=6)
    assert table.loc[0, ["ratio", "low", "high", "pairs"]].tolist() == pytest.approx(
        [*vars(found).values(), 6], abs=1e-4
    )
    assert measured["name"][:20] in str([text.get_text() for text in figure.axes[0].get_yticklabels()])


def test_explorer_leaves_out_what_is_no_record_of_this_version(tmp_path):
    good = next(notebooks_folder().glob(f"records/*/{RECORD}.json"))
    record = json.loads(good.read_text())
    (tmp_path / "old.json").write_text(json.dumps(record | {"schema": 0}))
    (tmp_path / "torn.json").write_text(good.read_text()[:1000])
    strange = {key: value for key, value in record.items() if key != "measurements"}
    unsaved = {key: value for key, value in record.items() if key not in ("power", "clocks", "energy_j")}
    explorer = Explorer([tmp_path / "old.json", tmp_path / "torn.json", strange, unsaved])
    assert list(explorer.records) == [RECORD] and len(explorer.records[RECORD]) == 1
    for why in ("old.json is not valid", "torn.json cannot be read", f"a record of {RECORD} is not valid"):
        assert why in explorer.told and why in explorer.message.value
    assert explorer.table.value


def test_explorer_without_a_choice_says_so():
    for explorer in (Explorer([]), Explorer()):
        explorer.machines.value = ()
        assert "choose a machine" in explorer.message.value and explorer.figure.layout.display == "none"


# ---- the live panel ----

LIVE = """
import sys, torch
sys.path.insert(0, {tests!r})
from tiny import points
from speedkit import Plan, fit
from speedkit.train.progress import Progress
"""
FOLLOWED = "fit(points(), plan=Plan(log_every=2), device='cpu', progress='panel');"
BAD_LOSS = """
progress = Progress("a <name>", 4, 4, torch.device("cpu"), "panel")
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
    history = fit(points(), device="cpu", plan=Plan(log_every=2), progress="panel")
    assert "points step 12/12: loss" in capfd.readouterr().out
    table = widgets.course(history)
    assert table["step"].tolist() == history.log_steps and table["loss"].tolist() == history.loss
    assert (table["step_s"] > 0).all()

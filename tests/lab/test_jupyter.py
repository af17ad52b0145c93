"""At home in Jupyter: what a cell shows of results, errors and stops, what Tab and help say, and the magics."""

import dataclasses
import inspect
import itertools
import re
import signal

import nbformat
import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import run_kernel
from nbconvert import HTMLExporter
from processes import TESTS
from tiny import QUIET, calling, points
from torch.utils.data import TensorDataset

from speedkit import Plan, Recipe, compare, fit, from_dataset, resolve, this_machine
from speedkit.data.cache import open_cache
from speedkit.display import table
from speedkit.errors import Interrupted, PlanError
from speedkit.lab import figures
from speedkit.lab.tuning import TuningRecord
from speedkit.measure.profile_report import profile_workload

HOSTILE = "<script>alert(1)</script>\udcff"
LOOP = """for inputs, targets in loader:
    optimizer.zero_grad()
    criterion(model(inputs), targets).backward()
    optimizer.step()
"""
PARTS = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
criterion = nn.CrossEntropyLoss()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(640, 8), torch.randint(2, (640,))), batch_size=16)
"""


@pytest.fixture
def shell():
    """IPython, with the extension."""
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "speedkit")
    yield shell
    InteractiveShell.clear_instance()


def run(shell, code):
    """Return what a cell's last line is."""
    return shell.run_cell(code).raise_error() or shell.user_ns.get("_")


# ---- what is shown of a result ----


def test_plans_and_recipes_show_only_what_differs_from_their_defaults():
    assert repr(Plan()) == "Plan()" and "<table>" not in Plan()._repr_html_()
    plan = Plan(precision="bf16", workers=2)
    assert repr(plan) == "Plan(precision='bf16', workers=2)" and eval(repr(plan)) == plan
    shown = plan._repr_html_()
    assert "Processes that load data" in shown and "channels_last" not in shown
    assert repr(Recipe(epochs=None, steps=3)) == "Recipe(epochs=None, steps=3)"
    effective = resolve(Plan(precision="fp8"), this_machine("cpu"))
    assert all(text in effective._repr_html_() for text in ("<th", "asked", "fp8 needs an NVIDIA GPU"))


def test_a_workload_shows_its_numbers_and_never_its_items():
    dataset = TensorDataset(torch.zeros(200_000, 1), torch.zeros(200_000, dtype=torch.long))
    work = from_dataset(torch.nn.Linear(1, 2), dataset, dataset)
    assert "200,000" in repr(work) + work._repr_html_() and len(repr(work) + work._repr_html_()) < 1000


def test_results_show_their_rows_with_a_curve_or_a_bar(tuning, tmp_path):
    history = fit(points(), plan=Plan(log_every=1), **QUIET)
    assert f"{history.evaluation['value']:.4f} of 32 test items" in repr(history) and "Linear" not in repr(history)
    assert history._repr_html_().count("<tr>") == 1 + len(history.evaluations) and "█" in history._repr_html_()
    comparison = compare(points(), Plan(), Plan(fused_optimizer=True), pairs=10, **QUIET)
    assert str(comparison) == repr(comparison) and comparison.decision in comparison._repr_html_()
    quiet = dataclasses.replace(comparison, low=0.9, ratio=1.0, high=1.1)  # beside load the whole bar may be pale
    assert "█" in quiet._repr_html_() and len(repr(comparison)) < 200
    report = profile_workload(points(), device="cpu")
    assert report["rows"] and repr(report).startswith("points:")
    assert all(row["evidence"] in report._repr_html_() for row in report["bottlenecks"])
    record = TuningRecord(tuning)
    assert record == tuning and record["change"] in repr(record) and len(repr(record)) < 2000
    assert all(row["change"] in record._repr_html_() for row in record["optimizations"] if row["ratio"])
    cache = open_cache(points(), points().train, Plan(cache="ram"), cache_dir=tmp_path)
    assert "96 items, cache=ram: " in repr(cache) and "disk" not in repr(cache)
    assert "fp8 needs" in this_machine("cpu")._repr_html_() and len(repr(this_machine("cpu"))) < 200


def test_a_history_shows_what_its_plan_fell_back_to_and_why():
    plan = Plan(precision="fp8", pin_memory=True, fused_optimizer=True)
    shown = fit(points(), plan=plan, **QUIET)._repr_html_()
    assert "precision: asked fp8, got " in shown and "fp8 needs an NVIDIA GPU" in shown
    assert "pin_memory: asked True, got False: pin_memory needs a CUDA GPU" in shown
    assert "fused_optimizer" not in shown  # it is as asked


def test_what_comes_from_files_and_users_is_text_and_no_html(tuning):
    work = points()
    history = fit(work, **QUIET)
    history.workload = HOSTILE
    tuning["optimizations"][0] |= {"ratio": 2.0, "low": 1.0, "high": 3.0, "change": HOSTILE}
    for shown in (history, TuningRecord(tuning), dataclasses.replace(work, name=HOSTILE), resolve_with_reason(HOSTILE)):
        html = shown._repr_html_()
        assert "<script" not in html and "&lt;script&gt;" in html
        html.encode()  # a front end takes no bytes that are no text


CUT_WORDS = """() => [...document.querySelectorAll(".jp-OutputArea-output pre")].flatMap(pre => {
  const texts = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT), cut = []
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
    const range = document.createRange()
    range.setStart(texts.currentNode, word.index)
    range.setEnd(texts.currentNode, word.index + word[0].length)
    if (range.getClientRects().length > 1) cut.push(word[0])
  }
  return cut
})"""


@pytest.mark.parametrize("width", [900, 1400])
def test_jupyterlab_breaks_the_lines_of_a_result_between_words_and_leaves_no_empty_line(browser, tmp_path, width):
    words = " ".join("unexplained"[:length] for length in range(1, 12))
    html = table(f"{words} " * 4, (), (), below=f"{words} " * 7) + table(words, ("cause",), [("forward",)])
    output = nbformat.v4.new_output("display_data", {"text/html": html})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])])
    (tmp_path / "page.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])  # with JupyterLab's stylesheet
    page = browser.new_page(viewport={"width": width, "height": 900}, offline=True)
    page.goto(f"file://{tmp_path}/page.html")
    shown = page.locator(".jp-OutputArea-output pre")
    assert shown.count() == 3 and all(shown.all_text_contents())
    assert shown.nth(1).bounding_box()["height"] > 1.5 * shown.nth(2).bounding_box()["height"]  # of several lines
    assert page.evaluate(CUT_WORDS) == []


def resolve_with_reason(why):
    effective = resolve(Plan(), this_machine("cpu"))
    effective.fall_back("workers", 2, why)
    return effective


def test_a_figure_is_shown_with_two_dots_for_a_point_and_its_words(shell, tuning):
    data, about = shell.display_formatter.format(figures.waterfall(tuning))
    width = int.from_bytes(data["image/png"][16:20], "big")
    assert width == 2 * about["image/png"]["width"] and "over " in about["image/png"]["alt"]


# ---- signatures and help ----


def test_a_signature_names_every_field_with_its_values_and_the_help_has_a_sentence_for_each():
    text = str(inspect.signature(Plan))
    assert "precision: Literal['default', 'fp32'" in text and "workers: int = 0" in text
    assert "FieldInfo" not in text + inspect.getdoc(Plan) and "Annotated" not in text
    assert "workers: Processes that load data" in inspect.getdoc(Plan)
    for function in (fit, compare):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("typed", ['Plan(cache="', "%plan bf16 cache=", "%plan cache="])
def test_tab_completes_the_values_of_a_field(shell, typed):
    with provisionalcompleter():
        offered = [one.text for one in shell.Completer.completions(typed, len(typed))]
    assert sorted(offered) == ["device", "disk", "off", "ram"]


# ---- errors and stops ----


@pytest.mark.parametrize(
    ("code", "sentence"),
    {
        "Plan('bf16')": "PlanError: Plan takes its fields by name, not 'bf16'",
        "Plan(precision='b16')": "PlanError: precision='b16' is not possible; it takes default | fp32",
        "%plan default": "PlanError: 'default' is a value of 3 fields: write which, as in cache=ram",
        "%%profile\n1": "UsageError: the cell names no Module: write %%profile model optimizer loader",
    }.items(),
)
def test_an_error_of_ours_is_one_sentence(shell, capsys, code, sentence):
    shell.run_cell("from speedkit import Plan")
    shell.run_cell(code)
    shown = capsys.readouterr().out
    assert shown.startswith(sentence) and shown.count("\n") == 1


def test_a_stop_keeps_the_history_so_far_with_its_model():
    with pytest.raises(Interrupted, match=r"after step 3; `so_far` of this error") as caught:
        fit(points(), plan=Plan(log_every=1), device="cpu", progress=False, on_log=stop_at(2))
    history = caught.value.so_far
    assert history.steps == 3 and len(history.loss) == 3
    assert history.model(torch.zeros(1, 8)).shape == (1, 2)


def test_after_a_stop_the_history_is_at_hand_in_the_notebook(shell, capsys):
    shell.user_ns |= {"fit": fit, "work": points(), "plan": Plan(log_every=1), "stop": stop_at(1)}
    shell.run_cell("history = fit(work, None, plan, device='cpu', progress=False, on_log=stop)")
    assert capsys.readouterr().out.count("\n") == 1
    assert run(shell, "import sys; sys.last_value.so_far").steps > 0


def stop_at(step):
    def on_log(point):
        if point["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return on_log


def stopped(at):
    """A workload that is stopped by Ctrl-C in its loss, when this is computed for the so-manieth time."""
    calls = itertools.count(1)

    def stop(model, batch):
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)

    return calling(points(), stop)


def test_a_stop_keeps_the_pairs_so_far_undecided_and_before_them_is_one_sentence():
    with pytest.raises(Interrupted, match="undecided; `so_far`") as caught:
        compare(stopped(at=36), Plan(), Plan(), **QUIET)
    assert caught.value.so_far.decision == "undecided" and len(caught.value.so_far.seconds_a) >= 2
    with pytest.raises(Interrupted, match="before there was a result"):
        compare(stopped(at=2), Plan(), Plan(), **QUIET)


CELL = """import sys; sys.path.insert(0, {tests!r})
from tiny import points, slowed
from speedkit import Plan, compare
from speedkit.measure.breakdown import breakdown_of
work = slowed(points(), 0.01)
compare(work, Plan(), Plan(), device="cpu", pairs=10)
breakdown_of(work, device="cpu");"""


@pytest.mark.slow
def test_a_comparison_and_a_breakdown_show_where_they_are_where_somebody_sits_before_the_cell():
    shown = {}
    with run_kernel(kernel_name="python3") as client:
        for cell, metadata in {"interactive": {"cellId": "a-cell"}, "by a program": {}}.items():
            content = {"code": CELL.format(tests=str(TESTS)), "silent": False}
            client.shell_channel.send(client.session.msg("execute_request", content, metadata=metadata))
            shown[cell] = ""
            while (message := client.get_iopub_msg(timeout=60))["content"].get("execution_state") != "idle":
                shown[cell] += message["content"].get("text", "")
    assert re.search(r"pair [1-9]\d? of at most 10 \[\d+:\d+, ratio so far \d", shown["interactive"])
    assert re.search(r"step [1-6] of at most 6 \[\d+:\d+, measuring", shown["interactive"])
    assert shown["interactive"].count("compiling and warming up") > 1
    assert not re.search("pair|step", shown["by a program"])


# ---- magics ----


def test_a_plan_in_a_line(shell):
    assert run(shell, "%plan bf16 cache=ram workers=2") == Plan(precision="bf16", cache="ram", workers=2)
    assert run(shell, "%plan careful log_every=7").log_every == 7 and run(shell, "%plan") == Plan()
    with pytest.raises(PlanError, match="'ab' is a value of 0 fields"):
        run(shell, "%plan ab")


def test_a_cell_with_a_training_loop_is_profiled(shell):
    run(shell, PARTS)
    seen = run(shell, f"%%profile\n{LOOP}")
    assert "data wait" in seen._repr_html_() and "Bottlenecks" in seen._repr_html_() and seen.steps == 40
    assert seen.models == [shell.user_ns["model"]] and shell.user_ns["targets"].shape == (16,)


def test_two_cells_take_turns(shell, capsys):
    shell.run_cell("%%compare much\nsum(range(1000000))")
    shell.run_cell("%%compare little\nsum(range(1000))")
    first, told = capsys.readouterr().out.splitlines()
    assert first == "the next %%compare takes turns with much"
    assert told.startswith("little against much: ") and told.endswith(": faster")

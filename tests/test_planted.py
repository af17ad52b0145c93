"""The diagnosis names each slowdown that notebook 02 injects first, with the field that cures it; nothing else."""

import linecache

import pytest
from publish import code_cells

from speedkit.hardware import this_machine
from speedkit.measure.provenance import notebooks_folder
from speedkit.measure.record import read_notebook
from speedkit.measure.watch import watch

# The cell that holds the loop and its causes, up to where it chooses among them.
CELLS = code_cells(read_notebook(notebooks_folder() / "02_where_time_goes.ipynb"))
(SOURCE,) = (cell.source.partition("THE_LOOP =")[0] for cell in CELLS if "class Loop(" in cell.source)
NOTEBOOK = {"__name__": "notebook_02"}
linecache.cache["notebook_02"] = (len(SOURCE), None, SOURCE.splitlines(True), "notebook_02")  # the diagnosis cites it
exec(compile(SOURCE, "notebook_02", "exec"), NOTEBOOK)
CAUSES, Loop = NOTEBOOK["CAUSES"], NOTEBOOK["Loop"]

HERE = this_machine()
ON_CPU = HERE.device.type == "cpu"  # which copies nothing, and has computed a loss before it is read
IMPOSSIBLE = {"large copies", "host read each step"} if ON_CPU else set()
IMPOSSIBLE |= set() if HERE.supports("bf16") else {"compute-bound"}


def watched(loop):
    with watch(loop.model, loop.optimizer, loop.loader, show=False) as seen:
        loop.train(40)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause not in IMPOSSIBLE])
def test_the_diagnosis_names_what_was_injected_first_with_its_seconds(cause):
    loop = Loop(cause, 3 * Loop().step_s())
    seen = watched(loop)
    first = seen.diagnosis[0]
    assert (first["cause"], first["field"]) == (cause, CAUSES[cause])
    if ON_CPU:  # a GPU hides part of what its host does
        assert 0.4 < first["seconds"] / seen.ledger.step_s < 0.95  # three quarters of a step were injected


@pytest.mark.slow
def test_the_diagnosis_finds_nothing_in_a_healthy_loop():
    assert watched(Loop()).diagnosis == []

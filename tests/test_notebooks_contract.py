"""The notebooks as they are committed, without a kernel; and that each rule would catch what breaks it."""

import re
from pathlib import Path

import check_notebooks
import nbformat
import pytest
from check_notebooks import contract_problems, hand_typed_speedups
from nbformat.v4 import new_markdown_cell, new_output

from speedkit.measure.record import RECORD_MIME, code_cells
from speedkit.publishing import is_stale, readme_text, records_text

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_contract(path):
    assert contract_problems(path) == []


def test_readme_is_what_the_records_say_and_types_no_speedup_by_hand():
    assert readme_text(ROOT / "README.md") == README, "run `speedkit publish`"
    assert records_text(ROOT / "notebooks") == (ROOT / "notebooks" / "records" / "README.md").read_text()
    assert (
        hand_typed_speedups(re.sub(r"<!-- generated:(\w+) -->.*?<!-- /generated:\1 -->", "", README, flags=re.S)) == []
    )


# ---- each rule is caught ----


def edit(path: Path, change) -> Path:
    notebook = nbformat.read(path, as_version=4)
    change(notebook, code_cells(notebook))
    nbformat.write(notebook, path)
    return path


def markdown(text):
    return lambda notebook, code: notebook.cells.insert(1, new_markdown_cell(text))


def output(*args, **values):
    return lambda notebook, code: code[2].outputs.append(new_output(*args, **values))


def strip(notebook, code):
    for cell in code:
        cell.outputs, cell.execution_count = [], None


WIDGET = {"application/vnd.jupyter.widget-view+json": {}}
VIOLATIONS = {
    "no parameters cell": (lambda n, code: code[0].metadata.pop("tags"), "0 cells tagged `parameters`"),
    "parameter without comment": (lambda n, code: code[0].update(source="a: int = 1"), "no comment on its line"),
    "no annotation": (lambda n, code: code[0].update(source="a = 1  # one"), "is not `name: type = literal"),
    "no title": (lambda n, code: n.cells.pop(0), "not a title"),
    "stripped": (strip, "nbval would compare nothing"),
    "no checked cell": (lambda n, code: code[-2].metadata.pop("tags"), "no cell is tagged"),
    "a failed check": (lambda n, code: code[-2].outputs[0].update(text="FAIL both\n"), "begin with PASS"),
    "error": (output("error", ename="ValueError", evalue="x", traceback=[]), "shows an error"),
    "stderr": (output("stream", name="stderr", text="careful"), "text on stderr"),
    "path": (output("stream", text="saved in /" + "home/ann/runs"), "/" + "home/ann"),
    "widget": (output("display_data", data=WIDGET), "a widget"),
    "metadata": (lambda n, code: n.metadata.update(papermill={}), "the metadata or tags"),
    "speed-up by hand": (markdown("This makes it 2.5x faster."), "by hand: ['2.5x']"),
    "no record": (lambda n, code: code[-1].update(outputs=[]), "0 records are shown"),
    "other": (lambda n, code: code[-1].outputs[0].data[RECORD_MIME].update(notebook="22_fp8"), "another notebook"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_contract_catches(name, tmp_path):
    change, says = VIOLATIONS[name]
    path = check_notebooks.executed(tmp_path / "21_tiny.ipynb")
    assert contract_problems(path) == []
    assert says in " | ".join(contract_problems(edit(path, change)))


def test_changed_code_makes_outputs_stale_and_comments_do_not(tmp_path):
    path = check_notebooks.executed(tmp_path / "21_tiny.ipynb")
    assert not is_stale(edit(path, lambda n, code: code[2].update(source="# A comment.\ntotal = 1 + 2")))
    assert is_stale(edit(path, lambda n, code: code[2].update(source="total = 1 + 3")))


def test_speedups_in_prose_are_found_and_other_figures_let_through():
    for text in ("about 3x", "1.5 × more", "a 2-fold gain", "40 % faster", "30% less time", "twice as fast"):
        assert hand_typed_speedups(text), text
    for text in (
        "a 3x3 kernel",
        "3 × 3 pixels",
        "a 99 % interval",
        "float32 × float32",
        "2-core",
        "batches of 64 x 128",
    ):
        assert not hand_typed_speedups(text), text

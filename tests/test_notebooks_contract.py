"""The notebooks as they are committed, without a kernel; and that each rule, and nbval, would catch what breaks it."""

import re
import subprocess
import sys
from pathlib import Path

import check_notebooks
import nbformat
import pytest
from check_notebooks import contract_problems, hand_typed_speedups
from nbformat.v4 import new_markdown_cell, new_output

from speedkit.measure.record import RECORD_MIME
from speedkit.publishing import is_stale, readme_text

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FOUNDATION = {"00_start_here", "01_measure", "10_dataloader", "12_feature_cache", "21_mixed_precision", "90_climb"}


def test_the_notebooks_of_the_foundation_are_there():
    assert {path.stem for path in NOTEBOOKS} >= FOUNDATION


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_contract(path):
    assert contract_problems(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_older_than_the_code_are_listed_as_stale(path):
    readme = (ROOT / "README.md").read_text()
    row = next((line for line in readme.splitlines() if f"/{path.name})" in line), "")
    assert ("stale**: its code changed" in row) == is_stale(path), "run `speedkit publish` or update the README"


def test_readme_is_what_the_records_say():
    readme = ROOT / "README.md"
    assert readme_text(readme) == readme.read_text()


def test_readme_types_no_speedup_by_hand():
    text = (ROOT / "README.md").read_text()
    assert hand_typed_speedups(re.sub(r"<!-- generated:(\w+) -->.*?<!-- /generated:\1 -->", "", text, flags=re.S)) == []


# ---- each rule is caught ----


def edit(path: Path, change) -> Path:
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)
    return path


def code(notebook, index):
    return [cell for cell in notebook.cells if cell.cell_type == "code"][index]


def markdown(text):
    return lambda notebook: notebook.cells.insert(1, new_markdown_cell(text))


def parameters(text):
    return lambda notebook: code(notebook, 0).update(source=text)


def output(index, *args, **values):
    return lambda notebook: code(notebook, index).outputs.append(new_output(*args, **values))


def record(**changes):
    return lambda notebook: code(notebook, -1).outputs[0].data[RECORD_MIME].update(changes)


def strip(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def injected(notebook):
    notebook.cells.insert(3, check_notebooks.code("batch_size = 8", "injected-parameters"))


VIOLATIONS = {
    "no parameters cell": (lambda n: code(n, 0).metadata.pop("tags"), "0 cells tagged `parameters`"),
    "two parameters cells": (lambda n: code(n, 1).metadata.update(tags=["parameters"]), "2 cells tagged"),
    "parameter without comment": (parameters("a: int = 1"), "no comment on its line"),
    "parameter without annotation": (parameters("a = 1  # one"), "is not `name: type = literal"),
    "derived parameter": (parameters("a: int = 1 + len('x')  # two"), "is not `name: type"),
    "parameter over two lines": (parameters("a: list[int] = [1,\n 2]  # two"), "no comment on its line"),
    "parameter of another type": (parameters("a: int = 'x'  # one"), "is not `name: type"),
    "list of another type": (parameters("a: int = [1]  # one"), "is not `name: type"),
    "unknown type": (parameters("a: dict = {}  # none"), "with a type of"),
    "counts out of order": (lambda n: code(n, 2).update(execution_count=9), "execution counts are"),
    "stripped": (strip, "nbval would compare nothing"),
    "checked cell without output": (lambda n: code(n, -2).update(outputs=[]), "no count or no output"),
    "no checked cell": (lambda n: code(n, -2).metadata.pop("tags"), "no cell is tagged"),
    "save cell is checked": (lambda n: code(n, -1).metadata.update(tags=["nbval-check-output"]), "more than text"),
    "a failed check": (lambda n: code(n, -2).outputs[0].update(text="FAIL both\n"), "begin with PASS"),
    "error": (output(2, "error", ename="ValueError", evalue="x", traceback=[]), "shows the error ValueError"),
    "stderr": (output(2, "stream", name="stderr", text="careful"), "on stderr: careful"),
    "path in an output": (output(2, "stream", text="saved in /" + "home/ann/runs"), "path /" + "home/ann"),
    "path in a record": (record(extra="/" + "root/data"), "absolute path"),
    "path in the source": (lambda n: code(n, 2).update(source="open('/" + "tmp/x')"), "absolute path"),
    "path of Windows": (markdown("see C:" + "\\Users\\ann"), "absolute path C:"),
    "papermill in the notebook": (lambda n: n.metadata.update(papermill={}), "metadata holds papermill"),
    "papermill in a cell": (lambda n: code(n, 1).metadata.update(papermill={}), "tag papermill"),
    "times in a cell": (lambda n: code(n, 1).metadata.update(execution={}), "tag execution"),
    "injected cell": (injected, "tag injected-parameters"),
    "widget state": (lambda n: n.metadata.update(widgets={}), "metadata holds widgets"),
    "widget": (output(2, "display_data", data={"application/vnd.jupyter.widget-view+json": {}}), "a widget"),
    "too large": (output(2, "stream", text="x" * 300_000), "bytes, more than"),
    "other kernel": (lambda n: n.metadata.kernelspec.update(name="mine"), "kernel is not python3"),
    "speed-up by hand": (markdown("This makes it 2.5x faster."), 'by hand, "2.5x"'),
    "no record": (lambda n: code(n, -1).update(outputs=[]), "0 of its cells show a record"),
    "record of another version": (record(schema=99), "schema: 1 was expected"),
    "record of another notebook": (record(notebook="22_fp8"), "record is that of 22_fp8"),
    "no title": (lambda n: n.cells.pop(0), "not a title"),
    "no losing case": (lambda n: n.cells.pop(6), 'no heading says "does not help"'),
    "solution in the open": (lambda n: n.cells[7].update(source="## Exercise"), "collapsed"),
    "not saved": (lambda n: code(n, -1).update(source="run"), "does not call run.save()"),
    "empty cell": (lambda n: code(n, 2).update(source=" "), "is empty"),
}


def test_a_good_notebook_has_no_problems(tmp_path):
    path = check_notebooks.executed(tmp_path / "21_tiny.ipynb")
    assert contract_problems(path) == []
    assert not is_stale(path)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_contract_catches(name, tmp_path):
    change, says = VIOLATIONS[name]
    path = edit(check_notebooks.executed(tmp_path / "21_tiny.ipynb"), change)
    assert says in " | ".join(contract_problems(path))


def test_contract_catches_what_is_no_notebook(tmp_path):
    path = tmp_path / "21_tiny.ipynb"
    path.write_text("{")
    assert "is not a Jupyter notebook" in contract_problems(path)[0]
    assert "cannot be read" in contract_problems(tmp_path / "22.ipynb")[0]


def test_changed_code_makes_outputs_stale_and_comments_do_not(tmp_path):
    path = check_notebooks.executed(tmp_path / "21_tiny.ipynb")
    edit(path, lambda n: code(n, 2).update(source="# A comment.\ntotal = 1 + 2"))
    assert not is_stale(path)
    edit(path, lambda n: code(n, 2).update(source="total = 1 + 3"))
    assert is_stale(path)


@pytest.mark.parametrize(
    "text",
    [
        "about 3x",
        "1.5 × more",
        "a 2-fold gain",
        "40 % faster",
        "30% less time",
        "two times as fast? 2 times faster",
        "twice as fast",
    ],
)
def test_speedups_in_prose_are_found(text):
    assert hand_typed_speedups(text)


@pytest.mark.parametrize(
    "text",
    [
        "a 3x3 kernel",
        "3 × 3 pixels",
        "a 99 % interval",
        "64-64-10",
        "float32 × float32",
        "10 to 20 pairs",
        "2-core machine",
        "batches of 64 x 128",
    ],
)
def test_other_figures_in_prose_are_let_through(text):
    assert not hand_typed_speedups(text)


# ---- what nbval does, and does not ----


def test_nbval_fails_on_a_corrupted_output_and_passes_a_stripped_notebook(tmp_path):
    good = check_notebooks.executed(tmp_path / "good" / "21_tiny.ipynb")
    corrupt = check_notebooks.executed(tmp_path / "corrupt" / "21_tiny.ipynb")
    edit(corrupt, lambda n: code(n, -2).outputs[0].update(text="PASS both orders disagree\n"))
    stripped = edit(check_notebooks.executed(tmp_path / "stripped" / "21_tiny.ipynb"), strip)
    edit(stripped, lambda n: code(n, -2).update(source='run.check("something else", 1 + 1 == 2);'))

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--nbval-lax",
        "--nbval-current-env",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        good,
        corrupt,
        stripped,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    text = re.sub(r"\x1b\[\d+m", "", done.stdout)
    cells = re.findall(r"^(PASSED|FAILED) (\w+)/21_tiny\.ipynb::Cell (\d)", text, re.MULTILINE)
    assert [cell for cell in cells if cell[0] == "FAILED"] == [("FAILED", "corrupt", "3")], text
    assert len(cells) == 15, "nbval ran all cells of all three"
    assert contract_problems(stripped), "the contract catches what nbval does not"

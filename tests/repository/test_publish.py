"""Publishing: what is written, refused, left alone, deleted and taken in; the README, drawn from records."""

import json
import os
import re
from pathlib import Path

import batch_sizes
import nbformat
import pytest
from check_notebooks import contract_problems
from colab import with_badge
from IPython.core.inputtransformer2 import TransformerManager
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from nbformat.v4 import new_code_cell, new_output
from packaging.requirements import Requirement
from processes import ROOT, python
from publish import code_cells, device_slug, import_published, publish, readme_text, record_of, update_readme
from small_notebooks import a_record, commit, edit, executed, make_checkout, whole
from test_repository import PROJECT

from speedkit.dry.gpus import GPUS
from speedkit.dry.process import run
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import read_json, write_json
from speedkit.lab import provenance
from speedkit.lab.notebooks import find_notebooks
from speedkit.lab.record import read_notebook
from speedkit.machine import this_machine

HERE = device_slug(this_machine().as_dict())


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    """The notebooks of a checkout, committed, that nobody has run: one in order, and one that fails."""
    notebooks = make_checkout(tmp_path, monkeypatch)
    whole(notebooks / "21_tiny.ipynb")
    whole(notebooks / "22_bad.ipynb", "raise RuntimeError('no luck')")
    commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    return notebooks


def write_record(folder, machine, name, **changes):
    """Write a record of this commit, with `changes`, as `machine` would have left it."""
    path = folder / "records" / machine / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, a_record(name.partition("-")[0]) | changes)
    return path


@pytest.mark.slow
def test_batch_sizes_are_those_that_steps_take():
    folder = ROOT / "notebooks"
    rows = {(row["workload"], row["size"]): row for row in read_json(folder / batch_sizes.COUNTED)}
    counted = run("batch_sizes:count", GPUS["H100"], name="text", size="tiny")
    recorded = rows["text", "tiny"]
    for key in ("fixed_bytes", "sample_bytes"):
        assert counted[key] == pytest.approx(recorded[key], rel=0.02), "run tools/batch_sizes.py again"
    assert len(rows) == 12


def test_machines_have_readable_folders():
    assert device_slug({"gpu": "NVIDIA H200", "cpu": "x", "cores": 16}) == "nvidia-h200"
    assert device_slug({"cpu": "Intel(R) Xeon(R)", "cores": 2}) == "cpu-intel-xeon-2-cores"


@pytest.mark.slow
def test_publishing_keeps_what_worked_and_deletes_what_other_machines_left_of_older_code(folder, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_SCALE", "smoke")  # what is published is never a smoke run
    older = write_record(folder, "there", "21_tiny", commit="0123456")
    of_today = write_record(folder, "there", "21_tiny-image")
    bad = (folder / "22_bad.ipynb").read_bytes()
    outcomes = publish(None)
    assert outcomes["21_tiny"] == "published" and outcomes["22_bad"].startswith("failed: 22_bad.ipynb, cell [3]: Runt")
    assert not older.exists() and of_today.exists()

    published, record = folder / "21_tiny.ipynb", read_json(folder / "records" / HERE / "21_tiny.json")
    assert contract_problems(published) == [] and record == record_of(read_notebook(published))
    assert record["scale"] != "smoke" and os.environ["SPEEDKIT_SCALE"] == "smoke"
    assert (folder / "22_bad.ipynb").read_bytes() == bad
    assert "no luck" in Path("runs/publish/22_bad.failed.ipynb").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["21_tiny.ipynb", "22_bad.ipynb", "records"]

    assert publish(["21"]) == {"21_tiny": "current"}
    before = published.read_bytes()
    assert publish(["21"], workload="image") == {"21_tiny-image": "published"} and published.read_bytes() == before
    assert read_json(folder / "records" / HERE / "21_tiny-image.json")["parameters"]["workload"] == "image"
    edit(published, "total = 1 + 2 + 3")
    assert "commit it first" in publish(["21"])["21_tiny"]


def test_what_took_longer_before_than_is_left_does_not_start_and_a_stopped_tuning_goes_on(folder, tmp_path):
    stops_once = "import os, pathlib\nbegun = pathlib.Path(os.environ['SPEEDKIT_RUN_DIR'])\n"
    stops_once += "stopped = begun.exists()\nbegun.mkdir(exist_ok=True)\nassert stopped, 'stopped'"
    whole(folder / "90_tune.ipynb", stops_once)
    commit(tmp_path)
    write_record(folder, HERE, "21_tiny", seconds=1e6, commit="0123456")
    outcomes = publish(["90", "21"], budget_s=600.0)
    assert outcomes["90_tune"].startswith("failed: 90_tune.ipynb, cell [3]: AssertionError: stopped")
    assert outcomes["21_tiny"].startswith("left: ")
    assert publish(["90"], budget_s=600.0) == {"90_tune": "published"}
    assert not list(Path("runs/publish").iterdir())


def test_all_begins_with_the_tuning_on_every_workload(folder, tmp_path):
    whole(folder / "01_first.ipynb")
    whole(folder / "90_tune.ipynb")
    commit(tmp_path)
    tunings = ["90_tune", "90_tune-image", "90_tune-speech", "90_tune-text"]
    assert list(publish(None, budget_s=1e-9)) == [*tunings, "01_first", "21_tiny", "22_bad"]


def test_without_a_commit_that_a_record_could_name_nothing_is_published(folder, tmp_path, monkeypatch):
    (tmp_path / "speedkit" / "plan.py").write_text("changed = True\n")
    with pytest.raises(SpeedkitError, match=f"the package differs from commit {provenance.commit()[0]}"):
        publish(["21"])
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path.parent)  # outside a checkout
    with pytest.raises(SpeedkitError, match="SPEEDKIT_COMMIT"):
        publish(["21"])
    monkeypatch.setenv("SPEEDKIT_COMMIT", "abc1234")
    write_record(folder, HERE, "21_tiny", commit="abc1234")
    assert publish(["21"], budget_s=1e-9) == {"21_tiny": "current"}


def test_import_takes_outputs_and_records_and_refuses_what_does_not_fit(folder, tmp_path):
    away = tmp_path / "away"
    record = record_of(read_notebook(executed(away / "21_tiny.ipynb")))
    executed(away / "22_bad.ipynb")
    edit(folder / "22_bad.ipynb", "total = 'of other code than there'")
    for place in (away, folder):
        whole(place / "23_idle.ipynb")
    for name, changes in {"21_tiny": {}, "21_tiny-old": {"commit": "0123456"}, "33_other": {}}.items():
        write_record(away, HERE, name, **(record | changes))
    outcomes = {Path(path).name: outcome for path, outcome in import_published(away).items()}
    assert {name for name, outcome in outcomes.items() if outcome == "published"} == {"21_tiny.json", "21_tiny.ipynb"}
    for name in ("21_tiny-old.json", "33_other.json", "22_bad.ipynb"):
        assert outcomes[name].startswith("failed: ") and "another version" in outcomes[name]
    assert "record is missing" in outcomes["23_idle.ipynb"]
    assert contract_problems(folder / "21_tiny.ipynb") == [] != contract_problems(folder / "23_idle.ipynb")
    assert [path.name for path in (folder / "records" / HERE).iterdir()] == ["21_tiny.json"]
    with pytest.raises(UsageError, match="runs holds no notebooks or records"):
        import_published("runs")


SCRIPT = "<script>alert(1)</script>"
HOSTILE = [  # the data of an output, and what is left of it
    ({"text/html": f"<table><tr><th>a_b</th></tr><tr><td>1 | 2{SCRIPT}</td></tr></table>"}, {"text/markdown"}),
    ({"text/html": SCRIPT, "text/plain": SCRIPT}, {"text/plain"}),
    ({"text/markdown": f"[a](javascript:alert(1)) <javascript:alert(1)> {SCRIPT}"}, {"text/markdown"}),
    ({"text/markdown": "[a]\n\n[a]: javascript:alert(1)\n\n$\\href{javascript:alert(1)}{a}$"}, {"text/markdown"}),
    ({"text/markdown": "&#36;&#92;href{javascript:alert(1)}{a}&#36;"}, {"text/markdown"}),
    ({"image/png": "aGk=\n", "application/javascript": "alert(1)"}, {"image/png"}),
    ({"image/png": f'">{SCRIPT}', "image/svg+xml": f"<svg>{SCRIPT}</svg>", "text/latex": "$x$"}, set()),
]


def test_nothing_in_an_imported_notebook_acts_and_its_tables_are_kept(folder, tmp_path):
    path = executed(tmp_path / "away" / "21_tiny.ipynb")
    notebook = read_notebook(path)
    outputs = [new_output("display_data", data=data, metadata={"x": SCRIPT}) for data, _ in HOSTILE]
    code_cells(notebook)[0].outputs = [new_output("stream", text=SCRIPT), *outputs]
    nbformat.write(notebook, path)
    assert import_published(path.parent) == {"21_tiny.ipynb": "published"}
    [stream, *kept] = code_cells(read_notebook(folder / "21_tiny.ipynb"))[0].outputs
    assert stream.text == SCRIPT and [{*output.data} for output in kept] == [kinds for _, kinds in HOSTILE if kinds]
    assert not any(output.metadata for output in kept)
    assert "| a_b |\n| --- |\n| 1 / 2" in kept[0].data["text/markdown"]
    page, _ = HTMLExporter().from_filename(folder / "21_tiny.ipynb")
    assert "alert(1)" in page and SCRIPT not in page and "\\href" not in page
    assert not re.search(r'(href|src)="javascript', page)


DEEP = "[" * 100_000
INVALID = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}
INVALID["cells"] = [new_code_cell(id="a") | {"source": 3}]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("records/a/21_tiny.json", DEEP, "is not valid"),
        ("records/a/21_tiny.json", {"parameters": {"x": json.loads("[" * 300 + "]" * 300)}}, "recursion limit"),
        ("records/a/21_tiny.json", {"commit": "--output=made"}, "commit"),
        ("records/a/21_tiny.json", {"hardware": {"gpu": [SCRIPT], "cores": 1}}, "hardware"),
        ("records/a/21_tiny.json", {"versions": {}}, "versions"),
        ("21_tiny.ipynb", DEEP, "not a Jupyter notebook"),
        ("21_tiny.ipynb", json.dumps(INVALID), "not a valid notebook"),
        ("21_tiny.ipynb", "other code", "its code is not that of 21_tiny.ipynb"),
    ],
)
def test_what_is_damaged_or_nested_is_refused_in_one_sentence(folder, tmp_path, name, text, says):
    path = tmp_path / "away" / name
    path.parent.mkdir(parents=True)
    if isinstance(text, dict):
        write_json(path, a_record("21_tiny") | text)
    elif text == "other code":
        edit(executed(path), "import os")
    else:
        path.write_text(text)
    before = (folder / "21_tiny.ipynb").read_bytes()
    [outcome] = import_published(tmp_path / "away").values()
    assert outcome.startswith("failed: ") and says in outcome and "\n" not in outcome
    assert (folder / "21_tiny.ipynb").read_bytes() == before and not (folder / "records").exists()
    assert not list(tmp_path.rglob("made"))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [("", 2), ("--debug", 1)])
def test_the_command_hands_on_words_exit_code_and_sentence(words, code, tmp_path):
    done = python("-m", "speedkit", "publish", *words.split(), folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert (done.stderr.count("\n") == 1 and "--all or --import DIR" in done.stderr) == (code == 2)
    assert ("Traceback" in done.stderr) == (words == "--debug")


README = "# x\n<!-- generated:picture --><!-- /generated:picture -->\nbetween\n"
for block in ("tunings", "notebooks", "peers"):
    README += f"<!-- generated:{block} -->\nold\n<!-- /generated:{block} -->\n"
README += "after\n"


@pytest.fixture
def readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README)
    return path


def test_the_readme_and_its_figure_say_of_which_code_each_record_is(folder, tmp_path, readme):
    empty = readme_text(readme)
    assert "No tuning" in empty and "Nothing is measured beside its peers" in empty
    whole(folder / "90_tune.ipynb")
    commit(tmp_path)
    checks = [{"check": "why", "passed": passed} for passed in (True, False)]
    write_record(folder, HERE, "21_tiny", checks=checks, seconds=130.0)
    tuning = {
        "speedup": {"ratio": 4.125, "low": 4.0, "high": 4.25, "decision": "faster"},
        "speedup_careful": {"ratio": 2.5, "low": 2.0, "high": 3.0, "decision": "faster"},
        "quality": {"decision": "not decided"},
        "optimizations": [],
        "step_s": {"baseline": 0.4, "careful": 0.25, "final": 0.1},
        "workload": {"name": "image", "train": 8, "test": 4},
        "recipe": {"steps": 10, "epochs": None},
        "payback": {"prepare_s": {"cache": 1.0}},
    }
    write_record(folder, HERE, "90_tune-image", **tuning)
    write_record(folder, "there", "90_tune", **tuning, commit="0123456", hardware={"gpu": "Gone", "cores": 1})
    peer = {"name": "loop", "a": "a bare loop", "b": "speedkit", "ratio": 1.01, "low": 0.99, "high": 1.02}
    write_json(folder / "records" / "peers.json", {"commit": "abc1234", "machine": "A CPU", "measurements": [peer]})
    update_readme(readme)
    text = readme.read_text()
    lines = text.splitlines()
    first, second = (line for line in lines if line.startswith("| [2"))
    assert "| [21 Tiny](notebooks/21_tiny.ipynb) | A sum does not depend on the order." in first
    assert "measured" in first and "measured" not in second and "old" not in lines
    assert text.startswith("# x\n") and text.endswith("after\n") and "between" in lines
    today, before = (
        line
        for line in lines
        if "| image | 2.00 s instead of 4.00 s, 10 steps | 2.50× (2.00 to 3.00) | the careful plan | not decided |"
        in line
    )
    assert today.endswith(", measured |") and "| Gone |" in before and before.endswith(", out of date |")
    assert "0123456" in before and "4.12" not in text
    assert "| time of a bare loop over that of | speedkit |\n" in text and "| loop | 1 (0.99 to 1) |" in text
    assert "abc1234" in text
    assert "| 1 of 2 | measured |" in (folder / "records" / "README.md").read_text()

    drawn = (folder / "records" / "optimizations.svg").read_bytes()
    update_readme(readme)
    assert b"<svg" in drawn == (folder / "records" / "optimizations.svg").read_bytes() and readme.read_text() == text
    edit(folder / "21_tiny.ipynb", "total = 7")
    assert "| measured |" not in readme_text(readme).partition("90_tune")[0]


def test_what_a_record_names_is_one_cell_of_the_readme_and_acts_nowhere(folder, readme):
    name = f"A | {SCRIPT} [b](javascript:alert(1))\n\n# https://c.example $\\href{{d}}{{e}}$"
    versions = a_record("21_tiny")["versions"] | {"torch": name}
    write_record(
        folder, HERE, f"21_tiny-{SCRIPT.replace('/', '')}", hardware={"gpu": name, "cores": 1}, versions=versions
    )
    update_readme(readme)
    for file in (readme, folder / "records" / "README.md"):
        page = markdown2html(file.read_text())
        assert SCRIPT not in page and "alert(1)" in page and page.count("<h1") == 1 and "\\href" not in page
        assert not re.search(r'href="\w+:', page)


def test_a_badge_and_an_installing_cell_leave_a_notebook_in_order(tmp_path):
    [source] = find_notebooks(["25"])
    again = tmp_path / source.name
    again.write_text(with_badge(source, "somebody/fork"))
    again.write_text(with_badge(again, "us/speedkit"))
    notebook = read_notebook(again)
    assert contract_problems(again) == contract_problems(source)
    assert provenance.code_of(notebook) == provenance.code_of(read_notebook(source))
    assert notebook.cells[0].source.endswith(f"github/us/speedkit/blob/main/notebooks/{source.name})")
    assert "fork" not in again.read_text()
    install = code_cells(notebook)[1].source
    exec(compile(TransformerManager().transform_cell(install), "install", "exec"), {})  # nothing is missing here
    [package] = re.findall(r'install --quiet "(.*)"', install)
    assert Requirement(package).extras < {*PROJECT["optional-dependencies"]}

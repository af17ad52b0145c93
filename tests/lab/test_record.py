"""Records: hashes that change when code does and only then, and whole records or none."""

import json
from pathlib import Path

import check_notebooks
import pytest
from nbformat.v4 import new_code_cell, new_output

from speedkit.errors import SpeedkitError, UsageError
from speedkit.fallbacks import resolve
from speedkit.files import write_json
from speedkit.lab import provenance
from speedkit.lab.record import read_notebook, start
from speedkit.lab.records import load_record
from speedkit.machine import this_machine
from speedkit.plan import Plan

MEASURED = {"name": "bf16", "a": "fp32", "b": "bf16", "seconds_a": [2.0, 2.1], "seconds_b": [1.0, 1.0]}
MEASURED |= {"ratio": 2.05, "low": 1.9, "high": 2.2, "decision": "faster"}


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A folder with one small notebook, and a folder for the run's files."""
    folder = tmp_path / "notebooks"
    check_notebooks.whole(folder / "21_small.ipynb")
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(folder))
    monkeypatch.setenv("SPEEDKIT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("SPEEDKIT_SCALE", raising=False)
    return folder


# ---- hashes ----


INJECTED = new_code_cell('profile = "full"', metadata={"tags": ["injected-parameters"]})
UNCHANGED = {
    "a comment": lambda cells: cells[4].update(source="# At last:\n\n" + cells[4].source),
    "an output": lambda cells: cells[4].update(outputs=[new_output("stream", text="x")], execution_count=9),
    "injected parameters": lambda cells: cells.insert(3, INJECTED),
}
CHANGED = {
    "a call": lambda cells: cells[4].update(source=cells[4].source + "; 1"),
    "two cells joined": lambda cells: cells[3].update(source=cells[3].source + "\n" + cells.pop(4).source),
}


@pytest.mark.parametrize("what", [*UNCHANGED, *CHANGED])
def test_hash_of_a_notebook_changes_with_its_code_alone(what, notebooks):
    notebook = read_notebook(notebooks / "21_small.ipynb")
    before = provenance.code_sha256(notebook)
    (UNCHANGED | CHANGED)[what](notebook.cells)
    assert (provenance.code_sha256(notebook) == before) == (what in UNCHANGED)


@pytest.mark.parametrize("modules", ["package", "package.technique"])
def test_hash_of_a_module_changes_with_its_code_and_not_with_its_comments(modules, tmp_path, monkeypatch, notebooks):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "package").mkdir()
    hashes = []
    for body in ("    return x\n", "    # New.\n\n    return x\n", "    return 2 * x\n"):
        (tmp_path / "package" / "technique.py").write_text("def apply(x):\n" + body)
        hashes.append(provenance.code_sha256(notebooks / "21_small.ipynb", [modules]))
    assert hashes[0] == hashes[1] != hashes[2]


# ---- runs ----


def test_scale_auto_follows_the_device_and_the_environment_overrides(notebooks, monkeypatch):
    expected = "full" if this_machine().device.type == "cuda" else "cpu"
    assert start("21_small").profile == start("21_small", scale="auto").profile == expected
    monkeypatch.setenv("SPEEDKIT_SCALE", "smoke")
    assert start("21_small", scale="gpu").pick(smoke=2, cpu=10, gpu=100) == 2
    monkeypatch.setenv("SPEEDKIT_SCALE", "quick")
    with pytest.raises(UsageError, match='no scale "quick"'):
        start("21_small")


def test_record_goes_round_whole_and_running_a_cell_again_replaces_what_it_recorded(notebooks, tmp_path, capsys):
    run = start("21_small", modules=["speedkit.errors"], scale="smoke", data_dir=str(notebooks), device="cpu")
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "torch" in line
    text = line + json.dumps(run.record)
    assert str(notebooks) not in text and str(Path.home()) + "/" not in text, "where something lies here"
    effective = resolve(Plan(precision="tf32"), run.hardware)
    for ratio, agrees in ((2.0, False), (2.05, True)):
        run.check("losses agree", agrees)
        run.measure({**MEASURED, "ratio": ratio})
        run.verdict("C01", "smaller", f"ratio {ratio}", value=-12.0)
        run.plan("tf32", effective)
        run.table("workers", [{"workers": 0, "step_s": 0.5}, {"workers": 2, "step_s": float("nan")}])
    run.save()
    record = load_record(tmp_path / "run" / "record.json")
    assert record["parameters"] == {"scale": "smoke", "data_dir": "notebooks", "device": "cpu"}
    assert record["code_sha256"] == provenance.code_sha256(notebooks / "21_small.ipynb", record["modules"])
    assert record["measurements"] == [MEASURED]
    assert record["tables"]["workers"] == [{"workers": 0, "step_s": 0.5}, {"workers": 2, "step_s": None}]
    verdicts = [(row["check"], row["claim"], row["verdict"]) for row in record["verdicts"]]
    assert verdicts == [("losses agree", None, "passed"), ("ratio 2.05", "C01", "smaller")]
    asked, used = (record["plans"]["tf32"][side]["precision"] for side in ("asked", "effective"))
    [fallback] = record["fallbacks"]
    assert (asked, used, fallback["plan"]) == ("tf32", "default", "tf32") and fallback["why"]
    assert record["hardware"]["cpu"] == run.hardware.cpu

    run.check("losses agree", False)
    assert "FAIL losses agree" in capsys.readouterr().out
    with pytest.raises(SpeedkitError, match="losses agree"):
        run.save()


def test_recorded_gives_other_machines_records_of_this_notebook(notebooks):
    run = start("21_small", scale="smoke")
    record, here = run.finished(), run.hardware.as_dict()
    for place in ("here/21_small", "gpu/21_small", "gpu/21_small-image", "gpu/21_smaller"):
        hardware = here | ({"gpu": "A GPU"} if place.startswith("gpu") else {})
        path = notebooks / "records" / f"{place}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record | {"notebook": path.stem, "hardware": hardware})
    assert [other["notebook"] for other in run.recorded()] == ["21_small", "21_small-image"]


# ---- validation ----

DAMAGE = {
    "'hardware' is a required property": lambda record: record.pop("hardware"),
    r"seconds_b\[1\]: -1.0 is less than": lambda record: record["measurements"][0].update(seconds_b=[1.0, -1.0]),
    r"verdicts\[0\].verdict: 'nice' is not": lambda record: record["verdicts"][0].update(verdict="nice"),
}


@pytest.mark.parametrize("sentence", DAMAGE)
def test_every_damage_to_a_record_is_named(sentence, notebooks, tmp_path):
    run = start("21_small", scale="smoke")
    run.measure(MEASURED)
    run.check("losses agree", True)
    DAMAGE[sentence](record := run.finished())
    (tmp_path / "damaged.json").write_text(json.dumps(record))
    with pytest.raises(SpeedkitError, match=sentence):
        load_record(tmp_path / "damaged.json")

"""Records: whole or refused, of one machine and one commit, and current while the code is that of the commit."""

import json
from pathlib import Path

import nbformat
import pytest
import small_notebooks
from nbformat.v4 import new_code_cell, new_output

from speedkit.errors import SpeedkitError, UsageError
from speedkit.fallbacks import resolve
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
    small_notebooks.whole(folder / "21_small.ipynb")
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(folder))
    monkeypatch.setenv("SPEEDKIT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("SPEEDKIT_SCALE", raising=False)
    return folder


# ---- the commit ----


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout, a notebook in it, and its record."""
    root = tmp_path_factory.mktemp("checkout")
    with pytest.MonkeyPatch.context() as patch:
        notebook = small_notebooks.whole(small_notebooks.make_checkout(root, patch) / "21_small.ipynb")
        small_notebooks.commit(root)
        yield root, notebook, small_notebooks.a_record("21_small")


@pytest.fixture
def is_current(checkout):
    """Whether the record is current; what a test changes is put back."""
    root, notebook, record = checkout
    assert record["dirty"] is False and provenance.is_current(record, notebook)
    provenance.unchanged_since.cache_clear()
    yield lambda: provenance.is_current(record, notebook)
    small_notebooks.git(root, "checkout", ".")
    provenance.unchanged_since.cache_clear()


@pytest.mark.parametrize(
    ("name", "decides"),
    [
        ("__main__.py", False),
        ("cli/training.py", False),
        ("lab/figures.py", False),
        ("measure/words.py", False),
        ("lab/script/tune.py", False),
        ("measure/stats.py", True),
        ("plan.py", True),
        ("train/loop.py", True),
        ("lab/workloads/audio.py", True),
    ],
)
def test_a_record_is_out_of_date_when_code_changes_that_decides_a_figure(name, decides, checkout, is_current):
    with (checkout[0] / "speedkit" / name).open("a") as file:
        file.write("\nanother = 1\n")
    assert is_current() is not decides


def test_a_record_is_out_of_date_when_its_notebook_s_code_changes(checkout, is_current):
    path = checkout[1]
    notebook = read_notebook(path)
    notebook.cells[4].outputs = [new_output("stream", text="x")]
    notebook.cells[1].source = "## Predict first\n\nWhy?"
    notebook.cells.insert(3, new_code_cell('scale = "gpu"', metadata={"tags": ["injected-parameters"]}))
    nbformat.write(notebook, path)
    assert is_current()
    small_notebooks.edit(path, "total = 2 + 1")
    assert not is_current()
    path.unlink()
    assert not is_current()


def test_a_record_of_no_commit_of_an_unknown_one_or_of_a_later_notebook_is_out_of_date(checkout):
    root, notebook, record = checkout
    later = small_notebooks.whole(root / "notebooks" / "22_later.ipynb")
    assert not provenance.is_current(record, later)
    for unknown in (None, "0123456", "no such word"):
        assert not provenance.is_current(record | {"commit": unknown}, notebook)


# ---- runs ----


def test_scale_auto_follows_the_device_and_the_environment_overrides(notebooks, monkeypatch):
    expected = "gpu" if this_machine().device.type == "cuda" else "cpu"
    assert start("21_small").scale == start("21_small", scale="auto").scale == expected
    monkeypatch.setenv("SPEEDKIT_SCALE", "smoke")
    assert start("21_small", scale="gpu").scale == "smoke"
    monkeypatch.setenv("SPEEDKIT_SCALE", "quick")
    with pytest.raises(UsageError, match='no scale "quick"'):
        start("21_small")


def test_sizes_are_those_of_the_scale_and_a_gpu_takes_from_the_cpu_what_it_does_not_name(notebooks):
    table = {"smoke": {"pairs": 6, "clips": 60}, "cpu": {"pairs": 80, "clips": 240}}
    expected = {"smoke": (6, 60), "cpu": (80, 240), "gpu": (80, 2400)}
    for scale, values in expected.items():
        size = start("21_small", scale=scale).sizes(**table, gpu={"clips": 2400})
        assert (size.pairs, size.clips) == values
    assert vars(start("21_small", scale="gpu").sizes(**table)) == table["cpu"]


def test_record_goes_round_whole_and_running_a_cell_again_replaces_what_it_recorded(notebooks, tmp_path, capsys):
    run = start("21_small", scale="smoke", data_dir=str(notebooks), device="cpu")
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "torch" in line
    text = line + json.dumps(run.record)
    assert str(notebooks) not in text and str(Path.home()) + "/" not in text, "where something lies here"
    effective = resolve(Plan(precision="tf32"), run.hardware)
    for ratio, agrees in ((2.0, False), (2.05, True)):
        run.check("losses agree", agrees)
        run.measure({**MEASURED, "ratio": ratio})
        run.plan("tf32", effective)
        run.table("workers", [{"workers": 0, "step_s": 0.5}, {"workers": 2, "step_s": float("nan")}])
    run.save()
    record = load_record(tmp_path / "run" / "record.json")
    assert record["parameters"] == {"scale": "smoke", "data_dir": "notebooks", "device": "cpu"}
    assert record["measurements"] == [MEASURED]
    assert record["tables"]["workers"] == [{"workers": 0, "step_s": 0.5}, {"workers": 2, "step_s": None}]
    assert record["checks"] == [{"check": "losses agree", "passed": True}]
    asked, used = (record["plans"]["tf32"][side]["precision"] for side in ("asked", "effective"))
    [fallback] = record["fallbacks"]
    assert (asked, used, fallback["plan"]) == ("tf32", "default", "tf32") and fallback["why"]
    assert record["hardware"]["cpu"] == run.hardware.cpu

    run.check("losses agree", False)
    assert "FAIL losses agree" in capsys.readouterr().out
    with pytest.raises(SpeedkitError, match="losses agree"):
        run.save()


def test_damage_to_a_record_is_named_by_file_and_field(notebooks, tmp_path):
    record = start("21_small", scale="smoke").finished()
    record["measurements"] = [MEASURED | {"seconds_b": [1.0, -1.0]}]
    (tmp_path / "damaged.json").write_text(json.dumps(record))
    with pytest.raises(SpeedkitError, match=r"damaged.json.*measurements.0.seconds_b.1: Input should be greater"):
        load_record(tmp_path / "damaged.json")


def test_what_a_file_is_called_is_shown_and_not_run(monkeypatch):
    run, shown = start("90_tune"), []
    table = run.table("files", [{"path": "<script>alert(1)</script>.wav", "seconds": 1.5, "why": "2 < 3"}])
    page = table.style.format({"seconds": "{:.1f}"}).to_html()
    assert "&lt;script>" in page and "<script" not in page and "2 < 3" in page
    assert run.record["tables"]["files"][0]["path"] == "<script>alert(1)</script>.wav"
    monkeypatch.setattr("IPython.display.display", lambda markdown: shown.append(markdown.data))
    run.tell("**two** files, <img src=x onerror=alert(1)> among them")
    assert shown == ["**two** files, &lt;img src=x onerror=alert(1)> among them"]

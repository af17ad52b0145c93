"""Records: hashes that change when code does and only then, whole records or none, and the rule on claims."""

import dataclasses
import json
import math
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.measure import provenance
from speedkit.measure.record import RECORD_MIME, answer, start
from speedkit.measure.schema import load_record, plain, validate_record
from speedkit.plan import Plan, resolve

CLAIMS = """id,technique,plan_field,metric,low,high,unit,context,guide
C01,mixed precision,precision,speedup,2.0,3.0,x,GPU,a guide
C02,mixed precision,precision,speedup,1.9,1.9,x,GPU,a guide
C05,mixed precision,precision,peak memory,-50,-40,%,GPU,a guide
C20,checkpointing,checkpointing,speedup,0.9,0.9,x,costs time,a guide
C25,several GPUs,ranks,speedup,linear,linear,x,DDP,a guide
"""
MEASURED = {
    "name": "bf16",
    "a": "fp32",
    "b": "bf16",
    "seconds_a": [2.0, 2.1],
    "seconds_b": [1.0, 1.0],
    "ratio": 2.05,
    "low": 1.9,
    "high": 2.2,
    "decision": "faster",
}


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A folder of notebooks with claims and one small notebook, and a folder for the run's files."""
    folder = tmp_path / "notebooks"
    (folder / "records").mkdir(parents=True)
    (folder / "claims.csv").write_text(CLAIMS, encoding="utf-8")
    nbformat.write(small_notebook(), folder / "21_small.ipynb")
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(folder))
    monkeypatch.setenv("SPEEDKIT_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("SPEEDKIT_PROFILE", raising=False)
    return folder


def small_notebook():
    return new_notebook(
        cells=[
            new_markdown_cell("# Small"),
            new_code_cell('profile: str = "smoke"  # smoke | cpu | full', metadata={"tags": ["parameters"]}),
            new_code_cell(
                "from speedkit.measure.record import start\n"
                'run = start("21_small", modules=["speedkit.errors"], profile=profile)'
            ),
            new_code_cell('run.check("one is one", 1 == 1)\nrun.table("sizes", [{"size_bytes": 1, "note": "é"}])'),
            new_code_cell('def end(run):\n    """Save."""\n    run.save()\n\nend(run)'),
        ]
    )


# Hashes


def test_comments_and_empty_lines_do_not_count():
    source = '# gone\r\nx = 1  # stays \n\n    # gone\n"""stays"""\n%timeit f()\n'
    assert provenance.strip_comments(source) == 'x = 1  # stays\n"""stays"""\n%timeit f()'


def edited(change):
    notebook = small_notebook()
    change(notebook.cells)
    return provenance.code_sha256(notebook, ["speedkit.errors"])


UNCHANGED = {
    "a comment": lambda cells: cells[4].update(source="# At last:\n" + cells[4].source),
    "an output": lambda cells: cells[4].update(outputs=[new_output("stream", text="x")], execution_count=9),
    "a markdown cell": lambda cells: cells.insert(1, new_markdown_cell("more words")),
    "injected parameters": lambda cells: cells.insert(
        2, new_code_cell('profile = "full"', metadata={"tags": ["injected-parameters"]})
    ),
}
CHANGED = {
    "a call": lambda cells: cells[4].update(source=cells[4].source + "; 1"),
    "the order": lambda cells: cells.reverse(),
    "two cells joined": lambda cells: cells[2].update(source=cells[2].source + "\n" + cells.pop(3).source),
}


def test_hash_of_a_notebook_changes_with_its_code_alone():
    before = edited(lambda cells: None)
    assert {what for what, change in UNCHANGED.items() if edited(change) != before} == set()
    assert {what for what, change in CHANGED.items() if edited(change) == before} == set()


def test_hash_of_a_module_changes_with_its_code_and_not_with_its_words(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "hashed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    module = package / "technique.py"
    module.write_text('def apply(x):\n    """Double x."""\n    return 2 * x\n')
    before, whole = provenance.module_sha256("hashed_package.technique"), provenance.module_sha256("hashed_package")
    notebook = provenance.code_sha256(small_notebook(), ["hashed_package.technique"])
    module.write_text('# New.\n\ndef apply(x):\n    """Double x."""\n    # Twice.\n    return 2 * x\n')
    assert provenance.module_sha256("hashed_package.technique") == before
    module.write_text('def apply(x):\n    """Double x."""\n    return 3 * x\n')
    assert provenance.module_sha256("hashed_package.technique") != before
    assert provenance.module_sha256("hashed_package") != whole
    assert provenance.code_sha256(small_notebook(), ["hashed_package.technique"]) != notebook


@pytest.mark.parametrize("name", ["speedkit.no_such_module", "no_such_package.module", "math"])
def test_hash_of_a_module_without_source_is_refused(name):
    with pytest.raises(UsageError, match=name):
        provenance.module_sha256(name)


def test_commit_sees_the_checkout_and_changes_in_the_package(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(provenance, "PACKAGE", package)
    (package / "__init__.py").write_text("")
    assert provenance.commit() is None

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    assert provenance.commit() is None  # a checkout, but not of this package
    git("add", ".")
    git("commit", "-m", "one")
    short, dirty = provenance.commit()
    assert len(short) >= 7 and not dirty
    (tmp_path / "elsewhere.txt").write_text("not the package")
    assert provenance.commit() == (short, False)
    (package / "__init__.py").write_text("changed = 1")
    assert provenance.commit() == (short, True)


# Runs


def test_profile_auto_follows_the_device_and_the_environment_overrides(notebooks, monkeypatch):
    expected = "full" if this_machine().device.type == "cuda" else "cpu"
    assert start("21_small").profile == start("21_small", profile="auto").profile == expected
    assert start("21_small", profile="smoke").profile == "smoke"
    monkeypatch.setenv("SPEEDKIT_PROFILE", "smoke")
    run = start("21_small", profile="full")
    assert run.profile == "smoke"
    assert run.pick(smoke=2, cpu=10, full=100) == 2
    monkeypatch.setenv("SPEEDKIT_PROFILE", "quick")
    with pytest.raises(UsageError, match='no profile "quick"'):
        start("21_small")


def test_start_prints_one_line_and_no_folder(notebooks, capsys):
    run = start("21_small", modules=["speedkit.errors"], data_dir=str(notebooks), device="cpu")
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "torch" in line and "profile" in line
    text = line + json.dumps(run.record)
    assert str(notebooks) not in text and str(Path.home()) + "/" not in text
    assert run.record["parameters"] == {"data_dir": "notebooks", "device": "cpu"}


def test_record_goes_round_whole(notebooks, tmp_path):
    run = start("21_small", modules=["speedkit.errors"], profile="smoke", batch_size=8)
    run.check("losses agree", True)
    run.measure(MEASURED)
    frame = run.table("workers", [{"workers": 0, "step_s": 0.5}, {"workers": 2, "step_s": math.nan}])
    run.section("rungs", [])
    run.save()
    record = load_record(tmp_path / "run" / "record.json")
    assert validate_record(record) == []
    assert record["parameters"] == {"profile": "smoke", "batch_size": 8}
    assert record["code_sha256"] == provenance.code_sha256(notebooks / "21_small.ipynb", record["modules"])
    assert record["measurements"] == [MEASURED]
    assert record["tables"]["workers"] == [{"workers": 0, "step_s": 0.5}, {"workers": 2, "step_s": None}]
    assert list(frame.columns) == ["workers", "step_s"]
    assert record["verdicts"] == [{"check": "losses agree", "claim": None, "verdict": "passed"}]
    assert record["hardware"] == plain(this_machine().as_dict())
    if run.hardware.device.type == "cpu":
        assert record["power"] is record["clocks"] is record["energy_j"] is None


def test_running_a_cell_again_replaces_what_it_recorded(notebooks):
    run = start("21_small", profile="smoke")
    for ratio, agrees in ((2.0, False), (2.1, True)):
        run.check("losses agree", agrees)
        run.measure({**MEASURED, "ratio": ratio})
        run.verdict("C01", "smaller", f"ratio {ratio}")
    assert [row["ratio"] for row in run.record["measurements"]] == [2.1]
    assert [row["verdict"] for row in run.record["verdicts"]] == ["passed", "smaller"]


def test_a_failed_check_is_printed_recorded_and_raised_by_save(notebooks, tmp_path, capsys):
    run = start("21_small", profile="smoke")
    run.check("losses agree", False)
    assert "FAIL losses agree" in capsys.readouterr().out
    with pytest.raises(SpeedkitError, match="losses agree"):
        run.save()
    assert load_record(tmp_path / "run" / "record.json")["verdicts"][0]["verdict"] == "failed"


def test_plan_records_what_was_asked_and_each_fallback(notebooks):
    run = start("21_small", profile="smoke", device="cpu")
    effective = resolve(dataclasses.replace(Plan(), precision="tf32"), run.hardware)
    run.plan("tf32", effective)
    run.plan("tf32", effective)
    recorded = run.record["plans"]["tf32"]
    assert recorded["asked"]["precision"] == "tf32"
    assert recorded["effective"]["precision"] == effective.plan.precision != "tf32"
    assert len(run.record["fallbacks"]) == len(effective.fallbacks)
    assert run.record["fallbacks"][0]["plan"] == "tf32" and run.record["fallbacks"][0]["why"]
    run.save()


def test_run_folder_is_new_and_beside_the_notebooks(notebooks, tmp_path, monkeypatch):
    monkeypatch.delenv("SPEEDKIT_RUN_DIR")
    monkeypatch.chdir(notebooks)
    folder = start("21_small", profile="smoke").folder
    assert folder.is_dir() and folder.parent == tmp_path / "runs" / "notebooks"


def test_recorded_gives_other_machines_records_of_this_notebook(notebooks):
    run = start("21_small", profile="smoke")
    run.save()
    mine = load_record(run.folder / "record.json")
    for device, name, gpu in (
        ("here", "21_small", mine["hardware"]["gpu"]),
        ("gpu", "21_small", "A GPU"),
        ("gpu", "21_small-image", "A GPU"),
        ("gpu", "21_smaller", "A GPU"),
    ):
        folder = notebooks / "records" / device
        folder.mkdir(exist_ok=True)
        record = {**mine, "notebook": name, "hardware": {**mine["hardware"], "gpu": gpu}}
        (folder / f"{name}.json").write_text(json.dumps(record))
    assert [record["notebook"] for record in run.recorded()] == ["21_small", "21_small-image"]
    (notebooks / "records" / "gpu" / "21_small.json").write_text("{")
    with pytest.raises(SpeedkitError, match=r"21_small.json cannot be read"):
        run.recorded()


def test_an_executed_notebook_carries_its_record(notebooks, tmp_path):
    executed = NotebookClient(
        small_notebook(), timeout=120, kernel_name="python3", resources={"metadata": {"path": str(notebooks)}}
    ).execute()
    (shown,) = (output["data"] for output in executed.cells[4].outputs if RECORD_MIME in output.get("data", {}))
    record = shown[RECORD_MIME]
    assert validate_record(record) == []
    assert record == load_record(tmp_path / "run" / "record.json")
    assert record["code_sha256"] == provenance.code_sha256(executed, ["speedkit.errors"])
    assert "1 tables, 1 checks" in shown["text/plain"]
    assert "PASS one is one\n" in executed.cells[3].outputs[0]["text"]
    assert str(tmp_path) not in nbformat.writes(executed)


# Validation


def whole_record(notebooks):
    run = start("21_small", profile="smoke")
    run.measure(MEASURED)
    run.check("losses agree", True)
    run.save()
    return load_record(run.folder / "record.json")


DAMAGE = {
    "missing key": (lambda r: r.pop("hardware"), "'hardware' is a required property"),
    "no seconds": (lambda r: r["measurements"][0].update(seconds_b=[1.0, -1.0]), r"seconds_b\[1\]: -1.0 is less than"),
    "lost field": (lambda r: r["measurements"][0].pop("a"), r"measurements\[0\]: 'a' is a required property"),
    "verdict": (lambda r: r["verdicts"][0].update(verdict="nice"), r"verdicts\[0\].verdict: 'nice' is not one of"),
}


def test_every_damage_to_a_record_is_named(notebooks, tmp_path):
    whole = json.dumps(whole_record(notebooks))
    for damage, sentence in DAMAGE.values():
        record = json.loads(whole)
        damage(record)
        path = tmp_path / "damaged.json"
        path.write_text(json.dumps(record))
        with pytest.raises(SpeedkitError, match=sentence):
            load_record(path)
    assert validate_record([]) == ["[] is not of type 'object'"]


def test_plain_values_of_what_notebooks_pass():
    import numpy
    import torch

    values = {
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "path": Path("/somewhere/clips"),
        "array": numpy.arange(2),
        "number": numpy.float32(0.5),
        "tensor": torch.tensor(3),
        "function": plain,
        "pair": (1, None),
    }
    assert json.loads(json.dumps(plain(values))) == {
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "path": "clips",
        "array": [0, 1],
        "number": 0.5,
        "tensor": 3,
        "function": "plain",
        "pair": [1, None],
    }


# Claims


@pytest.mark.parametrize(
    ("promise", "low", "high", "verdict"),
    [
        ((2.0, 3.0), 1.9, 2.1, "confirmed"),  # interval and promise overlap
        ((2.0, 3.0), 1.4, 1.5, "smaller"),
        ((2.0, 3.0), 0.98, 1.04, "smaller"),  # includes 1, and excludes the promise
        ((2.0, 3.0), 3.2, 3.5, "larger"),
        ((1.1, 1.3), 0.95, 1.2, "unresolved"),  # includes 1, and part of the promise
        ((2.0, 3.0), 0.7, 0.8, "contradicted"),  # slower
        ((0.81, 0.99), 0.85, 0.9, "confirmed"),  # a stated cost
        ((0.81, 0.99), 0.5, 0.6, "larger"),
        ((0.81, 0.99), 0.9, 1.05, "unresolved"),
        ((0.81, 0.99), 1.1, 1.2, "contradicted"),
    ],
)
def test_rule_on_claims(promise, low, high, verdict):
    assert answer(promise, {"low": low, "high": high}) == verdict


def test_judge_records_the_verdict_and_its_evidence(notebooks, capsys):
    run = start("21_small", profile="smoke", device="cpu")
    assert run.judge("C01", MEASURED) == "confirmed"
    assert run.judge("C02", MEASURED) == "confirmed"  # one figure, read with its tolerance
    assert run.judge("C01", MEASURED, needs_gpu=True) == "needs_gpu"
    found = {row["claim"]: (row["verdict"], row["measurement"]) for row in run.record["verdicts"]}
    assert found == {"C01": ("needs_gpu", "bf16"), "C02": ("confirmed", "bf16")}
    assert "C02 confirmed: promised 1.71 to 2.09x, measured 2.05x (1.90 to 2.20)" in capsys.readouterr().out


def test_a_verdict_has_its_figure(notebooks):
    run = start("21_small", profile="smoke")
    run.verdict("C05", "smaller", "memory fell by less", value=-12.0)
    (row,) = run.record["verdicts"]
    assert (row["claim"], row["verdict"], row["value"], row["measurement"]) == ("C05", "smaller", -12.0, None)

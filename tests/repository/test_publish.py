"""Publishing: what is written, refused, left alone and taken in; the README, drawn from records."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import batch_sizes
import check_notebooks
import nbformat
import pytest
from check_notebooks import contract_problems
from colab import with_badge
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement
from publish import code_cells, device_slug, import_published, publish, readme_text, record_of, update_readme

from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json
from speedkit.lab import provenance
from speedkit.lab.notebooks import find_notebooks
from speedkit.lab.record import read_notebook
from speedkit.machine import this_machine

HERE = device_slug(this_machine().as_dict())
COMMIT = provenance.commit


@pytest.fixture()
def folder(tmp_path, monkeypatch):
    """A folder of notebooks that nobody has run: one in order, and one that fails."""
    notebooks = tmp_path / "notebooks"
    (notebooks / "records" / HERE).mkdir(parents=True)
    check_notebooks.whole(notebooks / "21_tiny.ipynb")
    check_notebooks.whole(notebooks / "22_bad.ipynb", "raise RuntimeError('no luck')")
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(notebooks))
    monkeypatch.setattr(provenance, "commit", lambda: (None, None))  # a package that no commit holds
    monkeypatch.chdir(tmp_path)
    return notebooks


def edit(path, source):
    notebook = read_notebook(path)
    code_cells(notebook)[2].source = source
    nbformat.write(notebook, path)


def test_batch_sizes_are_those_that_steps_take_and_stand_on_the_page_of_records():
    folder = Path(batch_sizes.__file__).parent
    rows = {(row["workload"], row["size"]): row for row in read_json(folder / batch_sizes.COUNTED)}
    counted, recorded = batch_sizes.count("text", "tiny"), rows["text", "tiny"]
    for key in ("weights", "fixed_bytes", "sample_bytes"):
        assert counted[key] == pytest.approx(recorded[key], rel=0.1), "run notebooks/batch_sizes.py again"
    assert len(rows) == 12 and batch_sizes.section(folder) in (folder / "records" / "README.md").read_text()


def test_machines_have_readable_folders():
    assert device_slug({"gpu": "NVIDIA H200", "cpu": "x", "cores": 16}) == "nvidia-h200"
    assert device_slug({"cpu": "Intel(R) Xeon(R) CPU @ 2.80GHz", "cores": 2}) == "cpu-intel-xeon-2-cores"


def test_publishing_keeps_what_worked_and_goes_on_where_it_stopped(folder, monkeypatch):
    monkeypatch.setenv("SPEEDKIT_SCALE", "smoke")  # what is published is never a smoke run
    bad = (folder / "22_bad.ipynb").read_bytes()
    outcomes = publish(None)
    assert outcomes["21_tiny"] == "published" and outcomes["22_bad"].startswith("failed: 22_bad.ipynb, cell [3]: Runt")

    published, record = folder / "21_tiny.ipynb", read_json(folder / "records" / HERE / "21_tiny.json")
    assert contract_problems(published) == [] and record == record_of(read_notebook(published))
    assert record["scale"] != "smoke" and os.environ["SPEEDKIT_SCALE"] == "smoke"
    assert (folder / "22_bad.ipynb").read_bytes() == bad
    assert "no luck" in Path("runs/publish/22_bad.failed.ipynb").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["21_tiny.ipynb", "22_bad.ipynb", "records"]

    edit(published, "# Of a comment nothing depends.\ntotal = 1 + 2")
    assert publish(["21"]) == {"21_tiny": "current"}
    before = published.read_bytes()
    assert publish(["21"], workload="image") == {"21_tiny-image": "published"} and published.read_bytes() == before
    assert read_json(folder / "records" / HERE / "21_tiny-image.json")["parameters"]["workload"] == "image"
    edit(published, "total = 1 + 2 + 3")
    assert publish(["21"], budget_s=1e-9) == {"21_tiny": "left: the budget is spent"}


def test_what_took_longer_before_than_is_left_does_not_start_and_a_stopped_tuning_goes_on(folder):
    stops_once = "import os, pathlib\nbegun = pathlib.Path(os.environ['SPEEDKIT_RUN_DIR'])\n"
    stops_once += "stopped = begun.exists()\nbegun.mkdir(exist_ok=True)\nassert stopped, 'stopped'"
    path = check_notebooks.whole(folder / "90_tune.ipynb", stops_once)
    for name in ("90_tune", "21_tiny"):
        record = check_notebooks.a_record(folder / f"{name}.ipynb") | {"seconds": 1e6, "code_sha256": "0" * 64}
        write_json(folder / "records" / HERE / f"{name}.json", record)
    outcomes = publish(["90", "21"], budget_s=600.0)
    assert outcomes["90_tune"].startswith("failed: 90_tune.ipynb, cell [3]: AssertionError: stopped")
    assert outcomes["21_tiny"].startswith("left: it takes about"), "the tuning was the first, which always starts"
    assert publish(["90"], budget_s=600.0) == {"90_tune": "published"} and read_notebook(path).cells
    assert not list(Path("runs/publish").iterdir())


def test_all_begins_with_the_tuning_on_every_workload(folder):
    check_notebooks.whole(folder / "01_first.ipynb")
    check_notebooks.whole(folder / "90_tune.ipynb")
    tunings = ["90_tune", "90_tune-image", "90_tune-speech", "90_tune-text"]
    assert list(publish(None, budget_s=1e-9)) == [*tunings, "01_first", "21_tiny", "22_bad"]


def test_changes_of_the_package_since_the_commit_are_refused(folder, monkeypatch, tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], check=True, capture_output=True)

    package = tmp_path / "speedkit"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setattr(provenance, "commit", COMMIT)
    git("init")
    git("add", "speedkit")
    git("commit", "--no-verify", "-m", "first")
    short, dirty = provenance.commit()
    assert len(short) >= 7 and not dirty and publish([]) == {}
    (package / "__init__.py").write_text("changed = True\n")
    with pytest.raises(SpeedkitError, match=f"the package differs from commit {short}"):
        publish([])


def test_import_takes_outputs_and_records_and_refuses_what_does_not_fit(folder, tmp_path):
    away = tmp_path / "away"
    record = record_of(read_notebook(check_notebooks.executed(away / "21_tiny.ipynb")))
    edit(folder / "21_tiny.ipynb", "# explained better here\ntotal = 1 + 2")
    check_notebooks.executed(away / "22_bad.ipynb")  # of other code than here
    for place in (away, folder):
        check_notebooks.whole(place / "23_idle.ipynb")
    (away / "records" / HERE).mkdir(parents=True)
    for name, changes in {"21_tiny": {}, "21_tiny-old": {"code_sha256": "0" * 64}, "33_other": {}}.items():
        write_json(away / "records" / HERE / f"{name}.json", record | changes)
    (away / "records" / HERE / "21_tiny-torn.json").write_text('{"schema": 1')
    outcomes = {Path(path).name: outcome for path, outcome in import_published(away, folder).items()}
    assert {name for name, outcome in outcomes.items() if outcome == "published"} == {"21_tiny.json", "21_tiny.ipynb"}
    another = dict.fromkeys(("21_tiny-old.json", "33_other.json", "22_bad.ipynb"), "another version")
    for name, says in (another | {"21_tiny-torn.json": "is not valid", "23_idle.ipynb": "record is missing"}).items():
        assert outcomes[name].startswith("failed: ") and says in outcomes[name], outcomes[name]
    assert contract_problems(folder / "21_tiny.ipynb") == [] != contract_problems(folder / "23_idle.ipynb")
    assert "explained better here" in (folder / "21_tiny.ipynb").read_text(), "only outputs come in"
    assert [path.name for path in (folder / "records" / HERE).iterdir()] == ["21_tiny.json"]


BLOCKS = "".join(f"<!-- generated:{name} -->\nold\n<!-- /generated:{name} -->\n" for name in ("tunings", "notebooks"))
README = f"# x\n<!-- generated:picture --><!-- /generated:picture -->\nbetween\n{BLOCKS}after\n"


def test_the_readme_and_its_figure_show_what_is_recorded_and_mark_what_is_out_of_date(folder, tmp_path):
    (readme := tmp_path / "README.md").write_text(README)
    assert "No tune is published yet." in readme_text(readme)
    path = check_notebooks.executed(folder / "21_tiny.ipynb")
    record = record_of(read_notebook(path))
    verdicts = [(None, "passed"), (None, "failed"), ("C10", "needs_gpu"), ("C01", "smaller")]
    rows = [{"check": "why", "claim": claim, "verdict": verdict} for claim, verdict in verdicts]
    write_json(folder / "records" / HERE / "21_tiny.json", record | {"verdicts": rows, "seconds": 130.0})
    tune = check_notebooks.a_record(check_notebooks.whole(folder / "90_tune.ipynb")) | {
        "speedup": {"ratio": 4.125, "low": 4.0, "high": 4.25},
        "speedup_careful": None,
        "optimizations": [],
        "step_s": {"baseline": 0.4, "final": 0.1},
        "workload": {"name": "image", "train": 8, "test": 4},
    }
    write_json(folder / "records" / HERE / "90_tune-image.json", tune)
    update_readme(readme)
    text = readme.read_text()
    first, second = (line for line in text.splitlines() if line.startswith("| [2"))
    row = (
        "| [21 Tiny](notebooks/21_tiny.ipynb) | A sum does not depend on the order. It needs nothing. | 2 | measured |"
    )
    assert first == row
    assert second.endswith("|  | not yet |") and "old" not in text.splitlines()
    assert text.startswith("# x\n") and text.endswith("after\n") and "\nbetween\n" in text
    assert "| image | 4.12x (4.00 to 4.25) | not measured | measured |" in text
    [line] = [line for line in (folder / "records" / "README.md").read_text().splitlines() if "21_tiny" in line]
    assert line.endswith("| measured | 1 of 2 checks passed; C01 smaller; C10 needs a GPU |")

    drawn = (folder / "records" / "optimizations.svg").read_bytes()
    update_readme(readme)
    assert b"<svg" in drawn == (folder / "records" / "optimizations.svg").read_bytes() and readme.read_text() == text
    edit(path, "total = 7")
    assert "| 2 | out of date |" in readme_text(readme)


def test_a_badge_and_an_installing_cell_leave_a_notebook_in_order(tmp_path):
    for source in find_notebooks(["00", "25"]):
        first, again = tmp_path / source.name, tmp_path / "again" / source.name
        again.parent.mkdir(exist_ok=True)
        first.write_text(with_badge(source, "somebody/fork"))
        again.write_text(with_badge(first, "us/speedkit"))
        assert contract_problems(again) == contract_problems(source) == []
        assert provenance.code_sha256(again) == provenance.code_sha256(source)
        notebook = read_notebook(again)
        assert notebook.cells[0].source.endswith(f"github/us/speedkit/blob/main/notebooks/{source.name})")
        assert "fork" not in again.read_text()
        install = code_cells(notebook)[1].source
        exec(compile(TransformerManager().transform_cell(install), "install", "exec"), {})  # nothing is missing here
        [package] = re.findall(r'install --quiet "(.*)"', install)
        project = tomllib.loads(Path(provenance.ROOT, "pyproject.toml").read_text())["project"]
        assert Requirement(package).extras < {*project["optional-dependencies"]}

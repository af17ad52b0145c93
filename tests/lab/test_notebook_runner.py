"""Strict runs: what is refused before anything starts, what a failure leaves behind, and sweeps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import papermill
import pytest
from small_notebooks import plain, whole

from speedkit.errors import SpeedkitError
from speedkit.lab.cluster import cluster_executor
from speedkit.lab.notebooks import (
    declared_parameters,
    device_lock,
    find_notebooks,
    run_notebook,
    sweep,
    typed_parameters,
)
from speedkit.lab.record import read_notebook


def outputs(path):
    return "".join(output.get("text", "") for cell in read_notebook(path).cells for output in cell.get("outputs", []))


def test_notebooks_are_found_by_number_name_and_path(tmp_path, monkeypatch):
    first, second, mine = (plain(tmp_path / f"{name}.ipynb") for name in ("10_loader", "21_precision", "mine/notes"))
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(tmp_path))
    assert find_notebooks() == [first, second]
    assert find_notebooks(["21", "10_loader", "precision", mine]) == [second, first, second, mine]


def test_texts_of_the_command_line_take_the_declared_type(tmp_path):
    given = {"batch_size": "8", "learning_rate": "none", "sizes": "3, 4", "shuffle": "no", "scale": "cpu"}
    typed = {"batch_size": 8, "learning_rate": None, "sizes": [3, 4], "shuffle": False, "scale": "cpu"}
    path = plain(tmp_path / "n.ipynb")
    assert typed_parameters(path, given) == typed_parameters(path, typed) == typed


def test_a_run_gets_its_parameters_its_folder_and_this_interpreter(tmp_path, monkeypatch, speedkit):
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(tmp_path))
    show = "import os, sys\nprint(batch_size, sizes, learning_rate, os.getcwd(), sys.executable)"
    plain(tmp_path / "21_n.ipynb", show)
    words = ["run", "21", "-p", "batch_size", "8", "-p", "sizes", "5", "--timeout", "1m", "--out", tmp_path / "new"]
    code, printed, complaint = speedkit(*words)
    [out] = (tmp_path / "new").iterdir()
    assert outputs(out).strip() == f"8 [5] None {Path.cwd()} {sys.executable}"
    assert printed.splitlines() == [*(f"21_n: cell {number}" for number in (1, 2, 3)), str(out)]
    assert code == 0 and "WARNING" not in complaint


TYPOS = {
    "name": (["-p", "batch_sise", "8"], 'no parameter "batch_sise" (did you mean batch_size?)'),
    "guide's name": (["-p", "lr", "0.1"], 'no parameter "lr": here that is learning_rate'),
    "text": (["-p", "batch_size", "many"], "batch_size='many' is not possible: Input should be a valid integer"),
    "text of a number": (["-r", "batch_size", "8"], "batch_size='8' is not possible"),
}


def by_papermill(path, *words):
    """Run papermill's own command; the lesson's first cell is its third."""
    command = [sys.executable, "-m", "papermill", path, path.with_name("out.ipynb"), "--no-progress-bar", *words]
    environment = {**os.environ, "SPEEDKIT_RUN_DIR": str(path.with_name("record"))}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


LONG_WAY = [pytest.param(typo, marks=pytest.mark.slow) for typo in ("guide's name", "text of a number")]


@pytest.mark.slow
@pytest.mark.parametrize("typo", ["name", "text", *LONG_WAY])
def test_a_typo_through_papermill_is_an_error_in_the_first_cell(typo, tmp_path):
    words, why = TYPOS[typo]
    path = whole(tmp_path / "21_n.ipynb", body="raise ValueError('a later cell')")
    done = by_papermill(path, *words)
    assert done.returncode == 1 and why in done.stderr and "a later cell" not in done.stderr


def test_papermill_lists_every_parameter_and_passes_it_on(tmp_path):
    path = whole(tmp_path / "21_n.ipynb", body="print(learning_rate, sizes)")
    listed = papermill.inspect_notebook(path)
    declared = declared_parameters(path)
    assert listed.keys() == declared.keys() and all(
        row["inferred_type_name"] and row["help"] for row in listed.values()
    )
    done = by_papermill(path, "-p", "learning_rate", "0.5", "-y", "sizes: [3]")
    assert done.returncode == 0 and "0.5 [3]" in outputs(path.with_name("out.ipynb"))


def test_a_run_in_another_folder_finds_what_lies_there_and_nothing_beside_the_notebook(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{place}.py").write_text(f"words = '{place}'")
    show = "import importlib.util, there\nprint(there.words, importlib.util.find_spec('here'), open('there.py').read())"
    out = run_notebook(
        plain(tmp_path / "here" / "n.ipynb", show), tmp_path / "n.ipynb", folder=tmp_path / "there", progress=False
    )
    assert outputs(out) == "there None words = 'there'\n"


def test_one_notebook_runs_at_a_time_on_a_device(tmp_path):
    plain(tmp_path / "n.ipynb")
    program = "from speedkit.lab.notebooks import run_notebook; run_notebook('n.ipynb', 'out.ipynb', progress=False)"
    with device_lock():
        running = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert running.stderr.readline().startswith("waiting for another notebook to finish on ")
        assert running.poll() is None and not (tmp_path / "out.ipynb").exists()
    assert running.communicate(timeout=60) == (None, "") and running.returncode == 0
    assert (tmp_path / "out.ipynb").is_file()


SLEEPER = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\nchild.wait()"
FAILURES = {
    "error": ("def f():\n    raise ValueError('too\\nlong')\nf()", "ValueError: too"),
    "death": ("import os\nos._exit(9)", "the kernel died"),
    "time": (SLEEPER, "stopped after 4 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_a_run_that_fails_leaves_the_old_file_and_nothing_running(failure, tmp_path):
    source, says = FAILURES[failure]
    path, out = plain(tmp_path / "n.ipynb", source, "print('after')"), tmp_path / "out" / "n.ipynb"
    out.parent.mkdir()
    out.write_text("old")
    with pytest.raises(SpeedkitError, match=rf"^n\.ipynb, cell \[2\]: {says}") as error:
        run_notebook(path, out, timeout_s=4 if failure == "time" else 60, progress=False)
    failed = out.with_name("n.failed.ipynb")
    assert out.read_text() == "old" and sorted(out.parent.iterdir()) == [failed, out]
    assert str(failed) in str(error.value) and "after" not in outputs(failed)
    assert failure != "time" or not Path(f"/proc/{outputs(failed).strip()}/exe").exists()  # as of a zombie


@pytest.mark.slow
def test_cells_with_output_widgets_do_not_stand_still():
    script = Path(__file__).parents[2] / "benchmarks" / "notebook_hang.py"
    done = subprocess.run([sys.executable, script, "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "3 runs, 0 of 180 cells stood still" in done.stdout, done


BODY = "assert batch_size != 2, 'two is odd here'\nprint(batch_size, workload)"


def test_a_sweep_keeps_what_succeeds_and_says_what_failed(tmp_path, monkeypatch, speedkit):
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(plain(tmp_path / "21_n.ipynb", BODY).parent))
    out, grid = tmp_path / "out", ["--sweep", "batch_size=1,2", "--sweep", "workload=a/b"]
    code, printed, complaint = speedkit("run", "21", *grid, "--out", out)
    good, failed = (out / f"21_n-batch_size={end}.ipynb" for end in ("1-workload=a_b", "2-workload=a_b.failed"))
    assert sorted(out.iterdir()) == [good, failed] and outputs(good) == "1 a/b\n"
    assert code == 1 and "1 combinations failed" in complaint
    assert re.search(r"^1/2 .*\n2/2 .*cell \[3\]: AssertionError: two is odd here", printed)


MEASURED = """import json, os, pathlib
folder = pathlib.Path(os.environ["SPEEDKIT_RUN_DIR"])
folder.mkdir()
row = {"name": "bf16", "ratio": 1.0 + batch_size, "low": 1.0, "high": 9.0, "decision": "faster"}
(folder / "record.json").write_text(json.dumps({"measurements": [row]}))"""


def test_a_sweep_ends_with_a_table_of_what_its_comparisons_show(tmp_path, monkeypatch, speedkit):
    monkeypatch.setenv("SPEEDKIT_NOTEBOOKS", str(plain(tmp_path / "21_n.ipynb", MEASURED).parent))
    code, printed, _ = speedkit("run", "21", "--sweep", "batch_size=1,2", "--out", tmp_path / "out")
    table = (tmp_path / "out" / "21_n-sweep.csv").read_text().splitlines()
    header = "batch_size,name,ratio,low,high,decision"
    assert code == 0 and table == [header, "1,bf16,2.0,1.0,9.0,faster", "2,bf16,3.0,1.0,9.0,faster"]
    assert re.search(r"batch_size +name +ratio +low +high +decision\n +1 +bf16 +2\.000", printed)
    assert (tmp_path / "out" / "21_n-batch_size=2" / "record.json").exists()


@pytest.mark.slow
def test_a_cluster_runs_all_combinations_and_survives_what_kills_a_worker(tmp_path):
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    kills = "import os\nif batch_size == 3:\n    os.kill(os.getppid(), 9)"
    path = plain(tmp_path / "here" / "n.ipynb", BODY, kills)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),  # else it kills four workers
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        cluster_executor(cluster.scheduler_address) as executor,
    ):
        errors = sweep(path, {"batch_size": [1, 2, 3]}, tmp_path / "out", executor=executor, timeout_s=60)
    good, bad, deadly = errors
    assert errors[good] == "" and outputs(good) == "1 audio\n"
    assert "cell [3]: AssertionError: two is odd here" in errors[bad] and not bad.exists()
    assert errors[deadly].startswith("KilledWorker: ") and "\n" not in errors[deadly]

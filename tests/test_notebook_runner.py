"""Strict runs: what is refused before anything starts, what a failure leaves behind, and sweeps."""

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import NoneType

import nbformat
import psutil
import pytest
from check_notebooks import PARAMETERS, plain

from speedkit.errors import SpeedkitError, UsageError
from speedkit.notebooks import find_notebooks, run_notebook, sweep
from speedkit.parameters import parameters_of, record_of, typed_parameters

ROOT = Path(__file__).resolve().parent.parent


def outputs(path: Path) -> str:
    """Return all text that the notebook at `path` shows."""
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


# ---- names and parameters, without a kernel ----


def test_notebooks_are_found_by_number_name_and_path(tmp_path):
    first, second = (plain(tmp_path / f"{name}.ipynb") for name in ("10_dataloader", "21_mixed_precision"))
    plain(tmp_path / "21_mixed_precision.failed.ipynb")
    mine = plain(tmp_path / "mine" / "notes.ipynb")
    assert find_notebooks(None, tmp_path) == [first, second]
    assert find_notebooks(["21", "10_dataloader", "mixed_precision"], tmp_path) == [second, first]
    assert find_notebooks([str(mine)], tmp_path) == [mine]
    with pytest.raises(UsageError, match=r'"mixed_precison" \(did you mean mixed_precision\?\); there are 10_data'):
        find_notebooks(["mixed_precison"], tmp_path)
    with pytest.raises(UsageError, match='no notebook "77"'):
        find_notebooks(["77"], tmp_path)


def test_parameters_are_read_without_running(tmp_path):
    found = parameters_of(plain(tmp_path / "n.ipynb"))
    assert list(found) == [line.partition(":")[0] for line in PARAMETERS.splitlines()]
    assert found["batch_size"].default == 4 and found["batch_size"].help == "samples per step"
    assert found["learning_rate"].kinds == (float, NoneType) and found["sizes"].default == [1, 2]
    with pytest.raises(UsageError, match="is not a Jupyter notebook"):
        parameters_of(Path(__file__))


def test_texts_of_the_command_line_take_the_declared_type(tmp_path):
    given = {"batch_size": "8", "learning_rate": "1e-3", "sizes": "3, 4", "shuffle": "no", "profile": "cpu"}
    wanted = {"batch_size": 8, "learning_rate": 1e-3, "sizes": [3, 4], "shuffle": False, "profile": "cpu"}
    path = plain(tmp_path / "n.ipynb")
    assert typed_parameters(path, given) == typed_parameters(path, wanted) == wanted
    assert typed_parameters(path, {"learning_rate": "none"}) == {"learning_rate": None}
    assert typed_parameters(path, {"learning_rate": 1}) == {"learning_rate": 1.0}


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("batchsize", 8, 'no parameter "batchsize" (did you mean batch_size?)'),
        ("batch_size", "many", "batch_size='many' is not possible; it takes an integer"),
        ("batch_size", 8.5, "batch_size=8.5 is not possible"),
        ("batch_size", True, "batch_size=True is not possible"),
        ("batch_size", None, "batch_size=None is not possible"),
        ("learning_rate", "nan", "it takes a number | none"),
        ("sizes", "1,x", "sizes='x' is not possible; it takes an integer"),
        ("sizes", 3, "sizes=3 is not possible; it takes a list"),
        ("shuffle", "maybe", "shuffle='maybe' is not possible; it takes true | false"),
    ],
)
def test_what_the_notebook_does_not_declare_is_refused_before_anything_starts(name, value, says, tmp_path):
    path, out = plain(tmp_path / "21_n.ipynb", "open('started', 'w')"), tmp_path / "out" / "n.ipynb"
    for start in (lambda: run_notebook(path, out, {name: value}), lambda: sweep(path, {name: [value]}, out.parent)):
        with pytest.raises(UsageError) as error:
            start()
        assert says in str(error.value) and "21_n.ipynb" in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_notebook_is_not_run_onto_itself(tmp_path):
    path = plain(tmp_path / "n.ipynb")
    with pytest.raises(UsageError, match="onto itself"):
        run_notebook(path, path)


# ---- runs ----


def test_a_run_gets_its_parameters_its_folder_and_this_interpreter(tmp_path, capfd):
    show = "import os, sys\nprint(batch_size, profile, sizes, learning_rate, os.getcwd(), sys.executable)"
    path = plain(tmp_path / "{21}_n.ipynb", show)
    out = run_notebook(path, tmp_path / "new" / "{out}.ipynb", {"batch_size": "8", "sizes": [5]}, timeout_s=60)
    assert outputs(out).split(" ", 3)[:2] == ["8", "auto"]
    assert outputs(out).strip() == f"8 auto [5] None {tmp_path} {sys.executable}"
    assert [entry.name for entry in out.parent.iterdir()] == ["{out}.ipynb"]
    lines = capfd.readouterr()
    assert lines.out.splitlines()[-1].startswith("{21}_n: cell 3, ") and "WARNING" not in lines.err


def test_a_notebook_that_runs_a_notebook_does_not_wait_for_itself(tmp_path):
    plain(tmp_path / "inner.ipynb", "print('inner ran')")
    run_inner = "import speedkit.notebooks as nb\nprint(nb.run_notebook('inner.ipynb', 'out/inner.ipynb').name)"
    out = run_notebook(plain(tmp_path / "n.ipynb", run_inner), tmp_path / "out" / "n.ipynb", timeout_s=60)
    assert "inner.ipynb" in outputs(out) and outputs(tmp_path / "out" / "inner.ipynb") == "inner ran\n"


def test_an_output_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file cannot be written \("):
        run_notebook(plain(tmp_path / "n.ipynb"), tmp_path / "file" / "n.ipynb")


FAILURES = {
    "error": ("def f():\n    raise ValueError('too\\nlong')\nf()", 60, r"n\.ipynb, cell \[2\]: ValueError: too\. What"),
    "exit": ("import sys\nsys.exit(0)", 60, "the notebook ended with 1 cells not run"),
    "death": ("import os\nos._exit(9)", 60, r"cell \[2\]: the kernel died"),
    "time": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\nchild.wait()",
        4,
        r"cell \[2\]: stopped, the notebook's 4 s are over",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_fails_leaves_the_old_file_and_nothing_running(name, tmp_path):
    source, timeout_s, says = FAILURES[name]
    path, out = plain(tmp_path / "n.ipynb", source, "print('after')"), tmp_path / "out" / "n.ipynb"
    out.parent.mkdir()
    out.write_text("old")
    with pytest.raises(SpeedkitError, match=says) as error:
        run_notebook(path, out, timeout_s=timeout_s, progress=False)
    assert not isinstance(error.value, UsageError)
    assert out.read_text() == "old"
    failed = out.with_name("n.failed.ipynb")
    assert str(failed) in str(error.value) and sorted(out.parent.iterdir()) == [failed, out]
    assert "after" not in outputs(failed)
    if name == "time":
        pid = int(outputs(failed).split()[0])
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


RUNS_UNTIL_STOPPED = """
import signal
from speedkit.notebooks import run_notebook
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's tests start with it ignored
if __name__ == "__main__":
    run_notebook("n.ipynb", "out/n.ipynb", progress=False)
"""


@pytest.mark.slow
def test_ctrl_c_stops_the_kernel_and_leaves_what_ran(tmp_path):
    plain(
        tmp_path / "n.ipynb",
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        "with open('pipe', 'w') as pipe:\n    print(os.getpid(), child.pid, file=pipe)\nchild.wait()",
    )
    os.mkfifo(tmp_path / "pipe")
    running = subprocess.Popen([sys.executable, "-c", RUNS_UNTIL_STOPPED], cwd=tmp_path, stderr=subprocess.PIPE)
    with (tmp_path / "pipe").open() as pipe:  # opens when the kernel has reached its endless cell
        kernel, child = map(int, pipe.read().split())
    running.send_signal(signal.SIGINT)
    _, complaint = running.communicate(timeout=60)
    assert b"KeyboardInterrupt" in complaint and running.returncode != 0
    for pid in (kernel, child):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    (failed,) = (tmp_path / "out").iterdir()
    assert failed.name == "n.failed.ipynb" and nbformat.read(failed, as_version=4).cells


# ---- sweeps ----

BODY = "assert batch_size != 2, 'two is odd here'\nprint(batch_size, profile)"


def test_a_sweep_keeps_what_succeeds_and_says_what_failed(tmp_path):
    path = plain(tmp_path / "21_n.ipynb", BODY)
    grid = {"batch_size": ["1", "2"], "profile": ["cpu"]}
    done = sweep(path, grid, tmp_path / "out", timeout_s=60)
    names = ["21_n-batch_size=1-profile=cpu.ipynb", "21_n-batch_size=2-profile=cpu.ipynb"]
    assert [path.name for path in done] == names
    (good, nothing), (bad, why) = done.items()
    assert nothing == "" and "AssertionError: two is odd here" in why
    assert outputs(good) == "1 cpu\n" and not bad.exists()


def test_names_of_a_sweep_stay_apart_and_are_files(tmp_path):
    path = plain(tmp_path / "n.ipynb", "print(workload)")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = sweep(path, {"workload": ["a/b", "a b"]}, tmp_path / "out", executor=pool, timeout_s=60)
    assert sorted(done) == sorted((tmp_path / "out").iterdir()) and len(done) == 2
    assert [outputs(path) for path in done] == ["a/b\n", "a b\n"]


# ---- the notebooks of this repository ----

REAL = {"01_measure": {"profile": "smoke"}, "21_mixed_precision": {"profile": "smoke"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_notebook_runs_with_other_parameters(name, tmp_path):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    others = {
        key: item.default + 1
        for key, item in parameters_of(path).items()
        if int in item.kinds and isinstance(item.default, int)
    }
    given = {**others, **REAL[name]}
    record = record_of(nbformat.read(run_notebook(path, tmp_path / "out.ipynb", given, timeout_s=1200), as_version=4))
    assert record is not None and record["profile"] == "smoke"
    assert {key: record["parameters"][key] for key in given} == given

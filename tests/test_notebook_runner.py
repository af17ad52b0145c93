"""Strict runs: what is refused before anything starts, what a failure leaves behind, and sweeps."""

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from check_notebooks import plain

from speedkit import notebooks
from speedkit.errors import SpeedkitError, UsageError
from speedkit.notebooks import cluster_executor, device_lock, find_notebooks, run_notebook, sweep, typed_parameters


def outputs(path: Path) -> str:
    """Return all text that the notebook at `path` shows."""
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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


def test_texts_of_the_command_line_take_the_declared_type(tmp_path):
    given = {"batch_size": "8", "learning_rate": "1e-3", "sizes": "3, 4", "shuffle": "no", "profile": "cpu"}
    wanted = {"batch_size": 8, "learning_rate": 1e-3, "sizes": [3, 4], "shuffle": False, "profile": "cpu"}
    path = plain(tmp_path / "n.ipynb")
    assert typed_parameters(path, given) == typed_parameters(path, wanted) == wanted
    assert typed_parameters(path, {"learning_rate": "none"}) == {"learning_rate": None}
    assert repr(typed_parameters(path, {"learning_rate": 1})["learning_rate"]) == "1.0"


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("batchsize", 8, 'no parameter "batchsize" (did you mean batch_size?)'),
        ("batch_size", "many", "batch_size='many' is not possible: Input should be a valid integer"),
        ("batch_size", 8.5, "batch_size=8.5 is not possible"),
        ("batch_size", True, "batch_size=True is not possible"),
        ("batch_size", None, "batch_size=None is not possible"),
        ("learning_rate", "nan", "finite number"),
        ("sizes", "1,x", "sizes='1,x' is not possible: Input should be a valid integer"),
        ("sizes", 3, "sizes=3 is not possible: Input should be a valid list"),
        ("shuffle", "maybe", "shuffle='maybe' is not possible: Input should be a valid boolean"),
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
    path = plain(tmp_path / "21_n.ipynb", show)
    out = run_notebook(path, tmp_path / "new" / "n.ipynb", {"batch_size": "8", "sizes": [5]}, timeout_s=60)
    assert outputs(out).strip() == f"8 auto [5] None {tmp_path} {sys.executable}"
    assert [entry.name for entry in out.parent.iterdir()] == ["n.ipynb"]
    lines = capfd.readouterr()
    assert lines.out.splitlines() == [f"21_n: cell {number}" for number in (1, 2, 3)] and "WARNING" not in lines.err


@pytest.mark.slow
def test_a_notebook_that_runs_a_notebook_does_not_wait_for_itself(tmp_path):
    plain(tmp_path / "inner.ipynb", "print('inner ran')")
    run_inner = "from speedkit.notebooks import run_notebook\nrun_notebook('inner.ipynb', 'out/inner.ipynb');"
    run_notebook(plain(tmp_path / "n.ipynb", run_inner), tmp_path / "out" / "n.ipynb", timeout_s=120)
    assert outputs(tmp_path / "out" / "inner.ipynb") == "inner ran\n"


def test_one_notebook_runs_at_a_time_on_a_device(tmp_path):
    plain(tmp_path / "n.ipynb")
    program = "from speedkit.notebooks import run_notebook; run_notebook('n.ipynb', 'out.ipynb', progress=False)"
    with device_lock():
        running = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert running.stderr.readline().startswith("waiting for another notebook to finish on ")
        assert running.poll() is None and not (tmp_path / "out.ipynb").exists()
    assert running.communicate(timeout=60) == (None, "") and running.returncode == 0
    assert (tmp_path / "out.ipynb").is_file()


FAILURES = {
    "error": ("def f():\n    raise ValueError('too\\nlong')\nf()", 60, r"n\.ipynb, cell \[2\]: ValueError: too\. What"),
    "exit": ("import sys\nsys.exit(0)", 60, r"cell \[2\]: SystemExit\. What"),
    "death": ("import os\nos._exit(9)", 60, r"cell \[2\]: the kernel died"),
    "time": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\nchild.wait()",
        4,
        r"cell \[2\]: stopped after 4 s",
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
    assert name != "time" or gone(int(outputs(failed).split()[0]))


RUNS_UNTIL_STOPPED = """
import signal
from speedkit.notebooks import run_notebook
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's tests start with it ignored
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
        pids = list(map(int, pipe.read().split()))
    running.send_signal(signal.SIGINT)
    _, complaint = running.communicate(timeout=60)
    assert b"KeyboardInterrupt" in complaint and all(map(gone, pids))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["n.failed.ipynb"]


@pytest.mark.slow
def test_cells_with_output_widgets_do_not_stand_still():
    script = Path(__file__).parent.parent / "benchmarks" / "notebook_hang.py"
    done = subprocess.run([sys.executable, script, "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "speedkit: 3 runs, 0 of 180 cells stood still" in done.stdout, done


# ---- sweeps ----

BODY = "assert batch_size != 2, 'two is odd here'\nprint(batch_size, workload)"


def test_a_sweep_keeps_what_succeeds_and_says_what_failed(tmp_path, capsys):
    path = plain(tmp_path / "21_n.ipynb", BODY)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = sweep(path, {"batch_size": ["1", "2"], "workload": ["a/b"]}, tmp_path / "out", executor=pool)
    good, bad = (tmp_path / "out" / f"21_n-batch_size={size}-workload=a%2Fb.ipynb" for size in (1, 2))
    failed = bad.with_name(f"{bad.stem}.failed.ipynb")
    why = "21_n.ipynb, cell [3]: AssertionError: two is odd here"
    assert list(done.items()) == [(good, ""), (bad, why)]
    assert outputs(good) == "1 a/b\n" and sorted((tmp_path / "out").iterdir()) == sorted([good, failed])
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == ["1/2", "2/2"]


def test_a_process_that_dies_fails_its_combinations_in_a_sentence(tmp_path):
    path = plain(tmp_path / "n.ipynb", "import os\nos.kill(os.getppid(), 9)")
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        done = sweep(path, {"batch_size": [1]}, tmp_path / "out", executor=pool)
    assert next(iter(done.values())).startswith("BrokenProcessPool: ")


# ---- a cluster ----


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
        done = sweep(path, {"batch_size": [1, 2, 3]}, tmp_path / "out", executor=executor, timeout_s=60)
    good, bad, deadly = done
    assert done[good] == "" and outputs(good) == "1 audio\n"
    assert "cell [3]: AssertionError: two is odd here" in done[bad] and not bad.exists()
    assert done[deadly].startswith("KilledWorker: ") and "\n" not in done[deadly]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "here"])
def test_an_address_where_no_scheduler_is_is_said(address, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(notebooks, "CONNECT_S", 0.5)
    with pytest.raises(UsageError, match=f"answers at {address} within 0.5 s: start"), cluster_executor(address):
        pass


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install -e \.\[cluster\]"), cluster_executor("tcp://127.0.0.1:1"):
        pass

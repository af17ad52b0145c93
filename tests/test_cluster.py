"""Sweeps on a real Dask cluster of two worker processes, and what is lost, wrong or missing there."""

import collections
import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import psutil
import pytest
from check_notebooks import plain

from speedkit import cluster
from speedkit.errors import UsageError
from speedkit.notebooks import sweep

pytest.importorskip("distributed")
DASK = {"scheduler": ("--host", "127.0.0.1", "--port", "0"), "worker": ("--nthreads", "1", "--no-nanny")}


@contextlib.contextmanager
def running(folder: Path, workers: int, *more: str):
    """Run a scheduler and its workers, each with a folder for temporary files of its own as on a machine of its own."""
    file, processes = folder / "scheduler.json", []

    def start(kind: str, name: str, *options: str) -> None:
        own = folder / name
        own.mkdir()
        dask = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--scheduler-file", str(file), "--no-dashboard"]
        log = (folder / f"{name}.log").open("w")
        processes.append(
            subprocess.Popen(
                [*dask, *DASK[kind], *options], stdout=log, stderr=log, cwd=own, env=os.environ | {"TMPDIR": str(own)}
            )
        )
        log.close()

    try:
        start("scheduler", "scheduler")
        for number in range(workers):
            start("worker", f"worker{number}", *more)
        from distributed import Client

        with Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:  # which waits for the file
            if workers:
                client.wait_for_workers(workers, timeout=60)
            yield client.scheduler.address
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with running(tmp_path_factory.mktemp("dask"), 2) as found:
        yield found


def counting(path: Path, *cells: str) -> Path:
    """Write a notebook that leaves a file with its worker, its kernel and a child's process at each execution."""
    began = (
        f"import os, subprocess, time, uuid\nfrom pathlib import Path\nhere = Path({str(path.parent)!r})\n"
        "child = subprocess.Popen(['sleep', '600'])\nnote = here / f'{batch_size}-{uuid.uuid4().hex}'\n"
        "note.with_suffix('.part').write_text(f'{os.getppid()} {os.getpid()} {child.pid}')\n"
        "note.with_suffix('.part').rename(note.with_suffix('.ran'))"
    )
    return plain(path, began, *cells, "child.kill()\nprint(batch_size, profile)")


def executions(folder: Path) -> dict[str, int]:
    """Return how often each batch size was executed."""
    return dict(collections.Counter(path.name.partition("-")[0] for path in folder.glob("*.ran")))


def outputs(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def command(path: Path, sizes: str, address: str) -> subprocess.Popen:
    words = ["run", path.name, "--sweep", f"batch_size={sizes}", "--cluster", address, "--out", "out"]
    start = (
        "import signal; from speedkit import cli\nsignal.signal(signal.SIGINT, signal.default_int_handler); cli.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start, *words],
        cwd=path.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def awaited(folder: Path, pattern: str, process: subprocess.Popen) -> Path:
    """Return the file that fits once it is there; fail when `process` has ended without it."""
    while not (found := list(folder.glob(pattern))):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
            raise AssertionError(process.communicate())
    return found[0]


def gone(pids: list[int]) -> bool:
    """Return whether the processes end, waiting for them."""
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    alive = psutil.wait_procs([one for one in left if one.status() != psutil.STATUS_ZOMBIE], timeout=30)[1]
    return all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


@pytest.mark.slow
def test_a_cluster_runs_all_combinations_and_says_which_failed(address, tmp_path, capsys):
    fails = "child.kill()\nassert batch_size != 2, 'two is odd here'\nprint(os.getcwd())"
    path = counting(tmp_path / "21_n.ipynb", fails)
    with cluster.sweeping(address) as on_cluster:
        done = on_cluster(path, {"batch_size": ["1", "2", "3"], "profile": ["cpu", "smoke"]}, tmp_path / "out")
    names = [f"21_n-batch_size={size}-profile={profile}" for size in (1, 2, 3) for profile in ("cpu", "smoke")]
    assert [out.stem for out in done] == names and executions(tmp_path) == {"1": 2, "2": 2, "3": 2}
    for out, why in done.items():
        failed = out.with_name(f"{out.stem}.failed.ipynb")
        if "=2-" in out.name:
            assert why == f"21_n.ipynb, cell [4]: AssertionError: two is odd here. What did run is in {failed}"
            assert "odd here" in failed.read_text() and not out.exists()
        else:
            ran_in, said = outputs(out).splitlines()
            assert why == "" and said in ("1 cpu", "1 smoke", "3 cpu", "3 smoke") and not Path(ran_in).exists()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [f"{count}/6" for count in range(1, 7)]
    assert len(list((tmp_path / "out").iterdir())) == 6  # and nothing half written


@pytest.mark.slow
def test_a_lost_workers_notebook_is_rerun_and_finished_ones_are_not(tmp_path):
    # The third waits until the others are in place; in its first execution for ever. Its worker has run others before.
    waits = (
        "while batch_size == 3 and (len(list((here / 'out').glob('*.ipynb'))) < 3\n"
        "                           or len(list(here.glob('3-*.ran'))) < 2):\n"
        "    (here / 'hangs').write_text('') if len(list((here / 'out').glob('*.ipynb'))) == 3 else None\n"
        "    time.sleep(0.1)"
    )
    path = counting(tmp_path / "n.ipynb", waits)
    (tmp_path / "dask").mkdir()
    with running(tmp_path / "dask", 2) as address:
        sweeping = command(path, "1,2,3,4", address)
        awaited(tmp_path, "hangs", sweeping)
        worker, kernel, child = map(int, awaited(tmp_path, "3-*.ran", sweeping).read_text().split())
        on_it = [note for note in tmp_path.glob("*.ran") if int(note.read_text().split()[0]) == worker]
        os.kill(worker, signal.SIGKILL)
        said, complaint = sweeping.communicate(timeout=120)
        psutil.Process(child).kill()
    assert sweeping.returncode == 0, complaint
    assert len(on_it) > 1 and executions(tmp_path) == {"1": 1, "2": 1, "3": 2, "4": 1}
    assert len(list((tmp_path / "out").glob("n-batch_size=?.ipynb"))) == 4 and "4/4" in said
    assert gone([kernel])


@pytest.mark.slow
def test_a_worker_that_dies_of_a_notebook_is_a_failure_of_that_one(tmp_path):
    path = plain(tmp_path / "n.ipynb", "import os\nif batch_size == 2:\n    os.kill(os.getppid(), 9)")
    (tmp_path / "dask").mkdir()
    with running(tmp_path / "dask", 5) as address, cluster.sweeping(address) as on_cluster:
        one, two = on_cluster(path, {"batch_size": [1, 2]}, tmp_path / "out", timeout_s=60).items()
    assert one[1] == "" and one[0].exists()
    assert two[1].startswith("KilledWorker: Attempted to run") and "\n" not in two[1] and not two[0].exists()


@pytest.mark.slow
def test_ctrl_c_stops_what_runs_on_the_cluster(address, tmp_path):
    path = counting(tmp_path / "n.ipynb", "child.wait()")
    sweeping = command(path, "1,2,3,4", address)
    for size in ("1", "2"):
        awaited(tmp_path, f"{size}-*.ran", sweeping)
    sweeping.send_signal(signal.SIGINT)
    _, complaint = sweeping.communicate(timeout=60)
    assert sweeping.returncode == 130 and "stopped by SIGINT" in complaint and "Traceback" not in complaint
    notes = [list(map(int, note.read_text().split())) for note in tmp_path.glob("*.ran")]
    assert gone([pid for _, *pids in notes for pid in pids]) and executions(tmp_path) == {"1": 1, "2": 1}
    with cluster.sweeping(address) as on_cluster:  # the workers are free again, and ran none of what was left
        done = on_cluster(plain(tmp_path / "m.ipynb"), {"batch_size": [1, 2]}, tmp_path / "out")
    assert list(done.values()) == ["", ""] and executions(tmp_path) == {"1": 1, "2": 1}


@pytest.mark.slow
def test_workers_on_one_machine_run_one_notebook_at_a_time(tmp_path):
    path = plain(
        tmp_path / "n.ipynb",
        f"import os, time\nos.mkdir({str(tmp_path / 'mine')!r})\ntime.sleep(0.2)\nos.rmdir({str(tmp_path / 'mine')!r})",
    )
    (tmp_path / "dask").mkdir()
    with running(tmp_path / "dask", 1, "--nthreads", "3") as address, cluster.sweeping(address) as on_cluster:
        done = on_cluster(path, {"batch_size": [1, 2, 3]}, tmp_path / "out")
    assert set(done.values()) == {""}


@pytest.mark.slow
def test_other_versions_on_a_worker_are_a_warning_and_a_lost_scheduler_a_sentence(tmp_path):
    (tmp_path / "older.py").write_text(
        "import distributed.versions as known\nnow = known.get_package_info\n"
        "known.get_package_info = lambda names, now=now: now(names) | {'pandas': '0.1'}"
    )
    (tmp_path / "dask").mkdir()
    path = counting(tmp_path / "n.ipynb", "if batch_size == 2:\n    child.wait()")
    with running(tmp_path / "dask", 1, "--preload", str(tmp_path / "older.py")) as address:
        sweeping = command(path, "1,2", address)
        _, _, child = map(int, awaited(tmp_path, "2-*.ran", sweeping).read_text().split())
        commands = {one: " ".join(one.cmdline()) for one in psutil.Process().children()}
        [scheduler] = [one for one, words in commands.items() if "dask_scheduler" in words and str(tmp_path) in words]
        scheduler.kill()
        said, complaint = sweeping.communicate(timeout=120)
    assert "1/2 n-batch_size=1: done" in said and "2/2 n-batch_size=2: CancelledError" in said
    assert sweeping.returncode == 1 and "1 combinations failed" in complaint and "Traceback" not in complaint, complaint
    assert "VersionMismatchWarning: Mismatched versions found" in complaint and " 0.1 " in complaint, complaint
    assert gone([child])


@pytest.mark.slow
def test_a_scheduler_without_workers_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    with (
        running(tmp_path, 0) as address,
        pytest.raises(UsageError, match=f"at {address} has no worker: start one"),
        cluster.sweeping(address),
    ):
        pass


@pytest.mark.parametrize("says", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", bytes(64)])
def test_something_else_that_listens_there_is_no_scheduler(says, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: taken.append(server.accept()[0]) or taken[0].sendall(says)).start()
        with (
            pytest.raises(UsageError, match="no Dask scheduler answers"),
            cluster.sweeping(f"tcp://127.0.0.1:{server.getsockname()[1]}"),
        ):
            pass
        taken[0].close()


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:1", "tcp://nowhere.invalid:8786", "here", "ftp://127.0.0.1:1"])
def test_an_address_where_no_scheduler_is_is_said(wrong, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    says = f"no Dask scheduler answers at {wrong} within 1 s: start"
    with pytest.raises(UsageError, match=says), cluster.sweeping(wrong):
        pass


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install -e \.\[cluster\]"), cluster.sweeping("tcp://127.0.0.1:1"):
        pass


def test_a_cluster_is_for_sweeps():
    done = subprocess.run(
        [sys.executable, "-m", "speedkit", "run", "01", "--cluster", "tcp://127.0.0.1:1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--cluster runs the combinations of --sweep" in done.stderr


def test_a_process_that_dies_fails_its_combinations_in_a_sentence(tmp_path):
    path = plain(tmp_path / "n.ipynb", "import os\nos.kill(os.getppid(), 9)")
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        done = sweep(path, {"batch_size": [1]}, tmp_path / "out", executor=pool)
    assert next(iter(done.values())).startswith("BrokenProcessPool: ")

"""Sweeps on many machines: a Dask cluster runs the notebooks, which travel as text and come back whole.

Each machine needs this package and `dask worker tcp://HOST:PORT`, best one worker for each GPU with `--nthreads 1`: a
device still runs one notebook at a time, and what a worker has taken on waits for it.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from speedkit.errors import SpeedkitError, UsageError
from speedkit.notebooks import run_notebook, sweep

CONNECT_S = 10  # that a scheduler, and then a first worker, has to answer


@contextlib.contextmanager
def sweeping(address: str) -> Iterator[Callable[..., dict[Path, str]]]:
    """Yield `notebooks.sweep` that runs on the Dask cluster whose scheduler is at `address`, tcp://HOST:PORT.

    A lost worker's notebook runs again on another. Leaving, by Ctrl-C too, stops what still runs. Raises UsageError
    when `distributed` is not installed, and when no scheduler or worker answers.
    """
    try:
        import distributed
    except ImportError as error:
        raise UsageError("--cluster needs Dask: install it with pip install -e .[cluster]") from error
    for name in [*logging.root.manager.loggerDict]:  # Dask gives some loggers a level of their own
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what they would log is in the errors raised here
    try:
        distributed.utils.LoopRunner(asynchronous=False).run_sync(_reach, address)
        client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
    except Exception as error:  # what else may listen there can answer anything
        why = f"no Dask scheduler answers at {address} within {CONNECT_S} s"
        raise UsageError(f"{why}: start one with `dask scheduler` and give the tcp://HOST:PORT it prints") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError as error:
            why = f"the Dask scheduler at {address} has no worker"
            raise UsageError(f"{why}: start one on each machine with `dask worker {address} --nthreads 1`") from error
        # Not pure: a sweep that is run again runs, whatever another client's sweep left on the cluster.
        yield functools.partial(sweep, executor=client.get_executor(pure=False), run_text=run_text)


async def _reach(address: str) -> None:
    """Connect once: Client would wait for ever where something takes the connection and then says nothing."""
    from distributed.comm import connect

    (await asyncio.wait_for(connect(address), CONNECT_S)).abort()


def run_text(text: str, name: str, timeout_s: float, given: dict[str, Any]) -> tuple[str, bytes]:
    """Run the notebook `text`, called `name`, on a worker; return what went wrong, and what was run of it."""
    from distributed import get_worker

    worker = get_worker()
    key, over = worker.get_current_task(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="speedkit-") as folder:
        source, out = Path(folder, name), Path(folder, "out", name)
        source.write_text(text, encoding="utf-8")
        threading.Thread(target=_stop_when_cancelled, args=(worker, key, source, over), daemon=True).start()
        try:
            return "", run_notebook(source, out, given, timeout_s=timeout_s, progress=False).read_bytes()
        except SpeedkitError as error:
            ran = out.with_name(f"{out.stem}.failed.ipynb")
            return str(error).partition(". What did run is in ")[0], ran.read_bytes() if ran.exists() else b""
        finally:
            over.set()


def _stop_when_cancelled(worker: Any, key: str, source: Path, over: threading.Event) -> None:
    """Until `over`, look whether caller or scheduler is gone, which no running task is told; if so, end its kernel."""
    while not over.wait(1):
        task = worker.state.tasks.get(key)
        if task is None or task.state == "cancelled" or worker.status.name in ("closing", "closed"):
            source.unlink(missing_ok=True)  # so that a notebook which waits for the device does not start
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    if process.cwd() == str(source.parent):  # its kernel, which leads a process group
                        os.killpg(process.pid, signal.SIGKILL)

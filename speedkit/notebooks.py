"""Strict papermill runs: names and types are checked, a run always ends, and its output is whole or absent."""

import concurrent.futures
import contextlib
import fcntl
import functools
import itertools
import logging
import math
import os
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import atomic
from speedkit.measure.provenance import notebooks_folder
from speedkit.parameters import code_cells, typed_parameters
from speedkit.settings import nearest


def find_notebooks(names: Sequence[str | Path] | None = None, folder: Path | None = None) -> list[Path]:
    """Return the notebooks called by number ("21"), name ("21_mixed_precision", "mixed_precision") or path.

    `names=None` is all of the `folder`. Raises UsageError with what exists when a name fits none.
    """
    files = sorted((folder or notebooks_folder()).glob("[0-9][0-9]_*.ipynb"))
    known = {path.stem: path for path in files if "." not in path.stem}  # 21_name.failed.ipynb is none of them
    called = {word: path for key, path in known.items() for word in (key[:2], key[3:], key)}
    found = []
    for name in map(str, known if names is None else names):
        path = called.get(name.removesuffix(".ipynb"), Path(name).resolve())
        if path.suffix != ".ipynb" or not path.is_file():
            raise UsageError(f'there is no notebook "{name}"{nearest(name, called)}; there are {", ".join(known)}')
        found.append(path)
    return list(dict.fromkeys(found))


def run_notebook(
    source: str | Path,
    out: str | Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 3600.0,
    progress: bool = True,
) -> Path:
    """Run notebook `source` with `parameters` in a fresh kernel, in its own folder, and leave what was run at `out`.

    `timeout_s` is for all cells; `progress` is a bar on a terminal and lines elsewhere. Raises UsageError before
    anything starts, SpeedkitError when a cell fails or time is up: `out` is then, as after Ctrl-C, as it was, and what
    did run is beside it as NAME.failed.ipynb.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    values = typed_parameters(source, parameters or {})
    if out == source:
        raise UsageError(f"{source.name} cannot be run onto itself: name another output")
    partial = out.with_name(f"{out.stem}.failed.ipynb")  # papermill writes it cell by cell
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with device_lock():
            _execute(source, partial, values, timeout_s, progress)
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"{out.parent} cannot be written ({error.strerror}): name another output") from error
    return out


def _execute(source: Path, partial: Path, values: dict[str, Any], timeout_s: float, progress: bool) -> None:
    """Run `source` into `partial`. Raises SpeedkitError that says which cell failed and why."""
    import papermill
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").addHandler(logging.NullHandler())  # what it would print is in the errors raised here
    began_s, number = time.monotonic(), 0
    bar: Any = {"desc": source.stem, "leave": False} if progress and sys.stderr.isatty() else False

    def before_cell(cell: Any, cell_index: int) -> None:
        nonlocal number
        number += 1
        if progress and not bar:
            print(f"{source.stem}: cell {number}, {time.monotonic() - began_s:.0f} s", flush=True)

    def failure(why: str) -> SpeedkitError:
        return SpeedkitError(f"{source.name}, cell [{number}]: {why}. What did run is in {partial}")

    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (source, partial)]  # these are format strings
    try:
        executed = papermill.execute_notebook(
            *paths,
            values,
            kernel_name="python3",
            progress_bar=bar,
            on_cell_start=before_cell,
            execution_timeout=math.ceil(timeout_s),
            timeout_func=lambda cell: max(1, math.ceil(began_s + timeout_s - time.monotonic())),
            resources={"metadata": {"path": str(source.parent)}},
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # its log is no output of the notebook
        )
    except papermill.PapermillExecutionError as error:
        raise failure(f"{error.ename}: {error.evalue}".strip(": ").splitlines()[0]) from error
    except CellTimeoutError as error:
        raise failure(f"stopped, the notebook's {timeout_s:.0f} s are over") from error
    except RuntimeError as error:
        raise failure(f"the kernel died, perhaps out of memory, or did not start ({error})") from error
    # A cell that calls sys.exit(0) ends the kernel's work early, and papermill finds nothing wrong with that.
    if left := [cell for cell in code_cells(executed) if cell.source and not cell.execution_count]:
        raise failure(f"the notebook ended with {len(left)} cells not run")


@contextlib.contextmanager
def device_lock() -> Iterator[None]:
    """Hold this user's locks on the GPUs that CUDA shows, or on the machine without one; wait for who holds them."""
    import psutil
    import torch

    count = torch.cuda.device_count()  # which starts no CUDA in this process
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = sorted(shown.replace(" ", "").split(",")[:count])  # in one order, so that two never wait for each other
    with contextlib.ExitStack() as stack:
        for name in names or ["cpu"]:
            path = Path(tempfile.gettempdir(), f"speedkit-{os.getuid()}-{name}.lock")
            stream = stack.enter_context(path.open("a+"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if int(path.read_text() or 0) in [parent.pid for parent in psutil.Process().parents()]:
                    continue  # a notebook that runs notebooks would wait for itself
                print(f"waiting for another notebook to finish on {name}", file=sys.stderr, flush=True)
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.truncate(0)
            print(os.getpid(), file=stream, flush=True)
        yield


def sweep(
    source: str | Path,
    grid: Mapping[str, Sequence[Any]],
    out: str | Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    executor: concurrent.futures.Executor | None = None,
    timeout_s: float = 3600.0,
    run_text: Callable[..., tuple[str, bytes]] | None = None,
) -> dict[Path, str]:
    """Run notebook `source` for each combination of the `grid`'s values, into folder `out`, named by the values.

    By default one after the other, else by any `executor`; one that sees no files of this machine is given `run_text`,
    see speedkit.cluster. Return what went wrong with each, "" if nothing, by path.
    """
    source, errors = Path(source).resolve(), dict[Path, str]()
    jobs: dict[Path, Callable[[], tuple[str, bytes]]] = {}
    for values in itertools.product(*grid.values()):
        given = typed_parameters(source, {**(parameters or {}), **dict(zip(grid, values, strict=True))})
        label = "-".join(f"{name}={urllib.parse.quote(str(given[name]), safe=',+[]')}" for name in grid)
        path = Path(out).resolve() / f"{source.stem}-{label}.ipynb"
        jobs[path] = functools.partial(_tried, source, path, timeout_s, given)
        if run_text:
            jobs[path] = functools.partial(run_text, source.read_text("utf-8"), source.name, timeout_s, given)
    for path, (why, ran) in _outcomes(jobs, executor):
        errors[path] = _landed(path, why, ran)
        print(f"{len(errors)}/{len(jobs)} {path.stem}: {errors[path] or 'done'}", flush=True)
    return {path: errors[path] for path in jobs}


def _tried(source: Path, out: Path, timeout_s: float, given: dict[str, Any]) -> tuple[str, bytes]:
    """Run one combination of a sweep; return what went wrong, and nothing of what was run: it is in place."""
    try:
        run_notebook(source, out, given, timeout_s=timeout_s, progress=False)
    except SpeedkitError as error:
        return str(error), b""
    return "", b""


def _outcomes(
    jobs: Mapping[Path, Callable[[], tuple[str, bytes]]], executor: concurrent.futures.Executor | None
) -> Iterator[tuple[Path, tuple[str, bytes]]]:
    """Yield the path and the outcome of each job, in the order in which they end."""
    if executor is None:
        yield from ((path, job()) for path, job in jobs.items())
        return
    waiting = {executor.submit(job): path for path, job in jobs.items()}
    try:
        while waiting:
            for future in concurrent.futures.wait(waiting, return_when="FIRST_COMPLETED").done:
                path = waiting.pop(future)
                try:
                    outcome = future.result()
                except Exception as error:  # the executor's: its process died, its cluster went away
                    outcome = (f"{type(error).__name__}: {error}".strip(": ").splitlines()[0], b"")
                yield path, outcome
            del future  # Dask keeps what somebody holds, and would run it again when the worker that has it is lost
    finally:
        for future in waiting:
            future.cancel()


def _landed(path: Path, why: str, ran: bytes) -> str:
    """Write what was `ran` elsewhere to `path`, beside it after a failure; return what went wrong, and where it is."""
    if not ran:
        return why
    path = path.with_name(f"{path.stem}.failed.ipynb") if why else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_bytes(ran)
    except OSError as error:
        raise UsageError(f"{path.parent} cannot be written ({error.strerror}): name another output") from error
    return f"{why}. What did run is in {path}" if why else ""

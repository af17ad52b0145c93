"""Strict papermill runs: names and types are checked, a run always ends, and its output is whole or absent."""

import concurrent.futures
import contextlib
import fcntl
import itertools
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speedkit.errors import SpeedkitError, UsageError
from speedkit.measure.provenance import code_sha256, notebooks_folder
from speedkit.parameters import code_cells, read_notebook, record_of, typed_parameters
from speedkit.parameters import parameters_of as parameters_of
from speedkit.settings import nearest


@dataclass(frozen=True)
class Combination:
    """One notebook run of a sweep; `error` is "" when it is complete, `reused` when an earlier sweep had run it."""

    parameters: dict[str, Any]
    path: Path
    error: str = ""
    reused: bool = False


def find_notebooks(names: Sequence[str | Path] | None = None, folder: Path | None = None) -> list[Path]:
    """Return the notebooks called by number ("21"), name ("21_mixed_precision", "mixed_precision") or path.

    `names=None` is all of the `folder`. Raises UsageError with what exists when a name fits none.
    """
    files = sorted((folder or notebooks_folder()).glob("[0-9][0-9]_*.ipynb"))
    known = {path.stem: path for path in files if "." not in path.stem}  # 21_name.failed.ipynb is none of them
    called = {word: path for key, path in reversed(known.items()) for word in (key[:2], key[3:], key)}
    found = []
    for name in map(str, known if names is None else names):
        stem, path = name.removesuffix(".ipynb"), Path(name).resolve()
        if stem not in called and not (path.suffix == ".ipynb" and path.is_file()):
            hint = nearest(stem, [*known, *(key[3:] for key in known)])
            raise UsageError(f'there is no notebook "{name}"{hint}; there are {", ".join(known) or "none"}')
        found.append(called.get(stem, path))
    return list(dict.fromkeys(found))


def is_current(record: Mapping[str, Any] | None, source: str | Path) -> bool:
    """Whether `record` was made by the code that notebook `source`, and the modules it measures, have now."""
    try:
        return record is not None and record.get("code_sha256") == code_sha256(source, record.get("modules", []))
    except (UsageError, OSError):  # a module or the notebook is no longer there
        return False


def run_notebook(
    source: str | Path, out: str | Path, parameters: Mapping[str, Any] | None = None, *,
    timeout_s: float = 3600.0, progress: bool | str = "auto",
) -> Path:  # fmt: skip
    """Run notebook `source` with `parameters` in a fresh kernel, in its own folder, and leave what was run at `out`.

    `timeout_s` is for all cells; `progress="auto"` is a bar on a terminal and lines elsewhere. Raises UsageError before
    anything starts, SpeedkitError when a cell fails or time is up: `out` is then as it was, and what did run is beside
    it as NAME.failed.ipynb.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    values = typed_parameters(source, parameters or {})
    if out == source:
        raise UsageError(f"{source.name} cannot be run onto itself: name another output")
    failed = out.with_name(f"{out.stem}.failed.ipynb")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".speedkit-", dir=out.parent) as folder, device_lock():
            partial = Path(folder) / out.name
            try:
                _execute(source, partial, values, timeout_s, progress)
            except SpeedkitError as error:
                partial.replace(failed)
                raise SpeedkitError(f"{error}. What did run is in {failed}") from error.__cause__
            partial.replace(out)
            failed.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{out.parent} cannot be written ({error.strerror}): name another output") from error
    return out


def _execute(source: Path, partial: Path, values: dict[str, Any], timeout_s: float, progress: bool | str) -> None:
    """Run `source` into `partial`. Raises SpeedkitError that says which cell failed and why."""
    import papermill
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").addHandler(logging.NullHandler())  # what it would print is in the errors raised here
    began_s, where, started = time.monotonic(), source.name, itertools.count(1)
    bar = progress is True or (progress == "auto" and sys.stderr.isatty())

    def before_cell(cell: Any, cell_index: int) -> None:
        nonlocal where
        where = f"{source.name}, cell [{(number := next(started))}]"
        if progress and not bar:
            print(f"{source.stem}: cell {number}, {time.monotonic() - began_s:.0f} s", flush=True)

    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (source, partial)]  # these are format strings
    try:
        executed = papermill.execute_notebook(
            *paths, values, kernel_name="python3", progress_bar={"desc": source.stem, "leave": False} if bar else False,
            execution_timeout=math.ceil(timeout_s), on_cell_start=before_cell,
            timeout_func=lambda cell: max(1, math.ceil(began_s + timeout_s - time.monotonic())),
            resources={"metadata": {"path": str(source.parent)}},
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # its log is no output of the notebook
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        raise SpeedkitError(f"{where}: {error.ename}: {error.evalue}".strip(": ").splitlines()[0]) from error
    except CellTimeoutError as error:
        raise SpeedkitError(f"{where}: stopped, the notebook's {timeout_s:.0f} s are over") from error
    except RuntimeError as error:
        raise SpeedkitError(f"{where}: the kernel died, perhaps out of memory, or did not start ({error})") from error
    # A cell that calls sys.exit(0) ends the kernel's work early, and papermill finds nothing wrong with that.
    if left := [cell for cell in code_cells(executed) if cell.source and not cell.execution_count]:
        raise SpeedkitError(f"{where}: the notebook ended with {len(left)} cells not run")


def visible_gpus() -> dict[str, Any]:
    """Return the NVML handles, by UUID, of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves; {} without a driver."""
    import pynvml  # the module of nvidia-ml-py

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    gpus = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).replace(" ", "").split(",")
    return {uuid: handle for index, (uuid, handle) in enumerate(gpus.items())
            if str(index) in wanted or any(word.startswith("GPU-") and uuid.startswith(word) for word in wanted)}


@contextlib.contextmanager
def device_lock() -> Iterator[None]:
    """Hold this user's locks on the visible GPUs, or on the machine without one; wait for who holds them."""
    import psutil

    with contextlib.ExitStack() as stack:
        for name in sorted(visible_gpus()) or ["cpu"]:
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
    source: str | Path, grid: Mapping[str, Sequence[Any]], out: str | Path, *,
    parameters: Mapping[str, Any] | None = None, executor: concurrent.futures.Executor | None = None,
    timeout_s: float = 3600.0, progress: bool = True,
) -> list[Combination]:  # fmt: skip
    """Run notebook `source` for each combination of the `grid`'s values, into folder `out`, named by the values.

    What an earlier sweep completed with the same parameters and code is not run again. By default one process runs all.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    combinations = []
    for values in itertools.product(*grid.values()):
        given = typed_parameters(source, {**(parameters or {}), **dict(zip(grid, values, strict=True))})
        label = "-".join(f"{name}={urllib.parse.quote(str(given[name]), safe=',+[]')}" for name in grid)
        path = out / f"{source.stem}-{label}.ipynb"
        combinations.append(Combination(given, path, reused=_is_complete(path, source, given)))
    errors: dict[Path, str] = {}
    own = contextlib.nullcontext(executor) if executor else concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"))  # fmt: skip
    with own as pool:
        futures = {pool.submit(run_notebook, source, c.path, c.parameters, timeout_s=timeout_s, progress=False): c.path
                   for c in combinations if not c.reused}  # fmt: skip
        try:
            for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
                path = futures[future]
                errors[path] = str(future.exception() or "")
                if progress:
                    print(f"{number}/{len(futures)} {path.stem}: {errors[path] or 'done'}", flush=True)
        finally:  # after Ctrl-C nothing more starts
            for future in futures:
                future.cancel()
    return [replace(c, error=errors.get(c.path, "")) for c in combinations]


def _is_complete(path: Path, source: Path, parameters: dict[str, Any]) -> bool:
    """Whether the notebook at `path` was run from the code of `source` with the same `parameters`."""
    with contextlib.suppress(UsageError):
        executed = read_notebook(path)
        record = record_of(executed) or {"code_sha256": code_sha256(path)}
        return executed.metadata.get("papermill", {}).get("parameters") == parameters and is_current(record, source)
    return False

"""Strict papermill runs: finding a notebook, running it once, and sweeps over its parameters.

Papermill only warns about a parameter the notebook does not have, waits for ever by default, and after a timeout or a
`sys.exit(0)` saves a half-run notebook as completed. Here names and types are checked before anything starts, a run
always has an end, and the output file appears only when every cell has run.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from speedkit.contract import current_hash
from speedkit.errors import SpeedkitError, UsageError
from speedkit.parameters import parameters_of as parameters_of
from speedkit.parameters import read_notebook, record_of, typed_parameters


@dataclass(frozen=True)
class Combination:
    """One notebook run of a sweep; `error` is "" when it is complete, `reused` when an earlier sweep had run it."""

    parameters: dict[str, Any]
    path: Path
    error: str = ""
    reused: bool = False


def notebooks_folder() -> Path:
    """Return the folder of the numbered notebooks. Raises UsageError when there is none."""
    from speedkit.measure.provenance import notebooks_folder as folder

    found = folder()
    if found is None:
        raise UsageError("there is no notebooks folder here: run this in the checkout, or set SPEEDKIT_NOTEBOOKS to it")
    return found.resolve()


def find_notebooks(names: Sequence[str | Path] | None = None, folder: Path | None = None) -> list[Path]:
    """Return the notebooks called by number ("21"), name ("21_mixed_precision", "mixed_precision") or path.

    `names=None` is all of the `folder`. Raises UsageError with what exists when a name fits none.
    """
    files = sorted((folder or notebooks_folder()).glob("[0-9][0-9]_*.ipynb"))
    known = {path.stem: path for path in files if "." not in path.stem}  # 21_name.failed.ipynb is none of them
    if names is None:
        return list(known.values())
    found = []
    for name in map(str, names):
        stem = name.removesuffix(".ipynb")
        fits = [path for key, path in known.items() if stem in (key, key[:2], key[3:])]
        if fits or (name.endswith(".ipynb") and Path(name).is_file()):
            found.append(fits[0] if fits else Path(name).resolve())
            continue
        near = get_close_matches(stem, [*known, *(key[3:] for key in known)], n=1)
        hint = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f'no notebook "{name}": {hint}There are {", ".join(known) or "none"}')
    return list(dict.fromkeys(found))


def run_notebook(
    source: str | Path, out: str | Path, parameters: Mapping[str, Any] | None = None, *,
    timeout_s: float = 3600.0, progress: bool | str = "auto",
) -> Path:  # fmt: skip
    """Run notebook `source` with `parameters` in a fresh kernel and leave the executed notebook at `out`.

    The kernel is this interpreter's, its working directory the notebook's own folder, where Jupyter and nbval run it
    too. One notebook runs per GPU (or per machine without one) at a time: others wait. `timeout_s` is for all cells
    together. `progress`: "auto" is a bar on a terminal and lines elsewhere; False is silence.
    Raises UsageError before anything starts, SpeedkitError when a cell fails or time is up: `out` is then as it was,
    and what did run is beside it as NAME.failed.ipynb.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    values = typed_parameters(source, parameters or {})
    check_kernel()
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
    import nbclient.exceptions
    import papermill

    logging.getLogger("papermill").addHandler(logging.NullHandler())  # what it would print is in the errors raised here
    deadline = time.monotonic() + timeout_s
    cell_number = 0
    bar = progress is True or (progress == "auto" and sys.stderr.isatty())

    def before_cell(cell: Any, cell_index: int) -> None:
        nonlocal cell_number
        cell_number += 1
        if progress and not bar:
            print(f"{source.stem}: cell {cell_number}, {timeout_s - deadline + time.monotonic():.0f} s", flush=True)

    def where() -> str:
        return f"{source.name}, cell [{cell_number}]"

    try:
        executed = papermill.execute_notebook(
            _literal(source), _literal(partial), values, kernel_name="python3",
            progress_bar={"desc": source.stem, "leave": False} if bar else False,
            execution_timeout=math.ceil(timeout_s), on_cell_start=before_cell,
            timeout_func=lambda cell: max(1, math.ceil(deadline - time.monotonic())),
            resources={"metadata": {"path": str(source.parent)}},
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # its log is no output of the notebook
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        cell_number = error.exec_count or cell_number
        raise SpeedkitError(f"{where()}: {error.ename}: {error.evalue}".strip(": ").splitlines()[0]) from error
    except nbclient.exceptions.CellTimeoutError as error:
        raise SpeedkitError(f"{where()}: stopped, the notebook's {timeout_s:.0f} s are over") from error
    except nbclient.exceptions.DeadKernelError as error:
        raise SpeedkitError(f"{where()}: the kernel died; it may have run out of memory") from error
    except RuntimeError as error:
        raise SpeedkitError(f"{source.name}: the kernel did not start ({error})") from error
    # A cell that calls sys.exit(0) ends the kernel's work early, and papermill finds nothing wrong with that.
    left = [cell for cell in executed.cells if cell.cell_type == "code" and cell.source and not cell.execution_count]
    if left:
        raise SpeedkitError(f"{where()}: the notebook ended with {len(left)} cells not run")


def _literal(path: Path) -> str:
    """Return `path` so that papermill, which takes paths for format strings, leaves its braces alone."""
    return str(path).replace("{", "{{").replace("}", "}}")


def check_kernel() -> None:
    """Raise UsageError unless the kernel `python3` is the interpreter that runs this."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel as error:
        raise UsageError("there is no Jupyter kernel python3: install ipykernel") from error
    # jupyter_client puts its own interpreter in the place of a bare `python`.
    if Path(command).name != command and not (Path(command).exists() and Path(command).samefile(sys.executable)):
        raise UsageError(f"the Jupyter kernel python3 is {command}, not {sys.executable}: "
                         f"run `{sys.executable} -m ipykernel install --sys-prefix`")  # fmt: skip


def visible_gpus() -> dict[str, Any]:
    """Return the NVML handles, by UUID, of the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves; {} without a driver."""
    import pynvml  # the module of nvidia-ml-py

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    gpus = {str(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    wanted = [item.strip() for item in chosen.split(",") if item.strip()]
    named = [uuid for index, uuid in enumerate(gpus)
             if str(index) in wanted or any(item.startswith("GPU-") and uuid.startswith(item) for item in wanted)]
    return {uuid: gpus[uuid] for uuid in named}


@contextlib.contextmanager
def device_lock() -> Iterator[None]:
    """Hold this user's locks on the visible GPUs, or on the machine without one; wait for who holds them."""
    import psutil

    with contextlib.ExitStack() as stack:
        for name in sorted(visible_gpus()) or ["cpu"]:
            path = Path(tempfile.gettempdir()) / f"speedkit-{os.getuid()}-{name}.lock"
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
    """Run notebook `source` once for each combination of the `grid`'s values, into folder `out`, named by the values.

    `executor` is any of `concurrent.futures`; by default one local process, so that timings do not disturb each other.
    A combination that an earlier sweep completed with the same parameters and code is not run again; one that fails
    leaves the others alone and says why in `error`. Raises UsageError for the grid before anything starts.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    combinations = []
    for values in itertools.product(*grid.values()):
        given = typed_parameters(source, {**(parameters or {}), **dict(zip(grid, values, strict=True))})
        label = "-".join(f"{name}={_in_a_file_name(given[name])}" for name in grid)
        combinations.append(Combination(given, out / f"{source.stem}-{label}.ipynb"))
    done = [Combination(c.parameters, c.path, reused=True) for c in combinations if _is_complete(c, source)]
    to_do = {c.path: c for c in combinations if c.path not in {d.path for d in done}}
    own = contextlib.nullcontext(executor) if executor else concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"))  # fmt: skip
    with own as pool:
        run = functools.partial(run_notebook, source, timeout_s=timeout_s, progress=False)
        futures = {pool.submit(run, c.path, c.parameters): c for c in to_do.values()}
        try:
            for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
                error, combination = future.exception(), futures[future]
                done.append(Combination(combination.parameters, combination.path, str(error) if error else ""))
                if progress:
                    print(f"{number}/{len(to_do)} {combination.path.stem}: {error or 'done'}", flush=True)
        finally:  # after Ctrl-C nothing more starts
            for future in futures:
                future.cancel()
    order = [c.path for c in combinations]
    return sorted(done, key=lambda c: order.index(c.path))


def _in_a_file_name(value: Any) -> str:
    """Return `value` as text that a file name can hold; different values give different texts."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    safe = re.sub(r"[^\w.,+-]", "_", text)[:40]
    return safe if safe == text else f"{safe}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _is_complete(combination: Combination, source: Path) -> bool:
    """Whether the combination's output is there, from the same parameters and the same code."""
    from speedkit.measure.provenance import code_sha256

    if not combination.path.exists():
        return False
    try:
        executed = read_notebook(combination.path)
    except UsageError:
        return False
    ran = (record_of(executed) or {}).get("code_sha256") or code_sha256(combination.path)
    same = executed.metadata.get("papermill", {}).get("parameters") == combination.parameters
    return same and ran == current_hash(source)

"""Strict papermill runs: names and types are checked, a run always ends, and its output is whole or as before."""

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import os
import sys
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import pandas
import papermill
import torch
from nbclient.exceptions import CellTimeoutError
from nbclient.output_widget import OutputWidget

from speedkit.config import nearest
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import read_json
from speedkit.lab.provenance import notebooks_folder
from speedkit.lab.record import declared_types, read_notebook, typed_values

SHOWN = ("name", "ratio", "low", "high", "decision")  # of a comparison, in the table of a sweep
# What papermill would log is in the errors raised here.
logging.getLogger("papermill").addHandler(logging.NullHandler())
# What an output widget collects is not sent back to the kernel. nbclient would do so on the socket on which it waits
# for the cell's reply: that can take the reply's wake-up, and the client then stands still until the cell's time is up
# (https://github.com/jupyter/nbclient/issues/312).
OutputWidget.send = lambda *args, **kwargs: None  # type: ignore[method-assign]


def find_notebooks(names: Sequence[str | Path] | None = None, folder: Path | None = None) -> list[Path]:
    """Return the notebooks called by number ("21"), name ("21_mixed_precision", "mixed_precision") or path.

    `names=None` is all of the `folder`. Raises UsageError with what exists when a name fits none.
    """
    numbered = {path.stem: path for path in sorted((folder or notebooks_folder()).glob("[0-9][0-9]_*.ipynb"))}
    aliases = {word: path for stem, path in numbered.items() for word in (stem[:2], stem[3:], stem)}
    paths = []
    for name in map(str, numbered if names is None else names):
        path = aliases.get(name, Path(name).resolve())
        if path.suffix != ".ipynb" or not path.is_file():
            raise UsageError(f'there is no notebook "{name}"{nearest(name, aliases)}; there are {", ".join(numbered)}')
        paths.append(path)
    return paths


def declared_parameters(path: Path) -> dict[str, Any]:
    """Return the type of each parameter that the notebook at `path` declares, by name.

    Raises UsageError unless exactly one cell is tagged `parameters`, with nothing but lines `name: type = literal`.
    """
    tagged = [cell for cell in read_notebook(path).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UsageError(f"{path.name} has {len(tagged)} cells tagged `parameters`, and needs exactly one")
    return declared_types(path.name, tagged[0].source)


def typed_parameters(source: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `given` values or texts in the types that notebook `source` declares. Raises UsageError for others."""
    declared = declared_parameters(source)
    meant = {}
    for name, value in given.items():
        meant[name] = value
        if isinstance(value, str) and typing.get_origin(declared.get(name)) is list:
            meant[name] = value.split(",")
        elif value == "none" and type(None) in typing.get_args(declared.get(name)):
            meant[name] = None
    return typed_values(source.name, declared, meant)


def run_notebook(
    source: str | Path,
    out: str | Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 3600.0,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    progress: bool = True,
) -> Path:
    """Run notebook `source` with `parameters` in a fresh kernel, and leave what ran at `out`.

    The kernel starts in `folder`, by default the notebook's own, and imports what lies there. `timeout_s` is for each
    cell, `environment` for the kernel. The record lies in a folder beside `out`. Raises UsageError before anything
    starts, SpeedkitError when a cell fails or its time is up: `out` is then, as after Ctrl-C, as it was, and what did
    run is beside it as NAME.failed.ipynb.
    """
    source = Path(source).resolve()
    out = Path(out).resolve()
    values = typed_parameters(source, parameters or {})
    if out == source:
        raise UsageError(f"{source.name} cannot be run onto itself: name another output")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.stem}.failed.ipynb")  # papermill writes it cell by cell
    environment = {"SPEEDKIT_RUN_DIR": str(out.with_suffix(""))} | dict(environment or {})
    begun = 0

    def before_cell(**_: Any) -> None:
        nonlocal begun
        begun += 1
        if progress:
            print(f"{source.stem}: cell {begun}", flush=True)

    try:
        with device_lock(), mock.patch.dict(os.environ, environment):
            papermill.execute_notebook(
                source,
                partial,
                values,
                kernel_name="python3",
                progress_bar=False,
                execution_timeout=timeout_s,
                iopub_timeout=60,  # outputs may arrive this long after their cell has ended [s]
                on_cell_execute=before_cell,
                resources={"metadata": {"path": str(folder or source.parent)}},
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # its log is no output of the notebook
            )
        return partial.replace(out)
    except papermill.PapermillExecutionError as error:
        why = f"{error.ename}: {error.evalue}".strip(": ").splitlines()[0]
    except CellTimeoutError:
        why = f"stopped after {timeout_s:.0f} s"
    except RuntimeError as error:
        why = f"the kernel died, perhaps out of memory, or did not start ({error})"
    raise SpeedkitError(f"{source.name}, cell [{begun}]: {why}. What did run is in {partial}")


@contextlib.contextmanager
def device_lock() -> Iterator[None]:
    """Hold this user's locks on the GPUs that CUDA shows, or on the machine without one; wait for who holds them."""
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or gpus or "cpu"
    with contextlib.ExitStack() as stack:
        for device in sorted(devices.split(",")):  # in one order: no deadlock
            lock = filelock.FileLock(Path(tempfile.gettempdir(), f"speedkit-{os.getuid()}-{device}.lock"))
            try:
                stack.enter_context(lock.acquire(blocking=False))
            except filelock.Timeout:
                print(f"waiting for another notebook to finish on {device}", file=sys.stderr, flush=True)
                stack.enter_context(lock.acquire())
        yield


def sweep(
    source: str | Path,
    grid: Mapping[str, Sequence[Any]],
    out: str | Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    executor: concurrent.futures.Executor | None = None,
    timeout_s: float = 3600.0,
    folder: Path | None = None,
) -> dict[Path, str]:
    """Run notebook `source` for each combination of the `grid`'s values, into folder `out`, named by the values.

    They run one after the other, or in an `executor`, of this machine or of others that share its file system. What
    their comparisons show is in a table, NAME-sweep.csv. Return what went wrong with each, "" if nothing, by path.
    """
    source = Path(source).resolve()
    jobs = {}
    for combination in itertools.product(*grid.values()):
        given = dict(parameters or {}) | dict(zip(grid, combination, strict=True))
        values = typed_parameters(source, given)
        label = "-".join(f"{name}={values[name]}" for name in grid).replace(os.sep, "_")
        jobs[Path(out).resolve() / f"{source.stem}-{label}.ipynb"] = values
    run = functools.partial(run_notebook, source, timeout_s=timeout_s, folder=folder, progress=False)
    results: Iterator[tuple[Path, Callable[[], Path]]]
    if executor is None:
        results = ((path, functools.partial(run, path, values)) for path, values in jobs.items())
    else:
        futures = {executor.submit(run, path, values): path for path, values in jobs.items()}
        # Popped, because Dask would run again what somebody holds when it loses a worker.
        results = ((futures.pop(future), future.result) for future in concurrent.futures.as_completed(futures))
    errors = dict.fromkeys(jobs, "")
    for number, (path, result) in enumerate(results, start=1):
        try:
            result()
        except SpeedkitError as error:
            errors[path] = str(error)
        except Exception as error:  # the executor's: its process died, its cluster went away
            errors[path] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{number}/{len(jobs)} {path.stem}: {errors[path] or 'done'}", flush=True)
    write_table(Path(out) / f"{source.stem}-sweep.csv", jobs, grid)
    return errors


def write_table(path_csv: Path, runs: Mapping[Path, Mapping[str, Any]], names: Iterable[str]) -> None:
    """Write and print what comparisons show, by the notebook that ran -> its parameters, of which it has `names`."""
    rows = []
    for path, parameters in runs.items():
        record = path.with_suffix("") / "record.json"
        measurements = read_json(record)["measurements"] if record.exists() else []  # none of a run that failed
        for row in measurements:
            shown = {name: parameters[name] for name in names}
            shown |= {key: row.get(key) for key in SHOWN}
            rows.append(shown)
    if rows:
        table = pandas.DataFrame(rows)
        table.to_csv(path_csv, index=False)
        print(f"{table.to_string(index=False, float_format='%.3f')}\nalso in {path_csv}", flush=True)

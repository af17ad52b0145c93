"""What a notebook run leaves behind: one record of what ran, on what, what came out, and how claims fared."""

import ast
import functools
import itertools
import logging
import multiprocessing
import os
import re
import sys
import time
import types
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from speedkit import files
from speedkit.config import nearest
from speedkit.errors import SpeedkitError, UsageError
from speedkit.lab import provenance, records
from speedkit.lab.records import jsonable
from speedkit.machine import this_machine
from speedkit.renamed import spelling_of_today

if TYPE_CHECKING:
    from pandas import DataFrame

    from speedkit.fallbacks import EffectivePlan
    from speedkit.measure.compare import Comparison

INJECTED = "# Parameters"  # as papermill begins the cell of what it is given
FINITE = ConfigDict(allow_inf_nan=False)
RECORD_MIME = "application/vnd.speedkit.record+json"
Row = Mapping[str, Any]

TYPES: dict[str, Any] = {}  # that a parameter may have, as they are written
for kind in (int, float, str, bool):
    TYPES[kind.__name__] = kind
    TYPES[f"Optional[{kind.__name__}]"] = kind | None  # papermill, too, reads this way of writing it
    TYPES[f"list[{kind.__name__}]"] = list[kind]  # type: ignore[valid-type]


def start(notebook: str, needs: Sequence[str] = (), **parameters: Any) -> "NotebookRun":
    """Begin the record of a notebook run and print one line of provenance, with one line per missing capability.

    `needs` are capabilities of `Hardware.supports`; `parameters` are the notebook's, all of them.
    `scale` "auto" is full on an NVIDIA or AMD GPU and cpu elsewhere; SPEEDKIT_SCALE overrides it.
    """
    check_parameters(notebook)
    if sys.platform == "linux":  # in Python 3.14 no longer the default, and others do not know a notebook's classes
        multiprocessing.set_start_method("fork", force=True)
    # A lesson's own torch.compile on a CPU would else show that there is no compiler for GPUs.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    run = NotebookRun(notebook, parameters)
    commit = run.record["commit"] or "unknown"
    if run.record["dirty"]:
        commit += " with changes"
    versions = "torch {torch} · speedkit {speedkit}".format(**run.record["versions"])
    print(f"{run.hardware.gpu or run.hardware.cpu} · {versions}, commit {commit} · scale {run.scale}")
    for capability in needs:
        if reason := run.hardware.why_not(capability):
            print(f"no {capability} here: {reason}")
    return run


class NotebookRun:
    """One run of a notebook. Running a cell again replaces what that cell recorded before.

    `record` takes more under names of its own, as a tuning's optimizations.
    """

    def __init__(self, notebook: str, parameters: Row):
        self.notebook = notebook
        self.began_s = time.monotonic()
        self.hardware = this_machine(parameters.get("device") or "auto")
        self.scale = os.environ.get("SPEEDKIT_SCALE") or parameters.get("scale", "auto")
        if self.scale == "auto":
            on_gpu = self.hardware.device.type == "cuda"
            self.scale = "gpu" if on_gpu else "cpu"
        if self.scale not in records.SCALES:
            raise UsageError(f'there is no scale "{self.scale}": use auto, {", ".join(records.SCALES)}')
        commit, dirty = provenance.commit()
        self.record: dict[str, Any] = {
            "notebook": notebook,
            "scale": self.scale,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": _without_folders(parameters),
            "hardware": self.hardware.as_dict(),
            "versions": provenance.versions(),
            "commit": commit,
            "dirty": dirty,
            "plans": {},
            "fallbacks": [],
            "measurements": [],
            "tables": {},
            "checks": [],
        }

    def sizes(self, smoke: Row, cpu: Row, gpu: Row | None = None) -> types.SimpleNamespace:
        """Return the values of this run's scale by name: on a GPU those of `cpu`, but for what `gpu` holds."""
        by_scale = {"smoke": smoke, "cpu": cpu, "gpu": {**cpu, **(gpu or {})}}
        return types.SimpleNamespace(**by_scale[self.scale])

    @functools.cached_property
    def folder(self) -> Path:
        """The folder for files of this run, made when first asked for: SPEEDKIT_RUN_DIR, else a new one in `runs`."""
        name = f"{self.notebook}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        root = Path.cwd()
        if root.name == "notebooks":  # a kernel starts beside its notebook
            root = root.parent
        folder = Path(os.environ.get("SPEEDKIT_RUN_DIR") or root / "runs" / "notebooks" / name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def check(self, what: str, agrees: Any) -> None:
        """Print PASS or FAIL and record it; `save` raises when a check failed. `what` must not depend on the run."""
        passed = bool(agrees)
        print(f"{'PASS' if passed else 'FAIL'} {what}")
        _replace(self.record["checks"], {"check": what, "passed": passed}, "check")

    def tell(self, text: str) -> None:
        """Show `text` as Markdown: what was seen, in sentences with the numbers of this run."""
        from IPython import display

        display.display(display.Markdown(without_tags(text)))

    def measure(self, comparison: "Comparison | Row") -> None:
        """Record a comparison: `compare`'s, or the row that `compare_functions` returns."""
        if not isinstance(comparison, Mapping):
            comparison = comparison.as_measurement()
        _replace(self.record["measurements"], dict(comparison), "name", "a", "b")

    def table(self, name: str, rows: Sequence[Row]) -> "DataFrame":
        """Record named rows, units in their keys (`step_s`, `memory_bytes`); return them as a pandas DataFrame."""
        import pandas

        self.record["tables"][name] = jsonable(list(rows))
        return pandas.DataFrame(self.record["tables"][name]).map(without_tags)

    def plan(self, name: str, effective: "EffectivePlan") -> None:
        """Record a resolved plan: what was asked, what is honoured here, and why it falls back."""
        fallbacks = [{"plan": name, **vars(fallback)} for fallback in effective.fallbacks]
        self.record["plans"][name] = {"asked": effective.asked, "effective": effective.plan}
        others = [row for row in self.record["fallbacks"] if row["plan"] != name]
        self.record["fallbacks"] = others + fallbacks

    def finished(self) -> dict[str, Any]:
        """Return the whole record, with its seconds."""
        return jsonable(self.record | {"seconds": round(time.monotonic() - self.began_s, 1)})

    def save(self) -> None:
        """Write record.json into the run's folder and display the same object; then raise if a check failed."""
        from IPython import display, get_ipython

        record = self.finished()
        if problems := records.validate_record(record):
            raise SpeedkitError(f"the record of {self.notebook} is not valid: {'; '.join(problems)}")
        files.write_json(self.folder / "record.json", record)
        counts = ", ".join(f"{len(record[part])} {part}" for part in ("measurements", "tables", "checks"))
        line = f"record of {self.notebook}: {counts}"
        if get_ipython() is None:
            print(line)
        else:
            display.display({RECORD_MIME: record, "text/plain": line}, raw=True)
        failed = [row["check"] for row in record["checks"] if not row["passed"]]
        if failed:
            raise SpeedkitError(f"{len(failed)} of this notebook's checks failed: {'; '.join(failed)}")


def without_tags(value: Any) -> Any:
    """Return a text whose HTML is shown and not acted on: the name of a file may hold some. Others stay as they are."""
    if not isinstance(value, str):
        return value
    return re.sub("<(?=[a-zA-Z/!?])", "&lt;", value)


def _without_folders(values: Row) -> dict[str, Any]:
    """Return `values` with absolute paths as names: where something lies here is nobody else's business."""
    cleaned = dict(values)
    for key, value in values.items():
        if isinstance(value, str | Path) and os.path.isabs(value):
            cleaned[key] = Path(value).name
    return cleaned


def declared_types(notebook: str, source: str) -> dict[str, Any]:
    """Return the type of each parameter that a cell with this `source` declares, by name.

    Raises UsageError for anything but lines `name: type = literal`, and an import.
    """
    declared = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):  # of Optional
            continue
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation) not in TYPES:
            raise UsageError(f'{notebook}, parameters cell: "{ast.unparse(node)}" is not `name: type = literal`')
        declared[ast.unparse(node.target)] = TYPES[ast.unparse(node.annotation)]
    return declared


def typed_values(notebook: str, declared: Row, given: Row, *, strict: bool = False) -> dict[str, Any]:
    """Return the `given` parameters in the types that a notebook has `declared`, both by name.

    Raises UsageError for a name that it has not, or a value of another type: `strict`, also for a text of a number.
    """
    values = {}
    for name, value in given.items():
        if name not in declared:
            hint = spelling_of_today(name) or f"{nearest(name, declared)}: it has {', '.join(declared)}"
            raise UsageError(f'{notebook} has no parameter "{name}"{hint}')
        kind = TypeAdapter(declared[name], config=FINITE)
        try:
            values[name] = kind.validate_python(value, strict=strict)
        except ValidationError as error:
            raise UsageError(f"{notebook}: {name}={value!r} is not possible: {error.errors()[0]['msg']}") from error
    return values


def check_parameters(notebook: str) -> None:
    """Raise UsageError for a parameter that this notebook does not declare, or of another type.

    papermill passes on all that it is given, in a cell of its own.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return
    cells = shell.user_ns["In"]
    for before, source in itertools.pairwise(cells):
        if source.startswith(INJECTED):
            names = [ast.unparse(node.targets[0]) for node in ast.parse(source).body if isinstance(node, ast.Assign)]
            given = {name: shell.user_ns[name] for name in names}
            typed_values(notebook, declared_types(notebook, before), given, strict=True)


def _replace(rows: list[dict[str, Any]], new: dict[str, Any], *keys: str) -> None:
    """Add a row at the end, without those that agree with it in `keys`."""
    rows[:] = [row for row in rows if any(row[key] != new[key] for key in keys)] + [new]


def read_notebook(path: Path) -> Any:
    """Return the notebook at `path` as nbformat holds it. Raises UsageError when it is missing or is not a notebook."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # of many kinds: nbformat takes for granted what a notebook has
        raise UsageError(f"{path} cannot be read or is not a Jupyter notebook: name another") from error

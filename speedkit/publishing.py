"""Publishing: run notebooks on the machine at hand, keep what they showed and recorded, take in what others ran."""

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from speedkit import files
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.measure.provenance import commit, notebooks_folder
from speedkit.measure.schema import load_record, validate_record
from speedkit.notebooks import find_notebooks, is_current, run_notebook, visible_gpus
from speedkit.parameters import RECORD_MIME, code_cells, read_notebook, record_of, typed_parameters

BUSY_PERCENT = 5  # an idle GPU reports 0; a desktop's screen a few
MAX_BYTES = 300_000
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.~/:-])(/(home|root|Users|tmp|private|work|workspace|usr|opt|var|mnt|srv|data|content|kaggle)/[\w.-]+"
    r"|[A-Z]:\\\w+)")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook or record: published, current (nothing to do), failed, refused or left (no time)."""

    name: str
    state: str
    why: str = ""


def contract_problems(path: str | Path) -> list[str]:
    """Return why what the notebook at `path` shows cannot be published, a sentence each; [] when nothing is wrong."""
    path = Path(path)
    try:
        notebook = read_notebook(path)
    except UsageError as error:
        return [str(error)]
    problems, code = [], code_cells(notebook)
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        problems.append(f"its execution counts are {counts}, not 1 to {len(code)}: run it whole in a fresh kernel")
    outputs = [(number, output) for number, cell in enumerate(code, 1) for output in cell.outputs]
    for number, output in outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            what = f"text on stderr: {output.text.strip()[:60]}" if "text" in output else f"the error {output.ename}"
            problems.append(f"cell [{number}] shows {what}")
    for number, cell in enumerate(notebook.cells):
        text = json.dumps([cell.source, cell.get("outputs")]).replace("\\n", " ").replace("\\\\", "\\")
        if found := ABSOLUTE_PATH.search(text):
            problems.append(f"cell {number} holds the absolute path {found[0]}")
    records = sum(RECORD_MIME in output.get("data", {}) for _, output in outputs)
    if records != 1:
        return [*problems, f"{records} of its cells show a record, and one must"]
    record = record_of(notebook) or {}
    if record.get("notebook") != path.stem:
        problems.append(f"its record is that of {record.get('notebook')}")
    return problems + validate_record(record)


def clean(notebook: Any) -> Any:
    """Return `notebook`, changed in place, without what papermill, widgets and timing left in it."""
    for part in (notebook, *notebook.cells):
        for key in part.metadata.keys() - {"kernelspec", "language_info", "tags", "jupyter"}:
            del part.metadata[key]
        if not part.metadata.get("tags", True):
            del part.metadata["tags"]
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})]
    return notebook


def device_slug(hardware: Mapping[str, Any]) -> str:
    """Return the folder name for the records of a machine: `nvidia-h200`, `cpu-intel-xeon-2-cores`."""
    cpu = re.sub(r"\((r|tm|c)\)|\b(processor|cpu|\d+-core)\b|@.*?hz", " ", (hardware.get("cpu") or "unknown").lower())
    name = hardware.get("gpu") or f"cpu {cpu} {hardware.get('cores', 1)} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def publish(
    names: Sequence[str] | None, out: str | Path | None = None, budget_s: float | None = None, *, workload: str = "",
    timeout_s: float = 3600.0, force: bool = False, allow_changes: bool = False, progress: bool | str = "auto",
) -> list[Outcome]:  # fmt: skip
    """Run the notebooks `names` (None: all) here, in their auto profile, and write them and their records to `out`.

    What this machine has published to `out` from the same code is left, unless `force`. With `workload` only the record
    is written, as NN_name-workload.json. None starts when `budget_s` is spent or outlasts it. Raises SpeedkitError for
    a busy GPU, and for changes of the package since the commit that records would name, unless `allow_changes`.
    """
    sources, out = find_notebooks(names), Path(out or notebooks_folder())
    parameters = {"workload": workload} if workload else {}
    for source in sources:
        typed_parameters(source, parameters)
    refuse_busy_gpu()
    here = commit()
    if here and here[1] and not allow_changes:
        raise SpeedkitError(f"the package differs from commit {here[0]}, which the records would name: commit it first")
    end_s = time.monotonic() + (budget_s or float("inf"))
    records = out / "records" / device_slug(this_machine().as_dict())
    outcomes = []
    for source in sources:
        name, left_s = f"{source.stem}-{workload}".removesuffix("-"), min(timeout_s, end_s - time.monotonic())
        record, shown = records / f"{name}.json", out / source.name
        done = record.exists() and is_current(files.read_json(record), source)
        if not force and done and (workload or (shown.exists() and not is_stale(shown, source))):
            outcome = Outcome(name, "current")
        elif left_s < 1:
            outcome = Outcome(name, "left", f"the budget of {budget_s:.0f} s is spent")
        else:
            outcome = _publish_one(source, out, name, parameters, left_s, progress)
        outcomes.append(outcome)
        if progress:
            print(f"{name}: {outcome.state} {outcome.why}".rstrip(), flush=True)
    return outcomes


def _publish_one(
    source: Path, out: Path, name: str, parameters: dict[str, Any], timeout_s: float, progress: bool | str
) -> Outcome:
    ran = Path("runs", "publish", f"{name}.ipynb")
    try:
        with tempfile.TemporaryDirectory(prefix="speedkit-publish-") as folder, mock.patch.dict(
            os.environ, SPEEDKIT_PROFILE="", SPEEDKIT_PROGRESS="off", SPEEDKIT_RUN_DIR=folder):  # fmt: skip
            run_notebook(source, ran, parameters, timeout_s=timeout_s, progress=progress)
        executed = read_notebook(ran)
        record = record_of(executed) or {}
        problems = [] if is_current(record, source) else ["it has no record, or its code changed while it ran"]
        if not parameters:
            _write_notebook(ran, clean(executed))
            problems += contract_problems(ran)
        if problems:
            kept = ran.replace(ran.with_suffix(".failed.ipynb"))
            raise SpeedkitError(f"{'; '.join(problems)}. What did run is in {kept}")
        _install(out, name, record, None if parameters else executed)
        ran.unlink()
    except SpeedkitError as error:
        return Outcome(name, "failed", str(error))
    return Outcome(name, "published", f"on {device_slug(record['hardware'])}")


def _install(out: Path, name: str, record: dict[str, Any], notebook: Any = None) -> None:
    """Put a record, and its notebook if there is one, where they are published, each whole or not at all."""
    path = out / "records" / device_slug(record["hardware"]) / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, record)
        if notebook:
            _write_notebook(out / f"{name}.ipynb", notebook)
    except OSError as error:
        raise SpeedkitError(f"{out} cannot be written ({error.strerror}): name another with --out") from error


def _write_notebook(path: Path, notebook: Any) -> None:
    import nbformat

    with files.atomic(path) as temporary:
        nbformat.write(notebook, temporary)


def is_stale(executed: Path, source: Path | None = None) -> bool:
    """Whether what the notebook `executed` shows came from other code than that of `source`, itself by default."""
    return not is_current(record_of(read_notebook(executed)), source or executed)


def refuse_busy_gpu() -> None:
    """Raise SpeedkitError when another program computes on a visible GPU: its work would be in our measurements."""
    import pynvml  # the module of nvidia-ml-py
    import torch

    ours = int(torch.cuda.is_initialized())  # counted, since NVML and a container number processes differently
    for handle in visible_gpus().values():
        with contextlib.suppress(pynvml.NVMLError):  # what a virtual GPU does not tell cannot be asked
            others = max(len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - ours, 0)
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            if others or busy > BUSY_PERCENT:
                what = f"{pynvml.nvmlDeviceGetName(handle)} is busy (other processes: {others}, utilisation: {busy} %)"
                raise SpeedkitError(f"{what}: wait until it is free, then publish")


def import_published(folder: str | Path, into: str | Path | None = None) -> list[Outcome]:
    """Take in the records, and the notebooks' outputs, that `publish --out` wrote on another machine to `folder`.

    What does not fit today's code and the contract is refused. Raises UsageError when there is nothing to take in.
    """
    folder, into = Path(folder), Path(into or notebooks_folder())
    paths = [*sorted(folder.glob("records/*/*.json")), *find_notebooks(None, folder)]
    if not paths:
        raise UsageError(f"{folder} holds no notebooks or records: name the folder that `publish --out` wrote")
    outcomes = []
    for path in paths:
        source, why = into / f"{path.stem.partition('-')[0]}.ipynb", ""
        try:
            _import(path, source)
        except SpeedkitError as error:
            why = str(error) if source.is_file() else f"there is no notebook {source.name} here"
        outcomes.append(Outcome(str(path.relative_to(folder)), "refused" if why else "published", why))
    return outcomes


def _import(path: Path, source: Path) -> None:
    if path.suffix == ".json":
        record = load_record(path)
        if record["notebook"] != source.stem or not is_current(record, source):
            raise SpeedkitError(f"it was made by another version of {source.name} or of the modules it measures")
        if device_slug(record["hardware"]) != path.parent.name:
            raise SpeedkitError(f"its machine is {device_slug(record['hardware'])}, not that of its folder")
        _install(source.parent, path.stem, record)
        return
    if problems := contract_problems(path):
        raise SpeedkitError("; ".join(problems))
    if is_stale(path, source) or is_stale(path):
        raise SpeedkitError("it was run from other code than is here")
    ours, theirs = read_notebook(source), read_notebook(path)
    for mine, run in zip(code_cells(ours), code_cells(theirs), strict=True):
        mine.outputs, mine.execution_count = run.outputs, run.execution_count
    _write_notebook(source, clean(ours))

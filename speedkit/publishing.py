"""Publishing: run notebooks on the machine at hand, keep what they showed and recorded, take in what others ran."""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.contract import clean, contract_problems, current_hash
from speedkit.errors import SpeedkitError, UsageError
from speedkit.notebooks import find_notebooks, notebooks_folder, run_notebook, visible_gpus
from speedkit.parameters import parameters_of, read_notebook, record_of

BUSY_PERCENT = 5  # an idle GPU reports 0; a desktop's screen a few


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook or record: published, current (nothing to do), failed, refused or left (no time)."""

    name: str
    state: str
    why: str = ""


def device_slug(hardware: Mapping[str, Any]) -> str:
    """Return the folder name for the records of a machine: `nvidia-h200`, `cpu-intel-xeon-2-cores`."""
    cpu = re.sub(r"\((r|tm|c)\)|\b(processor|cpu|\d+-core)\b|@.*?hz", " ", (hardware.get("cpu") or "unknown").lower())
    name = hardware.get("gpu") or f"cpu {cpu} {hardware.get('cores', 1)} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def publish(
    names: Sequence[str] | None, out: str | Path | None = None, budget_s: float | None = None, *,
    workload: str = "", timeout_s: float = 3600.0, force: bool = False, allow_changes: bool = False,
    progress: bool | str = "auto",
) -> list[Outcome]:  # fmt: skip
    """Run the notebooks `names` (None: all) here, in their auto profile, and write them and their records to `out`.

    `out` is by default the notebooks' own folder. A notebook that this machine has published from the same code is
    left, unless `force`. With `workload` only the record is written, as NN_name-workload.json: the notebook shows its
    default. None starts when `budget_s` is spent, and none runs longer than what is left of it or `timeout_s`. One
    that fails leaves what was published before. Raises SpeedkitError for a busy GPU, and for changes of the package
    since the commit that records would name, unless `allow_changes`.
    """
    from speedkit.hardware import this_machine

    sources = find_notebooks(names)
    out = Path(out) if out else notebooks_folder()
    if workload:
        for source in sources:
            if "workload" not in parameters_of(source):
                raise UsageError(f"{source.name} has no parameter workload: publish it without")
    refuse_busy_gpu()
    if not allow_changes:
        _refuse_changes()
    began_s = time.monotonic()
    slug = device_slug(this_machine().as_dict())
    outcomes = []
    for source in sources:
        name = f"{source.stem}-{workload}" if workload else source.stem
        left_s = min(timeout_s, budget_s - (time.monotonic() - began_s) if budget_s else timeout_s)
        if not force and _is_published(source, out, slug, name):
            outcome = Outcome(name, "current")
        elif left_s < 1:
            outcome = Outcome(name, "left", f"the budget of {budget_s:.0f} s is spent")
        else:
            outcome = _publish_one(source, out, name, {"workload": workload} if workload else {}, left_s, progress)
        outcomes.append(outcome)
        if progress:
            print(f"{name}: {outcome.state} {outcome.why}".rstrip(), flush=True)
    return outcomes


def _publish_one(
    source: Path, out: Path, name: str, parameters: dict[str, Any], timeout_s: float, progress: bool | str
) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="speedkit-publish-") as folder:
        failed = Path(folder) / f"{source.stem}.failed.ipynb"
        try:
            with _environment(SPEEDKIT_PROFILE="", SPEEDKIT_PROGRESS="off", SPEEDKIT_RUN_DIR=folder):
                ran = run_notebook(source, Path(folder) / source.name, parameters,
                                   timeout_s=timeout_s, progress=progress)  # fmt: skip
            executed = read_notebook(ran)
            record = record_of(executed)
            if not record or record.get("code_sha256") != current_hash(source):
                raise SpeedkitError("it has no record, or its code changed while it ran: publish it again")
            if not parameters:
                _write_notebook(ran, clean(executed))
                if problems := contract_problems(ran):
                    raise SpeedkitError("; ".join(problems))
            _install(out, name, record, None if parameters else ran)
        except SpeedkitError as error:
            half_run = failed if failed.exists() else Path(folder) / source.name
            why = str(error).partition(". What did run is in ")[0]
            return Outcome(name, "failed", f"{why}. {_keep(half_run, name)}".rstrip())
    return Outcome(name, "published", f"on {device_slug(record['hardware'])}")


def _keep(half_run: Path, name: str) -> str:
    """Copy a notebook that failed out of the temporary folder, and say where it is; "" if nothing ran."""
    if not half_run.exists():
        return ""
    kept = Path("runs") / "publish" / f"{name}.failed.ipynb"
    kept.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(kept, half_run.read_text(encoding="utf-8"))
    return f"What did run is in {kept}"


def _install(out: Path, name: str, record: dict[str, Any], notebook: Path | None) -> None:
    """Put a record, and its notebook if there is one, where they are published, each whole or not at all."""
    folder = out / "records" / device_slug(record["hardware"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / f"{name}.json", record)
        if notebook:
            files.write_text(out / f"{name}.ipynb", notebook.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpeedkitError(f"{out} cannot be written ({error.strerror}): name another with --out") from error


def _write_notebook(path: Path, notebook: Any) -> None:
    import nbformat

    files.write_text(path, nbformat.writes(notebook, version=4) + "\n")


def _is_published(source: Path, out: Path, slug: str, name: str) -> bool:
    """Whether `out` holds this device's record `name`, and if it has no workload a notebook, both of today's code."""
    path = out / "records" / slug / f"{name}.json"
    if not path.exists() or files.read_json(path).get("code_sha256") != current_hash(source):
        return False
    return name != source.stem or ((out / source.name).exists() and not is_stale(out / source.name, source))


def is_stale(executed: Path, source: Path | None = None) -> bool:
    """Whether what the notebook `executed` shows came from other code than that of `source`, itself by default."""
    record = record_of(read_notebook(executed))
    return not record or record.get("code_sha256") != current_hash(source or executed)


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    """Set environment variables for the kernels started inside."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def refuse_busy_gpu() -> None:
    """Raise SpeedkitError when another program computes on a visible GPU: its work would be in our measurements."""
    import pynvml
    import torch

    ours = int(torch.cuda.is_initialized())  # counted, since NVML and a container number processes differently

    for handle in visible_gpus().values():
        with contextlib.suppress(pynvml.NVMLError):  # what a virtual GPU does not tell cannot be asked
            name = pynvml.nvmlDeviceGetName(handle)
            others = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - ours
            busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            if others > 0 or busy > BUSY_PERCENT:
                raise SpeedkitError(f"{name} is busy (other processes: {max(others, 0)}, utilisation: {busy} %): "
                                    "wait until it is free, then publish")  # fmt: skip


def _refuse_changes() -> None:
    from speedkit.measure.provenance import commit

    here = commit()
    if here and here[1]:
        raise SpeedkitError(f"the package differs from commit {here[0]}, which the records would name: commit it first")


def import_published(folder: str | Path, into: str | Path | None = None) -> list[Outcome]:
    """Take in the notebooks and records that `publish --out` wrote on another machine to `folder`.

    Each must fit today's code and the contract, or is refused with the reason; the others are installed. Of a
    notebook its outputs are taken, into the cells that are here. Raises UsageError when there is nothing to take in.
    """
    folder, into = Path(folder), Path(into) if into else notebooks_folder()
    records = sorted(folder.glob("records/*/*.json"))
    notebooks = [path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")) if "." not in path.stem]
    if not records and not notebooks:
        raise UsageError(f"{folder} holds no notebooks or records: name the folder that `publish --out` wrote")
    outcomes = []
    for path in [*records, *notebooks]:
        name = str(path.relative_to(folder))
        try:
            (_import_record if path.suffix == ".json" else _import_notebook)(path, into)
            outcomes.append(Outcome(name, "published"))
        except SpeedkitError as error:
            outcomes.append(Outcome(name, "refused", str(error)))
    return outcomes


def _import_record(path: Path, into: Path) -> None:
    from speedkit.measure.schema import load_record

    record = load_record(path)
    source = into / f"{path.stem.partition('-')[0]}.ipynb"
    if not source.is_file() or record["notebook"] != source.stem:
        raise SpeedkitError(f"there is no notebook {source.name} here that it is a record of")
    if record["code_sha256"] != current_hash(source):
        raise SpeedkitError(f"it was made by another version of {source.name} or of the modules it measures")
    if device_slug(record["hardware"]) != path.parent.name:
        raise SpeedkitError(f"its machine is {device_slug(record['hardware'])}, not that of its folder")
    _install(into, path.stem, record, None)


def _import_notebook(path: Path, into: Path) -> None:
    if problems := contract_problems(path):
        raise SpeedkitError("; ".join(problems))
    source = into / path.name
    if not source.is_file():
        raise SpeedkitError(f"there is no notebook {path.name} here")
    if is_stale(path, source) or is_stale(path):
        raise SpeedkitError("it was run from other code than is here")
    ours, theirs = read_notebook(source), read_notebook(path)
    pairs = [[cell for cell in notebook.cells if cell.cell_type == "code"] for notebook in (ours, theirs)]
    for mine, run in zip(*pairs, strict=True):
        mine.outputs, mine.execution_count = run.outputs, run.execution_count
    with tempfile.TemporaryDirectory(prefix="speedkit-import-") as folder:
        merged = Path(folder) / path.name
        _write_notebook(merged, clean(ours))
        if problems := contract_problems(merged):
            raise SpeedkitError("; ".join(problems))
        files.write_text(source, merged.read_text(encoding="utf-8"))

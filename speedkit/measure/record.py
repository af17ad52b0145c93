"""What a notebook run leaves behind: one record of what ran, on what, and what came out of it."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from speedkit import files
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.measure import claims, provenance, schema
from speedkit.measure.schema import load_record, plain, validate_record

MIME = "application/vnd.speedkit.record+json"


def start(notebook: str, modules: Sequence[str] = (), needs: Sequence[str] = (), **parameters: Any) -> "NotebookRun":
    """Begin the record of a notebook run and print one line of provenance, with one line per missing capability.

    `modules` are those whose source, with the notebook's own code, decides whether recorded figures are current;
    `needs` are capabilities of `Hardware.supports`; `parameters` are the notebook's, all of them.
    `profile` "auto" is full on an NVIDIA or AMD GPU and cpu elsewhere; SPEEDKIT_PROFILE overrides it.
    """
    run = NotebookRun(notebook, modules, parameters)
    print(_header(run.record))
    for capability in needs:
        if reason := run.hardware.why_not(capability):
            print(f"no {capability} here: {reason}")
    return run


class NotebookRun:
    """One run of a notebook. Running a cell again replaces what that cell recorded before.

    What stands at the end of a cell returns nothing that Jupyter would echo, but for `table` and `judge`.
    """

    def __init__(self, notebook: str, modules: Sequence[str], parameters: Mapping[str, Any]):
        self.notebook = notebook
        self.hardware = this_machine(parameters.get("device") or "auto")
        self.profile = _profile(parameters.get("profile", "auto"), self.hardware.device)
        self.power = provenance.PowerLog(self.hardware.device)
        self._folder: Path | None = None
        path = provenance.find_notebook(notebook)
        commit, dirty = provenance.commit() or (None, None)
        self.record: dict[str, Any] = {
            "schema": schema.SCHEMA,
            "notebook": notebook,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "profile": self.profile,
            "parameters": _without_folders(plain(parameters)),
            "hardware": _without_folders(plain(self.hardware.as_dict())),
            "versions": provenance.versions(),
            "commit": commit,
            "dirty": dirty,
            "modules": sorted(modules),
            "code_sha256": provenance.code_sha256(path, modules) if path else None,
            "plans": {}, "fallbacks": [], "measurements": [], "tables": {}, "verdicts": [],
        }
        self.power.sample("start")

    def pick(self, **by_profile: Any) -> Any:
        """Return the value for this run's profile: `run.pick(smoke=2, cpu=10, full=100)`."""
        if self.profile not in by_profile:
            raise UsageError(f"pick() has no value for the profile {self.profile}: give smoke, cpu and full")
        return by_profile[self.profile]

    @property
    def folder(self) -> Path:
        """The folder for files of this run, made when first asked for: SPEEDKIT_RUN_DIR, else a new one in `runs`."""
        if self._folder is None:
            self._folder = _run_folder(self.notebook)
        return self._folder

    def check(self, what: str, agrees: Any) -> None:
        """Print PASS or FAIL and record it; `save` raises when a check failed. `what` must not depend on the run."""
        passed = bool(agrees)
        print(f"{'PASS' if passed else 'FAIL'} {what}")
        self._verdict(what, None, "passed" if passed else "failed")

    def verdict(self, claim: str, verdict: str, why: str) -> None:
        """Record how a guide's claim (its id in notebooks/claims.csv) fared, with the evidence in one sentence."""
        if verdict not in schema.CLAIM_VERDICTS:
            raise UsageError(f'verdict "{verdict}" on {claim} is not one of {", ".join(schema.CLAIM_VERDICTS)}')
        known = claims.read_claims()
        if known and claim not in known:
            raise UsageError(f'there is no claim "{claim}" in notebooks/claims.csv')
        print(f"{claim} {verdict}: {why}")
        self._verdict(why, claim, verdict)

    def judge(self, claim: str, measurement: Any, needs_gpu: bool = False) -> str:
        """Record and return how a measured ratio answers a promised speed-up, by the rule in `claims.judge`.

        With `needs_gpu` (the promise is about GPUs) a run without one records the verdict needs_gpu.
        """
        low, high = claims.promised(claim)
        found = schema.as_measurement(measurement)
        figures = (f"promised {low:.2f} to {high:.2f}x, "
                   f"measured {found['ratio']:.2f}x ({found['low']:.2f} to {found['high']:.2f})")
        if needs_gpu and self.hardware.device.type != "cuda":
            verdict, figures = "needs_gpu", f"{figures} on a machine without the GPU that it is about"
        else:
            verdict = claims.judge((low, high), found)
        self.verdict(claim, verdict, figures)
        return verdict

    def measure(self, comparison: Any) -> None:
        """Record a comparison (`compare`'s, or a dict as its `as_measurement()` gives) with power and clocks now."""
        found = schema.as_measurement(comparison)
        _replace(self.record["measurements"], found, ("name", "a", "b"))
        self.power.sample(found["name"])

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Record named rows, units in their keys (`step_s`, `memory_bytes`); return them as a pandas DataFrame."""
        import pandas

        if not all(isinstance(row, Mapping) for row in rows):
            raise UsageError(f'table "{name}" needs one dict per row, such as {{"workers": 2, "step_s": 0.1}}')
        self.record["tables"][name] = files.finite(plain(list(rows)))
        return pandas.DataFrame(self.record["tables"][name])

    def plan(self, name: str, effective: Any) -> None:
        """Record a resolved plan (`Effective`): what was asked, what this machine honours, and why it falls back."""
        got = plain(effective.plan)
        fallbacks = [{"plan": name, **plain(fallback)} for fallback in effective.fallbacks]
        asked = {**got, **{fallback["field"]: fallback["asked"] for fallback in fallbacks}}
        self.record["plans"][name] = {"asked": asked, "effective": got}
        others = [fallback for fallback in self.record["fallbacks"] if fallback["plan"] != name]
        self.record["fallbacks"] = others + fallbacks

    def section(self, name: str, value: Any) -> None:
        """Record something more under a name of its own, as a climb does with its rungs."""
        if name in schema.KEYS:
            raise UsageError(f'a record\'s "{name}" is written by its own function: choose another name')
        self.record[name] = files.finite(plain(value))

    def recorded(self) -> list[dict[str, Any]]:
        """Return the records of this notebook that other machines left in notebooks/records, GPUs first."""
        notebooks = provenance.notebooks_folder()
        paths = sorted((notebooks / "records").glob(f"*/{self.notebook}*.json")) if notebooks else []
        found = [load_record(path) for path in paths if path.stem.partition("-")[0] == self.notebook]
        here = self.record["hardware"]
        others = [record for record in found if _machine(record["hardware"]) != _machine(here)]
        return sorted(others, key=lambda record: not record["hardware"].get("gpu"))

    def save(self) -> None:
        """Write record.json into the run's folder and display the same object.

        Raises SpeedkitError, after writing, when a check failed: a run with a failed check is not a good run.
        """
        self.power.sample("save")
        record = files.finite({**self.record, **self.power.summary()})
        if problems := validate_record(record):
            raise SpeedkitError(f"the record of {self.notebook} is not valid: {'; '.join(problems)}")
        files.write_json(self.folder / "record.json", record)
        _display(record)
        if failed := [entry["check"] for entry in record["verdicts"] if entry["verdict"] == "failed"]:
            raise SpeedkitError(f"{len(failed)} of this notebook's checks failed: {'; '.join(failed)}")

    def _verdict(self, check: str, claim: str | None, verdict: str) -> None:
        entry = {"check": check, "claim": claim, "verdict": verdict}
        _replace(self.record["verdicts"], entry, ("claim",) if claim else ("claim", "check"))


def _without_folders(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with the last name only of each absolute path: where it lay is nobody else's business."""
    return {key: Path(value).name if isinstance(value, str) and os.path.isabs(value) else value
            for key, value in values.items()}


def _header(record: Mapping[str, Any]) -> str:
    """Return device, versions, commit and profile in one line."""
    hardware, commit = record["hardware"], record["commit"]
    device = hardware.get("gpu") or hardware.get("cpu") or hardware["device"]
    source = f"commit {commit}{' with changes' if record['dirty'] else ''}" if commit else "no commit"
    versions = f"torch {record['versions']['torch']} · speedkit {record['versions']['speedkit']}"
    return f"{device} · {versions}, {source} · profile {record['profile']}"


def _replace(rows: list[dict[str, Any]], row: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Put `row` in the place of the one that agrees in `keys`, else at the end."""
    for index, other in enumerate(rows):
        if all(other[key] == row[key] for key in keys):
            rows[index] = row
            return
    rows.append(row)


def _machine(hardware: Mapping[str, Any]) -> tuple[Any, ...]:
    return hardware.get("gpu") or None, hardware.get("cpu"), hardware.get("cores")


def _profile(asked: str, device: torch.device) -> str:
    name = os.environ.get("SPEEDKIT_PROFILE") or asked
    if name == "auto":
        return "full" if device.type == "cuda" else "cpu"
    if name not in schema.PROFILES:
        raise UsageError(f'there is no profile "{name}": use auto, {", ".join(schema.PROFILES)}')
    return name


def _run_folder(notebook: str) -> Path:
    """Return the folder that SPEEDKIT_RUN_DIR names, else a new one in `runs`, or a temporary one if it must be."""
    named = os.environ.get("SPEEDKIT_RUN_DIR")
    notebooks, base = provenance.notebooks_folder(), Path.cwd()
    if notebooks and base.resolve() == notebooks.resolve():
        base = base.parent  # a kernel starts beside its notebook: keep `runs` out of the notebooks' folder
    stamp = f"{notebook}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder = Path(named) if named else base / "runs" / "notebooks" / stamp
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        reason = "not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if named:
        raise UsageError(f"SPEEDKIT_RUN_DIR={named} cannot be used ({reason}): name a folder that can be written")
    return Path(tempfile.mkdtemp(prefix=f"speedkit-{notebook}-"))


def _display(record: dict[str, Any]) -> None:
    """Show the record as an output that carries it whole, and as one line; outside of IPython only the line."""
    checks = sum(entry["claim"] is None for entry in record["verdicts"])
    line = (f"record of {record['notebook']}: {len(record['measurements'])} measurements, "
            f"{len(record['tables'])} tables, {checks} checks")
    ipython = sys.modules.get("IPython")
    if ipython and ipython.get_ipython():
        ipython.display.display({MIME: record, "text/plain": line}, raw=True)
    else:
        print(line)

"""What a notebook run leaves behind: one record of what ran, on what, and what came out of it."""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from speedkit import files
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.measure import claims, provenance, schema
from speedkit.measure.schema import plain
from speedkit.parameters import RECORD_MIME


def start(notebook: str, modules: Sequence[str] = (), needs: Sequence[str] = (), **parameters: Any) -> "NotebookRun":
    """Begin the record of a notebook run and print one line of provenance, with one line per missing capability.

    `modules` are those whose source, with the notebook's own code, decides whether recorded figures are current;
    `needs` are capabilities of `Hardware.supports`; `parameters` are the notebook's, all of them.
    `profile` "auto" is full on an NVIDIA or AMD GPU and cpu elsewhere; SPEEDKIT_PROFILE overrides it.
    """
    run = NotebookRun(notebook, modules, parameters)
    versions, commit = run.record["versions"], run.record["commit"]
    source = f"commit {commit}{' with changes' if run.record['dirty'] else ''}" if commit else "no commit"
    print(f"{run.hardware.gpu or run.hardware.cpu} · torch {versions['torch']} · speedkit {versions['speedkit']}, "
          f"{source} · profile {run.profile}")
    for capability in needs:
        if reason := run.hardware.why_not(capability):
            print(f"no {capability} here: {reason}")
    return run


class NotebookRun:
    """One run of a notebook. Running a cell again replaces what that cell recorded before."""

    def __init__(self, notebook: str, modules: Sequence[str], parameters: Mapping[str, Any]):
        self.notebook = notebook
        self.hardware = this_machine(parameters.get("device") or "auto")
        self.profile = os.environ.get("SPEEDKIT_PROFILE") or parameters.get("profile", "auto")
        if self.profile == "auto":
            self.profile = "full" if self.hardware.device.type == "cuda" else "cpu"
        if self.profile not in schema.PROFILES:
            raise UsageError(f'there is no profile "{self.profile}": use auto, {", ".join(schema.PROFILES)}')
        self.power = provenance.PowerLog(self.hardware.device)
        path = provenance.find_notebook(notebook)
        commit, dirty = provenance.commit() or (None, None)
        self.record: dict[str, Any] = {
            "schema": 1, "notebook": notebook, "profile": self.profile,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "parameters": plain(parameters), "hardware": plain(self.hardware.as_dict()),
            "versions": provenance.versions(), "commit": commit, "dirty": dirty, "modules": sorted(modules),
            "code_sha256": provenance.code_sha256(path, modules) if path else None,
            "plans": {}, "fallbacks": [], "measurements": [], "tables": {}, "verdicts": [],
        }  # fmt: skip
        self.power.sample("start")

    def pick(self, **by_profile: Any) -> Any:
        """Return the value for this run's profile: `run.pick(smoke=2, cpu=10, full=100)`."""
        return by_profile[self.profile]

    @functools.cached_property
    def folder(self) -> Path:
        """The folder for files of this run, made when first asked for: SPEEDKIT_RUN_DIR, else a new one in `runs`."""
        here = Path.cwd()
        base = here.parent if here.name == "notebooks" else here  # a kernel starts beside its notebook
        new = base / "runs" / "notebooks" / f"{self.notebook}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        folder = Path(os.environ.get("SPEEDKIT_RUN_DIR") or new)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"SPEEDKIT_RUN_DIR {folder} cannot be made ({error.strerror}): name another") from error
        return folder

    def check(self, what: str, agrees: Any) -> None:
        """Print PASS or FAIL and record it; `save` raises when a check failed. `what` must not depend on the run."""
        print(f"{'PASS' if agrees else 'FAIL'} {what}")
        row = {"check": what, "claim": None, "verdict": "passed" if agrees else "failed"}
        _put(self.record["verdicts"], row, "claim", "check")

    def verdict(self, claim: str, verdict: str, why: str) -> None:
        """Record how a guide's claim (its id in notebooks/claims.csv) fared, with the evidence in one sentence."""
        claims.read_claim(claim)
        print(f"{claim} {verdict}: {why}")
        _put(self.record["verdicts"], {"check": why, "claim": claim, "verdict": verdict}, "claim")

    def judge(self, claim: str, measurement: Any, needs_gpu: bool = False) -> str:
        """Record and return how a measured ratio answers a promised speed-up (of GPUs, with `needs_gpu`)."""
        promise, found = claims.promised(claim), _row(measurement)
        why = "promised {:.2f} to {:.2f}x, ".format(*promise)
        why += "measured {ratio:.2f}x ({low:.2f} to {high:.2f})".format_map(found)
        verdict = claims.judge(promise, found)
        if needs_gpu and self.hardware.device.type != "cuda":
            verdict, why = "needs_gpu", f"{why} on a machine without the GPU that it is about"
        self.verdict(claim, verdict, why)
        return verdict

    def measure(self, comparison: Any) -> None:
        """Record a comparison (`compare`'s, or a dict as its `as_measurement()` gives) with power and clocks now."""
        found = _row(comparison)
        _put(self.record["measurements"], found, "name", "a", "b")
        self.power.sample(found["name"])

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Record named rows, units in their keys (`step_s`, `memory_bytes`); return them as a pandas DataFrame."""
        import pandas

        self.record["tables"][name] = files.finite(plain(list(rows)))
        return pandas.DataFrame(self.record["tables"][name])

    def plan(self, name: str, effective: Any) -> None:
        """Record a resolved plan (`Effective`): what was asked, what this machine honours, and why it falls back."""
        got, fallbacks = plain(effective.plan), [{"plan": name, **plain(found)} for found in effective.fallbacks]
        asked = got | {row["field"]: row["asked"] for row in fallbacks}
        self.record["plans"][name] = {"asked": asked, "effective": got}
        self.record["fallbacks"] = [row for row in self.record["fallbacks"] if row["plan"] != name] + fallbacks

    def section(self, name: str, value: Any) -> None:
        """Record something more under a name of its own, as a climb does with its rungs."""
        self.record[name] = files.finite(plain(value))

    def recorded(self) -> list[dict[str, Any]]:
        """Return the records of this notebook that other machines left in notebooks/records, GPUs first."""
        machine = itemgetter("gpu", "cpu", "cores")
        found = schema.published(provenance.notebooks_folder() / f"{self.notebook}.ipynb").values()
        return [record for record in found if machine(record["hardware"]) != machine(self.record["hardware"])]

    def save(self) -> None:
        """Write record.json into the run's folder and display the same object; then raise if a check failed."""
        self.power.sample("save")
        record = files.finite({**self.record, **self.power.summary()})
        if problems := schema.validate_record(record):
            raise SpeedkitError(f"the record of {self.notebook} is not valid: {'; '.join(problems)}")
        files.write_json(self.folder / "record.json", record)
        checks = [row["claim"] for row in record["verdicts"]].count(None)
        line = (f"record of {self.notebook}: {len(record['measurements'])} measurements, "
                f"{len(record['tables'])} tables, {checks} checks")
        ipython = sys.modules.get("IPython")
        if ipython and ipython.get_ipython():
            ipython.display.display({RECORD_MIME: record, "text/plain": line}, raw=True)
        else:
            print(line)
        if failed := [entry["check"] for entry in record["verdicts"] if entry["verdict"] == "failed"]:
            raise SpeedkitError(f"{len(failed)} of this notebook's checks failed: {'; '.join(failed)}")


def _row(comparison: Any) -> dict[str, Any]:
    return plain(comparison.as_measurement() if hasattr(comparison, "as_measurement") else comparison)


def _put(rows: list[dict[str, Any]], new: dict[str, Any], *keys: str) -> None:
    """Add a row at the end, without those that agree with it in `keys`."""
    rows[:] = [row for row in rows if any(row[key] != new[key] for key in keys)] + [new]

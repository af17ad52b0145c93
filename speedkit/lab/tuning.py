"""A tuning of a workload, and its record: what was found, on which machine, by which version."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speedkit import display
from speedkit.busy import others, threads_beside
from speedkit.config import to_yaml
from speedkit.errors import stop_in_words
from speedkit.fallbacks import resolve
from speedkit.files import (
    claim_folder,
    folder_held,
    write_json,
    write_quarantine,
    write_text,
)
from speedkit.lab.record import NotebookRun
from speedkit.machine import Hardware, this_machine
from speedkit.measure.candidates import horizon_of
from speedkit.measure.checked_file import read_or_none, set_aside
from speedkit.measure.optimizations import Optimization, named
from speedkit.measure.stages import Row, Stage, Tuning
from speedkit.measure.stats import LOOKS
from speedkit.measure.tune import find_plan
from speedkit.measure.words import device_name, in_short, ratio_text
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.progress import wanted
from speedkit.workload import Workload

BUDGET_S = 240.0  # of a tuning on a machine of its own
BUDGETS_S = {"speech": 330.0}  # of what needs longer trainings before its quality is decided


@stop_in_words()
def tune(
    workload: Workload,
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    cache_dir: str | Path | None = None,
    budget_s: float | None = None,
    horizon: int | None = None,
    optimizations: Sequence[str] | None = None,
    pairs: int = LOOKS[-1],
    seeds: int = 3,
    reserved_s: float = 0.0,
    progress: bool | str = "auto",
) -> "TuningRecord":
    """Try every optimization on `workload`, keep what is proven to be faster, and return the record of it.

    The optimization that promises most, by a breakdown of the best plan so far, is measured against that plan, and kept
    when it is faster and its losses are as promised. Then optimizations are left out again, final figures are measured
    in fresh turns, and both ends are trained to compare quality. The model is made anew for each plan: what its
    function prints is not shown.

    `budget_s` is for all of it (`usual_budget_s` where nobody says), `reserved_s` of it for what the caller does before
    and after; trainings take up to a quarter more where the rest has used it up. `horizon` is the steps of the training
    that the plan is for, by which compiling has to pay: by default the recipe's, or on a GPU 20,000 if these are more.
    `pairs` is the most that a comparison has, `seeds` the trainings of each plan, more where these do not decide,
    `optimizations` those to try.
    `out` gets record.json and plan.yaml, and tune.json, from which `resume` goes on. Raises UsageError for a budget
    too short for one optimization.
    """
    chosen = named(optimizations)
    recipe = recipe or workload.recipe
    workload = dataclasses.replace(workload, model=functools.partial(silently, workload.model))
    folder = None
    with contextlib.ExitStack() as held:
        if out is not None:
            folder = claim_folder(out, "tune", resume)
            held.enter_context(folder_held(folder))
        hardware = this_machine(device)
        job = Tuning(
            workload=workload,
            recipe=recipe,
            hardware=hardware,
            budget_s=budget_s or usual_budget_s(hardware, workload.name),
            horizon=horizon or horizon_of(recipe, len(workload.train), hardware),
            pairs=pairs,
            seeds=seeds,
            options={"device": device, "cache_dir": cache_dir},
            out=folder,
            progress=progress,
            say=functools.partial(print, flush=True) if wanted(progress) else lambda text: None,
        )
        if not job.results:
            job.began_s -= reserved_s
        record = job.once(Stage("record"), make_record, job, chosen)
        if folder is not None:
            leave(job, record, folder)
    return TuningRecord(record)


def usual_budget_s(hardware: Hardware, workload: str, *, look: Callable[[], Mapping[str, float]] = others) -> float:
    """Return the seconds of a tuning where nobody says: up to twice as many where others use a CPU's cores."""
    budget_s = BUDGETS_S.get(workload, BUDGET_S)
    if hardware.device.type != "cpu":
        return budget_s
    left = threads_beside(sum(look().values()), hardware.threads)
    return budget_s * min(2.0, hardware.threads / left)


class TuningRecord(dict[str, Any]):
    """The record of a tuning: a mapping, as record.json has it, that shows its result."""

    def __repr__(self) -> str:
        return "\n".join(in_short(self))

    def _repr_html_(self) -> str:
        tried = [row for row in self["optimizations"] if row["ratio"]]
        longest = max((row["high"] for row in tried), default=1.0)
        rows = []
        for row in tried:
            ends = display.bar(row["low"] / longest, row["high"] / longest)
            rows.append((row["optimization"], row["change"], ratio_text(row), row["why"], ends))
        title = f"{self['workload']['name']} on {device_name(self)}"
        columns = ("optimization", "change", "times as fast", "kept or not", "")  # the bar, too wide where little fits
        return display.table(title, columns, rows, below=f"{self!r}\n{Plan(**self['plan'])!r}")


def make_record(job: Tuning, chosen: Sequence[Optimization]) -> Row:
    """Go through all stages of a tuning; return its record."""
    job.say(f"tuning {job.workload.name} on {job.hardware.name}, with a budget of {job.budget_s:.0f} s")
    run = NotebookRun("90_tune", {"workload": job.workload.name, "budget_s": job.budget_s, "seeds": job.seeds})
    found = find_plan(job, chosen)
    for name, plan in {"final": found["plan"], "careful": "careful"}.items():
        run.plan(name, resolve(plan, job.hardware))
    run.record |= found
    run.record["quarantined"] = {as_text(path): as_text(why) for path, why in job.quarantined.items()}
    return run.finished()


def as_text(name: str) -> str:
    """Return `name` as a text that every file and page can hold: that of a file may be bytes which are none."""
    return name.encode(errors="backslashreplace").decode()


def leave(job: Tuning, record: Row, folder: Path) -> None:
    """Write what a tuning leaves in `folder`; a record.json that is not this `record` is set aside."""
    path = folder / "record.json"
    if path.exists() and read_or_none(path) != record:
        set_aside(path, job.say)
    write_text(folder / "plan.yaml", to_yaml(Plan(**record["plan"])))
    write_json(path, record)
    if job.quarantined:
        write_quarantine(folder / "quarantine.csv", job.quarantined)


def silently(make: Callable[[], Any]) -> Any:
    """Return `make()`; what it prints is not seen."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make()

"""The climb: every rung tried against the best plan so far, kept only if faster beyond the noise and as good."""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedkit import closing
from speedkit.ceilings import ceilings
from speedkit.config import to_yaml
from speedkit.errors import UsageError
from speedkit.files import claim_folder, read_json, write_json, write_text
from speedkit.hardware import this_machine
from speedkit.ladder import Rung, candidates, named
from speedkit.measure.compare import Comparison
from speedkit.measure.parity import parity, quality_of, time_to_quality
from speedkit.measure.record import NotebookRun
from speedkit.measure.stages import Stages, read_state
from speedkit.plan import Plan, resolve
from speedkit.predict import Profile, affordable_pairs, changed, middle, plan_of, text
from speedkit.recipe import Recipe
from speedkit.train.progress import wanted

# Whose source, with that of notebook 90, decides whether a recorded climb is current.
MODULES = tuple(
    f"speedkit.{name}"
    for name in ("climb", "closing", "ladder", "predict", "measure.compare", "measure.stats", "train.loop")
)
LARGE = 1.25  # a gain that a few windows show
INNER = {"fields", "promises", "stage", "compiles", "set_up_s", "measurement"}  # of a rung's row, for the climb alone
Row = dict[str, Any]


def climb(
    workload: Any,
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    cache_dir: str | Path | None = None,
    budget_s: float = 480.0,
    rungs: Sequence[str] | None = None,
    pairs: int = 60,
    window_s: float = 0.125,
    seeds: int | None = None,
    progress: bool | str = "auto",
) -> Row:
    """Climb the ladder on `workload` and return the record of it.

    A ledger of the naive plan says where the time goes. By it each rung's gain is predicted, anew after each one kept.
    The most promising is applied to the best plan, measured against it in turns, and kept when the interval's low end
    is above the noise floor and the losses are what the rung promises. At the end each kept rung is dropped once, and
    left out if that loses nothing; the final figures come from fresh windows against `Plan()` and `Plan.careful()`;
    both ends are trained over paired `seeds` (5, or as many as `budget_s` allows) to show that the result is as good.

    `pairs` is the most windows of each plan in a comparison, `rungs` names those to try, all by default. `out` gets
    record.json and plan.yaml, and climb.json, from which `resume` goes on. Raises UsageError for a budget too short for
    one rung, SpeedkitError for a workload that cannot be trained.
    """
    chosen = named(rungs)
    hardware, recipe = this_machine(device), recipe or workload.recipe
    folder = claim_folder(out, "climb", resume) if out is not None else None
    say = functools.partial(print, flush=True) if wanted(progress) else lambda text: None
    job = Stages(
        workload,
        recipe,
        hardware,
        {"device": device, "cache_dir": cache_dir},
        pairs,
        window_s,
        seeds or 5,
        budget_s,
        folder,
        say,
        read_state(folder, workload, recipe),
    )
    if folder is not None and (folder / "record.json").exists():
        return read_json(folder / "record.json")
    run = NotebookRun("90_climb", MODULES, {"workload": workload.name, "budget_s": budget_s, "seeds": job.seeds})

    say(
        f"climbing {workload.name}: {len(workload.train)} items to train on, {len(workload.test)} to test, "
        f"batch {recipe.batch_size}, on {hardware.name}; budget {budget_s:.0f} s"
    )
    best, record = _stages(job, chosen, run)
    if folder is not None:
        write_text(folder / "plan.yaml", to_yaml(best))
        write_json(folder / "record.json", record)
    say("\n".join(closing.in_short(record)))
    return record


def _stages(job: Stages, chosen: Sequence[Rung], run: NotebookRun) -> tuple[Plan, Row]:
    naive = job.once("ledger", lambda: closing.where_time_goes(job, Plan()))
    control = job.once("control", lambda: _control(job))
    shares = {row["cause"]: row["share"] for row in naive["ledgers"]["rows"]}
    job.say("its time goes into " + ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items()))
    parts = {cause: share * control["step_s"] for cause, share in shares.items()}
    matmul = {name.removeprefix("matmul_"): found.value for name, found in ceilings(job.hardware).items()}
    rows, step_s = _rungs(job, chosen, control, Profile(parts, matmul, job.hardware.device.type == "cpu"))
    dropped = closing.recheck(job, [row for row in rows if row["kept"]], control, step_s)
    best = plan_of([row for row in dropped if row["kept"]])
    final = job.once("final", lambda: closing.final(job, best))
    best = Plan(**final["adopted"]) if final["adopted"] else best
    trained = job.once("quality", lambda: closing.train_both(job, best, control["step_s"] + step_s))
    item_s = parts.get("data wait", 0.0) / job.recipe.batch_size
    sections = {
        "rungs": rows,
        "dropped": dropped,
        "payback": job.once("payback", lambda: closing.paid_back(job, best, rows, trained, item_s)),
        "larger_batch": job.once("batch_size", lambda: closing.larger_batch(job, best, trained)),
    }
    # Last: what looks into each operator of a step leaves compiled code switched off.
    fast = naive if best == Plan() else job.once("final ledger", lambda: closing.where_time_goes(job, best))
    sections |= {part: {"baseline": naive[part], "final": fast[part]} for part in ("ledgers", "roofline")}
    return best, _record(job, run, best, control, final, trained, sections)


def _control(job: Stages) -> Row:
    """Measure the naive plan against itself: the noise floor, its losses from two seeds, the shapes of its batches."""
    other, began_s, shapes = dataclasses.replace(job.recipe, seed=job.recipe.seed + 1), time.perf_counter(), set()

    def noting(model: Any, batch: Any, recipe: Recipe) -> Any:
        shapes.add(tuple(batch[0].shape))
        return job.workload.loss(model, batch, recipe)

    noted = dataclasses.replace(job.workload, loss=noting)
    same = job.compare(
        Plan(),
        Plan(),
        ("baseline", "baseline again"),
        min(job.pairs, 2 * closing.LEAST_PAIRS),
        name="A/A control",
        recipe_b=other,
        workload=noted,
    )
    step_s = statistics.fmean(same.step_s)
    job.say(f"naive baseline: {step_s * 1e3:.1f} ms per step; A/A noise floor {same.noise_floor:.3f}")
    return {
        "measurement": same.as_measurement(),
        "noise_floor": same.noise_floor,
        "step_s": step_s,
        # Two runs of one plan should not differ. Where they do (memory layout, say), no rung may claim less than that.
        "bias": max(same.high, 1 / same.low) if not same.low <= 1 <= same.high else 1.0,
        "losses": same.losses_a,
        "other_seed": same.losses_b,
        "shapes": len(shapes),
        # Setting up and warming up, which any comparison costs beside its windows.
        "set_up_s": time.perf_counter() - began_s - sum(same.seconds_a) - sum(same.seconds_b),
    }


def _rungs(job: Stages, chosen: Sequence[Rung], control: Row, profile: Profile) -> tuple[list[Row], float]:
    """Try the most promising until none is left or the time is up; return all rows, and the best plan's step time."""
    rows = list[Row]()
    while True:
        best = plan_of([row for row in rows if row["kept"]])
        found = candidates(job, chosen, best, profile, control, rows)
        waiting, noted = [row for row in found if not row["why"]], list(job.state["stages"])
        # A killed climb is gone through again, in the order that it took.
        again = [row for row in waiting if row["stage"] in noted]
        row, pairs = min(again, key=lambda row: noted.index(row["stage"]), default=None), 0
        if row is None and "left out" not in noted:
            row, pairs = affordable(job, waiting, rows, control, profile)
        if row is None:
            why = "not tried: the time budget is needed for the final measurements"
            left = [row | {"why": row["why"] or why} for row in found]
            return rows + job.once("left out", functools.partial(list, left)), profile.step_s
        rows.append(job.once(row["stage"], functools.partial(_try, job, row, best, pairs, control)))
        if rows[-1]["kept"]:
            profile = profile.after(row["fields"], rows[-1]["ratio"], rows[-1]["data_s"])


def affordable(
    job: Stages, waiting: list[Row], rows: list[Row], control: Row, profile: Profile
) -> tuple[Row | None, int]:
    """Return the first candidate that there is time for, and how many pairs of windows; (None, 0) where none is left.

    Raises UsageError where the budget does not suffice for any, and none was tried before.
    """
    least, pair_s = min(closing.LEAST_PAIRS, job.pairs), closing.pair_s(job, profile.step_s, profile.step_s)
    left_s = job.left_s() - closing.closing_s(job, control, sum(row["kept"] for row in rows), profile.step_s)
    for place, row in enumerate(waiting):
        set_ups_s = [other["set_up_s"] for other in waiting[place:]]
        large = middle((row["predicted_low"], row["predicted_high"])) > LARGE
        most = min(job.pairs, 2 * closing.LEAST_PAIRS) if large else job.pairs
        if pairs := affordable_pairs(left_s, set_ups_s, pair_s, least, most):
            return row, pairs
    if waiting and not rows:
        more_s = min(row["set_up_s"] for row in waiting) + least * pair_s - left_s
        kept_in = f"; what was measured is kept in {job.out}, and --resume goes on from it" if job.out else ""
        # Half of what is added goes into what closes the climb.
        raise UsageError(
            f"a budget of {job.budget_s:.0f} s is too short to try one rung beside the baseline: give it "
            f"at least {job.budget_s + 2 * more_s:.0f} s{kept_in}"
        )
    return None, 0


def _try(job: Stages, row: Row, best: Plan, pairs: int, control: Row) -> Row:
    asked, cold = dataclasses.replace(best, **row["fields"]), row["compiles"]
    job.say("{stage}, predicted {predicted_low:.2f} to {predicted_high:.2f}".format(**row))
    if cold:
        from torch._inductor.utils import fresh_cache
    with fresh_cache() if cold else contextlib.nullcontext():  # what compiling takes is part of the answer
        found = closing.measured(job, best, asked, ("best so far", row["change"]), pairs, row["stage"])
    if isinstance(found, str):
        return row | {"why": found}
    row = row | _verdict(row["promises"], found, control)
    job.say(
        f"  {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}): {'kept' if row['kept'] else 'rejected'}, "
        f"{row['why']}"
    )
    row["data_s"] = closing.data_time(job, asked) if row["kept"] and "cache" in row["fields"] else None
    row["compile_s"] = max(0.0, found.warmup_s_b - found.warmup_s_a) if cold else None
    return row | {"measurement": found.as_measurement()}


def _verdict(promises: str, found: Comparison, control: Row) -> Row:
    """Judge a measured change: kept when it is faster beyond the noise and learns what the rung promises."""
    floor = max(found.noise_floor, control["bias"])
    same = parity(promises, found.losses_b, control["losses"], control["other_seed"])
    why = f"low end {found.low:.3f} is not above the noise floor {floor:.3f}"
    if found.low > floor:
        why = "faster beyond the noise, and learns the same" if same.passed else str(same)
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "noise_floor": floor,
        "parity": str(same),
        "kept": found.low > floor and same.passed,
        "why": why,
        "step_s_before": found.step_s[0],
        "step_s_after": found.step_s[1],
    }


def _record(job: Stages, run: NotebookRun, best: Plan, control: Row, final: Row, trained: Row, sections: Row) -> Row:
    for measurement in (
        control["measurement"],
        *(row.get("measurement") for name in ("rungs", "dropped") for row in sections[name]),
        final["baseline"],
        final["careful"],
    ):
        if measurement:
            run.measure(measurement)
    for name, plan in (("baseline", Plan()), ("careful", Plan.careful(job.hardware)), ("final", best)):
        run.plan(name, resolve(plan, job.hardware))
    itself = {"ratio": 1.0, "low": 1.0, "high": 1.0}  # where the naive or the careful plan won
    quality = quality_of(job.workload, trained["curves"]) | {key: trained[key] for key in ("steps", "of_steps", "test")}
    sections |= {
        "workload": {"name": job.workload.name, "train": len(job.workload.train), "test": len(job.workload.test)},
        "recipe": job.recipe,
        "plan": best,
        "change": text(changed(best)),
        "noise_floor": control["noise_floor"],
        "speedup": {key: (final["baseline"] or itself)[key] for key in itself},
        "speedup_careful": {key: (final["careful"] or itself)[key] for key in itself},
        "step_s": {"baseline": control["step_s"]} | final["step_s"],
        "quality": quality,
        "energy": trained["energy"],
        "time_to_quality": time_to_quality(job.workload, trained["curves"]),
        "spent_s": job.spent_s(),
    }
    for name in ("rungs", "dropped"):
        sections[name] = [{key: row[key] for key in row if key not in INNER} for row in sections[name]]
    for name, value in sections.items():
        run.section(name, value)
    claim = f"the final plan is as good as the naive one within {job.workload.margin:g} {job.workload.metric}"
    verdict = "passed" if quality["passed"] else "failed"
    run.record["verdicts"].append({"check": claim, "claim": None, "verdict": verdict})
    return run.finished()

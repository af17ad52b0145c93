"""The climb: greedy forward selection of rungs, each against the best plan so far, and what proves the result."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedkit import proof, trials
from speedkit.climb_state import ClimbState, Row, read_state
from speedkit.config import to_yaml
from speedkit.files import claim_folder, read_json, write_json, write_text
from speedkit.hardware import this_machine
from speedkit.ladder import Rung, changed, named, plan_of, text
from speedkit.measure.busy import busy_processes
from speedkit.measure.ledger import Ledger
from speedkit.measure.quality import time_to_quality
from speedkit.measure.record import NotebookRun
from speedkit.measure.roofline import roofline
from speedkit.measure.stats import FALSE_KEEP, LOOKS, log_ratios, trimmed_mean
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train.progress import wanted
from speedkit.workloads.workload import Workload

# Whose source, with that of notebook 90, decides whether a recorded climb is current.
MODULES = tuple(
    f"speedkit.{name}"
    for name in (
        "climb",
        "trials",
        "ladder",
        "measure.compare",
        "measure.stats",
        "train.loop",
        "measure.quality",
        "proof",
    )
)
CONTROL_PAIRS = 20
SEEDS = 3  # trainings of each plan; more where these do not decide
BUSY = math.log(1.05)  # what two runs of one plan may differ by, and what 80 pairs must be able to tell
INTERNAL = {"fields", "promises", "stage", "compiles", "measurement"}  # of a rung's row, for the climb alone


def climb(
    workload: Workload,
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    cache_dir: str | Path | None = None,
    budget_s: float = 480.0,
    horizon: int | None = None,
    rungs: Sequence[str] | None = None,
    pairs: int = LOOKS[-1],
    seeds: int = SEEDS,
    progress: bool | str = "auto",
) -> Row:
    """Climb the ladder on `workload` and return the record of it.

    A ledger of the best plan says where the time goes; by it each rung's gain is predicted. The most promising is
    measured against the best plan and kept when it is faster and its losses are what it promises. At the end each
    kept rung whose gain a later one may have taken is left out once; the final figures come from fresh turns against
    `Plan()` and `Plan.careful()`; both ends are trained over `seeds` to show that the result is as good.

    `horizon` is the steps of the training that the plan is for, those of the recipe by default: compiling has to pay by
    then. `pairs` is the most that a comparison has, `rungs` names those to try, all by default. `out` gets record.json
    and plan.yaml, and climb.json, from which `resume` goes on. Raises UsageError for a budget too short for one rung.
    """
    chosen = named(rungs)
    hardware, recipe = this_machine(device), recipe or workload.recipe
    folder = claim_folder(out, "climb", resume) if out is not None else None
    state = read_state(folder, workload, recipe)
    if folder is not None and (folder / "record.json").exists():
        return read_json(folder / "record.json")
    job = ClimbState(
        workload=workload,
        recipe=recipe,
        hardware=hardware,
        budget_s=budget_s,
        horizon=horizon or recipe.total_steps(len(workload.train), drop_last=False),
        pairs=pairs,
        seeds=seeds,
        device=device,
        cache_dir=cache_dir,
        out=folder,
        say=functools.partial(print, flush=True) if wanted(progress) else lambda text: None,
        state=state,
    )
    job.say(
        f"climbing {workload.name}: {len(workload.train)} items to train on, {len(workload.test)} to test, "
        f"batch {recipe.batch_size}, on {hardware.name}; budget {budget_s:.0f} s"
    )
    plan, record = _climb(job, chosen)
    if folder is not None:
        write_text(folder / "plan.yaml", to_yaml(plan))
        write_json(folder / "record.json", record)
    return record


def _climb(job: ClimbState, chosen: Sequence[Rung]) -> tuple[Plan, Row]:
    """Go through all stages; return the plan to recommend and the record."""
    run = NotebookRun(
        "90_climb", MODULES, {"workload": job.workload.name, "budget_s": job.budget_s, "seeds": job.seeds}
    )
    trials.ledger_for(job, Plan())  # first: a workload that cannot be trained fails here
    control = job.once("control", lambda: measure_control(job))
    tried = trials.try_rungs(job, chosen, control)
    ablations = proof.ablate(job, [row for row in tried if row["kept"]])
    best = plan_of([row for row in ablations if row["kept"]])

    # Final figures and quality. Where the plan learns worse, what changes numbers goes, and the rest is measured anew.
    final = job.once("final", lambda: proof.final_comparison(job, best))
    trained = proof.train_both(job, Plan(**final["plan"]), final["step_s"])
    best = Plan(**final["plan"])
    if trained["quality"]["decision"] == "worse" and proof.safe(best) != best:
        job.say("the final plan learns worse: what changes numbers is taken out of it, and it is measured afresh")
        safe = proof.safe(best)
        final = job.once("final, safe", lambda: proof.final_comparison(job, safe))
        best, trained["quality"]["replaced"] = Plan(**final["plan"]), True
    paid = job.once("payback", lambda: proof.paid_back(job, best, tried, final["step_s"]))

    # The ledgers' rooflines come last: what looks into each operator of a step leaves compiled code switched off.
    ledgers = {name: (plan, trials.ledger_for(job, plan)) for name, plan in (("baseline", Plan()), ("final", best))}
    near = {
        name: job.once(
            f"roofline, {name}",
            functools.partial(roofline, job.workload, job.recipe, plan, hardware=job.hardware, ledger=Ledger(**row)),
        )
        for name, (plan, row) in ledgers.items()
    }
    sections = {
        "rungs": [_public(row) for row in tried],
        "dropped": [_public(row) for row in ablations],
        "payback": paid,
        "ledgers": {name: row for name, (_, row) in ledgers.items()},
        "roofline": near,
    }
    rows = [control, *tried, *ablations]
    for measurement in [*(row.get("measurement") for row in rows), final["baseline"], final["careful"]]:
        if measurement:
            run.measure(measurement)
    return best, _record(job, run, best, control=control, final=final, trained=trained, sections=sections)


def _public(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in INTERNAL}


# ---- the baseline, twice ----


def measure_control(job: ClimbState) -> Row:
    """Measure the naive plan against itself: how busy the machine is, losses from two seeds, shapes of batches."""
    shapes = set()

    def noting(model: Any, batch: Any, recipe: Recipe) -> Any:
        shapes.add(tuple(batch[0].shape))
        return job.workload.loss(model, batch, recipe)

    other = dataclasses.replace(job.recipe, seed=job.recipe.seed + 1)
    same = job.compare(
        (Plan(), Plan()),
        ("baseline", "baseline again"),
        "A/A control",
        workload=dataclasses.replace(job.workload, loss=noting),
        recipe_b=other,
        pairs=min(job.pairs, CONTROL_PAIRS),
        looks=(),
    )
    step_s = statistics.fmean(same.step_s)
    job.say(f"naive baseline: {step_s * 1e3:.1f} ms per step; against itself {same.ratio:.3f}")
    logs = log_ratios(same.seconds_a, same.seconds_b)
    _, reach = trimmed_mean(logs, FALSE_KEEP)
    resolution = reach * math.sqrt(len(logs) / LOOKS[-1])  # of all pairs that a comparison may have
    if abs(math.log(same.ratio)) > BUSY or resolution > BUSY:
        job.say(
            f"this machine is busy: a plan compared with itself gives {same.ratio:.2f} ({same.low:.2f} to "
            f"{same.high:.2f}), so a gain below {math.exp(resolution):.2f} cannot be shown{busy_processes()}"
        )
    return {
        "measurement": same.as_measurement(),
        "step_s": step_s,
        "resolution": math.exp(resolution),
        "losses": same.losses_a,
        "other_seed": same.losses_b,
        "shapes": len(shapes),
    }


# ---- the record ----


def _record(
    job: ClimbState, run: NotebookRun, best: Plan, *, control: Row, final: Row, trained: Row, sections: Row
) -> Row:
    """Complete the record; the headline is over the faster of the naive and the careful plan."""
    itself = {"ratio": 1.0, "low": 1.0, "high": 1.0}  # where the naive or the careful plan won
    naive, careful = ({key: (final[name] or itself)[key] for key in itself} for name in ("baseline", "careful"))
    for name, plan in (("baseline", Plan()), ("careful", Plan.careful(job.hardware)), ("final", best)):
        run.plan(name, resolve(plan, job.hardware))
    quality = trained["quality"]
    sections |= {
        "workload": {"name": job.workload.name, "train": len(job.workload.train), "test": len(job.workload.test)},
        "recipe": job.recipe,
        "plan": best,
        "safe_plan": proof.safe(best),
        "change": text(changed(best)),
        "speedup": naive,
        "speedup_careful": careful,
        "headline": "careful" if careful["ratio"] < naive["ratio"] else "baseline",
        "resolution": control["resolution"],
        "step_s": {"baseline": control["step_s"]} | final["step_s"],
        "quality": quality,
        "time_to_quality": time_to_quality(job.workload, trained["curves"]) if trained["curves"] else None,
        "spent_s": job.spent_s(),
    }
    for name, value in sections.items():
        run.section(name, value)
    if quality["decision"] in ("as good", "worse"):
        claim = f"the final plan is as good as the naive one within {job.workload.margin:g} {job.workload.metric}"
        run.record["verdicts"].append(
            {"check": claim, "claim": None, "verdict": "passed" if quality["passed"] else "failed"}
        )
    return run.finished()

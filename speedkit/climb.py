"""The climb: greedy forward selection of rungs, each against the best plan so far, and what proves the result."""

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from speedkit import proof
from speedkit.config import to_yaml
from speedkit.files import claim_folder, read_json, write_json, write_text
from speedkit.hardware import this_machine
from speedkit.ladder import Rung, changed, named, text
from speedkit.measure.ledger import Ledger
from speedkit.measure.quality import mean_difference
from speedkit.measure.record import NotebookRun
from speedkit.measure.roofline import roofline
from speedkit.measure.stats import FALSE_KEEP, LOOKS, log_ratios, trimmed_mean
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train.progress import wanted
from speedkit.trials import ClimbState, Row, try_rungs
from speedkit.workloads.workload import Workload

# Whose source, with that of notebook 90, decides whether a recorded climb is current.
SOURCES = "climb trials proof ladder measure.compare measure.stats measure.quality train.loop"
MODULES = tuple(f"speedkit.{name}" for name in SOURCES.split())
CONTROL_PAIRS = 20
BUSY = math.log(1.05)  # what two runs of one plan may differ by, and what 80 pairs must be able to tell
INTERNAL = ("fields", "promises")  # of a trial, for the climb alone
BUSY_PERCENT = 20  # of a core: a process that takes less does not disturb


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
    seeds: int = 3,
    progress: bool | str = "auto",
) -> Row:
    """Climb the ladder on `workload` and return the record of it.

    The rung that promises most, by a ledger of the best plan so far, is measured against that plan; it is kept when it
    is faster and its losses are what it promises. `proof` has what follows. `budget_s` is for all of it; `horizon` is
    the steps of the training that the plan is for, the recipe's by default: compiling has to pay by then. `pairs` is
    the most that a comparison has, `seeds` the trainings of each plan, more where these do not decide whether it learns
    as well, `rungs` those to try.
    `out` gets record.json and plan.yaml, and climb.json, from which `resume` goes on. Raises UsageError for a budget
    too short for one rung.
    """
    chosen, recipe = named(rungs), recipe or workload.recipe
    folder = claim_folder(out, "climb", resume) if out is not None else None
    job = ClimbState(
        workload=workload,
        recipe=recipe,
        hardware=this_machine(device),
        budget_s=budget_s,
        horizon=horizon or recipe.total_steps(len(workload.train), drop_last=False),
        pairs=pairs,
        seeds=seeds,
        options={"device": device, "cache_dir": cache_dir},
        out=folder,
        say=functools.partial(print, flush=True) if wanted(progress) else lambda text: None,
    )
    if folder is not None and (folder / "record.json").exists():
        return read_json(folder / "record.json")
    job.say(
        f"climbing {workload.name}: {len(workload.train)} items to train on, {len(workload.test)} to test, "
        f"batch {recipe.batch_size}, on {job.hardware.name}; budget {budget_s:.0f} s"
    )
    record = climb_rungs(job, chosen)
    if folder is not None:
        write_text(folder / "plan.yaml", to_yaml(Plan(**record["plan"])))
        write_json(folder / "record.json", record)
    return record


def climb_rungs(job: ClimbState, rungs: Sequence[Rung]) -> Row:
    """Go through all stages; return the record."""
    facts = {"workload": job.workload.name, "budget_s": job.budget_s, "seeds": job.seeds}
    run = NotebookRun("90_climb", MODULES, facts)
    naive, careful = Plan(), Plan.careful(job.hardware)
    job.ledger(naive)  # first: a workload that cannot be trained fails here
    control = job.once("control", lambda: compare_with_itself(job))
    trials = try_rungs(job, rungs, noise=control["noise"])
    kept = [trial for trial in trials if trial.kept]
    climbed, dropped = proof.ablate(job, kept)

    # Final figures and quality. Where the plan learns worse, what changes numbers goes, and the rest is measured anew.
    final = job.once("final", lambda: proof.final_comparison(job, climbed))
    best = Plan(**final["plan"])
    trained = proof.train_both(job, best, final["step_s"])
    if trained["quality"]["decision"] == "worse" and proof.safe(best) != best:
        job.say("the final plan learns worse: what changes numbers is taken out of it, and it is measured afresh")
        final = job.once("final, safe", lambda: proof.final_comparison(job, proof.safe(best)))
        best, trained["quality"]["replaced"] = Plan(**final["plan"]), True
    step_s = {"baseline": control["step_s"]} | final["step_s"]
    compile_s = max((trial.compile_s or 0.0 for trial in kept), default=0.0)

    # The ledgers' rooflines come last: what looks into each operator of a step leaves compiled code switched off.
    plans = {"baseline": naive, "final": best}
    sections = {
        "workload": {"name": job.workload.name, "train": len(job.workload.train), "test": len(job.workload.test)},
        "recipe": job.recipe,
        "rungs": [{key: value for key, value in vars(trial).items() if key not in INTERNAL} for trial in trials],
        "dropped": dropped,
        "plan": best,
        "change": text(changed(best)),
        "safe_change": text(changed(proof.safe(best), best)),
        "speedup": final["baseline"],
        "speedup_careful": final["careful"],
        "resolution": control["resolution"],
        "step_s": step_s,
        "payback": job.once("payback", lambda: proof.payback(job, best, compile_s=compile_s, step_s=step_s)),
        "ledgers": {name: job.ledger(plan) for name, plan in plans.items()},
        "roofline": {
            name: roofline(job.workload, job.recipe, plan, hardware=job.hardware, ledger=Ledger(**job.ledger(plan)))
            for name, plan in plans.items()
        },
        **trained,
        "spent_s": job.spent_s(),
    }
    run.record |= sections
    for measurement in job.state["measurements"]:
        run.measure(measurement)
    for name, plan in (*plans.items(), ("careful", careful)):
        run.plan(name, resolve(plan, job.hardware))
    return run.finished()


def compare_with_itself(job: ClimbState) -> Row:
    """Compare the naive plan with itself: how busy the machine is, and what another seed makes of the losses."""
    names, other_seed = ("baseline", "baseline again"), dataclasses.replace(job.recipe, seed=job.recipe.seed + 1)
    options = {"recipe_b": other_seed, "pairs": min(job.pairs, CONTROL_PAIRS), "looks": ()}
    same = job.compare((Plan(), Plan()), names, "A/A control", **options)
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
        "step_s": step_s,
        "resolution": math.exp(resolution),
        "noise": mean_difference(same.losses_b, same.losses_a),
    }


def busy_processes(seconds: float = 0.5) -> str:
    """Return ": name (pid) uses 98 % of a core, ..." of other processes, the busiest first; "" where none is seen."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    list(psutil.process_iter(["cpu_percent"]))  # psutil counts from one call to the next
    time.sleep(seconds)
    others = [process.info for process in psutil.process_iter(["pid", "name", "cpu_percent"]) if process.pid not in own]
    busy = [info for info in others if (info["cpu_percent"] or 0) > BUSY_PERCENT]  # None of what belongs to others
    busiest = sorted(busy, key=lambda info: -info["cpu_percent"])[:3]
    words = ", ".join("{name} ({pid}) uses {cpu_percent:.0f} % of a core".format(**info) for info in busiest)
    return f": {words}" if words else ""

"""What proves a climb: rungs left out again, final figures in fresh turns, trainings of both ends, payback."""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from speedkit.climb_state import ClimbState, Row, measured
from speedkit.clock import timed
from speedkit.data.cache import open_cache
from speedkit.hardware import cache_root
from speedkit.ladder import acts_on, plan_of
from speedkit.measure.quality import Curves, NaiveCurves, curve, fold, payback, quality_of
from speedkit.plan import Plan, resolve

FINAL_PAIRS = 40
MAX_SEEDS = 8  # trainings of each plan, where fewer do not decide
BUILDING_ITEMS = 64  # of which a cache is built, to know what all of them take


def ablate(job: ClimbState, kept: list[Row]) -> list[Row]:
    """Leave out once each rung on whose part of the step a later one acts too; return a row for each, `kept` or not.

    What paid before others were kept need not pay after. It goes only when it is shown not to be worth it.
    """
    rows, left = list[Row](), list(kept)
    for place, rung in enumerate(kept):
        without = [other for other in left if other is not rung]
        best, simpler = plan_of(left), plan_of(without)
        row = {key: rung[key] for key in ("rung", "change", "fields")}
        row |= dict.fromkeys(("ratio", "low", "high")) | {"kept": True}
        if simpler == best:
            row["why"] = "another rung has replaced it"
        elif not any(acts_on(rung["fields"]) & acts_on(later["fields"]) for later in kept[place + 1 :]):
            row["why"] = "no later rung acts on the same part of a step"
        else:
            row = job.once(f"without {rung['stage']}", functools.partial(_leave_out, job, row, best, simpler))
        left = left if row["kept"] else without
        rows.append(row)
    return rows


def _leave_out(job: ClimbState, row: Row, best: Plan, simpler: Plan) -> Row:
    name = f"without {row['change']}"
    if isinstance(result := measured(job, (simpler, best), (name, "best"), name), str):
        return row | {"why": f"without it: {result}"}
    kept = result.decision not in ("not worth it", "slower")
    why = (
        "slower without it"
        if result.faster
        else "not shown to be useless"
        if kept
        else "dropped: not worth it any more"
    )
    job.say(f"{name}: {1 / result.ratio:.3f} ({1 / result.high:.3f} to {1 / result.low:.3f}), {why}")
    interval = {"ratio": 1 / result.ratio, "low": 1 / result.high, "high": 1 / result.low}
    return row | interval | {"kept": kept, "why": why, "measurement": result.as_measurement()}


# ---- final figures ----


def final_comparison(job: ClimbState, best: Plan) -> Row:
    """Measure the winning plan against the naive and the careful one, in turns that chose nothing.

    Where the careful plan is shown to be faster it is the result: nothing slower is ever recommended.
    """
    result: Row = {"plan": dataclasses.asdict(best), "step_s": {}, "baseline": None, "careful": None}
    careful = Plan.careful(job.hardware)
    for name, plan in (("careful", careful), ("baseline", Plan())):
        if plan == best:
            continue
        names = name, "final"
        found = job.compare((plan, best), names, f"final against {name}", pairs=FINAL_PAIRS, looks=(), seed=1)
        if name == "careful" and found.slower:
            job.say("the careful plan is faster than what was climbed to: it is taken, and measured afresh")
            return final_comparison(job, careful)
        result[name] = found.as_measurement()
        result["step_s"] |= {name: found.step_s[0], "final": found.step_s[1]}
    return result


def safe(plan: Plan) -> Plan:
    """Return `plan` without what changes numbers: PyTorch's own precision, and a cache of float32."""
    return dataclasses.replace(plan, precision="default", cache_dtype="float32")


def same_bits(plan: Plan) -> Plan:
    """Return the part of `plan` that only moves data: it trains to the same bits as `Plan()`, and sooner."""
    fields = ("cache", "workers", "worker_kind", "persistent_workers", "pin_memory", "prefetch", "shards")
    return Plan(cache_dtype="float32", **{field: getattr(plan, field) for field in fields})


def train_both(job: ClimbState, best: Plan, step_s: Row) -> Row:
    """Train the naive and the final plan over seeds, on the whole schedule; return the quality that they show.

    The naive plan's scores are those of any plan that trains to the same bits, and do not depend on speed: some are
    taken from earlier climbs of this recipe. Its seconds are its steps times those of one. Where the first seeds do not
    decide, there are more, as many as the time allows.
    """
    if best == Plan():
        return {"quality": quality_of(job.workload, {"baseline": [], "final": []}), "curves": {}}
    naive = NaiveCurves(job.workload, job.recipe, job.hardware)
    curves: Curves = {"baseline": [*job.once("kept curves", lambda: naive.runs[:MAX_SEEDS])], "final": []}
    kept = len(curves["baseline"])
    for seeds in dict.fromkeys((job.seeds, max(job.seeds, MAX_SEEDS))):
        for name, run in _trainings(job, best, curves, seeds):
            curves[name].append(run)
        if quality_of(job.workload, curves)["decision"] in ("as good", "worse"):
            break
    naive.add(curves["baseline"][kept:])
    for name, runs in curves.items():
        for run in runs:
            run["points"] = [
                [step * step_s[name], point[1]] for step, point in zip(run["steps"], run["points"], strict=True)
            ]
    return {"quality": quality_of(job.workload, curves), "curves": curves}


def _trainings(job: ClimbState, best: Plan, curves: Curves, seeds: int) -> Iterator[tuple[str, Row]]:
    """Yield the trainings that are missing until each plan has as many as `seeds`, or the time is used up."""
    plans, needed_s = {"baseline": same_bits(best), "final": best}, 0.0
    while any(len(runs) < seeds for runs in curves.values()):
        name = min(curves, key=lambda name: len(curves[name]))
        number = len(curves[name])
        seed, workload = job.recipe.seed + number, fold(job.workload, number)
        stage = f"training, {name}, seed {seed}"
        if stage not in job.state["stages"] and job.spent_s() + needed_s > job.budget_s:
            return
        recipe = dataclasses.replace(job.recipe, seed=seed)
        run = job.once(stage, functools.partial(curve, workload, recipe, plans[name], **job.options))
        job.say(f"seed {seed}, {name}: {job.workload.metric} {run['value']:.4f} in {run['seconds']:.1f} s")
        needed_s = max(needed_s, run["seconds"])
        yield name, run


def paid_back(job: ClimbState, best: Plan, trials: list[Row], step_s: Row) -> Row:
    """Return the payback of the final plan in a training of as many steps as the climb is for.

    The cache is built afresh, of a sample where there are many items.
    """
    prepare_s = {"cache": 0.0, "compile": 0.0}
    plan = resolve(best, job.hardware, workload=job.workload).plan
    if plan.cache != "off":
        items = [*job.workload.train, *job.workload.test]
        every = max(1, len(items) // BUILDING_ITEMS)
        root = Path(job.cache_dir or cache_root())
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            build = functools.partial(open_cache, job.workload, items[::every], plan, cache_dir=folder)
            prepare_s["cache"] = every * timed(build, "cpu", repeats=1, warmup=0)[0]
    if plan.compile != "off":
        prepare_s["compile"] = max((row["compile_s"] or 0.0 for row in trials if row["kept"]), default=0.0)
    epochs = job.horizon * job.recipe.batch_size / len(job.workload.train)
    baseline_s, final_s = (job.horizon * step_s.get(name, math.nan) for name in ("baseline", "final"))
    return payback(epochs, baseline_s, final_s, prepare_s)

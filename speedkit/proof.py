"""What proves a climb: rungs left out again, final figures in fresh turns, trainings of both ends, payback."""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from speedkit.clock import duration, timed
from speedkit.data.cache import open_cache
from speedkit.files import read_json, write_json
from speedkit.hardware import cache_root
from speedkit.ladder import acts_on, plan_of
from speedkit.measure.quality import Curves, curve, fold, naive_curves_file, quality_of, time_to_quality
from speedkit.plan import Plan, resolve
from speedkit.trials import ClimbState, Row, Trial

FINAL_PAIRS = 40
MAX_SEEDS = 8  # trainings of each plan, where fewer do not decide
BUILDING_ITEMS = 64  # of which a cache is built, to know what all of them take
MOVES_DATA = ("cache", "workers", "worker_kind", "persistent_workers", "pin_memory", "prefetch", "shards")
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0}  # a plan compared with itself


def ablate(job: ClimbState, kept: Sequence[Trial]) -> tuple[Plan, list[Row]]:
    """Leave out once each rung on whose part of the step a later one acts too; return the plan and a row for each.

    What paid before others were kept need not pay after. It goes only when it is shown not to be worth it.
    """
    rows, changes = list[Row](), [trial.fields for trial in kept]
    for place, trial in enumerate(kept):
        without = [change for change in changes if change is not trial.fields]
        plans = plan_of(without), plan_of(changes)
        row: Row = {"rung": trial.rung, "change": trial.change, "kept": True, "ratio": None, "low": None, "high": None}
        if plans[0] == plans[1]:
            row["why"] = "another rung has replaced it"
        elif not any(acts_on(trial.fields) & acts_on(later.fields) for later in kept[place + 1 :]):
            row["why"] = "no later rung acts on the same part of a step"
        else:
            row |= job.once(f"without {trial.stage}", functools.partial(_leave_out, job, plans, trial.change))
        changes = changes if row["kept"] else without
        rows.append(row)
    return plan_of(changes), rows


def _leave_out(job: ClimbState, plans: tuple[Plan, Plan], change: str) -> Row:
    name = f"without {change}"
    result = job.attempt(plans, (name, "best"), name)
    if isinstance(result, str):
        return {"why": f"without it: {result}"}
    why = "slower without it" if result.faster else "not shown to be useless"
    if useless := result.decision in ("not worth it", "slower"):
        why = "dropped: not worth it any more"
    job.say(f"{result}: {why}")
    return {"ratio": 1 / result.ratio, "low": 1 / result.high, "high": 1 / result.low, "kept": not useless, "why": why}


def final_comparison(job: ClimbState, best: Plan) -> Row:
    """Measure the winning plan against the naive and the careful one, in turns that chose nothing.

    Where the careful plan is shown to be faster it is the result: nothing slower is ever recommended.
    """
    result: Row = {"plan": dataclasses.asdict(best), "step_s": {}, "baseline": ITSELF, "careful": ITSELF}
    careful = Plan.careful(job.hardware)
    for name, plan in (("careful", careful), ("baseline", Plan())):
        if plan == best:
            continue
        title = f"final against {name}"
        final = job.compare((plan, best), (name, "final"), title, pairs=FINAL_PAIRS, looks=(), seed=1)
        if name == "careful" and final.slower:
            job.say("the careful plan is faster than what was climbed to: it is taken, and measured afresh")
            return final_comparison(job, careful)
        result[name] = {key: getattr(final, key) for key in ITSELF}
        result["step_s"] |= {name: final.step_s[0], "final": final.step_s[1]}
    return result


def safe(plan: Plan) -> Plan:
    """Return `plan` without what changes numbers: PyTorch's own precision, and a cache of float32."""
    return dataclasses.replace(plan, precision="default", cache_dtype="float32")


def same_bits(plan: Plan) -> Plan:
    """Return the part of `plan` that only moves data: it trains to the same bits as `Plan()`, and sooner."""
    return Plan(cache_dtype="float32", **{field: getattr(plan, field) for field in MOVES_DATA})


def train_both(job: ClimbState, best: Plan, step_s: Row) -> Row:
    """Train the naive and the final plan over seeds, on the whole schedule; return quality and time to quality.

    The naive plan's scores are those of any plan that trains to the same bits, and do not depend on speed: some are
    taken from earlier climbs of this recipe. Its seconds are its steps times those of one. Where the first seeds do not
    decide, there are more, as many as the time allows. Fewer than two trainings of each plan show nothing: where these
    do not fit into the budget none is begun, and `budget_s` of the quality is one into which they do.
    """
    curves: Curves = {"baseline": [], "final": []}
    if best == Plan():
        return {"quality": quality_of(job.workload, curves), "time_to_quality": None}
    file = naive_curves_file(job.workload, job.recipe, job.hardware)
    earlier = job.once("kept curves", lambda: read_json(file)[:MAX_SEEDS] if file and file.exists() else [])
    curves["baseline"] += earlier
    steps = job.recipe.total_steps(len(job.workload.train), drop_last=False)
    training_s = {name: steps * step_s[name] for name in curves}
    missing = [(name, number) for name, runs in curves.items() for number in range(len(runs), 2)]
    rest_s = (training_s[name] for name, number in missing if _stage(job, name, number) not in job.stages)
    needed_s = job.spent_s() + sum(rest_s)
    if needed_s > job.budget_s:
        job.say(f"quality is not tested: two trainings of each plan take a budget of about {duration(needed_s)}")
        return {"quality": quality_of(job.workload, curves) | {"budget_s": needed_s}, "time_to_quality": None}
    for seeds in (job.seeds, max(job.seeds, MAX_SEEDS)):
        train_seeds(job, curves, {"baseline": same_bits(best), "final": best}, seeds=seeds, training_s=training_s)
        quality = quality_of(job.workload, curves)
        if quality["decision"] in ("as good", "worse"):
            break
    if file and len(curves["baseline"]) > len(earlier):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, curves["baseline"])
    drawn = {name: [_drawn(run, step_s[name]) for run in runs] for name, runs in curves.items()}
    reached = time_to_quality(job.workload, drawn) if all(drawn.values()) else None
    return {"quality": quality, "time_to_quality": reached}


def _drawn(run: Row, step_s: float) -> Row:
    """Return what a record keeps of a training, its seconds as `step_s` has them."""
    points = [[step * step_s, value] for step, (_, value) in zip(run["steps"], run["points"], strict=True)]
    return {"points": points} | {key: run[key] for key in ("value", "loss", "peak_memory_bytes")}


def _stage(job: ClimbState, name: str, number: int) -> str:
    """Return the stage of a plan's training by its number."""
    return f"training, {name}, seed {job.recipe.seed + number}"


def train_seeds(
    job: ClimbState, curves: Curves, plans: dict[str, Plan], *, seeds: int, training_s: dict[str, float]
) -> None:
    """Add the trainings that are missing until each plan has as many as `seeds`; after two of each, while they fit."""
    for number, (name, plan) in itertools.product(range(seeds), plans.items()):
        if number < len(curves[name]):
            continue
        seed, stage = job.recipe.seed + number, _stage(job, name, number)
        if number >= 2 and stage not in job.stages and job.spent_s() + training_s[name] > job.budget_s:
            return
        recipe, workload = dataclasses.replace(job.recipe, seed=seed), fold(job.workload, number)
        run = job.once(stage, functools.partial(curve, workload, recipe, plan, **job.options))
        job.say(f"seed {seed}, {name}: {job.workload.metric} {run['value']:.4f} in {run['seconds']:.1f} s")
        curves[name].append(run)


def payback(job: ClimbState, best: Plan, *, compile_s: float, step_s: Row) -> Row:
    """Return what the final plan saves in a training of as many steps as the climb is for, and when that is earned.

    `prepare_s` is what it takes besides the first time. By `pays_back_after_s` it has made as many steps as the naive
    plan; None where the training ends before. The cache is built afresh, of a sample where there are many items.
    """
    prepare_s = {"cache": 0.0, "compile": compile_s if best.compile != "off" else 0.0}
    plan = resolve(best, job.hardware, workload=job.workload).plan
    if plan.cache != "off":
        items = [*job.workload.train, *job.workload.test]
        every = max(1, len(items) // BUILDING_ITEMS)
        root = Path(job.options["cache_dir"] or cache_root())
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            build = functools.partial(open_cache, job.workload, items[::every], plan, cache_dir=folder)
            prepare_s["cache"] = every * timed(build, "cpu", repeats=1, warmup=0)[0]
    baseline_s, final_s = (job.horizon * step_s[name] for name in ("baseline", "final"))
    first_s = sum(prepare_s.values())
    saved_s = baseline_s - final_s - first_s
    return {
        "epochs": job.horizon * job.recipe.batch_size / len(job.workload.train),
        "baseline_s": baseline_s,
        "final_s": final_s + first_s,
        "prepare_s": prepare_s,
        "saved_s": saved_s,
        "pays_back_after_s": first_s / (1 - final_s / baseline_s) if saved_s >= 0 and final_s < baseline_s else None,
    }

"""The stages of a tuning: greedy forward selection against the best plan so far, and what proves the result."""

import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from speedkit.data.cache import open_cache
from speedkit.machine import cache_root
from speedkit.measure.breakdown import Breakdown
from speedkit.measure.candidates import Trial
from speedkit.measure.checked_file import read_checked, write_checked
from speedkit.measure.optimizations import Optimization, acts_on, changed, plan_of, text
from speedkit.measure.quality import Curves, baseline_curves_file, curve, fold, quality_of
from speedkit.measure.roofline import roofline
from speedkit.measure.stages import Row, Stage, Tuning
from speedkit.measure.trials import compare_with_itself, try_optimizations
from speedkit.plan import Plan

FINAL_PAIRS = 40
MAX_SEEDS = 8  # trainings of each plan, where fewer do not decide
BUILDING_ITEMS = 64  # of which a cache is built, to know what all of them take
MOVES_DATA = ("cache", "workers", "persistent_workers", "pin_memory", "prefetch")
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0, "decision": "not worth it"}  # a plan compared with itself


def find_plan(job: Tuning, optimizations: Sequence[Optimization]) -> Row:
    """Go through all stages of a tuning; return what it found, as fields of a record, with the final `plan`."""
    job.breakdown(Plan())  # first: a workload that cannot be trained fails here
    control = job.once(Stage("control"), compare_with_itself, job)
    trials = try_optimizations(job, optimizations, noise=control["noise"])
    accepted = [trial for trial in trials if trial.kept]
    combined, dropped = ablate(job, accepted)

    # Final figures and quality. Where the plan learns worse, what changes numbers goes, and the rest is measured anew.
    final = job.once(Stage("final"), final_comparison, job, combined)
    best = Plan(**final["plan"])
    trained = train_both(job, best, final["step_s"])
    if trained["quality"]["decision"] == "worse" and safe(best) != best:
        job.say("the final plan learns worse: what changes numbers is taken out of it, and it is measured afresh")
        final = job.once(Stage("final", plan="safe"), final_comparison, job, safe(best))
        best = Plan(**final["plan"])

    step_s = {"baseline": final["step_s"]["final"]} | final["step_s"]
    compile_s = max((trial.compile_s or 0.0 for trial in accepted), default=0.0)
    paid = job.once(Stage("payback"), payback, job, best, compile_s=compile_s, step_s=step_s)
    plans = {"baseline": Plan(), "final": best}
    breakdowns = {name: job.breakdown(plan) for name, plan in plans.items()}
    # Last: what looks into each operator of a step leaves compiled code switched off.
    rooflines = {}
    for name, plan in plans.items():
        breakdown = Breakdown(**breakdowns[name])
        rooflines[name] = roofline(job.workload, job.recipe, plan, hardware=job.hardware, breakdown=breakdown)
    return {
        "workload": {"name": job.workload.name, "train": len(job.workload.train), "test": len(job.workload.test)},
        "recipe": job.recipe,
        "optimizations": trials,
        "dropped": dropped,
        "plan": best,
        "change": text(changed(best)),
        "safe_change": text(changed(safe(best), best)),
        "speedup": final["baseline"],
        "speedup_careful": final["careful"],
        "resolution": control["resolution"],
        "step_s": step_s,
        "payback": paid,
        "breakdowns": breakdowns,
        "roofline": rooflines,
        **trained,
        "spent_s": job.spent_s(),
        "measurements": job.state["measurements"],
        "busy": sorted(job.state["busy"]),
    }


# ---- what proves the result ----


def ablate(job: Tuning, accepted: Sequence[Trial]) -> tuple[Plan, list[Row]]:
    """Leave out once each change on whose part of the step a later one acts too; return the plan and a row for each.

    What paid before others were accepted need not pay after. It goes only when it is shown not to be worth it.
    """
    rows = []
    changes = [trial.fields for trial in accepted]
    for place, trial in enumerate(accepted):
        row: Row = {
            "optimization": trial.optimization,
            "change": trial.change,
            "kept": True,
            "ratio": None,
            "low": None,
            "high": None,
        }
        without = [change for change in changes if change is not trial.fields]
        shares_a_part = any(acts_on(trial.fields) & acts_on(later.fields) for later in accepted[place + 1 :])
        if plan_of(without) == plan_of(changes):
            row["why"] = "another optimization has replaced it"
        elif not shares_a_part:
            row["why"] = "no later optimization acts on the same part of a step"
        else:
            stage = Stage("ablation", trial.optimization, trial.change)
            plans = {f"without {trial.change}": plan_of(without), "best": plan_of(changes)}
            row |= job.once(stage, leave_out, job, plans)
        if not row["kept"]:
            changes = without
        rows.append(row)
    return plan_of(changes), rows


def leave_out(job: Tuning, plans: dict[str, Plan]) -> Row:
    """Compare the plan without a change with the best plan; return what this adds to the row of the optimization."""
    result = job.attempt(next(iter(plans)), plans)
    if isinstance(result, str):
        return {"why": f"without it: {result}"}
    job.say(str(result))
    row: Row = {"ratio": 1 / result.ratio, "low": 1 / result.high, "high": 1 / result.low, "kept": True}
    if result.faster:
        return row | {"why": "slower without it"}
    if result.decision == "undecided":
        return row | {"why": "not shown to be useless"}
    return row | {"kept": False, "why": "dropped: not worth it any more"}


def final_comparison(job: Tuning, best: Plan) -> Row:
    """Measure the winning plan against the baseline and the careful one, in turns that chose nothing.

    Where the careful plan is shown to be faster it is the result: nothing slower is ever recommended.
    """
    final: Row = {"plan": vars(best), "step_s": {}, "baseline": ITSELF, "careful": ITSELF}
    careful = Plan.careful(job.hardware)
    for name, plan in {"careful": careful, "baseline": Plan()}.items():
        if plan == best:
            continue
        plans = {name: plan, "final": best}
        result = job.compare(f"final against {name}", plans, pairs=FINAL_PAIRS, looks=(), seed=1)
        if name == "careful" and result.slower:
            job.say("the careful plan is faster than what was tuned to: it is taken, and measured afresh")
            return final_comparison(job, careful)
        final[name] = {key: getattr(result, key) for key in ITSELF}
        final["step_s"] |= dict(zip(plans, result.step_s, strict=True))
    return final


def safe(plan: Plan) -> Plan:
    """Return `plan` without what changes numbers: PyTorch's own precision, and a cache of float32."""
    return dataclasses.replace(plan, precision="default", cache_dtype="float32")


def train_both(job: Tuning, best: Plan, step_s: Row) -> Row:
    """Train the baseline and the final plan over seeds, on the whole schedule; return quality and seconds.

    The baseline's scores come from what only moves data of the final plan, which trains to the same bits sooner, and
    from earlier tunings of this recipe; its seconds are its steps times those of one. Fewer than two trainings of each
    plan show nothing: where they do not fit into the budget none is begun, and `budget_s` is one into which they do.
    """
    curves: Curves = {"baseline": [], "final": []}
    if best == Plan():
        return {"quality": quality_of(job.workload, curves), "training_s": None}
    file = baseline_curves_file(job.workload, job.recipe, job.hardware)
    earlier = job.once(Stage("kept curves"), kept_curves, job, file)
    curves["baseline"] += earlier

    steps = job.recipe.total_steps(len(job.workload.train))
    training_s = {name: steps * step_s[name] for name in curves}
    first_s = sum(max(0, 2 - len(curves[name])) * training_s[name] for name in curves)
    needed_s = job.once(Stage("budget for quality"), float, job.spent_s() + first_s)
    if needed_s > job.budget_s:
        job.say(f"quality is not tested: two trainings of each plan take a budget of about {needed_s:.0f} s")
        return {"quality": quality_of(job.workload, curves) | {"budget_s": needed_s}, "training_s": None}

    moves_data = {field: getattr(best, field) for field in MOVES_DATA}
    same_bits = Plan(cache_dtype="float32", **moves_data)
    quality = train_seeds(job, curves, {"baseline": same_bits, "final": best}, training_s=training_s)
    if file and len(curves["baseline"]) > len(earlier):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_checked(file, {"curves": curves["baseline"]})
    return {"quality": quality, "training_s": training_s}


def kept_curves(job: Tuning, file: Path | None) -> list[Row]:
    """Return the baseline's trainings by earlier tunings, from the file that keeps them."""
    kept = read_checked(file, job.say) if file is not None else None
    return kept["curves"][:MAX_SEEDS] if kept else []


def train_seeds(job: Tuning, curves: Curves, plans: dict[str, Plan], *, training_s: dict[str, float]) -> Row:
    """Add a training of each plan for each seed, and more where these do not decide, as the time allows."""
    for seeds in (job.seeds, max(job.seeds, MAX_SEEDS)):
        for number, (name, plan) in itertools.product(range(seeds), plans.items()):
            recipe = dataclasses.replace(job.recipe, seed=job.recipe.seed + number)
            stage = Stage("training", plan=name, seed=recipe.seed)
            if number < len(curves[name]):
                continue
            if number >= 2 and stage not in job.results and job.spent_s() + training_s[name] > job.budget_s:
                break
            run = job.once(stage, curve, fold(job.workload, number), recipe, plan, **job.options)
            job.say(f"{stage}: {job.workload.metric} {run['value']:.4f} in {run['seconds']:.1f} s")
            curves[name].append(run)
            job.state["quarantined"] |= run["quarantined"]
        quality = quality_of(job.workload, curves)
        if quality["decision"] in ("as good", "worse"):
            break
    return quality


def payback(job: Tuning, best: Plan, *, compile_s: float, step_s: Row) -> Row:
    """Return what the final plan saves in a training of as many steps as the tuning is for, and when that is earned.

    `prepare_s` is what it takes besides the first time. By `pays_back_after_s` it has made as many steps as the
    baseline; None where the training ends before.
    """
    prepare_s = {"cache": 0.0, "compile": 0.0}
    if best.compile != "off":
        prepare_s["compile"] = compile_s
    if best.cache != "off":
        prepare_s["cache"] = cache_build_s(job, best)
    first_s = sum(prepare_s.values())
    baseline_s = job.horizon * step_s["baseline"]
    final_s = job.horizon * step_s["final"]
    saved_s = baseline_s - final_s - first_s
    pays_back_after_s = None
    if saved_s >= 0 and final_s < baseline_s:
        pays_back_after_s = first_s / (1 - final_s / baseline_s)
    return {
        "epochs": job.horizon * job.recipe.batch_size / len(job.workload.train),
        "baseline_s": baseline_s,
        "final_s": final_s + first_s,
        "prepare_s": prepare_s,
        "saved_s": saved_s,
        "pays_back_after_s": pays_back_after_s,
    }


def cache_build_s(job: Tuning, plan: Plan) -> float:
    """Return the seconds that building the cache of `plan` takes, by building one of some BUILDING_ITEMS items."""
    workload = job.workload
    items = [*workload.train, *workload.validation, *workload.test]
    every_nth = max(1, len(items) // BUILDING_ITEMS)
    root = Path(job.options["cache_dir"] or cache_root())
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        cache = open_cache(workload, items[::every_nth], plan, cache_dir=folder)
        return every_nth * cache.build_s

"""The stages of a tuning: greedy forward selection against the best plan so far, and what proves the result."""

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from speedkit.data.cache import open_cache
from speedkit.machine import cache_root
from speedkit.measure.candidates import Trial
from speedkit.measure.optimizations import Optimization, changed, plan_of, text
from speedkit.measure.predict import acts_on
from speedkit.measure.stages import Row, Stage, Tuning
from speedkit.measure.trainings import train_both
from speedkit.measure.trials import compare_with_itself, try_optimizations
from speedkit.plan import Plan

FINAL_PAIRS = 40
AGAIN_PAIRS = 10  # once more
FINAL_SHARE = 0.05  # of the budget, that each final comparison may take
BUILDING_ITEMS = 64  # of which a cache is built, to know what all of them take
STALLS = 1.02  # whole trainings whose steps take longer, over the end of the short turns' interval, were stalled
ITSELF = {"ratio": 1.0, "low": 1.0, "high": 1.0, "decision": "not worth it"}  # a plan compared with itself


def find_plan(job: Tuning, optimizations: Sequence[Optimization]) -> Row:
    """Go through all stages of a tuning; return what it found, as fields of a record, with the final `plan`."""
    job.breakdown(Plan())  # first: a workload that cannot be trained fails here
    control = job.once(Stage("control"), compare_with_itself, job)
    trials = try_optimizations(job, optimizations, noise=control["noise"])
    accepted = [trial for trial in trials if trial.kept]
    combined, dropped = ablate(job, accepted)

    kept = [trial for trial, row in zip(accepted, dropped, strict=False) if row["kept"]]
    best, final, trained = prove_or_replace(job, combined, kept)
    step_s = {"baseline": final["step_s"]["final"]} | final["step_s"]
    compile_s = max((trial.compile_s or 0.0 for trial in accepted), default=0.0)
    paid = job.once(Stage("payback"), payback, job, best, compile_s=compile_s, step_s=step_s)
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
        "speedup_again": final["again"],
        "resolution": control["resolution"],
        "step_s": step_s,
        "payback": paid,
        "breakdowns": {"baseline": job.breakdown(Plan()), "final": job.breakdown(best)},
        **trained,
        "spent_s": job.spent_s(),
        "measurements": job.state["measurements"],
        "busy": sorted(job.state["busy"]),
    }


# ---- what proves the result ----


def prove_or_replace(job: Tuning, combined: Plan, kept: Sequence[Trial]) -> tuple[Plan, Row, Row]:
    """Prove the plan that the `kept` changes make, without those that stall and, where it learns worse, the safe one.

    Return as `prove` does. What was trained of the first and shows this stays: as `stalls`, and as `replaced` quality.
    """
    best, final, trained = prove(job, combined)
    stalls = None
    if best == plan_of(trial.fields for trial in kept) and stalled(final, trained):
        job.say("steps of whole trainings take longer than short turns show: each change is compared once more")
        combined, stalls = ablate(job, kept, confirm=True)
        if combined != best:
            best, final, trained = prove(job, combined, "without what stalls")
    if trained["quality"]["decision"] == "worse" and safe(best) != best:
        job.say("the final plan learns worse: what changes numbers is taken out of it, and it is proven afresh")
        replaced = trained["quality"] | {"change": text(changed(best))}
        best, final, trained = prove(job, safe(best), "safe")
        trained["quality"]["replaced"] = replaced
    return best, final, trained | {"stalls": stalls}


def prove(job: Tuning, plan: Plan, name: str = "final") -> tuple[Plan, Row, Row]:
    """Measure `plan` afresh and train it; return the plan that it became, final figures and what trainings show."""
    final = job.once(Stage("final", plan=name), final_comparison, job, plan)
    best = Plan(**final["plan"])
    return best, final, train_both(job, best, final["step_s"], name=name)


def stalled(final: Row, trained: Row) -> bool:
    """Return whether steps of whole trainings take longer than the short turns of the final figures allow.

    The machine may have become slower since. How much is seen by the trainings of the baseline, in turns with them.
    """
    if trained["training_step_s"] is None:
        return False
    baseline_s = max(final["step_s"]["baseline"], trained["training_step_s"]["baseline"])
    return bool(trained["training_step_s"]["final"] > STALLS * baseline_s / final["baseline"]["low"])


def ablate(job: Tuning, accepted: Sequence[Trial], *, confirm: bool = False) -> tuple[Plan, list[Row]]:
    """Leave out once each change on whose part of the step a later one acts too; return the plan and a row for each.

    What paid before others were accepted need not pay after. It goes only when it is shown not to be worth it. To
    `confirm`, each is left out once, in turns long enough for what is rare.
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
        elif not (confirm or shares_a_part):
            row["why"] = "no later optimization acts on the same part of a step"
        else:
            stage = Stage("ablation", trial.optimization, trial.change, again=confirm)
            plans = {f"without {trial.change}": plan_of(without), "best": plan_of(changes)}
            row |= job.once(stage, leave_out, job, plans, confirm=confirm)
        if not row["kept"]:
            changes = without
        rows.append(row)
    return plan_of(changes), rows


def leave_out(job: Tuning, plans: dict[str, Plan], *, confirm: bool) -> Row:
    """Compare the plan without a change with the best plan; return what this adds to the row of the optimization."""
    result = job.attempt(next(iter(plans)), plans, confirm=confirm)
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

    Each plan trains in a process of its own, as it will. The headline is measured once more, in other processes.
    Where the careful plan is shown to be faster it is the result: nothing slower is ever recommended.
    """
    final: Row = {"plan": vars(best), "step_s": {}, "baseline": ITSELF, "careful": ITSELF, "again": None}
    careful = Plan.careful(job.hardware)
    others = {name: plan for name, plan in {"careful": careful, "baseline": Plan()}.items() if plan != best}
    limits: Row = {"looks": (), "max_s": FINAL_SHARE * job.budget_s}
    for name, plan in others.items():
        row = job.compare_apart(f"final against {name}", {name: plan, "final": best}, pairs=FINAL_PAIRS, **limits)
        if name == "careful" and row["decision"] == "slower":
            job.say("the careful plan is faster than what was tuned to: it is taken, and measured afresh")
            return final_comparison(job, careful)
        final[name] = {key: row[key] for key in ITSELF}
        for side, plan_name in (("a", name), ("b", "final")):
            final["step_s"][plan_name] = statistics.median(row[f"seconds_{side}"]) / row["steps_per_turn"]
    if others:
        faster = min(others, key=final["step_s"].__getitem__)
        plans = {faster: others[faster], "final": best}
        row = job.compare_apart("final, once more", plans, pairs=AGAIN_PAIRS, **limits)
        final["again"] = {key: row[key] for key in ITSELF}
    return final


def safe(plan: Plan) -> Plan:
    """Return `plan` without what changes numbers: PyTorch's own precision, and a cache of float32."""
    return dataclasses.replace(plan, precision="default", cache_dtype="float32")


def payback(job: Tuning, best: Plan, *, compile_s: float, step_s: Row) -> Row:
    """Return when what is prepared for the final plan is earned, in a training of as many steps as the tuning is for.

    `prepare_s` is what it takes the first time. By `pays_back_after_s` the final plan has made as many steps as the
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
    pays_back_after_s = None
    if final_s + first_s <= baseline_s > final_s:
        pays_back_after_s = first_s / (1 - final_s / baseline_s)
    return {"baseline_s": baseline_s, "prepare_s": prepare_s, "pays_back_after_s": pays_back_after_s}


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

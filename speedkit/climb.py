"""The climb: greedy forward selection of rungs, each against the best plan so far, and what proves the result."""

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from speedkit import proof
from speedkit.ceilings import ceilings
from speedkit.climb_state import COMPARISON_SHARE, ClimbState, Row, measured, read_state
from speedkit.config import to_yaml
from speedkit.data.sampler import BatchSampler, padded_frames
from speedkit.errors import UsageError
from speedkit.files import claim_folder, read_json, write_json, write_text
from speedkit.hardware import this_machine
from speedkit.ladder import Change, Rung, changed, named, plan_of, predict, text
from speedkit.measure.busy import busy_processes
from speedkit.measure.compare import compare
from speedkit.measure.ledger import Ledger, ledger_of
from speedkit.measure.quality import parity, time_to_quality
from speedkit.measure.record import NotebookRun
from speedkit.measure.roofline import roofline
from speedkit.measure.stats import FALSE_KEEP, LOOKS, WORTH, log_ratios, trimmed_mean
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.train.progress import wanted
from speedkit.workloads.workload import Workload

# Whose source, with that of notebook 90, decides whether a recorded climb is current.
MODULES = tuple(
    f"speedkit.{name}"
    for name in ("climb", "ladder", "measure.compare", "measure.stats", "train.loop", "measure.quality", "proof")
)
RUNGS_SHARE = 0.6  # of the budget: no rung is begun after that
COMPILING_S = {"cpu": 45.0}  # of a model; on two cores 13 to 60, on a GPU about 25
CONTROL_PAIRS = 20
SEEDS = 3  # trainings of each plan; more where these do not decide
BUSY = math.log(1.05)  # what two runs of one plan may differ by, and what 80 pairs must be able to tell
# What a row of `rungs` holds once it has been measured; None before.
MEASURED = ("ratio", "low", "high", "parity", "step_s_before", "step_s_after", "compile_s")
INTERNAL = {"fields", "promises", "stage", "compiles", "measurement"}  # of a rung's row, for the climb alone
COMPILED = {"compile", "compile_scope", "micro_batch", "precision", "channels_last", "attention", "bucket"}


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
    and plan.yaml, and climb.json, from which `resume` goes on. Raises UsageError for a budget too short for one rung,
    SpeedkitError for a workload that cannot be trained.
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
    _ledger(job, Plan())  # first: it says in a sentence what cannot be trained
    control = job.once("control", lambda: measure_control(job))
    trials = try_rungs(job, chosen, control)
    ablations = proof.ablate(job, [row for row in trials if row["kept"]])
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
    paid = job.once("payback", lambda: proof.paid_back(job, best, trials, final["step_s"]))

    # The ledgers' rooflines come last: what looks into each operator of a step leaves compiled code switched off.
    ledgers = {name: (plan, _ledger(job, plan)) for name, plan in (("baseline", Plan()), ("final", best))}
    near = {
        name: job.once(f"roofline, {name}", functools.partial(_roofline, job, plan, Ledger(**row)))
        for name, (plan, row) in ledgers.items()
    }
    sections = {
        "rungs": [_public(row) for row in trials],
        "dropped": [_public(row) for row in ablations],
        "payback": paid,
        "ledgers": {name: row for name, (_, row) in ledgers.items()},
        "roofline": near,
    }
    rows = [control, *trials, *ablations]
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
    same = compare(
        dataclasses.replace(job.workload, loss=noting),
        Plan(),
        Plan(),
        recipe=job.recipe,
        recipe_b=other,
        names=("baseline", "baseline again"),
        name="A/A control",
        pairs=min(job.pairs, CONTROL_PAIRS),
        looks=(),
        max_s=COMPARISON_SHARE * job.budget_s,
        **job.options,
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


def _ledger(job: ClimbState, plan: Plan) -> Row:
    """Return where a step's time goes under `plan`."""
    measure = lambda: ledger_of(job.workload, job.recipe, plan, **job.options).as_dict()  # noqa: E731
    return job.once(f"ledger of {text(changed(plan))}", measure)


# ---- rungs ----


def try_rungs(job: ClimbState, chosen: Sequence[Rung], control: Row) -> list[Row]:
    """Try the most promising candidate until none is left or the time is up; return a row for each, tried or not."""
    matmul = {name.removeprefix("matmul_"): found.value for name, found in ceilings(job.hardware).items()}
    trials = list[Row]()
    while True:
        best = plan_of([row for row in trials if row["kept"]])
        ledger = _ledger(job, best)
        shares = {row["cause"]: row["share"] for row in ledger["rows"]}
        job.say(
            "time goes into " + ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share > 0.005)
        )
        found = [
            candidate(job, rung, change, best, shares=shares, control=control, matmul=matmul)
            for rung in chosen
            for change in rung.changes(best, job.recipe, job.hardware) or [{}]
        ]
        tried = {name for row in trials for name in (row["stage"], f"rung {row['rung']}: {text({})}")}
        found = [row for row in found if row["stage"] not in tried]
        waiting = [row for row in found if not row["why"]]
        late = job.spent_s() > RUNGS_SHARE * job.budget_s
        if late:
            waiting = [row for row in waiting if row["stage"] in job.state["stages"]]  # of a climb that goes on
        if not waiting:
            if late and not trials and not all(row["why"] for row in found):
                _too_short(job)
            return trials + [row | {"why": row["why"] or "not tried: the time for rungs is used up"} for row in found]
        first = max(waiting, key=lambda row: math.sqrt(row["predicted_low"] * row["predicted_high"]))
        trials.append(job.once(first["stage"], functools.partial(_try, job, first, best, control)))


def candidate(
    job: ClimbState, rung: Rung, change: Change, best: Plan, *, shares: Row, control: Row, matmul: dict[str, float]
) -> Row:
    """Return the row of a change of the `best` plan; `why` says why it need not be tried."""
    change = {field: value for field, value in change.items() if value != getattr(best, field)}
    frames = _frames_saved(job) if "bucket" in change else 1.0
    on_cpu = job.hardware.device.type == "cpu"
    low, high = predict(change, shares, matmul=matmul, precision=best.precision, frames=frames, on_cpu=on_cpu)
    return {
        "rung": rung.name,
        "change": text(change),
        "fields": change,
        "promises": rung.promises,
        "stage": f"rung {rung.name}: {text(change)}",
        "compiles": dataclasses.replace(best, **change).compile != "off" and bool(COMPILED & change.keys()),
        "predicted_low": low if change else None,
        "predicted_high": high if change else None,
        **dict.fromkeys(MEASURED),
        "kept": False,
        "why": _why_not(job, rung, best, change, high=high, control=control),
        "claims": list(rung.claims),
        "notebook": rung.notebook,
    }


def _why_not(job: ClimbState, rung: Rung, best: Plan, change: Change, *, high: float, control: Row) -> str:
    """Return why a change that can make steps `high` times as fast need not be tried, or ""."""
    if not change:
        lacking = job.hardware.why_not(rung.needs) if rung.needs else ""
        return lacking or f"nothing to try on top of {text(changed(best))}"
    plans = best, dataclasses.replace(best, **change)
    batch_size = job.recipe.batch_size
    old, new = (resolve(plan, job.hardware, workload=job.workload, batch_size=batch_size) for plan in plans)
    if new.plan == old.plan:
        return next((fallback.why for fallback in new.fallbacks if fallback.field in change), "changes nothing")
    if math.log(high) < WORTH:
        return f"not tried: it could gain {high:.3f} at most"
    if "compile" in change:
        if control["shapes"] > 2 and job.workload.length is None:
            return f"not tried: batches came in {control['shapes']} shapes, each of which would be compiled anew"
        saved_s = job.horizon * control["step_s"] * (1 - 1 / high)
        compiling_s = COMPILING_S.get(job.hardware.device.type, 25.0)
        if saved_s < compiling_s:
            return (
                f"not tried: compiling takes about {compiling_s:.0f} s and would save {saved_s:.0f} s of "
                f"{job.horizon} steps at most; for a longer training say --horizon STEPS"
            )
    return ""


def _frames_saved(job: ClimbState) -> float:
    """Return how many times as many padded frames an epoch has without buckets, by the headers of the files."""
    if job.workload.length is None:
        return 1.0
    lengths = torch.tensor([job.workload.length(item) for item in job.workload.train])
    plain = BatchSampler(len(lengths), job.recipe.batch_size, job.recipe.seed)
    return padded_frames(plain, lengths) / padded_frames(dataclasses.replace(plain, lengths=lengths), lengths)


def _try(job: ClimbState, row: Row, best: Plan, control: Row) -> Row:
    """Measure a candidate against the best plan; return its row, with the verdict."""
    job.say("{stage}, predicted {predicted_low:.2f} to {predicted_high:.2f}".format(**row))
    plans = best, dataclasses.replace(best, **row["fields"])
    if row["compiles"]:
        from torch._inductor.utils import fresh_cache
    with fresh_cache() if row["compiles"] else contextlib.nullcontext():  # what compiling takes is part of the answer
        result = measured(job, plans, ("best so far", row["change"]), row["stage"])
    if isinstance(result, str):
        job.say(f"  {result}")
        return row | {"why": result}
    same = parity(row["promises"], result.losses_b, control["losses"], control["other_seed"])
    kept = result.faster and same.passed
    why = "faster, and learns the same" if kept else str(same) if result.faster else result.decision
    if result.slower:
        why = "slower"
    job.say(f"  {result.ratio:.3f} ({result.low:.3f} to {result.high:.3f}): {'kept' if kept else 'rejected'}, {why}")
    return row | {
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
        "parity": str(same),
        "kept": kept,
        "why": why,
        "step_s_before": result.step_s[0],
        "step_s_after": result.step_s[1],
        "compile_s": max(0.0, result.warmup_s_b - result.warmup_s_a) if row["compiles"] else None,
        "measurement": result.as_measurement(),
    }


def _too_short(job: ClimbState) -> None:
    kept_in = f"; what was measured is kept in {job.out}, and --resume goes on from it" if job.out else ""
    raise UsageError(
        f"a budget of {job.budget_s:.0f} s is too short to try one rung beside the baseline: give it at least "
        f"{math.ceil(1.5 * job.spent_s() / RUNGS_SHARE)} s{kept_in}"
    )


# ---- the record ----


def _roofline(job: ClimbState, plan: Plan, ledger: Ledger) -> Row:
    return roofline(job.workload, job.recipe, plan, job.hardware, ledger=ledger)


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

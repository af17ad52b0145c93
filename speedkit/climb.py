"""The climb: every rung tried against the best plan so far, kept only if faster beyond the noise and as good."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedkit.ceilings import ceilings
from speedkit.clock import timed
from speedkit.errors import SpeedkitError, UsageError
from speedkit.files import claim_folder, write_json, write_text
from speedkit.hardware import this_machine
from speedkit.ladder import LADDER, Change, Profile, Rung
from speedkit.measure.compare import Comparison
from speedkit.measure.larger_batch import choose_batch_size
from speedkit.measure.parity import curve, parity, quality_of, time_to_quality
from speedkit.measure.record import NotebookRun
from speedkit.measure.stages import Stages, read_state
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.settings import nearest, to_yaml
from speedkit.train.progress import wanted
from speedkit.train.run import begin, close

# Whose source, with that of notebook 90, decides whether a recorded climb is current.
MODULES = tuple(f"speedkit.{name}" for name in ("climb", "ladder", "measure.compare", "measure.stats", "train.loop"))
FINAL_PAIRS = 40
LEAST_WINDOW = 0.4  # of the window asked for: the shortest that a rung is tried with when time runs short
Row = dict[str, Any]
# What a row of `rungs` holds once it has been measured; None before.
MEASURED = ("ratio", "low", "high", "noise_floor", "parity", "step_s_before", "step_s_after", "data_s")


def climb(
    workload: Any, *, recipe: Recipe | None = None, device: str = "auto", out: str | Path | None = None,
    resume: bool = False, cache_dir: str | Path | None = None, budget_s: float = 480.0,
    rungs: Sequence[str] | None = None, pairs: int = 24, window_s: float = 0.125, seeds: int | None = None,
    progress: bool | str = "auto",
) -> Row:  # fmt: skip
    """Climb the ladder on `workload` and return the record of it.

    Each rung is predicted, applied to the best plan so far, measured against it in turns, and kept when the interval's
    low end is above the noise floor and the losses are what the rung promises. The final figures are measured on fresh
    windows against `Plan()` and `Plan.careful()`. Then the naive and the final plan are trained over paired `seeds` (5,
    or as many from 3 on as the budget allows) to show that the result is as good. `rungs` names those to try, all by
    default. `out` gets record.json and plan.yaml, and climb.json, from which `resume` goes on.
    """
    known = {rung.name: rung for rung in LADDER}
    for name in rungs or ():
        if name not in known:
            raise UsageError(f"there is no rung {name!r}{nearest(name, known)}: take {', '.join(known)}")
    chosen = [rung for rung in LADDER if rungs is None or rung.name in rungs]
    hardware, recipe = this_machine(device), recipe or workload.recipe
    folder = claim_folder(out, "climb", resume) if out is not None else None
    say = functools.partial(print, flush=True) if wanted(progress) else lambda text: None
    job = Stages(workload, recipe, hardware, {"device": device, "cache_dir": cache_dir}, pairs, window_s, seeds or 5,
                 budget_s, folder, say, read_state(folder, workload, recipe))  # fmt: skip
    run = NotebookRun("90_climb", MODULES, {"workload": workload.name, "budget_s": budget_s, "seeds": job.seeds})

    say(f"climbing {workload.name}: {len(workload.train)} items to train on, {len(workload.test)} to test, "
        f"batch {recipe.batch_size}, on {hardware.name}; budget {budget_s:.0f} s")  # fmt: skip
    control = job.once("control", lambda: _control(job))
    best, rows = _rungs(job, chosen, control)
    final = job.once("final", lambda: _final(job, best))
    if final["adopted"]:
        best = Plan(**final["adopted"])
    curves = job.once("quality", lambda: _train_both(job, best))
    larger = job.once("batch_size", lambda: _larger_batch(job, best, curves))
    run.section("larger_batch", larger)
    record = _record(job, run, best, rows, control, final, curves)
    if folder is not None:
        write_text(folder / "plan.yaml", to_yaml(best))
        write_json(folder / "record.json", record)
    say(_summary(record))
    return record


def _control(job: Stages) -> Row:
    """Measure the naive plan against itself: the noise floor, its losses from two seeds, and its step's two halves."""
    other, began_s = dataclasses.replace(job.recipe, seed=job.recipe.seed + 1), time.perf_counter()
    same = job.compare(Plan(), Plan(), ("baseline", "baseline again"), job.pairs, name="A/A control", recipe_b=other)
    step_s, data_s = statistics.fmean(same.step_s), data_time(job, Plan())
    job.say(f"naive baseline: {step_s * 1e3:.1f} ms per step, {data_s * 1e3:.1f} of them for the batch; "
            f"A/A noise floor {same.noise_floor:.3f}")  # fmt: skip
    return {
        "measurement": same.as_measurement(), "noise_floor": same.noise_floor, "step_s": step_s, "data_s": data_s,
        # Two runs of one plan should not differ. Where they do (memory layout, say), no rung may claim less than that.
        "bias": max(same.high, 1 / same.low) if not same.low <= 1 <= same.high else 1.0,
        "losses": same.losses_a, "other_seed": same.losses_b,
        # Setting up and warming up, which any comparison costs beside its windows.
        "set_up_s": time.perf_counter() - began_s - sum(same.seconds_a) - sum(same.seconds_b),
    }  # fmt: skip


def data_time(job: Stages, plan: Plan, count: int = 6) -> float:
    """Return the seconds that `plan` takes to get one batch to the device with nothing else going on."""
    run = begin(job.workload, job.recipe, plan, endless=True, **job.options)
    try:
        return statistics.median(timed(run.batches.next, run.device, repeats=count))
    finally:
        close(run)


def _rungs(job: Stages, chosen: Sequence[Rung], control: Row) -> tuple[Plan, list[Row]]:
    """Try the rungs in order; return the best plan and a row for each thing tried or left out."""
    best, rows = Plan(), list[Row]()
    matmul = {name.removeprefix("matmul_"): found.value for name, found in ceilings(job.hardware).items()}
    profile = Profile(control["step_s"], control["data_s"], matmul)
    for place, rung in enumerate(chosen):
        for change in rung.changes(best, job.recipe, job.hardware) or [{}]:
            attempt = functools.partial(_try, job, chosen[place:], change, best, profile, control)
            row = job.once(f"rung {rung.name} {text(change)}", attempt)
            rows.append(row)
            if row["kept"]:
                best = dataclasses.replace(best, **change)
                profile = Profile(row["step_s_after"], row["data_s"], matmul)
    return best, rows


def _try(job: Stages, rungs: Sequence[Rung], change: Change, best: Plan, profile: Profile, control: Row) -> Row:
    """Predict, measure and judge one change of the best plan, by the first of the `rungs` that are left."""
    rung, asked = rungs[0], dataclasses.replace(best, **change)
    low, high = rung.predict(profile, change) if change else (None, None)
    row = dict.fromkeys(MEASURED) | {
        "rung": rung.name, "change": text(change), "predicted_low": low, "predicted_high": high, "kept": False,
        "claims": list(rung.claims), "notebook": rung.notebook,
    }  # fmt: skip
    if not change:
        lacking = job.hardware.why_not(rung.needs) if rung.needs else ""
        return row | {"why": lacking or f"nothing to try on top of {text(changed(best))}"}
    effective = resolve(asked, job.hardware, workload=job.workload)
    if effective.plan == resolve(best, job.hardware, workload=job.workload).plan:
        return row | {"why": effective.fallbacks[0].why if effective.fallbacks else "changes nothing"}
    window_s = affordable_window_s(job, rungs, profile, control)
    if not window_s:
        return row | {"why": "not tried: the time budget is needed for the final measurements"}
    label = f"rung {rung.name}: {text(change)}"
    job.say(f"{label}, predicted {low:.2f} to {high:.2f}")
    try:
        shorter = dataclasses.replace(job, window_s=window_s)
        found = shorter.compare(best, asked, ("best so far", text(change)), job.pairs, name=label)
    except SpeedkitError as error:
        return row | {"why": f"failed: {error}"}
    row |= _verdict(rung, found, control)
    job.say(f"  {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}): {'kept' if row['kept'] else 'rejected'}, "
            f"{row['why']}")  # fmt: skip
    return row | {"data_s": data_time(job, asked) if row["kept"] else None, "measurement": found.as_measurement()}


def _verdict(rung: Rung, found: Comparison, control: Row) -> Row:
    """Judge a measured change: kept when it is faster beyond the noise and learns what the rung promises."""
    floor = max(found.noise_floor, control["bias"])
    same = parity(rung.promises, found.losses_b, control["losses"], control["other_seed"])
    why = f"low end {found.low:.3f} is not above the noise floor {floor:.3f}"
    if found.low > floor:
        why = "faster beyond the noise, and learns the same" if same.passed else str(same)
    return {
        "ratio": found.ratio, "low": found.low, "high": found.high, "noise_floor": floor, "parity": str(same),
        "kept": found.low > floor and same.passed, "why": why,
        "step_s_before": found.step_s[0], "step_s_after": found.step_s[1],
    }  # fmt: skip


def text(change: Change) -> str:
    """Return a change as `field=value, field=value`."""
    return ", ".join(f"{field}={value}" for field, value in change.items()) or "nothing"


def changed(plan: Plan) -> Change:
    """Return the fields in which `plan` differs from plain PyTorch."""
    return {field: value for field, value in vars(plan).items() if value != getattr(Plan(), field)}


def affordable_window_s(job: Stages, rungs: Sequence[Rung], profile: Profile, control: Row) -> float:
    """Return the window for comparing by the first of `rungs`: the job's, or a shorter one where time is short, or 0.

    What closes the climb has precedence, but no claim to more than half of the budget: two comparisons, and the naive
    and the best plan trained over (up to three) seeds, at the step times measured so far. Windows shrink to leave time
    for the rungs to come; none is left out for their sake.
    """
    naive_s, best_s, set_up_s = control["step_s"], profile.step_s, control["set_up_s"]
    steps = job.recipe.total_steps(len(job.workload.train), drop_last=False)
    # Evaluation: a test pass costs about a third of a training pass over as many items.
    passes = 1 + len(job.workload.test) / (3 * max(1, len(job.workload.train)))
    training_s = min(3, job.seeds) * steps * passes * (naive_s + best_s)
    # Both windows of a pair have as many steps, so many that they take the window's time on (geometric) average.
    pair_s = max(1, job.window_s / math.sqrt(naive_s * best_s)) * (naive_s + best_s)
    closing_s = training_s + 2 * (set_up_s + min(FINAL_PAIRS * pair_s, 0.1 * job.budget_s))
    left_s = job.budget_s - job.spent_s() - min(closing_s, 0.5 * job.budget_s) - set_up_s - rungs[0].extra_s
    shortest_s = min(job.window_s, max(best_s, LEAST_WINDOW * job.window_s))
    if left_s < 2 * job.pairs * shortest_s:
        return 0.0
    later = [rung for rung in rungs[1:] if rung.changes(Plan(), job.recipe, job.hardware)]
    later_s = sum(set_up_s + 2 * job.pairs * shortest_s + rung.extra_s for rung in later)
    return max(shortest_s, min(job.window_s, (left_s - later_s) / (2 * job.pairs)))


def _final(job: Stages, best: Plan) -> Row:
    """Measure the winning plan against the naive and the careful one, on windows that chose nothing."""
    result: Row = {"step_s": {}, "adopted": None, "baseline": None, "careful": None}
    careful = Plan.careful(job.hardware)
    for name, plan in (("baseline", Plan()), ("careful", careful)):
        if plan == best:
            continue
        found = job.compare(plan, best, (name, "final"), max(job.pairs, FINAL_PAIRS), name=f"final against {name}",
                            seed=1)  # fmt: skip
        if name == "careful" and found.slower:
            # The result is never slower than the best plan seen, and the careful one is among those.
            job.say("the careful plan is faster than what was climbed to: it is taken, and measured afresh")
            return {**_final(job, careful), "adopted": dataclasses.asdict(careful)}
        result[name] = found.as_measurement()
        result["step_s"] = {"final": found.step_s[1]} | result["step_s"] | {name: found.step_s[0]}
    return result


def _train_both(job: Stages, best: Plan) -> dict[str, list[Row]]:
    """Train the naive and the final plan over paired seeds, as many as the budget allows; return their curves."""
    curves: dict[str, list[Row]] = {"baseline": [], "final": []}
    took_s = 0.0
    for seed in range(job.recipe.seed, job.recipe.seed + job.seeds):
        # The clock ends it, never the scores: looking at those to decide would make the test too easy.
        if len(curves["final"]) >= min(3, job.seeds) and job.spent_s() + took_s > job.budget_s:
            break
        began_s = time.perf_counter()
        for name, plan in (("baseline", Plan()), ("final", best)):
            found = curve(job.workload, dataclasses.replace(job.recipe, seed=seed), plan, **job.options)
            curves[name].append(found)
            job.say(f"seed {seed}, {name}: {job.workload.metric} {found['value']:.4f} in {found['seconds']:.1f} s")
        took_s = time.perf_counter() - began_s
    return curves


def _larger_batch(job: Stages, best: Plan, curves: dict[str, list[Row]]) -> Row:
    """Try larger batches, which are another recipe, while the budget lasts: judged by time to quality, never kept."""
    trained = curves["final"]
    each_s = sum(found["seconds"] for found in trained)
    factors = (2, 4)[: int((job.budget_s - job.spent_s()) / each_s)]
    if not factors or len(trained) < 2:
        return {"rows": [], "why": "not tried: the time budget is spent"}
    _, rows = choose_batch_size(job.workload, job.recipe, best, factors=factors, seeds=len(trained), baseline=trained,
                                say=job.say, **job.options)  # fmt: skip
    taken = max((row for row in rows if row["taken"]), key=lambda row: row["ratio"], default=None)
    why = "none is sooner with every seed, and as good"
    if taken is not None:
        why = "batch {batch_size}, learning rate {learning_rate:.3g}: as good, {ratio:.2f} x as soon".format(**taken)
    return {"rows": rows, "why": why}


def _record(job, run, best, rows, control, final, curves) -> Row:
    """Put the record together, by the names of design and schema."""
    for measurement in (control["measurement"], *(row.get("measurement") for row in rows), final["baseline"],
                        final["careful"]):  # fmt: skip
        if measurement:
            run.measure(measurement)
    for name, plan in (("baseline", Plan()), ("careful", Plan.careful(job.hardware)), ("final", best)):
        run.plan(name, resolve(plan, job.hardware))
    itself = {"ratio": 1.0, "low": 1.0, "high": 1.0}  # where the naive or the careful plan won
    quality = quality_of(job.workload, curves)
    sections = {
        "workload": {"name": job.workload.name, "train": len(job.workload.train), "test": len(job.workload.test)},
        "recipe": job.recipe, "plan": best, "change": text(changed(best)), "noise_floor": control["noise_floor"],
        "rungs": [{key: value for key, value in row.items() if key != "measurement"} for row in rows],
        "speedup": {key: (final["baseline"] or itself)[key] for key in itself},
        "speedup_careful": {key: (final["careful"] or itself)[key] for key in itself},
        "step_s": {"baseline": control["step_s"]} | final["step_s"], "quality": quality,
        "time_to_quality": time_to_quality(job.workload, curves), "spent_s": job.spent_s(),
    }  # fmt: skip
    for name, value in sections.items():
        run.section(name, value)
    claim = f"the final plan is as good as the naive one within {job.workload.margin:g} {job.workload.metric}"
    verdict = "passed" if quality["passed"] else "failed"
    run.record["verdicts"].append({"check": claim, "claim": None, "verdict": verdict})
    return run.finished()


def _summary(record: Row) -> str:
    """Return in words what a climb's record says of the final plan."""
    lines = [f"final plan: {record['change']}"]
    for name, found in (("naive", record["speedup"]), ("careful", record["speedup_careful"])):
        lines.append("  {ratio:.2f} times as fast ({low:.2f} to {high:.2f})".format_map(found) + f" as the {name} plan")
    quality = record["quality"]
    shown = "  quality: not shown, the budget allowed fewer than two seeds"
    if quality["lower"] is not None:
        shown = ("  quality: {metric} changed by {mean_change:+.4f}, 95 % sure to be above {lower:+.4f}; margin "
                 "{margin:g}: ").format_map(quality)  # fmt: skip
        shown += "as good" if quality["passed"] else "NOT shown to be as good"
    return "\n".join([*lines, shown, f"  larger batches, another recipe: {record['larger_batch']['why']}"])

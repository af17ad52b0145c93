"""What closes a climb: which rungs still earn their place, the final figures, quality, payback, ledger and roofline."""

import dataclasses
import functools
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from speedkit.clock import timed
from speedkit.data.cache import open_cache
from speedkit.errors import Interrupted
from speedkit.hardware import cache_root
from speedkit.measure.compare import Comparison
from speedkit.measure.larger_batch import choose_batch_size
from speedkit.measure.ledger import ledger_of
from speedkit.measure.parity import Curves, curve, payback
from speedkit.measure.provenance import gpu_state
from speedkit.measure.roofline import count, roofline
from speedkit.measure.stages import Stages
from speedkit.plan import Plan, resolve
from speedkit.predict import affordable_pairs, affordable_training, plan_of, seconds
from speedkit.train.setup import setup_run

FINAL_PAIRS, LEAST_PAIRS = 40, 12
LEDGER_S = 12.0  # what a ledger with its roofline takes, at most
BUILDING_S = 6.0  # for building the cache of a sample of the items
Row = dict[str, Any]


def pair_s(job: Stages, a_s: float, b_s: float) -> float:
    """Return the seconds of a pair of windows: both have as many steps, so many that they last as asked on average."""
    return max(1, job.window_s / math.sqrt(a_s * b_s)) * (a_s + b_s)


def closing_s(job: Stages, control: Row, kept: int, best_s: float) -> float:
    """Return what closing the climb would take now, at most half of the budget; it has precedence over the rungs.

    The recheck of `kept` rungs, two final comparisons, (up to three) trainings under both plans, the final ledger.
    """
    naive_s, set_up_s = control["step_s"], control["set_up_s"]
    steps = job.recipe.total_steps(len(job.workload.train), drop_last=False)
    # Evaluation: a test pass costs about a third of a training pass over as many items.
    passes = 1 + len(job.workload.test) / (3 * max(1, len(job.workload.train)))
    training_s = min(3, job.seeds) * steps * passes * (naive_s + best_s)
    final_s = 2 * (set_up_s + min(FINAL_PAIRS * pair_s(job, naive_s, best_s), 0.1 * job.budget_s))
    recheck_s = max(0, kept - 1) * (set_up_s + LEAST_PAIRS * pair_s(job, best_s, best_s))
    return min(training_s + final_s + recheck_s + LEDGER_S, 0.5 * job.budget_s)


def measured(job: Stages, a: Plan, b: Plan, names: tuple[str, str], pairs: int, name: str) -> Comparison | str:
    """Compare two plans; return why where one fails: a model that cannot do this is one more reason not to."""
    try:
        return job.compare(a, b, names, pairs, name=name)
    except Interrupted:
        raise
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def recheck(job: Stages, kept: list[Row], control: Row, best_s: float) -> list[Row]:
    """Drop each kept rung once, the best plan against the best without it; return a row for each, `kept` or not.

    What paid before others were kept need not pay after. What is not slower without goes: the plan is simpler.
    """
    rows, left = list[Row](), list(kept)
    for place, rung in enumerate(kept):
        without = [other for other in left if other is not rung]
        row = (
            {key: rung[key] for key in ("rung", "change", "fields")}
            | dict.fromkeys(("ratio", "low", "high", "noise_floor"))
            | {"kept": True}
        )
        if plan_of(without) == plan_of(left):
            row["why"] = "another rung has replaced it"
        elif rung is kept[-1] and len(left) == len(kept):
            row["why"] = "kept last: nothing has been added to the plan that it was measured with"
        else:
            dropping = functools.partial(
                _dropped, job, row, plan_of(left), plan_of(without), control, best_s, len(kept) - place
            )
            row = job.once(f"without {row['rung']}: {row['change']}", dropping)
        left = left if row["kept"] else without
        rows.append(row)
    return rows


def _dropped(job: Stages, row: Row, best: Plan, simpler: Plan, control: Row, best_s: float, waiting: int) -> Row:
    """Measure the best plan against one without a rung, while so many others wait for that."""
    left_s, name = job.left_s() - closing_s(job, control, 1, best_s), f"without {row['change']}"
    pairs = affordable_pairs(
        left_s, [control["set_up_s"]] * waiting, pair_s(job, best_s, best_s), min(LEAST_PAIRS, job.pairs), job.pairs
    )
    if not pairs:
        return row | {"why": "not rechecked: the time budget is needed for the final measurements"}
    if isinstance(found := measured(job, best, simpler, ("best", name), pairs, name), str):
        return row | {"why": f"without it: {found}"}
    stays = found.high < 1
    why = "slower without it" if stays else "dropped: it is not shown that a step is slower without it"
    job.say(f"{name}: {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}), {why}")
    return row | {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "noise_floor": found.noise_floor,
        "kept": stays,
        "why": why,
        "measurement": found.as_measurement(),
    }


def data_time(job: Stages, plan: Plan, count: int = 6) -> float:
    """Return the seconds that `plan` takes to get one batch to the device with nothing else going on."""
    run = setup_run(job.workload, job.recipe, plan, endless=True, **job.options)
    try:
        return statistics.median(timed(run.fetch, run.device, repeats=count))
    finally:
        run.close()


def final(job: Stages, best: Plan) -> Row:
    """Measure the winning plan against the naive and the careful one, on windows that chose nothing."""
    result: Row = {"step_s": {}, "adopted": None, "baseline": None, "careful": None}
    careful = Plan.careful(job.hardware)
    for name, plan in (("baseline", Plan()), ("careful", careful)):
        if plan == best:
            continue
        found = job.compare(plan, best, (name, "final"), FINAL_PAIRS, name=f"final against {name}", seed=1)
        if name == "careful" and found.slower:
            # The result is never slower than the best plan seen, and the careful one is among those.
            job.say("the careful plan is faster than what was climbed to: it is taken, and measured afresh")
            return {**final(job, careful), "adopted": dataclasses.asdict(careful)}
        result[name] = found.as_measurement()
        result["step_s"] = {"final": found.step_s[1]} | result["step_s"] | {name: found.step_s[0]}
    return result


def train_both(job: Stages, best: Plan, both_s: float) -> Row:
    """Train the naive and the final plan over paired seeds, as many as the budget allows; return `{curves, steps ...}`.

    Where not even (up to) three fit, all get fewer steps and test items. `both_s` are the seconds of a step of both.
    """
    test, recipe, curves = job.workload.test, job.recipe, Curves(baseline=[], final=[])
    total = recipe.total_steps(len(job.workload.train), drop_last=False)
    tests_s = max(8, recipe.epochs or 0) * len(test) * both_s / recipe.batch_size / 2
    steps, every = affordable_training((job.left_s() - LEDGER_S) / min(3, job.seeds), total, both_s, tests_s)
    if steps < total:
        recipe = dataclasses.replace(recipe, epochs=None, steps=steps)
    every = min(every, max(1, len(test) // 32))  # fewer items tell nothing
    workload = dataclasses.replace(job.workload, test=[test[at] for at in range(0, len(test), every)])
    energy_j, took_s = {name: list[float]() for name in curves}, 0.0
    for seed in range(recipe.seed, recipe.seed + job.seeds):
        # The clock ends it, never the scores: looking at those to decide would make the test too easy.
        if len(curves["final"]) >= min(3, job.seeds) and job.left_s() < took_s + LEDGER_S:
            break
        began_s = time.perf_counter()
        for name, plan in (("baseline", Plan()), ("final", best)):
            before = gpu_state(job.hardware.device)
            found = curve(workload, dataclasses.replace(recipe, seed=seed), plan, **job.options)
            curves[name].append(found)
            energy_j[name] += [gpu_state(job.hardware.device)["energy_j"] - before["energy_j"]] if before else []
            job.say(f"seed {seed}, {name}: {workload.metric} {found['value']:.4f} in {found['seconds']:.1f} s")
        took_s = time.perf_counter() - began_s
    energy = {f"{name}_j": statistics.fmean(values) for name, values in energy_j.items() if values}
    return {"curves": curves, "steps": steps, "of_steps": total, "test": len(workload.test), "energy": energy}


def larger_batch(job: Stages, best: Plan, trained: Row) -> Row:
    """Try larger batches, which are another recipe, while the budget lasts: judged by time to quality, never kept."""
    runs = trained["curves"]["final"]
    factors = (2, 4)[: max(0, int((job.left_s() - LEDGER_S) / sum(found["seconds"] for found in runs)))]
    if not factors or len(runs) < 2 or trained["steps"] < trained["of_steps"]:
        return {"rows": [], "why": "not tried: the time budget is spent"}
    _, rows = choose_batch_size(
        job.workload, job.recipe, best, factors=factors, seeds=len(runs), baseline=runs, say=job.say, **job.options
    )
    taken = max((row for row in rows if row["taken"]), key=lambda row: row["ratio"], default=None)
    why = "none is sooner with every seed, and as good"
    if taken is not None:
        why = "batch {batch_size}, learning rate {learning_rate:.3g}: as good, {ratio:.2f} x as soon".format(**taken)
    return {"rows": rows, "why": why}


def where_time_goes(job: Stages, plan: Plan) -> Row:
    """Return the ledger and the roofline of a plan. Raises SpeedkitError for a workload that cannot be trained."""
    found = ledger_of(job.workload, job.recipe, plan, **job.options)
    counted = count(job.workload, job.recipe, plan, job.hardware)
    near = roofline(job.workload, job.recipe, plan, job.hardware, found, counted, job.options["cache_dir"])
    return {"ledgers": found.as_dict(), "roofline": near}


def paid_back(job: Stages, best: Plan, rows: list[Row], trained: Row, item_s: float) -> Row:
    """Return the payback of the final plan in this recipe, from the trainings and what it takes to prepare it.

    The cache is built afresh, of a sample where loading takes long: `item_s` are the seconds of an item.
    """
    items, prepare_s = [*job.workload.train, *job.workload.test], {"cache": 0.0, "compile": 0.0}
    plan = resolve(best, job.hardware, workload=job.workload).plan
    if plan.cache != "off":
        every = max(1, math.ceil(len(items) * item_s / job.hardware.cores / BUILDING_S))
        root = Path(job.options["cache_dir"] or cache_root())
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            build = functools.partial(open_cache, job.workload, items[::every], plan, cache_dir=folder)
            prepare_s["cache"] = every * timed(build, "cpu", repeats=1, warmup=0)[0]
    if plan.compile != "off":
        prepare_s["compile"] = max((row["compile_s"] or 0.0 for row in rows if row["kept"]), default=0.0)
    longer, epochs = trained["of_steps"] / trained["steps"], job.recipe.epochs
    baseline_s, final_s = (
        longer * statistics.fmean(run["seconds"] for run in trained["curves"][name]) for name in ("baseline", "final")
    )
    epochs = epochs or trained["of_steps"] * job.recipe.batch_size / len(job.workload.train)
    return payback(epochs, baseline_s, final_s, prepare_s)


def in_short(record: Row) -> list[str]:
    """Return a climb's result in plain sentences, drawn from its record; [] for a record of something else."""
    if "speedup" not in record:
        return []
    over = "{ratio:.2f} times as fast as {0} ({low:.2f} to {high:.2f}, 99 %)".format
    careful = record.get("speedup_careful")
    said = [
        f"Training steps are {over('plain PyTorch', **record['speedup'])}"
        + (f", and {over('a careful start', **careful)}." if careful else ".")
    ]
    if (quality := record["quality"]).get("lower") is None:
        said.append("Whether the result is as good was not shown: the budget allowed fewer than two seeds.")
    else:
        judged = "as good" if quality["passed"] else "NOT shown to be as good"
        change = "{metric} changed by {mean_change:+.4f}, 95 % sure to be above {lower:+.4f}; margin {margin:g}"
        short = "; after {steps} of {of_steps} steps" * (quality.get("steps", 0) < quality.get("of_steps", 0))
        said.append(f"The result is {judged}: {f'{change}{short}'.format_map(quality)}.")
    if paid := record.get("payback"):
        said.append(payback_in_words(paid))
    if energy := record.get("energy"):
        said.append("One training takes {baseline_j:.3g} J in plain PyTorch, {final_j:.3g} J now.".format_map(energy))
    if larger := record.get("larger_batch"):
        said.append(f"Larger batches, another recipe: {larger['why']}.")
    return [*said, f"Switched on: {record['change']}."]


def payback_in_words(paid: Row) -> str:
    """Return in one sentence what the final plan spares the reader, and when it has earned what it takes to prepare."""
    prepared = {"build the cache": paid["prepare_s"]["cache"], "compile": paid["prepare_s"]["compile"]}
    took = " and ".join(f"{seconds(value)} to {what}" for what, value in prepared.items() if value)
    said = f"Your {paid['epochs']:g} epochs: from {seconds(paid['baseline_s'])} to {seconds(paid['final_s'])}"
    if not took:
        return f"{said}."
    after = "does not pay back within so short a training"
    if paid["pays_back_after_s"] is not None:
        after = f"pays back after {seconds(paid['pays_back_after_s'])}"
    return f"{said}, with {took}; that {after}."

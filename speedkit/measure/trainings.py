"""The trainings of a tuning: baseline and final plan over seeds, on as much of the schedule as the time allows."""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

from speedkit.measure.checked_file import read_checked, write_checked
from speedkit.measure.quality import (
    ERROR,
    FEW_ITEMS,
    LAST,
    Curves,
    Test,
    curve,
    curves_file,
    favoured_test,
    fold,
    quality_of,
)
from speedkit.measure.stages import Row, Stage, Tuning
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

MAX_SEEDS = 8  # trainings of each plan, where fewer do not decide
SHORTEST = 20  # a schedule is shortened to a twentieth at most
TIME_SHARE = 1 / 4  # of the budget, which trainings may take when other stages have used it up
EVALUATED = 0.5  # of a step's seconds, for as many items: no backward pass, no optimizer
LEAST_ITEMS = 50  # to evaluate by losses; scores of single items need FEW_ITEMS
MOVES_DATA = ("cache", "workers", "persistent_workers", "pin_memory", "prefetch")


class Course(NamedTuple):
    """What is trained: the workload, perhaps with a smaller test set, and the recipe, perhaps with fewer steps."""

    workload: Workload
    recipe: Recipe


def train_both(job: Tuning, best: Plan, step_s: Row, *, name: str = "final") -> Row:
    """Train the baseline and the plan `name` over seeds; return quality, and the seconds that their steps take.

    The baseline's scores come from what only moves data of the final plan, which trains to the same bits sooner. The
    trainings of both by earlier tunings count. Where the whole schedule does not fit into the time that is left, both
    train a shorter one of the same shape; where not even a twentieth does, `budget_s` is a budget into which it does.
    """
    quality = quality_of(job.workload, {"baseline": [], "final": []})
    if best == Plan():
        return {"quality": quality, "training_step_s": None}
    chosen = job.once(Stage("schedule", plan=name), choose_schedule, job, best, step_s, reserved=name == "final")
    if chosen["until_s"] is None:
        job.say(f"quality is not tested: even a short training takes a budget of about {chosen['budget_s']:.0f} s")
        return {"quality": quality | {"budget_s": chosen["budget_s"]}, "training_step_s": None}
    course = course_of(job, chosen["one_in"])
    kept: Curves = chosen["kept"]
    curves = {side: [*runs] for side, runs in kept.items()}
    steps = course.recipe.total_steps(len(job.workload.train))
    total = job.recipe.total_steps(len(job.workload.train))
    if steps < total:
        job.say(
            f"both plans train {steps} steps instead of {total}, in the same schedule: the budget has no time for more"
        )

    moves_data = {field: getattr(best, field) for field in MOVES_DATA}
    plans = {"baseline": Plan(cache_dtype="float32", **moves_data), "final": best}
    names = {"baseline": f"baseline for {name}", "final": name}
    test = favoured_test(course.workload, kept)
    until_s = max(job.budget_s, chosen["until_s"])
    quality = train_seeds(job, course, curves, plans=plans, names=names, test=test, until_s=until_s)
    for side, file in curves_files(job, course, best).items():
        if file and len(curves[side]) > len(kept[side]):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_checked(file, {"curves": curves[side]})
    about = {"schedule": steps / total, "steps": steps, "test_items": len(course.workload.test)}
    return {
        "quality": quality | about,
        # Of the training that other load of the machine hit least: what a plan stalls for is in each of them.
        "training_step_s": {side: min(run["step_s"] for run in runs) for side, runs in curves.items()},
    }


def choose_schedule(job: Tuning, best: Plan, step_s: Row, *, reserved: bool) -> Row:
    """Return which part of the schedule is trained, {one_in, kept, until_s, budget_s}: the longest that fits.

    `job.seeds` trainings of each plan fit, without those that are `kept`, until the tuning has taken `until_s`. That is
    None where nothing fits. Trainings that are kept need not be half as long. `reserved`: TIME_SHARE of the budget is
    for them, whatever else has taken.
    """
    spent_s = job.spent_s()
    time_s = job.budget_s - spent_s
    if reserved:
        time_s = max(time_s, TIME_SHARE * job.budget_s)
    fitting: Row = {}
    chosen: Row = {}
    for one_in in range(1, SHORTEST + 1):
        if fitting and one_in > 2 * fitting["one_in"]:
            break
        course = course_of(job, one_in)
        files = curves_files(job, course, best)
        kept = {side: kept_curves(job, file) for side, file in files.items()}
        # As if preparing were done: a cache is there, and compiled code is kept.
        seconds = 0.0
        for side, runs in kept.items():
            seconds += max(0, job.seeds - len(runs)) * training_s(job, course, step_s[side])
        chosen = {"one_in": one_in, "kept": kept, "until_s": spent_s + time_s, "budget_s": spent_s + seconds}
        if not seconds:
            return chosen
        if seconds <= time_s:
            fitting = fitting or chosen
        if course.recipe.total_steps(len(job.workload.train)) <= 2 * LAST:
            break
    return fitting or chosen | {"until_s": None}


def training_s(job: Tuning, course: Course, step_s: float) -> float:
    """Return about how many seconds a training takes whose steps take `step_s`, evaluations included."""
    items = len(job.workload.train)
    steps = course.recipe.total_steps(items)
    batch_size = course.recipe.batch_size
    looks = max(2 * LAST, steps * batch_size / items)
    evaluated = course.workload.validation or course.workload.test
    return step_s * (steps + EVALUATED * looks * len(evaluated) / batch_size)


def course_of(job: Tuning, one_in: int) -> Course:
    """Return what is trained for one step in `one_in` of the schedule, whose shape stays: it ends where it would.

    Evaluating takes no longer than training where the items allow it: then every so many are left out.
    """
    workload = job.workload
    recipe = job.recipe
    if one_in == 1:
        return Course(workload, recipe)
    steps = max(2 * LAST, recipe.total_steps(len(workload.train)) // one_in)
    recipe = dataclasses.replace(recipe, epochs=None, steps=steps)
    if workload.own_loader is not None:
        return Course(workload, recipe)
    side = "validation" if workload.validation else "test"
    items = getattr(workload, side)
    least = FEW_ITEMS if workload.metric == "accuracy" else LEAST_ITEMS
    wanted = math.ceil(EVALUATED * 2 * LAST * len(items) / (steps * recipe.batch_size))
    every_nth = max(1, min(wanted, len(items) // least))
    some: Row = {side: list(items)[::every_nth]}
    return Course(dataclasses.replace(workload, **some), recipe)


def curves_files(job: Tuning, course: Course, best: Plan) -> dict[str, Path | None]:
    """Return where the trainings of the baseline and of the final plan are kept."""
    plans = {"baseline": Plan(), "final": best}
    return {side: curves_file(*course, plan, hardware=job.hardware) for side, plan in plans.items()}


def kept_curves(job: Tuning, file: Path | None) -> list[Row]:
    """Return the trainings of a plan by earlier tunings, from the file that keeps them."""
    kept = read_checked(file, job.say) if file is not None else None
    return kept["curves"][: max(job.seeds, MAX_SEEDS)] if kept else []


def train_seeds(
    job: Tuning,
    course: Course,
    curves: Curves,
    *,
    plans: dict[str, Plan],
    names: dict[str, str],
    test: Test,
    until_s: float,
) -> Row:
    """Train each plan for one seed after the other, until a look at all trainings decides or the time is up.

    The first look comes after `job.seeds` of each. A look spends a share of the allowed ERROR that is in proportion to
    its number of trainings (Bonferroni); the last one, where time is up, all that is left.
    """
    looks = range(job.seeds, max(job.seeds, MAX_SEEDS) + 1)
    new_from = min(map(len, curves.values()))  # a look at fewer was one of an earlier tuning
    unspent = 1.0
    share = 0.0
    for number in range(looks[-1]):
        recipe = dataclasses.replace(course.recipe, seed=job.recipe.seed + number)
        stages = {}
        takes_s = 0.0  # what is to be trained now, by the trainings before
        for side, runs in curves.items():
            if number < len(runs):
                continue
            stages[side] = Stage("training", plan=names[side], seed=recipe.seed)
            if number >= 2 and stages[side] not in job.results:
                takes_s += runs[-1]["seconds"]
        if takes_s and job.spent_s() + takes_s > until_s:
            return quality_of(course.workload, curves, test=test, tail=ERROR * (unspent + share))
        for side, stage in stages.items():
            plan = plans[side]
            [beside] = job.beside_others(plan)
            run = job.once(stage, curve, fold(course.workload, number), recipe, beside, **job.options)
            job.say(f"{stage}: {job.workload.metric} {run['value']:.4f} in {run['seconds']:.1f} s")
            curves[side].append(run)
            job.state["quarantined"] |= run["quarantined"]
        count = number + 1
        if count in looks:
            share = count / sum(looks)
            unspent -= share
        if count in looks and count >= new_from:
            quality = quality_of(course.workload, curves, test=test, tail=ERROR * share)
            if quality["decision"] in ("as good", "worse"):
                break
    return quality

"""A larger batch is another recipe: which one learns as well, and sooner?"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from speedkit.measure.parity import Curves, curve, quality_of, seconds_to, time_to_quality
from speedkit.plan import Plan
from speedkit.recipe import Recipe, with_batch_size

LEAST_STEPS = 10  # fewer are no training that a schedule could shape
Row = dict[str, Any]


def choose_batch_size(
    workload: Any,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    factors: Sequence[int] = (2, 4),
    seeds: int = 3,
    baseline: list[Row] | None = None,
    say: Callable[[str], Any] = lambda text: None,
    **options: Any,
) -> tuple[Recipe, list[Row]]:
    """Return the recipe that reaches the quality of `recipe` soonest, and a row for each batch size tried.

    Tried are its batch size, or for "auto" the workload's own, times `factors`, each with the learning rate by
    `with_batch_size`. A larger batch is taken only when its results are not inferior and it is sooner with every one
    of the paired `seeds`: samples per second decide nothing. `baseline` are the curves of `recipe` over these seeds,
    where there are some. `options` are those of `fit`.
    """
    recipe = recipe or workload.recipe
    if recipe.batch_size == "auto":  # type: ignore[comparison-overlap]  # see its setting
        recipe = dataclasses.replace(recipe, batch_size=workload.recipe.batch_size)

    def trained(candidate: Recipe) -> list[Row]:
        seeded = [dataclasses.replace(candidate, seed=recipe.seed + number) for number in range(seeds)]
        runs = [curve(workload, one, plan, **options) for one in seeded]
        values = statistics.fmean(run["value"] for run in runs)
        say(
            f"batch {candidate.batch_size}, learning rate {candidate.learning_rate:.3g}: "
            f"{workload.metric} {values:.4f} in {statistics.fmean(run['seconds'] for run in runs):.1f} s"
        )
        return runs

    baseline, best, rows = baseline or trained(recipe), (1.0, recipe), list[Row]()
    for factor in factors:
        candidate = with_batch_size(recipe, factor * recipe.batch_size)
        if candidate.total_steps(len(workload.train), drop_last=False) < LEAST_STEPS:
            continue
        row = judged(workload, {"baseline": baseline, "final": trained(candidate)})
        rows.append({"batch_size": candidate.batch_size, "learning_rate": candidate.learning_rate, **row})
        if row["taken"] and row["ratio"] > best[0]:
            best = row["ratio"], candidate
    return best[1], rows


def judged(workload: Any, curves: Curves) -> Row:
    """Return the seconds both recipes take to one quality, and whether the other is as good and sooner every time."""
    found, quality = time_to_quality(workload, curves), quality_of(workload, curves)
    baseline_s, final_s = (seconds_to(found["target"], workload, curves[side]) for side in ("baseline", "final"))
    sooner = all(mine < theirs for mine, theirs in zip(final_s, baseline_s, strict=True))
    why = "sooner with every seed, and as good" if sooner else "not sooner with every seed"
    why = why if quality["passed"] else f"not shown to be as good within {workload.margin:g}; {why}"
    return {**found, "quality": quality, "taken": sooner and quality["passed"] and bool(found["ratio"]), "why": why}

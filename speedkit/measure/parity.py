"""Is the fast plan as good? Losses of the first steps, scores over paired seeds, and the time to one score."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from speedkit.measure.stats import non_inferior
from speedkit.plan import Plan
from speedkit.recipe import Recipe, steps_per_epoch
from speedkit.train.fit import fit

Curves = dict[str, list[dict[str, Any]]]  # plan -> one {seed, points: [[seconds, score], ...], value, seconds} per seed


@dataclasses.dataclass(frozen=True)
class Parity:
    """How near two courses of losses are to what is `promised` of them; both numbers are mean |difference|."""

    promised: str
    difference: float
    seed_noise: float
    passed: bool

    def __str__(self) -> str:
        if self.promised == "bit-equal":
            return "losses bit-equal" if self.passed else f"losses differ by {self.difference:.2g}, should be bit-equal"
        side = "within" if self.passed else "beyond"
        means = "mean " * (self.promised == "order-equal")
        return f"{means}losses differ by {self.difference:.2g}, {side} the {self.seed_noise:.2g} of another seed"


def parity(promised: str, losses: Sequence[float], reference: Sequence[float], other_seed: Sequence[float]) -> Parity:
    """Return whether `losses` keep what is `promised` of them against `reference`.

    bit-equal: every loss is the same number. loss-equal: the mean absolute difference is at most that between the
    reference and the same plan from `other_seed`: training cannot feel it. order-equal: the batches are others of the
    same items, so only the means over all steps are compared.
    """
    if promised == "order-equal":
        losses, reference, other_seed = ([statistics.fmean(course)] for course in (losses, reference, other_seed))
    difference, noise = (
        statistics.fmean(abs(x - y) for x, y in zip(course, reference, strict=True)) for course in (losses, other_seed)
    )
    passed = list(losses) == list(reference) if promised == "bit-equal" else difference <= noise
    return Parity(promised, difference, noise, passed)


def curve(workload: Any, recipe: Recipe, plan: Plan | None, **options: Any) -> dict[str, Any]:
    """Train once; return its part of `Curves`. Preparing counts: data, cache, model. `options` are those of `fit`."""
    total = recipe.total_steps(len(workload.train), drop_last=False)
    if total < 4 * steps_per_epoch(len(workload.train), recipe.batch_size, drop_last=False):  # a curve takes points
        plan = dataclasses.replace(plan or Plan(), validate_every=max(1, total // 8))
    history = fit(workload, recipe, plan, progress=False, **options)
    points = [[history.prepare_s + found["seconds"], found["value"]] for found in history.evaluations]
    return {
        "seed": recipe.seed,
        "points": points,
        "value": points[-1][1],
        "seconds": points[-1][0],
        "prepare_s": history.prepare_s,
        "peak_memory_bytes": history.peak_memory_bytes,
    }


def quality_of(workload: Any, curves: Curves) -> dict[str, Any]:
    """Return the test of non-inferiority over the seeds that both plans were trained with."""
    values = {name: [run["value"] for run in runs] for name, runs in curves.items()}
    sign = 1 if workload.higher_is_better else -1
    changes = [sign * (new - old) for old, new in zip(values["baseline"], values["final"], strict=True)]
    found = non_inferior(changes, workload.margin) if len(changes) > 1 else None
    return {
        "metric": workload.metric,
        "higher_is_better": workload.higher_is_better,
        "margin": workload.margin,
        **values,
        "mean_change": found and found.mean_change,
        "lower": found and found.lower,
        "passed": bool(found and found.passed),
    }


def payback(epochs: float, baseline_s: float, final_s: float, prepare_s: dict[str, float]) -> dict[str, Any]:
    """Return what the final plan spares one training of `epochs`, and when it has earned what it takes to prepare.

    `baseline_s` and `final_s` are seconds of training, `prepare_s` what the final plan takes besides the first time, by
    what for. By `pays_back_after_s` it has made as many steps as the naive one; None where the recipe ends before.
    """
    first_s = sum(prepare_s.values())
    after_s = first_s / (1 - final_s / baseline_s) if final_s < baseline_s else math.inf
    return {
        "epochs": epochs,
        "baseline_s": baseline_s,
        "final_s": final_s + first_s,
        "prepare_s": prepare_s,
        "saved_s": baseline_s - final_s - first_s,
        "pays_back_after_s": after_s if after_s <= baseline_s else None,
    }


def seconds_to(target: float, workload: Any, runs: list[dict[str, Any]]) -> list[float]:
    """Return the seconds that each of `runs` took to reach the score `target`; infinite where it never did."""
    sign = 1 if workload.higher_is_better else -1
    return [next((at for at, value in run["points"] if sign * (value - target) >= 0), math.inf) for run in runs]


def time_to_quality(workload: Any, curves: Curves) -> dict[str, Any]:
    """Return the seconds (median over seeds) both plans take to one score: the naive plan's mean, less the margin.

    By then the climb has built the cache and compiled the model, as after a first training: a very first one pays for
    both besides.
    """
    sign = 1 if workload.higher_is_better else -1
    target = statistics.fmean(run["value"] for run in curves["baseline"]) - sign * workload.margin
    seconds: dict[str, float | None] = {}
    for name, runs in curves.items():
        reached = seconds_to(target, workload, runs)
        seconds[name] = statistics.median(reached) if math.isfinite(statistics.median(reached)) else None
    baseline_s, final_s = seconds["baseline"], seconds["final"]
    ratio = baseline_s / final_s if baseline_s and final_s else None
    return {"target": target, "baseline_s": baseline_s, "final_s": final_s, "ratio": ratio, "curves": curves}

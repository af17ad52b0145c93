"""Is the fast plan as good, and how soon: non-inferiority over paired seeds, and the time to one score."""

import math
import statistics
from typing import Any

from speedkit.measure.stats import non_inferior

Curves = dict[str, list[dict[str, Any]]]  # plan -> one {seed, points: [[seconds, score], ...], value, seconds} per seed


def quality_of(workload: Any, curves: Curves) -> dict[str, Any]:
    """Return the test of non-inferiority over the seeds that both plans were trained with."""
    values = {name: [run["value"] for run in runs] for name, runs in curves.items()}
    sign = 1 if workload.higher_is_better else -1
    changes = [sign * (new - old) for old, new in zip(values["baseline"], values["final"], strict=True)]
    found = non_inferior(changes, workload.margin) if len(changes) > 1 else None
    return {
        "metric": workload.metric, "higher_is_better": workload.higher_is_better, "margin": workload.margin, **values,
        "mean_change": found and found.mean_change, "lower": found and found.lower,
        "passed": bool(found and found.passed),
    }  # fmt: skip


def time_to_quality(workload: Any, curves: Curves) -> dict[str, Any]:
    """Return the seconds both plans take to the same score: the naive plan's mean final one, less the margin.

    By then the climb has built the cache and compiled the model, as after a first training: a very first one pays for
    both besides. The time of a plan is the median over its seeds.
    """
    sign = 1 if workload.higher_is_better else -1
    target = statistics.fmean(run["value"] for run in curves["baseline"]) - sign * workload.margin
    seconds: dict[str, float | None] = {}
    for name, runs in curves.items():
        reached = [next((at for at, value in run["points"] if sign * (value - target) >= 0), math.inf) for run in runs]
        median = statistics.median(reached)
        seconds[name] = median if math.isfinite(median) else None
    baseline_s, final_s = seconds["baseline"], seconds["final"]
    return {
        "target": target, "baseline_s": baseline_s, "final_s": final_s,
        "ratio": baseline_s / final_s if baseline_s and final_s else None, "curves": curves,
    }  # fmt: skip

"""The same training with one field of its plan changed, measured in turns with the training as it is."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from speedkit.hardware import Hardware
from speedkit.measure.compare import compare
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Workload

PAIRS = 20
COMPILING_S = 40.0  # that compiling a model takes, more or less
CHANGES: dict[str, dict[str, Any]] = {
    "no logging": {"log_every": 10**6},
    "fused optimizer": {"fused_optimizer": True},
    "compiled": {"compile": "default"},
}


def ablate(
    workload: Workload, recipe: Recipe, plan: Plan, *, hardware: Hardware, cache_dir: str | Path | None, until_s: float
) -> list[dict[str, Any]]:
    """Return for each of CHANGES its `name` and what a comparison shows: `ratio`, `low`, `high` and `decision`.

    A ratio above 1 means shorter steps. Where there is none, `left_out` is the reason. Begins nothing for which there
    is no time until `until_s`, by `time.perf_counter()`.
    """
    rows: list[dict[str, Any]] = []
    as_is = resolve(plan, hardware, workload=workload)
    for name, change in CHANGES.items():
        changed = dataclasses.replace(plan, **change)
        effective = resolve(changed, hardware, workload=workload)
        left_s = until_s - time.perf_counter() - COMPILING_S * ("compile" in change)
        if effective.plan == as_is.plan:
            why = effective.fallbacks[-1].why if effective.fallbacks else "the plan has it already"
            rows.append({"name": name, "left_out": why})
        elif left_s < 0:
            rows.append({"name": name, "left_out": "the budget has no time left for it"})
        else:
            where: dict[str, Any] = {"device": hardware.device, "cache_dir": cache_dir}
            found = compare(workload, plan, changed, recipe=recipe, pairs=PAIRS, max_s=left_s, loss_steps=0, **where)
            rows.append({"name": name, **{key: getattr(found, key) for key in ("ratio", "low", "high", "decision")}})
    return rows

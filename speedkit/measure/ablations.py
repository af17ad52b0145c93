"""The same training without one thing, or with another, measured in turns with the training as it is."""

import dataclasses
import functools
import random
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from speedkit.hardware import Hardware
from speedkit.measure.compare import WARM_UP, Contender, measure_pairs, warm_up
from speedkit.measure.stats import paired_interval
from speedkit.measure.timeline import replaced
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe
from speedkit.workloads.workload import Workload

PAIRS = 20
COMPILING_S = 40.0  # that compiling a model takes, more or less
SAME_BATCH = "same batch"  # all steps learn from one, so nothing is loaded
CHANGES: dict[str, dict[str, Any]] = {
    SAME_BATCH: {},
    "no logging": {"log_every": 10**6},
    "fused optimizer": {"fused_optimizer": True},
    "compiled": {"compile": "default"},
}


def ablate(
    workload: Workload, recipe: Recipe, plan: Plan, hardware: Hardware, until_s: float, cache_dir: str | Path | None
) -> list[dict[str, Any]]:
    """Return for each of CHANGES its `name` and what a comparison shows: `ratio`, `low`, `high` and `decision`.

    A ratio above 1 means shorter steps. Where there is none, `left_out` is the reason. Begins nothing for which there
    is no time until `until_s`, by `time.perf_counter()`.
    """
    rows: list[dict[str, Any]] = []
    with closing(Contender(workload, recipe, plan, hardware.device, cache_dir)) as base:
        step_s = min(base.turn(1) for _ in range(3))
        for name, change in CHANGES.items():
            changed = dataclasses.replace(plan, **change)
            effective, as_is = (resolve(one, hardware, workload=workload) for one in (changed, plan))
            takes_s = COMPILING_S * ("compile" in change) + 2 * (PAIRS + WARM_UP) * step_s
            why = ""
            if change and effective.plan == as_is.plan:
                why = effective.fallbacks[-1].why if effective.fallbacks else "the plan has it already"
            elif time.perf_counter() + takes_s > until_s:
                why = f"the budget has no {takes_s:.0f} s left for it"
            rows.append({"name": name})
            if why:
                rows[-1]["left_out"] = why
                continue
            with (
                closing(Contender(workload, recipe, changed, hardware.device, cache_dir)) as other,
                ExitStack() as stack,
            ):
                if name == SAME_BATCH:
                    batch = other.run.fetch()
                    stack.enter_context(replaced(other.run, fetch=lambda batch=batch: batch))
                steps, *_ = warm_up(base, other)
                turns = functools.partial(base.turn, steps), functools.partial(other.turn, steps)
                *seconds, decision = measure_pairs(*turns, pairs=PAIRS, rng=random.Random(0))
            rows[-1] |= {**vars(paired_interval(*seconds)), "decision": decision}
    return rows

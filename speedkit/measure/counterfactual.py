"""The same training without one thing, or with another, measured in turns with the training as it is."""

import dataclasses
import itertools
import math
import random
import statistics
import time
from contextlib import closing
from typing import Any

import torch

from speedkit.errors import SpeedkitError
from speedkit.hardware import Hardware
from speedkit.measure.compare import WARM_UP, Contender, measure_pairs, warm_up
from speedkit.measure.stats import paired_interval
from speedkit.plan import Plan, resolve
from speedkit.recipe import Recipe

PAIRS = 20
COMPILING_S = {"cpu": 40.0}  # that compiling a model takes, more or less; on a GPU 25
# What is different: a change of the plan, or, where there is none, something that `_side` arranges.
CHANGES: dict[str, dict[str, Any]] = {
    "same batch": {},
    "loader only": {},
    "no logging": {"log_every": 10**6},
    "fused optimizer": {"fused_optimizer": True},
    "compiled": {"compile": "default"},
}


def counterfactuals(
    workload: Any, recipe: Recipe, plan: Plan, hardware: Hardware, until_s: float = math.inf, cache_dir: Any = None
) -> list[dict[str, Any]]:
    """Return a row for each of CHANGES: `name`, `step_s` (`as_is_s` without it), and `ratio`, `low`, `high` and
    `decision` as `compare` has them: above 1 where steps get shorter. Or `left_out`, the reason why there are none.

    Begins nothing for which there is no time until `until_s`, by `time.perf_counter()`.
    """
    rows: list[dict[str, Any]] = []
    with closing(Contender(workload, recipe, plan, hardware.device, cache_dir)) as base:
        step_s = min(base.turn(1) for _ in range(3))
        for name, change in CHANGES.items():
            changed, row = dataclasses.replace(plan, **change), {"name": name}
            effective = resolve(changed, hardware, workload=workload)
            compiling_s = COMPILING_S.get(hardware.device.type, 25.0) if "compile" in change else 0.0
            takes_s = compiling_s + 2 * (PAIRS + WARM_UP) * step_s
            if change and effective.plan == resolve(plan, hardware, workload=workload).plan:
                row["left_out"] = effective.fallbacks[-1].why if effective.fallbacks else "the plan has it already"
            elif time.perf_counter() + takes_s > until_s:
                row["left_out"] = f"the budget has no {takes_s:.0f} s left for it"
            else:
                try:
                    row |= _measured(name, base, Contender(workload, recipe, changed, hardware.device, cache_dir))
                except SpeedkitError as error:
                    row["left_out"] = str(error)
            rows.append(row)
    return rows


def _measured(name: str, base: Contender, other: Contender) -> dict[str, Any]:
    """Measure `other`, arranged as `name` says, in turns with `base`."""
    run = other.run
    with closing(other):
        if name == "same batch":
            batch = run.fetch()
            run.fetch = lambda: batch
        elif name == "loader only":
            run.last_loss = torch.tensor(math.nan)
            other.steps = (len(run.fetch()) for _ in itertools.count())
        steps, *_ = warm_up(base, other)
        turns = (lambda: base.turn(steps), lambda: other.turn(steps))
        a_s, b_s, decision = measure_pairs(*turns, pairs=PAIRS, rng=random.Random(0))
    return {
        "step_s": statistics.median(b_s) / steps,
        "as_is_s": statistics.median(a_s) / steps,
        **vars(paired_interval(a_s, b_s)),
        "decision": decision,
    }

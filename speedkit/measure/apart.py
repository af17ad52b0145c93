"""Is a plan faster than another one, where each trains in a process of its own, as a user's training does?

In one process the C library hands memory that one plan has freed to the other, whose steps are shorter for it: on two
cores those of the audio workload's fastest plan took 37 ms beside plain PyTorch, and 47 to 55 ms alone.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from speedkit.machine import this_machine
from speedkit.measure.contender import WARM_UP, Contender, steps_per_turn
from speedkit.measure.process import new_process
from speedkit.measure.turns import measure_pairs
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload


@contextlib.contextmanager
def turns_of(workload: Workload, recipe: Recipe, plan: Plan, **options: Any) -> Iterator[Callable[..., float]]:
    """Give the function that takes a turn of `plan`."""
    with contextlib.closing(Contender(workload, recipe, plan, loss_steps=0, **options)) as contender:
        yield contender.turn


def compare_apart(
    workload: Workload,
    plans: Mapping[str, Plan],
    *,
    recipe: Recipe,
    name: str,
    device: str = "auto",
    cache_dir: str | None = None,
    **limits: Any,
) -> dict[str, Any]:
    """Return the row of `measurements` for two plans by name.

    `limits` are those of `measure_pairs`. Raises SpeedkitError where one fails, or the workload cannot be sent.
    """
    with contextlib.ExitStack() as processes:
        turns = []
        for plan in plans.values():
            process = new_process(turns_of, workload, recipe, plan, device=device, cache_dir=cache_dir)
            turns.append(processes.enter_context(process))
        count = max(1, *(plan.workers * plan.prefetch_factor for plan in plans.values()))
        warm_up_s = [turn(count) for turn in turns * WARM_UP]
        steps = steps_per_turn(this_machine(device).device, count, warm_up_s)
        measured = measure_pairs(*turns, rng=random.Random(0), steps=steps, confirm=False, **limits)
    return measured.as_measurement(name, *plans) | {"steps_per_turn": steps}

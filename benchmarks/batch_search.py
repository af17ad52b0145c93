"""The micro-batch search against a sweep through every size: how near its steps come to the fastest, and how soon."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

import common

from speedkit.lab.workloads import load_workload
from speedkit.measure.compare import compare_functions
from speedkit.plan import Plan
from speedkit.train.loop import train
from speedkit.train.micro_batch import find_micro_batch, step_seconds, trial_plan, with_longest_first
from speedkit.train.setup import setup_run

PLAN = Plan(fused_optimizer=True)


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the step time in the chosen micro-batch over that in the best of a sweep; and the search's time."""
    batch_size, pairs = (8, 3) if quick else (64, 30)
    workload = with_longest_first(load_workload("audio", clips=240, size="small", max_duration_s=2.0))
    recipe = dataclasses.replace(workload.recipe, batch_size=batch_size)
    run = setup_run(workload, recipe, trial_plan(PLAN), device="cpu", progress=False, endless=True)
    with contextlib.closing(run):
        batch = next(run.data.test.one_epoch())

        def step(size: int) -> None:
            run.learner.micro_batch = size
            run.position.batch = batch
            next(train(run))
            run.learner.optimizer.zero_grad(set_to_none=True)

        began_s = time.perf_counter()
        search = find_micro_batch(step, batch_size, device=run.device)
        found_s = time.perf_counter()
        seconds = step_seconds(step, [*range(1, batch_size + 1)], run.device)
        swept_s = time.perf_counter()
        best = min(seconds, key=lambda size: seconds[size])
        sizes = {"chosen": search.micro_batch, "best": best}
        sides = {name: functools.partial(step, size) for name, size in sizes.items()}
        turns = compare_functions("", sides, pairs, device=run.device)
    what = f"step in micro-batches of {search.micro_batch} (chosen) over {best} (best of a sweep)"
    yield common.ratio_of(what, turns["seconds_a"], turns["seconds_b"], limit=1.05)
    what = f"time of the search ({found_s - began_s:.1f} s) over the sweep's"
    yield common.median_of(what, [(found_s - began_s) / (swept_s - found_s)], limit=0.25, unit="x")


if __name__ == "__main__":
    common.main(measure)

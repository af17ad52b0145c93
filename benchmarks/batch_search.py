"""The automatic micro-batch against a sweep through every size: how near its rate comes, and how much sooner."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator

import common
import torch

from speedkit.lab.workloads import load_workload
from speedkit.measure.compare import compare_functions
from speedkit.plan import Plan
from speedkit.train import micro_batch
from speedkit.train.setup import setup_run

PLAN = Plan(fused_optimizer=True)


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the step time in the chosen micro-batch over that in the best of a sweep; and the search's time."""
    batch_size, pairs = (8, 3) if quick else (64, 30)
    workload = load_workload("audio", clips=240, size="small", max_duration_s=2.0)
    recipe, device = dataclasses.replace(workload.recipe, batch_size=batch_size), torch.device("cpu")
    search = micro_batch.micro_batch_for(workload, recipe, PLAN, device=device, make_run=setup_run)

    # The sweep measures every size as a search measures its few.
    began_s = time.perf_counter()
    longest_first, plan = micro_batch.with_longest_first(workload), micro_batch.trial_plan(PLAN)
    run = setup_run(longest_first, recipe, plan, device=device, progress=False, endless=True)
    with contextlib.closing(run):
        trial = micro_batch.trial_of(run, batch_size)
        rates = trial.rates([size for size in range(1, batch_size + 1) if trial.fits(size, math.inf)])
        sweep_s = time.perf_counter() - began_s
        best = max(rates, key=lambda size: rates[size])
        sides = {
            name: functools.partial(trial.step, trial.batch_of(size), math.ceil(batch_size / size))
            for name, size in (("chosen", search.micro_batch), ("best", best))
        }
        turns = compare_functions("", sides, pairs, device=device)
    what = f"step in micro-batches of {search.micro_batch} (chosen) over {best} (best of a sweep)"
    yield common.ratio_of(what, turns["seconds_a"], turns["seconds_b"], limit=1.05)
    what = f"time of the search ({search.seconds:.1f} s) over the sweep's"
    yield common.median_of(what, [search.seconds / sweep_s], limit=0.25, unit="x")


if __name__ == "__main__":
    common.main(measure)

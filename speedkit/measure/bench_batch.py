"""The benchmark of the automatic batch size, against a sweep through every size."""

import dataclasses
import time
from collections.abc import Callable

import torch

from speedkit.hardware import this_machine
from speedkit.measure.bench import Row, ends, row
from speedkit.measure.turns import in_turns
from speedkit.plan import Plan
from speedkit.train.batch_size import ROUNDS, WINDOW_S, search
from speedkit.train.run import loss_under, make_learner
from speedkit.train.trial import Trial
from speedkit.workloads import load_workload

PLAN = Plan(fused_optimizer=True)


def batch(batch_size: int = 64, pairs: int = 30, clips: int = 240) -> list[Row]:
    """Step time in the chosen micro-batch over that in the best of a sweep through all sizes; and the search's time.

    A sweep times every size as often as a search times those near the best; the two sizes are compared afresh.
    """
    workload = load_workload("audio", clips=clips, size="small", max_duration_s=2.0)
    recipe = dataclasses.replace(workload.recipe, batch_size=batch_size)
    device = this_machine().device
    found = search(workload, recipe, PLAN, device, make_learner, loss_under)
    began_s = time.perf_counter()
    learner = make_learner(workload, recipe, PLAN, device)
    trial = Trial(workload, recipe, PLAN, device, learner, loss_under(PLAN, workload, device), None)
    sizes = [size for size in range(1, trial.count + 1) if trial.fits(trial.step, size)]
    least = {size: min(trial.time(size, WINDOW_S) for _ in range(2 + ROUNDS)) for size in sizes}
    sweep_s = time.perf_counter() - began_s
    best = min(least, key=lambda size: least[size])

    def step_in(size: int) -> Callable[[], None]:
        def step() -> None:
            for start in range(0, trial.count, size):
                trial.learn(size, start)

        return step

    turns = in_turns("", {"chosen": step_in(found.micro_batch), "best": step_in(best)}, pairs, torch.device(device))
    what = f"step in micro-batches of {found.micro_batch} (chosen) over {best} (best of a sweep)"
    return [
        row(what, ends(turns["seconds_a"], turns["seconds_b"]), 1.05, "x"),
        row(f"time of the search ({found.seconds:.1f} s) over the sweep's", [found.seconds / sweep_s], 0.25, "x"),
    ]


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {"batch": batch}

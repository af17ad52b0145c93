"""Measure how training scales with ranks: what lesson 40 starts under torchrun.

    torchrun --standalone --nproc-per-node 2 -m speedkit.lessons.ranks '[{"workload": "image", "out": "image.json"}]'

The argument is a list of jobs, each with the keyword arguments of `measure`, and the file that rank 0 writes.
"""

import dataclasses
import json
import math
import os
import random
import sys
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from speedkit import Plan, load_workload
from speedkit.clock import Stopwatch, timed
from speedkit.measure.turns import measure_pairs
from speedkit.train.batches import next_batch
from speedkit.train.loop import steps
from speedkit.train.run import TrainingRun
from speedkit.train.setup import setup_run

SIZES = [4096 * 8**power for power in range(5)]  # bytes of the all-reduces that are timed, 4 KiB to 16 MiB
LOSS_STEPS = 4  # whose losses are kept, to be compared with those of one process
REPEATS = 9


Steps = Generator[int, None, None]  # of a run, one at each `next`


def measure(
    workload: str,
    *,
    batch_size: int = 128,
    strategy: Literal["ddp", "fsdp"] = "ddp",
    device: str = "auto",
    pairs: int = 10,
    turn_s: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Return raw seconds that all ranks, each of which calls this, find together.

    Rank 0 makes N times as many steps of `batch_size` samples as all N ranks make of N times that, while the others
    wait in a barrier: time A / time B is the speed-up. In a control all ranks make steps of their own, and exchange
    nothing. Besides: the passes of a step alone, and all-reduces of several sizes.
    """
    made = load_workload(workload, **options)
    ranks = int(os.environ["WORLD_SIZE"])
    recipe = dataclasses.replace(made.recipe, batch_size=batch_size, drop_last=True)
    whole = dataclasses.replace(recipe, batch_size=ranks * batch_size)
    plan = Plan(strategy=strategy, fused_optimizer=True, cache="device")
    shared = dataclasses.replace(plan, ranks=ranks)
    together = setup_run(made, whole, shared, device=device, endless=True, progress=False)
    alone = setup_run(made, recipe, plan, device=device, endless=True, progress=False)
    steps_together = steps(together)
    steps_alone = steps(alone)

    losses = warm_up(together, steps_together, steps_alone)
    count = steps_per_turn((steps_together, steps_alone), alone.device, turn_s)
    found = {
        "workload": made.name,
        "ranks": ranks,
        "strategy": strategy,
        "device": str(alone.device),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "batch_size": batch_size,
        "gradient_bytes": sum(weight.nbytes for weight in alone.learner.parameters),
        "losses": losses,
        "steps_per_turn": count,
        "measurements": against_one(steps_together, steps_alone, alone.device, count=count, pairs=pairs),
        "passes": passes_of_rank_0(alone),
        "all_reduce": all_reduces(alone.device),
    }
    together.ranks.all_gather(None)  # nothing may be under way when a rank leaves
    for side, run in ((steps_together, together), (steps_alone, alone)):
        side.close()
        run.close()
    return found


def advance(steps_of_run: Steps, count: int) -> None:
    """Make `count` steps."""
    for _ in range(count):
        next(steps_of_run)


def warm_up(together: TrainingRun, steps_together: Steps, steps_alone: Steps) -> list[float]:
    """Make LOSS_STEPS steps of both sides; return the losses of all ranks, each the mean of what a rank has of it."""
    losses = []
    for _ in range(LOSS_STEPS):
        advance(steps_alone, 1)
        advance(steps_together, 1)
        loss = together.position.last_loss.clone()
        dist.all_reduce(loss)
        losses.append(float(loss / dist.get_world_size()))
    return losses


def steps_per_turn(sides: Sequence[Steps], device: torch.device, turn_s: float) -> int:
    """Return how many steps rank 0 finds to last `turn_s`."""
    step_s = max(min(timed(partial(next, side), device, 3)) for side in sides)
    agreed = [math.ceil(turn_s / step_s)]
    dist.broadcast_object_list(agreed)
    return agreed[0]


def against_one(together: Steps, alone: Steps, device: torch.device, *, count: int, pairs: int) -> list[dict[str, Any]]:
    """Return what turns show of all ranks, of `count` steps each, against rank 0 that makes as many for all of them."""
    stopwatch = Stopwatch(device)

    def turn(side: Steps, number: int, *, steps: int) -> float:  # of `number` steps each: longer ones confirm none
        dist.barrier()
        stopwatch.start()
        advance(side, number)
        dist.barrier()
        return stopwatch.stop()

    only_first = dist.get_world_size() * count if dist.get_rank() == 0 else 0
    measurements = []
    for name, side in (("all", together), ("all, nothing shared", alone)):
        turns = partial(turn, alone, only_first), partial(turn, side, count)
        # All ranks draw the same order, and none may end early: the others would wait for it.
        taken = measure_pairs(*turns, rng=random.Random(0), pairs=pairs, looks=())
        row = {"name": f"{name} against one", "a": "one", "b": name, "decision": taken.decision}
        times = {"seconds_a": taken.seconds_a, "seconds_b": taken.seconds_b}
        measurements.append(row | times | vars(taken.interval))
    return measurements


def passes_of_rank_0(alone: TrainingRun) -> dict[str, list[float]]:
    """Return the seconds of a step's passes on rank 0, while the others wait; nothing on these."""
    batch = next_batch(alone)
    forward = partial(alone.workload.loss, alone.learner.model, batch, alone.recipe)
    passes = {}
    if dist.get_rank() == 0:
        passes["forward_s"] = timed(forward, alone.device, REPEATS)
        passes["both_s"] = timed(lambda: forward()[0].backward(), alone.device, REPEATS)
    dist.barrier()
    return passes


def all_reduces(device: torch.device) -> list[dict[str, Any]]:
    """Return the seconds of all-reduces of each of SIZES bytes."""
    reduced = []
    for size in SIZES:
        call = partial(dist.all_reduce, torch.zeros(size // 4, device=device))
        reduced.append({"bytes": size, "seconds": timed(call, device, REPEATS, warmup=3)})
    return reduced


def main() -> None:
    """Do each job in all ranks; rank 0 writes what was found."""
    if not dist.is_torchelastic_launched():
        sys.exit("start it under torchrun: python -m torch.distributed.run --standalone --nproc-per-node 2 ...")
    for job in json.loads(sys.argv[1]):
        out = Path(job.pop("out"))
        found = measure(**job)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.barrier()  # no rank leaves while another still waits for it
    sys.stdout.flush()
    os._exit(0)  # Python's way out makes gloo's threads abort at times


if __name__ == "__main__":
    main()

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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from speedkit import Plan, load_workload
from speedkit.clock import Stopwatch, timed
from speedkit.measure.turns import measure_pairs
from speedkit.train.batches import next_batch
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run

SIZES = [4096 * 8**power for power in range(5)]  # bytes of the all-reduces that are timed, 4 KiB to 16 MiB
LOSS_STEPS = 4  # whose losses are kept, to be compared with those of one process
REPEATS = 9


def advance(steps_of_run, count):
    """Make `count` steps."""
    for _ in range(count):
        next(steps_of_run)


def measure(workload, *, batch_size=128, strategy="ddp", device="auto", pairs=10, turn_s=1.0, **options):
    """Return raw seconds that all ranks, each of which calls this, find together.

    Rank 0 makes N times as many steps of `batch_size` samples as all N ranks make of N times that, while the others
    wait in a barrier: time A / time B is the speed-up. In a control all ranks make steps of their own, and exchange
    nothing. Besides: the passes of a step alone, and all-reduces of several sizes.
    """
    made, ranks = load_workload(workload, **options), int(os.environ["WORLD_SIZE"])
    recipe = dataclasses.replace(made.recipe, batch_size=batch_size, drop_last=True)
    whole = dataclasses.replace(recipe, batch_size=ranks * batch_size)
    plan = Plan(strategy=strategy, fused_optimizer=True, cache="device")

    together = setup_run(
        made, whole, dataclasses.replace(plan, ranks=ranks), device=device, endless=True, progress=False
    )
    alone = setup_run(made, recipe, plan, device=device, endless=True, progress=False)
    steps_together, steps_alone, target = steps(together), steps(alone), together.device

    # Warm up; the loss of all ranks is the mean of what each has of it.
    losses = []
    for _ in range(LOSS_STEPS):
        advance(steps_alone, 1)
        advance(steps_together, 1)
        losses.append(together.position.last_loss.clone())
        dist.all_reduce(losses[-1])
        losses[-1] /= ranks

    # Turns of as many steps as rank 0 finds to last `turn_s`.
    step_s = max(min(timed(partial(next, side), target, 3)) for side in (steps_together, steps_alone))
    agreed = [math.ceil(turn_s / step_s)]
    dist.broadcast_object_list(agreed)
    count = agreed[0]

    stopwatch = Stopwatch(target)

    def turn(side, number, *, steps):  # of `number` steps each, for none are confirmed by longer ones
        dist.barrier()
        stopwatch.start()
        advance(side, number)
        dist.barrier()
        return stopwatch.stop()

    only_first = ranks * count if dist.get_rank() == 0 else 0
    sides = {"all": steps_together, "all, nothing shared": steps_alone}
    measurements = []
    for name, side in sides.items():
        turns = partial(turn, steps_alone, only_first), partial(turn, side, count)
        # All ranks draw the same order, and none may end early: the others would wait for it.
        taken = measure_pairs(*turns, rng=random.Random(0), pairs=pairs, looks=())
        row = {"name": f"{name} against one", "a": "one", "b": name, "decision": taken.decision}
        times = {"seconds_a": taken.seconds_a, "seconds_b": taken.seconds_b}
        measurements.append(row | times | vars(taken.interval))

    # The passes of rank 0 while the others wait, and all-reduces.
    batch = next_batch(alone)
    forward = partial(made.loss, alone.learner.model, batch, recipe)
    passes = {}
    if dist.get_rank() == 0:
        passes["forward_s"] = timed(forward, target, REPEATS)
        passes["both_s"] = timed(lambda: forward()[0].backward(), target, REPEATS)
    dist.barrier()
    reduced = []
    for size in SIZES:
        call = partial(dist.all_reduce, torch.zeros(size // 4, device=target))
        reduced.append({"bytes": size, "seconds": timed(call, target, REPEATS, warmup=3)})

    found = {
        "workload": made.name,
        "ranks": ranks,
        "strategy": strategy,
        "device": str(target),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "batch_size": batch_size,
        "gradient_bytes": sum(weight.nbytes for weight in alone.learner.parameters),
        "losses": [float(loss) for loss in losses],
        "steps_per_turn": count,
        "measurements": measurements,
        "passes": passes,
        "all_reduce": reduced,
    }
    together.ranks.all_gather(None)  # nothing may be under way when a rank leaves
    for side, run in ((steps_together, together), (steps_alone, alone)):
        side.close()
        run.close()
    return found


def main():
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

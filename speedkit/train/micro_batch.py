"""The micro-batch found by trying: the fastest that fits, by whole optimizer steps."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import torch
from torch import nn

from speedkit.clock import timed
from speedkit.data.batch import map_batch
from speedkit.errors import SpeedkitError
from speedkit.machine import free_bytes, this_machine
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import train
from speedkit.train.memory import is_out_of_memory, peak_bytes, release
from speedkit.train.run import TrainingRun
from speedkit.workload import Workload

ROOM = 0.9  # of the free memory; the rest is for fragments, and for what others take
TOLERANCE = 0.03  # of the least time: what counts as equally fast
ROUNDS, STEPS = 4, 2  # how often a size is timed, and in how many steps each time
NEAR = 1.2  # sizes that took longer than this times the least are timed in one round only
Step = Callable[[int], object]  # makes an optimizer step in micro-batches of a size


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The micro-batch that was found, in samples, and what was tried."""

    micro_batch: int
    accumulation_steps: int  # micro-batches in an optimizer step
    seconds: dict[int, float]  # size -> least time of an optimizer step
    peak_bytes: dict[int, int]  # size that fits -> the most that a step allocated at once
    why: str


def find_micro_batch(
    step: Step,
    batch_size: int,
    *,
    device: str | torch.device = "auto",
    room_bytes: float | None = None,
    reserved_bytes: float = 0.0,
    batch_norm: bool = False,
) -> MicroBatch:
    """Return the micro-batch in which optimizer steps of `batch_size` samples are fastest, of those that fit.

    `step(size)` makes one optimizer step on the longest samples, in micro-batches of `size`, and clears the gradients
    last. It trains: give it a copy of a model that you go on with. Tried are `batch_size`, its half, and so on down to
    1. Of sizes within 3 % of the fastest the largest is chosen, for it needs the fewest passes; with `batch_norm` the
    largest of all, for smaller ones change what is learned. A size fits if its step neither runs out of memory nor
    takes more than `room_bytes`: by default nine tenths of what is free on `device`, less `reserved_bytes`. Raises
    SpeedkitError where none fits.
    """
    device = this_machine(device).device
    sizes = [batch_size]
    while sizes[0] > 1:
        sizes.insert(0, (sizes[0] + 1) // 2)
    if batch_norm:  # which takes no single sample, not as the rest of a batch either: one has no variance
        sizes = [size for size in sizes if size > 1 and batch_size % size != 1] or [batch_size]
    # The random state is afterwards as before: whoever searches by hand trains as if nothing had been tried.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # The first step allocates the optimizer's state, which is no part of what a micro-batch takes.
        peak_of_step(step, sizes[0], device)
        if room_bytes is None:
            room_bytes = ROOM * free_bytes(device) - reserved_bytes
        peaks = peaks_that_fit(step, sizes, device, room_bytes=room_bytes)
        if not peaks:
            raise SpeedkitError("not even the longest items alone fit: take shorter ones, or checkpointing=blocks")
        seconds = step_seconds(step, [max(peaks)] if batch_norm else [*peaks], device)
    micro_batch = largest_of_fastest(seconds)
    why = f"the {'largest, for batch norm,' if batch_norm else 'fastest'} of {', '.join(map(str, peaks))}"
    if len(peaks) < len(sizes):
        why = f"{why}; {sizes[len(peaks)]} does not fit"
    return MicroBatch(micro_batch, math.ceil(batch_size / micro_batch), seconds, peak_bytes=peaks, why=why)


def peaks_that_fit(step: Step, sizes: list[int], device: torch.device, *, room_bytes: float) -> dict[int, int]:
    """Return the bytes that a step allocates by size, of ascending `sizes` up to the first that does not fit."""
    peaks: dict[int, int] = {}
    for size in sizes:
        # What a step takes is a constant and so much per sample: at most in proportion to what a smaller one took.
        # Linux may end a process that takes too much RAM, which no exception announces.
        expected = min((peaks[smaller] / smaller * size for smaller in peaks), default=0.0)
        if device.type == "cpu" and expected > room_bytes:
            break
        peak = peak_of_step(step, size, device)
        if peak is None or peak > room_bytes:
            break
        peaks[size] = peak
    return peaks


def peak_of_step(step: Step, size: int, device: torch.device) -> int | None:
    """Return the most bytes that a step allocates at once; None where it runs out of memory."""
    try:
        return peak_bytes(functools.partial(step, size), device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release(device)
    return None


def step_seconds(step: Step, sizes: list[int], device: torch.device) -> dict[int, float]:
    """Return the least time of a step by size: what else goes on only adds, and rounds make a drift hit all alike."""
    seconds = dict.fromkeys(sizes, math.inf)
    for _ in range(ROUNDS):
        for size in sizes:
            seconds[size] = min(seconds[size], *timed(functools.partial(step, size), device, STEPS))
        sizes = [size for size in sizes if seconds[size] <= NEAR * min(seconds.values())]
    return seconds


def largest_of_fastest(seconds: dict[int, float]) -> int:
    """Return the largest size whose step takes at most TOLERANCE longer than the fastest."""
    least_s = min(seconds.values())
    return max(size for size in seconds if seconds[size] <= (1 + TOLERANCE) * least_s)


def micro_batch_for(
    workload: Workload, recipe: Recipe, plan: Plan, *, device: torch.device, make_run: Callable[..., TrainingRun]
) -> MicroBatch:
    """Return what `find_micro_batch` finds for steps of `recipe.batch_size` of the longest items.

    A run of their own makes them, by `make_run` (`setup_run`), uncompiled: compiling each size would take longest.
    """
    longest_first, plain = with_longest_first(workload), trial_plan(plan)
    run = make_run(longest_first, recipe, plain, device=device, progress=False, endless=True)
    with contextlib.closing(run):
        longest = next(run.data.test.one_epoch())
        batch_size = min(recipe.batch_size, len(workload.train))
        # Some of the longest may be unreadable: others stand in for them.
        batch = map_batch(longest, operator.itemgetter(torch.arange(batch_size, device=device) % len(longest.inputs)))
        # Freed by the first step, it would make the profiler warn of memory that it has not seen taken.
        run.position.recent.append((run.position.last_loss, 0, 0))

        def step(size: int) -> None:
            run.learner.micro_batch = size
            run.position.batch = batch  # instead of one that is loaded
            next(train(run))
            run.learner.optimizer.zero_grad(set_to_none=True)  # gradients are a part of a step's memory

        reserved_bytes = 0
        if plan.cache == ("device" if device.type == "cuda" else "ram"):  # made later, in the same memory
            reserved_bytes = len(workload.train) * longest.inputs[0].nbytes
        batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.learner.model.modules())
        return find_micro_batch(step, batch_size, device=device, reserved_bytes=reserved_bytes, batch_norm=batch_norm)


def with_longest_first(workload: Workload) -> Workload:
    """Return the workload with its training items for test items, the longest first: test items come in order."""
    items = workload.train
    if workload.length is not None:
        items = sorted(items, key=workload.length, reverse=True)
    return dataclasses.replace(workload, test=items)


def trial_plan(plan: Plan) -> Plan:
    """Return `plan` without what only takes time, or memory that is counted apart, when steps are tried out."""
    return dataclasses.replace(
        plan, micro_batch=None, compile="off", cache="off", workers=0, ranks=1, log_every=1 << 30
    )

"""The micro-batch found by trying: the smallest near the best rate."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from speedkit.clock import timed
from speedkit.data.loader import BatchStream
from speedkit.errors import SpeedkitError
from speedkit.hardware import free_bytes
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import train
from speedkit.train.memory import is_out_of_memory, peak_bytes, release
from speedkit.workloads.workload import Batch, Workload

if TYPE_CHECKING:
    from speedkit.train.setup import TrainingRun

ROOM = 0.9  # of the free memory; the rest is for fragments, and for what others take
TOLERANCE = 0.03  # of the best rate: what a smaller micro-batch may be slower by
ROUNDS, STEPS = 3, 3  # how often a size is timed, and in how many steps each time
NEAR = 1.2  # sizes that took longer than this times the least are timed once only


@dataclasses.dataclass(frozen=True)
class MicroBatchSearch:
    """What a search found. Every size in it, in samples, was run."""

    micro_batch: int
    largest: int  # of the sizes tried, that fits
    rates: dict[int, float]  # size -> samples/s of optimizer steps
    peak_bytes: dict[int, int]  # size -> memory of a step, beside model, optimizer state and batch
    why: str
    seconds: float  # that the search took


def find_micro_batch(
    workload: Workload,
    recipe: Recipe,
    plan: Plan,
    *,
    device: torch.device,
    make_run: Callable[..., "TrainingRun"],
    room_bytes: float | None = None,
) -> MicroBatchSearch:
    """Return the micro-batch that suits steps of `recipe.batch_size` samples, found by training on the longest items.

    Tried are the batch, its half, quarter ... The throughput knee is chosen, or for a model with batch norm the largest
    that fits: smaller ones change what that learns. Steps are made by `make_run` (`setup_run`), uncompiled: compiling
    each size would take longest. `room_bytes` limits a step's memory. Raises SpeedkitError where no size fits.
    """
    began_s = time.perf_counter()
    make = functools.partial(make_run, with_longest_first(workload), recipe, trial_plan(plan), device=device)
    # The random state is afterwards as before: whoever searches by hand trains as if nothing had been tried.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), contextlib.closing(make(progress=False, endless=True)) as run:
        trial = MicroBatchTrial(run, min(recipe.batch_size, len(workload.train)))
        # The first step allocates the optimizer's state, which is no part of what a micro-batch takes.
        trial.fits(trial.sizes[0], math.inf)
        trial.peak_bytes.clear()
        if room_bytes is None:
            cached = plan.cache == ("device" if device.type == "cuda" else "ram")  # made later, in the same memory
            room_bytes = ROOM * free_bytes(device) - cached * len(workload.train) * trial.batch[0][0].nbytes
        sizes = list(itertools.takewhile(functools.partial(trial.fits, room_bytes=room_bytes), trial.sizes))
        if not sizes:
            raise SpeedkitError("not even the longest items alone fit: take shorter ones, or checkpointing=blocks")
        rates = trial.rates(sizes)
    chosen, why = knee(rates), f"the smallest within {TOLERANCE:.0%} of the best"
    if trial.batch_norm:
        chosen, why = sizes[-1], "the largest, for batch norm"
    why = f"{why} of {', '.join(map(str, sizes))}"
    if sizes != trial.sizes:
        why = f"{why}; {trial.sizes[len(sizes)]} does not fit"
    return MicroBatchSearch(chosen, sizes[-1], rates, trial.peak_bytes, why, time.perf_counter() - began_s)


def with_longest_first(workload: Workload) -> Workload:
    """Return the workload with its training items for test items, the longest first: test items come in order."""
    items = workload.train
    if workload.length is not None:
        items = sorted(items, key=workload.length, reverse=True)
    return dataclasses.replace(workload, test=items)


def trial_plan(plan: Plan) -> Plan:
    """Return `plan` without what only takes time, or memory that is counted apart, when steps are tried out."""
    return dataclasses.replace(
        plan, micro_batch=None, compile="off", cache="off", shards=False, workers=0, ranks=1, log_every=1 << 30
    )


def preallocate_for_longer(run: "TrainingRun") -> None:
    """Preallocate where a training on a GPU may meet batches that are longer than those before."""
    varies = run.workload.length is not None and not run.plan.bucket
    if run.device.type == "cuda" and varies and run.ranks is None and math.isfinite(run.total_steps):
        preallocate(run)


def preallocate(run: "TrainingRun") -> None:
    """Take a copy of the model over the longest items and back first, so that the memory is there for all others.

    Else each longer batch takes more, and leaves pieces too small for the next (PyTorch's performance tuning guide,
    "Preallocate memory in case of variable input length"). What is learned stays the same bits.
    """
    longest, plan = with_longest_first(run.workload).test, trial_plan(run.plan)
    stream = BatchStream(run.workload, longest, plan, batch_size=run.micro_batch, seed=None, device=run.device)
    with torch.random.fork_rng([run.device] * (run.device.type == "cuda")), contextlib.closing(stream), run.autocast:
        try:
            loss, _ = run.workload.loss(copy.deepcopy(run.model), next(stream), run.recipe)
            loss.backward()
        except Exception as error:
            if not is_out_of_memory(error):  # the step that meets such a batch makes its parts smaller
                raise


class MicroBatchTrial:
    """Measures memory and time of training steps on the longest items, for one size of micro-batch at a time."""

    def __init__(self, run: "TrainingRun", batch_size: int):
        self.run, self.batch_size = run, batch_size
        longest = next(run.test_batches.one_epoch())
        # Some of the longest may be unreadable: others stand in for them.
        indices = torch.arange(batch_size, device=run.device) % len(longest[0])
        self.batch: Batch = tuple(tensor[indices] for tensor in longest)
        self.batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.model.modules())
        smallest = min(batch_size, 2 if self.batch_norm else 1)  # one sample has no variance
        # In 1, 2, 4 ... parts, which are even.
        halves = {math.ceil(batch_size / (1 << power)) for power in range(batch_size.bit_length() + 1)}
        self.sizes = sorted(size for size in halves if size >= smallest)
        self.peak_bytes: dict[int, int] = {}

    def take_step(self, size: int, samples: int) -> None:
        """Make an optimizer step on so many samples, in micro-batches of `size`."""
        self.run.micro_batch = size
        self.run.batch = tuple(tensor[:samples] for tensor in self.batch)  # instead of one that is loaded
        next(train(self.run))

    def fits(self, size: int, room_bytes: float) -> bool:
        """Return whether a step has room; on a CPU a size that could need more than there is is never run."""
        # What a step takes is a constant and so much per sample: at most in proportion to what a smaller one took.
        # Linux may end a process that takes too much RAM, which no exception announces.
        expected = min((peak / smaller * size for smaller, peak in self.peak_bytes.items()), default=0.0)
        if self.run.device.type == "cpu" and expected > room_bytes:
            return False
        self.run.optimizer.zero_grad(set_to_none=True)  # gradients are a part of a step's memory
        # Freed by the step, it would make the profiler warn of memory that it has not seen taken.
        _held = self.run.last_loss
        try:
            # Two micro-batches, for the second meets the gradients of the first.
            peak: float = peak_bytes(lambda: self.take_step(size, 2 * size), self.run.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            peak = math.inf
        if peak <= room_bytes:
            self.peak_bytes[size] = int(peak)
            return True
        self.run.optimizer.zero_grad(set_to_none=True)
        release(self.run.device)
        return False

    def rates(self, sizes: list[int]) -> dict[int, float]:
        """Return samples/s of optimizer steps in micro-batches of each of `sizes`.

        The least of a size's times counts, for what else goes on only ever adds; rounds make a drift hit all alike.
        """
        minimum_s, candidates = dict.fromkeys(sizes, math.inf), sizes
        for _ in range(ROUNDS):
            for size in candidates:
                step = functools.partial(self.take_step, size, self.batch_size)
                minimum_s[size] = min(minimum_s[size], *timed(step, self.run.device, STEPS))
            candidates = [size for size in candidates if minimum_s[size] <= NEAR * min(minimum_s.values())]
        return {size: self.batch_size / seconds for size, seconds in minimum_s.items()}


def knee(rates: dict[int, float]) -> int:
    """Return the smallest size whose rate is at most TOLERANCE below the best."""
    return min(size for size, rate in rates.items() if rate >= (1 - TOLERANCE) * max(rates.values()))

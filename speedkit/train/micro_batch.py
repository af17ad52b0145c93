"""The micro-batch found by trying: the smallest near the best rate."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from speedkit.clock import timed
from speedkit.data.loader import BatchStream
from speedkit.data.own_loader import map_batch
from speedkit.errors import SpeedkitError
from speedkit.machine import free_bytes
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import train
from speedkit.train.memory import is_out_of_memory, peak_bytes, release
from speedkit.train.run import TrainingRun
from speedkit.workload import Workload

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
    step: Callable[[Any], Any], batch_of: Callable[[int], Any], batch_size: int, *, room_bytes: float | None = None
) -> MicroBatchSearch:
    """Return the micro-batch that suits a loop of your own whose optimizer steps take `batch_size` samples.

    `step(batch)` makes a forward and a backward pass, and `batch_of(size)` a batch on the device, of the longest
    samples: for several lengths, search with each. The throughput knee is chosen; a model with batch norm takes
    `largest`. Gradients are left to be cleared. `room_bytes` limits a step's memory. Raises SpeedkitError where no size
    fits.
    """

    def repeat(batch: Any, passes: int) -> None:
        for _ in range(passes):
            step(batch)

    device = next((leaf.device for leaf in tree_leaves(batch_of(1)) if isinstance(leaf, Tensor)), torch.device("cpu"))
    return MicroBatchTrial(repeat, batch_of, batch_size, device).search(room_bytes)


def micro_batch_for(
    workload: Workload,
    recipe: Recipe,
    plan: Plan,
    *,
    device: torch.device,
    make_run: Callable[..., TrainingRun],
    room_bytes: float | None = None,
) -> MicroBatchSearch:
    """Return the micro-batch that suits steps of `recipe.batch_size` samples, found by training on the longest items.

    The throughput knee is chosen, or for a model with batch norm the largest that fits: smaller ones change what that
    learns. Steps are made by `make_run` (`setup_run`), uncompiled: compiling each size would take longest. `room_bytes`
    limits a step's memory. Raises SpeedkitError where no size fits.
    """
    began_s = time.perf_counter()
    make = functools.partial(make_run, with_longest_first(workload), recipe, trial_plan(plan), device=device)
    with contextlib.closing(make(progress=False, endless=True)) as run:
        trial = trial_of(run, min(recipe.batch_size, len(workload.train)))
        if plan.cache == ("device" if device.type == "cuda" else "ram"):  # made later, in the same memory
            trial.reserved_bytes = len(workload.train) * next(run.test_batches.one_epoch())[0][0].nbytes
        return dataclasses.replace(trial.search(room_bytes), seconds=time.perf_counter() - began_s)


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


def preallocate_for_longer(run: TrainingRun) -> None:
    """Preallocate where a training on a GPU may meet batches that are longer than those before."""
    varies = run.workload.length is not None and not run.plan.bucket
    if run.device.type == "cuda" and varies and run.ranks is None and math.isfinite(run.total_steps):
        preallocate(run)


def preallocate(run: TrainingRun) -> None:
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


def trial_of(run: TrainingRun, batch_size: int) -> "MicroBatchTrial":
    """Return the trial of a run's optimizer steps on `batch_size` of the longest items."""
    longest = next(run.test_batches.one_epoch())
    # Some of the longest may be unreadable: others stand in for them.
    batch = map_batch(longest, operator.itemgetter(torch.arange(batch_size, device=run.device) % len(longest[0])))
    batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.model.modules())

    def begin(size: int) -> tuple[int, Tensor]:
        run.optimizer.zero_grad(set_to_none=True)  # gradients are a part of a step's memory
        return size, run.last_loss  # freed by the step, it would make the profiler warn of memory it has not seen taken

    def take_step(start: tuple[int, Tensor], passes: int) -> None:
        run.micro_batch = start[0]
        # Instead of one that is loaded.
        run.batch = map_batch(batch, operator.itemgetter(slice(passes * start[0])))
        next(train(run))

    return MicroBatchTrial(take_step, begin, batch_size, run.device, batch_norm=batch_norm)


@dataclasses.dataclass
class MicroBatchTrial:
    """Measures memory and time of `step(batch_of(size), passes)`: a step in so many micro-batches of a size."""

    step: Callable[[Any, int], Any]
    batch_of: Callable[[int], Any]
    batch_size: int
    device: torch.device
    batch_norm: bool = False  # of which one sample has no variance
    reserved_bytes: float = 0.0  # of the free memory, for something else
    peak_bytes: dict[int, int] = dataclasses.field(default_factory=dict)

    def search(self, room_bytes: float | None = None) -> MicroBatchSearch:
        """Return the smallest size near the best rate, of those that fit into `room_bytes` or the free memory."""
        began_s, smallest = time.perf_counter(), min(self.batch_size, 2 if self.batch_norm else 1)
        # In 1, 2, 4 ... parts, which are even.
        halves = {math.ceil(self.batch_size / (1 << power)) for power in range(self.batch_size.bit_length() + 1)}
        candidates = sorted(size for size in halves if size >= smallest)
        # The random state is afterwards as before: whoever searches by hand trains as if nothing had been tried.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            # The first step allocates the optimizer's state, which is no part of what a micro-batch takes.
            self.fits(candidates[0], math.inf)
            self.peak_bytes.clear()
            if room_bytes is None:
                room_bytes = ROOM * free_bytes(self.device) - self.reserved_bytes
            sizes = list(itertools.takewhile(functools.partial(self.fits, room_bytes=room_bytes), candidates))
            if not sizes:
                raise SpeedkitError("not even the longest items alone fit: take shorter ones, or checkpointing=blocks")
            rates = self.rates(sizes)
        chosen, why = knee(rates), f"the smallest within {TOLERANCE:.0%} of the best"
        if self.batch_norm:
            chosen, why = sizes[-1], "the largest, for batch norm"
        why = f"{why} of {', '.join(map(str, sizes))}"
        if sizes != candidates:
            why = f"{why}; {candidates[len(sizes)]} does not fit"
        return MicroBatchSearch(chosen, sizes[-1], rates, self.peak_bytes, why, time.perf_counter() - began_s)

    def fits(self, size: int, room_bytes: float) -> bool:
        """Return whether a step has room; on a CPU a size that could need more than there is is never run."""
        # What a step takes is a constant and so much per sample: at most in proportion to what a smaller one took.
        # Linux may end a process that takes too much RAM, which no exception announces.
        expected = min((peak / smaller * size for smaller, peak in self.peak_bytes.items()), default=0.0)
        if self.device.type == "cpu" and expected > room_bytes:
            return False
        try:
            # Two micro-batches, for the second meets the gradients of the first.
            peak: float = peak_bytes(functools.partial(self.step, self.batch_of(size), 2), self.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            peak = math.inf
        if peak <= room_bytes and peak < math.inf:
            self.peak_bytes[size] = int(peak)
            return True
        release(self.device)
        return False

    def rates(self, sizes: list[int]) -> dict[int, float]:
        """Return samples/s of steps in micro-batches of each of `sizes`.

        The least of a size's times counts, for what else goes on only ever adds; rounds make a drift hit all alike.
        """
        minimum_s, candidates = dict.fromkeys(sizes, math.inf), sizes
        for _ in range(ROUNDS):
            for size in candidates:
                step = functools.partial(self.step, self.batch_of(size), math.ceil(self.batch_size / size))
                minimum_s[size] = min(minimum_s[size], *timed(step, self.device, STEPS))
            candidates = [size for size in candidates if minimum_s[size] <= NEAR * min(minimum_s.values())]
        return {size: self.batch_size / seconds for size, seconds in minimum_s.items()}


def knee(rates: dict[int, float]) -> int:
    """Return the smallest size whose rate is at most TOLERANCE below the best."""
    return min(size for size, rate in rates.items() if rate >= (1 - TOLERANCE) * max(rates.values()))

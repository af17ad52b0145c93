"""The micro-batch found by trying: the smallest near the best rate."""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable

import psutil
import torch
from torch import nn

from speedkit.clock import Stopwatch
from speedkit.errors import SpeedkitError
from speedkit.hardware import usable_ram_bytes
from speedkit.plan import EffectivePlan, Fallback, Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import train
from speedkit.train.memory import is_out_of_memory, peak_bytes, release
from speedkit.train.run import TrainingRun
from speedkit.workloads.workload import Batch, Workload

ROOM = 0.9  # of the free memory; the rest is for fragments, and for what others take
TOLERANCE = 0.03  # of the best rate: what a smaller micro-batch may be slower by
ROUNDS, WINDOW_S = 4, 0.05  # how often a size is timed, and for how long at least
NEAR = 1.2  # sizes that took longer than this times the least are timed once only


def choose_micro_batch(
    effective: EffectivePlan,
    workload: Workload,
    recipe: Recipe,
    *,
    device: torch.device,
    make_run: Callable[..., TrainingRun],
) -> EffectivePlan:
    """Return `effective`, where micro_batch="auto" with the number that `find_micro_batch` finds."""
    if effective.plan.micro_batch != "auto":
        return effective
    search = find_micro_batch(workload, recipe, effective.plan, device=device, make_run=make_run)
    release(device)  # what the search had allocated, in blocks cut for other sizes
    return effective.with_fallbacks(Fallback("micro_batch", "auto", search.micro_batch, search.why))


@dataclasses.dataclass(frozen=True)
class MicroBatchSearch:
    """What a search found. Every size in it, in samples, was run."""

    micro_batch: int
    largest: int  # that fits
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
    make_run: Callable[..., TrainingRun],
    room_bytes: float | None = None,
) -> MicroBatchSearch:
    """Return the micro-batch that suits steps of `recipe.batch_size` samples, found by training on the longest items.

    It is the throughput knee, or for a model with batch norm the largest: smaller ones change what that learns. The
    steps are those of a run that `make_run` (`setup_run`) makes for it, uncompiled: compiling size by size would take
    longer than all the rest. `room_bytes` replaces what a step may take of the free memory. Raises SpeedkitError where
    not even the smallest micro-batch fits.
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
            raise SpeedkitError(f"of the longest items {trial.refused}: take shorter ones, or checkpointing=blocks")
        if trial.refused:
            sizes = trial.refine(sizes, room_bytes)
        rates = trial.rates(sizes)
    best = max(rates, key=lambda size: rates[size])
    chosen, why = knee(rates), f"the smallest within {TOLERANCE:.0%} of the best"
    if trial.batch_norm:
        chosen, why = sizes[-1], "the largest, for batch norm"
    why += f"; {rates[best]:.3g} samples/s with {best}; tried {', '.join(map(str, sizes))}"
    why += f"; {trial.refused}" if trial.refused else ""
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


class MicroBatchTrial:
    """Measures memory and time of training steps on the longest items, for one size of micro-batch at a time."""

    def __init__(self, run: TrainingRun, batch_size: int):
        self.run, self.batch_size = run, batch_size
        longest = next(run.test_batches.one_epoch())
        # Some of the longest may be unreadable: others stand in for them.
        indices = torch.arange(batch_size, device=run.device) % len(longest[0])
        self.batch: Batch = tuple(tensor[indices] for tensor in longest)
        self.batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in run.model.modules())
        smallest = min(batch_size, 2 if self.batch_norm else 1)  # one sample has no variance
        powers = [min(1 << power, batch_size) for power in range(batch_size.bit_length() + 1)]
        self.sizes = sorted({even_micro_batch(batch_size, power) for power in powers if power >= smallest})
        self.peak_bytes: dict[int, int] = {}
        self.refused = ""  # why the last size that was tried does not fit

    def take_steps(self, size: int, samples: int, steps: int = 1) -> None:
        """Make optimizer steps on so many samples, in micro-batches of `size`."""
        self.run.micro_batch, self.run.fixed_batch = size, tuple(tensor[:samples] for tensor in self.batch)
        for _ in itertools.islice(train(self.run), steps):
            pass

    def fits(self, size: int, room_bytes: float) -> bool:
        """Return whether a step has room; on a CPU a size that could need more than there is is never run."""
        # What a step takes is a constant and so much per sample: at most in proportion to what a smaller one took.
        expected = min((peak / smaller * size for smaller, peak in self.peak_bytes.items()), default=0.0)
        if self.run.device.type == "cpu" and expected > room_bytes:
            self.refused = f"{size} could take {expected / 1e6:.3g} MB of {room_bytes / 1e6:.3g}"
            return False
        self.run.optimizer.zero_grad(set_to_none=True)  # gradients are a part of a step's memory
        # Freed by the step, these would make the profiler warn of memory that it has not seen taken.
        _held = self.run.guard.random_state, self.run.last_loss
        try:
            # Two micro-batches, for the second meets the gradients of the first.
            peak = peak_bytes(lambda: self.take_steps(size, 2 * size), self.run.device)
            if peak <= room_bytes:
                self.peak_bytes[size] = peak
                return True
            self.refused = f"{size} takes {peak / 1e6:.3g} MB of {room_bytes / 1e6:.3g}"
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.refused = f"{size} does not fit ({str(error).partition('. ')[0] or type(error).__name__})"
        self.run.optimizer.zero_grad(set_to_none=True)
        release(self.run.device)
        return False

    def refine(self, sizes: list[int], room_bytes: float) -> list[int]:
        """Return `sizes` with the largest that fits, found by halving the gap to the next one, which does not."""
        largest, beyond = sizes[-1], min(size for size in self.sizes if size > sizes[-1])
        while beyond - largest > 1:
            middle = (largest + beyond) // 2
            largest, beyond = (middle, beyond) if self.fits(middle, room_bytes) else (largest, middle)
        return [*sizes, largest] if largest > sizes[-1] else sizes

    def rates(self, sizes: list[int]) -> dict[int, float]:
        """Return samples/s of optimizer steps in micro-batches of each of `sizes`.

        The least of a size's times counts, for what else goes on only ever adds; turns make a drift hit all alike.
        """
        least = {size: self.seconds(size) for size in sizes}
        near = [size for size in sizes if least[size] <= NEAR * min(least.values())]
        for turn in range(1, ROUNDS):
            for size in near[:: (-1) ** turn]:
                least[size] = min(least[size], self.seconds(size))
        return {size: self.batch_size / seconds for size, seconds in least.items()}

    def seconds(self, size: int) -> float:
        """Return the seconds of an optimizer step in micro-batches of `size`, timed for WINDOW_S at least."""
        stopwatch, steps = Stopwatch(self.run.device), 1
        while True:
            stopwatch.start()
            self.take_steps(size, self.batch_size, steps)
            if (elapsed_s := stopwatch.stop()) >= WINDOW_S:
                return elapsed_s / steps
            steps = math.ceil(1.2 * steps * WINDOW_S / elapsed_s)


def knee(rates: dict[int, float]) -> int:
    """Return the smallest size whose rate is at most TOLERANCE below the best."""
    return min(size for size, rate in rates.items() if rate >= (1 - TOLERANCE) * max(rates.values()))


def even_micro_batch(batch_size: int, size: int) -> int:
    """Return the smallest micro-batch that cuts a batch into no more parts than `size` does: they are even then."""
    return math.ceil(batch_size / math.ceil(batch_size / size))


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that this process may still take on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, usable_ram_bytes() - psutil.Process().memory_info().rss)

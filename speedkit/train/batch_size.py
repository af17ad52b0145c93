"""The micro-batch found by trying: the throughput knee, and the largest that fits.

A search makes steps with a model of its own, uncompiled: compiling would take longer, size by size, than all the rest.
"""

import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from speedkit.clock import timed
from speedkit.data.sampler import padded_lengths
from speedkit.plan import EffectivePlan, Fallback, Plan
from speedkit.recipe import Recipe
from speedkit.train import precision
from speedkit.train.oom import release
from speedkit.train.trial import Trial

TOLERANCE = 0.03  # of the best rate: what a smaller micro-batch may be slower by
# A size is timed twice, the first time short; one that took at most NEAR times the least, ROUNDS times more, in turns.
WINDOW_S, ROUNDS, NEAR = 0.05, 4, 1.2


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found. Every size in it, in samples, was run."""

    micro_batch: int
    largest: int  # that fits
    batch_size: int  # the most that was asked for
    rates: Mapping[int, float]  # size -> samples/s, of whole optimizer steps
    peak_bytes: Mapping[int, int]  # size -> memory that a step takes beside model, optimizer state and batch
    room_bytes: float  # what it may take
    refused: Mapping[int, str]  # size -> why it does not fit
    why: str
    seconds: float  # that the search took


def choose_micro_batch(
    workload: Any,
    recipe: Recipe,
    effective: EffectivePlan,
    device: torch.device,
    make_learner: Callable[..., Any],
    loss_under: Callable[..., Any],
) -> EffectivePlan:
    """Return `effective`, where micro_batch="auto" with the number that `search` finds; the functions are `run`'s."""
    if effective.plan.micro_batch != "auto":
        return effective
    found = search(workload, recipe, effective.plan, device, make_learner, loss_under)
    return effective.with_fallbacks(Fallback("micro_batch", "auto", found.micro_batch, found.why))


def table_per_length(workload: Any, *args: Any, **options: Any) -> dict[int, Found]:
    """Return what `search` finds for each length that bucketed batches of `workload` are padded to."""
    lengths = [workload.length(item) for item in workload.train]
    table = {}
    for longest in padded_lengths(torch.tensor(lengths)):
        shorter = [item for item, length in zip(workload.train, lengths, strict=True) if length <= longest]
        table[longest] = search(dataclasses.replace(workload, train=shorter), *args, **options)
    return table


def search(
    workload: Any,
    recipe: Recipe,
    plan: Plan,
    device: torch.device,
    make_learner: Callable[..., Any],
    loss_under: Callable[..., Any],
    *,
    window_s: float = WINDOW_S,
    room_bytes: int | None = None,
) -> Found:
    """Return the micro-batch that suits steps of `recipe.batch_size` samples, found by running parts of such steps.

    It is the knee, or for a model with batch norm the largest: smaller ones change what that learns. `room_bytes`
    replaces what a step may take of the free memory. All random states are afterwards as before.
    Raises SpeedkitError when not even the smallest micro-batch fits, or an evaluation does not.
    """
    began_s, plan = time.perf_counter(), dataclasses.replace(plan, compile="off")
    with random_states_kept(device):
        precision.apply(plan)
        learner = make_learner(workload, recipe, plan, device)
        trial = Trial(workload, recipe, plan, device, learner, loss_under(plan, workload, device), room_bytes)
        largest = largest_that_fits(trial)
        rates = measured_rates(trial, largest, window_s)
    best, chosen = max(rates, key=lambda size: rates[size]), knee(rates)
    why = f"is the fewest within {TOLERANCE:.0%} of the best rate, {rates[best]:.3g} samples/s with {best}"
    if trial.batch_norm:
        chosen, why = max(rates), "is the most at a time, for batch norm learns from the statistics of a micro-batch"
    limit = "the whole batch" if largest == trial.count else f"the largest that fits ({trial.refused[largest + 1]})"
    why = f"{chosen} {why}; {largest} is {limit}; tried, uncompiled: {', '.join(map(str, rates))}"
    found = Found(
        chosen,
        largest,
        trial.count,
        rates,
        trial.peaks["step"],
        trial.room_bytes,
        trial.refused,
        why,
        time.perf_counter() - began_s,
    )
    del trial, learner
    release(device)
    return found


def knee(rates: Mapping[int, float]) -> int:
    """Return the smallest size whose rate is at most TOLERANCE below the best."""
    return min(size for size, rate in rates.items() if rate >= (1 - TOLERANCE) * max(rates.values()))


def even(batch_size: int, size: int) -> int:
    """Return the smallest micro-batch that cuts a batch into no more parts than `size` does: they are even then."""
    return math.ceil(batch_size / math.ceil(batch_size / size))


def doubling(batch_size: int, smallest: int, largest: int) -> list[int]:
    """Return micro-batches of even parts from `smallest` to `largest`, each about twice the one before."""
    powers = [1 << power for power in range(largest.bit_length())]
    sizes = {even(batch_size, size) for size in (*powers, largest)}
    return sorted(size for size in sizes if size >= smallest) or [largest]


def largest_that_fits(trial: Trial) -> int:
    """Return the largest micro-batch that fits: the batch, or what doubling and then halving intervals lead to."""
    fits, beyond = trial.smallest, trial.count + 1
    for size in doubling(trial.count, trial.smallest + 1, trial.count):
        if size > fits and not trial.fits(trial.step, size):
            beyond = size
            break
        fits = size
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if trial.fits(trial.step, middle) else (fits, middle)
    return fits


def measured_rates(trial: Trial, largest: int, window_s: float) -> dict[int, float]:
    """Return samples/s of optimizer steps in micro-batches of some sizes up to `largest`, more of them near the best.

    The least of each size's times counts: what else goes on only ever adds. Turns make a drift hit all alike.
    """
    least = dict[int, float]()

    def measure(sizes: list[int], times: int) -> None:
        for size in sizes * times:
            least[size] = min(trial.time(size, window_s), least.get(size, math.inf))

    sizes = doubling(trial.count, trial.smallest, largest)
    measure(sizes, 2)
    best = min(least, key=lambda size: least[size])
    middle = {
        even(trial.count, round(math.sqrt(below * above)))
        for below, above in itertools.pairwise(sizes)
        if best in (below, above)
    } - {*sizes}
    measure([size for size in sorted(middle) if trial.fits(trial.step, size)], 2)
    near = [size for size in sorted(least) if least[size] <= NEAR * min(least.values())]
    for turn in range(ROUNDS):
        measure(near[:: (-1) ** turn], 1)
    update_s = min(timed(trial.update, trial.device, 3))
    return {size: trial.count / (trial.count * seconds + update_s) for size, seconds in sorted(least.items())}


@contextlib.contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Put every global random generator back, afterwards, to where it was."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that libraries draw from
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002

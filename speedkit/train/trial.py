"""Steps made to find out what they take: memory and time, by the size of a micro-batch."""

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from speedkit.clock import Stopwatch
from speedkit.data.augment import augment_batch
from speedkit.data.decode import BadItem, with_decoder
from speedkit.data.loader import ItemDataset, collate
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.system import usable_ram_bytes
from speedkit.train.oom import is_out_of_memory, release

MARGIN, MARGIN_BYTES = 0.05, 512 << 20  # of what is free, and at least: for fragments, and for what others take


class Trial:
    """A learner of its own, and the worst batches that it can meet, to find out what a size takes of memory and time.

    Sizes are of micro-batches, or of an evaluation's batches.
    """

    def __init__(
        self,
        workload: Any,
        recipe: Recipe,
        plan: Plan,
        device: torch.device,
        learner: tuple[Any, ...],
        loss: Callable[..., Any],
        room_bytes: int | None,
    ):
        self.recipe, self.device, self.loss = recipe, device, loss
        self.model, self.optimizer, self.scale, *_ = learner
        self.batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())
        batch = worst_case(workload, workload.train, plan, recipe.batch_size, device)
        self.test_batch = worst_case(workload, workload.test, plan, recipe.batch_size, device)
        cached = plan.cache == ("device" if device.type == "cuda" else "ram")  # made later, in the same memory
        cache_bytes = cached * len(workload.train) * batch[0][0].numel() * (2 if plan.cache_dtype == "float16" else 4)
        self.batch = augment_batch(batch, workload, recipe, step=0, generator=torch.Generator(device=device))
        self.next_batch = [tensor.clone() for tensor in self.batch] if plan.prefetch else []
        self.count = len(self.batch[0])
        self.smallest = min(self.count, 2 if self.batch_norm else 1)  # one sample has no variance
        self.peaks: dict[str, dict[int, int]] = {"step": {}, "evaluate": {}}  # method -> size -> bytes
        self.refused: dict[int, str] = {}
        self.part_s: dict[int, float] = {}
        self.room_bytes = math.inf
        self.must_fit(self.step, self.smallest)  # makes the optimizer's state too, which is no part of a step's memory
        self.peaks["step"].clear()
        free = free_bytes(device)
        self.room_bytes = free - max(MARGIN * free, MARGIN_BYTES) - cache_bytes if room_bytes is None else room_bytes
        self.must_fit(self.step, self.smallest)
        for size in (1, 2, len(self.test_batch[0])):
            self.must_fit(self.evaluate, min(size, len(self.test_batch[0])))

    def learn(self, size: int, start: int = 0) -> None:
        """Add the gradients of `size` samples to those there are."""
        part = tuple(tensor[start : start + size] for tensor in self.batch)
        loss, _ = self.loss(self.model, part, self.recipe)
        (loss if self.scale is None else loss * self.scale.scale).backward()

    def update(self) -> None:
        """Change the weights by the gradients there are."""
        if self.scale is not None:
            self.scale.unscale([weight.grad for weight in self.model.parameters() if weight.grad is not None])
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        if self.scale is not None:
            self.scale.update()

    def step(self, size: int) -> None:
        """Make an optimizer step of two micro-batches at most: the second meets the gradients of the first."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, min(2 * size, self.count), size):
            self.learn(size, start)
        self.update()

    @torch.no_grad()
    def evaluate(self, size: int) -> None:
        """Compute the loss of `size` test samples, beside the gradients of the last step."""
        self.model.eval()
        self.loss(self.model, tuple(tensor[:size] for tensor in self.test_batch), self.recipe)

    def fits(self, function: Callable[[int], None], size: int) -> bool:
        """Whether `function(size)` has room. On a CPU, one that is predicted beyond it is not run: see `oom`."""
        peaks, why = self.peaks[function.__name__], ""
        expected = predicted(peaks, size)
        if self.device.type == "cpu" and expected > self.room_bytes:
            self.refused[size] = f"{size} would take {expected / 1e6:.3g} MB of {self.room_bytes / 1e6:.3g}"
            return False
        retries = alloc_retries(self.device)
        self.optimizer.zero_grad(set_to_none=True)  # or the profiler would wonder at memory that it has not seen taken
        try:
            peaks[size] = peak_bytes(functools.partial(function, size), self.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = f"{size}: {str(error).partition('. ')[0] or type(error).__name__}"
        if not why and peaks[size] > self.room_bytes:
            why = f"{size} takes {peaks[size] / 1e6:.3g} MB of {self.room_bytes / 1e6:.3g}"
        if not why and alloc_retries(self.device) > retries:
            why = f"{size} makes the allocator give memory back and ask for it anew, step by step"
        if why:
            self.refused[size] = why
            self.optimizer.zero_grad(set_to_none=True)
            release(self.device)
        return not why

    def must_fit(self, function: Callable[[int], None], size: int) -> None:
        """Raise SpeedkitError unless `function(size)` fits."""
        if not self.fits(function, size):
            what = "an evaluation" if function.__name__ == "evaluate" else "a micro-batch"
            raise SpeedkitError(
                f"{what} of {size} of the longest items does not fit ({self.refused[size]}): take shorter items, "
                f"a smaller model, checkpointing=blocks, or a batch_size below {self.recipe.batch_size}"
            )

    def time(self, size: int, window_s: float) -> float:
        """Return the seconds per sample of forward and backward passes over `size` samples, for about `window_s`."""
        self.model.train()
        count = math.ceil(window_s / max(self.part_s.get(size, window_s), 1e-6))
        stopwatch = Stopwatch(self.device)
        stopwatch.start()
        for _ in range(count):
            self.learn(size)
        self.part_s[size] = stopwatch.stop() / count
        return self.part_s[size] / size


def worst_case(workload: Any, items: Sequence[Any], plan: Plan, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return a batch of the longest `count` readable `items` on `device`, as loading makes it."""
    if workload.length is not None:
        items = sorted(items, key=workload.length, reverse=True)
    samples = ItemDataset(items, with_decoder(workload, plan.decoder), workload.features, workload.target)
    made = (samples[index] for index in range(len(items)))
    readable = itertools.islice((sample for sample in made if not isinstance(sample, BadItem)), count)
    batch, _ = collate(list(readable), workload.length is not None)
    if batch is None:
        raise SpeedkitError(f"workload {workload.name} has no readable item to try a batch size with")
    return tuple(tensor.to(device) for tensor in batch)


def predicted(peaks: Mapping[int, int], size: int) -> float:
    """Return the bytes that `size` samples will take, on the straight line through the two largest sizes below."""
    below = sorted(known for known in peaks if known <= size)[-2:]
    if len(below) < 2:
        return sum(peaks[known] / known * size for known in below)
    (first, last), (low, high) = below, (peaks[known] for known in below)
    return high + max(0.0, (high - low) / (last - first)) * (size - last)


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory that `function()` takes at once, beside what is taken before it: tensors, on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        function()
        return torch.cuda.max_memory_reserved(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that there is no GPU to look at is no news
    with profile(profile_memory=True) as found:
        function()
    assert found.kineto_results is not None
    events = sorted(found.kineto_results.events(), key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"), default=0)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that this process may still take on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, usable_ram_bytes() - psutil.Process().memory_info().rss)


def alloc_retries(device: torch.device) -> int:
    """Return how often CUDA's allocator, out of memory, gave all that was free back and asked once more."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0

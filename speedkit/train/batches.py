"""The batch of a step: loaded, augmented, and cut into micro-batches."""

import math
import operator

import torch
from torch import Tensor

from speedkit.data.augment import augment_batch
from speedkit.data.batch import map_batch
from speedkit.data.loader import RANK, BatchStream
from speedkit.train.ranks import Ranks
from speedkit.train.run import TrainingRun
from speedkit.workload import Batch


def next_batch(run: TrainingRun) -> Batch:
    """Return the batch of the next step, augmented, on the device; again the same one if it is to be repeated."""
    position = run.position
    if position.batch is None:
        position.batch = augment(run, next(run.data.training_batches), position.step)
    return position.batch


def augment(run: TrainingRun, batch: Batch, step: int) -> Batch:
    """Return `batch` as step number `step` (0-based) learns from it; each rank has draws of its own."""
    step += RANK * run.data.train.sampler.rank
    return augment_batch(batch, run.workload, run.recipe, step=step, generator=run.data.train.generator)


def micro_batches(run: TrainingRun, batch: Batch) -> list[tuple[Batch, Tensor | float | None]]:
    """Return the parts of `batch`, at most `micro_batch` samples each, and what part of the loss each counts for.

    Counted are valid items, so that the parts add up to the exact mean over the batch. None: the part is the batch.
    """
    size = run.learner.micro_batch
    if not run.ranks.several and batch.inputs.size(0) <= size:  # `len` of a tensor is far slower
        return [(batch, None)]
    parts = split(batch, size, run.data.train, ranks=run.ranks)
    count = run.workload.count or samples
    counts = [count(part) * learned for part, learned in parts]
    total = sum(counts)
    if run.ranks.several:  # which take the mean of their gradients: it then is that of the whole batch
        total = torch.zeros((), device=run.device).add_(total)  # a number that is copied there would make the host wait
        total = run.ranks.sum(total)
        total = total.clamp(min=1) / run.ranks.count
    return [(part, number / total) for (part, _), number in zip(parts, counts, strict=True)]


def samples(batch: Batch) -> int:
    """Return how many samples `batch` has."""
    return len(batch.inputs)


def split(batch: Batch, size: int, stream: BatchStream, *, ranks: Ranks) -> list[tuple[Batch, bool]]:
    """Return the last `batch` of `stream` in parts of `size` samples, and whether each counts.

    All ranks make as many passes, for FSDP gathers weights in each. What a rank repeats to do so does not count, nor
    does what it gets of a batch that has no sample left for it.
    """
    parts = [batch]
    if len(batch.inputs) > size:
        parts = []
        for start in range(0, len(batch.inputs), size):
            parts.append(map_batch(batch, operator.itemgetter(slice(start, start + size))))
    if not ranks.several:
        return [(part, True) for part in parts]
    samples_of_all = stream.sampler.size(stream.position)
    own = len(parts) * (ranks.rank < samples_of_all)
    passes = math.ceil(math.ceil(samples_of_all / ranks.count) / size)
    parts += (passes - len(parts)) * parts[:1]
    return [(part, index < own) for index, part in enumerate(parts)]

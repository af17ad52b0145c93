"""What the batches of a loader take to be made, without its workers: facts by which bottlenecks are found."""

import statistics
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from speedkit.clock import timed
from speedkit.data.own_loader import why_not_kept
from speedkit.measure.breakdown import StepFacts
from speedkit.measure.process import process_kept


def time_loader(facts: StepFacts, loader: Any) -> None:
    """Note what the batches of a user's own `loader` take, and whether their samples could be kept in memory."""
    facts.workers = getattr(loader, "num_workers", 0)
    with process_kept("cpu"):
        facts.why_not_kept = why_not_kept(loader)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        data: Any = loader.dataset
        size = 1  # an item is a batch, where the loader joins none
        if loader.batch_sampler is not None:  # one of the user's own need not say how many it joins
            size = getattr(loader.batch_sampler, "batch_size", None) or facts.items_at_once or 1
        time_loading(facts, data.__getitem__, loader.collate_fn, count=min(size, len(data)))
        facts.items_s *= facts.batches
        facts.collate_s *= facts.batches


def time_loading(facts: StepFacts, make: Callable[[int], Any], join: Callable[[list], Any], *, count: int) -> None:
    """Note what making and joining the first `count` items takes."""

    def items() -> list[Any]:
        return [make(index) for index in range(count)]

    with process_kept("cpu"):
        batch = items()
        facts.items_s = statistics.median(timed(items, "cpu", 3))
        facts.collate_s = statistics.median(timed(lambda: join(batch), "cpu", 3))
        facts.batch_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(join(batch)))

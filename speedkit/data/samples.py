"""Items to samples, and a DataLoader over them: the order of an epoch, and the loader's worker processes."""

import atexit
import signal
from collections.abc import Iterator, Sequence
from multiprocessing import active_children
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from speedkit.data.decode import BadItem
from speedkit.plan import Plan
from speedkit.recipe import steps_per_epoch


class Samples(Dataset):
    """Index -> (features, target, index), computed live; a file that cannot be read comes back as its BadItem."""

    def __init__(self, workload: Any, items: Sequence[Any]):
        self.load, self.features, self.target = workload.load, workload.features, workload.target
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        item = self.items[index]
        try:
            return self.features(self.load(item)), self.target(item), index
        except BadItem as bad:
            return bad


def collate(samples: list[Any]) -> tuple[tuple[Tensor, ...] | None, list[int], list[BadItem]]:
    """Return (batch, indices of its samples, the unreadable ones left out); the batch is None when all are."""
    good = [sample for sample in samples if not isinstance(sample, BadItem)]
    bad = [sample for sample in samples if isinstance(sample, BadItem)]
    if not good:
        return None, [], bad
    inputs, targets, indices = zip(*good, strict=True)
    return (torch.stack(inputs), torch.tensor(targets)), list(indices), bad


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order `[count]` of one epoch: a function of seed and epoch alone, whatever the plan."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


class EpochOrder:
    """A DataLoader's batch sampler: the index batches of epoch `epoch` from `start` on, both set before each pass."""

    def __init__(self, count: int, batch_size: int, seed: int | None, drop_last: bool):
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.length = steps_per_epoch(count, batch_size, drop_last)
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.tensors():
            yield indices.tolist()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the batches as index tensors, `[batch_size]` each but for a last one that may be smaller."""
        order = torch.arange(self.count) if self.seed is None else shuffled(self.count, self.seed, self.epoch)
        for position in range(self.start, self.length):
            yield order[position * self.batch_size : (position + 1) * self.batch_size]


def make_loader(samples: Samples, plan: Plan, order: EpochOrder) -> DataLoader:
    """Return a DataLoader over `samples` in the batches of `order`, with the plan's worker settings."""
    workers = int(plan.workers)
    # A DataLoader draws its workers' seed from the global generator unless it has its own: dropout would then depend on
    # whether, and how, data is loaded.
    extra: dict[str, Any] = {"generator": torch.Generator()}
    if workers:
        extra |= {
            "persistent_workers": plan.persistent_workers,
            "prefetch_factor": plan.prefetch_factor,
            "worker_init_fn": start_worker,
        }
    return DataLoader(
        samples, batch_sampler=order, num_workers=workers, collate_fn=collate, pin_memory=plan.pin_memory, **extra
    )


def start_worker(_: int) -> None:
    """Set a loader process up: one thread, for the workers together already fill the cores.

    Ctrl-C and SIGTERM often go to the whole process group. They are the parent's business, which makes its last step
    and a checkpoint with the workers' help and then ends them.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def end_workers() -> None:
    """Kill loader processes that a run left: they ignore SIGTERM, and Python, going out, would wait for ever."""
    for process in active_children():
        if process.daemon:
            process.kill()

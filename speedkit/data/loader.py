"""Items to batches on the device: the order of an epoch, the loader's worker processes, the cached short cut."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing import active_children
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from speedkit.data.cache import FeatureCache
from speedkit.data.decode import BadItem
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.recipe import steps_per_epoch

BAD_SHARE = 0.05  # with more unreadable files than this, what is learned is no longer what was asked


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


class Batches:
    """An endless stream of batches on the device: `next()` gives one, epoch after epoch.

    `epoch` and `position` say where the next batch comes from; setting them before the first `next()` resumes there.
    A `seed` of None keeps the items in order (evaluation).
    """

    def __init__(
        self, workload: Any, items: Sequence[Any], plan: Plan, batch_size: int, seed: int | None, device: torch.device,
        cache: FeatureCache | None = None,
    ):  # fmt: skip
        self.device, self.plan, self.cache = device, plan, cache
        self.count = len(cache) if cache is not None else len(items)
        if not self.count:
            raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
        self.order = EpochOrder(self.count, batch_size, seed, plan.drop_last and seed is not None)
        self.epoch, self.position = 0, 0
        self.bad: dict[str, str] = {}
        self._quarantine(cache.bad if cache is not None else {})
        self.pids: list[int] = []
        self.loader = None if cache is not None else make_loader(Samples(workload, items), plan, self.order)
        self.pass_: Iterator[tuple[Tensor, ...]] | None = None

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch, each tensor `[B, ...]` on the device."""
        while True:
            if self.pass_ is None:
                self.order.epoch, self.order.start = self.epoch, self.position
                self.pass_ = self._gathered() if self.cache is not None else self._loaded()
            for batch in self.pass_:
                self.position += 1
                return batch
            self.pass_, self.epoch, self.position = None, self.epoch + 1, 0

    def one_pass(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of one pass from the start, each tensor `[B, ...]` on the device."""
        self.order.epoch = self.order.start = 0
        return self._gathered() if self.cache is not None else self._loaded()

    def _gathered(self) -> Iterator[tuple[Tensor, ...]]:
        assert self.cache is not None
        for indices in self.order.tensors():
            batch = self.cache.gather(indices, self.device)
            if len(batch[0]):
                yield batch
            else:
                self.position += 1

    def _loaded(self) -> Iterator[tuple[Tensor, ...]]:
        assert self.loader is not None
        before = set(active_children())
        passing = iter(self.loader)
        started = [process.pid for process in active_children() if process not in before]
        self.pids = [pid for pid in started if pid] or self.pids  # none are started where they persist
        for batch, _, bad in passing:
            if bad:
                self._quarantine({item.path: item.why for item in bad})
            if batch is None:
                self.position += 1
                continue
            yield tuple(tensor.to(self.device, non_blocking=self.plan.pin_memory) for tensor in batch)

    def _quarantine(self, bad: dict[str, str]) -> None:
        self.bad.update(bad)
        if len(self.bad) > max(1, BAD_SHARE * self.count):
            path, why = next(iter(self.bad.items()))
            raise SpeedkitError(
                f"{len(self.bad)} of {self.count} files cannot be read, more than {BAD_SHARE:.0%} of them; "
                f"the first is {path}: {why}. Mend or remove them"
            )

    def signal_workers(self, number: int) -> None:
        """Send a signal to every loader process: SIGSTOP keeps them from working while another plan is timed."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End the loader's processes."""
        self.signal_workers(signal.SIGCONT)
        self.pass_, self.loader, self.pids = None, None, []


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

"""Items to samples, and a loader over them: the order of an epoch, how samples become a batch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, default_collate, get_worker_info

from speedkit.data.bucket import bucketed, padded_lengths
from speedkit.data.decode import BadItem
from speedkit.data.workers import Loader
from speedkit.errors import PlanError
from speedkit.plan import Plan
from speedkit.recipe import steps_per_epoch


def loading(workload: Any, plan: Plan) -> Callable[[Any], Tensor]:
    """Return the workload's `load` with the plan's decoder. Raises PlanError where it does not take that one."""
    if plan.decoder == "soundfile":
        return workload.load
    if plan.decoder not in workload.decoders:
        known = ", ".join(("soundfile", *workload.decoders))
        raise PlanError(f"decoder={plan.decoder} is not one that workload {workload.name} can use: it has {known}")
    return functools.partial(workload.load, decoder=plan.decoder)


class Samples(Dataset):
    """Index -> (features, target, index), computed live; a file that cannot be read comes back as its BadItem.

    `load` replaces the workload's. With `waveforms` they come as loaded: features are computed later, on the device.
    """

    def __init__(self, workload: Any, items: Sequence[Any], load: Any = None, waveforms: bool = False):
        self.load, self.target = load or workload.load, workload.target
        self.features = None if waveforms else workload.features
        self.items, self.varies = items, workload.length is not None
        self.reading: Any = None  # where worker processes note the index they are at, see workers.Loader

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        self._note(index)
        item = self.items[index]
        try:
            loaded = self.load(item)
            return loaded if self.features is None else self.features(loaded), self.target(item), index
        except BadItem as bad:
            return bad
        finally:
            self._note(-1)

    def _note(self, index: int) -> None:
        worker = get_worker_info()
        if worker is not None and self.reading is not None:
            self.reading[worker.id] = index


def collate(samples: list[Any], varies: bool = False) -> tuple[tuple[Tensor, ...] | None, list[int], list[BadItem]]:
    """Return (batch, indices of its samples, the unreadable ones left out); the batch is None when all are.

    A batch is (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the
    longest, lengths [B], targets [B]).
    """
    good = [sample for sample in samples if not isinstance(sample, BadItem)]
    bad = [sample for sample in samples if isinstance(sample, BadItem)]
    if not good:
        return None, [], bad
    rows, targets, indices = map(list, zip(*good, strict=True))
    rest = [torch.tensor(targets)]
    if varies:
        lengths = torch.tensor([row.shape[-1] for row in rows])
        rows, rest = [pad(row, (0, int(lengths.max()) - row.shape[-1])) for row in rows], [lengths, *rest]
    batch: tuple[Tensor, ...] = (default_collate(rows), *rest)
    if get_worker_info() is not None:
        # Here, where an error reaches the training process: the queue would only print it, and never deliver the batch.
        batch = tuple(tensor.share_memory_() for tensor in batch)
    return batch, indices, bad


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order `[count]` of one epoch: a function of seed and epoch alone, whatever the plan."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


class EpochOrder:
    """A DataLoader's batch sampler: the index batches of epoch `epoch` from `start` on, both set before each pass.

    A `seed` of None keeps the items in order. With `lengths` [N], clips of similar length share a batch. Of several
    `ranks` each gets a share of every batch, so that together they make the batches, and as many, of one alone.
    """

    def __init__(
        self, count: int, batch_size: int, seed: int | None, drop_last: bool, lengths: Tensor | None = None,
        rank: int = 0, ranks: int = 1,
    ):  # fmt: skip
        self.count, self.batch_size, self.seed, self.rank, self.ranks = count, batch_size, seed, rank, ranks
        self.length = steps_per_epoch(count, batch_size, drop_last)
        self.lengths = lengths
        self.padded = None if lengths is None else padded_lengths(lengths)  # the only lengths that batches have
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.tensors():
            yield indices.tolist()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the batches as index tensors, `[batch_size / ranks]` each but for a last one that may be smaller."""
        order = torch.arange(self.count) if self.seed is None else shuffled(self.count, self.seed, self.epoch)
        if self.lengths is not None and self.padded is not None:
            generator = torch.Generator().manual_seed((self.seed or 0) * 1_000_003 + self.epoch)
            order = bucketed(order, self.lengths, self.padded, self.batch_size, generator)
        for position in range(self.start, self.length):
            batch = order[position * self.batch_size : (position + 1) * self.batch_size]
            # Fewer items than ranks: some come twice, for a rank without a batch would leave the others waiting.
            yield batch[self.rank :: self.ranks] if len(batch) >= self.ranks else batch[[self.rank % len(batch)]]


def make_loader(samples: Samples, plan: Plan, order: EpochOrder) -> Loader:
    """Return an iterable of what `collate` makes of the batches of `order`, in the plan's processes or threads."""
    return Loader(samples, functools.partial(collate, varies=samples.varies), plan, order)

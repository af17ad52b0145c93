"""Items to samples, samples to batches, and the order of an epoch."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, default_collate, get_worker_info

from speedkit.data.bucket import padded_lengths
from speedkit.data.decode import BadItem
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


@dataclasses.dataclass
class Samples(Dataset):
    """Indices -> a (features, target) of each, computed live; a file that cannot be read gives its BadItem."""

    items: Sequence[Any]
    load: Callable[[Any], Tensor]
    features: Callable[[Tensor], Tensor] | None  # None: they are computed later, of what was loaded, on the device
    target: Callable[[Any], int]
    reading: Any = dataclasses.field(default_factory=lambda: [-1])  # what each worker is at; see workers.Loader

    def __getitems__(self, indices: Iterable[int], place: int | None = None) -> list[Any]:
        """Return the samples of a batch; says in `reading[place]`, that of this process by default, how far it is."""
        if place is None:
            place = worker.id if (worker := get_worker_info()) is not None else 0
        made: list[Any] = []
        for self.reading[place] in indices:
            item = self.items[self.reading[place]]
            try:
                loaded = self.load(item)
                made.append((loaded if self.features is None else self.features(loaded), self.target(item)))
            except BadItem as bad:
                made.append(bad)
        self.reading[place] = -1
        return made


def collate(samples: list[Any], varies: bool = False) -> tuple[tuple[Tensor, ...] | None, list[BadItem]]:
    """Return (batch, the unreadable ones left out of it); the batch is None when all are.

    A batch is (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the
    longest, lengths [B], targets [B]).
    """
    good = [sample for sample in samples if not isinstance(sample, BadItem)]
    bad = [sample for sample in samples if isinstance(sample, BadItem)]
    if not good:
        return None, bad
    rows, targets = map(list, zip(*good, strict=True))
    rest = [torch.stack(targets) if isinstance(targets[0], Tensor) else torch.tensor(targets)]
    if varies:
        lengths = torch.tensor([row.shape[-1] for row in rows])
        rows, rest = [pad(row, (0, int(lengths.max()) - row.shape[-1])) for row in rows], [lengths, *rest]
    batch: tuple[Tensor, ...] = (default_collate(rows), *rest)
    if get_worker_info() is not None:
        # Here, where an error reaches the training process: the queue would only print it, and never deliver the batch.
        batch = tuple(tensor.share_memory_() for tensor in batch)
    return batch, bad


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order `[count]` of one epoch: a function of seed and epoch alone, whatever the plan."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


@dataclasses.dataclass
class EpochOrder:
    """A DataLoader's batch sampler: the index batches of epoch `epoch` from `start` on, both set before each pass.

    A `seed` of None keeps the items in order. With `lengths` [N], clips of similar length share a batch. Of several
    `ranks` each gets a share of every batch, so that together they make the batches, and as many, of one alone.
    """

    count: int
    batch_size: int
    seed: int | None
    drop_last: bool
    lengths: Tensor | None = None
    rank: int = 0
    ranks: int = 1
    epoch: int = 0
    start: int = 0

    def __post_init__(self):
        # The only lengths that batches have.
        self.padded: Any = None if self.lengths is None else padded_lengths(self.lengths)

    def __len__(self) -> int:
        return steps_per_epoch(self.count, self.batch_size, self.drop_last)

    @property
    def own_draws(self) -> int:
        """What this rank adds to the number of a step that seeds random changes: its samples are its own."""
        return self.rank << 40

    def spare(self, position: int) -> bool:
        """Whether what this rank gets of batch number `position`, the first being 1, is what another learns from."""
        return self.rank >= self.count - (position - 1) * self.batch_size

    def largest(self, position: int) -> int:
        """Return the size of the largest share of batch number `position`."""
        return -(-min(self.batch_size, self.count - (position - 1) * self.batch_size) // self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Return the batches as index tensors, `[batch_size / ranks]` each but for a last one that may be smaller."""
        shuffle: Callable[[int], Tensor] = torch.arange
        if self.seed is not None:
            shuffle = functools.partial(shuffled, seed=self.seed, epoch=self.epoch)
        order = shuffle(self.count)
        if self.lengths is not None:
            # A full batch holds clips padded to one length, a few hold two. What fills none stays at the end, mixed.
            full = order[: self.count // self.batch_size * self.batch_size]
            grouped = full[torch.searchsorted(self.padded, self.lengths[full]).argsort(stable=True)]
            rows = grouped.view(-1, self.batch_size)
            order = torch.cat([rows[shuffle(len(rows))].flatten(), order[len(full) :]])
        batches = order.split(self.batch_size)[self.start : len(self)]
        if self.ranks == 1:
            return iter(batches)
        # Fewer items than ranks: some come twice, for a rank without a batch would leave the others waiting.
        return (
            batch[self.rank :: self.ranks] if len(batch) >= self.ranks else batch[[self.rank % len(batch)]]
            for batch in batches
        )

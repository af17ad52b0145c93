"""The order of an epoch: shuffled by its seed, clips of similar length together, shared between ranks."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator

import torch
from torch import Tensor

from speedkit.recipe import steps_per_epoch

SHAPES = 8  # padded lengths at most: compiled code is made anew for each
CANDIDATES = 256  # lengths they are chosen from, evenly spread over the sorted clips


def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order `[count]` of one epoch: a function of seed and epoch alone, whatever the plan."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


@dataclasses.dataclass
class BatchSampler:
    """The index batches of epoch `epoch` from batch `start` on; both are set before each pass.

    A `seed` of None keeps the items in order. With `lengths` [N], clips of similar length share a batch, and every
    batch is padded to one of the lengths `padded`.
    """

    count: int
    batch_size: int
    seed: int | None
    drop_last: bool = False
    lengths: Tensor | None = None
    rank: int = 0
    world_size: int = 1
    multiple: int = 1  # of which the padded lengths are, but for the longest clip's
    epoch: int = 0
    start: int = 0
    padded: list[int] = dataclasses.field(init=False)

    def __post_init__(self):
        self.padded = []
        if self.lengths is not None:
            longest = int(self.lengths.max())  # a model may have no place for more
            padded = set()
            for length in padded_lengths(self.lengths):
                rounded = math.ceil(length / self.multiple) * self.multiple
                padded.add(min(rounded, longest))
            self.padded = sorted(padded)

    def __len__(self) -> int:
        return steps_per_epoch(self.count, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.batches():
            yield indices.tolist()

    def batches(self) -> list[Tensor]:
        """Return this rank's share [B] of each batch that is left of the epoch."""
        order = self.shuffle(self.count)
        if self.lengths is not None:
            # A full batch holds clips padded to one length, a few hold two. What fills none stays at the end, mixed.
            full = order[: self.count // self.batch_size * self.batch_size]
            edges = torch.tensor(self.padded)
            grouped = full[torch.searchsorted(edges, self.lengths[full]).argsort(stable=True)]
            rows = grouped.view(-1, self.batch_size)
            order = torch.cat([rows[self.shuffle(len(rows))].flatten(), order[len(full) :]])
        batches = order.split(self.batch_size)[self.start : len(self)]
        # A rank for which an incomplete batch has no item gets one again: it would leave the others waiting.
        return [batch[self.rank % len(batch) :: self.world_size] for batch in batches]

    def shuffle(self, count: int) -> Tensor:
        """Return an order `[count]` of this epoch."""
        if self.seed is None:
            return torch.arange(count)
        return shuffled(count, self.seed, self.epoch)

    def counts(self, position: int) -> bool:
        """Return whether this rank's share of batch `position` (1-based) is its own, and not another rank's item."""
        return self.rank < self.count - (position - 1) * self.batch_size

    def padded_to(self, length: int) -> int:
        """Return the length that a batch is padded to whose longest clip has `length` frames."""
        if not self.padded:
            return length
        return self.padded[bisect_left(self.padded, length)]


def padded_lengths(lengths: Tensor) -> list[int]:
    """Return at most SHAPES lengths, ascending, such that clips of `lengths` [N] are padded to them with least padding.

    Dynamic programming: the best split of the first j candidates into k groups extends the best of some i into k - 1.
    """
    ordered = lengths.sort().values
    count = torch.linspace(0, len(ordered), CANDIDATES + 1, dtype=torch.float64).round().long().unique()  # [C]: clips
    longest = ordered[(count - 1).clamp(min=0)]  # [C]: of the first `count` clips
    frames = ((count - count[:, None]) * longest).double()  # [C, C]: the clips from i to j, padded to the longest
    frames = frames.masked_fill(count < count[:, None], torch.inf)

    # total[j]: the least frames of the first j candidates in as many groups as there have been rounds.
    total = torch.zeros(len(count), dtype=torch.float64).masked_fill(count > 0, torch.inf)
    origins = []
    for _ in range(SHAPES):
        total, origin = (total[:, None] + frames).min(dim=0)
        origins.append(origin)

    # Back from the last candidate: each group's longest clip is one of the lengths.
    end = len(count) - 1
    edges = set()
    for origin in reversed(origins):
        if count[end]:
            edges.add(int(longest[end]))
        end = int(origin[end])
    return sorted(edges)

"""The order of an epoch: shuffled by its seed, clips of similar length together, shared between ranks."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

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
    batch is padded to one of the lengths `padded`. A loss that is a mean over frames needs batches of equally many
    (`of_frames`): else a frame would weigh more the shorter its clip is, and more batches would hold little to learn.
    """

    count: int
    batch_size: int
    seed: int | None
    drop_last: bool = False
    lengths: Tensor | None = None
    of_frames: bool = False
    rank: int = 0
    world_size: int = 1
    multiple: int = 1  # of which the padded lengths are, but for the longest clip's
    epoch: int = 0
    start: int = 0
    padded: list[int] = dataclasses.field(init=False)
    sizes: list[int] = dataclasses.field(init=False)  # of an epoch's batches, from short clips to long

    def __post_init__(self):
        self.padded = []
        self.sizes = []
        if self.lengths is None:
            return
        longest = int(self.lengths.max())  # a model may have no place for more
        shapes = min(SHAPES, len(self)) if self.of_frames else SHAPES
        padded = set()
        for length in padded_lengths(self.lengths, shapes):
            rounded = math.ceil(length / self.multiple) * self.multiple
            padded.add(min(rounded, longest))
        self.padded = sorted(padded)
        if self.of_frames:
            clips = self.bucket_of(torch.arange(self.count)).bincount()
            self.sizes = batch_sizes(clips.tolist(), self.padded, len(self))

    def __len__(self) -> int:
        return steps_per_epoch(self.count, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.batches():
            yield indices.tolist()

    def batches(self) -> list[Tensor]:
        """Return this rank's share [B] of each batch that is left of the epoch."""
        batches = self.of_all_ranks()[self.start :]
        # A rank for which a small batch has no item gets one again: it would leave the others waiting.
        return [batch[self.rank % len(batch) :: self.world_size] for batch in batches]

    def of_all_ranks(self) -> Sequence[Tensor]:
        """Return the batches [B] of the epoch."""
        order = self.shuffle(self.count)
        if self.lengths is None:
            return order.split(self.batch_size)[: len(self)]
        if self.of_frames:
            grouped = order[self.bucket_of(order).argsort(stable=True)]
            batches = grouped.split(self.sizes)
            return [batches[number] for number in self.shuffle(len(self)).tolist()]
        # A full batch holds clips padded to one length, a few hold two. What fills none stays at the end, mixed.
        full = order[: self.count // self.batch_size * self.batch_size]
        grouped = full[self.bucket_of(full).argsort(stable=True)]
        rows = grouped.view(-1, self.batch_size)
        order = torch.cat([rows[self.shuffle(len(rows))].flatten(), order[len(full) :]])
        return order.split(self.batch_size)[: len(self)]

    def bucket_of(self, indices: Tensor) -> Tensor:
        """Return which of `padded` the clips `indices` [N] are padded to, [N]."""
        return torch.searchsorted(torch.tensor(self.padded), self.lengths[indices])  # type: ignore[index]

    def shuffle(self, count: int) -> Tensor:
        """Return an order `[count]` of this epoch."""
        if self.seed is None:
            return torch.arange(count)
        return shuffled(count, self.seed, self.epoch)

    def size(self, position: int) -> int:
        """Return how many items all ranks learn from in batch `position` (1-based) of the epoch."""
        if self.sizes:
            return self.sizes[int(self.shuffle(len(self))[position - 1])]
        return min(self.batch_size, self.count - (position - 1) * self.batch_size)

    def padded_to(self, length: int) -> int:
        """Return the length that a batch is padded to whose longest clip has `length` frames."""
        if not self.padded:
            return length
        return self.padded[bisect_left(self.padded, length)]


def batch_sizes(clips: list[int], padded: list[int], count: int) -> list[int]:
    """Return the sizes of `count` batches, from short clips to long, with about as many padded frames each.

    `clips` [K] are padded to the lengths `padded` [K]. All batches of a bucket have one size, so that compiled code
    meets few shapes: what is left of a bucket goes to the next, and of the last one into its batches.
    """
    frames = [number * length for number, length in zip(clips, padded, strict=True)]
    spare = count - len(clips)
    batches = [min(number, 1 + int(spare * part / sum(frames))) for number, part in zip(clips, frames, strict=True)]
    while sum(batches) < count:
        splittable = [bucket for bucket, number in enumerate(clips) if batches[bucket] < number]
        fullest = max(splittable, key=lambda bucket: frames[bucket] / batches[bucket])
        batches[fullest] += 1
    sizes: list[int] = []
    left = 0
    for number, parts in zip(clips, batches, strict=True):
        size, left = divmod(number + left, parts)
        sizes += [size] * parts
    for place in range(left):
        sizes[-1 - place] += 1
    return sizes


def padded_lengths(lengths: Tensor, shapes: int) -> list[int]:
    """Return at most `shapes` lengths, ascending, such that clips of `lengths` [N] are padded with least padding.

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
    for _ in range(shapes):
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

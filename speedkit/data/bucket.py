"""Clips of similar length in one batch: little padding to compute, and few shapes to compile for.

An epoch still holds every item once, but which clips meet in a batch changes, and with it what is learned, slightly:
as much as with another seed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

SHAPES = 8  # padded lengths at most: compiled code is made anew for each
CANDIDATES = 256  # lengths they are chosen from, evenly spread over the sorted clips


def padded_lengths(lengths: Tensor) -> Tensor:
    """Return at most SHAPES lengths, ascending, such that clips of `lengths` [N] are padded to them with least padding.

    Dynamic programming: the best split of the first j candidates into k groups extends the best of some i into k - 1.
    """
    ordered = lengths.sort().values
    count = torch.linspace(0, len(ordered), CANDIDATES + 1, dtype=torch.float64).round().long().unique()  # [C]: clips
    longest = ordered[(count - 1).clamp(min=0)]  # [C]: of the first `count` clips
    frames = ((count - count[:, None]) * longest).double()  # [C, C]: the clips from i to j, padded to the longest
    frames = frames.masked_fill(count < count[:, None], torch.inf)
    least = torch.zeros(len(count), dtype=torch.float64).masked_fill(count > 0, torch.inf)
    origins = []
    for _ in range(SHAPES):
        least, origin = (least[:, None] + frames).min(dim=0)
        origins.append(origin)
    at, found = len(count) - 1, set()
    for origin in reversed(origins):
        if count[at]:
            found.add(int(longest[at]))
        at = int(origin[at])
    return torch.tensor(sorted(found))


def padding_share(batches: Iterable[Tensor], lengths: Tensor, padded: Tensor | None = None) -> float:
    """Return which share of the frames of `batches` (indices into `lengths`) is padding; 0 is none.

    A batch is padded to its longest clip, or where `padded` is given to the next of those lengths.
    """
    valid = total = 0
    for indices in batches:
        longest = lengths[indices].max()
        total += len(indices) * int(longest if padded is None else padded[torch.searchsorted(padded, longest)])
        valid += int(lengths[indices].sum())
    return 1 - valid / total

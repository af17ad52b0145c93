"""The entries of a feature cache in ram or on the device, gathered into batches without a look at the disk."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data.batch import stacked
from speedkit.workload import Batch, Workload


@dataclasses.dataclass(eq=False)
class CacheInMemory:
    """The `entries` [N, ...] of a list of items in ram or on the device, each padded with zeros to the longest.

    `lengths` [N] are given where they vary; the rest is as in FeatureCache.
    """

    entries: Tensor
    labels: dict[str, Any]  # targets, and lengths where they vary
    where: str
    why: str
    usable: np.ndarray
    lengths: np.ndarray | None = None
    bad: dict[str, str] = dataclasses.field(default_factory=dict)
    build_s: float = 0.0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.usable):,} items, {self.why}>"

    def gather(self, indices: Tensor, device: torch.device, *, on_device: Tensor | None = None) -> Batch:
        """Return what FeatureCache.gather does; `on_device` are the same indices on the device."""
        entries = self.entries
        if self.lengths is not None:  # the host knows the longest: the device is not asked
            entries = entries[..., : int(self.lengths[indices.numpy()].max(initial=0))]
        places = indices
        if self.where == "device":
            places = indices.to(entries.device) if on_device is None else on_device
        return labelled(select(entries, places, device), self.labels, places)


def rows_on_device(workload: Workload, items: Sequence[Any], device: torch.device) -> CacheInMemory:
    """Return the `rows` of a workload, which are entries already, copied to the device."""
    rows = workload.rows[torch.as_tensor(items)]  # type: ignore[index]
    targets = stacked(list(map(workload.target, items))).to(device)
    return CacheInMemory(
        entries=rows.to(device),
        labels={"targets": targets},
        where="device",
        why=f"cache=device: {rows.nbytes / 1e6:.3g} MB",
        usable=np.ones(len(items), bool),
    )


def labelled(entries: Tensor, labels: Mapping[str, Tensor], places: Tensor) -> Batch:
    """Return the batch of `entries`, on the device, with their rows of `labels`, which are at `places` [B].

    Only here are entries made float32, as the model takes them: before, fewer bytes travel.
    """
    inputs = entries.to(torch.float32)
    if entries.dtype is torch.int16:
        inputs.mul_(1 / 32768)
    columns: dict[str, Any] = {name: select(column, places, entries.device) for name, column in labels.items()}
    return Batch(inputs, **columns)


def select(values: Tensor, places: Tensor, device: torch.device) -> Tensor:
    """Return the rows at `places` on the device; to a GPU they go out of page-locked memory, and nothing waits."""
    if values.device.type == device.type:
        return values.index_select(0, places)
    rows = torch.empty(len(places), *values.shape[1:], dtype=values.dtype, pin_memory=True)
    return torch.index_select(values, 0, places, out=rows).to(device, non_blocking=True)

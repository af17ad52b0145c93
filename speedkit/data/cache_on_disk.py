"""The entries of a feature cache on disk, in files that are mapped into memory.

An entry that does not match its checksum when it is first read is computed again, in place.
"""

import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest

from speedkit.data.batch import stacked
from speedkit.data.batches import BatchLoader, BatchMaker
from speedkit.data.cache_entries import entry_maker
from speedkit.data.cache_files import (
    ENTRY,
    HEADER,
    INDEX,
    VALUES,
    add_items,
    item_key,
    mapped,
    new_index,
    read_index,
)
from speedkit.data.cache_in_memory import CacheInMemory, labelled
from speedkit.errors import SpeedkitError
from speedkit.plan import Plan
from speedkit.workload import Batch, Workload


class FeatureCache:
    """The entries of a list of items on disk, gathered into batches; each is compared with its checksum at first.

    `why` is a sentence for the user. `usable` [N] tells which items have an entry, `bad` (path -> why) names the
    others. `built` entries have been computed in `build_s` seconds to open it.
    """

    where = "disk"

    def __init__(self, workload: Workload, items: Sequence[Any], plan: Plan, *, folder: Path):
        self.items = items
        self.folder = folder
        self.bad: dict[str, str] = {}
        self.maker = entry_maker(workload, plan)
        self.dtype = self.maker.dtype

        # Where each item's entry is: its row in the index, its first value in the file, and how long it is.
        found = read_index(folder)
        if found is None:
            found = self.maker.first_shape(items), np.zeros(0, ENTRY)
            new_index(folder, found[0])
        self.shape, rows = found
        self.varies = workload.length is not None
        if workload.length is None:
            self.lengths = np.full(len(items), self.shape[-1])  # [N] the last dimension of each entry
        else:
            self.lengths = np.fromiter(map(workload.length, items), np.int64, len(items))
        sizes = self.lengths * math.prod(self.shape[:-1]) * self.dtype.itemsize  # [N] bytes
        self.key = np.fromiter(map(item_key, items, sizes.tolist()), np.uint64, len(items))
        self.row = add_items(folder / INDEX, rows, keys=self.key, sizes=sizes)
        self.entry_count = ((folder / INDEX).stat().st_size - HEADER.itemsize) // ENTRY.itemsize
        self._map()
        ends = np.cumsum(self.index["size"])[self.row]
        self.begin = (ends - sizes) // self.dtype.itemsize
        self.trusted = np.zeros(len(items), bool)  # [N] whose checksum has been compared

        # What comes along with the inputs of a batch.
        targets = stacked(list(map(workload.target, items)))
        self.labels: dict[str, Any] = {"targets": targets}
        if self.varies:
            self.labels["lengths"] = torch.from_numpy(self.lengths)

    __repr__ = CacheInMemory.__repr__

    # Loader processes map the files themselves.

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["index"]
        del state["values"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        self.index = mapped(self.folder / INDEX, ENTRY, self.entry_count, offset=HEADER.itemsize)
        values = int(self.index["size"].sum()) // self.dtype.itemsize
        self.values = mapped(self.folder / VALUES, self.dtype, values)

    def check_size(self) -> None:
        """Raise SpeedkitError where a file was cut after it was mapped: reading it there would be a SIGBUS."""
        for array in (self.index, self.values):
            file: Any = array.base
            if file._mmap.size() < file.offset + file.nbytes:
                raise SpeedkitError(f"a file of the cache in {self.folder} was cut: start again, and it is made whole")

    def build(self, workers: int, progress: bool) -> None:
        """Compute the entries that are missing."""
        began_s = time.perf_counter()
        missing = np.flatnonzero(self.committed() == 0).tolist()
        parts = [missing[begin : begin + 16] for begin in range(0, len(missing), 16)]
        plan = Plan(workers=max(0, min(workers, len(parts) - 1)))  # to start them for a few would take longer
        maker = BatchMaker(self.items, self.write, tuple)
        loader = BatchLoader(maker, parts, plan)
        hidden = None if progress and parts else True  # None: a bar where a terminal or a notebook can show it
        for _, bad in tqdm(loader, "caching, 16 clips at a time", len(parts), disable=hidden):
            self.bad |= bad
        self.build_s = time.perf_counter() - began_s
        self.usable = self.committed() != 0
        self.built = int(self.usable[missing].sum())
        size = f"{self.values.nbytes / 1e6:.3g} MB"
        self.why = f"cache=disk: {size}, {self.built} entries computed in {self.build_s:.2g} s"

    def committed(self) -> np.ndarray:
        """Return the checksum of each item's entry [N], 0 where it is not computed."""
        return self.index["checksum"][self.row]

    def write(self, index: int) -> None:
        """Compute and commit an entry. Raises BadItem."""
        values = self.maker(self.items[index])
        entry = self.entry(index)
        entry[...] = values.reshape(entry.shape)  # raises ValueError for another shape: no value is repeated to fit
        self.index["checksum"][self.row[index]] = xxh3_64_intdigest(values.data, int(self.key[index]))

    def entry(self, index: int) -> np.ndarray:
        """Return an entry as it is mapped."""
        shape = (*self.shape[:-1], self.lengths[index])
        return self.values[self.begin[index] :][: math.prod(shape)].reshape(shape)

    def gather(self, indices: Tensor, device: torch.device, *, on_device: Tensor | None = None) -> Batch:
        """Return the batch of the usable items at `indices` [B] on `device`, in float32, without waiting for it.

        Raises BadItem where a damaged entry can no longer be computed.
        """
        entries = self._read(indices.numpy(), page_locked=device.type == "cuda")
        return labelled(entries.to(device, non_blocking=True), self.labels, indices)

    def _read(self, indices: np.ndarray, page_locked: bool = False) -> Tensor:
        """Return a copy [B, ...] of the entries at `indices` [B], padded with zeros."""
        rows = self.row[indices]
        entries: list[np.ndarray] | np.ndarray
        if self.varies:
            longest = int(self.lengths[indices].max(initial=0))
            shape = (len(indices), *self.shape[:-1], longest)
            batch = torch.zeros(shape, dtype=self.maker.torch_dtype, pin_memory=page_locked)
            entries = []
            for copy, index in zip(batch.numpy(), indices.tolist(), strict=True):
                entry = self.entry(index)
                copy[..., : entry.shape[-1]] = entry
                entries.append(entry)
        elif page_locked:
            batch = torch.empty((len(indices), *self.shape), dtype=self.maker.torch_dtype, pin_memory=True)
            whole = self.values.reshape(-1, *self.shape)
            entries = whole.take(rows, axis=0, out=batch.numpy(), mode="clip")  # "raise" would copy twice
        else:
            entries = self.values.reshape(-1, *self.shape)[rows]  # faster than `take` into an array made before
            batch = torch.from_numpy(entries)
        if not self.trusted[indices].all() and not self._verify(indices, entries):
            return self._read(indices, page_locked)
        return batch

    def _verify(self, indices: np.ndarray, entries: Sequence[np.ndarray] | np.ndarray) -> bool:
        """Compare entries with their checksums, and compute damaged ones again; return whether there were none.

        This is done right after copying, while the processor's cache has them: there hashing costs least.
        """
        keys = self.key[indices].tolist()
        written = self.committed()[indices].tolist()
        damaged = set()
        for index, entry, key, checksum in zip(indices.tolist(), entries, keys, written, strict=True):
            if xxh3_64_intdigest(entry.data, key) != checksum:
                damaged.add(index)
        if not damaged:
            self.trusted[indices] = True
            return True
        warnings.warn(f"an entry in {self.folder} is not as it was written: it is computed again", stacklevel=4)
        for index in damaged:
            self.index["checksum"][self.row[index]] = 0
            self.write(index)
        return False

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of all entries, each padded to the longest."""
        return len(self.items), *self.shape[:-1], int(self.lengths.max())

    def loaded(self, place: str, device: torch.device) -> CacheInMemory:
        """Return the cache with all entries in the memory of `device`, which the plan calls `place`."""
        entries = torch.zeros(self.padded_shape, dtype=self.maker.torch_dtype, device=device)
        for part in np.array_split(np.flatnonzero(self.usable), 1 + len(self.items) // 256):
            batch = self._read(part)
            entries[torch.from_numpy(part).to(device), ..., : batch.shape[-1]] = batch.to(device)
        labels = {name: column.to(device) for name, column in self.labels.items()}
        return CacheInMemory(
            entries=entries,
            labels=labels,
            lengths=self.lengths if self.varies else None,
            where=place,
            why=self.why.replace("cache=disk", f"cache={place}"),
            usable=self.usable,
            bad=self.bad,
            build_s=self.build_s,
        )

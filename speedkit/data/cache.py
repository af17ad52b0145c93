"""Features or waveforms computed once and kept, in files that are mapped into memory.

A build that is killed loses the entry it was at. An entry that does not match its checksum when it is first read is
computed again, in place. Other parameters, code or library versions mean another folder, so nothing stale is served.
"""

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import default_collate
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest

from speedkit.data.batches import BatchLoader, BatchMaker, item_name
from speedkit.data.cache_files import ENTRY, INDEX, VALUES, add_items, fingerprint, item_key, mapped
from speedkit.data.decode import BadItem
from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json
from speedkit.machine import MEMORY_SHARE, cache_root, free_bytes, usable_cores
from speedkit.plan import Plan

if TYPE_CHECKING:
    from speedkit.workload import Workload


def open_cache(
    workload: "Workload",
    items: Sequence[Any],
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    cache_dir: str | Path | None = None,
    progress: bool = False,
    workers: int | None = None,
) -> "FeatureCache":
    """Return the cache of `items` that `plan` asks for; entries that are missing or changed are computed first.

    `workers` processes compute them, by default one per core. Raises SpeedkitError when the folder cannot be written,
    the disk is too small, or no item can be read.
    """
    if plan.cache == "device" and workload.rows is not None:
        return RowsOnDevice(workload, items, torch.device(device))
    name = f"{workload.name}-{plan.cache_of}-{fingerprint(workload, plan)[:16]}".replace("/", "_")
    folder = (Path(cache_dir) if cache_dir else cache_root() / "features") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # a second builder waits, and finds all entries
            cache = FeatureCache(workload, items, plan, folder=folder)
            cache.build(usable_cores() if workers is None else workers, progress)
    except OSError as error:
        problem = f"the feature cache in {folder} cannot be built ({error})"
        raise SpeedkitError(f"{problem}: make room or name another folder with --cache-dir, and start again") from error
    cache.load_into(plan.cache, torch.device(device))
    return cache


class FeatureCache:
    """The entries of a list of items, gathered into batches; each is compared with its checksum when first read.

    `where` they lie is disk, ram or device, and `why` a sentence for the user. `usable` [N] tells which items have an
    entry, `bad` (path -> why) names the others. `recomputed` counts damaged entries.
    """

    def __init__(self, workload: "Workload", items: Sequence[Any], plan: Plan, *, folder: Path):
        self.items, self.folder, self.where, self.why = items, folder, "disk", ""
        self.bad: dict[str, str] = {}
        self.built, self.build_s, self.recomputed = 0, 0.0, 0

        # How an entry is computed, and the number format in which it is kept.
        waveform = plan.cache_of == "waveform"
        self.load = workload.load_by(plan.decoder)
        self.features = None if waveform else workload.features
        self.dtype = np.dtype(workload.kept_as if waveform else plan.cache_dtype)
        self.torch_dtype = getattr(torch, self.dtype.name)

        # Where each item's entry is: its row in the index, its first value in the file, and how long it is.
        self.shape, self.varies = self._first_shape(), workload.length is not None
        self.lengths = np.broadcast_to(self.shape[-1], len(items))  # [N] the last dimension of each entry
        if workload.length is not None:
            self.lengths = np.fromiter(map(workload.length, items), np.int64, len(items))
        sizes = self.lengths * math.prod(self.shape[:-1]) * self.dtype.itemsize  # [N] bytes
        self.key = np.fromiter(map(item_key, items, sizes.tolist()), np.uint64, len(items))
        self.row = add_items(folder / INDEX, self.key, sizes)
        self.entries = (folder / INDEX).stat().st_size // ENTRY.itemsize
        self._map()
        self.begin = (np.cumsum(self.index["size"])[self.row] - sizes) // self.dtype.itemsize
        self.trusted = np.zeros(len(items), bool)  # [N] whose checksum has been compared

        # What comes along with the inputs of a batch: lengths where they differ, and targets.
        self.targets = default_collate(list(map(workload.target, items)))
        self.labels = [torch.from_numpy(self.lengths), self.targets] if self.varies else [self.targets]

    def __len__(self) -> int:
        return len(self.items)

    # Loader processes map the files themselves.

    def __getstate__(self) -> dict[str, Any]:
        mapped_files = {"index", "checksums", "values", "rows"}
        return {name: value for name, value in vars(self).items() if name not in mapped_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        self.index = mapped(self.folder / INDEX, ENTRY, self.entries)
        self.checksums = self.index["checksum"]
        self.values = mapped(self.folder / VALUES, self.dtype, int(self.index["size"].sum()) // self.dtype.itemsize)
        self.rows = None if self.varies else self.values.reshape(-1, *self.shape)

    def _first_shape(self) -> tuple[int, ...]:
        """Return the shape of the first entry that can be computed."""
        path = self.folder / "shape.json"
        if self.items and path.exists():
            return tuple(read_json(path))
        error = None
        for item in self.items:
            try:
                shape = self._compute(item).shape
            except BadItem as bad:
                error = bad
            else:
                write_json(path, shape)
                return shape
        raise SpeedkitError(f"none of the {len(self.items)} items can be read: {error}")

    def build(self, workers: int, progress: bool) -> None:
        """Compute the entries that are missing."""
        began_s = time.perf_counter()
        missing = np.flatnonzero(self.checksums[self.row] == 0).tolist()
        parts = [missing[begin : begin + 16] for begin in range(0, len(missing), 16)]
        plan = Plan(workers=max(0, min(workers, len(parts) - 1)))  # to start them for a few would take longer
        loader = BatchLoader(BatchMaker(self.items, self.write, tuple), parts, plan)
        # None: a bar where there is a terminal or a notebook to show it
        for _, bad in tqdm(loader, "caching, 16 clips at a time", len(parts), disable=None if progress else True):
            self.bad |= bad
        self.build_s = time.perf_counter() - began_s
        self.usable = self.checksums[self.row] != 0
        self.built = int(self.usable[missing].sum())

    def write(self, index: int) -> None:
        """Compute and commit an entry. Raises BadItem."""
        values, entry = self._compute(self.items[index]), self._entry(index)
        entry[...] = values.reshape(entry.shape)  # raises ValueError for another shape: no value is repeated to fit
        self.checksums[self.row[index]] = xxh3_64_intdigest(values.data, int(self.key[index]))

    def _compute(self, item: Any) -> np.ndarray:
        """Return the values of an item in the number format of the cache. Raises BadItem."""
        loaded = self.load(item)
        exact = loaded if self.features is None else self.features(loaded)
        if self.dtype == np.int16:
            exact = (exact * 32768).round().clamp(-32768, 32767)
        values = exact.to(self.torch_dtype)
        if not (exact.isfinite().all() and values.isfinite().all()):
            raise BadItem(item_name(item), f"its features hold NaN, infinity or numbers beyond {self.dtype}")
        return values.contiguous().numpy(force=True)

    def _entry(self, index: int) -> np.ndarray:
        """Return an entry as it is mapped."""
        shape = (*self.shape[:-1], self.lengths[index])
        return self.values[self.begin[index] :][: math.prod(shape)].reshape(shape)

    def gather(
        self, indices: Tensor, device: torch.device | str, *, on_device: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the batch of the usable items at `indices` [B] on `device`, without waiting for it.

        (inputs [B, ...] float32, targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the
        longest, lengths [B], targets [B]). `on_device` are the same indices on the device, for entries that lie there.
        Raises BadItem where a damaged entry can no longer be computed.
        """
        device, places = torch.device(device), indices
        if self.where == "disk":
            inputs = self._read(indices.numpy(), page_locked=device.type == "cuda").to(device, non_blocking=True)
        else:
            memory = self.memory
            if self.varies:  # the host knows the longest: the device is not asked
                memory = memory[..., : int(self.lengths[indices.numpy()].max(initial=0))]
            if self.where == "device":
                places = indices.to(memory.device) if on_device is None else on_device
            inputs = select(memory, places, device)
        inputs = inputs.to(torch.float32)  # there, and not before: fewer bytes travel
        if self.torch_dtype is torch.int16:
            inputs.mul_(1 / 32768)
        return inputs, *(select(column, places, device) for column in self.labels)

    def _read(self, indices: np.ndarray, page_locked: bool = False) -> Tensor:
        """Return a copy [B, ...] of the entries at `indices` [B], padded with zeros."""
        entries: Iterable[np.ndarray]
        if self.rows is not None and not page_locked:
            entries = self.rows[self.row[indices]]  # faster than `take` into an array made before
            batch = torch.from_numpy(entries)
        else:
            shape = (len(indices), *self.shape[:-1], int(self.lengths[indices].max(initial=0)))
            batch = torch.empty(shape, dtype=self.torch_dtype, pin_memory=page_locked)
            copies = batch.numpy()
            if self.rows is not None:
                entries = self.rows.take(self.row[indices], axis=0, out=copies, mode="clip")  # "raise" would copy twice
            else:
                entries = [self._entry(index) for index in indices.tolist()]
                for copy, entry in zip(copies, entries, strict=True):
                    copy[..., : entry.shape[-1]] = entry
                    copy[..., entry.shape[-1] :] = 0
        if not self.trusted[indices].all() and self._mend(indices, entries):
            return self._read(indices, page_locked)
        return batch

    def _mend(self, indices: np.ndarray, entries: Iterable[np.ndarray]) -> bool:
        """Compare entries with their checksums, and compute damaged ones again; return whether there were any.

        This is done right after copying, while the processor's cache has them: there hashing costs least.
        """
        keys = self.key[indices].tolist()
        checksums = [xxh3_64_intdigest(entry.data, key) for entry, key in zip(entries, keys, strict=True)]
        damaged = np.unique(indices[np.array(checksums, np.uint64) != self.checksums[self.row[indices]]])
        if not len(damaged):
            self.trusted[indices] = True
            return False
        warnings.warn(f"an entry in {self.folder} is not as it was written: it is computed again", stacklevel=4)
        self.checksums[self.row[damaged]] = 0
        for index in damaged.tolist():
            self.write(index)
        self.recomputed += len(damaged)
        return True

    def load_into(self, place: str, device: torch.device) -> None:
        """Load all entries into `place`, ram or device, where they fit into half of what is free; say so in `why`."""
        target = device if place == "device" else torch.device("cpu")
        shape = (len(self.items), *self.shape[:-1], int(self.lengths.max()))  # each padded to the longest
        if place != "disk" and math.prod(shape) * self.dtype.itemsize <= MEMORY_SHARE * free_bytes(target):
            self.memory = torch.zeros(shape, dtype=self.torch_dtype, device=target)
            for part in np.array_split(np.flatnonzero(self.usable), 1 + len(self.items) // 256):
                batch = self._read(part)
                self.memory[torch.from_numpy(part).to(target), ..., : batch.shape[-1]] = batch.to(target)
            self.labels, self.where = [column.to(target) for column in self.labels], place
        entries = f"{self.values.nbytes / 1e6:.3g} MB on disk, {self.built} entries computed in {self.build_s:.2g} s"
        too_large = "" if place == self.where else f"; they are more than half of what is free in {place}"
        self.why = f"cache={self.where}: {entries}{too_large}"


class RowsOnDevice(FeatureCache):
    """The `rows` of a workload, which are entries already, copied to the device once."""

    def __init__(self, workload: "Workload", items: Sequence[Any], device: torch.device):
        rows, targets = workload.rows[torch.as_tensor(items)], list(map(workload.target, items))  # type: ignore[index]
        self.where, self.memory, self.torch_dtype, self.varies = "device", rows.to(device), rows.dtype, False
        self.labels, self.usable = [torch.tensor(targets, device=device)], np.ones(len(items), bool)
        self.bad, self.build_s, self.why = {}, 0.0, f"cache=device: {rows.nbytes / 1e6:.3g} MB"


def select(values: Tensor, places: Tensor, device: torch.device) -> Tensor:
    """Return the rows at `places` on the device; to a GPU they go out of page-locked memory, and nothing waits."""
    if values.device.type == device.type:
        return values.index_select(0, places)
    rows = torch.empty(len(places), *values.shape[1:], dtype=values.dtype, pin_memory=True)
    return torch.index_select(values, 0, places, out=rows).to(device, non_blocking=True)

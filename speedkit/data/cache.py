"""Features or waveforms computed once and kept, in files that are mapped into memory.

A build that is killed loses the entry it was at. An entry that does not match its checksum when it is first touched is
computed again, in place. Other parameters, code or library versions mean another folder: stale features are not served.
"""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import default_collate
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest

from speedkit.data import cache_files as files
from speedkit.data.decode import BadItem, with_decoder
from speedkit.data.workers import BatchLoader, item_name
from speedkit.errors import SpeedkitError
from speedkit.files import write_json
from speedkit.hardware import cache_root, usable_cores, usable_ram_bytes
from speedkit.plan import Plan

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

MEMORY_SHARE = 0.5  # a cache larger than this share of the free memory stays on disk
ALONE = 32  # so few entries are computed in this process: starting others would take longer
MAPPED = ("values", "checksums", "rows", "memory")  # what each process maps or loads for itself


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
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
    # The folder is named by all that its entries depend on.
    depends_on = files.fingerprint(workload, plan)
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    name = f"{workload.name}-{plan.cache_of}-{digest}".replace("/", "_")
    folder = (Path(cache_dir) if cache_dir else cache_root() / "features") / name
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "about.json", depends_on)  # for people; a folder that cannot be written is found out here
    with FileLock(folder / ".lock"):  # whoever comes second waits
        cache = FeatureCache(workload, items, plan, folder=folder)
        cache.build(usable_cores() if workers is None else workers, progress)
    cache.load_into(plan.cache, torch.device(device))
    return cache


def unusable(results: Iterable[BadItem | None]) -> tuple[None, dict[str, str]]:
    """Return path -> why of the items that entries cannot be made of, in the form of a batch that a worker makes."""
    return None, {bad.path: bad.why for bad in results if bad is not None}


class FeatureCache:
    """The entries of a list of items, gathered into batches; each is compared with its checksum when first touched.

    They lie `where` it says, disk, ram or device; `why` is a sentence for the user. `usable` [N] tells which items have
    an entry, `bad` (path -> why) those that cannot have one. `recomputed` counts entries that were found damaged.
    """

    def __init__(self, workload: "Workload", items: Sequence[Any], plan: Plan, *, folder: Path):
        self.name, self.items, self.folder = workload.name, items, folder
        self.where, self.why = "disk", ""
        self.bad: dict[str, str] = {}
        self.built, self.build_s, self.recomputed = 0, 0.0, 0

        # How an entry is computed, and the number format in which it is kept.
        waveform = plan.cache_of == "waveform"
        self.load = with_decoder(workload, plan.decoder)
        self.features = None if waveform else workload.features
        self.dtype = np.dtype(workload.kept_as if waveform else plan.cache_dtype)
        self.torch_dtype = getattr(torch, self.dtype.name)

        # Where each item's entry is: its row in the index, its first value in the file, and how long it is.
        index = files.read_index(folder)
        self.shape = self._first_shape() if index is None else tuple(index["shape"].tolist())
        self.varies = workload.length is not None
        self.lengths = np.broadcast_to(self.shape[-1], len(items))  # [N] the last dimension of each entry
        if workload.length is not None:
            self.lengths = np.fromiter(map(workload.length, items), np.int64, len(items))
        self.frame = math.prod(self.shape[:-1])  # values per unit of length
        with files.writing(folder):
            sizes = self.lengths * self.frame * self.dtype.itemsize
            index, self.row = files.add_items(folder, items, sizes, self.shape)
            self.key = index["key"][self.row]
            end = np.cumsum(index["size"]) // self.dtype.itemsize
            self.begin = end[self.row] - self.lengths * self.frame
            self.total, self.entries = int(end[-1]), len(end)
            self._map()
        self.trusted = np.zeros(len(items), bool)  # [N] whose checksum has been compared
        self.usable = self.checksums[self.row] != 0

        # What comes along with the inputs of a batch: lengths where they differ, and targets.
        self.targets = default_collate(list(map(workload.target, items)))
        self.labels = [torch.from_numpy(self.lengths), self.targets] if self.varies else [self.targets]

    def __len__(self) -> int:
        return len(self.items)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in MAPPED} | {"where": "disk"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        """Map the files; the system shares their pages between all processes that do."""
        self.values = files.mapped(self.folder / files.VALUES, self.dtype, self.total)
        self.checksums = files.mapped(self.folder / files.CHECKSUMS, np.dtype(np.uint64), self.entries)
        self.rows = None if self.varies else self.values.reshape(-1, *self.shape)
        self.memory: list[Tensor] = []  # inputs and labels of all items, where they are in RAM or on the device

    # Computing entries.

    def _first_shape(self) -> tuple[int, ...]:
        """Return the shape of the first entry that can be computed."""
        for item in self.items:
            try:
                return self._compute(item).shape
            except BadItem as error:
                self.bad[error.path] = error.why
        path, why = next(iter(self.bad.items()))
        raise SpeedkitError(f"none of the {len(self.items)} files of {self.name} can be read; {path}: {why}")

    def build(self, workers: int = 0, progress: bool = False) -> None:
        """Compute the entries that are missing."""
        began_s = time.perf_counter()
        missing = np.flatnonzero(self.checksums[self.row] == 0)
        parts = [part.tolist() for part in np.array_split(missing, len(missing) // 16 + 1)]
        plan = Plan(workers=0 if len(missing) <= ALONE else workers)
        loader = BatchLoader(self.items, self.write, collate=unusable, batches=parts, plan=plan)
        # None: a bar where there is a terminal or a notebook to show it
        with tqdm(total=len(missing), desc=f"caching {self.name}", disable=None if progress else True) as bar:
            for part, (_, bad) in zip(parts, loader, strict=True):
                self.bad |= bad
                self.built += len(part) - len(bad)
                bar.update(len(part))
        self.build_s = time.perf_counter() - began_s
        self.usable = self.checksums[self.row] != 0

    def write(self, index: int) -> BadItem | None:
        """Compute and commit an entry; return the BadItem where it cannot be computed."""
        try:
            values = self._compute(self.items[index], self.lengths[index])
        except BadItem as error:
            return error
        self._entry(index)[...] = values
        self.checksums[self.row[index]] = xxh3_64_intdigest(values.data, int(self.key[index]))
        return None

    def _compute(self, item: Any, length: int | None = None) -> np.ndarray:
        """Return the values of an item as they are kept, all of one shape but for the length. Raises BadItem."""
        loaded = self.load(item)
        raw = loaded if self.features is None else self.features(loaded)
        scaled = (raw * 32768).round().clamp(-32768, 32767) if self.dtype == np.int16 else raw
        values = scaled.to(self.torch_dtype)
        path = item_name(item)
        if not (scaled.isfinite().all() and values.isfinite().all()):
            raise BadItem(path, f"its features hold NaN, infinity or numbers beyond {self.dtype}")
        if length is not None and values.shape != (*self.shape[:-1], length):
            why = f"it has shape {list(values.shape)}, others {list(self.shape)}: the workload's `length` must tell"
            raise BadItem(path, why)
        return values.contiguous().numpy(force=True)

    # Serving batches.

    def gather(
        self, indices: Tensor, device: torch.device | str, *, on_device: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the batch of the usable items at `indices` [B] on `device`, inputs as float32; nothing waits for it.

        (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the longest,
        lengths [B], targets [B]). `on_device` are the same indices on the device, for entries that lie there. Raises
        BadItem where an entry is damaged and can no longer be computed.
        """
        device = torch.device(device)
        if self.where == "disk":
            inputs = self._read(indices.numpy(), page_locked=device.type == "cuda").to(device, non_blocking=True)
            places, labels = indices, self.labels
        else:
            memory, *labels = self.memory
            if self.varies:  # how long the longest is, is known here: the device is not asked
                memory = memory[..., : int(self.lengths[indices.numpy()].max(initial=0))]
            places = indices.to(memory.device) if on_device is None or self.where == "ram" else on_device
            inputs = select(memory, places, device)
        inputs = inputs.to(torch.float32)  # there, and not before: fewer bytes travel
        if self.torch_dtype is torch.int16:
            inputs.mul_(1 / 32768)
        return inputs, *(select(column, places, device) for column in labels)

    def _read(self, at: np.ndarray, page_locked: bool = False) -> Tensor:
        """Return a copy [B, ...] of the entries at `at` [B], padded with zeros."""
        shape = (len(at), *self.shape[:-1], int(self.lengths[at].max(initial=0)))
        if page_locked:
            batch = torch.empty(shape, dtype=self.torch_dtype, pin_memory=True)
        else:  # what PyTorch takes anew is cleared by the system, which takes a sixth of the time
            batch = torch.from_numpy(np.empty(shape, self.dtype))
        copies = batch.numpy()
        entries: Iterable[np.ndarray] = copies
        if self.rows is not None:
            self.rows.take(self.row[at], axis=0, out=copies, mode="clip")  # "raise" would copy twice
        else:
            entries = [self._entry(index) for index in at.tolist()]
            for copy, entry in zip(copies, entries, strict=True):
                copy[..., : entry.shape[-1]] = entry
                copy[..., entry.shape[-1] :] = 0
        if self.trusted[at].all():
            return batch
        keys = self.key[at].tolist()
        hashes = [xxh3_64_intdigest(entry.data, key) for entry, key in zip(entries, keys, strict=True)]
        damaged = at[np.array(hashes, np.uint64) != self.checksums[self.row[at]]]
        if len(damaged):
            self._compute_again(np.unique(damaged))
            return self._read(at, page_locked)
        self.trusted[at] = True
        return batch

    def _entry(self, index: int) -> np.ndarray:
        """Return an entry, as it is mapped."""
        if self.rows is not None:
            return self.rows[self.row[index]]
        begin, length = self.begin[index], self.lengths[index]
        return self.values[begin : begin + self.frame * length].reshape(*self.shape[:-1], length)

    def _compute_again(self, damaged: np.ndarray) -> None:
        """Compute entries again, in place."""
        warnings.warn(f"an entry in {self.folder} is not as it was written: it is computed again", stacklevel=4)
        self.checksums[self.row[damaged]] = 0
        for index in damaged.tolist():
            if error := self.write(index):
                raise error
        self.recomputed += len(damaged)

    def load_into(self, asked: str, device: torch.device) -> None:
        """Load all entries where they are asked to be, if they fit into half of what is free there; say so in `why`."""
        target = device if asked == "device" else torch.device("cpu")
        shape = (len(self.items), *self.shape[:-1], int(self.lengths.max()))  # each padded to the longest
        needed = math.prod(shape) * self.dtype.itemsize
        fits = needed <= MEMORY_SHARE * _free_bytes(target)
        if asked != "disk" and fits:
            inputs = torch.zeros(shape, dtype=self.torch_dtype, device=target)
            for part in np.array_split(np.flatnonzero(self.usable), 1 + len(self.items) // 256):
                batch = self._read(part)
                inputs[torch.from_numpy(part).to(target), ..., : batch.shape[-1]] = batch.to(target)
            self.memory = [inputs, *(column.to(target) for column in self.labels)]
            self.where = "ram" if target.type == "cpu" else "device"
        size_mb = self.frame * self.lengths.sum() * self.dtype.itemsize / 1e6
        self.why = f"cache={self.where}: {size_mb:.3g} MB, {self.built} entries computed in {self.build_s:.2g} s"
        if asked != "disk" and not fits:
            self.why += f"; they are more than half of what is free in {asked}"

    def verify(self) -> list[str]:
        """Compare every entry with its checksum; return the items whose entries are damaged."""
        damaged = set(files.damaged_rows(self.folder))
        return [item_name(item) for item, row in zip(self.items, self.row.tolist(), strict=True) if row in damaged]

    def repair(self) -> int:
        """Compute the damaged entries again; return how many there were. Those of other items are, when next used."""
        damaged = files.damaged_rows(self.folder, repair=True)
        self.build()
        return len(damaged)


def select(values: Tensor, places: Tensor, device: torch.device) -> Tensor:
    """Return the rows at `places` on the device; to a GPU they go out of page-locked memory, and nothing waits."""
    if values.device.type == device.type:
        return values.index_select(0, places)
    rows = torch.empty(len(places), *values.shape[1:], dtype=values.dtype, pin_memory=True)
    return torch.index_select(values, 0, places, out=rows).to(device, non_blocking=True)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(usable_ram_bytes(), psutil.virtual_memory().available)

"""Features or waveforms computed once and kept, in files that are mapped into memory.

A build that is killed loses the entry it was at. An entry that does not match its checksum when it is first touched is
computed again, in place. Other parameters, code or library versions mean another folder: stale features are not served.
"""

import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest

from speedkit.data import cache_files as files
from speedkit.data.decode import BadItem, with_decoder
from speedkit.data.workers import start_process
from speedkit.errors import SpeedkitError
from speedkit.hardware import cache_root, usable_cores, usable_ram_bytes
from speedkit.plan import Plan

if TYPE_CHECKING:
    from speedkit.workloads.workload import Workload

MEMORY_SHARE = 0.5  # a cache larger than this share of the free memory stays on disk
ALONE = 32  # so few entries are computed in this process: starting others would take longer

# What each process maps or loads for itself.
OWN = ("values", "checksums", "trusted", "rows", "memory")


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

    `workers` processes compute them, by default one per core; `progress` shows how far they are. Raises SpeedkitError
    when the folder cannot be written, the disk is too small, or no item can be read.
    """
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
    about = {
        "workload": workload.name,
        "plan": {name: getattr(plan, name) for name in ("cache_of", "cache_dtype", "decoder")},
        "fingerprint": files.fingerprint(workload, plan),
    }
    # The folder is named by all that its entries depend on.
    digest = hashlib.sha256(json.dumps(about["fingerprint"], sort_keys=True).encode()).hexdigest()
    root = Path(cache_dir) if cache_dir else cache_root() / "features"
    folder = root / f"{workload.name}-{digest[:16]}".replace("/", "_")
    with files.locked(folder):
        cache = FeatureCache(workload, items, plan, folder=folder, about=about)
        cache.build(usable_cores() if workers is None else workers, progress)
    cache.load_into(plan.cache, torch.device(device))
    return cache


class FeatureCache:
    """The entries of a list of items, gathered into batches; each is compared with its checksum when first touched.

    They lie `where` it says, disk, ram or device; `why` is a sentence for the user. `usable` [N] tells which items have
    an entry, `bad` (path -> why) those that cannot have one. `recomputed` counts entries that were found damaged.
    """

    def __init__(self, workload: "Workload", items: Sequence[Any], plan: Plan, *, folder: Path, about: dict[str, Any]):
        self.name = workload.name
        self.items = items
        self.folder = folder
        self.where = "disk"
        self.why = ""
        self.bad: dict[str, str] = {}
        self.built = 0
        self.build_s = 0.0
        self.recomputed = 0

        # How an entry is computed, and the number format in which it is kept.
        waveform = plan.cache_of == "waveform"
        self.load = with_decoder(workload, plan.decoder)
        self.features = None if waveform else workload.features
        self.dtype = np.dtype(workload.kept_as if waveform else plan.cache_dtype)
        self.torch_dtype = getattr(torch, self.dtype.name)

        # Where each item's entry is: its row in the index, its first value in the file, and how many values it has.
        index = files.read_index(folder)
        self.shape = self._first_shape() if index is None else tuple(index["shape"].tolist())
        self.varies = workload.length is not None
        lengths = [self.shape[-1]] * len(items) if workload.length is None else map(workload.length, items)
        self.lengths = np.fromiter(lengths, np.int64, len(items))  # [N] the last dimension of each entry
        self.count = self.lengths * math.prod(self.shape[:-1])
        about |= {"shape": self.shape, "dtype": self.dtype.name, "itemsize": self.dtype.itemsize}
        index, self.row = files.add_items(folder, items, self.count, about)
        self.key = index["key"][self.row]
        end = np.cumsum(index["count"])
        self.begin = (end - index["count"])[self.row]
        self.total = int(end[-1])
        self.entries = len(end)
        self._map()

        # What comes along with the inputs of a batch: lengths where they differ, and targets.
        self.targets = default_collate(list(map(workload.target, items)))
        self.labels = [torch.from_numpy(self.lengths), self.targets] if self.varies else [self.targets]
        self.usable = self.checksums[self.row] != 0

    def __len__(self) -> int:
        return len(self.items)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in OWN} | {"where": "disk"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        """Map the files; the system shares their pages between all processes that do."""
        self.values = files.mapped(self.folder / files.VALUES, self.dtype, self.total)
        self.checksums = files.mapped(self.folder / files.CHECKSUMS, np.dtype(np.uint64), self.entries)
        self.trusted = np.zeros(len(self.items), bool)  # [N] whose checksum has been compared
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
        processes = workers if len(missing) > ALONE and os.access(self.folder, os.W_OK) else 0
        parts = np.array_split(missing, max(processes, len(missing) // 16, 1))
        outcomes: Any = DataLoader(
            parts,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=self._write,  # type: ignore[arg-type]
            num_workers=processes,
            in_order=False,
            worker_init_fn=start_process,
            generator=torch.Generator(),  # nothing is drawn from the global one
            multiprocessing_context="fork" if processes and sys.platform == "linux" else None,
        )
        with tqdm(
            total=len(missing), desc=f"caching {self.name}", unit=" items", disable=None if progress else True
        ) as bar:
            for tried, bad in outcomes:
                self.bad |= bad
                self.built += tried - len(bad)
                bar.update(tried)
        self.build_s = time.perf_counter() - began_s
        self.usable = self.checksums[self.row] != 0

    def _write(self, indices: np.ndarray) -> tuple[int, dict[str, str]]:
        """Compute and commit entries; return (how many were tried, path -> why of those that cannot be computed)."""
        bad = {}
        for index in indices.tolist():
            try:
                values = self._compute(self.items[index], self.lengths[index])
            except BadItem as error:
                bad[error.path] = error.why
                continue
            self._entry(index)[:] = values.reshape(-1)
            self.checksums[self.row[index]] = xxh3_64_intdigest(values.data, int(self.key[index]))
        return len(indices), bad

    def _compute(self, item: Any, length: int | None = None) -> np.ndarray:
        """Return the values of an item as they are kept, all of one shape but for the length. Raises BadItem."""
        loaded = self.load(item)
        raw = loaded if self.features is None else self.features(loaded)
        scaled = (raw * 32768).round().clamp(-32768, 32767) if self.dtype == np.int16 else raw
        values = scaled.to(self.torch_dtype)
        path = str(getattr(item, "path", item))
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
        lengths [B], targets [B]). `on_device` are the same indices on the device, for entries that lie there. An item
        whose entry is found to be damaged and can no longer be computed is left out.
        """
        device = torch.device(device)
        if self.where == "disk":
            at, inputs = self._read(indices.numpy())
            places = torch.from_numpy(at)
            labels = self.labels
        else:
            memory, *labels = self.memory
            if self.varies:  # how long the longest is, is known here: the device is not asked
                memory = memory[..., : int(self.lengths[indices.numpy()].max(initial=0))]
            places = _sent(indices, memory.device) if on_device is None else on_device
            inputs = memory.index_select(0, places)
        batch = [_sent(tensor, device) for tensor in (inputs, *(column.index_select(0, places) for column in labels))]
        if self.dtype != np.float32:
            batch[0] = batch[0].to(torch.float32)  # there, and not before: fewer bytes travel
        if self.dtype == np.int16:
            batch[0].mul_(1 / 32768)
        return tuple(batch)

    def _read(self, at: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return (`at` [B] without items whose entries are lost, a copy [B, ...] of the others, padded with zeros)."""
        copies: Any
        if self.rows is not None:
            copies = self.rows.take(self.row[at], axis=0)
            batch = torch.from_numpy(copies)
        else:
            copies = [self._entry(index) for index in at.tolist()]
            lengths = self.lengths[at].tolist()
            batch = torch.zeros(len(at), *self.shape[:-1], max(lengths, default=0), dtype=self.torch_dtype)
            for values, entry, length in zip(batch.numpy(), copies, lengths, strict=True):
                values[..., :length] = entry.reshape(*self.shape[:-1], length)
        return (at, batch) if self._check(at, copies) else self._read(at[self.usable[at]])

    def _entry(self, index: int) -> np.ndarray:
        """Return the values of an entry, as they are mapped."""
        begin = self.begin[index]
        return self.values[begin : begin + self.count[index]]

    def _check(self, at: np.ndarray, copies: Any) -> bool:
        """Compare entries touched for the first time with their checksums; return whether all are as they were written.

        `copies` are the entries just read, still in the CPU's cache. Those that differ are computed again, in place.
        """
        new = np.flatnonzero(~self.trusted[at])
        if not len(new):
            return True
        touched = at[new]
        keys = self.key[touched].tolist()
        hashes = [xxh3_64_intdigest(copies[place], key) for place, key in zip(new.tolist(), keys, strict=True)]
        damaged = np.unique(touched[np.array(hashes, np.uint64) != self.checksums[self.row[touched]]])
        self.trusted[touched] = True
        if not len(damaged):
            return True
        warnings.warn(f"an entry in {self.folder} is not as it was written: it is computed again", stacklevel=4)
        self.checksums[self.row[damaged]] = 0
        self.bad |= self._write(damaged)[1]
        self.usable[damaged] = self.checksums[self.row[damaged]] != 0
        self.recomputed += len(damaged)
        return False

    def load_into(self, asked: str, device: torch.device) -> None:
        """Load all entries where they are asked to be, if they fit into half of what is free there; say so in `why`."""
        target = device if asked == "device" else torch.device("cpu")
        shape = (len(self.items), *self.shape[:-1], int(self.lengths.max()))  # each padded to the longest
        needed, free = math.prod(shape) * self.dtype.itemsize, _free_bytes(target)
        why_not = ""
        if asked != "disk" and needed > MEMORY_SHARE * free:
            why_not = f"; {needed / 1e6:.3g} MB are more than half of the {free / 1e6:.3g} MB free in {asked}"
        elif asked != "disk":
            inputs = torch.zeros(shape, dtype=self.torch_dtype, device=target)
            for part in np.array_split(np.flatnonzero(self.usable), 1 + len(self.items) // 256):
                at, batch = self._read(part)
                inputs[torch.from_numpy(at).to(target), ..., : batch.shape[-1]] = batch.to(target)
            self.memory = [inputs, *(column.to(target) for column in self.labels)]
            self.where = "ram" if target.type == "cpu" else "device"
        built = f"{self.built} entries computed in {self.build_s:.2g} s" if self.built else "all entries were there"
        self.why = f"cache={self.where}: {self.count.sum() * self.dtype.itemsize / 1e6:.3g} MB, {built}{why_not}"

    def verify(self) -> list[tuple[str, str]]:
        """Compare every entry in the folder with its checksum; return (item or file, why) of those that are damaged."""
        return files.verify_cache(self.folder)

    def repair(self) -> int:
        """Compute the damaged entries again; return how many there were. Those of other items are, when next used."""
        damaged = files.verify_cache(self.folder, repair=True)
        self.build()
        return len(damaged)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; to a GPU it goes out of page-locked memory, and nothing waits for it."""
    to_gpu = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if to_gpu else tensor).to(device, non_blocking=to_gpu)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(usable_ram_bytes(), psutil.virtual_memory().available)

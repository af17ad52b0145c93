"""Features or waveforms computed once and kept, in files that are mapped into memory.

A build that is killed loses the entry it was at. An entry that does not match its checksum when it is first touched is
computed again, in place. Other parameters, code or library versions mean another folder: stale features are not served.
"""

import errno
import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest

from speedkit.data import cache_files as files
from speedkit.data.cache_files import describe_caches, verify_cache
from speedkit.data.decode import BadItem, with_decoder
from speedkit.data.fingerprint import fingerprint
from speedkit.data.workers import start_process
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import cache_root
from speedkit.plan import Plan
from speedkit.system import usable_cores, usable_ram_bytes

__all__ = ["FeatureCache", "describe_caches", "open_cache", "repair_cache", "verify_cache"]

MEMORY_SHARE = 0.5  # a cache larger than this share of the free memory stays on disk
ALONE_S = 0.1  # so long the process builds by itself: what is done by then needs no others
OWN = (
    "values",
    "checksums",
    "source",
    "begin",
    "entries",
    "place",
    "on_device",
)  # what each process maps or loads for itself


def open_cache(
    workload: Any,
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
        "made_by": json.loads(json.dumps(dict(workload.made_by), default=str)),
        "plan": {name: getattr(plan, name) for name in ("cache_of", "cache_dtype", "decoder")},
        "fingerprint": fingerprint(workload, plan),
    }
    folder = _folder(about, cache_dir)
    with files.locked(folder):
        cache = FeatureCache(workload, items, plan, folder=folder, about=about)
        cache.build(usable_cores() if workers is None else workers, progress)
    cache.load_into(plan.cache, torch.device(device))
    return cache


def repair_cache(folder: str | Path, workload: str | None = None, **options: Any) -> int:
    """Compute the entries in `folder` again that are damaged; return how many.

    about.json says how the workload is made, `workload` and `options` say it in its place, as to `load_workload`.
    Raises UsageError where neither does, SpeedkitError for a cache that is stale.
    """
    repaired = 0
    for path in files.caches_in(folder):
        if not verify_cache(path):
            continue
        about = files.read_about(path)
        if not about:
            raise SpeedkitError(f"{path} does not tell what it held: remove it, it is built again")
        made_by = about["made_by"] | ({"name": workload} if workload else {}) | options
        if "name" not in made_by:
            raise UsageError(f"{path} does not say how its workload is made: name it with --workload")
        made = importlib.import_module("speedkit").load_workload(**made_by)
        plan = Plan(cache="disk", **about["plan"])
        if _folder({"workload": made.name, "fingerprint": fingerprint(made, plan)}, path.parent) != path:
            raise SpeedkitError(
                f"{path} is stale: what it was made by has changed, and it is built anew at its next use"
            )
        cache = open_cache(made, [*made.train, *made.test], plan, cache_dir=path.parent)
        repaired += cache.built + cache.repair()
    return repaired


class FeatureCache:
    """The entries of a list of items, gathered into batches; each is compared with its checksum when first touched.

    They lie `where` it says, disk, ram or device; `why` is a sentence for the user. `usable` [N] tells which items have
    an entry, `bad` (path -> why) those that cannot have one. `recomputed` counts entries that were found damaged.
    """

    def __init__(self, workload: Any, items: Sequence[Any], plan: Plan, *, folder: Path, about: dict[str, Any]):
        self.name, self.items, self.folder, self.where, self.why = workload.name, items, folder, "disk", ""
        self.bad: dict[str, str] = {}
        self.recomputed, self.built, self.build_s = 0, 0, 0.0
        waveform, self.varies = plan.cache_of == "waveform", workload.length is not None
        self.load, self.features = with_decoder(workload, plan.decoder), None if waveform else workload.features
        self.dtype = np.dtype(workload.kept_as if waveform else plan.cache_dtype)
        self.torch_dtype = getattr(torch, self.dtype.name)

        # Where each item's entry is: its row in the index, its first value in the file, and how many values it has.
        index = files.read_index(folder)
        self.shape = self._first_shape() if index is None else tuple(index["shape"].tolist())
        lengths = map(workload.length, items) if self.varies else [self.shape[-1]] * len(items)
        self.lengths = np.fromiter(lengths, np.int64, len(items))  # [N] the last dimension of each entry
        self.count = self.lengths * math.prod(self.shape[:-1])
        about |= {"shape": self.shape, "dtype": self.dtype.name, "itemsize": self.dtype.itemsize}
        index, self.row = files.completed(folder, index, items, self.count, about)
        self.key, self.offset = index["key"][self.row], index["begin"][self.row]
        self.total, self.rows = int((index["begin"] + index["count"]).max()), len(index["key"])
        self._map()

        # What comes along with the inputs of a batch: lengths where they differ, and targets.
        targets = list(map(workload.target, items))
        self.targets = torch.stack(targets) if isinstance(targets[0], Tensor) else torch.from_numpy(np.array(targets))
        self.labels = [self.lengths, self.targets.numpy()] if self.varies else [self.targets.numpy()]
        self.trusted = np.zeros(len(items), bool)  # [N] whose checksum has been compared
        self.unchecked = True  # whether there are others
        self.usable = self.checksums[self.row] != 0

    def __len__(self) -> int:
        return len(self.items)

    def _first_shape(self) -> tuple[int, ...]:
        """Return the shape of the first entry that can be computed."""
        for item in self.items:
            try:
                return self._compute(item).shape
            except BadItem as error:
                self.bad[error.path] = error.why
        raise self._unreadable()

    def _unreadable(self) -> SpeedkitError:
        path, why = next(iter(self.bad.items()))
        return SpeedkitError(f"none of the {len(self.items)} files of {self.name} can be read; {path}: {why}")

    def _map(self) -> None:
        """Map the files; the system shares their pages between all processes that do."""
        self.values = files.mapped(self.folder / files.VALUES, self.dtype, self.total)
        self.checksums = files.mapped(self.folder / files.CHECKSUMS, np.dtype(np.uint64), self.rows)
        self._serve(self.values, self.offset)

    def _serve(self, source: np.ndarray, begin: np.ndarray) -> None:
        """Gather entries out of `source` from now on, where that of item i begins at begin[i]."""
        self.source, self.begin, self.entries = source, begin, None
        if not self.varies:  # then they are rows, item i that at place[i]
            self.entries, self.place = source.reshape(-1, *self.shape), begin // math.prod(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in OWN} | {"where": "disk"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def build(self, workers: int = 1, progress: bool = False) -> None:
        """Compute the entries that are missing. Raises SpeedkitError where no item has one after that."""
        began_s = time.perf_counter()
        missing = np.flatnonzero(self.checksums[self.row] == 0)
        missing = missing[np.sort(np.unique(self.row[missing], return_index=True)[1])]  # an item may be there twice
        with tqdm(total=len(missing), desc=f"caching {self.name}", unit=" items", disable=not progress) as bar:
            for outcome in self._written(missing, workers):
                self._note(outcome)
                self.built += outcome[0] - len(outcome[1])
                with files.writing(self.folder):
                    if self.built and not os.access(self.folder, os.W_OK):
                        raise OSError(errno.EROFS, "it is read-only, and entries are missing")
                bar.update(outcome[0])
        self.build_s = time.perf_counter() - began_s
        self.usable = self.checksums[self.row] != 0
        if not self.usable.any():
            raise self._unreadable()

    def _written(self, missing: np.ndarray, workers: int) -> Iterator[Any]:
        """Yield what `_write` returns of the parts of `missing`: written here, by processes where it takes long."""
        until_s = time.perf_counter() + ALONE_S
        while len(missing) and (workers < 2 or time.perf_counter() < until_s):
            yield self._write(missing[:1])
            missing = missing[1:]
        if len(missing):
            parts = np.array_split(missing, max(workers, len(missing) // 16))
            yield from DataLoader(
                parts,  # type: ignore[arg-type]
                batch_size=None,
                collate_fn=self._write,  # type: ignore[arg-type]
                num_workers=workers,
                in_order=False,
                worker_init_fn=start_process,
                generator=torch.Generator(),  # nothing is drawn from the global one
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )

    def _write(self, indices: np.ndarray) -> tuple[int, dict[str, str]] | SpeedkitError:
        """Compute and commit entries; return (how many were tried, path -> why of those that cannot be computed)."""
        bad = {}
        for index in indices.tolist():
            try:
                values = self._compute(self.items[index])
            except BadItem as error:
                bad[error.path] = error.why
                continue
            if values.shape != (*self.shape[:-1], self.lengths[index]):
                return SpeedkitError(
                    f"{files.name_of(self.items[index])} has features of shape {list(values.shape)}, others have "
                    f"{list(self.shape)}: where lengths differ, the workload's `length` must tell them"
                )
            self.values[self.offset[index] :][: values.size] = values.reshape(-1)
            self.checksums[self.row[index]] = xxh3_64_intdigest(values.data, int(self.key[index]))
        return len(indices), bad

    def _note(self, outcome: Any) -> None:
        if isinstance(outcome, SpeedkitError):  # it comes out of a process as a value: raised, it would be wrapped
            raise outcome
        self.bad |= outcome[1]

    def _compute(self, item: Any) -> np.ndarray:
        """Return the values of an item as they are kept. Raises BadItem."""
        loaded = self.load(item)
        raw = (loaded if self.features is None else self.features(loaded)).numpy(force=True)
        with np.errstate(all="ignore"):  # what is no number, or too large for one, is looked for below
            scaled = (raw * 32768).round().clip(-32768, 32767) if self.dtype == np.int16 else raw
            values = np.ascontiguousarray(scaled.astype(self.dtype))
        if not np.isfinite(scaled).all() or not np.isfinite(values).all():
            raise BadItem(files.name_of(item), f"its features hold NaN, infinity or numbers beyond {self.dtype}")
        return values

    def gather(
        self, indices: Tensor, device: torch.device | str, *, on_device: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the batch of the usable items at `indices` [B] on `device`, inputs as float32; nothing waits for it.

        (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the longest,
        lengths [B], targets [B]). `on_device` are the same indices on the device, for entries that lie there. An item
        whose entry is found to be damaged and can no longer be computed is left out.
        """
        device = torch.device(device)
        if self.where == "device":
            longest = int(self.lengths[indices.numpy()].max(initial=0))  # known here: the device is not asked
            memory, *columns = self.on_device
            places = _sent(indices, memory.device) if on_device is None else on_device
            inputs = memory[..., :longest].index_select(0, places)
            labels = [column.index_select(0, places) for column in columns]
        else:
            at, inputs = self._copied(indices.numpy(), pinned=device.type == "cuda")
            labels = [torch.from_numpy(column[at]) for column in self.labels]
        if self.where == "device" or device.type != "cpu":
            inputs, *labels = (_sent(tensor, device) for tensor in (inputs, *labels))
        if self.dtype != np.float32:
            inputs = inputs.to(torch.float32)  # there, and not before: fewer bytes travel
        if self.dtype == np.int16:
            inputs.mul_(1 / 32768)
        return inputs, *labels

    def _copied(self, at: np.ndarray, pinned: bool = False) -> tuple[np.ndarray, Tensor]:
        """Return (`at` [B], a copy of the entries there [B, ..., T] as they are kept), without those that are lost."""
        copies: Any
        if self.entries is None:
            longest = int(self.lengths[at].max(initial=0))
            batch = torch.zeros(len(at), *self.shape[:-1], longest, dtype=self.torch_dtype, pin_memory=pinned)
            spans = zip(self.begin[at].tolist(), self.count[at].tolist(), strict=True)
            copies = [self.source[begin : begin + count] for begin, count in spans]
            for row, entry, length in zip(batch.numpy(), copies, self.lengths[at].tolist(), strict=True):
                row[..., :length] = entry.reshape(*self.shape[:-1], length)
        elif pinned:
            batch = torch.empty(len(at), *self.shape, dtype=self.torch_dtype, pin_memory=True)
            copies = np.take(self.entries, self.place[at], axis=0, out=batch.numpy(), mode="clip")  # straight into it
        else:
            copies = self.entries.take(self.place[at], axis=0)
            batch = torch.from_numpy(copies)
        if not self.unchecked or self._check(at, copies):
            return at, batch
        return self._copied(at[self.usable[at]], pinned)

    def _check(self, at: np.ndarray, copies: Any) -> bool:
        """Compare entries touched for the first time with their checksums; return whether all are as they were written.

        `copies` are the entries just read, still in the CPU's cache. Those that differ are computed again, in place.
        """
        new = np.flatnonzero(~self.trusted[at])
        touched = at[new]
        seeds = self.key[touched].tolist()
        hashes = [xxh3_64_intdigest(copies[place], seed) for place, seed in zip(new.tolist(), seeds, strict=True)]
        good = np.array(hashes, np.uint64) == self.checksums[self.row[touched]]
        self.trusted[touched] = True
        self.unchecked = self.unchecked and (not good.all() or not self.trusted[self.usable].all())
        if good.all():
            return True
        if not self.recomputed:
            print(
                f"speedkit: an entry of the feature cache {self.folder} is not as it was written: it is computed "
                "again, and so is any other like it",
                file=sys.stderr,
            )
        self.recomputed += self._mend(np.unique(touched[~good]))
        return False

    def _mend(self, indices: np.ndarray) -> int:
        """Compute entries again; return how many."""
        self.checksums[self.row[indices]] = 0
        self._note(self._write(indices))
        self.usable[indices] = self.checksums[self.row[indices]] != 0
        return len(indices)

    def load_into(self, asked: str, device: torch.device) -> None:
        """Load all entries where they are asked to be, if they fit into half of what is free there; say so in `why`."""
        why_not, target = "", device if asked == "device" else torch.device("cpu")
        shape = (len(self), *self.shape[:-1], int(self.lengths.max()))  # each padded to the longest
        parts = np.array_split(np.flatnonzero(self.usable), 1 + len(self) // 256)
        needed, free = math.prod(shape) * self.dtype.itemsize, _free_bytes(target)
        if asked != "disk" and needed > MEMORY_SHARE * free:
            why_not = f"; {needed / 1e6:.3g} MB are more than half of the {free / 1e6:.3g} MB free in {asked}"
        elif target.type != "cpu":
            memory = torch.zeros(shape, dtype=self.torch_dtype, device=target)
            for part in parts:
                at, batch = self._copied(part)
                memory[torch.from_numpy(at).to(target), ..., : batch.shape[-1]] = batch.to(target)
            columns = [torch.from_numpy(column).to(target) for column in self.labels]
            self.on_device, self.where = [memory, *columns], "device"
        elif asked != "disk":
            for part in parts:
                self._copied(part)  # which compares them with their checksums
            spans = zip(self.offset.tolist(), self.count.tolist(), strict=True)
            values = np.concatenate([self.values[begin : begin + count] for begin, count in spans])
            self._serve(values, np.cumsum(self.count) - self.count)
            self.where = "ram"
        built = f"{self.built} entries computed in {self.build_s:.2g} s" if self.built else "all entries were there"
        self.why = f"cache={self.where}: {self.count.sum() * self.dtype.itemsize / 1e6:.3g} MB, {built}{why_not}"

    def verify(self) -> list[tuple[str, str]]:
        """Compare every entry in the folder with its checksum; return (item or file, why) of those that are damaged."""
        return verify_cache(self.folder)

    def repair(self) -> int:
        """Compute the damaged entries again; return how many those of this list's items are."""
        index = files.read_index(self.folder)
        if index is None:
            raise SpeedkitError(
                f"the index of {self.folder} is damaged: the cache is built anew when it is next opened"
            )
        with files.locked(self.folder):
            damaged = files.damaged_rows(self.folder, index)
            self.checksums[damaged] = 0  # those of other items are computed when these are next used
            return self._mend(np.flatnonzero(np.isin(self.row, damaged)))


def _folder(about: dict[str, Any], cache_dir: str | Path | None) -> Path:
    """Return the folder of a cache, which is named by all that its entries depend on."""
    digest = hashlib.sha256(json.dumps(about["fingerprint"], sort_keys=True).encode()).hexdigest()
    root = Path(cache_dir) if cache_dir else cache_root() / "features"
    return root / f"{about['workload']}-{digest[:16]}".replace("/", "_")


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device; to a GPU it goes out of page-locked memory, and nothing waits for it."""
    to_gpu = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if to_gpu else tensor).to(device, non_blocking=to_gpu)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(usable_ram_bytes(), psutil.virtual_memory().available)

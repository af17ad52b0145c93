"""Features or waveforms computed once and kept: found again by all that they depend on, checked when first touched."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data import store
from speedkit.data.build import Builder, build
from speedkit.data.decode import BadItem
from speedkit.data.fingerprint import base_folder, content, difference, fingerprint, sources_of
from speedkit.data.samples import loading
from speedkit.errors import SpeedkitError
from speedkit.hardware import cache_root
from speedkit.plan import Plan
from speedkit.system import read, usable_ram_bytes

MEMORY_SHARE = 0.5  # a cache larger than this share of the free memory stays on disk
_HANDLES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # each open shard takes one
MAPS = _HANDLES // 2 if _HANDLES > 1 else 512


class FeatureCache:
    """The entries of a list of items, gathered into batches. Each is compared with its checksum at its first touch.

    `where` is disk, ram or device; `why` says why, with bytes and payback; `changed` what was built, and why that.
    `bad` (path -> why) are the items that could not be used when they were to be cached. An entry that is not as it was
    written is computed live, and counted in `recomputed`. Files are opened where needed, by each process for itself.
    """

    def __init__(self, builder: Builder, state: store.State, changed: str = ""):
        self.builder, self.folder, self.changed = builder, builder.folder, changed
        *lead, self.last = state.about["shape"]  # the last dimension is None where lengths vary
        self.lead, self.varies, self.dtype = tuple(lead), self.last is None, np.dtype(state.about["dtype"])
        self.paths = [(str(self.folder / name), begin) for name, begin, _ in state.shards]
        entries, counts = [entries for *_, entries in state.shards], state.column("counts")
        rows = store.latest(state.column("keys"), builder.sources.keys)
        ends = np.concatenate([np.cumsum(part) for part in np.split(counts, np.cumsum(entries)[:-1])])
        self.shards = np.repeat(np.arange(len(entries)), entries)[rows]  # [N], as are the next three
        self.counts, self.starts = counts[rows], (ends - counts)[rows]  # elements, and where they begin in the shard
        self.checksums = state.column("checksums")[rows]
        self.usable = self.counts > 0
        self.unchecked = self.usable.copy()
        self.targets = torch.from_numpy(np.fromiter(map(builder.target, builder.items), np.int64, len(rows)))
        self.bad = self._unusable()
        self.build_s = state.manifest["build_s"] * len(rows) / max(1, len(counts))
        self.where, self.why, self.recomputed = "disk", "", 0
        self.values: Tensor | None = None  # all values one after another, once they are in memory
        self._reset()

    def _reset(self) -> None:
        self._damaged: set[int] = set()
        # The values of a shard, flat; those of all when they are in memory.
        self._opened = functools.lru_cache(MAPS)(
            lambda shard: self.values.numpy() if self.values is not None
            else store.values_of(*self.paths[shard], self.dtype)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def bytes(self) -> int:
        """What the entries take."""
        return int(self.counts.sum()) * self.dtype.itemsize

    def gather(self, indices: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Return the batch of the samples at `indices [B]`, on `device`, inputs as float32.

        (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the longest,
        lengths [B], targets [B]). Unusable items are left out, as the loader leaves them out: B is then smaller.
        """
        at, live = self._checked(indices.numpy(force=True))
        lengths = self.counts[at] // math.prod(self.lead)
        longest = int(lengths.max(initial=0)) if self.varies else self.last
        if self.values is not None and not self.varies:
            rows = self.values.view(-1, *self.lead, longest)
            inputs = rows.index_select(0, torch.from_numpy(self.starts[at] // rows[0].numel()).to(rows.device))
        elif self.values is not None and self.where == "device":
            inputs = self._picked(at, lengths, longest)
        else:
            make = torch.zeros if self.varies else torch.empty
            dtype = getattr(torch, self.dtype.name)
            inputs = make((len(at), *self.lead, longest), dtype=dtype, pin_memory=device.type == "cuda")
            for row, length, values in zip(inputs.numpy(), lengths.tolist(), self._values(at, live), strict=True):
                row[..., :length] = values.reshape(*self.lead, length)
        inputs = inputs.to(device, non_blocking=True).float()
        if self.dtype == np.int16:
            inputs.mul_(1 / 32768)
        targets = self.targets[torch.from_numpy(at)].to(device)
        return (inputs, torch.from_numpy(lengths).to(device), targets) if self.varies else (inputs, targets)

    def _values(self, at: np.ndarray, live: dict[int, np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the values of the entries at `at`, flat."""
        where = (column.tolist() for column in (at, self.shards[at], self.starts[at], self.counts[at]))
        for index, shard, start, count in zip(*where, strict=True):
            yield live[index] if index in live else self._opened(shard)[start : start + count]

    def _picked(self, at: np.ndarray, lengths: np.ndarray, longest: int) -> Tensor:
        """Return entries of different lengths, one after another on a device, as [B, ..., T] padded with zeros."""
        assert self.values is not None
        device = self.values.device
        begin, length = (torch.from_numpy(part).to(device)[:, None, None] for part in (self.starts[at], lengths))
        channel = torch.arange(math.prod(self.lead), device=device)[:, None]
        frame = torch.arange(longest, device=device)
        places = begin + channel * length + frame.minimum(length - 1)  # [B, C, T]
        return self.values[places].masked_fill(frame >= length, 0).view(len(at), *self.lead, longest)

    def _checked(self, at: np.ndarray) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Return the usable ones among the indices, and the values of damaged entries, computed live."""
        live: dict[int, np.ndarray] = {}
        for index in at[self.unchecked[at]].tolist():
            if index not in self._damaged and self._whole(index):
                self.unchecked[index] = False
                continue
            if index not in self._damaged:
                self._damaged.add(index)
                self._report()
            try:
                live[index] = self.builder.entry(index)[0].reshape(-1)
            except BadItem as item:
                self.bad[item.path] = item.why
                self.usable[index] = self.unchecked[index] = False
        return at[self.usable[at]], live

    def _whole(self, index: int) -> bool:
        shard, start, count = int(self.shards[index]), int(self.starts[index]), int(self.counts[index])
        path, begin = self.paths[shard]
        with contextlib.suppress(OSError):
            if os.stat(path).st_size < begin + (start + count) * self.dtype.itemsize:
                return False  # cut short since it was mapped: to look there would end the process
        values = self._opened(shard)[start : start + count]
        key = self.builder.sources.keys[index]
        return len(values) == count and store.checksum(values, key) == self.checksums[index]

    def _report(self) -> None:
        self.recomputed += 1
        if self.recomputed == 1:
            print(
                f"speedkit: an entry of the feature cache {self.folder} is not as it was written; it is computed live, "
                f"and so is any other like it: speedkit cache repair {self.folder.parent} mends them", file=sys.stderr,
            )  # fmt: skip

    def _unusable(self) -> dict[str, str]:
        whys: dict[str, str] = {}
        for shard in np.unique(self.shards[~self.usable]).tolist():
            try:
                whys |= store.read_shard(Path(self.paths[shard][0])).bad
            except store.Damaged:
                continue
        unusable = {}
        for index in np.flatnonzero(~self.usable).tolist():
            name = self.builder.sources.names[index]
            path = str(getattr(self.builder.items[index], "path", name))
            unusable[path] = whys.get(name, "it could not be used when it was cached")
        return unusable

    def place(self, asked: str, device: torch.device, item_s: float) -> None:
        """Bring the entries where they are asked to be if they fit, and say in `why` what that takes and gives.

        `item_s` is what computing an entry took, in one process.
        """
        free = {"device": _free_bytes(device), "ram": _free_bytes(torch.device("cpu"))}
        self.where = next((place for place in ("device", "ram") if asked in (place, "device") and
                           self.bytes <= MEMORY_SHARE * free[place]), "disk")  # fmt: skip
        if self.where != "disk":
            self._read_all(device if self.where == "device" else torch.device("cpu"))
        some = torch.linspace(0, len(self) - 1, min(64, len(self))).long()
        began_s = time.perf_counter()
        self.gather(some, device)
        if self.values is None:
            self.unchecked = self.usable.copy()  # this was no use of them
        cached_s = (time.perf_counter() - began_s) / len(some) * len(self)
        live_s = item_s * len(self)
        self.why = f"cache={self.where}: {self.bytes / 1e6:.3g} MB"
        if self.where != asked:
            self.why += f" (more than half of the {free[asked] / 1e6:.3g} MB free in {asked})"
        if live_s > cached_s:
            epochs = self.build_s / (live_s - cached_s)
            self.why += (
                f", built in {self.build_s:.2g} s; an epoch takes {cached_s:.2g} s to gather and {live_s:.2g} s to "
                f"compute in one process: paid back after {epochs:.2g} epochs"
            )

    def _read_all(self, device: torch.device) -> None:
        """Read all entries into memory, checking each, in the order of the items."""
        starts = np.cumsum(self.counts) - self.counts
        flat = np.zeros(int(self.counts.sum()), self.dtype)
        for begin in range(0, len(self), 64):
            at, live = self._checked(np.arange(begin, min(begin + 64, len(self))))
            for start, values in zip(starts[at].tolist(), self._values(at, live), strict=True):
                flat[start : start + len(values)] = values
        self.starts, self.shards, self.unchecked[:] = starts, np.zeros_like(self.shards), False
        self.values = torch.from_numpy(flat).to(device)
        self._reset()


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable:\s*(\d+) kB", read("/proc/meminfo"))
    return min(usable_ram_bytes(), int(found[1]) * 1024 if found else math.inf)


def open_cache(
    workload: Any,
    items: Sequence[Any],
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    cache_dir: str | Path | None = None,
    progress: bool = False,
    hash_content: bool = False,
) -> FeatureCache:
    """Return the cache of `items` that `plan` asks for; entries that are missing or stale are computed first.

    An entry is stale when its file's size or time of change is another; where a cache was built with `hash_content`,
    only when the content is. All are when what `fingerprint` tells has changed. `progress` shows how building goes.
    Raises SpeedkitError when the folder cannot be written, the disk is too small, or no item can be read.
    """
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
    say = functools.partial(print, flush=True) if progress else lambda text: None
    builder = builder_of(workload, items, plan, cache_dir, hash_content)
    changed = ""
    for _ in range(3):  # settling a folder whose files are damaged can bring more that is missing to light
        state, missing, why = _compare(builder)
        changed = changed or why
        if state is not None and not len(missing) and not state.problems:
            break
        try:
            with store.locked(builder.folder, say):
                state, missing, why = _compare(builder)  # what another has built meanwhile is not built again
                if len(missing):
                    say(f"{builder.folder.name}: {why}")
                    manifest = state.manifest if state is not None else None
                    build(builder, missing, workload.length is not None, manifest, say, progress)
                elif state is not None and state.problems:
                    store.settle(builder.folder, state.manifest)
        except SpeedkitError:
            if state is None or len(missing):
                raise
            break  # all entries are there, and the folder cannot be written: what is wrong in it stays
    assert state is not None
    cache = FeatureCache(builder, state, changed)
    if not cache.usable.any():
        (path, why), *_ = cache.bad.items()
        raise SpeedkitError(f"none of the {len(items)} files of {workload.name} can be read; {path}: {why}")
    cache.place(plan.cache, torch.device(device), state.manifest["item_s"])
    return cache


def builder_of(workload: Any, items: Sequence[Any], plan: Plan, cache_dir: Any, hashed: bool = False) -> Builder:
    """Return what computes the entries of `items`, and knows their folder: one for all items of a data set."""
    base = base_folder([*workload.train, *workload.test] or items)
    dtype = "int16" if plan.cache_of == "waveform" else plan.cache_dtype
    load = loading(workload, plan)
    identity = repr((workload.name, os.path.abspath(base), plan.cache_of, dtype))
    root = Path(cache_dir) if cache_dir else cache_root() / "features"
    name = re.sub(r"[^\w.-]", "_", workload.name)
    about = {
        "workload": workload.name, "made_by": json.loads(json.dumps(dict(workload.made_by), default=str)), "base": base,
        "cache_of": plan.cache_of, "decoder": plan.decoder, "dtype": dtype, "shape": None, "hashed": hashed,
        "fingerprint": fingerprint(workload, load, plan.cache_of),
    }  # fmt: skip
    features = workload.features if plan.cache_of == "features" else None
    folder = root / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return Builder(folder, about, load, features, workload.target, items, sources_of(items, base))


def _compare(builder: Builder) -> tuple[store.State | None, np.ndarray, str]:
    """Return (what the folder holds of this fingerprint, the items that it lacks, why these)."""
    sources, now = builder.sources, builder.about["fingerprint"]
    state = store.read(builder.folder, now)
    if state is None:
        missing = np.unique(sources.keys, return_index=True)[1]
        old = store.read_manifest(builder.folder)
        why = difference(old["about"]["fingerprint"], now) if old else ""
        return None, np.sort(missing), f"{why}{': ' if why else ''}building all {len(missing)} entries"
    builder.about = state.about
    rows = store.latest(state.column("keys"), sources.keys)
    same = rows >= 0
    for column, mine in (("sizes", sources.sizes), ("modified_ns", sources.modified_ns)):
        if len(known := state.column(column)):
            same &= known[rows] == mine
    if state.about["hashed"]:
        kept = state.column("contents")
        for index in np.flatnonzero(~same & (rows >= 0)).tolist():
            same[index] = kept[rows[index]] == content(getattr(builder.items[index], "path", None)) != 0
    missing = np.flatnonzero(~same)
    missing = missing[np.sort(np.unique(sources.keys[missing], return_index=True)[1])]
    added = int((rows[missing] < 0).sum())
    parts = [f"{count} {what}" for count, what in ((len(missing) - added, "changed"), (added, "added")) if count]
    building = f": building {len(missing)} of {len(sources.names)} entries" if parts else ""
    return state, missing, ", ".join(parts) + building

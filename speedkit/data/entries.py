"""The entries of a cache, gathered into batches; each is compared with its checksum when it is first touched."""

import contextlib
import functools
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data import store
from speedkit.data.build import Builder
from speedkit.data.decode import BadItem
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

    def __init__(self, builder: Builder, state: store.State, rows: np.ndarray, changed: str = ""):
        self.builder, self.folder, self.changed = builder, builder.folder, changed
        *lead, self.last = state.about["shape"]  # the last dimension is None where lengths vary
        self.lead, self.varies, self.dtype = tuple(lead), self.last is None, np.dtype(state.about["dtype"])
        self.paths = [(str(self.folder / name), begin) for name, begin, _ in state.shards]
        entries, counts = [entries for *_, entries in state.shards], state.column("counts")
        ends = np.concatenate([np.cumsum(part) for part in np.split(counts, np.cumsum(entries)[:-1])])
        self.shards = np.repeat(np.arange(len(entries), dtype=np.int32), entries)[rows]  # [N], as are the next three
        self.counts, self.starts = counts[rows], (ends - counts)[rows]  # elements, and where they begin in the shard
        self.checksums = state.column("checksums")[rows]
        self.usable = self.counts > 0
        self.unchecked = self.usable.copy()
        self.targets = torch.from_numpy(np.fromiter(map(builder.target, builder.items), np.int64, len(rows)))
        self.bad = self._unusable()
        self.build_s = state.manifest["build_s"] * len(rows) / max(1, len(counts))
        self.where, self.why = "disk", ""
        self.damaged: set[int] = set()
        self.values: Tensor | None = None  # all values one after another, once they are in memory
        self._reset()

    def _reset(self) -> None:
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
    def recomputed(self) -> int:
        """How many entries were found damaged."""
        return len(self.damaged)

    @property
    def bytes(self) -> int:
        """What the entries take."""
        return int(self.counts.sum()) * self.dtype.itemsize

    def gather(self, indices: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """Return the batch of the samples at `indices [B]`, on `device`, inputs as float32.

        (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the longest,
        lengths [B], targets [B]). Unusable items are left out, as the loader leaves them out: B is then smaller.
        """
        at = indices.numpy(force=True)
        at = at[self.usable[at]]
        lengths = self.counts[at] // math.prod(self.lead)
        longest = int(lengths.max(initial=0)) if self.varies else self.last
        if self.values is not None and not self.varies:
            rows = self.values.view(-1, *self.lead, longest)
            inputs = rows.index_select(0, torch.from_numpy(self.starts[at] // rows[0].numel()).to(rows.device))
        elif self.values is not None and self.where == "device":
            inputs = self._picked(at, lengths, longest)
        else:
            inputs = self._copied(at, lengths, longest, pinned=device.type == "cuda")
            if not (good := self.usable[at]).all():  # some have just been found damaged, and their files gone
                at, lengths, inputs = at[good], lengths[good], inputs[torch.from_numpy(good)]
        inputs = inputs.to(device, non_blocking=True).float()
        if self.dtype == np.int16:
            inputs.mul_(1 / 32768)
        targets = self.targets[torch.from_numpy(at)].to(device)
        return (inputs, torch.from_numpy(lengths).to(device), targets) if self.varies else (inputs, targets)

    def _copied(self, at: np.ndarray, lengths: np.ndarray, longest: int, pinned: bool) -> Tensor:
        """Return the entries at `at`, copied out of the files into one batch."""
        shape = (len(at), *self.lead, longest)
        if pinned:  # what a GPU copies from
            batch = torch.zeros(shape, dtype=getattr(torch, self.dtype.name), pin_memory=True)
        else:  # numpy asks for huge pages: half the page faults' time
            batch = torch.from_numpy((np.zeros if self.varies else np.empty)(shape, self.dtype))
        view = batch.numpy()
        if not self.varies and len(at) and not self.unchecked[at].any():  # the usual case, in as few calls as can be
            count, opened = view[0].size, self._opened
            places = zip(self.shards[at].tolist(), self.starts[at].tolist(), strict=True)
            np.concatenate([opened(shard)[start : start + count] for shard, start in places], out=view.reshape(-1))
            return batch
        for row, length, values in zip(view, lengths.tolist(), self._values(at), strict=True):
            row[..., :length] = values.reshape(*self.lead, length)  # at once: what was checked is in the CPU's cache
        return batch

    def _values(self, at: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the values of entries, flat; of a damaged one, what is computed live, or zeros where that fails."""
        readable: dict[int, int] = {}  # shard -> values that are there now
        columns = (self.shards[at], self.starts[at], self.starts[at] + self.counts[at], self.unchecked[at])
        for index, shard, start, end, new in zip(at.tolist(), *(column.tolist() for column in columns), strict=True):
            if not new:
                yield self._opened(shard)[start:end]
                continue
            if shard not in readable:
                readable[shard] = self._length(shard)
            # To look beyond the end of a file that was cut short since it was mapped would end the process.
            values = self._opened(shard)[start : min(end, readable[shard])]
            key = self.builder.sources.keys[index]
            if len(values) == end - start and store.checksum(values, key) == self.checksums[index]:
                self.unchecked[index] = False
            else:
                values = self._live(index)
            yield values

    def _live(self, index: int) -> np.ndarray:
        self._report(index)
        try:
            values = self.builder.entry(index)[0].reshape(-1)
            if len(values) == self.counts[index]:
                return values
            raise BadItem(str(getattr(self.builder.items[index], "path", index)), "it has changed since")
        except BadItem as item:
            self.bad[item.path] = item.why
            self.usable[index] = self.unchecked[index] = False
            return np.zeros(self.counts[index], self.dtype)

    def _picked(self, at: np.ndarray, lengths: np.ndarray, longest: int) -> Tensor:
        """Return entries of different lengths, one after another on a device, as [B, ..., T] padded with zeros."""
        assert self.values is not None
        device = self.values.device
        begin, length = (torch.from_numpy(part).to(device)[:, None, None] for part in (self.starts[at], lengths))
        channel = torch.arange(math.prod(self.lead), device=device)[:, None]
        frame = torch.arange(longest, device=device)
        places = begin + channel * length + frame.minimum(length - 1)  # [B, C, T]
        return self.values[places].masked_fill(frame >= length, 0).view(len(at), *self.lead, longest)

    def _length(self, shard: int) -> int:
        """Return how many values of a shard can be read now."""
        path, begin = self.paths[shard]
        mapped = len(self._opened(shard))
        with contextlib.suppress(OSError):
            mapped = min(mapped, (os.stat(path).st_size - begin) // self.dtype.itemsize)
        return mapped

    def _report(self, index: int) -> None:
        self.damaged.add(index)
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
            name = self.builder.sources.name(index)
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
            at = np.arange(begin, min(begin + 64, len(self)))[self.usable[begin : begin + 64]]
            for start, values in zip(starts[at].tolist(), self._values(at), strict=True):
                flat[start : start + len(values)] = values
        self.starts, self.shards, self.unchecked[:] = starts, np.zeros_like(self.shards), False
        self.values = torch.from_numpy(flat).to(device)
        self._reset()


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable:\s*(\d+) kB", read("/proc/meminfo"))
    return min(usable_ram_bytes(), int(found[1]) * 1024 if found else math.inf)

"""The entries of a cache, gathered into batches; each is compared with its checksum when it is first touched."""

import contextlib
import math
import sys
import time
from typing import Any

import numpy as np
import psutil
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from speedkit.data import store
from speedkit.data.build import Builder
from speedkit.data.decode import BadItem
from speedkit.system import usable_ram_bytes

MEMORY_SHARE = 0.5  # a cache larger than this share of the free memory stays on disk


class FeatureCache:
    """The entries of a list of items, gathered into batches. Each is compared with its checksum at its first touch.

    `where` is disk, ram or device; `why` says why, with bytes and payback; `changed` what was built, and why that.
    `bad` (path -> why) are the items that could not be used when they were to be cached. An entry that is not as it was
    written is computed live, and counted in `recomputed`. Files are mapped where needed, by each process for itself.
    """

    def __init__(self, builder: Builder, state: store.State, rows: np.ndarray, changed: str = ""):
        self.builder, self.folder, self.changed = builder, builder.folder, changed
        *lead, self.last = state.about["shape"]
        self.lead, self.varies, self.dtype = tuple(lead), state.about["varies"], np.dtype(state.about["dtype"])
        self.files = [self.folder / name for name, *_ in state.shards]
        starts, self.lengths = store.layout(state)
        # [N]: elements, where they begin in `flat`, what they are checked by
        self.counts, self.starts, self.keys = state.column("counts")[rows], starts[rows], builder.sources["keys"]
        self.checksums = state.column("checksums")[rows]
        self.usable = self.counts > 0
        self.unchecked = self.usable.copy()
        self.targets = np.fromiter(map(builder.target, builder.items), np.int64, len(rows))
        unusable = np.flatnonzero(~self.usable).tolist()
        self.bad = {builder.path(index): state.bad.get(builder.name(index), "it has no features") for index in unusable}
        self.build_s = state.manifest["build_s"] * len(rows) / len(starts)
        self.where, self.why = "disk", ""
        self.damaged: set[int] = set()
        self._flat: np.ndarray | None = None
        self.rows: Tensor | None = None  # [N, ...] the same where all have one length and are usable, with their labels
        self._windows: np.ndarray | None = None  # a row for every place in flat where an entry could begin
        self.looked_s = 0.0  # when the files' lengths were last looked at
        self.on_device: Tensor | None = None  # what `flat` holds, once it is on the device

    @property
    def flat(self) -> np.ndarray:
        """All values one after another: the files, mapped at the first use in a process, or what was read from them."""
        if self._flat is None:
            self._flat, self._windows = store.mapped(self.files, self.lengths, self.dtype), None
        return self._flat

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_windows": None} | ({"_flat": None} if self.where == "disk" else {})

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

    def gather(self, indices: Tensor, device: torch.device, *, on_device: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the batch of the samples at `indices [B]`, on `device`, inputs as float32.

        (inputs [B, ...], targets [B]), or where lengths vary (inputs [B, ..., T] padded with zeros to the longest,
        lengths [B], targets [B]). Unusable items are left out, as the loader leaves them out: B is then smaller.
        """
        if self.rows is not None and not self.bad:
            on_rows = on_device is not None and on_device.device == self.rows.device
            indices = on_device if on_rows else indices.to(self.rows.device)  # type: ignore[assignment]
            inputs, targets = self.rows[indices], self.labels[indices]
            return self._as_float(inputs, device), targets.to(device)
        at = indices.numpy(force=True)
        if self.bad:
            at = at[self.usable[at]]
        if self.on_device is not None:
            inputs = self._picked(at)
        else:
            inputs = self._copied(at, pinned=device.type == "cuda")
            if self.bad and not (good := self.usable[at]).all():  # some were just found damaged, and their files gone
                at, inputs = at[good], inputs[torch.from_numpy(good)]
        inputs, targets = self._as_float(inputs, device), torch.from_numpy(self.targets[at]).to(device)
        return (inputs, torch.from_numpy(self._lengths(at)).to(device), targets) if self.varies else (inputs, targets)

    def _as_float(self, inputs: Tensor, device: torch.device) -> Tensor:
        inputs = inputs.to(device, torch.float32, non_blocking=True)
        return inputs.mul_(1 / 32768) if self.dtype == np.int16 else inputs

    def _lengths(self, at: np.ndarray) -> np.ndarray:
        return self.counts[at] // math.prod(self.lead)

    def _copied(self, at: np.ndarray, pinned: bool) -> Tensor:
        """Return the entries at `at` in one batch; those never touched before are checked there."""
        if self.where == "disk":
            self._look_after()
        flat, starts = self.flat, self.starts[at]
        if self.varies or pinned or not len(at):
            lengths = self._lengths(at).tolist()
            longest = max(lengths, default=0) if self.varies else self.last
            shape, dtype = (len(at), *self.lead, longest), getattr(torch, self.dtype.name)
            batch = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
            for row, start, length in zip(batch.numpy(), starts.tolist(), lengths, strict=True):
                row[..., :length] = flat[start : start + math.prod(self.lead) * length].reshape(*self.lead, length)
        else:  # one call for all rows, wherever they begin
            if self._windows is None:  # kept, for making it takes as long as copying three rows
                self._windows = sliding_window_view(flat, math.prod(self.lead) * self.last)
            batch = torch.from_numpy(self._windows[starts].reshape(len(at), *self.lead, self.last))
        if len(new := np.flatnonzero(self.unchecked[at])):
            self._check(at, new, batch.numpy(), starts)
        return batch

    def _check(self, at: np.ndarray, new: np.ndarray, batch: np.ndarray, starts: np.ndarray) -> None:
        """Compare the rows `new` of a batch with their checksums; those that differ are computed live."""
        # Where a row of the batch is an entry, it is looked at there: the copy is in the CPU's cache.
        values, begins = (self.flat, starts[new]) if self.varies else (batch, new * batch[0].size)
        found = store.checksums(values, begins, self.counts[at[new]], self.keys[at[new]])
        same = found == self.checksums[at[new]]
        self.unchecked[at[new[same]]] = False
        for row in new[~same].tolist():
            values = batch[row, ..., : self._lengths(at[row])]
            values[...] = self._live(int(at[row])).reshape(values.shape)

    def _look_after(self) -> None:
        """Map the files anew, and trust none, once one was cut short: to look beyond its end would end the process."""
        now_s = time.monotonic()
        if self._flat is not None and now_s - self.looked_s < 1:
            return
        self.looked_s = now_s
        for file, length in zip(self.files, self.lengths, strict=True):
            with contextlib.suppress(OSError):  # what was mapped of a file that is gone stays
                if file.stat().st_size < length:
                    self._flat, self.unchecked = None, self.usable.copy()

    def _live(self, index: int) -> np.ndarray:
        self.damaged.add(index)
        if self.recomputed == 1:
            print(
                f"speedkit: an entry of the feature cache {self.folder} is not as it was written; it is computed live, "
                f"and so is any other like it: speedkit cache repair {self.folder.parent} mends them",
                file=sys.stderr,
            )
        try:
            values = self.builder.entry(index)[0].reshape(-1)
            if len(values) == self.counts[index]:
                return values
            raise BadItem(self.builder.path(index), "it has changed since")
        except BadItem as item:
            self.bad[item.path] = item.why
            self.usable[index] = self.unchecked[index] = False
            return np.zeros(self.counts[index], self.dtype)

    def _picked(self, at: np.ndarray) -> Tensor:
        """Return the entries at `at` from the device's memory: [B, ..., T], padded with zeros where lengths differ."""
        assert self.on_device is not None
        device, channels = self.on_device.device, math.prod(self.lead)
        if not self.varies:
            rows = torch.from_numpy(self.starts[at] // (channels * self.last)).to(device)
            return self.on_device.view(-1, *self.lead, self.last).index_select(0, rows)
        lengths = self._lengths(at)
        longest = int(lengths.max(initial=0))
        begin, length = (torch.from_numpy(part).to(device)[:, None, None] for part in (self.starts[at], lengths))
        channel = torch.arange(channels, device=device)[:, None]
        frame = torch.arange(longest, device=device)
        places = begin + channel * length + frame.minimum(length - 1)  # [B, C, T]
        return self.on_device[places].masked_fill(frame >= length, 0).view(len(at), *self.lead, longest)

    def place(self, asked: str, device: torch.device, item_s: float) -> None:
        """Bring the entries where they are asked to be if they fit, and say in `why` what that takes and gives.

        `item_s` is what computing an entry took, in one process.
        """
        free = {"device": _free_bytes(device), "ram": _free_bytes(torch.device("cpu"))}
        self.where = next(
            (
                place
                for place in ("device", "ram")
                if asked in (place, "device") and self.bytes <= MEMORY_SHARE * free[place]
            ),
            "disk",
        )
        if self.where != "disk":
            self._read_all(device if self.where == "device" else torch.device("cpu"))
        some = torch.linspace(0, len(self) - 1, min(64, len(self))).long()
        began_s = time.perf_counter()
        self.gather(some, device)
        if self.where == "disk":
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
        for index in np.flatnonzero(self.usable).tolist():
            row = self._copied(np.array([index]), pinned=False)
            flat[starts[index] : starts[index] + self.counts[index]] = row.numpy().reshape(-1)
        self.starts, self._flat, self._windows = starts, flat, None
        memory = torch.from_numpy(flat).to(device)
        if not self.varies:
            self.rows = memory.view(-1, *self.lead, self.last)
            self.labels = torch.from_numpy(self.targets).to(device)
        if device.type != "cpu":
            self.on_device, self._flat = memory, None


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(usable_ram_bytes(), psutil.virtual_memory().available)

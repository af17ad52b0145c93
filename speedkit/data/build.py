"""Building a feature cache: a pilot that predicts bytes and seconds, then shards on all cores; verifying, repairing."""

import dataclasses
import math
import multiprocessing
import pickle
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from xxhash import xxh3_64_hexdigest

from speedkit.data import store
from speedkit.data.decode import BadItem
from speedkit.data.fingerprint import content, name_of
from speedkit.data.workers import start_process
from speedkit.errors import SpeedkitError
from speedkit.system import usable_cores

SHARD_BYTES = 64_000_000  # of values: what a builder that is killed loses, at most, per core
SHARDS = 32  # a small cache has so many, so that all cores are done at about the same time
PILOT = 8  # items that are tried before building
PARALLEL_S = 0.5  # less than this is done sooner than processes are started


@dataclasses.dataclass
class Builder(Dataset):
    """Computes a list's entries shard by shard: `builder[number]` writes one, in a worker process or here."""

    folder: Path
    about: dict[str, Any]  # workload, fingerprint, dtype, shape, whether its last dimension varies ...
    load: Callable[[Any], Tensor]
    features: Callable[[Tensor], Tensor] | None  # None where waveforms are kept
    target: Callable[[Any], int]
    items: Sequence[Any]
    sources: dict[str, np.ndarray]  # columns about the items
    progress: bool = False
    chunks: list[tuple[str, np.ndarray]] = dataclasses.field(default_factory=list)  # name of a shard, its items
    kept: dict[int, tuple[np.ndarray, float]] = dataclasses.field(default_factory=dict)  # entries not to compute again

    def __len__(self) -> int:
        return len(self.chunks)

    def say(self, text: str) -> None:
        """Print how building goes, where that is wanted."""
        if self.progress:
            print(text, flush=True)

    def name(self, index: int) -> str:
        """Return what the cache calls an item."""
        return name_of(self.items[index], self.about["base"])

    def path(self, index: int) -> str:
        """Return an item's file, or its name where it has none."""
        return str(getattr(self.items[index], "path", self.name(index)))

    def entry(self, index: int) -> tuple[np.ndarray, float]:
        """Return (values as kept, the largest difference from what was computed); raises BadItem."""
        loaded, dtype = self.load(self.items[index]), self.about["dtype"]
        raw = (loaded if self.features is None else self.features(loaded)).numpy(force=True)
        if not np.isfinite(raw).all():
            raise BadItem(self.path(index), "its features hold NaN or infinity")
        scale = 32768 if dtype == "int16" else 1
        with np.errstate(over="ignore"):
            values = (raw * scale).round().clip(-32768, 32767).astype(dtype) if scale > 1 else raw.astype(dtype)
        if not np.isfinite(values).all():
            raise BadItem(self.path(index), f"its features are beyond {dtype}: {np.abs(raw).max():.3g}")
        shape, dimensions = self.about["shape"], raw.ndim - self.about["varies"]
        if shape and list(raw.shape[:dimensions]) != shape[:dimensions]:
            raise SpeedkitError(
                f"{self.name(index)} has features of shape {list(raw.shape)}, others have {shape}: where lengths "
                "differ, the workload's `length` must tell them"
            )
        return values, float(np.abs(values / np.float32(scale) - raw).max(initial=0))

    def __getitem__(self, number: int) -> tuple[str, int] | SpeedkitError:
        """Write a shard; return (its name, its entries), or what kept it from being written."""
        (name, indices), entries, bad = self.chunks[number], [], {}
        try:
            for index in indices.tolist():
                try:
                    entries.append(self.kept.get(index) or self.entry(index))
                except BadItem as item:
                    bad[self.name(index)] = item.why
                    entries.append((np.zeros(0, self.about["dtype"]), 0.0))
            values = np.concatenate([values.reshape(-1) for values, _ in entries])
            told = {"about": self.about, "bad": bad}
            with store.writing(self.folder):
                store.write_shard(self.folder / name, self._columns(indices, entries, values), values, told)
        except SpeedkitError as error:
            return error
        return name, len(indices)

    def _columns(
        self, indices: np.ndarray, entries: list[tuple[np.ndarray, float]], flat: np.ndarray
    ) -> dict[str, np.ndarray]:
        items = [self.items[index] for index in indices]
        columns = {name: column[indices] for name, column in self.sources.items()}
        hashes = [content(getattr(item, "path", None)) if self.about["hashed"] else 0 for item in items]
        counts = np.array([values.size for values, _ in entries], np.int64)
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        names = "\0".join(map(self.name, indices)).encode("utf-8", "surrogateescape")
        return columns | {
            "contents": np.array(hashes, np.uint64),
            "counts": counts,
            "checksums": store.checksums(flat, offsets[:-1], counts, columns["keys"]),
            "labels": np.array([self.target(item) for item in items], np.int64),
            "offsets": offsets,
            "errors": np.array([error for _, error in entries], np.float32),
            "names": np.frombuffer(names, np.uint8),
        }


def build(builder: Builder, missing: np.ndarray, state: store.State | None) -> None:
    """Compute the entries `missing` of the builder's list into its folder, which is locked, and settle it.

    `state` is what the folder holds of this fingerprint. An unfinished build of the same list goes on with the same
    shards. Raises SpeedkitError when the disk is too small or full, or no item is readable.
    """
    began_s, folder, total = time.perf_counter(), builder.folder, len(missing)
    entry_bytes, item_s = _pilot(builder, missing)
    manifest: dict[str, Any] = {"about": builder.about, "pending": None, "build_s": 0.0, "item_s": item_s}
    manifest |= state.manifest if state else {}
    wanted = xxh3_64_hexdigest(builder.sources["keys"].tobytes())
    if (manifest["pending"] or {}).get("wanted") != wanted:
        largest = SHARD_BYTES / max(entry_bytes, 1)
        per_shard = math.ceil(max(largest / 64, min(largest, total / SHARDS)))
        generation = 1 + max((int(path.name[6:10]) for path in store.shard_files(folder)), default=0)
        manifest["pending"] = {"wanted": wanted, "per_shard": per_shard, "generation": generation}
    per_shard, generation = manifest["pending"]["per_shard"], manifest["pending"]["generation"]
    chunks = [missing[at : at + per_shard] for at in range(0, total, per_shard)]
    builder.chunks = [(f"shard-{generation:04d}-{chunk[0]:08d}.safetensors", chunk) for chunk in chunks]
    with store.writing(folder):
        for left in folder.glob(".*.tmp"):  # whoever wrote them is dead, or the folder would be locked
            left.unlink()
        for old in store.shard_files(folder) if state is None else []:
            old.unlink()
        check_space(int(entry_bytes * total), shutil.disk_usage(folder).free, folder)
        store.commit(folder, manifest)
    cores = min(usable_cores(), len(chunks)) if item_s * total > PARALLEL_S and _can_travel(builder) else 1
    builder.say(f"about {entry_bytes * total / 1e6:.3g} MB and {item_s * total / cores:.2g} s on {cores} cores")
    # Off a terminal a line now and then, instead of a bar.
    text = "{desc}: {n_fmt}/{total_fmt} items, {rate_fmt}, {remaining} left\n"
    lines: dict[str, Any] = {} if sys.stderr.isatty() else {"mininterval": 5, "bar_format": text}
    name = f"caching {builder.about['workload']}"
    with tqdm(total=total, desc=name, unit=" items", disable=not builder.progress, **lines) as bar:
        for shard, entries in _computed(builder, cores):
            with store.writing(folder):
                store.commit(folder, {"shard": shard})
            bar.update(entries)
    manifest["build_s"] += time.perf_counter() - began_s
    store.settle(folder, manifest)


def _pilot(builder: Builder, missing: np.ndarray) -> tuple[float, float]:
    """Try items all over the list, note the shape of entries, return (bytes of one, seconds for one)."""
    spread = missing[np.linspace(0, len(missing) - 1, min(PILOT, len(missing))).astype(int)].tolist()
    found, seconds, bad = [], [], []
    for index in dict.fromkeys([*spread, *missing.tolist()]):
        began_s = time.perf_counter()
        try:
            found.append(builder.entry(index)[0])
        except BadItem as item:
            bad.append(f"{item.path}: {item.why}")
        seconds.append(time.perf_counter() - began_s)
        if found and len(seconds) >= len(spread):
            break
    if builder.about["shape"] is None:
        if not found:
            raise SpeedkitError(f"none of the {len(bad)} files of {builder.about['workload']} can be read; {bad[0]}")
        builder.about["shape"] = list(found[0].shape)
    return statistics.fmean([values.nbytes for values in found] or [0]), statistics.median(seconds)


def _can_travel(builder: Builder) -> bool:
    """Whether worker processes can be given the workload: forked ones need nothing, others must unpickle it."""
    try:
        return multiprocessing.get_start_method() == "fork" or bool(pickle.dumps(builder))
    except Exception:  # whatever objects raise that cannot be pickled
        return False


def _computed(builder: Builder, cores: int) -> Iterator[tuple[str, int]]:
    """Yield (name, entries) of each shard as it gets written; raises what kept one from it."""
    workers = {"num_workers": cores, "prefetch_factor": 1, "worker_init_fn": start_process} if cores > 1 else {}
    loader = DataLoader(builder, batch_size=None, in_order=cores < 2, generator=torch.Generator(), **workers)  # type: ignore[arg-type]
    for outcome in loader:
        if isinstance(outcome, SpeedkitError):
            raise outcome
        yield outcome


def check_space(needed_bytes: int, free_bytes: int, folder: Path) -> None:
    """Raise SpeedkitError when a cache of `needed_bytes` would not fit, with 5 % to spare, into `free_bytes`."""
    if needed_bytes > 0.95 * free_bytes:
        raise SpeedkitError(
            f"the feature cache needs {needed_bytes / 1e9:.1f} GB and {folder} has {free_bytes / 1e9:.1f} GB free: "
            "name another folder with --cache-dir, or use cache=off"
        )


def _intact(folder: Path, state: store.State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which entries are as written [N], and where each begins in the values of all, which are mapped."""
    starts, lengths = store.layout(state)
    files = [folder / name for name, *_ in state.shards]
    flat = store.mapped(files, lengths, np.dtype(state.about["dtype"]))
    found = store.checksums(flat, starts, state.column("counts"), state.column("keys"))
    return found == state.column("checksums"), starts, flat


def verify(folder: Path) -> list[tuple[str, str]]:
    """Read all of a cache; return what is not as written: (file or item, why)."""
    state = store.read(folder)
    if state is None:
        return [(store.MANIFEST, "it is missing or does not match its checksum, and no shard tells what it held")]
    shards, damaged = store.sealed(folder, state.about["fingerprint"])
    problems = list(dict([*state.problems, *damaged]).items())
    known = {shard.name: shard.names for shard in shards}
    good = store.by_shard(state, _intact(folder, state)[0])
    for (name, *_), whole in zip(state.shards, good, strict=True):
        names = known.get(name) or [f"entry {row} of {name}" for row in range(len(whole))]
        why = f"its values in {name} do not match their checksum"
        problems += [(names[row], why) for row in np.flatnonzero(~whole)]
    return problems


def repair(builder: Builder) -> int:
    """Compute the entries again that are not as written, and write their shards anew; return how many those were.

    Shards come out byte-identical, unless an item in them has changed or gone since: that one is left out.
    """
    state = store.read(builder.folder)
    if state is None:
        return 0
    builder.about, builder.chunks, builder.kept = state.about, [], {}
    keys, counts, errors = (state.column(name) for name in ("keys", "counts", "errors"))
    good, starts, flat = _intact(builder.folder, state)
    at, same = store.current(state, builder.sources)
    items = np.full(len(keys), -1)  # of each entry; -1: it is out of use
    items[at[same]] = np.flatnonzero(same)
    sealed, computed = {shard.name for shard in store.sealed(builder.folder, state.about["fingerprint"])[0]}, 0
    for (name, *_), rows in zip(state.shards, store.by_shard(state, np.arange(len(keys))), strict=True):
        if good[rows].all() and name in sealed:
            continue
        rows = rows[items[rows] >= 0]
        kept = rows[good[rows] & (counts[rows] > 0)]
        for row in kept:
            builder.kept[items[row]] = flat[starts[row] : starts[row] + counts[row]], float(errors[row])
        computed += len(rows) - len(kept)
        if len(rows):
            builder.chunks.append((name, items[rows]))
        else:
            (builder.folder / name).unlink(missing_ok=True)
    list(_computed(builder, 1))
    store.settle(builder.folder, state.manifest)
    return computed

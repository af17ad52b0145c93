"""Building a feature cache: a pilot that predicts bytes and seconds, then shards on all cores; verifying, repairing."""

import contextlib
import dataclasses
import math
import multiprocessing
import pickle
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from speedkit.data import store
from speedkit.data.decode import BadItem
from speedkit.data.fingerprint import Sources, content
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
    about: dict[str, Any]  # workload, fingerprint, dtype, shape (the last dimension None where lengths differ) ...
    load: Callable[[Any], Tensor]
    features: Callable[[Tensor], Tensor] | None  # None where waveforms are kept
    target: Callable[[Any], int]
    items: Sequence[Any]
    sources: Sources
    chunks: list[tuple[str, np.ndarray]] = dataclasses.field(default_factory=list)  # name of a shard, its items
    kept: dict[int, tuple[np.ndarray, float]] = dataclasses.field(default_factory=dict)  # entries not to compute again

    def __len__(self) -> int:
        return len(self.chunks)

    def entry(self, index: int) -> tuple[np.ndarray, float]:
        """Return (values as kept, the largest difference from what was computed); raises BadItem."""
        name, item, dtype = self.sources.name(index), self.items[index], self.about["dtype"]
        computed = self.load(item) if self.features is None else self.features(self.load(item))
        raw = computed.detach().cpu().numpy()
        if not np.isfinite(raw).all():
            raise BadItem(getattr(item, "path", name), "its features hold NaN or infinity")
        scale = 32768 if dtype == "int16" else 1
        with np.errstate(over="ignore"):
            values = (raw * scale).round().clip(-32768, 32767).astype(dtype) if scale > 1 else raw.astype(dtype)
        if not np.isfinite(values).all():
            raise BadItem(getattr(item, "path", name), f"its features are beyond {dtype}: {np.abs(raw).max():.3g}")
        shape = self.about["shape"]
        if shape and (values.shape[:-1] != tuple(shape[:-1]) or shape[-1] not in (None, values.shape[-1])):
            raise SpeedkitError(
                f"{name} has features of shape {list(values.shape)}, others have {shape}: where lengths differ, the "
                "workload's `length` must tell them"
            )
        return values, float(np.abs(values / np.float32(scale) - raw).max(initial=0))

    def __getitem__(self, number: int) -> tuple[str, int] | Exception:
        """Write a shard; return (its name, its entries), or what kept it from being written."""
        name, indices = self.chunks[number]
        entries, bad, empty = [], {}, np.zeros(0, self.about["dtype"])
        for index in indices.tolist():
            try:
                entries.append(self.kept.get(index) or self.entry(index))
            except BadItem as item:
                bad[self.sources.name(index)] = item.why
                entries.append((empty, 0.0))
            except SpeedkitError as error:
                return error
        try:
            store.write_shard(self.folder / name, self._tensors(indices, entries), {"about": self.about, "bad": bad})
        except OSError as error:
            return error
        return name, len(indices)

    def _tensors(self, indices: np.ndarray, entries: list[tuple[np.ndarray, float]]) -> dict[str, np.ndarray]:
        source, rows = self.sources, [values.reshape(-1) for values, _ in entries]
        names = "\0".join(source.name(index) for index in indices).encode("utf-8", "surrogateescape")
        paths = [getattr(self.items[index], "path", None) for index in indices]
        keys = source.keys[indices]
        return {
            "values": np.concatenate(rows),
            "offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64),
            "labels": np.array([self.target(self.items[index]) for index in indices], np.int64),
            "names": np.frombuffer(names, np.uint8),
            "keys": keys,
            "sizes": source.sizes[indices],
            "modified_ns": source.modified_ns[indices],
            "contents": np.array([content(path) if self.about["hashed"] else 0 for path in paths], np.uint64),
            "counts": np.array([len(row) for row in rows], np.int64),
            "errors": np.array([error for _, error in entries], np.float32),
            "checksums": np.array(
                [store.checksum(row, key) for row, key in zip(rows, keys.tolist(), strict=True)], np.uint64
            ),
        }  # fmt: skip


def build(
    builder: Builder, missing: np.ndarray, varies: bool, manifest: dict[str, Any] | None, say: Callable[[str], None],
    show: bool,
) -> None:  # fmt: skip
    """Compute the entries `missing` of the builder's list into its folder, which is locked, and settle it.

    `manifest` is that of the folder where it holds entries of this fingerprint. An unfinished build of the same list
    goes on with the same shards. Raises SpeedkitError when the disk is too small or full, or no item is readable.
    """
    began_s, folder = time.perf_counter(), builder.folder
    for left in folder.glob(".*.tmp"):  # whoever wrote them is dead, or the folder would be locked
        left.unlink(missing_ok=True)
    entry_bytes, item_s, shape, bad = _pilot(builder, missing)
    if shape is None and manifest is None:
        (path, why), *_ = bad.items()
        name = builder.about["workload"]
        raise SpeedkitError(f"none of the {len(missing)} files of {name} can be read; {path}: {why}")
    if manifest is None:
        assert shape is not None
        builder.about["shape"] = [*shape[:-1], None if varies else shape[-1]]
        manifest = {"about": builder.about, "pending": None, "build_s": 0.0, "item_s": item_s}
    builder.about = manifest["about"]
    smallest, largest = (math.ceil(size / max(entry_bytes, 1)) for size in (SHARD_BYTES / 64, SHARD_BYTES))
    per_shard = max(smallest, min(largest, math.ceil(len(missing) / SHARDS)))
    generation = 1 + max((int(path.name[6:10]) for path in store.shard_files(folder)), default=0)
    wanted = store.checksum(builder.sources.keys, len(builder.items))
    if (manifest["pending"] or {}).get("wanted") != wanted:
        manifest["pending"] = {"wanted": wanted, "per_shard": per_shard, "generation": generation}
    per_shard, generation = manifest["pending"]["per_shard"], manifest["pending"]["generation"]
    with store.writing(folder):
        store.write_manifest(folder, manifest)
        for shard in store.shard_files(folder):  # of another fingerprint: nothing in them will ever be served
            with contextlib.suppress(store.Damaged):
                if store.read_shard(shard).about["fingerprint"] != builder.about["fingerprint"]:
                    shard.unlink()
    check_space(int(entry_bytes * len(missing)), shutil.disk_usage(folder).free, folder)
    chunks = [missing[at : at + per_shard] for at in range(0, len(missing), per_shard)]
    builder.chunks = [(f"shard-{generation:04d}-{chunk[0]:08d}.safetensors", chunk) for chunk in chunks]
    cores = min(usable_cores(), len(chunks)) if item_s * len(missing) > PARALLEL_S and _can_travel(builder) else 1
    say(f"about {entry_bytes * len(missing) / 1e6:.3g} MB and {item_s * len(missing) / cores:.2g} s on {cores} cores")
    for name, _ in _shown(_computed(builder, cores), len(missing), builder.about["workload"], show):
        with store.writing(folder):
            store.commit(folder, {"shard": name})
    manifest["build_s"] += time.perf_counter() - began_s
    store.settle(folder, manifest)


def _pilot(builder: Builder, missing: np.ndarray) -> tuple[float, float, tuple[int, ...] | None, dict[str, str]]:
    """Try items all over the list; return (bytes of an entry, seconds for one, shape of one or None, unreadable)."""
    spread = missing[np.linspace(0, len(missing) - 1, min(PILOT, len(missing))).astype(int)].tolist()
    found, seconds, bad = [], [], {}
    for index in dict.fromkeys([spread[0], *spread, *missing.tolist()]):
        began_s = time.perf_counter()
        try:
            found.append(builder.entry(index)[0])
        except BadItem as item:
            bad[item.path] = item.why
        seconds.append(time.perf_counter() - began_s)
        if found and len(seconds) >= len(spread):
            break
    mean_bytes = statistics.fmean(values.nbytes for values in found) if found else 0.0
    return mean_bytes, statistics.median(seconds), found[0].shape if found else None, bad


def _can_travel(builder: Builder) -> bool:
    """Whether worker processes can be given the workload: forked ones need nothing, others must unpickle it."""
    try:
        return multiprocessing.get_start_method() == "fork" or bool(pickle.dumps(builder))
    except Exception:  # whatever objects raise that cannot be pickled
        return False


def _computed(builder: Builder, cores: int) -> Iterator[tuple[str, int]]:
    """Yield (name, entries) of each shard as it gets written; raises what kept one from it."""
    workers = {"num_workers": cores, "prefetch_factor": 1, "worker_init_fn": _start} if cores > 1 else {}
    loader = DataLoader(builder, batch_size=None, in_order=cores < 2, generator=torch.Generator(), **workers)  # type: ignore[arg-type]
    for outcome in loader:
        if isinstance(outcome, OSError):
            with store.writing(builder.folder):
                raise outcome
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


def _start(_: int) -> None:
    torch.set_num_threads(1)  # the processes together fill the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business, as in the loader's processes
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _shown(shards: Iterable[tuple[str, int]], total: int, name: str, show: bool) -> Iterator[tuple[str, int]]:
    """Pass shards on, and show how far, how fast and how long yet: a bar on a terminal, plain lines elsewhere."""
    terminal = show and sys.stderr.isatty()
    began_s = last_s = time.perf_counter()
    done = 0
    with tqdm(total=total, desc=f"caching {name}", unit="item", disable=not terminal) as bar:
        for shard in shards:
            yield shard
            done += shard[1]
            bar.update(shard[1])
            now_s = time.perf_counter()
            if show and not terminal and (now_s - last_s > 5 or done == total):
                rate, last_s = done / (now_s - began_s), now_s
                left_s = (total - done) / rate
                print(f"caching {name}: {done}/{total} items, {rate:.1f} items/s, {left_s:.0f} s left", flush=True)


def check_space(needed_bytes: int, free_bytes: int, folder: Path) -> None:
    """Raise SpeedkitError when a cache of `needed_bytes` would not fit, with 5 % to spare, into `free_bytes`."""
    if needed_bytes > 0.95 * free_bytes:
        raise SpeedkitError(
            f"the feature cache needs {needed_bytes / 1e9:.1f} GB and {folder} has {free_bytes / 1e9:.1f} GB free: "
            "name another folder with --cache-dir, or use cache=off"
        )


def intact(folder: Path, state: store.State) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield of each shard its name, which of its entries are as written, [entries] bool, and their values, flat.

    Where the file ends early, values end early too.
    """
    keys, counts, checksums = (state.column(name) for name in ("keys", "counts", "checksums"))
    first = 0
    for name, begin, entries in state.shards:
        rows = slice(first, first + entries)
        first += entries
        values = store.values_of(folder / name, begin, np.dtype(state.about["dtype"]))
        ends = np.cumsum(counts[rows])
        whole = [
            end <= len(values) and store.checksum(values[end - count : end], key) == check
            for end, count, key, check in zip(ends, counts[rows], keys[rows].tolist(), checksums[rows], strict=True)
        ]
        yield name, np.array(whole, bool), values


def verify(folder: Path) -> list[tuple[str, str]]:
    """Read all of a cache; return what is not as written: (file or item, why)."""
    state = store.read(folder)
    if state is None:
        return [(store.MANIFEST, "it is missing or does not match its checksum, and no shard tells what it held")]
    problems = list(state.problems)
    for name, whole, _ in intact(folder, state):
        try:
            names = store.names_of(store.read_shard(folder / name))
        except store.Damaged as error:
            problems += [(name, str(error))] if name not in dict(problems) else []
            names = [f"entry {row} of {name}" for row in range(len(whole))]
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
    builder.about, computed, first = state.about, 0, 0
    keys, counts, errors = (state.column(name) for name in ("keys", "counts", "errors"))
    files = np.stack([state.column("sizes"), state.column("modified_ns")])
    index_of = {int(key): index for index, key in enumerate(builder.sources.keys)}
    now = np.stack([builder.sources.sizes, builder.sources.modified_ns])
    for name, whole, values in intact(builder.folder, state):
        rows = range(first, first + len(whole))
        first += len(whole)
        with contextlib.suppress(store.Damaged):
            store.read_shard(builder.folder / name)
            if whole.all():
                continue
        ends = np.cumsum(counts[rows.start : rows.stop])
        chunk, builder.kept = [], {}
        for row, good, end in zip(rows, whole, ends, strict=True):
            index = index_of.get(int(keys[row]))
            if index is None or (files[:, row] != now[:, index]).any():
                continue
            chunk.append(index)
            if good and counts[row]:
                builder.kept[index] = values[end - counts[row] : end], float(errors[row])
        computed += len(chunk) - len(builder.kept)
        builder.chunks = [(name, np.array(chunk, np.int64))]
        (builder.folder / name).unlink(missing_ok=True) if not chunk else list(_computed(builder, 1))
    store.settle(builder.folder, state.manifest)
    return computed

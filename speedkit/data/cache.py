"""Features computed once and kept: one file of rows, found again by a fingerprint of all that they depend on."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedkit.data.samples import EpochOrder, Samples, make_loader
from speedkit.errors import SpeedkitError
from speedkit.files import read_json, write_json
from speedkit.hardware import cache_root
from speedkit.plan import Plan
from speedkit.system import usable_cores, usable_ram_bytes

VERSIONED = ("torch", "torchaudio", "torchvision", "numpy", "soundfile")
RAM_SHARE = 0.5  # a cache larger than this share of the memory is left on disk


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """The features of a list of items; `values` is a memory map (disk) or a tensor (ram, device)."""

    values: Any  # [N, ...] float32 or float16, one row per item; that of an unreadable one is empty
    targets: Tensor  # [N] int64
    readable: Tensor | None  # [N] bool; None where every item is
    where: str  # disk | ram | device
    build_s: float  # what building took, whoever built it
    folder: Path
    bad: dict[str, str]  # path -> why, of the files left out

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (features [B, ...] float32, targets [B]) of the samples at `indices [B]`, on `device`.

        Unreadable items are left out, as the loader leaves them out: B is then smaller.
        """
        if self.readable is not None:
            indices = indices[self.readable[indices]]
        if self.where == "disk":
            inputs = torch.from_numpy(self.values[indices.numpy()])  # fancy indexing copies: writable, off the map
        else:
            inputs = self.values[indices.to(self.values.device)]
        return inputs.to(device).float(), self.targets[indices.to(self.targets.device)].to(device)


def fingerprint(workload: Any, items: Sequence[Any], dtype: str) -> str:
    """Return 16 hex digits that change whenever a cached row could: files, parameters, code, library versions."""
    digest = hashlib.sha256()
    for item in items:
        path = getattr(item, "path", None)
        status = os.stat(path) if path and os.path.exists(path) else None
        digest.update(repr((item, status and (status.st_size, status.st_mtime_ns))).encode())
    digest.update(repr(sorted(workload.parameters.items())).encode())
    for source in workload.sources:
        digest.update(inspect.getsource(source).encode())
    digest.update(repr([(name, importlib.metadata.version(name)) for name in VERSIONED]).encode())
    digest.update(dtype.encode())
    return digest.hexdigest()[:16]


def open_cache(
    workload: Any,
    items: Sequence[Any],
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    cache_dir: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureCache:
    """Return the cache of `items` that `plan` asks for, built first where none matches.

    `progress(done, of)` is called while building. Raises SpeedkitError when the disk cannot hold it.
    """
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to train or test on")
    root = Path(cache_dir) if cache_dir else cache_root() / "features"
    folder = root / f"{workload.name}-{fingerprint(workload, items, plan.cache_dtype)}"
    if not (folder / "manifest.json").exists():
        build(workload, items, folder, plan.cache_dtype, progress)
    try:
        manifest = read_json(folder / "manifest.json")
        where = plan.cache
        if where == "ram" and manifest["bytes"] > RAM_SHARE * usable_ram_bytes():
            where = "disk"  # reading it all in would push out everything else; the page cache holds what fits
        # Read where it is to stay in memory: copied from a map, it would be there twice.
        mapped = "r" if where == "disk" else None
        values: Any = np.load(folder / "features.npy", mmap_mode=mapped, allow_pickle=False)  # type: ignore[arg-type]
        targets = torch.from_numpy(np.load(folder / "targets.npy", allow_pickle=False))
        readable = torch.from_numpy(np.load(folder / "readable.npy", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise SpeedkitError(f"the feature cache {folder} is damaged ({error}): remove it, it is built again") from error
    if where != "disk":
        values = torch.from_numpy(values)
    if where == "device":
        values, targets = values.to(device), targets.to(device)
    some_bad = readable if manifest["bad"] else None
    return FeatureCache(values, targets, some_bad, where, manifest["build_s"], folder, manifest["bad"])


def build(
    workload: Any, items: Sequence[Any], folder: Path, dtype: str, progress: Callable[[int, int], None] | None = None
) -> None:
    """Compute the features of all items on all cores into `folder`, which appears whole or not at all."""
    began = time.perf_counter()
    with _writing_to(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    workers = usable_cores() if usable_cores() > 1 else 0
    loader = make_loader(Samples(workload, items), Plan(workers=workers), EpochOrder(len(items), 16, None, False))
    bad: dict[str, str] = {}
    targets = np.zeros(len(items), dtype=np.int64)
    readable = np.zeros(len(items), dtype=bool)
    rows: Any = None
    try:
        for batch, indices, unreadable in loader:
            bad.update({item.path: item.why for item in unreadable})
            if batch is not None:
                inputs, labels = batch
                if rows is None:
                    with _writing_to(folder.parent):
                        rows = _allocate(temporary / "features.npy", len(items), inputs, dtype)
                rows[indices], targets[indices], readable[indices] = inputs.numpy(), labels.numpy(), True
            if progress:
                progress(int(readable.sum()) + len(bad), len(items))
        if rows is None:
            path, why = next(iter(bad.items()))
            raise SpeedkitError(f"none of the {len(items)} files of {workload.name} can be read; {path}: {why}")
        build_s = time.perf_counter() - began
        manifest = {"items": len(items), "dtype": dtype, "bytes": rows.nbytes, "build_s": build_s, "bad": bad}
        with _writing_to(folder.parent):
            rows.flush()
            np.save(temporary / "targets.npy", targets)
            np.save(temporary / "readable.npy", readable)
            write_json(temporary / "manifest.json", manifest)
            try:
                temporary.rename(folder)
            except OSError:
                if not (folder / "manifest.json").exists():
                    raise
                # Another process has built the same meanwhile: either is right.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpeedkitError(f"the feature cache cannot be written to {folder} ({error.strerror})") from error


def _allocate(path: Path, count: int, inputs: Tensor, dtype: str) -> Any:
    """Return a writable memory map for `count` rows like those of `inputs`; SpeedkitError if the disk is too small."""
    shape = (count, *inputs.shape[1:])
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    check_space(size, shutil.disk_usage(path.parent).free, path.parent.parent)
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)


def check_space(needed_bytes: int, free_bytes: int, folder: Path) -> None:
    """Raise SpeedkitError when a cache of `needed_bytes` would not fit, with 5 % to spare, into `free_bytes`."""
    if needed_bytes > 0.95 * free_bytes:
        raise SpeedkitError(
            f"the feature cache needs {needed_bytes / 1e9:.1f} GB and {folder} has {free_bytes / 1e9:.1f} GB free: "
            "name another folder with --cache-dir, or use cache=off"
        )

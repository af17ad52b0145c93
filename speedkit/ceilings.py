"""How fast this machine can be at best: rates measured here in seconds, never read from a data sheet."""

import contextlib
import errno
import functools
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from speedkit import files, system
from speedkit.clock import timed
from speedkit.hardware import Hardware, cache_root

SCHEMA = 1  # raised when what is measured changes, so that older cache files are measured again
BUDGET_S = 0.5  # for the repeats of one ceiling; sizing and setting up come on top
MIB = 2**20


@dataclass(frozen=True)
class Ceiling:
    """One measured rate: `value` is the best of `repeats`, `median` what is usual, both in `unit`."""

    name: str
    value: float
    median: float
    unit: str  # FLOP/s, bytes/s or files/s
    repeats: int
    seconds_spent: float
    how: str
    source: str = "measured"

    def __str__(self) -> str:
        unit, scale = {"FLOP/s": ("TFLOP/s", 1e12), "bytes/s": ("GB/s", 1e9)}.get(self.unit, (self.unit, 1.0))
        return f"{self.name:<24}{self.value / scale:10.4g} {unit:<8}(median {self.median / scale:.4g})"


Rates = tuple[list[float], str, str]  # one rate per repeat, unit, how it was measured


def ceilings(hardware: Hardware, refresh: bool = False, cache_dir: str | Path | None = None) -> dict[str, Ceiling]:
    """Return what this machine reaches, by name; measured once and then kept in `cache_dir` (else `cache_root()`).

    `refresh` measures again. What could not be measured is not in it: `left_out` says why.
    """
    return _measured(hardware, refresh, cache_dir)[0]


def left_out(hardware: Hardware, cache_dir: str | Path | None = None) -> dict[str, str]:
    """Return the reason for each ceiling that could not be measured on this machine, by name."""
    return _measured(hardware, False, cache_dir)[1]


def _measured(
    hardware: Hardware, refresh: bool, cache_dir: str | Path | None
) -> tuple[dict[str, Ceiling], dict[str, str]]:
    folder = Path(cache_dir) if cache_dir else cache_root()
    path = folder / f"ceilings-{hardware.fingerprint()}.json"
    if not refresh and (kept := _read_cache(path)):
        return kept
    problem: OSError | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error
    found, missing = measure(hardware, folder)
    try:
        rows = [asdict(ceiling) for ceiling in found.values()]
        files.write_json(path, {"schema": SCHEMA, "ceilings": rows, "left_out": missing})
    except OSError as error:
        problem = problem or error
    if problem:
        warnings.warn(f"the measured ceilings could not be kept in {folder} ({problem.strerror}) and will be measured "
                      "again: name a writable folder with SPEEDKIT_CACHE_DIR", stacklevel=3)  # fmt: skip
    return found, missing


def _read_cache(path: Path) -> tuple[dict[str, Ceiling], dict[str, str]] | None:
    """Return what an earlier run measured, or None where there is nothing that can be trusted."""
    try:
        kept = files.read_json(path)
        rows = [Ceiling(**row) for row in kept["ceilings"]]
        usable = kept["schema"] == SCHEMA and all(0 < row.value < math.inf and row.source == "measured" for row in rows)
        return ({row.name: row for row in rows}, dict(kept["left_out"])) if usable and rows else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measure(hardware: Hardware, folder: Path) -> tuple[dict[str, Ceiling], dict[str, str]]:
    """Measure every ceiling now; return them, and the reason for each one that failed. `folder` is for test files."""
    tasks: dict[str, Callable[[], Rates]] = {}
    for precision in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        if precision == "fp32" or hardware.supports(precision):
            tasks[f"matmul_{precision}"] = functools.partial(_matmul, hardware, precision)
    tasks["memory_bandwidth"] = lambda: _memory_bandwidth(hardware)
    if hardware.device.type == "cuda":
        tasks["host_to_device_pinned"] = lambda: _host_to_device(hardware, pinned=True)
        tasks["host_to_device_pageable"] = lambda: _host_to_device(hardware, pinned=False)
    tasks["memcpy"] = lambda: _memcpy(hardware)
    tasks["disk_read"] = lambda: _file_read(folder, cold=True)
    tasks["file_read_cached"] = lambda: _file_read(folder, cold=False)
    tasks["decode_flac"] = lambda: _decode("flac")
    tasks["decode_wav"] = lambda: _decode("wav")

    found: dict[str, Ceiling] = {}
    missing: dict[str, str] = {}
    load = os.getloadavg()[0]  # before we add to it
    busy = f"; MEASURED WHILE BUSY (load {load:.1f} on {hardware.cores} cores), may be too low: refresh when idle"
    for name, task in tasks.items():
        began_s = time.perf_counter()
        try:
            with torch.no_grad():
                rates, unit, how = task()
        except Exception as error:  # out of memory, a full disk, a missing library: the others are still worth having
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            continue
        finally:
            if hardware.device.type == "cuda":
                torch.cuda.empty_cache()
        spent_s = time.perf_counter() - began_s
        found[name] = Ceiling(name, max(rates), statistics.median(rates), unit, len(rates), spent_s,
                              how + busy * (load > 0.75 * hardware.cores))  # fmt: skip
    return found, missing


def _rates(function: Callable[[], Any], device: torch.device, work: float) -> list[float]:
    """Return `work` per second for as many calls as fit in BUDGET_S: at least 3 and at most 100, after a warm-up."""
    began_s = time.perf_counter()
    rates = [work / max(timed(function, device, repeats=1, warmup=1)[0], 1e-9)]
    while len(rates) < 3 or (len(rates) < 100 and time.perf_counter() - began_s < BUDGET_S):
        rates.append(work / max(timed(function, device, repeats=1, warmup=0)[0], 1e-9))
    return rates


def _matmul(hardware: Hardware, precision: str) -> Rates:
    """Square matrix product, doubled in size until one takes long enough to be timed well and to fill the device."""
    device = hardware.device
    enough_s, largest = (0.02, 4096) if device.type == "cpu" else (0.005, 16384)
    with _float32_as("high" if precision == "tf32" else "highest"):
        size = 512
        while True:
            function = _product(device, precision, size)
            once_s = min(timed(function, device, repeats=2))
            if once_s >= enough_s or size >= largest:
                break
            size *= 2
        rates = _rates(function, device, 2.0 * size**3)
    how = f"best of {len(rates)} products of two {precision} matrices of {size} x {size}, 2 n^3 operations each"
    return rates, "FLOP/s", how


def _product(device: torch.device, precision: str, size: int) -> Callable[[], torch.Tensor]:
    if precision == "fp8":
        return system.fp8_matmul(device, size)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    # Random numbers, because a GPU draws less power and clocks higher on constant ones; own seed, because the
    # caller's random state must not move.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


@contextlib.contextmanager
def _float32_as(precision: str) -> Iterator[None]:
    """Set what float32 products may use ("highest": float32 only, "high": TF32) and put it back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _array_bytes(hardware: Hardware) -> int:
    """Return a size well above the usual caches, yet a small part of what memory there is."""
    total = hardware.gpu_memory_bytes if hardware.device.type != "cpu" else hardware.ram_bytes
    return min((96 if hardware.device.type == "cpu" else 1024) * MIB, (total or 1024 * MIB) // 32) // MIB * MIB


def _memory_bandwidth(hardware: Hardware) -> Rates:
    """The triad of the STREAM benchmark (https://www.cs.virginia.edu/stream/): a = b + s c."""
    size_bytes = _array_bytes(hardware)
    a, b, c = (torch.ones(size_bytes // 4, device=hardware.device) for _ in range(3))
    rates = _rates(lambda: torch.add(b, c, alpha=2.0, out=a), hardware.device, 3.0 * size_bytes)
    how = f"best of {len(rates)} triads a = b + 2 c, float32 arrays of {size_bytes // MIB} MiB, bytes read and written"
    return rates, "bytes/s", how


def _host_to_device(hardware: Hardware, pinned: bool) -> Rates:
    size_bytes = min(256 * MIB, _array_bytes(hardware))
    host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=hardware.device)
    rates = _rates(lambda: target.copy_(host, non_blocking=pinned), hardware.device, float(size_bytes))
    kind = "pinned" if pinned else "pageable"
    how = f"best of {len(rates)} copies of {size_bytes // MIB} MiB from {kind} host memory to the device"
    return rates, "bytes/s", how


def _memcpy(hardware: Hardware) -> Rates:
    import numpy as np

    size_bytes = min(128 * MIB, (hardware.ram_bytes or 1024 * MIB) // 32)
    source, target = np.ones(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)
    rates = _rates(lambda: np.copyto(target, source), torch.device("cpu"), float(size_bytes))
    how = f"best of {len(rates)} copies of {size_bytes // MIB} MiB within host memory by one thread, bytes copied"
    return rates, "bytes/s", how


def _file_read(folder: Path, cold: bool) -> Rates:
    """Read a file just written, from the disk (`cold`) or from the page cache.

    Raises RuntimeError when the page cache cannot be dropped: what was read then says nothing about the disk.
    """
    chunk = os.urandom(8 * MIB)
    buffer = bytearray(len(chunk))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
        size_bytes, began_s = 0, time.perf_counter()
        while size_bytes < 128 * MIB and time.perf_counter() - began_s < BUDGET_S:
            size_bytes += stream.write(chunk)
            os.fsync(stream.fileno())
        rates: list[float] = []
        began_s = time.perf_counter()
        while len(rates) < 3 or (len(rates) < 20 and time.perf_counter() - began_s < BUDGET_S):
            if cold and not _drop_from_page_cache(stream.fileno(), size_bytes):
                raise RuntimeError(f"the page cache could not be dropped for files in {folder}: the disk is not seen")
            stream.seek(0)
            start_s = time.perf_counter()
            while stream.readinto(buffer):
                pass
            rates.append(size_bytes / (time.perf_counter() - start_s))
    state = "dropped from the page cache (a cache in the drive or the virtual machine's host is not)"
    how = f"best of {len(rates)} sequential reads of a file of {size_bytes // MIB} MiB, "
    return rates, "bytes/s", how + (state if cold else "held in the page cache")


def _drop_from_page_cache(handle: int, size_bytes: int) -> bool:
    """Ask the system to forget a file's pages; return whether it has, seen by reads that refuse to wait for a disk."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in range(0, size_bytes, size_bytes // 8):
        try:
            os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno == errno.EAGAIN:  # it would have had to wait: not in memory
                continue
        return False  # it was in memory, or this file system cannot say
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # the refused reads may have begun to read ahead
    return True


def _decode(kind: str) -> Rates:
    import numpy as np
    import soundfile

    clips, rate_hz, seconds = 8, 16000, 4
    noise = np.random.default_rng(0)
    tone = np.sin(2 * np.pi * 440 * np.arange(rate_hz * seconds) / rate_hz)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{index}.{kind}") for index in range(clips)]
        for path in paths:
            soundfile.write(path, 0.3 * tone + 0.1 * noise.standard_normal(tone.size), rate_hz, subtype="PCM_16")

        def decode_all() -> None:
            for path in paths:
                soundfile.read(path, dtype="float32")

        rates = _rates(decode_all, torch.device("cpu"), float(clips))
    how = (f"best of {len(rates)} rounds of reading {clips} {kind.upper()} files of {seconds} s by soundfile, "
           f"{rate_hz} Hz, 16 bit, mono, one thread, files in the page cache")  # fmt: skip
    return rates, "files/s", how

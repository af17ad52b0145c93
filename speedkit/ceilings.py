"""How fast this machine can be at best: rates measured here in seconds, never read from a data sheet."""

import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from speedkit import files
from speedkit.clock import timed
from speedkit.hardware import Hardware, cache_root

SCHEMA = 6  # in the name of a kept file; raised when what is measured changes
BUDGET_S = 0.5  # for the repeats of one ceiling
MIB = 2**20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}  # others: float32


@dataclass(frozen=True)
class Ceiling:
    """One measured rate: `value` is the best of some repeats, `median` what is usual, both in `unit`."""

    name: str
    value: float
    median: float
    unit: str  # FLOP/s or bytes/s
    how: str

    def __str__(self) -> str:
        unit, scale = ("TFLOP/s", 1e12) if self.unit == "FLOP/s" else ("GB/s", 1e9)
        return f"{self.value / scale:.4g} {unit} (median {self.median / scale:.4g})"


def ceilings(hardware: Hardware, refresh: bool = False) -> dict[str, Ceiling]:
    """Return what this machine reaches, by name; measured once and kept in `cache_root()`, until `refresh`."""
    return _kept_or_measured(hardware, refresh)[0]


def left_out(hardware: Hardware) -> dict[str, str]:
    """Return the reason for each ceiling that could not be measured on this machine, by name."""
    return _kept_or_measured(hardware, refresh=False)[1]


def _kept_or_measured(hardware: Hardware, refresh: bool) -> tuple[dict[str, Ceiling], dict[str, str]]:
    path = cache_root() / f"ceilings-{SCHEMA}-{hardware.fingerprint()}.json"
    with contextlib.suppress(OSError, ValueError):  # not there: measured
        if not refresh:
            kept = json.loads(path.read_text())
            return {row["name"]: Ceiling(**row) for row in kept["ceilings"]}, kept["left_out"]
    found, missing = measure(hardware, path.parent)
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        files.write_json(path, {"ceilings": [asdict(ceiling) for ceiling in found.values()], "left_out": missing})
    return found, missing


def measure(hardware: Hardware, folder: Path) -> tuple[dict[str, Ceiling], dict[str, str]]:
    """Measure every ceiling, files in `folder`. One that fails (no memory, a full disk) leaves its reason only."""
    device, cpu = hardware.device, torch.device("cpu")
    precisions = ["fp32", *(name for name in ("tf32", "bf16", "fp16", "fp8") if hardware.supports(name))]
    tasks: dict[str, Callable[[str], Ceiling]] = {
        **{f"matmul_{name}": functools.partial(_matmul, device, name) for name in precisions},
        "memory_bandwidth": functools.partial(_triad, device),
        "memcpy": functools.partial(_copy, cpu, False),
        "disk_read": functools.partial(_disk_read, folder),
    }
    if device.type == "cuda":
        for kind in ("pinned", "pageable"):
            tasks[f"host_to_device_{kind}"] = functools.partial(_copy, device, kind == "pinned")
    found, missing, precision = dict[str, Ceiling](), dict[str, str](), torch.get_float32_matmul_precision()
    for name, task in tasks.items():
        try:
            with torch.no_grad():
                found[name] = task(name)
        except Exception as error:  # the others are still worth having
            missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            torch.set_float32_matmul_precision(precision)
    torch.cuda.empty_cache()  # nothing where CUDA is not in use
    return found, missing


def _matmul(device: torch.device, precision: str, name: str) -> Ceiling:
    """Square matrix product. The numbers are random: a GPU draws less power and clocks higher on constant ones."""
    size = 8192 if device.type != "cpu" else 2048 if torch.get_num_threads() < 16 else 4096
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    multiply = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
    if precision == "fp8":  # _scaled_mm wants its second matrix column-major
        scale = torch.ones((), device=device)
        multiply = functools.partial(torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    rates = _rates(multiply, device, 2.0 * size**3)
    return Ceiling(name, *rates, "FLOP/s", f"product of two {precision} matrices of {size} x {size}")


def _triad(device: torch.device, name: str) -> Ceiling:
    """The triad of the STREAM benchmark (https://www.cs.virginia.edu/stream/), on arrays well above usual caches."""
    size_bytes = (96 if device.type == "cpu" else 512) * MIB
    a, b, c = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    rates = _rates(lambda: torch.add(b, c, alpha=2.0, out=a), device, 3.0 * size_bytes)
    return Ceiling(name, *rates, "bytes/s", f"a = b + 2 c, float32 arrays of {size_bytes // MIB} MiB, read and written")


def _copy(device: torch.device, pinned: bool, name: str) -> Ceiling:
    """Copy from host memory to `device`; within a CPU by one thread, as NumPy does."""
    source = torch.ones(128 * MIB, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(source, device=device)
    copy: Callable = functools.partial(target.copy_, source, non_blocking=True)
    if device.type == "cpu":
        copy = functools.partial(np.copyto, target.numpy(), source.numpy())
    kind = "page-locked" if pinned else "pageable"
    rates = _rates(copy, device, source.nbytes)
    return Ceiling(name, *rates, "bytes/s", f"copy of {source.nbytes // MIB} MiB of {kind} memory, by one thread")


def _disk_read(folder: Path, name: str) -> Ceiling:
    """Read a file just written, after asking the system to drop it from the page cache."""
    buffer, cpu = bytearray(os.urandom(32 * MIB)), torch.device("cpu")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
        stream.write(buffer)
        os.fsync(stream.fileno())

        def drop() -> None:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            stream.seek(0)

        rates = _rates(lambda: stream.readinto(buffer), cpu, len(buffer), before=drop)
    how = f"at most: file of {len(buffer) // MIB} MiB, dropped from the page cache where the file system does that"
    return Ceiling(name, *rates, "bytes/s", how)


def _rates(
    call: Callable, device: torch.device, work: float, *, before: Callable = lambda: None
) -> tuple[float, float]:
    """Return the best and the median `work` per second of as many calls as fit in BUDGET_S, 3 to 100."""
    rates, began_s = list[float](), time.perf_counter()
    while len(rates) < 3 or (len(rates) < 100 and time.perf_counter() - began_s < BUDGET_S):
        before()
        rates.append(work / max(timed(call, device, repeats=1, warmup=0)[0], 1e-9))
    return max(rates), statistics.median(rates)

"""How fast this machine can be at best: rates measured here in seconds, never read from a data sheet."""

import contextlib
import functools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from speedkit import files
from speedkit.hardware import Hardware, cache_root

SCHEMA = 8  # in the name of a kept file; raised when what is measured changes
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
    path = cache_root() / f"ceilings-{SCHEMA}-{hardware.fingerprint()}.json"
    with contextlib.suppress(OSError, ValueError):  # not there: measured
        if not refresh:
            return {row["name"]: Ceiling(**row) for row in files.read_json(path)}
    found = measure(hardware)
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, [asdict(ceiling) for ceiling in found.values()])
    return found


def measure(hardware: Hardware) -> dict[str, Ceiling]:
    """Measure every ceiling. One that fails, for lack of memory, is a warning."""
    device = hardware.device
    precisions = ["fp32", *(name for name in ("tf32", "bf16", "fp16", "fp8") if hardware.supports(name))]
    tasks: dict[str, Callable[[str], Ceiling]] = {
        **{f"matmul_{name}": functools.partial(_matmul, device, name) for name in precisions},
        "memory_bandwidth": functools.partial(_triad, device),
        "memcpy": functools.partial(_copy, torch.device("cpu"), False),
    }
    if device.type == "cuda":
        tasks["host_to_device_pinned"] = functools.partial(_copy, device, True)
        tasks["host_to_device_pageable"] = functools.partial(_copy, device, False)
    found, precision = dict[str, Ceiling](), torch.get_float32_matmul_precision()
    for name, task in tasks.items():
        try:
            found[name] = task(name)
        except RuntimeError as error:  # the others are still worth having
            warnings.warn(f"{name} could not be measured: {str(error).splitlines()[0]}", stacklevel=2)
    torch.set_float32_matmul_precision(precision)
    torch.cuda.empty_cache()  # nothing where CUDA is not in use
    return found


def _matmul(device: torch.device, precision: str, name: str) -> Ceiling:
    """Square matrix product. The numbers are random: a GPU draws less power and clocks higher on constant ones."""
    size = 8192 if device.type != "cpu" else 2048 if torch.get_num_threads() < 16 else 4096
    left, right = (torch.randn(size, size, device=device).to(DTYPES.get(precision, torch.float32)) for _ in range(2))
    multiply = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
    if precision == "fp8":  # _scaled_mm wants its second matrix column-major
        scale = torch.ones((), device=device)
        multiply = functools.partial(torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    how = f"product of two {precision} matrices of {size} x {size}"
    return _ceiling(name, multiply, 2.0 * size**3, unit="FLOP/s", how=how)


def _triad(device: torch.device, name: str) -> Ceiling:
    """The triad of the STREAM benchmark (https://www.cs.virginia.edu/stream/), on arrays well above usual caches."""
    size_bytes = (96 if device.type == "cpu" else 512) * MIB
    a, b, c = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    add = functools.partial(torch.add, b, c, alpha=2.0, out=a)
    how = f"a = b + 2 c, float32 arrays of {size_bytes // MIB} MiB, read and written"
    return _ceiling(name, add, 3.0 * size_bytes, how=how)


def _copy(device: torch.device, pinned: bool, name: str) -> Ceiling:
    """Copy from host memory to `device`, by one thread."""
    source = torch.ones(128 * MIB, dtype=torch.uint8, pin_memory=pinned)
    copy = functools.partial(torch.empty_like(source, device=device).copy_, source, non_blocking=True)
    how = f"copy of 128 MiB of {'page-locked' if pinned else 'pageable'} memory, by one thread"
    return _ceiling(name, copy, source.nbytes, how=how, threads=1)


def _ceiling(
    name: str, call: Callable[[], Any], work: float, *, how: str, unit: str = "bytes/s", threads: int | None = None
) -> Ceiling:
    """Return the ceiling that `call`, which does so much `work`, reaches in the repeats that fit in BUDGET_S."""
    timer = Timer("call()", globals={"call": call}, num_threads=threads or torch.get_num_threads())
    seconds = timer.blocked_autorange(min_run_time=BUDGET_S).times  # waits for the device
    return Ceiling(name, work / min(seconds), work / statistics.median(seconds), unit, how)

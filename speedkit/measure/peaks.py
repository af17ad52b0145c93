"""How fast this machine can be at best: rates measured here in seconds, never read from a data sheet."""

import contextlib
import functools
import hashlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speedkit import files
from speedkit.clock import timed
from speedkit.errors import SpeedkitError
from speedkit.machine import Hardware, cache_root, free_bytes
from speedkit.measure.process import process_kept

SCHEMA = 13  # in the name of a kept file; raised when what is measured changes
BUDGET_S = 0.5  # for the repeats of one peak
REPEATS = 5  # at least: the best of fewer, beside other programs, is none of the machine's
MIB = 2**20
ROOM_MIB = {"cpu": 600, "cuda": 1500}  # that measuring takes at most
PRODUCT = "matmul_"  # before the number format, in a peak's name
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}  # others: float32


@dataclass(frozen=True)
class Peak:
    """One measured rate: `value` is the best of some repeats, `median` what is usual, both in `unit`."""

    name: str
    value: float
    median: float
    unit: str  # FLOP/s or bytes/s

    def __str__(self) -> str:
        if self.unit == "FLOP/s":
            return f"{self.value / 1e12:.4g} TFLOP/s (median {self.median / 1e12:.4g})"
        return f"{self.value / 1e9:.4g} GB/s (median {self.median / 1e9:.4g})"


def peaks(hardware: Hardware) -> dict[str, Peak]:
    """Return what this machine reaches, by name; measured once and kept in `cache_root()`."""
    facts = hashlib.sha256(repr(vars(hardware)).encode()).hexdigest()[:16]  # changes whenever a peak could
    path = cache_root() / f"peaks-{SCHEMA}-{facts}.json"
    with contextlib.suppress(OSError, ValueError):  # not there: measured
        return {row["name"]: Peak(**row) for row in files.read_json(path)}
    measured = measure(hardware)
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, [asdict(peak) for peak in measured.values()])
    return measured


def matmul_rates(hardware: Hardware) -> dict[str, float]:
    """Return the FLOP/s that products of matrices reach here, by number format."""
    measured = peaks(hardware)
    products = [name for name in measured if name.startswith(PRODUCT)]
    return {name.removeprefix(PRODUCT): measured[name].value for name in products}


def measure(hardware: Hardware) -> dict[str, Peak]:
    """Measure every peak. Raises SpeedkitError where that would take memory from whatever else runs here."""
    free_mib = free_bytes(hardware.device) // MIB
    room_mib = ROOM_MIB.get(hardware.device.type, 0)
    if free_mib < room_mib:
        raise SpeedkitError(
            f"measuring what this machine reaches takes {room_mib} MiB of memory, and {free_mib} are free: run "
            "`speedkit hardware` while nothing else does; what it measures is kept"
        )
    measured = {}
    with process_kept(hardware.device):
        for name, call, work in _calls(hardware):
            seconds = timed(call, hardware.device, 1)
            while sum(seconds) < BUDGET_S or len(seconds) < REPEATS:
                seconds += timed(call, hardware.device, 1, warmup=0)
            unit = "bytes/s"
            if name.startswith(PRODUCT):
                unit = "FLOP/s"
            measured[name] = Peak(name, work / min(seconds), work / statistics.median(seconds), unit)
    torch.cuda.empty_cache()  # nothing where CUDA is not in use
    return measured


Call = tuple[str, Callable[[], Any], float]  # of a peak: name, what is called, its work (FLOP or bytes)


def _calls(hardware: Hardware) -> Iterator[Call]:
    """Yield what is called to measure each peak."""
    yield from _products(hardware)
    # The triad of the STREAM benchmark (https://www.cs.virginia.edu/stream/), on arrays well above usual caches:
    # a = b + 2 c in float32.
    size_bytes = 256 * MIB
    if hardware.device.type == "cpu":
        size_bytes = 96 * MIB
    a, b, c = torch.ones(3, size_bytes // 4, device=hardware.device)
    yield "memory_bandwidth", functools.partial(torch.add, b, c, alpha=2.0, out=a), 3.0 * size_bytes


def _products(hardware: Hardware) -> Iterator[Call]:
    """Yield a product of matrices in each number format. Sets the precision of float32 products for each."""
    device = hardware.device
    size = 8192
    if device.type == "cpu":
        size = 2048 if torch.get_num_threads() < 16 else 4096
    # The numbers are random: a GPU draws less power and clocks higher on constant ones.
    left, right = torch.randn(2, size, size, device=device)
    for name in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        if name != "fp32" and not hardware.supports(name):
            continue
        a = left.to(DTYPES.get(name, torch.float32))
        b = right.to(a.dtype)
        if name == "fp8":  # _scaled_mm wants its second matrix column-major
            scale = torch.ones((), device=device)
            multiply = functools.partial(
                torch._scaled_mm,
                a,
                b.t(),
                scale,
                scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,  # as in a training's forward pass
            )
        else:
            multiply = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        yield f"{PRODUCT}{name}", multiply, 2.0 * size**3

"""How fast this machine can be at best: rates measured here in seconds, never read from a data sheet."""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from speedkit import files
from speedkit.clock import timed
from speedkit.hardware import Hardware, cache_root

SCHEMA = 4  # in the name of a kept file; raised when what is measured changes
BUDGET_S = 0.5  # for the repeats of one ceiling; sizing and setting up come on top
MIB = 2**20
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}  # others: float32


@dataclass(frozen=True)
class Ceiling:
    """One measured rate: `value` is the best of some repeats, `median` what is usual, both in `unit`."""

    name: str
    value: float
    median: float
    unit: str  # FLOP/s, bytes/s or files/s
    how: str

    def __str__(self) -> str:
        unit, scale = {"FLOP/s": ("TFLOP/s", 1e12), "bytes/s": ("GB/s", 1e9)}.get(self.unit, (self.unit, 1.0))
        return f"{self.value / scale:.4g} {unit} (median {self.median / scale:.4g})"


Rates = tuple[list[float], str]  # one rate per repeat, what was repeated
Measured = tuple[dict[str, Ceiling], dict[str, str]]  # the ceilings, and why the others could not be measured; by name


def ceilings(hardware: Hardware, refresh: bool = False) -> dict[str, Ceiling]:
    """Return what this machine reaches, by name; measured once and then kept in `cache_root()`.

    `refresh` measures again. What could not be measured is not in it: `left_out` says why.
    """
    return _kept_or_measured(hardware, refresh)[0]


def left_out(hardware: Hardware) -> dict[str, str]:
    """Return the reason for each ceiling that could not be measured on this machine, by name."""
    return _kept_or_measured(hardware, refresh=False)[1]


def _kept_or_measured(hardware: Hardware, refresh: bool) -> Measured:
    path = cache_root() / f"ceilings-{SCHEMA}-{hardware.fingerprint()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not there, or not ours: measured
        if not refresh:
            kept = files.read_json(path)
            return {row["name"]: Ceiling(**row) for row in kept["ceilings"]}, dict(kept["left_out"])
    found, missing = measure(hardware, cache_root())
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        files.write_json(path, {"ceilings": [asdict(ceiling) for ceiling in found.values()], "left_out": missing})
    return found, missing


def measure(hardware: Hardware, folder: Path) -> Measured:
    """Measure every ceiling, files in `folder`. One that fails (no memory, a full disk) leaves its reason only."""
    device = hardware.device
    precisions = ["fp32", *(name for name in ("tf32", "bf16", "fp16", "fp8") if hardware.supports(name))]
    sources = ("pinned", "pageable") if device.type == "cuda" else ()
    tasks: list[tuple[str, str, Callable[[], Rates]]] = [
        *((f"matmul_{name}", "FLOP/s", partial(_matmul, device, name)) for name in precisions),
        ("memory_bandwidth", "bytes/s", partial(_triad, device)),
        *((f"host_to_device_{name}", "bytes/s", partial(_copy, device, name)) for name in sources),
        ("memcpy", "bytes/s", partial(_copy, CPU, "pageable")),
        ("disk_read", "bytes/s", partial(_disk_read, folder)),
        ("decode_flac", "files/s", partial(_decode, "flac")),
        ("decode_wav", "files/s", partial(_decode, "wav")),
    ]
    found, missing = dict[str, Ceiling](), dict[str, str]()
    load = os.getloadavg()[0]  # before we add to it
    busy = f"; MEASURED WHILE BUSY (load {load:.1f} on {hardware.cores} cores), may be too low: refresh when idle"
    for name, unit, task in tasks:
        try:
            with torch.no_grad():
                rates, what = task()
        except Exception as error:  # the others are still worth having
            missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0] or 'no message'}"
            continue
        how = f"best of {len(rates)} {what}" + busy * (load > 0.75 * hardware.cores)
        found[name] = Ceiling(name, max(rates), statistics.median(rates), unit, how)
    torch.cuda.empty_cache()  # nothing where CUDA is not in use
    return found, missing


def _rates(function: Callable, device: torch.device, work: float) -> list[float]:
    """Return `work` per second for each of as many calls as fit in BUDGET_S, 3 to 100."""
    rates, began_s = list[float](), time.perf_counter()
    while len(rates) < 3 or (len(rates) < 100 and time.perf_counter() - began_s < BUDGET_S):
        rates.append(work / max(timed(function, device, repeats=1, warmup=0)[0], 1e-9))
    return rates


def _matmul(device: torch.device, precision: str) -> Rates:
    """Square matrix product. The numbers are random: a GPU draws less power and clocks higher on constant ones."""
    size = 8192 if device.type != "cpu" else 2048 if torch.get_num_threads() < 16 else 4096
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
    if precision == "fp8":  # _scaled_mm wants its second matrix column-major
        scale = torch.ones((), device=device)
        multiply = partial(torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        rates = _rates(multiply, device, 2.0 * size**3)
    finally:
        torch.set_float32_matmul_precision(before)
    return rates, f"products of two {precision} matrices of {size} x {size}, 2 n^3 operations each"


def _triad(device: torch.device) -> Rates:
    """The triad of the STREAM benchmark (https://www.cs.virginia.edu/stream/), on arrays well above usual caches."""
    size_bytes = (96 if device.type == "cpu" else 512) * MIB
    a, b, c = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    rates = _rates(lambda: torch.add(b, c, alpha=2.0, out=a), device, 3.0 * size_bytes)
    return rates, f"triads a = b + 2 c, float32 arrays of {size_bytes // MIB} MiB, bytes read and written"


def _copy(device: torch.device, kind: str) -> Rates:
    """Copy from host memory, "pinned" or "pageable", to `device`."""
    source = torch.ones(128 * MIB, dtype=torch.uint8, pin_memory=kind == "pinned")
    target = torch.empty_like(source, device=device)
    copy: Callable = partial(target.copy_, source, non_blocking=True)
    if device.type == "cpu":  # NumPy's copy takes one thread, PyTorch's all
        copy = partial(np.copyto, target.numpy(), source.numpy())
    what = f"copies of {source.nbytes // MIB} MiB of {kind} memory to {device.type} memory, one thread, bytes copied"
    return _rates(copy, device, source.nbytes), what


def _disk_read(folder: Path) -> Rates:
    """Read a file just written, out of the page cache; RuntimeError where it cannot be dropped from there."""
    folder.mkdir(parents=True, exist_ok=True)
    chunk, chunks = bytearray(os.urandom(8 * MIB)), 4
    rates = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
        for _ in range(chunks):
            stream.write(chunk)
        os.fsync(stream.fileno())
        for _ in range(3):
            if not _drop_from_page_cache(stream.fileno(), chunks * len(chunk) // 2):
                raise RuntimeError(f"the page cache could not be dropped for files in {folder}: the disk is not seen")
            stream.seek(0)
            parts_s = timed(partial(stream.readinto, chunk), CPU, repeats=chunks, warmup=0)
            rates.append(chunks * len(chunk) / sum(parts_s))
    what = f"sequential reads of a file of {chunks * len(chunk) // MIB} MiB dropped from the page cache"
    return rates, f"{what} (not from the drive's or a virtual machine's)"


def _drop_from_page_cache(handle: int, offset: int) -> bool:
    """Ask the system to forget a file; return whether a read at `offset` that refuses to wait for a disk now fails."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return not os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT)
    except OSError as error:  # any other error: this file system cannot say
        return isinstance(error, BlockingIOError)


def _decode(kind: str) -> Rates:
    import soundfile

    noise = np.random.default_rng(0).normal(0, 0.1, 4 * 16000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"clip.{kind}")
        soundfile.write(path, noise, 16000, subtype="PCM_16")
        rates = _rates(lambda: soundfile.read(path, dtype="float32"), CPU, 1.0)
    return rates, f"reads by soundfile of one {kind.upper()} file of 4 s, 16 kHz, 16 bit, mono, held in the page cache"

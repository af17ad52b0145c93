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

SCHEMA = 5  # in the name of a kept file; raised when what is measured changes
BUDGET_S = 0.5  # for the repeats of one ceiling; sizing and setting up come on top
MIB = 2**20
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


# What to repeat, the work that one call does, both in words, and where needed what to do before each call, untimed.
Task = tuple[Callable, float, str] | tuple[Callable, float, str, Callable]
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
    device, cpu = hardware.device, torch.device("cpu")
    precisions = ["fp32", *(name for name in ("tf32", "bf16", "fp16", "fp8") if hardware.supports(name))]
    sources = ("pinned", "pageable") if device.type == "cuda" else ()
    tasks: list[tuple[str, str, torch.device, Callable[..., Task]]] = [
        *((f"matmul_{name}", "FLOP/s", device, partial(_matmul, device, name)) for name in precisions),
        ("memory_bandwidth", "bytes/s", device, partial(_triad, device)),
        *((f"host_to_device_{name}", "bytes/s", device, partial(_copy, device, name)) for name in sources),
        ("memcpy", "bytes/s", cpu, partial(_copy, cpu, "pageable")),
        ("disk_read", "bytes/s", cpu, _disk_read),
        *((f"decode_{name}", "files/s", cpu, partial(_decode, name)) for name in ("flac", "wav")),
    ]
    found, missing, precision = dict[str, Ceiling](), dict[str, str](), torch.get_float32_matmul_precision()
    load = os.getloadavg()[0]  # before we add to it
    busy = f"; MEASURED WHILE BUSY (load {load:.1f} on {hardware.cores} cores), may be too low: refresh when idle"
    for name, unit, where, prepare in tasks:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder) as scratch:
                call, work, what, *before = prepare(Path(scratch))
                rates = _rates(call, where, work, *before)
        except Exception as error:  # the others are still worth having
            missing[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0] or 'no message'}"
        else:
            how = f"best of {len(rates)} {what}" + busy * (load > 0.75 * hardware.cores)
            found[name] = Ceiling(name, max(rates), statistics.median(rates), unit, how)
        finally:
            torch.set_float32_matmul_precision(precision)
    torch.cuda.empty_cache()  # nothing where CUDA is not in use
    return found, missing


def _rates(call: Callable, device: torch.device, work: float, before: Callable = lambda: None) -> list[float]:
    """Return `work` per second for each of as many calls as fit in BUDGET_S, 3 to 100."""
    rates, began_s = list[float](), time.perf_counter()
    while len(rates) < 3 or (len(rates) < 100 and time.perf_counter() - began_s < BUDGET_S):
        before()
        rates.append(work / max(timed(call, device, repeats=1, warmup=0)[0], 1e-9))
    return rates


def _matmul(device: torch.device, precision: str, _: Path) -> Task:
    """Square matrix product. The numbers are random: a GPU draws less power and clocks higher on constant ones."""
    size = 8192 if device.type != "cpu" else 2048 if torch.get_num_threads() < 16 else 4096
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES.get(precision, torch.float32)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
    if precision == "fp8":  # _scaled_mm wants its second matrix column-major
        scale = torch.ones((), device=device)
        multiply = partial(torch._scaled_mm, left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    return multiply, 2.0 * size**3, f"products of two {precision} matrices of {size} x {size}, 2 n^3 operations each"


def _triad(device: torch.device, _: Path) -> Task:
    """The triad of the STREAM benchmark (https://www.cs.virginia.edu/stream/), on arrays well above usual caches."""
    size_bytes = (96 if device.type == "cpu" else 512) * MIB
    a, b, c = (torch.ones(size_bytes // 4, device=device) for _ in range(3))
    what = f"triads a = b + 2 c, float32 arrays of {size_bytes // MIB} MiB, bytes read and written"
    return partial(torch.add, b, c, alpha=2.0, out=a), 3.0 * size_bytes, what


def _copy(device: torch.device, kind: str, _: Path) -> Task:
    """Copy from host memory, "pinned" or "pageable", to `device`."""
    source = torch.ones(128 * MIB, dtype=torch.uint8, pin_memory=kind == "pinned")
    target = torch.empty_like(source, device=device)
    what = f"copies of {source.nbytes // MIB} MiB of {kind} memory to {device.type} memory, one thread, bytes copied"
    if device.type == "cpu":  # NumPy's copy takes one thread, PyTorch's all
        return partial(np.copyto, target.numpy(), source.numpy()), source.nbytes, what
    return partial(target.copy_, source, non_blocking=True), source.nbytes, what


def _disk_read(folder: Path) -> Task:
    """Read a file just written, out of the page cache; RuntimeError where it cannot be dropped from there."""
    buffer = bytearray(os.urandom(32 * MIB))
    stream = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (it lives as long as what is returned)
    stream.write(buffer)
    os.fsync(stream.fileno())

    def drop() -> None:
        """Make the system forget the file, so that the next read comes from the disk. Raises where it does not."""
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:  # a read in the middle that refuses to wait for a disk: it fails where one would have to be waited for
            dropped = not os.preadv(stream.fileno(), [bytearray(1)], len(buffer) // 2, os.RWF_NOWAIT)
        except OSError as error:  # any other error: this file system cannot say
            dropped = isinstance(error, BlockingIOError)
        if not dropped:
            raise RuntimeError(f"the page cache could not be dropped for files in {folder}: the disk is not seen")
        stream.seek(0)

    drop()
    what = f"sequential reads of a file of {len(buffer) // MIB} MiB dropped from the page cache"
    return partial(stream.readinto, buffer), len(buffer), f"{what} (not from the drive's or a virtual machine's)", drop


def _decode(kind: str, folder: Path) -> Task:
    import soundfile

    path = folder / f"clip.{kind}"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, 4 * 16000), 16000, subtype="PCM_16")
    what = f"reads by soundfile of one {kind.upper()} file of 4 s, 16 kHz, 16 bit, mono, held in the page cache"
    return partial(soundfile.read, path, dtype="float32"), 1.0, what

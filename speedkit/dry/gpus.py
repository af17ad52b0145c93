"""The GPUs that can be stood in for: gpus.csv has them, from their makers' pages."""

import csv
from pathlib import Path
from typing import NamedTuple

from speedkit.config import nearest
from speedkit.errors import UsageError

KINDS = ("fp32", "tf32", "fp16", "bf16", "fp8")  # number formats of products


class Gpu(NamedTuple):
    """What CUDA tells of a GPU, and what its products reach in each number format without sparsity."""

    name: str
    capability: int  # 10 times the compute capability
    multiprocessors: int
    mib: int  # of memory
    memory_khz: int
    bus_bits: int
    devices: int = 1
    tflops: tuple[tuple[str, float], ...] = ()  # number format, 1e12 FLOP/s; none that it does not have

    @property
    def bandwidth(self) -> float:
        """Bytes/s of its memory, which works at both edges of a clock."""
        return 2 * self.memory_khz * 1e3 * self.bus_bits / 8


def read() -> dict[str, Gpu]:
    """Return the GPUs of gpus.csv by their short names."""
    gpus = {}
    with Path(__file__).with_name("gpus.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tflops = tuple((kind, float(row[kind])) for kind in KINDS if row[kind])
            numbers = {field: int(row[field]) for field in Gpu._fields[1:6]}
            gpus[row["key"]] = Gpu(row["name"], **numbers, tflops=tflops)
    return gpus


GPUS = read()


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a short name, in letters of either case. Raises UsageError where gpus.csv has none."""
    lower = {key.lower(): gpu for key, gpu in GPUS.items()}
    if name.lower() in lower:
        return lower[name.lower()]
    known = f"take {', '.join(GPUS)}, or describe yours by --sm, --memory, --bandwidth and --tflops"
    raise UsageError(f"there is no GPU {name!r}{nearest(name, lower)}: {known}")


def chosen_gpus(names: list[str], own: dict[str, float]) -> list[Gpu]:
    """Return the GPUs of short names; or one of a user's `own` sm, memory (GB), bandwidth (GB/s) and tflops.

    These are those of products in 16 bits; an eighth of them is taken for float32, and half for tf32.
    """
    if not own:
        return [find_gpu(name) for name in names]
    if len(own) < 4:
        raise UsageError("--sm, --memory, --bandwidth and --tflops describe a GPU together: give all four")
    rates = {"fp32": own["tflops"] / 8, "fp16": own["tflops"]}
    if own["sm"] >= 80:
        rates |= {"tf32": own["tflops"] / 2, "bf16": own["tflops"]}
    khz = int(own["bandwidth"] * 1e6 * 4 / 5120)
    mib = int(own["memory"] * 1e9 / 2**20)
    return [Gpu("your GPU", int(own["sm"]), 100, mib, khz, 5120, tflops=tuple(rates.items()))]

"""What this machine is and what it can do. What it can reach is measured in `speedkit.ceilings`."""

import contextlib
import ctypes.util
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from speedkit.errors import UsageError

CAPABILITIES = ("bf16", "fp16", "tf32", "fp8", "flash_attention", "cuda_graphs", "compile", "pin_memory")
CGROUPS = Path("/sys/fs/cgroup")

# Least compute capability, and the first generation that has it: what PyTorch's and Triton's kernels ask for, see
# https://docs.nvidia.com/cuda/cuda-c-programming-guide (Compute Capabilities).
ON_NVIDIA = {
    "bf16": ((8, 0), "Ampere"),
    "fp16": ((7, 0), "Volta"),
    "tf32": ((8, 0), "Ampere"),
    "flash_attention": ((8, 0), "Ampere"),
    "fp8": ((8, 9), "Ada with FP8 tensor cores"),
    "compile": ((7, 0), "Volta"),
}
# The instruction sets without which a CPU emulates a number format, as torch.cpu.get_capabilities names them.
ON_CPU = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith")}
DECODERS = {"torchcodec": "the package torchcodec and FFmpeg's libraries", "librosa": "the package librosa"}


@dataclass(frozen=True)
class Hardware:
    """One machine as one process sees it. What it can do follows from these facts alone; None means unknown."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a torch.device cannot be changed)
    gpu: str = ""  # name; "" without one
    gpu_count: int = 0
    compute_capability: tuple[int, int] | None = None  # NVIDIA's: None on AMD's and Apple's GPUs
    gpu_memory_bytes: int | None = None
    driver: str = ""
    power_limit_w: float | None = None
    cpu: str = ""
    cpu_flags: tuple[str, ...] = ()  # those of ON_CPU that the CPU has
    cores: int = 1  # that this process may use: affinity and container quota respected
    threads: int = 1  # that PyTorch uses within one operation
    ram_bytes: int | None = None  # this process's limit, where a container sets one
    python_version: str = ""
    torch_version: str = ""
    triton: bool = False  # importable
    compiler: str = ""  # the one that torch.compile would call (C++ for a CPU, C for a GPU); "" if none is found
    python_headers: bool = False
    flash_attention: bool = True  # compiled into PyTorch: for CPUs always, for GPUs depending on the build
    decoders: tuple[str, ...] = ("soundfile",)  # of audio files, that can be loaded

    def supports(self, capability: str) -> bool:
        """Whether `capability`, of CAPABILITIES or DECODERS, is really there."""
        return not _missing(self, capability)

    def why_not(self, capability: str) -> str:
        """Return what the device lacks for `capability`, in words, or "" if it has it."""
        missing = _missing(self, capability)
        return f"{capability} needs {missing}" if missing else ""

    @property
    def name(self) -> str:
        """What to call the device in a sentence."""
        return self.gpu or f"this {self.device.type.upper()}"

    def fingerprint(self) -> str:
        """Return 16 hex digits that change with any of the facts, so also whenever a measured ceiling could."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; `cannot` gives the reason for each capability that is missing."""
        return {
            **vars(self),
            "device": str(self.device),
            "compute_capability": "{}.{}".format(*self.compute_capability) if self.compute_capability else None,
            "cannot": {name: self.why_not(name) for name in CAPABILITIES if not self.supports(name)},
        }


def _missing(hardware: Hardware, capability: str) -> str:
    """Return what the device lacks for `capability`, in words, or "" if it has it."""
    on_cpu = hardware.device.type == "cpu"
    if capability in DECODERS:
        return "" if capability in hardware.decoders else DECODERS[capability]
    if capability in ("pin_memory", "cuda_graphs"):
        return "" if hardware.device.type == "cuda" else f"a CUDA GPU; the device is {hardware.name}"
    if on_cpu and capability in ON_CPU:
        flags = ON_CPU[capability]
        slow = not any(flag in hardware.cpu_flags for flag in flags)
        return f"a CPU with one of {', '.join(flags)}: this one emulates it, slowly" if slow else ""
    if not on_cpu or capability in ("tf32", "fp8"):
        (major, minor), generation = ON_NVIDIA[capability]
        if (hardware.compute_capability or (0, 0)) < (major, minor):
            gpu = f"an NVIDIA GPU of compute capability {major}.{minor}, {generation}, or newer"
            return f"{gpu}; the device is {hardware.name}"
    if capability == "flash_attention" and not hardware.flash_attention:
        return f"its kernels for {hardware.name}, which are not in this build of PyTorch"
    return _missing_to_compile(hardware) if capability == "compile" else ""


def _missing_to_compile(hardware: Hardware) -> str:
    """Return what torch.compile lacks on this machine, or ""."""
    on_cpu = hardware.device.type == "cpu"
    if not (on_cpu or hardware.triton):
        return "the package triton, which cannot be imported: install it"
    if not hardware.compiler:
        compiler = "C++ compiler: install g++, or set CXX" if on_cpu else "C compiler: install gcc, or set CC"
        return f"a {compiler} to yours"
    return "" if hardware.python_headers else "Python's headers (Python.h): install python3-dev (python3-devel)"


def this_machine(device: str | torch.device = "auto") -> Hardware:
    """Return the facts of this machine with `device` chosen: "auto" is cuda, else mps, else cpu. Measures nothing.

    Raises UsageError when `device` is not there.
    """
    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices = ["mps", *devices]
    if torch.cuda.is_available():
        devices = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count())), *devices]
    if str(device) not in ("auto", *devices):
        choices = ", ".join(devices)
        raise UsageError(f'device "{device}" is not available: this machine has {choices}. Use one, or "auto"')
    # The number of threads can change while a process runs; nothing else here can.
    facts = _facts(torch.device(devices[0] if str(device) == "auto" else device))
    return replace(facts, threads=torch.get_num_threads())


def cache_root() -> Path:
    """Return the folder for what can be made again: SPEEDKIT_CACHE_DIR, or ~/.cache/speedkit. It may not exist yet."""
    return Path(os.environ.get("SPEEDKIT_CACHE_DIR") or Path.home() / ".cache" / "speedkit")


def usable_cores() -> int:
    """Return how many cores this process may use: its CPU affinity, lowered by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for limit in _cgroup_limits("cpu.max"):
        quota, _, period = limit.partition(" ")  # "150000 100000", or "max 100000"
        if quota.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_ram_bytes() -> int:
    """Return the bytes of RAM this process may use: the machine's, lowered by the limits of its control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(limit) for limit in _cgroup_limits("memory.max") if limit.isdigit())])


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that this process may still take on `device`."""
    if device.type == "cuda":  # what the GPU has left, and what PyTorch has taken of it and does not use
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(psutil.virtual_memory().available, usable_ram_bytes() - psutil.Process().memory_info().rss)


def _cgroup_limits(name: str) -> list[str]:
    """Return what the file `name` holds in each of this process's control groups (version 2, man 7 cgroups)."""
    own = Path("/proc/self/cgroup")
    group = Path(own.read_text().rpartition("::")[2].strip().lstrip("/") if own.exists() else "")
    # A container may see its own group mounted as the root, so the root itself is among them.
    files = [CGROUPS / folder / name for folder in (group, *group.parents)]
    return [file.read_text().strip() for file in files if file.exists()]


def nvml_facts(uuid: str, *names: str) -> dict[str, Any]:
    """Return what NVML says of a GPU as to `names`; what it does not tell (MIG, virtual GPUs) is left out.

    driver, power_limit_w, power_w, sm_hz, memory_hz, energy_j (since the driver was loaded) and utilisation, 0 to 1: as
    nvidia-smi shows it.
    """
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # NVML's absence or refusal costs facts, never a run
        import pynvml as nvml  # the module of the distribution nvidia-ml-py

        nvml.nvmlInit()
        # NVML counts all GPUs, CUDA only the visible ones: the UUID is what both call it.
        gpu = functools.partial(nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
        questions = {
            "driver": nvml.nvmlSystemGetDriverVersion,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu()) / 1e3,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu()) / 1e3,
            "sm_hz": lambda: nvml.nvmlDeviceGetClockInfo(gpu(), nvml.NVML_CLOCK_SM) * 1e6,
            "memory_hz": lambda: nvml.nvmlDeviceGetClockInfo(gpu(), nvml.NVML_CLOCK_MEM) * 1e6,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu()) / 1e3,
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu()).gpu / 100,
        }
        for name in names:
            with contextlib.suppress(nvml.NVMLError):
                facts[name] = questions[name]()
    return facts


@functools.lru_cache
def _facts(device: torch.device) -> Hardware:
    cpu, compiler = torch.cpu.get_capabilities(), os.environ.get("CXX", "g++")  # as torch._inductor.config
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"  # as triton.runtime.build
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "compute_capability": None if torch.version.hip else (properties.major, properties.minor),
            "gpu_memory_bytes": properties.total_memory,
            "flash_attention": torch.backends.cuda.is_flash_attention_available(),
            **nvml_facts(str(properties.uuid), "driver", "power_limit_w"),
        }
    ffmpeg = ctypes.util.find_library("avutil")  # without whose libraries torchcodec cannot be imported
    installed = [name for name in DECODERS if importlib.util.find_spec(name)]
    decoders = [name for name in installed if ffmpeg or name != "torchcodec"]
    return Hardware(
        device=device,
        cpu=cpu.get("cpu_name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flags in ON_CPU.values() for flag in flags if cpu.get(flag)),
        cores=usable_cores(),
        ram_bytes=usable_ram_bytes(),
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        triton=importlib.util.find_spec("triton") is not None,
        compiler=shutil.which(compiler) or "",
        decoders=("soundfile", *decoders),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        **gpu,
    )

"""What this machine is and what it can do. What it can reach is measured in `speedkit.measure.peaks`."""

import ctypes.util
import functools
import importlib.util
import itertools
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from speedkit.display import table
from speedkit.errors import UsageError

CAPABILITIES = ("bf16", "fp16", "tf32", "fp8", "flash_attention", "cuda_graphs", "compile", "pin_memory")
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_SHARE = 0.5  # of the free memory, that kept samples may take

# Least compute capability, and the first generation that has it: what PyTorch's and Triton's kernels ask for, see
# https://docs.nvidia.com/cuda/cuda-c-programming-guide (Compute Capabilities).
ON_NVIDIA = {
    "bf16": ((8, 0), "Ampere"),
    "fp16": ((7, 0), "Volta"),
    "tf32": ((8, 0), "Ampere"),
    "flash_attention": ((8, 0), "Ampere"),
    "varlen_attention": ((8, 0), "Ampere"),
    "fp8": ((8, 9), "Ada with FP8 tensor cores"),
    "compile": ((7, 0), "Volta"),
}
CUDNN = ("cudnn_attention", "cudnn_benchmark")
ON_CUDA = ("pin_memory", "prefetch", "cuda_graphs", "expandable_segments", "efficient_attention", *CUDNN)
# The instruction sets without which a CPU emulates a number format, as torch.cpu.get_capabilities names them. On x86
# none helps float16: a convolution's backward pass takes tens of times as long as in float32 (PyTorch 2.11).
ON_CPU = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("fp16_arith",)}
ON_CPU_TOO = ("flash_attention", "compile")  # of these, on a CPU without any of its own
NVIDIA_DEVICE = Path("/dev/nvidia0")
# CUDA's version -> the first of NVIDIA's drivers for it, see https://docs.nvidia.com/deploy/cuda-compatibility.
DRIVERS = {"12": 525, "13": 580}


@dataclass(frozen=True)
class Hardware:
    """One machine as one process sees it. What it can do follows from these facts alone; None means unknown."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a torch.device cannot be changed)
    gpu: str = ""  # name; "" without one
    gpu_count: int = 0
    compute_capability: tuple[int, int] | None = None  # NVIDIA's: None on AMD's and Apple's GPUs
    gpu_memory_bytes: int | None = None
    driver: str = ""
    cpu: str = ""
    cpu_flags: tuple[str, ...] = ()  # those of ON_CPU that the CPU has
    cores: int = 1  # that this process may use: affinity and container quota respected
    threads: int = 1  # that PyTorch uses within one operation
    ram_bytes: int | None = None  # this process's limit, where a container sets one
    operating_system: str = "linux"  # as sys.platform names it
    torch_version: str = ""
    triton: bool = False  # importable
    compiler: str = ""  # the one that torch.compile would call (C++ for a CPU, C for a GPU); "" if none is found
    python_headers: bool = False
    torchcodec: bool = False  # can be loaded
    mallopt: bool = False  # whether the C library has it, as glibc does

    def supports(self, capability: str) -> bool:
        """Return whether the machine really has `capability`: of CAPABILITIES, or another that `why_not` knows."""
        return not self.why_not(capability)

    def why_not(self, capability: str) -> str:
        """Return what the machine lacks for `capability`, in words, or "" if it has it."""
        missing = _missing_in_device(self, capability) or _missing_software(self, capability)
        return f"{capability} needs {missing}" if missing else ""

    @property
    def name(self) -> str:
        """What to call the device in a sentence."""
        return self.gpu or f"this {self.device.type.upper()}"

    def __repr__(self) -> str:
        return f"<Hardware: {self.name}, {self.cores} cores, torch {self.torch_version}>"

    def _repr_html_(self) -> str:
        facts = self.as_dict()
        missing = facts.pop("cannot")
        return table(repr(self), ("fact", "here"), [*facts.items(), *missing.items()])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; `cannot` gives the reason for each capability that is missing."""
        facts = vars(self) | {"device": str(self.device)}
        if self.compute_capability is not None:
            facts["compute_capability"] = "{}.{}".format(*self.compute_capability)
        reasons = {name: self.why_not(name) for name in CAPABILITIES}
        return facts | {"cannot": {name: why for name, why in reasons.items() if why}}


def _missing_in_device(hardware: Hardware, capability: str) -> str:
    """Return what the device lacks for `capability`, or ""."""
    on_cpu = hardware.device.type == "cpu"
    here = f"the device is {hardware.name}"
    if capability in ON_CUDA and hardware.device.type != "cuda":
        return f"a CUDA GPU; {here}"
    if on_cpu and capability in ON_CPU:
        flags = ON_CPU[capability]
        if set(flags).isdisjoint(hardware.cpu_flags):
            return f"a CPU with {' or '.join(flags)}: this one emulates it, slowly"
    elif capability in ON_NVIDIA and not (on_cpu and capability in ON_CPU_TOO):
        least, generation = ON_NVIDIA[capability]
        if (hardware.compute_capability or (0, 0)) < least:
            version = "{}.{}".format(*least)
            return f"an NVIDIA GPU of compute capability {version}, {generation}, or newer; {here}"
    return ""


def _missing_software(hardware: Hardware, capability: str) -> str:
    """Return what the operating system and what is installed lack for `capability`, or ""."""
    if capability == "workers" and hardware.operating_system == "win32":
        return "processes that can be forked, which Windows has not: WSL2, a Linux within Windows, has them"
    if capability == "torchcodec" and not hardware.torchcodec:
        return "the package torchcodec and FFmpeg's libraries"
    if capability == "mallopt" and not hardware.mallopt:
        return "glibc, the C library of most Linux systems"
    if capability == "compile":
        return _missing_to_compile(hardware)
    return ""


def _missing_to_compile(hardware: Hardware) -> str:
    on_cpu = hardware.device.type == "cpu"
    if not on_cpu and not hardware.triton:
        return "the package triton, which cannot be imported: install it"
    if not hardware.compiler:
        return "a C++ compiler: install g++, or set CXX" if on_cpu else "a C compiler: install gcc, or set CC"
    if not hardware.python_headers:
        return "Python's headers (Python.h): install python3-dev (python3-devel)"
    return ""


def this_machine(device: str | torch.device = "auto") -> Hardware:
    """Return the facts of this machine with `device` chosen: "auto" is cuda, else mps, else cpu. Measures nothing.

    Warns once where "auto" is a CPU beside a GPU that cannot be used. Raises UsageError when `device` is not there.
    """
    devices = []
    if torch.cuda.is_available():
        devices += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        devices.append("mps")
    devices.append("cpu")
    if str(device) == "auto":
        device = devices[0]
        if unused := unusable_gpu():
            warnings.warn(unused, stacklevel=1)  # of one place, whoever calls: Python shows it once
    if str(device) not in devices:
        why = f'this machine has {", ".join(devices)}, and takes "auto"; {unusable_gpu()}'
        raise UsageError(f'device "{device}" is not available: {why.removesuffix("; ")}')
    # The number of threads can change while a process runs; nothing else here can.
    return replace(_facts(torch.device(device)), threads=torch.get_num_threads())


def unusable_gpu() -> str:
    """Return why PyTorch does not use an NVIDIA GPU that is here; "" where it does, none is here or it is hidden."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    driver, gpu_count = nvidia_driver()
    if not gpu_count and not NVIDIA_DEVICE.exists():
        return ""
    cuda = str(torch.version.cuda)
    needed = DRIVERS.get(cuda.partition(".")[0], 0)
    if torch.version.cuda is None:
        why = "is built without CUDA: install one with it"
    elif not driver or int(driver.partition(".")[0]) < needed:
        why = f"needs driver {needed} or newer for CUDA {cuda}: update the driver, or install PyTorch for an older CUDA"
    else:
        why = "cannot reach it: python -c 'import torch; torch.cuda.init()' says why"
    return f"the NVIDIA GPU here (driver {driver or 'unknown'}) is not used: PyTorch {torch.__version__} {why}"


def cache_root() -> Path:
    """Return the folder for what can be made again: SPEEDKIT_CACHE_DIR, or ~/.cache/speedkit. It may not exist yet."""
    named = os.environ.get("SPEEDKIT_CACHE_DIR")
    if named:
        return Path(named)
    home = Path(os.path.expanduser("~"))  # as it stands where there is none
    if home != Path("/") and os.access(home, os.W_OK):
        return home / ".cache" / "speedkit"
    folder = Path(tempfile.gettempdir(), f"speedkit-{os.getuid()}")  # Windows has homes
    warnings.warn(
        f"there is no home to write to: caches are in {folder}, or where SPEEDKIT_CACHE_DIR says", stacklevel=2
    )
    return folder


def usable_cores() -> int:
    """Return how many cores this process may use: its CPU affinity, lowered by the quotas of its control groups."""
    if hasattr(os, "sched_getaffinity"):  # on Linux alone
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for limit in _cgroup_limits("cpu.max"):  # "150000 100000", or "max 100000"
        quota, period = limit.split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_ram_bytes() -> int:
    """Return the bytes of RAM this process may use: the machine's, lowered by the limits of its control groups."""
    limits = [int(limit) for limit in _cgroup_limits("memory.max") if limit.isdigit()]  # or "max"
    return min([psutil.virtual_memory().total, *limits])


def peak_ram_bytes() -> int:
    """Return the most RAM that this process has taken so far."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that this process may still take on `device`."""
    if device.type == "cuda":  # what the GPU has left, and what PyTorch has taken of it and does not use
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(psutil.virtual_memory().available, usable_ram_bytes() - psutil.Process().memory_info().rss)


def _cgroup_limits(name: str) -> list[str]:
    """Return what the file `name` holds in each of this process's control groups (version 2, man 7 cgroups)."""
    own = Path("/proc/self/cgroup")
    group = Path()
    if own.exists():
        group = Path(own.read_text().rpartition("::")[2].strip().lstrip("/"))
    # A container may see its own group mounted as the root, so the root itself is among them.
    files = [CGROUPS / folder / name for folder in (group, *group.parents)]
    return [file.read_text().strip() for file in files if file.exists()]


def nvidia_driver() -> tuple[str, int]:
    """Return the version of NVIDIA's driver and the number of its GPUs, or ("", 0) where NVML does not tell them."""
    try:
        import pynvml as nvml  # the module of the distribution nvidia-ml-py

        nvml.nvmlInit()
        return nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetCount()
    except Exception:  # its absence or refusal costs facts, never a run
        return "", 0


@functools.lru_cache
def _facts(device: torch.device) -> Hardware:
    cpu = torch.cpu.get_capabilities()
    compiler = os.environ.get("CXX", "g++")  # as torch._inductor.config
    gpu: dict[str, Any] = {}
    if device.type == "cuda":
        compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"  # as triton.runtime.build
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
            "driver": nvidia_driver()[0],
        }
        if not torch.version.hip:
            gpu["compute_capability"] = (properties.major, properties.minor)
    return Hardware(
        device=device,
        cpu=cpu.get("cpu_name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flag in itertools.chain(*ON_CPU.values()) if cpu.get(flag)),
        cores=usable_cores(),
        ram_bytes=usable_ram_bytes(),
        operating_system=sys.platform,
        torch_version=str(torch.__version__),
        triton=_installed("triton"),
        compiler=shutil.which(compiler) or "",
        # Without FFmpeg's libraries it could not be imported.
        torchcodec=_installed("torchcodec") and bool(ctypes.util.find_library("avutil")),
        mallopt=platform.libc_ver()[0] == "glibc",
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        **gpu,
    )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

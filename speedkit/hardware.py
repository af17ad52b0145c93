"""What this machine is and what it can do. What it can reach is measured in `speedkit.ceilings`."""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from speedkit import system
from speedkit.config import nearest
from speedkit.errors import UsageError

CAPABILITIES = ("bf16", "fp16", "tf32", "fp8", "flash_attention", "triton", "cuda_graphs", "compile", "pin_memory")

# Least compute capability, and the first generation that has it: what PyTorch's and Triton's kernels ask for, see
# https://docs.nvidia.com/cuda/cuda-c-programming-guide (Compute Capabilities).
ON_NVIDIA = {
    "bf16": ((8, 0), "Ampere"),
    "fp16": ((7, 0), "Volta"),
    "tf32": ((8, 0), "Ampere"),
    "triton": ((7, 0), "Volta"),
    "flash_attention": ((8, 0), "Ampere"),
    "fp8": ((8, 9), "Ada with FP8 tensor cores"),
    "compile": ((7, 0), "Volta"),
}
# The instruction sets without which a CPU emulates a number format, as torch.cpu.get_capabilities names them.
ON_CPU = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith")}
DECODERS = {"torchcodec": "the package torchcodec and FFmpeg's libraries", "librosa": "the package librosa"}
INSTEAD = {
    **dict.fromkeys(DECODERS, 'Use decoder "soundfile"'),
    "flash_attention": 'Use attention "auto"',
    "triton": 'Use compile "off"',
    "compile": 'Use compile "off"',
    "cuda_graphs": 'Use compile "default"',
    "pin_memory": "Leave pin_memory off",
}


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
    shm_bytes: int | None = None  # /dev/shm, through which loader workers pass batches
    os: str = ""
    python_version: str = ""
    torch_version: str = ""
    triton: bool = False  # importable
    compiler: str = ""  # the one that torch.compile would call (C++ for a CPU, C for a GPU); "" if none is found
    python_headers: bool = False
    flash_attention: bool = True  # compiled into PyTorch: for CPUs always, for GPUs depending on the build
    decoders: tuple[str, ...] = ("soundfile",)  # of audio files, that can be loaded

    def supports(self, capability: str) -> bool:
        """Whether `capability`, of CAPABILITIES or DECODERS, is really there. Raises UsageError for an unknown name."""
        if capability not in (*CAPABILITIES, *DECODERS):
            near, known = nearest(capability, CAPABILITIES), ", ".join((*CAPABILITIES, *DECODERS))
            raise UsageError(f'there is no capability "{capability}"{near}: take {known}')
        return not _lacks(self, capability)

    def why_not(self, capability: str) -> str:
        """Return why the device lacks `capability` and what to use instead, or "" if it has it."""
        if self.supports(capability):
            return ""
        precision = next((other for other in ("bf16", "fp16") if self.supports(other)), "default")
        instead = INSTEAD.get(capability, f'Use precision "{precision}"')
        return f"{_lacks(self, capability)}. {instead}."

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
            "can": [name for name in CAPABILITIES if self.supports(name)],
            "cannot": {name: reason for name in CAPABILITIES if (reason := self.why_not(name))},
        }


def _lacks(hardware: Hardware, capability: str) -> str:
    """Return what `capability` needs and what the device is instead, or "" where it has it."""
    kind, has = hardware.device.type, hardware.compute_capability
    tools, flags = capability in ("compile", "triton"), ON_CPU.get(capability, ()) if kind == "cpu" else ()
    least, generation = ON_NVIDIA.get(capability, ((0, 0), ""))
    if flags or (kind == "cpu" and capability in ("compile", "flash_attention")):
        least = (0, 0)
    told = f"has {has[0]}.{has[1]}" if has else "is none, or does not tell"
    emulates = " and only emulates it" if has and capability == "bf16" else ""
    language, compiler, variable = ("C++", "g++", "CXX") if kind == "cpu" else ("C", "gcc", "CC")
    reasons = [
        (
            capability in DECODERS and capability not in hardware.decoders,
            f"{DECODERS.get(capability)}, which cannot be loaded: install the extra `decode`, "
            "and FFmpeg for torchcodec",
        ),
        (capability in ("pin_memory", "cuda_graphs") and kind != "cuda", f"a CUDA GPU; the device is {hardware.name}"),
        (
            flags and not set(flags) & set(hardware.cpu_flags),
            f"a CPU with one of {', '.join(flags)} to be fast; this one has none and emulates it",
        ),
        (
            (has or (0, 0)) < least,
            f"an NVIDIA GPU of compute capability {least[0]}.{least[1]}, {generation}, or newer; {hardware.name} {told}"
            f"{emulates}",
        ),
        (
            capability == "flash_attention" and not hardware.flash_attention,
            f"its kernels for {hardware.name}, which are not in this build of PyTorch",
        ),
        (tools and kind != "cpu" and not hardware.triton, "the package triton, which cannot be imported: install it"),
        (
            tools and not hardware.compiler,
            f"a {language} compiler; there is none: install {compiler}, or set {variable} to yours",
        ),
        (
            tools and not hardware.python_headers,
            "Python's headers (Python.h), which are not there: install python3-dev (python3-devel)",
        ),
    ]
    return next((f"{capability} needs {needs}" for lacking, needs in reasons if lacking), "")


def this_machine(device: str | torch.device = "auto") -> Hardware:
    """Return the facts of this machine with `device` chosen: "auto" is cuda, else mps, else cpu. Measures nothing.

    Raises UsageError when `device` is not there.
    """
    cuda = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))] * torch.cuda.is_available()
    there = [*cuda, *["mps", "mps:0"] * torch.backends.mps.is_available(), "cpu"]
    if str(device) not in ("auto", *there):
        raise UsageError(f'device "{device}" is not available: this machine has {", ".join(there)}. Use one, or "auto"')
    # The number of threads can change while a process runs; nothing else here can.
    facts = _facts(torch.device(there[0] if str(device) == "auto" else device))
    return replace(facts, threads=torch.get_num_threads())


def cache_root() -> Path:
    """Return the folder for what can be made again: SPEEDKIT_CACHE_DIR, or ~/.cache/speedkit. It may not exist yet."""
    return Path(os.environ.get("SPEEDKIT_CACHE_DIR") or Path.home() / ".cache" / "speedkit")


@functools.lru_cache
def _facts(device: torch.device) -> Hardware:
    cpu, compiler = torch.cpu.get_capabilities(), os.environ.get("CXX", "g++")  # as torch._inductor.config
    if device.type == "cuda":  # as triton.runtime.build
        compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    release = re.split(r"[^\d.]", platform.release())[0]  # the rest tells who built it, and may tell where
    return Hardware(
        device=device,
        cpu=cpu.get("cpu_name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flags in ON_CPU.values() for flag in flags if cpu.get(flag)),
        cores=system.usable_cores(),
        ram_bytes=system.usable_ram_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        os=f"{platform.system()} {release}",
        python_version=platform.python_version(),
        torch_version=str(torch.__version__),
        triton=importlib.util.find_spec("triton") is not None,
        compiler=shutil.which(compiler) or "",
        decoders=("soundfile", *filter(_loads, DECODERS)),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        **(_gpu_facts(device) if device.type == "cuda" else {}),
    )


def _loads(decoder: str) -> bool:
    """Whether a decoder's package is there, and for torchcodec one of FFmpeg 4 to 8: the smallest library is tried."""
    if decoder != "torchcodec" or not importlib.util.find_spec(decoder):
        return importlib.util.find_spec(decoder) is not None
    for number in range(56, 61):
        for name in (f"libavutil.so.{number}", f"libavutil.{number}.dylib"):
            with contextlib.suppress(OSError):
                return bool(ctypes.CDLL(name))
    return False


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "compute_capability": None if torch.version.hip else (properties.major, properties.minor),
        "gpu_memory_bytes": properties.total_memory,
        "flash_attention": torch.backends.cuda.is_flash_attention_available(),
        **system.nvml_facts(str(properties.uuid), "driver", "power_limit_w"),
    }

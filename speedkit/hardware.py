"""What this machine is and what it can do. What it can reach is measured in `speedkit.ceilings`."""

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from speedkit import system
from speedkit.errors import UsageError

CAPABILITIES = ("bf16", "fp16", "tf32", "fp8", "flash_attention", "triton", "cuda_graphs", "compile", "pin_memory")

# Least compute capability, and the first generation that has it: what PyTorch's and Triton's kernels ask for, see
# https://docs.nvidia.com/cuda/cuda-c-programming-guide (Compute Capabilities).
ON_NVIDIA = {
    "bf16": (8, 0, "Ampere"), "fp16": (7, 0, "Volta"), "tf32": (8, 0, "Ampere"), "fp8": (8, 9, "Ada"),
    "flash_attention": (8, 0, "Ampere"), "triton": (7, 0, "Volta"), "compile": (7, 0, "Volta"),
}  # fmt: skip
INSTEAD = {
    "flash_attention": 'Use attention "auto"', "triton": 'Use compile "off"', "compile": 'Use compile "off"',
    "cuda_graphs": 'Use compile "default"', "pin_memory": "Leave pin_memory off",
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """One machine as one process sees it. What it can do follows from these facts alone; None means unknown."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a torch.device cannot be changed)
    gpu: str = ""  # name; "" without one
    gpu_count: int = 0
    compute_capability: tuple[int, int] | None = None  # NVIDIA's; None on AMD and Apple GPUs
    gpu_memory_bytes: int | None = None
    driver: str = ""
    power_limit_w: float | None = None
    cuda_version: str = ""  # version that PyTorch was built with
    rocm_version: str = ""  # the same for AMD GPUs, which answer to the device name "cuda"
    cpu: str = ""
    cpu_flags: tuple[str, ...] | None = None  # those of system.CPU_FLAGS that the CPU has
    physical_cores: int | None = None
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
    probes: tuple[tuple[str, str], ...] = ()  # (capability, "" if a tiny real operation ran, else its error)

    def supports(self, capability: str) -> bool:
        """Whether the device really has `capability` (see CAPABILITIES). Raises UsageError for an unknown name."""
        if capability not in CAPABILITIES:
            near = get_close_matches(capability, CAPABILITIES, n=1, cutoff=0.0)[0]
            known = ", ".join(CAPABILITIES)
            raise UsageError(f'unknown capability "{capability}": did you mean "{near}"? There are {known}')
        return not _lacks(self, capability)

    def why_not(self, capability: str) -> str:
        """Return why the device lacks `capability` and what to use instead, or "" if it has it."""
        if self.supports(capability):
            return ""
        precision = next((other for other in ("bf16", "fp16") if self.supports(other)), "fp32")
        instead = INSTEAD.get(capability, f'Use precision "{precision}"')
        return f"{_lacks(self, capability)}. {instead}."

    @property
    def name(self) -> str:
        """What to call the device in a sentence."""
        return self.gpu or f"this {self.device.type.upper()}"

    def fingerprint(self) -> str:
        """Return 16 hex digits that change whenever a measured ceiling could."""
        facts = (str(self.device), self.gpu, self.gpu_memory_bytes, self.driver, self.power_limit_w, self.cpu,
                 self.cores, self.threads, self.ram_bytes, self.os, self.torch_version)  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; `cannot` gives the reason for each capability that is missing."""
        facts = {key: value for key, value in vars(self).items() if key != "probes"}
        facts["device"] = str(self.device)
        facts["compute_capability"] = ".".join(map(str, self.compute_capability)) if self.compute_capability else None
        facts["cpu_flags"] = None if self.cpu_flags is None else list(self.cpu_flags)
        facts["can"] = [name for name in CAPABILITIES if self.supports(name)]
        facts["cannot"] = {name: reason for name in CAPABILITIES if (reason := self.why_not(name))}
        facts["fingerprint"] = self.fingerprint()
        return facts


def _lacks(hardware: Hardware, capability: str) -> str:
    """Return what `capability` needs and what the device is instead, or "" where it has it."""
    kind = hardware.device.type
    if capability in ("pin_memory", "cuda_graphs"):
        return "" if kind == "cuda" else f"{capability} needs a CUDA GPU; the device is {hardware.name}"
    if kind == "cpu":
        reason = _lacks_on_cpu(hardware, capability)
    elif kind == "mps":
        reason = "" if capability in dict(hardware.probes) else f"{capability} is not available on Apple GPUs"
    else:
        reason = _lacks_on_gpu(hardware, capability)
    error = dict(hardware.probes).get(capability)
    return f"{capability} was tried on {hardware.name} and failed ({error})" if error and not reason else reason


def _lacks_on_gpu(hardware: Hardware, capability: str) -> str:
    if not hardware.rocm_version:
        major, minor, generation = ON_NVIDIA[capability]
        needs = f"{capability} needs a GPU of compute capability {major}.{minor} or more ({generation} or newer)"
        if hardware.compute_capability is None:
            return f"{needs}; that of {hardware.name} is unknown"
        if hardware.compute_capability < (major, minor):
            has = "{}.{}".format(*hardware.compute_capability)
            return f"{needs}; {hardware.name} has {has}" + (" and only emulates it" if capability == "bf16" else "")
    elif capability == "tf32":
        return f"tf32 is a format of NVIDIA's tensor cores; the device is {hardware.name}"
    elif capability not in ("triton", "compile", *dict(hardware.probes)):
        return f"{capability} on an AMD GPU is known only by trying it, which was not done on {hardware.name}"
    if capability in ("triton", "compile"):
        if not hardware.triton:
            return f"{capability} on a GPU needs the package triton, which cannot be imported: install it"
        if not hardware.compiler:
            return f"{capability} on a GPU needs a C compiler (Triton's launchers); install gcc or set CC"
        return _lacks_headers(hardware, capability)
    return ""


def _lacks_on_cpu(hardware: Hardware, capability: str) -> str:
    if capability in system.CPU_FLAGS:
        needs = f"{capability} is fast only on a CPU with one of {', '.join(system.CPU_FLAGS[capability])}"
        if hardware.cpu_flags is None:
            return f"{needs}; what this one has is unknown"
        has_one = set(system.CPU_FLAGS[capability]) & set(hardware.cpu_flags)
        return "" if has_one else f"{needs}; this one has none and emulates it"
    if capability == "compile":
        if not hardware.compiler:
            return "compile on a CPU needs a C++ compiler; there is none: install g++, or set CXX to the one you have"
        return _lacks_headers(hardware, capability)
    if capability == "flash_attention":
        return "" if capability in dict(hardware.probes) else "flash_attention was not tried on this CPU"
    units = {"tf32": " with TF32 tensor cores (Ampere or newer)", "fp8": " with FP8 tensor cores (Ada or newer)"}
    return f"{capability} needs a GPU{units.get(capability, '')}; the device is this CPU"


def _lacks_headers(hardware: Hardware, capability: str) -> str:
    if hardware.python_headers:
        return ""
    return f"{capability} needs Python's headers (Python.h), which are not there: install python3-dev (python3-devel)"


def this_machine(device: str | torch.device = "auto") -> Hardware:
    """Return the facts of this machine with `device` chosen: "auto" is cuda, else mps, else cpu. Measures nothing.

    Raises UsageError when `device` is not there.
    """
    # The number of threads can change while a process runs; nothing else here can.
    return replace(_facts(str(choose_device(device))), threads=torch.get_num_threads())


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """Return the torch device that "auto" or a name stands for. Raises UsageError when it is not there."""
    there = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if str(device) == "auto":
        return torch.device(there[0])
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    count = torch.cuda.device_count() if chosen.type == "cuda" else 1
    if chosen.type not in there or (chosen.index or 0) >= count:
        names = [f"cuda:0 to cuda:{count - 1}" if name == "cuda" and count > 1 else name for name in there]
        raise UsageError(f'device "{device}" is not available: this machine has {", ".join(names)}. Use one, or "auto"')
    return chosen


def cache_root() -> Path:
    """Return the folder for what can be made again: SPEEDKIT_CACHE_DIR, or ~/.cache/speedkit. It may not exist yet."""
    return Path(os.environ.get("SPEEDKIT_CACHE_DIR") or Path.home() / ".cache" / "speedkit")


@functools.lru_cache
def _facts(device_name: str) -> Hardware:
    device = torch.device(device_name)
    cpu, flags, physical_cores = system.parse_cpuinfo(system.read("/proc/cpuinfo"))
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch._inductor.config
    if device.type == "cuda":  # as triton.runtime.build
        compiler = os.environ.get("CC") or ("gcc" if shutil.which("gcc") else "clang")
    hardware = Hardware(
        device=device,
        cpu=cpu or platform.processor() or platform.machine(),
        cpu_flags=flags,
        physical_cores=physical_cores,
        cores=system.usable_cores(),
        ram_bytes=system.usable_ram_bytes(),
        shm_bytes=system.shm_bytes(),
        os=platform.platform(),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        triton=importlib.util.find_spec("triton") is not None,
        compiler=shutil.which(compiler) or "",
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        **_gpu_facts(device),
    )
    return replace(hardware, probes=_probes(hardware))


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    if device.type == "mps":
        return {"gpu": "Apple GPU", "gpu_count": 1, "gpu_memory_bytes": torch.mps.recommended_max_memory()}
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    rocm = torch.version.hip or ""
    return {
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "compute_capability": None if rocm else (properties.major, properties.minor),
        "gpu_memory_bytes": properties.total_memory,
        "cuda_version": torch.version.cuda or "",
        "rocm_version": rocm,
        **({} if rocm else system.nvml_facts(str(properties.uuid))),
    }


def _probes(hardware: Hardware) -> tuple[tuple[str, str], ...]:
    """Try what a claim does not settle with tiny real operations: low precision off NVIDIA, fused attention."""
    kind = hardware.device.type
    if kind == "cuda" and not hardware.rocm_version:
        built = torch.backends.cuda.is_flash_attention_available()
        return () if built else (("flash_attention", "this build of PyTorch lacks it"),)
    flags = set(hardware.cpu_flags or ())
    names = [name for name, wanted in system.CPU_FLAGS.items() if kind != "cpu" or flags & set(wanted)]
    names += ["flash_attention"] if kind in ("cpu", "cuda") else []
    names += ["fp8"] if kind == "cuda" else []
    return tuple((name, system.trial(name, hardware.device)) for name in names)


def describe(
    hardware: Hardware, ceilings: Mapping[str, Any] | None = None, left_out: Mapping[str, str] | None = None
) -> str:
    """Return the machine's card as aligned text, with what `speedkit.ceilings` measured and left out where given."""
    rows = [("device", str(hardware.device))]
    if hardware.gpu:
        rows.append(("GPU", ", ".join([
            f"{hardware.gpu_count} x {hardware.gpu}",
            *([_gib(hardware.gpu_memory_bytes)] if hardware.gpu_memory_bytes else []),
            *(["compute capability {}.{}".format(*hardware.compute_capability)] if hardware.compute_capability else []),
            *([f"driver {hardware.driver}"] if hardware.driver else []),
            *([f"{hardware.power_limit_w:.0f} W limit"] if hardware.power_limit_w else []),
        ])))  # fmt: skip
    flags = "instruction sets unknown" if hardware.cpu_flags is None else " ".join(hardware.cpu_flags)
    rows += [
        ("CPU", hardware.cpu),
        ("", f"{hardware.cores} usable of {hardware.physical_cores or 'unknown'} physical cores, "
             f"{hardware.threads} threads; {flags or 'no fast bf16 or fp16'}"),
        ("memory", f"{_gib(hardware.ram_bytes)} RAM, {_gib(hardware.shm_bytes)} /dev/shm"),
        ("software", f"{hardware.os}, Python {hardware.python_version}, PyTorch {hardware.torch_version}"),
        ("can", ", ".join(name for name in CAPABILITIES if hardware.supports(name))),
    ]  # fmt: skip
    rows += [("cannot", reason) for name in CAPABILITIES if (reason := hardware.why_not(name))]
    rows += [("measured", str(ceiling)) for ceiling in (ceilings or {}).values()]
    rows += [("unmeasured", f"{name}: {reason}") for name, reason in (left_out or {}).items()]
    before = ["", *(label for label, _ in rows)]
    labels = [label if label != last else "" for (label, _), last in zip(rows, before, strict=False)]
    return "\n".join(f"{label:<12}{text}" for label, (_, text) in zip(labels, rows, strict=True))


def _gib(count_bytes: int | None) -> str:
    return "unknown" if count_bytes is None else f"{count_bytes / 2**30:.1f} GiB"

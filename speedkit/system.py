"""What the operating system and the driver say about this machine, and tiny trials of what they do not say."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# The instruction sets that decide how fast low precision runs, as /proc/cpuinfo spells them (x86, x86, Arm).
CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...] | None, int | None]:
    """Return (model, flags of CPU_FLAGS, physical cores) from the text of /proc/cpuinfo; "" or None if not told."""
    model, flags, cores, package = "", None, set(), ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            model = value
        elif key in ("flags", "Features") and flags is None:  # x86 and Arm
            has = set(value.split())
            flags = tuple(flag for names in CPU_FLAGS.values() for flag in names if flag in has)
        elif key == "physical id":
            package = value
        elif key == "core id":
            cores.add((package, value))
    return model, flags, len(cores) or None


def usable_cores(folders: Iterable[Path] | None = None) -> int:
    """Return how many cores this process may use: its CPU affinity, lowered by the quota in control group `folders`."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in cgroup_folders("cpu") if folders is None else folders:
        words = read(folder / "cpu.max").split()  # version 2: "150000 100000", or "max 100000"
        if not words:  # version 1
            words = [read(folder / f"cpu.cfs_{name}_us").strip() or "max" for name in ("quota", "period")]
        if all(word.isdigit() for word in words):
            cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def usable_ram_bytes(folders: Iterable[Path] | None = None) -> int:
    """Return the bytes of RAM this process may use: the machine's, lowered by the limit in control group `folders`."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in cgroup_folders("memory") if folders is None else folders:
        word = (read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")).strip()
        limits += [int(word)] if word.isdigit() else []
    return min(limits)


def cgroup_folders(controller: str, root: Path = Path("/sys/fs/cgroup"), groups: str | None = None) -> Iterator[Path]:
    """Yield the control group folders of this process, innermost first, under versions 1 and 2 (man 7 cgroups).

    A container may see its own group mounted as the root, so the root itself always comes last.
    """
    for line in (read("/proc/self/cgroup") if groups is None else groups).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue  # version 1 has one tree per controller
        top = root / controllers if controllers else root  # version 2 has one tree with all controllers
        inner = Path(group.lstrip("/"))
        yield from (top / folder for folder in (inner, *inner.parents))


def shm_bytes() -> int | None:
    """Return the size of /dev/shm in bytes, None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        disk = os.statvfs("/dev/shm")
        return disk.f_frsize * disk.f_blocks
    return None


def nvml_facts(uuid: str) -> dict[str, Any]:
    """Return driver and power limit as NVML gives them; what it does not give (MIG, virtual GPUs) is left out."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # NVML's absence or refusal costs two facts, never a run
        import pynvml  # the module of the distribution nvidia-ml-py

        pynvml.nvmlInit()
        try:
            facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            facts["power_limit_w"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
        finally:
            pynvml.nvmlShutdown()
    return facts


def read(path: str | Path) -> str:
    """Return the text of a small system file, "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def trial(capability: str, device: torch.device) -> str:
    """Try one of TRIALS on `device`; return "" if it ran, else the first line of its error."""
    try:
        with torch.enable_grad():
            TRIALS[capability](device)
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def _train_step(device: torch.device, dtype: torch.dtype) -> None:
    """One forward and backward pass of a convolution and a linear layer under autocast. Draws no random numbers."""
    images = torch.ones(2, 3, 8, 8, device=device)  # [B, C, H, W]
    kernel = torch.ones(4, 3, 3, 3, device=device, requires_grad=True)
    weight = torch.ones(5, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype):
        outputs = F.linear(F.conv2d(images, kernel).mean((2, 3)), weight)  # [B, 5]
    outputs.float().mean().backward()


def _flash_attention(device: torch.device) -> None:
    query = torch.ones(1, 2, 16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)  # [B, heads, T, D]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(query, query, query).float().mean().backward()


def fp8_matmul(device: torch.device, size: int = 32) -> Callable[[], torch.Tensor]:
    """Return a function that multiplies two FP8 matrices [size, size]; raises where the GPU or the build has no FP8."""
    amd_cdna3 = torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName
    dtype = torch.float8_e4m3fnuz if amd_cdna3 else torch.float8_e4m3fn
    generator = torch.Generator(device).manual_seed(0)  # the caller's random state must not move
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    scale = torch.ones((), device=device)
    # _scaled_mm wants its second matrix column-major.
    return lambda: torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


TRIALS: dict[str, Callable[[torch.device], Any]] = {
    "bf16": functools.partial(_train_step, dtype=torch.bfloat16),
    "fp16": functools.partial(_train_step, dtype=torch.float16),
    "flash_attention": _flash_attention,
    "fp8": lambda device: fp8_matmul(device)(),
}

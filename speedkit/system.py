"""What the operating system and the driver say about this machine, and how much of it a container leaves us."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def usable_cores(folders: Iterable[Path] | None = None) -> int:
    """Return how many cores this process may use: its CPU affinity, lowered by the quota in control group `folders`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroup_folders() if folders is None else folders:
        quota, _, period = read(folder / "cpu.max").partition(" ")  # "150000 100000", or "max 100000"
        if quota.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_ram_bytes(folders: Iterable[Path] | None = None) -> int:
    """Return the bytes of RAM this process may use: the machine's, lowered by the limit in control group `folders`."""
    limits = [read(folder / "memory.max").strip() for folder in (cgroup_folders() if folders is None else folders)]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def cgroup_folders(root: Path = Path("/sys/fs/cgroup"), group: str | None = None) -> list[Path]:
    """Return the folders of this process's control `group`, innermost first (version 2, man 7 cgroups)."""
    inner = Path((group or read("/proc/self/cgroup")).rpartition("::")[2].strip().lstrip("/"))
    # A container may see its own group mounted as the root, so the root itself always comes last.
    return [root / folder for folder in (inner, *inner.parents)]


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
        ask: dict[str, Callable[[], Any]] = {
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
                facts[name] = ask[name]()
    return facts


def read(path: str | Path) -> str:
    """Return the text of a small system file, "" where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""

"""What the operating system and the driver say about this machine, and how much of it a container leaves us."""

import contextlib
import os
from collections.abc import Iterable
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


def nvml_facts(uuid: str) -> dict[str, Any]:
    """Return driver and power limit as NVML gives them; what it does not give (MIG, virtual GPUs) is left out."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # NVML's absence or refusal costs two facts, never a run
        import pynvml  # the module of the distribution nvidia-ml-py

        pynvml.nvmlInit()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        facts["power_limit_w"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
    return facts


def read(path: str | Path) -> str:
    """Return the text of a small system file, "" where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""

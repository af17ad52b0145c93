"""What the operating system and the driver say about this machine, and how much of it a container leaves us."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# The instruction sets that decide how fast low precision runs, as /proc/cpuinfo spells them (x86, x86, Arm).
CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...] | None, int | None]:
    """Return (model, flags of CPU_FLAGS, physical cores) from the text of /proc/cpuinfo; "" or None if not told."""
    processors = [dict(re.findall(r"^(.+?)\s*:[ \t]*(.*)$", block, re.M)) for block in text.strip().split("\n\n")]
    first = processors[0]
    words = (first.get("flags") or first.get("Features") or "").split()  # x86 and Arm
    flags = tuple(flag for names in CPU_FLAGS.values() for flag in names if flag in words) if words else None
    cores = {(processor.get("physical id"), processor["core id"]) for processor in processors if "core id" in processor}
    return first.get("model name", ""), flags, len(cores) or None


def usable_cores(folders: Iterable[Path] | None = None) -> int:
    """Return how many cores this process may use: its CPU affinity, lowered by the quota in control group `folders`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroup_folders("cpu") if folders is None else folders:
        # Version 2: "150000 100000" (quota and period), or "max 100000". Version 1: two files, and -1 without a quota.
        texts = [read(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if limit := re.fullmatch(r"(\d+)\s+(\d+)", " ".join(texts).strip()):
            cores = min(cores, max(1, int(limit[1]) // int(limit[2])))
    return cores


def usable_ram_bytes(folders: Iterable[Path] | None = None) -> int:
    """Return the bytes of RAM this process may use: the machine's, lowered by the limit in control group `folders`."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in cgroup_folders("memory") if folders is None else folders:
        word = (read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")).strip()
        limits += [int(word)] if word.isdigit() else []
    return min(limits)


def cgroup_folders(controller: str, root: Path = Path("/sys/fs/cgroup"), groups: str | None = None) -> Iterator[Path]:
    """Yield the control group folders of this process, innermost first, of versions 1 and 2 (man 7 cgroups)."""
    for line in (read("/proc/self/cgroup") if groups is None else groups).splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # version 2 has one tree, version 1 one for each
            inner = Path(group.lstrip("/"))
            # A container may see its own group mounted as the root, so the root itself always comes last.
            yield from (root / controllers / folder for folder in (inner, *inner.parents))


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

"""Where the time of a batch goes, part by part, measured on one batch of items."""

import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedkit.clock import timed
from speedkit.data.decode import BadItem
from speedkit.data.loader import collate
from speedkit.errors import SpeedkitError
from speedkit.hardware import this_machine
from speedkit.recipe import Recipe
from speedkit.train.checkpoint import get_random_state, set_random_state
from speedkit.workloads.workload import Workload

REPEATS = 7  # rounds over one batch of items; the median counts


def examine(workload: Workload, recipe: Recipe | None = None, device: str = "auto") -> list[dict[str, Any]]:
    """Return rows `{part, sample_s, share}`, one for each part of a batch loaded in the training process.

    Files are read from the page cache, where they are after the first round. Raises SpeedkitError where no item can be
    read.
    """
    recipe, target_device = recipe or workload.recipe, this_machine(device).device
    loaded = list[tuple[Any, Tensor]]()
    for item in workload.train:
        with contextlib.suppress(BadItem):
            loaded.append((item, workload.load(item)))
        if len(loaded) == recipe.batch_size:
            break
    if not loaded:
        raise SpeedkitError(f"workload {workload.name} has no readable item to examine")
    samples = [(workload.features(waveform), workload.target(item)) for item, waveform in loaded]
    varies = workload.length is not None
    batch = collate(samples, varies)
    files = [path for item, _ in loaded if (path := Path(getattr(item, "path", ""))).is_file()]
    parts: dict[str, Callable[[], Any]] = {
        "read": lambda: [path.read_bytes() for path in files],
        "decode": lambda: [workload.load(item) for item, _ in loaded],
        "features": lambda: [workload.features(waveform) for _, waveform in loaded],
        "collate": lambda: collate(samples, varies),
        "copy": lambda: [tensor.to(target_device) for tensor in batch],
    }
    parts_s = {part: statistics.median(timed(call, target_device, REPEATS)) for part, call in parts.items()}
    parts_s["decode"] = max(0.0, parts_s["decode"] - parts_s["read"])  # it reads the files too
    batch_s = sum(parts_s.values())
    return [
        {"part": part, "sample_s": seconds / recipe.batch_size, "share": seconds / batch_s}
        for part, seconds in parts_s.items()
    ]


def loader_costs(loader: Any) -> tuple[float, float]:
    """Return the seconds that anybody's DataLoader needs to make and to join the items of a batch, by its first ones.

    0 where its items have no numbers. The global random state is afterwards what it was before.
    """
    data: Any = getattr(loader, "dataset", None)
    join = getattr(loader, "collate_fn", None)
    if join is None or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return 0.0, 0.0
    cpu, rows = torch.device("cpu"), range(min(loader.batch_size or 1, len(data)))
    before = get_random_state(cpu)
    items = [data[row] for row in rows]
    items_s = statistics.median(timed(lambda: [data[row] for row in rows], cpu, 3))
    collate_s = statistics.median(timed(lambda: join(items), cpu, 3))
    set_random_state(before, cpu)
    return items_s, collate_s

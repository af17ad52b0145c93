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


def examine(workload: Workload, recipe: Recipe | None = None, device: str = "auto") -> dict[str, Any]:
    """Return `workload` and `parts`, rows `{part, sample_s, share}`, of a batch loaded in the training process.

    Reading is from the page cache, where the files are after the first round. Raises SpeedkitError where no item can be
    read.
    """
    recipe, place = recipe or workload.recipe, this_machine(device).device
    ways = _ways(workload, recipe, place)
    parts_s = {part: statistics.median(timed(way, place, REPEATS)) for part, way in ways.items()}
    parts_s["decode"] = max(0.0, parts_s["decode"] - parts_s["read"])  # it reads the files too
    batch_s = sum(parts_s.values())
    rows = [
        {"part": part, "sample_s": seconds / recipe.batch_size, "share": seconds / batch_s}
        for part, seconds in parts_s.items()
    ]
    return {"workload": workload.name, "parts": rows}


def _ways(workload: Workload, recipe: Recipe, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return, by part, what is timed: each does one thing to the same batch of items."""
    items, waveforms, varies = [], list[Tensor](), workload.length is not None
    for item in workload.train:
        with contextlib.suppress(BadItem):
            waveforms.append(workload.load(item))
            items.append(item)
        if len(items) == recipe.batch_size:
            break
    if not items:
        raise SpeedkitError(f"workload {workload.name} has no readable item to examine")
    samples = [(workload.features(row), workload.target(item)) for item, row in zip(items, waveforms, strict=True)]
    batch: Any = collate(samples, varies)[0]
    files = [path for item in items if (path := Path(getattr(item, "path", ""))).is_file()]
    return {
        "read": lambda: [path.read_bytes() for path in files],
        "decode": lambda: [workload.load(item) for item in items],
        "features": lambda: [workload.features(waveform) for waveform in waveforms],
        "collate": lambda: collate(samples, varies),
        "copy": lambda: [tensor.to(device) for tensor in batch],
    }


def loader_costs(loader: Any) -> tuple[float, float]:
    """Return the seconds that anybody's DataLoader needs to make and to join the items of a batch, by its first ones.

    0 where its items have no numbers. The global random state is afterwards what it was before.
    """
    data: Any = getattr(loader, "dataset", None)
    join = getattr(loader, "collate_fn", None)
    if join is None or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return 0.0, 0.0
    many = getattr(data, "__getitems__", lambda rows: [data[row] for row in rows])
    before, cpu = get_random_state(torch.device("cpu")), torch.device("cpu")
    rows = list(range(min(loader.batch_size or 1, len(data))))
    items_s = statistics.median(timed(lambda: many(rows), cpu, 3))
    items = many(rows)
    collate_s = statistics.median(timed(lambda: join(items), cpu, 3))
    set_random_state(before, cpu)
    return items_s, collate_s

"""Where the time of a batch goes, part by part, measured on one batch of items: lesson 10 shows it."""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from speedkit.clock import timed
from speedkit.data.batch import map_batch
from speedkit.data.loader import collate
from speedkit.machine import this_machine
from speedkit.recipe import Recipe
from speedkit.workload import Workload

REPEATS = 7  # rounds over one batch of items; the median counts


def examine(workload: Workload, recipe: Recipe) -> list[dict[str, Any]]:
    """Return rows `{part, sample_ms, share}`, one for each part of a batch of files made in the training process.

    Files are read from the page cache, where they are after the first round.
    """
    device, items = this_machine().device, workload.train[: recipe.batch_size]
    waveforms = [workload.load(item) for item in items]
    features = [workload.features(waveform) for waveform in waveforms]
    samples = list(zip(features, map(workload.target, items), strict=True))
    varies = workload.length is not None
    batch = collate(samples, varies)
    parts: dict[str, Callable[[], Any]] = {
        "read": lambda: [Path(item.path).read_bytes() for item in items],
        "decode": lambda: [workload.load(item) for item in items],
        "features": lambda: [workload.features(waveform) for waveform in waveforms],
        "collate": lambda: collate(samples, varies),
        "copy": lambda: map_batch(batch, functools.partial(Tensor.to, device=device)),
    }
    batch_s = {part: statistics.median(timed(call, device, REPEATS)) for part, call in parts.items()}
    batch_s["decode"] = max(0.0, batch_s["decode"] - batch_s["read"])  # it reads the files too
    whole_s = sum(batch_s.values())
    return [
        {"part": part, "sample_ms": 1e3 * part_s / len(items), "share": part_s / whole_s}
        for part, part_s in batch_s.items()
    ]

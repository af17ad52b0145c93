"""The benchmark of several ranks: how much faster they are than one, and whether they learn the same."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from speedkit.errors import SpeedkitError
from speedkit.files import read_json
from speedkit.measure.bench import Row, ends, row
from speedkit.plan import Plan
from speedkit.train.distributed import launch
from speedkit.train.loop import begin, close, steps
from speedkit.workloads import load_workload
from speedkit.workloads.workload import Workload

ASKED = 1.8  # of two ranks


def still(**options: Any) -> Workload:
    """Return `image` without random changes: each rank draws its own, so that losses would not be those of one rank."""
    return replace(load_workload("image", **options), augment=None)


def ranks(batch_size: int = 128, pairs: int = 20, window_s: float = 2.0, **image: Any) -> list[Row]:
    """Time of 2 CPU ranks over that of one, a thread each, on `image`; the same where they share nothing; losses."""
    both, apart = _measured("image", batch_size, pairs, window_s, image)["measurements"]
    found = _measured(f"{__name__}:still", batch_size, 4, 0.01, image)["losses"]
    workload = still(**image)
    whole = replace(workload.recipe, batch_size=2 * batch_size)
    run = begin(workload, whole, Plan(fused_optimizer=True, cache="ram", drop_last=True), device="cpu", endless=True)
    differ = [abs(loss / float(run.last_loss) - 1) for loss, _ in zip(found, steps(run), strict=False)]
    close(run)
    what = f"time of 2 ranks over one's, {batch_size} images per rank"
    return [
        row(what, ends(both["seconds_b"], both["seconds_a"]), 1 / ASKED, "x"),
        row(f"{what}, nothing shared", ends(apart["seconds_b"], apart["seconds_a"]), 1 / ASKED, "x"),
        row("losses against one rank's with the same batches, relative", [max(differ)], 1e-4, ""),
    ]


def _measured(workload: str, batch_size: int, pairs: int, window_s: float, image: dict[str, Any]) -> dict[str, Any]:
    """Return what two ranks with a thread each find (`scaling.measure`)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        options = {"batch-size": batch_size, "pairs": pairs, "window-s": window_s, "device": "cpu", "out": out} | image
        os.environ["OMP_NUM_THREADS"] = "1"
        command = ["speedkit.measure.scaling", workload, *(f"--{name}={value}" for name, value in options.items())]
        if code := launch(command, 2):
            raise SpeedkitError(f"two ranks could not be measured: they ended with exit code {code}")
        return read_json(out)


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {"ranks": ranks}

"""Whether comparisons tell the truth: a plan against itself, and against one whose steps are 5 % longer."""

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Iterator

import common

from speedkit.measure.compare import Comparison, compare
from speedkit.workload import Workload


def comparisons(count: int, workload: Workload, faster: Workload | None = None) -> list[Comparison]:
    """Compare a plan with itself `count` times, on `workload` and, if there is one, the `faster`."""
    plan = common.IN_MEMORY
    with tempfile.TemporaryDirectory() as folder:
        return [
            compare(workload, plan, plan, device="cpu", seed=seed, cache_dir=folder, workload_b=faster)
            for seed in range(count)
        ]


def measure(quick: bool) -> Iterator[common.Result]:
    """Count A/A comparisons that would keep a change, and those that miss a gain of 5 %."""
    null, planted = (2, 2) if quick else (100, 50)
    workload = common.perceptron(*common.LARGE)
    same = comparisons(null, workload)
    kept = sum(one.faster for one in same)
    yield common.median_of(f"kept of {null} A/A comparisons", [kept], limit=0.02 * null, unit="")
    step_s = statistics.median(min(one.step_s) for one in same)
    slower_loss = functools.partial(common.perceptron_loss, wait_s=0.05 * step_s)
    slower = dataclasses.replace(workload, loss=slower_loss)
    missed = sum(not one.faster for one in comparisons(planted, slower, workload))
    yield common.median_of(f"planted 5 % missed, of {planted}", [missed], limit=0.1 * planted, unit="")


if __name__ == "__main__":
    common.main(measure)

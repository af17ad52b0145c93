"""Whether comparisons tell the truth: a plan against itself, and against one whose steps are 5 % longer."""

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Iterator

import common

from speedkit.measure.compare import Comparison, compare
from speedkit.workloads.workload import Workload


def comparisons(count: int, pairs: int, workload: Workload, other: Workload | None = None) -> Iterator[Comparison]:
    """Compare a plan with itself `count` times, on `workload` and, where it is given, on the `other` one."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(count):
            yield compare(
                workload,
                common.IN_MEMORY,
                common.IN_MEMORY,
                device="cpu",
                pairs=pairs,
                seed=seed,
                cache_dir=folder,
                workload_b=other,
            )


def measure(quick: bool) -> Iterator[common.Result]:
    """Count A/A comparisons that find a difference (99 % intervals), and those that miss a slowdown by 5 %."""
    count, pairs = (2, 6) if quick else (100, 120)
    workload = common.perceptron(*common.SMALL)
    false = sum(not one.low <= 1 <= one.high for one in comparisons(count, pairs, workload))
    yield common.median_of(f"A/A intervals without 1.0, of {count}", [false], 0.05 * count, "")

    step_s = statistics.median(min(one.step_s) for one in comparisons(3, 6, workload))
    slower_loss = functools.partial(common.perceptron_loss, wait_s=0.05 * step_s)
    slower = dataclasses.replace(workload, loss=slower_loss)
    missed = sum(one.high >= 1 for one in comparisons(count, pairs, workload, slower))
    yield common.median_of(f"planted 5 % missed, of {count}", [missed], 0.1 * count, "")


if __name__ == "__main__":
    common.main(measure)

"""What the benchmarks share: the job that is timed, how a run is driven, and a line per limit.

Each script measures what one limit is about and ends with exit code 1 when it is missed. `--quick` makes it short: then
its figures mean nothing. Figures of a whole run mean something on a quiet machine only.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from speedkit.clock import Stopwatch
from speedkit.measure.stats import paired_interval
from speedkit.measure.turns import measure_pairs
from speedkit.measure.warm_up import run_until_steady
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.setup import setup_run
from speedkit.workload import Batch, Workload

# Features, hidden units, batch size: steps of about 0.4 ms, 1 ms, and well over 10 ms that no cache's size decides.
SMALL, MIDDLE, LARGE = (64, 64, 64), (256, 256, 256), (256, 512, 2048)
ITEMS, CLASSES = 8192, 10
NEVER = 200_000  # steps; no benchmark gets that far
WINDOW = 10  # steps: short windows meet a burst of the machine's noise on both sides, and hold one log point each
IN_MEMORY = Plan(cache="ram", validate_every=0)


@dataclasses.dataclass(frozen=True)
class Result:
    """A figure with its range, and the limit that it must not exceed, or with `at_least` must reach."""

    what: str
    measured: float
    low: float
    high: float
    limit: float
    unit: str = "x"
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        figure = f"{self.measured:.4g}{self.unit} ({self.low:.4g} to {self.high:.4g})"
        limit = f"limit {'at least ' * self.at_least}{self.limit:g}{self.unit}"
        return f"{self.what}: {figure}, {limit}: {'met' if self.met else 'missed'}"


def main(measure: Callable[[bool], Iterable[Result]]) -> NoReturn:
    """Print the results of `measure(quick)` as they come; exit with 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; the figures mean nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    all_met = True
    for result in measure(quick):
        print(result, flush=True)
        all_met = all_met and result.met
    sys.exit(0 if all_met else 1)


def median_of(what: str, values: Sequence[float], **limit: Any) -> Result:
    """Return the result of several measurements of one figure: their median, and the smallest and the largest."""
    return Result(what, statistics.median(values), min(values), max(values), **limit)


def in_fresh_process(code: str, *arguments: str) -> str:
    """Return what `code` prints in a Python of its own, on one thread, in the folder of the benchmarks."""
    command, folder = [sys.executable, "-c", code, *arguments], Path(__file__).parent
    return subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder, text=True)


def ratio_of(what: str, ours: Sequence[float], others: Sequence[float], *, limit: float) -> Result:
    """Return the result of paired measurements: the ratio of ours to the others, with its 99 % interval."""
    interval = paired_interval(ours, others)
    return Result(what, interval.ratio, interval.low, interval.high, limit)


@contextlib.contextmanager
def training(workload: Workload, plan: Plan, **options: Any) -> Iterator[tuple[Any, Iterator[int]]]:
    """Yield a run on the CPU, set up and closed here, and the iterator that makes its steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = setup_run(workload, plan=plan, device="cpu", cache_dir=folder, **options)
        try:
            yield run, steps(run)
        finally:
            run.close()


def windows_in_turns(sides: dict[str, Iterator[Any]], pairs: int, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of windows of `count` steps of two loops that take turns, after each has become steady."""
    for steps_of_side in sides.values():  # for longer where more is measured: a quick run does not wait for quiet
        run_until_steady(functools.partial(next, steps_of_side), "cpu", max_s=min(5.0, pairs / 10))

    stopwatch = Stopwatch("cpu")

    def window(steps_of_side: Iterator[Any], steps: int) -> float:
        stopwatch.start()
        for _ in range(count * steps):
            next(steps_of_side)
        return stopwatch.stop()

    ours, others = (functools.partial(window, side) for side in sides.values())
    taken = measure_pairs(ours, others, pairs=pairs, rng=random.Random(0), looks=())
    return taken.seconds_a, taken.seconds_b


# ---- the job: a perceptron on random numbers ----


def perceptron(size: int, hidden: int, batch_size: int, **recipe: Any) -> Workload:
    """Return the job as a workload; `size` features, AdamW."""
    return Workload(
        f"perceptron-{size}",
        Recipe(**({"batch_size": batch_size, "epochs": None, "steps": NEVER} | recipe)),
        range(ITEMS),
        range(ITEMS, ITEMS + batch_size),
        functools.partial(random_numbers, size=size),
        features=Tensor.contiguous,  # nothing to do
        target=lambda item: item % CLASSES,
        model=lambda: perceptron_model(size, hidden),
        loss=perceptron_loss,
        score=lambda outputs, batch: (outputs.argmax(-1) == batch.targets).float(),
        parameters={"size": size},
    )


def perceptron_model(size: int, hidden: int) -> nn.Module:
    """Return a perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def perceptron_loss(model: nn.Module, batch: Batch, recipe: Recipe, *, wait_s: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and outputs, after `wait_s` seconds of a slowdown that a comparison has to find."""
    until_s = time.perf_counter() + wait_s
    while time.perf_counter() < until_s:
        pass
    outputs = model(batch.inputs)
    return nn.functional.cross_entropy(outputs, batch.targets), outputs


def random_numbers(item: int, size: int) -> Tensor:
    """Return random numbers [size] that are the item's own."""
    return torch.randn(size, generator=torch.Generator().manual_seed(item))


def own_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Iterator[None]:
    """Train on pairs by the loop that everybody writes, epoch after epoch; yield after each step."""
    while True:
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            yield

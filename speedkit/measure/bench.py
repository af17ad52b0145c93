"""The benchmarks: what speedkit itself costs, and whether its comparisons tell the truth.

Each returns rows `{what, measured, low, high, limit, unit, passed}`. Figures mean something on a quiet machine only.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedkit.clock import run_until_steady, timed
from speedkit.measure.compare import Comparison, compare
from speedkit.measure.stats import paired_interval
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import begin, close, fit, steps
from speedkit.workloads.workload import Batch, Workload

Row = dict[str, Any]
# Features, hidden units, batch size: steps of about 0.4 ms, and of well over 10 ms that a cache's size does not decide.
SMALL, LARGE = (64, 64, 64), (256, 512, 2048)
ITEMS, CLASSES = 8192, 10
LONG = 200_000  # steps; no benchmark gets that far
WINDOW = 10  # steps: short windows meet a burst of the machine's noise on both sides, and hold one log point each
CACHED = Plan(cache="ram", validate_every=0)


def bare_loop(inputs, targets, hidden, classes, batch_size):
    """Train forever: shuffle, gather, zero_grad, forward, cross-entropy, backward, step; yield after each step.

    `inputs [N, F]` and `targets [N]` are in memory. Its source is also run on its own, so it needs torch alone.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(inputs.shape[1], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    while True:
        for chosen in torch.randperm(len(inputs)).split(batch_size):
            batch_inputs, batch_targets = inputs[chosen], targets[chosen]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch_inputs), batch_targets).backward()
            optimizer.step()
            yield


def _load(item: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(item))


def _loss(model: nn.Module, batch: Batch, recipe: Recipe, wait_s: float = 0.0) -> tuple[Tensor, Tensor]:
    until_s = time.perf_counter() + wait_s
    while time.perf_counter() < until_s:
        pass
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]), outputs


def perceptron(size: int, hidden: int, batch_size: int, **recipe: Any) -> Workload:
    """Return the workload of `bare_loop`: a perceptron with one hidden layer on random numbers, AdamW."""
    return Workload(
        f"perceptron-{size}", Recipe(**({"batch_size": batch_size, "epochs": None, "steps": LONG} | recipe)),
        range(ITEMS), range(ITEMS, ITEMS + batch_size), functools.partial(_load, size=size),
        features=lambda waveform: waveform, target=lambda item: item % CLASSES,
        model=lambda: nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)), loss=_loss,
        score=lambda outputs, batch: (outputs.argmax(-1) == batch[1]).float(),
        parameters={"size": size}, sources=(_load,),
    )  # fmt: skip


class _Terminal(io.StringIO):
    """What a bar takes for a terminal. Writing to a real one, ten times a second, would cost as good as nothing."""

    def isatty(self) -> bool:
        return True


def loop(instances: int = 5, pairs: int = 60, seed: int = 0) -> list[Row]:
    """Time of `fit`'s loop over that of `bare_loop` with the same data in memory and optimizer settings, one thread.

    The interval is that of the mean over fresh `instances` of both: where memory happens to lie moves a ratio too.
    """
    torch.set_num_threads(1)
    rows = []
    cases: tuple[tuple[str, tuple[int, int, int], Plan, dict[str, Any], bool, float], ...] = (
        ("every option off", SMALL, dataclasses.replace(CACHED, log_every=LONG), {"schedule": "constant"}, False, 1.05),
        ("defaults: bar, loss, accuracy", SMALL, CACHED, {}, True, 1.10),
        ("defaults, 10 ms or more", LARGE, CACHED, {}, True, 1.01),
    )
    for what, sizes, plan, recipe, show, limit in cases:
        rng, ours, bare = random.Random(seed), [], []
        for _ in range(instances):
            seconds_ours, seconds_bare = _in_turns(sizes, recipe, plan, show, pairs, rng)
            ours.append(statistics.geometric_mean(seconds_ours))
            bare.append(statistics.geometric_mean(seconds_bare))
        found, step_ms = paired_interval(ours, bare), statistics.median(bare) / WINDOW * 1e3
        what = f"loop, {what} (bare step {step_ms:.2f} ms)"
        rows.append(_row(what, found.ratio, found.low, found.high, limit, "x"))
    return rows


def _in_turns(
    sizes: tuple[int, int, int], recipe: dict[str, Any], plan: Plan, show: bool, pairs: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Return the seconds of `pairs` windows of the loop of `fit`, and of as many of `bare_loop` in between."""
    with contextlib.redirect_stderr(_Terminal()), tempfile.TemporaryDirectory() as folder:
        run = begin(perceptron(*sizes, **recipe), plan=plan, device="cpu", cache_dir=folder, progress=show)
        inputs, targets = run.batches.cache.gather(torch.arange(ITEMS), run.device)  # type: ignore[union-attr]
        sides = (steps(run), bare_loop(inputs, targets, sizes[1], CLASSES, sizes[2]))
        for side in sides:
            run_until_steady(functools.partial(next, side), "cpu", max_s=5)
        seconds: tuple[list[float], list[float]] = ([], [])
        for first in rng.choices((0, 1), k=(pairs + 1) // 2):  # blocks A B B A or B A A B
            for side_index in (first, 1 - first, 1 - first, first):
                window = functools.partial(list[Any], itertools.islice(sides[side_index], WINDOW))
                seconds[side_index].extend(timed(window, "cpu", repeats=1, warmup=0))
        close(run)
    return seconds


def importing(repeats: int = 10) -> list[Row]:
    """Seconds that importing speedkit takes in a fresh process that has already imported torch."""
    rows = []
    for what, limit in (("import speedkit", 0.3), ("from speedkit import fit", None)):
        code = f"import time, torch; began_s = time.perf_counter(); {what}; print(time.perf_counter() - began_s)"
        seconds = [_number_from(code) for _ in range(repeats)]
        rows.append(_row(f"{what}, after torch", statistics.median(seconds), min(seconds), max(seconds), limit, "s"))
    return rows


def memory(pairs: int = 6, count: int = 50) -> list[Row]:
    """Peak resident memory of a process that calls `fit` over that of one that runs `bare_loop`, `count` steps each."""
    with tempfile.TemporaryDirectory() as folder:
        train(1, folder)  # builds the cache, so that the processes measured only read it
        path = Path(folder) / "inputs.npy"
        np.save(path, torch.stack([_load(item, LARGE[0]) for item in range(ITEMS)]).numpy())
        ours = f"from speedkit.measure import bench; bench.train({count}, {folder!r})"
        bare = "\n".join([
            "import itertools, numpy, torch", inspect.getsource(bare_loop),
            f"inputs = torch.from_numpy(numpy.load({str(path)!r}))", f"targets = torch.arange(len(inputs)) % {CLASSES}",
            f"steps = bare_loop(inputs, targets, {LARGE[1]}, {CLASSES}, {LARGE[2]})",
            f"for _ in itertools.islice(steps, {count}): pass",
        ])  # fmt: skip
        peak = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        peaks = [[_number_from(f"{code}\n{peak}") for code in (ours, bare)] for _ in range(pairs)]
    ours_peaks, bare_peaks = zip(*peaks, strict=True)
    found, megabytes = paired_interval(ours_peaks, bare_peaks), statistics.median(bare_peaks) * 1024 / 1e6
    return [_row(f"peak memory (bare loop {megabytes:.0f} MB)", found.ratio, found.low, found.high, 1.05, "x")]


def train(count: int, cache_dir: str) -> None:
    """Call `fit` for `count` steps of the larger perceptron from a cache in memory."""
    fit(perceptron(*LARGE, steps=count), plan=CACHED, device="cpu", progress=False, cache_dir=cache_dir)


def same(count: int = 100, pairs: int = 120, window_s: float = 0.005) -> list[Row]:
    """A/A test: how many of `count` comparisons of a plan with itself call it faster or slower (99 % intervals)."""
    found = _comparisons(count, pairs, window_s, perceptron(*SMALL))
    wrong = [not one.low <= 1 <= one.high for one in found]
    return [_count_row(f"A/A intervals without 1.0, of {count}", wrong, 0.05)]


def planted(count: int = 100, pairs: int = 120, window_s: float = 0.005, share: float = 0.05) -> list[Row]:
    """How many of `count` comparisons find a slowdown by `share` of a step, planted in the loss of side B."""
    workload = perceptron(*SMALL)
    step_s = statistics.median(min(one.step_s) for one in _comparisons(3, 6, window_s, workload))
    slower = dataclasses.replace(workload, loss=functools.partial(_loss, wait_s=share * step_s))
    hits = [one.high < 1 for one in _comparisons(count, pairs, window_s, workload, slower)]
    row = _count_row(f"planted {share:.0%} found, of {count}", hits, 0.9)
    return [row | {"passed": row["measured"] >= row["limit"]}]


def _comparisons(count: int, pairs: int, window_s: float, workload: Workload, other: Any = None) -> list[Comparison]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return [compare(workload, CACHED, CACHED, device="cpu", pairs=pairs, window_s=window_s, seed=seed,
                        cache_dir=folder, workload_b=other) for seed in range(count)]  # fmt: skip


def _count_row(what: str, hits: list[bool], share: float) -> Row:
    """Return the row of how many `hits` there are, with its 95 % interval (Clopper and Pearson 1934)."""
    from scipy.stats import binomtest

    found, count = binomtest(sum(hits), len(hits)).proportion_ci(), len(hits)
    return _row(what, sum(hits), float(found.low) * count, float(found.high) * count, share * count, "")


def _row(what: str, measured: float, low: float, high: float, limit: float | None, unit: str) -> Row:
    """Return a row of a benchmark that passes when it measures no more than `limit`."""
    return {"what": what, "measured": measured, "low": low, "high": high, "limit": limit, "unit": unit,
            "passed": limit is None or measured <= limit}  # fmt: skip


def line(row: Row) -> str:
    """Return a row as a line of text."""
    verdict = "passed" if row["passed"] else "FAILED"
    limit = "no limit" if row["limit"] is None else f"limit {row['limit']:g} {verdict}"
    return "{what}: {measured:.4g} {unit} ({low:.4g} to {high:.4g}), ".format(**row) + limit


def _number_from(code: str) -> float:
    """Return the number that a fresh Python process with one thread prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return float(subprocess.check_output([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE))


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "loop": loop, "import": importing, "memory": memory, "aa": same, "planted": planted,
}  # fmt: skip

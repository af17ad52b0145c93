"""The benchmarks: what speedkit itself costs, and whether its comparisons tell the truth.

Each returns rows `{what, measured, low, high, limit, unit, passed}`. Figures mean something on a quiet machine only.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedkit.clock import run_until_steady
from speedkit.measure.compare import Comparison, compare
from speedkit.measure.stats import paired_interval
from speedkit.measure.turns import in_turns
from speedkit.measure.watch import watch
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train import checkpoint
from speedkit.train.loop import begin, close, steps
from speedkit.workloads.workload import Batch, Workload

Row = dict[str, Any]
# Features, hidden units, batch size: steps of about 0.4 ms, 1 ms, and well over 10 ms that no cache's size decides.
SMALL, MIDDLE, LARGE = (64, 64, 64), (256, 256, 256), (256, 512, 2048)
ITEMS, CLASSES = 8192, 10
LONG = 200_000  # steps; no benchmark gets that far
WINDOW = 10  # steps: short windows meet a burst of the machine's noise on both sides, and hold one log point each
CACHED = Plan(cache="ram", validate_every=0)


def bare_loop(inputs, targets, hidden, classes, batch_size):
    """Train forever: shuffle, gather, zero_grad, forward, cross-entropy, backward, step; yield after each step.

    `inputs [N, F]` and `targets [N]` are in memory. Its source is also run on its own, so it needs torch alone.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    while True:
        for chosen in torch.randperm(len(inputs)).split(batch_size):
            batch_inputs, batch_targets = inputs[chosen], targets[chosen]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch_inputs), batch_targets).backward()
            optimizer.step()
            yield


def perceptron(size: int, hidden: int, batch_size: int, **recipe: Any) -> Workload:
    """Return the workload of `bare_loop`: a perceptron with one hidden layer on random numbers, AdamW."""
    return Workload(
        f"perceptron-{size}",
        Recipe(**({"batch_size": batch_size, "epochs": None, "steps": LONG} | recipe)),
        range(ITEMS),
        range(ITEMS, ITEMS + batch_size),
        functools.partial(_load, size=size),
        features=lambda waveform: waveform,
        target=lambda item: item % CLASSES,
        model=lambda: nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)),
        loss=_loss,
        score=lambda outputs, batch: (outputs.argmax(-1) == batch[1]).float(),
        parameters={"size": size},
        sources=(_load,),
    )


def _load(item: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(item))


def _loss(model: nn.Module, batch: Batch, recipe: Recipe, wait_s: float = 0.0) -> tuple[Tensor, Tensor]:
    until_s = time.perf_counter() + wait_s
    while time.perf_counter() < until_s:
        pass
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]), outputs


def loop(instances: int = 5, pairs: int = 60) -> list[Row]:
    """Time of `fit`'s loop over that of `bare_loop` with the same data in memory and optimizer settings, one thread.

    The interval is that of the mean over fresh `instances` of both: where memory happens to lie moves a ratio too.
    """
    torch.set_num_threads(1)
    rows = []
    for what, sizes, off, limit in (
        ("every option off", SMALL, True, 1.05),
        ("defaults: bar, loss, accuracy", SMALL, False, 1.10),
        ("defaults, 10 ms or more", LARGE, False, 1.01),
    ):
        ours_s, bare_s = zip(*(_step_s(sizes, off, pairs) for _ in range(instances)), strict=True)
        what = f"loop, {what} (bare step {statistics.median(bare_s) * 1e3:.2f} ms)"
        rows.append(row(what, ends(ours_s, bare_s), limit, "x"))
    return rows


def _step_s(sizes: tuple[int, int, int], off: bool, pairs: int) -> list[float]:
    """Return the seconds of a step of `fit`'s loop and of `bare_loop`: geometric means over windows in turns."""
    workload = perceptron(*sizes, schedule="constant" if off else "onecycle")
    plan = dataclasses.replace(CACHED, log_every=LONG) if off else CACHED
    terminal = io.StringIO()  # writing to a real one, ten times a second, would cost as good as nothing
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with contextlib.redirect_stderr(terminal), tempfile.TemporaryDirectory() as folder:
        run = begin(workload, plan=plan, device="cpu", cache_dir=folder, progress=not off)
        inputs, targets = run.batches.cache.gather(torch.arange(ITEMS), run.device)  # type: ignore[union-attr]
        sides = (steps(run), bare_loop(inputs, targets, sizes[1], CLASSES, sizes[2]))
        for side in sides:
            run_until_steady(functools.partial(next, side), "cpu", max_s=5)
        ours, bare = (lambda side=side: list(itertools.islice(side, WINDOW)) for side in sides)
        found = in_turns("", {"ours": ours, "bare": bare}, pairs)
        close(run)
    return [statistics.geometric_mean(found[seconds]) / WINDOW for seconds in ("seconds_a", "seconds_b")]


def panel(pairs: int = 40, count: int = 500) -> list[Row]:
    """Time of `fit`'s loop with the live panel over that with plain lines, in a kernel whose messages are read."""
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    code = f"from speedkit.measure.bench import panel_ratio; print(*panel_ratio({pairs}, {count}))"
    notebook = new_notebook(cells=[new_code_cell(code)])
    NotebookClient(notebook, timeout=600).execute()
    printed = [output.text for output in notebook.cells[0].outputs if output.output_type == "stream"]
    return [row(f"live panel, a log point every {WINDOW} steps", [*map(float, printed[-1].split())], 1.01, "x")]


def panel_ratio(pairs: int, count: int) -> tuple[float, float, float]:
    """Return low end, middle and high end of the ratio, from windows of `count` steps; to be called in a kernel."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[], Any]] = {}
        for side, progress in (("panel", "panel"), ("lines", True)):
            run = begin(perceptron(*SMALL), plan=CACHED, device="cpu", cache_dir=folder, progress=progress)
            stack.callback(close, run)
            run.progress.follow(run.batches)
            sides[side] = functools.partial(lambda training: list(itertools.islice(training, count)), steps(run))
        found = in_turns("", sides, pairs)
    return ends(found["seconds_a"], found["seconds_b"])


def watching(pairs: int = 100) -> list[Row]:
    """Time of somebody's own loop under `watch`, after its closer look, over that of the same loop left alone."""
    torch.set_num_threads(1)
    rows = []
    for features, hidden, batch_size in (MIDDLE, LARGE):
        batches = [(torch.randn(batch_size, features), torch.arange(batch_size) % CLASSES) for _ in range(20)]
        (model, optimizer), other = (_learner(features, hidden) for _ in range(2))
        with watch(model, optimizer, batches, show=False) as seen:
            loops = {"watched": _own_loop(model, optimizer, seen.loader), "alone": _own_loop(*other, batches)}
            for each in loops.values():
                collections.deque(itertools.islice(each, 60), 0)  # past the closer look
            sides: dict[str, Callable[[], Any]] = {name: functools.partial(_window, one) for name, one in loops.items()}
            found = in_turns("", sides, pairs)
        alone_s = statistics.median(found["seconds_b"]) / WINDOW
        ratio = ends(found["seconds_a"], found["seconds_b"])
        what = f"watch, of a step of {alone_s * 1e3:.2f} ms ({(ratio[1] - 1) * alone_s * 1e6:.0f} us)"
        rows.append(row(what, ratio, 1.02, "x"))
    return rows


def _learner(features: int, hidden: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    return model, torch.optim.AdamW(model.parameters())


def _window(loop: Iterator[None]) -> list[None]:
    return list(itertools.islice(loop, WINDOW))


def _own_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Iterator[None]:
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            yield


def importing(repeats: int = 10) -> list[Row]:
    """Seconds that importing speedkit takes in a fresh process that has already imported torch."""
    code = "import time, torch; began_s = time.perf_counter(); import speedkit; print(time.perf_counter() - began_s)"
    seconds = [number_from(code) for _ in range(repeats)]
    return [row("import speedkit, after torch", seconds, 0.3, "s")]


def memory(pairs: int = 6, count: int = 50) -> list[Row]:
    """Peak resident memory of a process that calls `fit` over that of one that runs `bare_loop`, `count` steps each."""
    peak = "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    bare = f"""import itertools, torch\nfrom torch import nn\n{inspect.getsource(bare_loop)}
inputs, targets = torch.randn({ITEMS}, {LARGE[0]}), torch.arange({ITEMS}) % {CLASSES}
for _ in itertools.islice(bare_loop(inputs, targets, {LARGE[1]}, {CLASSES}, {LARGE[2]}), {count}): pass"""
    with tempfile.TemporaryDirectory() as folder:
        ours = f"""from speedkit import fit; from speedkit.measure.bench import CACHED, LARGE, perceptron
fit(perceptron(*LARGE, steps={count}), plan=CACHED, device="cpu", progress=False, cache_dir={folder!r})"""
        number_from(ours + peak)  # builds the cache, so that the processes measured only read it
        peaks = [(number_from(ours + peak), number_from(bare + peak)) for _ in range(pairs)]
    ours_kb, bare_kb = zip(*peaks, strict=True)
    what = f"peak memory (bare loop {statistics.median(bare_kb) * 1024 / 1e6:.0f} MB)"
    return [row(what, ends(ours_kb, bare_kb), 1.05, "x")]


def checkpointing(saves: int = 5) -> list[Row]:
    """Seconds that training stands still for a checkpoint of 1 GB: weights and two averages of each."""
    workload = perceptron(4096, 20_480, 8)
    with tempfile.TemporaryDirectory() as folder:
        run = begin(workload, plan=Plan(validate_every=0), device="cpu", out=Path(folder, "run"), progress=False)
        stood_s = []
        for _ in itertools.islice(steps(run), saves):
            began_s = time.perf_counter()
            checkpoint.save(run)
            stood_s.append(time.perf_counter() - began_s)
            run.keeper.wait()  # type: ignore[union-attr]  # two in a row would wait for each other
        gigabytes = (Path(folder, "run", checkpoint.NAME)).stat().st_size / 1e9
        close(run)
    return [row(f"standing still for a checkpoint of {gigabytes:.2f} GB", stood_s, 0.2, "s")]


def same(count: int = 100, pairs: int = 120) -> list[Row]:
    """A/A test: how many of `count` comparisons of a plan with itself call it faster or slower (99 % intervals)."""
    wrong = [not one.low <= 1 <= one.high for one in _comparisons(count, pairs, perceptron(*SMALL))]
    return [row(f"A/A intervals without 1.0, of {count}", [sum(wrong)], 0.05 * count, "")]


def planted(count: int = 100, pairs: int = 120) -> list[Row]:
    """How many of `count` comparisons miss a slowdown by 5 % of a step, planted in the loss of side B."""
    workload = perceptron(*SMALL)
    step_s = statistics.median(min(one.step_s) for one in _comparisons(3, 6, workload))
    slower = dataclasses.replace(workload, loss=functools.partial(_loss, wait_s=0.05 * step_s))
    missed = [one.high >= 1 for one in _comparisons(count, pairs, workload, slower)]
    return [row(f"planted 5 % missed, of {count}", [sum(missed)], 0.1 * count, "")]


def _comparisons(count: int, pairs: int, workload: Workload, other: Any = None) -> list[Comparison]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return [
            compare(
                workload,
                CACHED,
                CACHED,
                device="cpu",
                pairs=pairs,
                window_s=0.005,
                seed=seed,
                cache_dir=folder,
                workload_b=other,
            )
            for seed in range(count)
        ]


def ends(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the low end, the middle and the high end of the paired ratio of ours to others."""
    found = paired_interval(ours, others)
    return found.low, found.ratio, found.high


def row(what: str, measured: Sequence[float], limit: float, unit: str) -> Row:
    """Return the row of a benchmark that passes when the median of what it `measured` is no more than `limit`."""
    middle = statistics.median(measured)
    return {
        "what": what,
        "measured": middle,
        "low": min(measured),
        "high": max(measured),
        "limit": limit,
        "unit": unit,
        "passed": middle <= limit,
    }


def line(found: Row) -> str:
    """Return a row as a line of text."""
    verdict = "passed" if found["passed"] else "FAILED"
    return "{what}: {measured:.4g} {unit} ({low:.4g} to {high:.4g}), limit {limit:g} ".format(**found) + verdict


def number_from(code: str) -> float:
    """Return the number that a fresh Python process with one thread prints."""
    return float(subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}))


BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "loop": loop,
    "import": importing,
    "memory": memory,
    "checkpoint": checkpointing,
    "aa": same,
    "planted": planted,
    "panel": panel,
    "watch": watching,
}

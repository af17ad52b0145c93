"""The ledger: where the time of training steps goes, in rows that add up to what the steps take unprofiled."""

import collections
import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from speedkit.ceilings import ceilings
from speedkit.clock import Stopwatch, compilations, run_until_steady
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.measure.classify import CAUSES, UNEXPLAINED, busy_of, gaps_of, length, union
from speedkit.measure.syncs import Sync, audit
from speedkit.measure.timeline import (
    BACKWARD,
    COMPILATION,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    Timeline,
    reading_cost_s,
    replaced,
    timing,
)
from speedkit.measure.trace import Profile, Trace
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.run import TrainingRun
from speedkit.train.setup import setup_run

PAIRS = 50  # of windows, one timed and one left alone, by which the timers' own cost is known
PROFILED = 8  # steps that the profiler sees on a GPU
AUDITED = 2  # steps in which what makes the host wait is looked for


@dataclasses.dataclass
class Ledger:
    """Where the wall time of `steps` training steps goes.

    `rows` are `{cause, seconds, share, ceiling_speedup}` in the order of CAUSES; shares add up to 1, seconds to
    `window_s`. Timers and profilers slow what they see: `unexplained` is below 0 where more than that was taken off.
    """

    device: str
    window_s: float  # that the steps take with nothing around them
    steps: int
    step_s: float
    rows: list[dict[str, Any]]
    slow_down: float  # steps as they were measured / steps left alone
    busy_share: float | None = None  # of a GPU: the union of its kernels and copies; None on a CPU
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # what else the diagnosis reads: see `facts_of`

    def as_dict(self) -> dict[str, Any]:
        """Return what `ledger.json` holds of it."""
        return {key: value for key, value in vars(self).items() if key != "facts"}

    def share(self, cause: str) -> float:
        """Return the share of the wall time that goes to a cause."""
        return sum(row["share"] for row in self.rows if row["cause"] == cause)

    def __str__(self) -> str:
        busy = "" if self.busy_share is None else f", busy {self.busy_share:.1%} of the time"
        lines = [
            f"{self.steps} steps of {1e3 * self.step_s:.4g} ms ({self.device}{busy}; measuring slowed them by "
            f"{self.slow_down - 1:.1%}), in ms per step:"
        ]
        line = "  {cause:<26}{0:>10.4g} {share:>7.1%}   {ceiling_speedup:.2f} times as fast without".format
        return "\n".join([*lines, *(line(1e3 * row["seconds"] / max(1, self.steps), **row) for row in self.rows)])


def ledger(
    device: Any, seconds: Mapping[str, float], window_s: float, steps: int, slow_down: float, **more: Any
) -> Ledger:
    """Return the ledger of `steps` steps that take `window_s`, of which `seconds` are known by cause."""
    known, rows = dict(seconds) | {UNEXPLAINED: window_s - sum(seconds.values())}, []
    for cause in CAUSES:
        if known.get(cause) or cause == UNEXPLAINED:
            share = known[cause] / (window_s or 1.0)
            most = 1 / max(1 - max(share, 0.0), 1e-3)
            rows.append({"cause": cause, "seconds": known[cause], "share": share, "ceiling_speedup": most})
    return Ledger(str(device), window_s, steps, window_s / max(1, steps), rows, slow_down, **more)


def unprofiled(
    trace: Trace, rate: Mapping[str, float], count: int, host: Mapping[str, float], steps: int, window_s: float
) -> tuple[dict[str, float], float, float]:
    """Return the seconds of `steps` steps by cause, how much the profiler slowed them, and the device's busy share.

    `trace` is of `count` other steps, slowed; without it the steps took `window_s` and the `host` its seconds by part.
    Busy time is as profiled; evaluation and compilation are the host's; waiting for data shrinks as much as the
    loader's `next()` does, and all other gaps share what is left.
    """
    scale = steps / count
    busy, gaps = (
        {cause: seconds * scale for cause, seconds in found.items()} for found in (busy_of(trace, rate), gaps_of(trace))
    )
    found = collections.defaultdict[str, float](float, busy)
    for cause in (EVALUATION, COMPILATION):
        found[cause] = host.get(cause, 0.0)
        gaps.pop(cause, None)
    if waited_s := gaps.pop(DATA, 0.0):
        profiled_s = scale * length(union(span for span in trace.parts if span.name == DATA))
        found[DATA] += waited_s * min(1.0, host.get(DATA, profiled_s) / profiled_s)
    left_s, gaps_s = window_s - sum(found.values()), sum(gaps.values())
    for cause, seconds in gaps.items():
        found[cause] += seconds * max(0.0, min(1.0, left_s / gaps_s))
    return dict(found), scale * trace.end_s / window_s, min(1.0, sum(busy.values()) / window_s)


def facts_of(
    step_s: float,
    host: Mapping[str, float],
    count: int,
    traced: Trace | None,
    traced_steps: int,
    syncs: Iterable[Sync],
    **more: Any,
) -> dict[str, Any]:
    """Return what the diagnosis reads beside the rows.

    Per step: `step_s`, the host's `data_s`, `forward_s`, `backward_s`, `optimizer_s`, `evaluation_s`;
    `operators_per_step` that the loop called, `kernels_per_step`, `copies_bytes` to the device (`pinned`: all of them
    from page-locked memory), `uncounted` operators, and `syncs`, `{file, line, code, count, seconds}` each, the most
    expensive first. In the window: `recompiles`, `evaluations`, `shapes_seen`.
    """
    found = {
        f"{cause.split()[0]}_s": host.get(cause, 0.0) / max(1, count)
        for cause in (DATA, FORWARD, BACKWARD, OPTIMIZER, EVALUATION)
    } | {"step_s": step_s}
    waits = [
        dataclasses.asdict(sync) | {"count": sync.count / AUDITED, "seconds": sync.seconds / AUDITED} for sync in syncs
    ]
    if traced is not None:
        more |= {
            "operators_per_step": traced.operators / traced_steps,
            "kernels_per_step": sum(work.kind == "kernel" for work in traced.work) / traced_steps,
            "copies_bytes": traced.copied_bytes / traced_steps,
            "uncounted": list(traced.uncounted),
            "pinned": not traced.pageable_bytes if traced.copied_bytes else None,
        }
    return found | {"syncs": waits} | more


def rates(device: torch.device) -> dict[str, float]:
    """Return the measured ceilings of this machine by name, as `classify` takes them."""
    return {name: ceiling.value for name, ceiling in ceilings(this_machine(device)).items()}


def ledger_of(
    workload: Any,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str | torch.device = "auto",
    cache_dir: str | Path | None = None,
    window_s: float = 1.0,
    evaluate: bool = False,
) -> Ledger:
    """Train `workload` for about 2 * `window_s` after a warm-up; return where the time goes.

    On a CPU forward is the loss with what it calls. With `evaluate`, evaluation and checkpoint are in it at the rate
    at which a training makes them. Raises SpeedkitError, in a sentence, for a workload that cannot be trained.
    """

    def model() -> torch.nn.Module:
        made = workload.model()
        if not any(parameter.requires_grad for parameter in made.parameters()):
            raise UsageError(f"the model of {workload.name} has no trainable parameter: set requires_grad on some")
        return made

    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run") if evaluate else None
        run = setup_run(
            dataclasses.replace(workload, model=model),
            recipe,
            plan,
            device=device,
            cache_dir=cache_dir,
            progress=False,
            out=out,
            endless=not evaluate,
        )
        stack.callback(run.close)
        every, course = run.evaluate_every or len(run.learning_rates), steps(run)
        run.total_steps, run.evaluate_every = None, 0
        try:
            for _ in range(1 + 2 * int(run.plan.workers) * run.plan.prefetch_factor):
                next(course)  # on batches that the loader had ready
            step_s = run_until_steady(lambda: next(course), run.device, max_s=max(2.0, window_s)).step_s
            measure = _on_device if run.device.type == "cuda" else _on_host
            found = measure(run, course, Timeline(reading_cost_s()), window_s, step_s)
            return _with_evaluation(found, run, course, every) if evaluate else found
        except SpeedkitError:
            raise
        except Exception as error:
            raise SpeedkitError(
                f"{workload.name} failed in step {run.step + 1}: {type(error).__name__}: {error}; its loss has to give "
                "the mean over the batch, a tensor of one number that depends on the weights, and the outputs"
            ) from error


@contextlib.contextmanager
def _timed(run: TrainingRun, timeline: Timeline) -> Iterator[None]:
    with (
        replaced(run, fetch=timeline.of(DATA, run.fetch), loss=timeline.of(FORWARD, run.loss)),
        replaced(run.optimizer, step=timeline.of(OPTIMIZER, run.optimizer.step)),
        timing(timeline),
    ):
        timeline.last_s = time.perf_counter()
        yield
        timeline.read()


def _window(run: TrainingRun, course: Iterator[int], count: int, timeline: Timeline | None) -> float:
    """Return the seconds of `count` steps, timed by part where there is a timeline."""
    stopwatch = Stopwatch(run.device)
    with contextlib.nullcontext() if timeline is None else _timed(run, timeline):
        stopwatch.start()
        for _ in range(count):
            next(course)
        return stopwatch.stop()


def _on_host(run: TrainingRun, course: Iterator[int], timeline: Timeline, window_s: float, step_s: float) -> Ledger:
    """Return the ledger of a CPU: the host's seconds by part, and what steps left alone take in between."""
    pairs, begun = min(PAIRS, max(3, round(2 * window_s / step_s))), compilations()
    count, slower, timed_s = max(1, round(window_s / pairs / step_s)), list[float](), 0.0
    for pair in range(pairs):
        took_s = {on: _window(run, course, count, timeline if on else None) for on in (pair % 2, 1 - pair % 2)}
        slower.append(math.log(took_s[1] / took_s[0]))
        timed_s += took_s[1]
    slow_down = math.exp(statistics.median(slower))  # a burst of something else hits few windows
    found = ledger(run.device, timeline.seconds, timed_s / slow_down, pairs * count, slow_down)
    found.facts = {"recompiles": compilations() - begun}
    found.facts |= facts_of(found.step_s, timeline.seconds, found.steps, *_looked_at(run, course, 1))
    return found


def _on_device(run: TrainingRun, course: Iterator[int], timeline: Timeline, window_s: float, step_s: float) -> Ledger:
    """Return the ledger of a GPU: what its trace says, at the pace of the steps before and after."""
    count, begun, noted = max(1, round(window_s / 2 / step_s)), compilations(), Timeline()
    noted.annotate = True
    took_s = _window(run, course, count, timeline)
    with _timed(run, noted):
        looked_at = _looked_at(run, course, PROFILED)
    next(course)
    took_s += _window(run, course, count, timeline)
    rows, slow_down, busy_share = unprofiled(
        looked_at[0], rates(run.device), PROFILED, timeline.seconds, 2 * count, took_s
    )
    found = ledger(run.device, rows, took_s, 2 * count, slow_down, busy_share=busy_share)
    found.facts = {"recompiles": compilations() - begun}
    found.facts |= facts_of(found.step_s, timeline.seconds, found.steps, *looked_at)
    return found


def _looked_at(run: TrainingRun, course: Iterator[int], count: int) -> tuple[Trace, int, list[Sync]]:
    """Return the trace of `count` steps, `count`, and what of another few steps made the host wait."""
    profile = Profile(run.device)
    next(course)  # the first one sets the profiler up
    profile.open()
    for _ in range(count):
        next(course)
    return profile.close(), count, audit(lambda: [next(course) for _ in range(AUDITED)], run.device)


def _with_evaluation(found: Ledger, run: TrainingRun, course: Iterator[int], every: int) -> Ledger:
    """Return the ledger with an evaluation and a checkpoint in every so many steps, timed in the second of two."""
    run.evaluate_every = 1
    _, one_s = (max(0.0, _window(run, course, 1, None) - found.step_s) for _ in range(2))
    seconds = {row["cause"]: row["seconds"] for row in found.rows if row["cause"] != UNEXPLAINED}
    seconds[EVALUATION] = one_s * found.steps / every
    window_s = found.window_s + seconds[EVALUATION]
    busy_share = None if found.busy_share is None else found.busy_share * found.window_s / window_s
    facts = found.facts | {
        "step_s": window_s / found.steps,
        "evaluation_s": one_s / every,
        "evaluations": found.steps / every,
    }
    return ledger(found.device, seconds, window_s, found.steps, found.slow_down, busy_share=busy_share, facts=facts)

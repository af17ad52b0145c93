"""The ledger: where the time of training steps goes, in rows that add up to what the steps take unprofiled."""

import bisect
import collections
import contextlib
import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from speedkit.ceilings import ceilings as measured_ceilings
from speedkit.clock import Stopwatch, compilations, run_until_steady
from speedkit.errors import SpeedkitError, UsageError
from speedkit.hardware import this_machine
from speedkit.measure.syncs import Sync, audit
from speedkit.measure.timeline import (
    BACKWARD, COMPILATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, Timeline, backward_passes, compilations_in,
    reading_cost_s, replaced,
)  # fmt: skip
from speedkit.measure.trace import Profile, Trace, Work
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import begin, close, steps
from speedkit.train.run import Run

COPY, LAUNCH, SYNC, COMPUTE, BANDWIDTH, IDLE, UNEXPLAINED = (
    "host-to-device copy", "launch-bound", "sync-bound", "compute-bound", "bandwidth-bound", "idle", "unexplained")  # fmt: skip
CAUSES = (DATA, COPY, LAUNCH, SYNC, COMPUTE, BANDWIDTH, FORWARD, BACKWARD, OPTIMIZER, EVALUATION, COMPILATION, OTHER,
          IDLE, UNEXPLAINED)  # fmt: skip
HOST_WORK_S = 1e-4  # so long outside of PyTorch between two launches is work of its own, not the price of a launch
# Kernels of which no operator is known, such as those of a CUDA graph, are judged by their names.
COMPUTING = ("gemm", "conv", "attention", "flash", "fmha", "cudnn", "wgrad", "dgrad", "triton_tem")
PAIRS = 10  # of windows, one timed and one left alone, by which the timers' own cost is known
PROFILED = 8  # steps that the profiler sees on a GPU
AUDITED = 2  # steps in which the host's reads are looked for


@dataclasses.dataclass
class Ledger:
    """Where the wall time of `steps` training steps goes.

    `rows` are `{cause, seconds, share, ceiling_speedup}` in the order of CAUSES; shares add up to 1, seconds to
    `window_s`. What was measured may be more than what the steps take: then `unexplained` is below 0. `facts` is what
    the diagnosis reads besides: seconds per step by part of the loop (`data_s`, `forward_s`, `backward_s`,
    `optimizer_s`, `evaluation_s`) and counts (see `facts_of`).
    """

    device: str
    window_s: float  # that the steps take with nothing around them
    steps: int
    step_s: float
    rows: list[dict[str, Any]]
    slow_down: float  # steps as they were measured / steps left alone
    busy_share: float | None = None  # of a GPU: the union of its kernels and copies; None on a CPU
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what `ledger.json` holds of it."""
        return {key: value for key, value in vars(self).items() if key != "facts"}

    def share(self, cause: str) -> float:
        """Return the share of the wall time that goes to a cause."""
        return sum(row["share"] for row in self.rows if row["cause"] == cause)

    def __str__(self) -> str:
        busy = "" if self.busy_share is None else f", busy {self.busy_share:.1%} of the time"
        lines = [f"a step takes {1e3 * self.step_s:.4g} ms ({self.device}{busy}; {self.steps} steps, measuring took "
                 f"{self.slow_down - 1:+.1%}):"]  # fmt: skip
        for row in self.rows:
            per_step_ms = 1e3 * row["seconds"] / max(1, self.steps)
            lines.append(f"  {row['cause']:<26}{per_step_ms:>10.4g} ms {row['share']:>7.1%}   "
                         f"without it {row['ceiling_speedup']:.2f}x")  # fmt: skip
        return "\n".join(lines)


def ledger(device: Any, seconds: Mapping[str, float], window_s: float, steps: int, slow_down: float,
           **more: Any) -> Ledger:  # fmt: skip
    """Return the ledger of `steps` steps that take `window_s`, of which `seconds` are known by cause."""
    known = dict(seconds) | {UNEXPLAINED: window_s - sum(seconds.values())}
    rows = []
    for cause in CAUSES:
        if known.get(cause) or cause == UNEXPLAINED:
            share = known[cause] / window_s if window_s else 0.0
            most = 1 / max(1 - max(share, 0.0), 1e-3)
            rows.append({"cause": cause, "seconds": known[cause], "share": share, "ceiling_speedup": most})
    return Ledger(str(device), window_s, steps, window_s / max(1, steps), rows, slow_down, **more)


# The classifier: pure, over a trace. Intervals are (begin_s, end_s); a union is sorted and disjoint.
Intervals = list[tuple[float, float]]


def union(spans: Iterable[Any]) -> Intervals:
    """Return the union of spans."""
    found: Intervals = []
    for begin_s, end_s in sorted((span[0], span[1]) for span in spans):
        if found and begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(end_s, found[-1][1]))
        else:
            found.append((begin_s, end_s))
    return found


def within(spans: Intervals, begin_s: float, end_s: float) -> Intervals:
    """Return what of a union lies between two times."""
    first = bisect.bisect_right(spans, begin_s, key=lambda span: span[1])
    inside = itertools.takewhile(lambda span: span[0] < end_s, spans[first:])
    return [(max(begin_s, low), min(end_s, high)) for low, high in inside]


def between(spans: Intervals, begin_s: float, end_s: float) -> Intervals:
    """Return what between two times no part of a union covers."""
    edges = [begin_s, *itertools.chain.from_iterable(within(spans, begin_s, end_s)), end_s]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]


def length(spans: Intervals) -> float:
    """Return how long a union is."""
    return sum(high - low for low, high in spans)


def classify(trace: Trace, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a trace by cause; together they are its length.

    `ceilings` are measured rates by name: `matmul_fp32`, `matmul_bf16` ... in FLOP/s, `memory_bandwidth` in bytes/s.
    """
    return dict(collections.Counter(busy_of(trace, ceilings)) + collections.Counter(gaps_of(trace)))


def busy_of(trace: Trace, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds in which the device works, by cause; each moment once, whatever runs side by side.

    A copy counts where nothing computes. What the host launched in the optimizer's step or in an evaluation counts as
    that. Any other kernel is bound by what takes its operator longer at the measured ceilings: FLOPs or bytes.
    """
    found, until_s = collections.defaultdict[str, float](float), -math.inf
    parts = {cause: union(span for span in trace.parts if span.name == cause) for cause in (OPTIMIZER, EVALUATION)}
    kernels = [work for work in trace.work if work.kind == "kernel"]
    for work in sorted(kernels, key=lambda work: work.begin_s):
        found[_cause(work, parts, ceilings)] += max(0.0, work.end_s - max(work.begin_s, until_s))
        until_s = max(until_s, work.end_s)
    computing, until_s = union(kernels), -math.inf
    for work in sorted((work for work in trace.work if work.kind != "kernel"), key=lambda work: work.begin_s):
        cause = EVALUATION if _launched_in(work, parts[EVALUATION]) else COPY if work.kind == "host to device" else SYNC
        found[cause] += length(between(computing, max(work.begin_s, until_s), work.end_s))
        until_s = max(until_s, work.end_s)
    return dict(found)


def _launched_in(work: Work, spans: Intervals) -> bool:
    return work.launch_s is not None and bool(within(spans, work.launch_s, math.nextafter(work.launch_s, math.inf)))


def _cause(work: Work, parts: Mapping[str, Intervals], ceilings: Mapping[str, float]) -> str:
    for cause, spans in parts.items():
        if _launched_in(work, spans):
            return cause
    if not work.flops and not work.bytes:
        return COMPUTE if any(word in work.name.lower() for word in COMPUTING) else BANDWIDTH
    computing_s = work.flops / ceilings.get(f"matmul_{work.dtype}", ceilings.get("matmul_fp32", math.inf))
    return COMPUTE if computing_s > work.bytes / ceilings.get("memory_bandwidth", math.inf) else BANDWIDTH


def gaps_of(trace: Trace) -> dict[str, float]:
    """Return the seconds in which the device stands still, by cause.

    What of a gap lies in compilation, in an evaluation, in the loader's `next()` is that. The rest of it is
    sync-bound where a call that waits ends in the gap; else launch-bound where the next launch began after the work
    before had ended, or other host work where most of it went by outside of PyTorch; else the work itself depended on
    something: idle.
    """
    found = collections.defaultdict[str, float](float)
    parts = [(cause, union(span for span in trace.parts if span.name == cause))
             for cause in (COMPILATION, EVALUATION, DATA)]  # fmt: skip
    ends_s, calls = sorted(span.end_s for span in trace.syncs), union(trace.calls)
    begins = {work.begin_s: work.launch_s for work in reversed(trace.work)}
    for begin_s, end_s in between(union(trace.work), 0.0, trace.end_s):
        rest = [(begin_s, end_s)]
        for cause, spans in parts:
            left = [piece for low, high in rest for piece in between(spans, low, high)]
            found[cause] += length(rest) - length(left)
            rest = left
        launch_s = begins.get(end_s, math.inf)  # None: unknown. At the end there is no next launch: the host was late
        quiet_s = max((high - low for low, high in rest for low, high in between(calls, low, high)), default=0.0)
        if bisect.bisect_right(ends_s, end_s) > bisect.bisect_left(ends_s, begin_s):
            found[SYNC] += length(rest)
        elif launch_s is not None and launch_s > begin_s:
            found[OTHER if quiet_s > max(HOST_WORK_S, length(rest) / 2) else LAUNCH] += length(rest)
        else:
            found[IDLE] += length(rest)
    return {cause: seconds for cause, seconds in found.items() if seconds}


def unprofiled(trace: Trace, ceilings: Mapping[str, float], count: int, host: Mapping[str, float], steps: int,
               window_s: float) -> tuple[dict[str, float], float, float]:  # fmt: skip
    """Return the seconds of `steps` steps by cause, how much the profiler slowed them, and the device's busy share.

    `trace` is of `count` steps, and slowed; without it, `steps` steps took `window_s` and the `host` its seconds by
    part. Kernels are as quick in both; gaps are not. So busy time is as profiled, evaluation and compilation are the
    host's, waiting for data shrinks as the loader's `next()` does, and the other gaps share the rest.
    """
    scale = steps / count
    busy, gaps = ({cause: seconds * scale for cause, seconds in found.items()}
                  for found in (busy_of(trace, ceilings), gaps_of(trace)))  # fmt: skip
    found = dict(busy)
    for cause in (EVALUATION, COMPILATION):
        found[cause] = host.get(cause, 0.0)
        gaps.pop(cause, None)
    waited_s = scale * length(union(span for span in trace.parts if span.name == DATA))
    if DATA in gaps:
        found[DATA] = found.get(DATA, 0.0) + gaps.pop(DATA) * min(1.0, host.get(DATA, waited_s) / waited_s)
    left_s, profiled_s = window_s - sum(found.values()), sum(gaps.values())
    for cause, seconds in gaps.items():
        found[cause] = found.get(cause, 0.0) + seconds * max(0.0, min(1.0, left_s / profiled_s))
    return found, scale * trace.end_s / window_s, min(1.0, sum(busy.values()) / window_s)


def facts_of(step_s: float, host: Mapping[str, float], count: int, recompiles: int = 0, traced: Trace | None = None,
             traced_steps: int = 1, syncs: Iterable[Sync] = (), **more: Any) -> dict[str, Any]:  # fmt: skip
    """Return what the diagnosis reads beside the rows, all per step but `recompiles` (graphs compiled in the window).

    `syncs` are `{file, line, code, count, seconds}` per step, the most expensive first. Copies go to the device.
    """
    seconds = {f"{cause.split()[0]}_s": host.get(cause, 0.0) / max(1, count)
               for cause in (DATA, FORWARD, BACKWARD, OPTIMIZER, EVALUATION)}  # fmt: skip
    found = {"step_s": step_s, **seconds, "recompiles": recompiles, **more}
    found["syncs"] = [dataclasses.asdict(sync) | {"count": sync.count / AUDITED, "seconds": sync.seconds / AUDITED}
                      for sync in syncs]  # fmt: skip
    if traced is not None:
        kernels = sum(work.kind == "kernel" for work in traced.work)
        found |= {
            "operators_per_step": traced.operators / traced_steps, "kernels_per_step": kernels / traced_steps,
            "copies_bytes": traced.copied_bytes / traced_steps,
            "pinned": not traced.pageable_bytes if traced.copied_bytes else None,
        }  # fmt: skip
    return found


def rates(device: torch.device) -> dict[str, float]:
    """Return the measured ceilings of this machine as `classify` takes them."""
    return {name: ceiling.value for name, ceiling in measured_ceilings(this_machine(device)).items()}


def ledger_of(
    workload: Any, recipe: Recipe | None = None, plan: Plan | None = None, *, device: str | torch.device = "auto",
    cache_dir: str | Path | None = None, window_s: float = 1.0, evaluate: bool = False,
) -> Ledger:  # fmt: skip
    """Train `workload` for about 2 * `window_s` after a warm-up; return where the time goes.

    With `evaluate` the ledger has evaluation and checkpoint too, at the rate at which a training would make them. On a
    CPU forward is the loss with what it calls, backward whatever `backward()` does. Raises SpeedkitError for a workload
    that cannot be trained.
    """
    with contextlib.ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run") if evaluate else None
        run = begin(_trainable(workload), recipe, plan, device=device, cache_dir=cache_dir, progress=False, out=out,
                    endless=not evaluate)  # fmt: skip
        stack.callback(close, run)
        every = run.evaluate_every or run.scheduled
        run.total_steps, run.evaluate_every = None, 0
        course = steps(run)
        try:
            for _ in range(1 + 2 * int(run.plan.workers) * run.plan.prefetch_factor):
                next(course)  # what the loader had ready
            steady = run_until_steady(lambda: next(course), run.device, max_s=max(2.0, window_s))
            measure = _on_device if run.device.type == "cuda" else _on_host
            found = measure(run, course, Timeline(reading_cost_s()), window_s, steady.step_s)
            return _with_evaluation(found, run, course, every) if evaluate else found
        except SpeedkitError:
            raise
        except Exception as error:
            raise SpeedkitError(
                f"{workload.name} failed in step {run.step + 1}: {type(error).__name__}: {error}; its loss has to return "
                "the mean over the batch, a tensor of one number that gradients flow to, and the outputs"
            ) from error


def _trainable(workload: Any) -> Any:
    def model() -> torch.nn.Module:
        made = workload.model()
        if not any(parameter.requires_grad for parameter in made.parameters()):
            raise UsageError(f"the model of {workload.name} has no trainable parameter: set requires_grad on some")
        return made

    return dataclasses.replace(workload, model=model)


@contextlib.contextmanager
def _timed(run: Run, timeline: Timeline) -> Iterator[None]:
    """Time the parts of the run's steps."""
    with (
        replaced(run.batches, next=timeline.of(DATA, run.batches.next)),
        replaced(run, loss=timeline.of(FORWARD, run.loss), update=timeline.of(OPTIMIZER, run.update)),
        backward_passes(timeline), compilations_in(timeline),
    ):  # fmt: skip
        timeline.last_s = time.perf_counter()
        yield
        timeline.read()


def _window(run: Run, course: Iterator[int], count: int, timeline: Timeline | None) -> float:
    """Return the seconds of `count` steps, timed by part where there is a timeline."""
    stopwatch = Stopwatch(run.device)
    with contextlib.nullcontext() if timeline is None else _timed(run, timeline):
        stopwatch.start()
        for _ in range(count):
            next(course)
        return stopwatch.stop()


def _on_host(run: Run, course: Iterator[int], timeline: Timeline, window_s: float, step_s: float) -> Ledger:
    """Return the ledger of a CPU: the host's seconds by part, and what steps without timers take in between."""
    pairs = min(PAIRS, max(3, round(2 * window_s / step_s)))
    count, begun, slower, timed_s = max(1, round(window_s / pairs / step_s)), compilations(), list[float](), 0.0
    for pair in range(pairs):
        took_s = {on: _window(run, course, count, timeline if on else None) for on in (pair % 2, 1 - pair % 2)}
        slower.append(math.log(took_s[1] / took_s[0]))
        timed_s += took_s[1]
    slow_down = math.exp(statistics.median(slower))  # a burst of something else hits few windows
    recompiles, unprofiled_s = compilations() - begun, timed_s / slow_down
    traced, syncs = _looked_at(run, course, 1)
    facts = facts_of(unprofiled_s / pairs / count, timeline.seconds, pairs * count, recompiles, traced, 1, syncs)
    return ledger(run.device, timeline.seconds, unprofiled_s, pairs * count, slow_down, facts=facts)


def _on_device(run: Run, course: Iterator[int], timeline: Timeline, window_s: float, step_s: float) -> Ledger:
    """Return the ledger of a GPU: what its trace says, at the pace of the steps before and after."""
    count, begun, seen = max(1, round(window_s / 2 / step_s)), compilations(), Timeline()
    seen.annotate = True
    unprofiled_s = _window(run, course, count, timeline)
    with _timed(run, seen):
        traced, syncs = _looked_at(run, course, PROFILED)
    next(course)
    unprofiled_s += _window(run, course, count, timeline)
    rows, slow_down, busy_share = unprofiled(
        traced, rates(run.device), PROFILED, timeline.seconds, 2 * count, unprofiled_s)  # fmt: skip
    facts = facts_of(unprofiled_s / 2 / count, timeline.seconds, 2 * count, compilations() - begun, traced, PROFILED,
                     syncs)  # fmt: skip
    return ledger(run.device, rows, unprofiled_s, 2 * count, slow_down, busy_share=busy_share, facts=facts)


def _looked_at(run: Run, course: Iterator[int], count: int) -> tuple[Trace, list[Sync]]:
    """Return the trace of `count` steps, and what of another few made the host wait."""
    profile = Profile(run.device)
    next(course)  # the first one sets the profiler up
    profile.open()
    for _ in range(count):
        next(course)
    return profile.close(), audit(lambda: [next(course) for _ in range(AUDITED)], run.device)


def _with_evaluation(found: Ledger, run: Run, course: Iterator[int], every: int) -> Ledger:
    """Return the ledger with an evaluation and a checkpoint in every so many steps, timed in the second of two steps."""
    for _ in range(2):
        run.evaluate_every = 1
        one_s = max(0.0, _window(run, course, 1, None) - found.step_s)
        run.evaluate_every = 0
    seconds = {row["cause"]: row["seconds"] for row in found.rows if row["cause"] != UNEXPLAINED}
    seconds[EVALUATION] = one_s * found.steps / every
    window_s = found.window_s + seconds[EVALUATION]
    facts = found.facts | {"step_s": window_s / found.steps, "evaluation_s": one_s / every,
                           "evaluations": found.steps / every}  # fmt: skip
    busy_share = None if found.busy_share is None else found.busy_share * found.window_s / window_s
    return ledger(found.device, seconds, window_s, found.steps, found.slow_down, busy_share=busy_share, facts=facts)

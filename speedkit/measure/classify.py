"""The ledger's rules: a trace of training steps in seconds by cause. Pure, on unions of intervals, never on sums."""

import bisect
import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from speedkit.measure.timeline import BACKWARD, COMPILATION, DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER
from speedkit.measure.trace import Trace, Work

COPY, LAUNCH, SYNC, COMPUTE = "host-to-device copy", "launch-bound", "sync-bound", "compute-bound"
BANDWIDTH, IDLE, UNEXPLAINED = "bandwidth-bound", "idle", "unexplained"
CAUSES = (
    DATA,
    COPY,
    LAUNCH,
    SYNC,
    COMPUTE,
    BANDWIDTH,
    FORWARD,
    BACKWARD,
    OPTIMIZER,
    EVALUATION,
    COMPILATION,
    OTHER,
    IDLE,
    UNEXPLAINED,
)
HOST_WORK_S = 1e-4  # so long outside of PyTorch between two launches is work of its own, not the price of a launch
# Kernels of which no operator is known, such as those of a CUDA graph, are told apart by their names.
COMPUTING = ("gemm", "conv", "attention", "flash", "fmha", "wgrad", "dgrad", "triton_tem")

Intervals = list[tuple[float, float]]  # a union: sorted and disjoint (begin_s, end_s)


def classify(trace: Trace, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a trace by cause; together they are its length.

    `ceilings` are measured rates by name: `matmul_fp32`, `matmul_bf16` ... in FLOP/s, `memory_bandwidth` in bytes/s.
    """
    busy, gaps = busy_of(trace, ceilings), gaps_of(trace)
    return {cause: busy.get(cause, 0.0) + gaps.get(cause, 0.0) for cause in CAUSES if cause in busy or cause in gaps}


def busy_of(trace: Trace, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds in which the device works, by cause.

    Of kernels that run at once the one that began first counts; a copy counts where none runs. What was launched in the
    optimizer's step or an evaluation is that. Any other is bound by what takes longer at the ceilings: FLOPs or bytes.
    """
    parts = _parts(trace, (EVALUATION, OPTIMIZER))
    found, kernels = collections.defaultdict[str, float](float), [work for work in trace.work if work.kind == "kernel"]
    for work, seconds in _first(kernels, []):
        found[_launched_in(work, parts) or _bound(work, ceilings)] += seconds
    for work, seconds in _first([work for work in trace.work if work.kind != "kernel"], union(kernels)):
        copy = COPY if work.kind == "host to device" else SYNC  # what comes back is what the host waits for
        found[_launched_in(work, parts[:1]) or copy] += seconds
    return {cause: seconds for cause, seconds in found.items() if seconds}


def gaps_of(trace: Trace) -> dict[str, float]:
    """Return the seconds in which the device stands still, by cause.

    What of a gap lies in a compilation, an evaluation or the loader's `next()` is that. The rest is sync-bound where a
    call that waits ends in it; else, if the next launch began after the work before had ended, launch-bound, or other
    host work where most of it went by outside of PyTorch; else the work waited for other work: idle.
    """
    found, parts = collections.defaultdict[str, float](float), _parts(trace, (COMPILATION, EVALUATION, DATA))
    ends_s, calls = sorted(span.end_s for span in trace.syncs), union(trace.calls)
    launches = {work.begin_s: work.launch_s for work in reversed(trace.work)}
    for begin_s, end_s in between(union(trace.work), 0.0, trace.end_s):
        rest = [(begin_s, end_s)]
        for cause, spans in parts:
            left = [piece for low, high in rest for piece in between(spans, low, high)]
            found[cause] += length(rest) - length(left)
            rest = left
        launch_s = launches.get(end_s, math.inf)  # None where unknown; infinite at the end, for nothing follows
        quiet_s = max((high - low for piece in rest for low, high in between(calls, *piece)), default=0.0)
        if bisect.bisect_right(ends_s, end_s) > bisect.bisect_left(ends_s, begin_s):
            found[SYNC] += length(rest)
        elif launch_s is not None and launch_s > begin_s:
            found[OTHER if quiet_s > max(HOST_WORK_S, length(rest) / 2) else LAUNCH] += length(rest)
        else:
            found[IDLE] += length(rest)
    return {cause: seconds for cause, seconds in found.items() if seconds}


def union(spans: Iterable[Any]) -> Intervals:
    """Return the union of what begins and ends with two numbers."""
    found: Intervals = []
    for begin_s, end_s, *_ in sorted(spans, key=lambda span: span[0]):
        if found and begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(end_s, found[-1][1]))
        else:
            found.append((begin_s, end_s))
    return found


def between(spans: Intervals, begin_s: float, end_s: float) -> Intervals:
    """Return what of the time from `begin_s` to `end_s` a union leaves uncovered."""
    first = bisect.bisect_right(spans, begin_s, key=lambda span: span[1])
    covered = itertools.takewhile(lambda span: span[0] < end_s, itertools.islice(spans, first, None))
    edges = [begin_s, *itertools.chain.from_iterable(covered), end_s]
    pairs = ((low, min(high, end_s)) for low, high in zip(edges[::2], edges[1::2], strict=True))
    return [(low, high) for low, high in pairs if low < high]


def length(spans: Intervals) -> float:
    """Return how long a union is."""
    return sum(end_s - begin_s for begin_s, end_s in spans)


def _parts(trace: Trace, causes: Iterable[str]) -> list[tuple[str, Intervals]]:
    return [(cause, union(span for span in trace.parts if span.name == cause)) for cause in causes]


def _first(works: list[Work], covered: Intervals) -> Iterator[tuple[Work, float]]:
    """Yield each work with the seconds in which neither earlier ones nor `covered` is at work."""
    until_s = -math.inf
    for work in sorted(works, key=lambda work: work.begin_s):
        begin_s, until_s = max(work.begin_s, until_s), max(work.end_s, until_s)
        yield work, length(between(covered, begin_s, work.end_s)) if begin_s < work.end_s else 0.0


def _launched_in(work: Work, parts: Iterable[tuple[str, Intervals]]) -> str:
    """Return the part in which work was launched, "" for none."""
    for cause, spans in parts:
        at = -1 if work.launch_s is None else bisect.bisect_right(spans, work.launch_s, key=lambda span: span[0]) - 1
        if at >= 0 and work.launch_s < spans[at][1]:  # type: ignore[operator]
            return cause
    return ""


def _bound(work: Work, ceilings: Mapping[str, float]) -> str:
    if not work.flops and not work.bytes:
        return COMPUTE if any(word in work.name.lower() for word in COMPUTING) else BANDWIDTH
    computing_s = work.flops / ceilings.get(f"matmul_{work.dtype}", ceilings.get("matmul_fp32", math.inf))
    return COMPUTE if computing_s > work.bytes / ceilings.get("memory_bandwidth", math.inf) else BANDWIDTH

"""What PyTorch's profiler saw of some training steps: as plain intervals, and from them as seconds by cause."""

import collections
import contextlib
import gzip
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from speedkit.clock import synchronize
from speedkit.errors import UsageError
from speedkit.measure.timeline import COMPILATION, DATA, EVALUATION, HOST, OPTIMIZER, OTHER, PART

COPY, LAUNCH, SYNC, COMPUTE = "host-to-device copy", "launch-bound", "sync-bound", "compute-bound"
BANDWIDTH, IDLE, UNEXPLAINED = "bandwidth-bound", "idle", "unexplained"
CAUSES = (DATA, COPY, LAUNCH, SYNC, COMPUTE, BANDWIDTH, *HOST, IDLE, UNEXPLAINED)
WINDOW = "speedkit window"  # the range around the steps that count
WAITING = ("cudaMemcpy", "hipMemcpyWithStream")  # calls that wait, beside those whose name ends in Synchronize
HOST_WORK_S = 1e-4  # so long outside of PyTorch between two launches is work of its own, not the price of a launch
SMALL_S = 20e-6  # of an operator on a CPU: below it calling costs more than computing
# What is in the names of kernels, and of operators, that multiply matrices. A kernel replayed from a CUDA graph has no
# operator, so kernels are known by their own names: nvjet is cuBLAS's, xmma and cutlass are libraries of products.
PRODUCT_KERNELS = ("gemm", "conv", "attention", "flash", "fmha", "wgrad", "dgrad", "nvjet", "cutlass", "xmma")
PRODUCT_OPERATORS = ("mm", "conv", "attention", "linear", "lstm", "rnn")
FORMATS = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}

Event = dict[str, Any]
Mask = np.ndarray  # [segments] bool


class Span(NamedTuple):
    """A stretch of time; seconds since the trace's beginning."""

    begin_s: float
    end_s: float
    name: str = ""


class Work(NamedTuple):
    """One kernel or copy on the device."""

    begin_s: float
    end_s: float
    name: str
    kind: str = "kernel"  # or "host to device", "device to host"
    launch_s: float = -math.inf  # when the host began to launch it; as it is where that is unknown
    number_format: str = ""  # of the operator's inputs, where they are known

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices. Inductor's fused kernels are named after all that they fuse."""
        name = self.name.lower()
        return "triton_tem" in name or (not name.startswith("triton") and any(word in name for word in PRODUCT_KERNELS))


@dataclass
class Costs:
    """What a CPU's operators, without those that they call, or a GPU's kernels cost in seconds."""

    calls: float = 0.0  # of small operators on a CPU, of kernels on a GPU
    small_s: float = 0.0  # of operators that cost more to call than to compute, on a CPU
    products_s: dict[str, float] = field(default_factory=dict)  # of matrices, by number format
    passes_s: float = 0.0  # over memory: all other operators, on a CPU


@dataclass(frozen=True)
class Trace:
    """A stretch of training from 0 to `end_s`."""

    end_s: float = 0.0
    work: tuple[Work, ...] = ()  # on the device
    parts: tuple[Span, ...] = ()  # of the host's time, each named by its cause
    syncs: tuple[Span, ...] = ()  # calls in which the host waits for the device
    calls: tuple[Span, ...] = ()  # operators and launches: what the host does inside of PyTorch
    costs: Costs = field(default_factory=Costs)
    steps: int = 1


# ---- seconds by cause ----


def classify(trace: Trace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds in which the device works, and those in which it stands still, both by cause.

    Time is cut at each beginning and end of anything; each segment is painted with a cause, later coats over earlier.
    """
    spans: list[Span | Work] = [*trace.work, *trace.parts, *trace.calls]
    edges = np.unique([0.0, trace.end_s, *(time_s for span in spans for time_s in span[:2])])
    painted = np.full(len(edges) - 1, CAUSES.index(IDLE))
    _paint_gaps(painted, trace, edges)
    for cause in (DATA, EVALUATION, COMPILATION):
        painted[_covered(edges, trace.parts, cause)] = CAUSES.index(cause)

    groups = collections.defaultdict[str, list[Work]](list)
    for work in trace.work:
        groups[_cause_of(work, trace.parts)].append(work)
    for cause in (SYNC, COPY, BANDWIDTH, COMPUTE, OPTIMIZER, EVALUATION):  # a copy counts where no kernel runs
        painted[_covered(edges, groups[cause])] = CAUSES.index(cause)
    busy, took_s = _covered(edges, trace.work), np.diff(edges)
    return _sums(painted[busy], took_s[busy]), _sums(painted[~busy], took_s[~busy])


def _sums(painted: np.ndarray, took_s: np.ndarray) -> dict[str, float]:
    sums = np.bincount(painted, took_s, minlength=len(CAUSES)).tolist()
    return {cause: seconds for cause, seconds in zip(CAUSES, sums, strict=True) if seconds}


def _paint_gaps(painted: np.ndarray, trace: Trace, edges: np.ndarray) -> None:
    """Paint what the host keeps the device from.

    A gap is sync-bound where a call that waits ends in it; else, if the next launch began after the work before had
    ended, launch-bound, or other host work where most of it went by outside of PyTorch; else it stays idle.
    """
    took_s, busy = np.diff(edges), _covered(edges, trace.work)
    own = ~np.logical_or.reduce([_covered(edges, trace.parts, part) for part in (DATA, EVALUATION, COMPILATION)])
    quiet = own & ~_covered(edges, trace.calls)
    launches_s = {work.begin_s: work.launch_s for work in reversed(trace.work)}
    changes = np.flatnonzero(np.diff(np.concatenate(([True], busy, [True]))))
    for first, last in changes.reshape(-1, 2).tolist():  # segments of a gap
        begin_s, end_s = edges[[first, last]]
        quiet_s, left_s = (took_s[first:last][mask[first:last]].sum() for mask in (quiet, own))
        if any(begin_s <= span.end_s <= end_s for span in trace.syncs):
            painted[first:last] = CAUSES.index(SYNC)
        elif launches_s.get(end_s, math.inf) > begin_s:  # infinite at the end, for nothing follows
            painted[first:last] = CAUSES.index(OTHER if quiet_s > max(HOST_WORK_S, left_s / 2) else LAUNCH)


def _cause_of(work: Work, parts: Iterable[Span]) -> str:
    """Return the cause of the time that work takes; what was launched in an evaluation or an update is that."""
    launched_in = {part.name for part in parts if part.begin_s <= work.launch_s < part.end_s}
    if EVALUATION in launched_in:
        return EVALUATION
    if work.kind != "kernel":
        return COPY if work.kind == "host to device" else SYNC  # what comes back is what the host waits for
    if OPTIMIZER in launched_in:
        return OPTIMIZER
    return COMPUTE if work.is_product else BANDWIDTH


def _covered(edges: np.ndarray, spans: Iterable[Span | Work], name: str | None = None) -> Mask:
    """Return which of the segments between `edges` lie in one of the spans, those of a name where one is given."""
    times = np.array([span[:2] for span in spans if name is None or span.name == name]).reshape(-1, 2)
    depth = np.zeros(len(edges), int)
    np.add.at(depth, np.searchsorted(edges, times[:, 0]), 1)
    np.add.at(depth, np.searchsorted(edges, times[:, 1]), -1)
    return depth.cumsum()[:-1] > 0


# ---- reading a trace ----


@contextlib.contextmanager
def profiling(device: torch.device) -> Iterator[torch.profiler.profile]:
    """Run PyTorch's profiler. Raises UsageError beside another one."""
    if torch.autograd._profiler_enabled():
        raise UsageError("another profiler is at work, beside which no other can be: stop it")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that there is no GPU to look at is no news
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *[kinds.CUDA] * (device.type == "cuda")]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
    profiler.start()
    try:
        yield profiler
    finally:
        # Asked for to be spared a warning; it would make an object of each event, the most of what this takes.
        profiler.profiler.acc_events = False  # type: ignore[union-attr]
        profiler.stop()


@contextlib.contextmanager
def window(device: torch.device) -> Iterator[None]:
    """Mark the steps that count, with nothing left to do on the device before and after them."""
    synchronize(device)
    with torch.profiler.record_function(WINDOW):
        yield
        synchronize(device)


def trace_of(profiler: torch.profiler.profile, steps: int, kept: str | Path | None = None) -> Trace:
    """Return what a profiler saw of the `steps` in its window; `kept` is a file for https://ui.perfetto.dev."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(kept or f"{folder}/trace.json")
        profiler.export_chrome_trace(path)
        return read_trace(path, steps)


def read_trace(path: str | Path, steps: int = 1) -> Trace:
    """Return what lies in the range called WINDOW in a file of torch.profiler's `export_chrome_trace`, or its .gz."""
    data = Path(path).read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    events = sorted((event for event in events if "dur" in event), key=lambda event: (event["ts"], -event["dur"]))
    [whole] = [event for event in events if event["name"] == WINDOW]
    began_us, end_us = whole["ts"], whole["ts"] + whole["dur"]
    by = collections.defaultdict[str, list[Event]](list)
    for event in events:
        if event["ts"] < end_us and event["ts"] + event["dur"] > began_us:
            by[event.get("cat", "")].append(event)
    operators, runtime = by["cpu_op"], by["cuda_runtime"] + by["cuda_driver"]

    def clock(time_us: float) -> float:
        return (min(max(time_us, began_us), end_us) - began_us) * 1e-6

    def span(event: Event) -> Span:
        return Span(clock(event["ts"]), clock(event["ts"] + event["dur"]), event["name"].removeprefix(PART))

    launches_s = {_argument(event, "correlation"): clock(event["ts"]) for event in runtime}
    formats = {_argument(event, "External id"): _format(event) for event in operators}
    work = [
        Work(
            *span(event),
            "host to device" if "HtoD" in event["name"] else "device to host" if "DtoH" in event["name"] else "kernel",
            launches_s.get(_argument(event, "correlation"), -math.inf),
            formats.get(_argument(event, "External id"), ""),
        )
        for event in by["kernel"] + by["gpu_memset"] + by["gpu_memcpy"]
    ]
    waits = [event for event in runtime if event["name"].endswith("Synchronize") or event["name"] in WAITING]
    return Trace(
        end_s=clock(end_us),
        work=tuple(sorted(work)),
        parts=tuple(span(event) for event in by["user_annotation"] if event["name"].startswith(PART)),
        syncs=tuple(map(span, waits)),
        calls=tuple(map(span, operators + runtime)),
        costs=_kernel_costs(work) if work else _operator_costs(operators),
        steps=steps,
    )


def _kernel_costs(work: Iterable[Work]) -> Costs:
    """Return what the kernels of a GPU cost."""
    kernels, products_s = [one for one in work if one.kind == "kernel"], collections.defaultdict[str, float](float)
    for kernel in kernels:
        if kernel.is_product:
            # Of float32 a GPU multiplies only the leading bits where it may: the kernel's name tells.
            tf32 = "tf32" in kernel.name or "s1688" in kernel.name
            products_s["tf32" if tf32 else kernel.number_format] += kernel.end_s - kernel.begin_s
    return Costs(len(kernels), products_s=dict(products_s))


def _operator_costs(operators: list[Event]) -> Costs:
    """Return what PyTorch's own operators, which come in order of time, cost on a CPU, without those that they call."""
    own_us = [event["dur"] for event in operators]
    open_on = collections.defaultdict[Any, list[int]](list)  # thread: the operators that are at work
    for number, event in enumerate(operators):
        callers = open_on[event["tid"]]
        while callers and operators[callers[-1]]["ts"] + operators[callers[-1]]["dur"] <= event["ts"]:
            callers.pop()
        if callers:
            own_us[callers[-1]] -= event["dur"]
        callers.append(number)
    alike = collections.defaultdict[tuple[str, str, str], list[float]](list)
    for event, us in zip(operators, own_us, strict=True):
        if event["name"].startswith("aten::"):
            alike[event["name"], _format(event), str(_argument(event, "Input Dims"))].append(us * 1e-6)

    costs = Costs()
    for (name, number_format, _), took_s in alike.items():
        usual_s = statistics.median(took_s)  # what else the machine does may fall on any one call
        if usual_s < SMALL_S:
            costs.calls += len(took_s)
            costs.small_s += usual_s * len(took_s)
        elif any(word in name for word in PRODUCT_OPERATORS):
            costs.products_s[number_format] = costs.products_s.get(number_format, 0.0) + usual_s * len(took_s)
        else:
            costs.passes_s += usual_s * len(took_s)
    return costs


def _argument(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _format(operator: Event) -> str:
    """Return the number format of an operator's first decimal input, "" where it has none."""
    return next((FORMATS[kind] for kind in _argument(operator, "Input type") or () if kind in FORMATS), "")

"""Read a profiler's trace of training steps, and sort its time by cause."""

import collections
import gzip
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speedkit.measure.timeline import COMPILATION, DATA, EVALUATION, HOST, OPTIMIZER, OTHER, PART

COPY, LAUNCH, SYNC, COMPUTE = "host-to-device copy", "launch-bound", "sync-bound", "compute-bound"
BANDWIDTH, IDLE, UNEXPLAINED = "bandwidth-bound", "idle", "unexplained"
CAUSES = (DATA, COPY, LAUNCH, SYNC, COMPUTE, BANDWIDTH, *HOST, IDLE, UNEXPLAINED)
WINDOW = "speedkit window"  # the range around the steps that count
HOST_WORK_S = 1e-4  # so long outside of PyTorch before a launch is other work, not the price of launching
SMALL_S = 20e-6  # of an operator on a CPU: below it calling costs more than computing
# What is in the names of kernels, and of operators, that multiply matrices. A kernel replayed from a CUDA graph has no
# operator, so kernels are known by their own names: nvjet is cuBLAS's, xmma and cutlass are libraries of products.
PRODUCT_KERNELS = ("gemm", "conv", "attention", "flash", "fmha", "wgrad", "dgrad", "nvjet", "cutlass", "xmma")
PRODUCT_OPERATORS = ("mm", "conv", "attention", "linear", "lstm", "rnn")
FORMATS = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}

Event = dict[str, Any]
Seconds = dict[str, float]  # by cause


class Span(NamedTuple):
    """A stretch of time on the host or the device, in seconds since the trace began."""

    begin_s: float
    end_s: float
    name: str = ""
    launch_s: float = -math.inf  # of a kernel or copy, when the host began to launch it; as it is where it is unknown
    number_format: str = ""  # of the inputs of a kernel's operator, where they are known

    @property
    def is_product(self) -> bool:
        """Whether this kernel multiplies matrices. Inductor's fused kernels are named after all that they fuse."""
        name = self.name.lower()
        return "triton_tem" in name if "triton" in name else any(word in name for word in PRODUCT_KERNELS)


@dataclass
class Costs:
    """What a CPU's operators, without those that they call, or a GPU's kernels cost in seconds."""

    calls: int = 0  # of small operators on a CPU, of kernels and copies on a GPU
    small_s: float = 0.0  # operators on a CPU that cost more to call than to compute
    products_s: Seconds = field(default_factory=lambda: collections.defaultdict(float))  # of matrices, by number format
    passes_s: float = 0.0  # over memory: all other operators on a CPU


@dataclass(frozen=True)
class Trace:
    """A stretch of training from 0 to `end_s`."""

    end_s: float = 0.0
    work: Sequence[Span] = ()  # kernels and copies on the device
    parts: Sequence[Span] = ()  # of the host's time, each named by its cause
    syncs: Sequence[Span] = ()  # calls in which the host waits for the device
    calls: Sequence[Span] = ()  # operators and launches: what the host does inside of PyTorch
    costs: Costs = field(default_factory=Costs)
    steps: int = 1


# ---- seconds by cause ----


def classify(trace: Trace) -> tuple[Seconds, Seconds]:
    """Return the seconds in which the device works, and those in which it stands still, both by cause.

    Time is cut wherever anything begins or ends. Each segment has one cause: the last of those assigned here.
    """
    spans = [*trace.work, *trace.parts, *trace.calls]
    edges = np.unique([0.0, trace.end_s, *(time_s for span in spans for time_s in span[:2])])
    lengths_s, busy = np.diff(edges), _covered(edges, trace.work)
    causes = np.full(len(lengths_s), IDLE, object)

    launches_s = {work.begin_s: work.launch_s for work in trace.work}
    for first, last in np.flatnonzero(np.diff(busy, prepend=True, append=True)).reshape(-1, 2).tolist():
        causes[first:last] = _cause_of_gap(Span(edges[first], edges[last]), trace.syncs, launches_s)
    outside = ~_covered(edges, trace.calls) & (lengths_s > HOST_WORK_S)
    causes[outside & (causes == LAUNCH)] = OTHER
    for name in (DATA, EVALUATION, COMPILATION):
        causes[_covered(edges, [part for part in trace.parts if part.name == name])] = name

    work = collections.defaultdict[str, list[Span]](list)
    for kernel in trace.work:
        work[_cause_of_work(kernel, trace.parts)].append(kernel)
    for name in (SYNC, COPY, BANDWIDTH, COMPUTE, OPTIMIZER, EVALUATION):  # a copy counts where no kernel runs
        causes[_covered(edges, work[name])] = name
    return _sums(causes[busy], lengths_s[busy]), _sums(causes[~busy], lengths_s[~busy])


def _cause_of_gap(gap: Span, syncs: Iterable[Span], launches_s: Mapping[float, float]) -> str:
    """Return what keeps the device waiting: a call that ends in the gap, or the launch of the work that ends it."""
    if any(gap.begin_s <= sync.end_s <= gap.end_s for sync in syncs):
        return SYNC
    return LAUNCH if launches_s.get(gap.end_s, math.inf) > gap.begin_s else IDLE  # at the end nothing follows


def _cause_of_work(work: Span, parts: Iterable[Span]) -> str:
    """Return the cause of the time that work takes; what was launched in an evaluation or an update is that."""
    launched_in = {part.name for part in parts if part.begin_s <= work.launch_s < part.end_s}
    if EVALUATION in launched_in:
        return EVALUATION
    if "HtoD" in work.name:
        return COPY
    if "DtoH" in work.name:
        return SYNC  # what comes back is what the host waits for
    if OPTIMIZER in launched_in:
        return OPTIMIZER
    return COMPUTE if work.is_product else BANDWIDTH


def _covered(edges: np.ndarray, spans: Iterable[Span]) -> np.ndarray:
    """Return which of the segments between `edges` lie in one of the spans."""
    times = np.array([span[:2] for span in spans]).reshape(-1, 2)
    depth = np.zeros(len(edges), int)
    np.add.at(depth, np.searchsorted(edges, times[:, 0]), 1)
    np.add.at(depth, np.searchsorted(edges, times[:, 1]), -1)
    return depth.cumsum()[:-1] > 0


def _sums(causes: np.ndarray, lengths_s: np.ndarray) -> Seconds:
    return {cause: float(lengths_s[causes == cause].sum()) for cause in CAUSES if cause in causes}


# ---- reading a trace ----


def read_trace(path: str | Path, steps: int = 1) -> Trace:
    """Return what lies in the range WINDOW of a file by torch.profiler's `export_chrome_trace`, or of its .gz."""
    with gzip.open(path) if str(path).endswith(".gz") else Path(path).open("rb") as file:
        events = [event for event in json.load(file)["traceEvents"] if "dur" in event]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))  # callers before what they call
    by = collections.defaultdict[str, list[Event]](list)
    # The range has a second row in a GPU's trace, of the category gpu_user_annotation.
    [window] = [event for event in events if event["name"] == WINDOW and event["cat"] == "user_annotation"]
    begin_us, end_us = window["ts"], window["ts"] + window["dur"]
    for event in events:
        if event["ts"] < end_us and event["ts"] + event["dur"] > begin_us:
            by[event.get("cat", "")].append(event)
    operators, runtime = by["cpu_op"], by["cuda_runtime"] + by["cuda_driver"]

    def seconds(time_us: float) -> float:
        return (min(max(time_us, begin_us), end_us) - begin_us) * 1e-6

    def span(event: Event) -> Span:
        return Span(seconds(event["ts"]), seconds(event["ts"] + event["dur"]), event["name"].removeprefix(PART))

    launches_s = {event["args"]["correlation"]: seconds(event["ts"]) for event in runtime}
    formats = {event["args"].get("External id"): _number_format(event) for event in operators}
    work, costs = [], Costs()
    for event in by["kernel"] + by["gpu_memset"] + by["gpu_memcpy"]:
        name, arguments = event["name"], event["args"]
        launch_s = launches_s.get(arguments.get("correlation"), -math.inf)
        # Of float32 a GPU multiplies only the leading bits where it may: the kernel's name says so.
        tf32 = "tf32" in name or "s1688" in name
        number_format = "tf32" if tf32 else formats.get(arguments.get("External id"), "")
        work.append(span(event)._replace(launch_s=launch_s, number_format=number_format))
        costs.calls += 1
        if work[-1].is_product:
            costs.products_s[number_format] += work[-1].end_s - work[-1].begin_s
    return Trace(
        end_s=seconds(end_us),
        work=sorted(work),
        parts=[span(event) for event in by["user_annotation"] if event["name"].startswith(PART)],
        syncs=[span(event) for event in runtime if event["name"].endswith("Synchronize")],
        calls=[span(event) for event in operators + runtime],
        costs=costs if work else _operator_costs(operators),
        steps=steps,
    )


def _operator_costs(operators: Sequence[Event]) -> Costs:
    """Return what PyTorch's own operators cost on a CPU, without those that they call; they come in order of time."""
    at_work = collections.defaultdict[int, list[Event]](list)  # by thread, each called by the one before
    for event in operators:
        callers = at_work[event["tid"]]
        while callers and callers[-1]["ts"] + callers[-1]["dur"] <= event["ts"]:
            callers.pop()
        if callers:
            callers[-1]["own_us"] -= event["dur"]
        event["own_us"] = event["dur"]
        callers.append(event)

    # The median of alike calls counts for all of them: what else the machine does may fall on any one.
    alike = collections.defaultdict[tuple[str, str, str], list[float]](list)
    for event in operators:
        if event["name"].startswith("aten::"):
            key = event["name"], _number_format(event), str(event["args"].get("Input Dims"))
            alike[key].append(event["own_us"] * 1e-6)
    costs = Costs()
    for (name, number_format, _), calls_s in alike.items():
        call_s = statistics.median(calls_s)
        if call_s < SMALL_S:
            costs.calls += len(calls_s)
            costs.small_s += call_s * len(calls_s)
        elif any(word in name for word in PRODUCT_OPERATORS):
            costs.products_s[number_format] += call_s * len(calls_s)
        else:
            costs.passes_s += call_s * len(calls_s)
    return costs


def _number_format(operator: Mapping[str, Any]) -> str:
    """Return the number format of an operator's first floating-point input, "" where it has none."""
    kinds = operator["args"].get("Input type", ())
    return next((FORMATS[kind] for kind in kinds if kind in FORMATS), "")

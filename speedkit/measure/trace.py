"""Sort the time of a profiler's trace of training steps by cause."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from speedkit.measure.timeline import DATA, EVALUATION, FORWARD, HOST, OPTIMIZER, OTHER, RARE
from speedkit.measure.trace_file import Event, Span, Window

COPY = "host-to-device copy"
LAUNCH = "launch-bound"
SYNC = "sync-bound"
COMPUTE = "compute-bound"
BANDWIDTH = "bandwidth-bound"
COMMUNICATION = "communication"  # of GPUs with each other, while nothing else runs
IDLE = "idle"
UNEXPLAINED = "unexplained"
CAUSES = (DATA, COPY, LAUNCH, SYNC, COMPUTE, BANDWIDTH, COMMUNICATION, *HOST, IDLE, UNEXPLAINED)
HOST_WORK_S = 1e-4  # so long outside of PyTorch before a launch is other work, not the price of launching
SMALL_S = 20e-6  # of an operator on a CPU: below it calling costs more than computing
# What is in the names of kernels, and of operators, that multiply matrices. A kernel replayed from a CUDA graph has no
# operator, so kernels are known by their own names: nvjet is cuBLAS's, xmma and cutlass are libraries of products.
PRODUCT_KERNELS = ("gemm", "conv", "attention", "flash", "fmha", "wgrad", "dgrad", "nvjet", "cutlass", "xmma")
PRODUCT_OPERATORS = ("mm", "conv", "attention", "linear", "lstm", "rnn")
FORMATS = {"double": "fp64", "float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}


Spans = Sequence[Span]
Seconds = Mapping[Any, float]  # by cause, as pandas gives it


@dataclasses.dataclass(kw_only=True)
class Trace:
    """What a profiler saw of `steps` steps, in seconds; on a CPU its operators, each without those that it calls."""

    busy_s: Seconds = dataclasses.field(default_factory=dict)  # of a GPU at work, by cause
    gaps_s: Seconds = dataclasses.field(default_factory=dict)  # of a GPU that stands still, by cause
    calls: int = 0  # of kernels and copies on a GPU, of small operators on a CPU
    products_s: dict[str, float] = dataclasses.field(default_factory=dict)  # of matrices, by number format
    small_s: float = 0.0  # operators on a CPU that cost more to call than to compute
    passes_s: float = 0.0  # over memory: all other operators on a CPU
    window_s: float = 0.0  # that the steps took under the profiler, without what held single operators up
    exchange_s: float = 0.0  # per step, in which ranks exchange data or wait for the last of them
    loss_share: float = 1.0  # of the time between a forward pass and the next part: operators at work
    steps: int = 1


def classify(
    end_s: float,
    work: Spans,
    *,
    parts: Spans = (),
    syncs: Spans = (),
    calls: Spans = (),
) -> tuple[Seconds, Seconds]:
    """Return the seconds from 0 to `end_s` in which a GPU works, and those in which it stands still, both by cause.

    `work` are its kernels and copies, `parts` those of the host's time, each named by its cause, `syncs` the calls in
    which the host waits for the device, `calls` all that the host does inside of PyTorch. Time is cut wherever anything
    begins or ends. Each segment has one cause: the last of those assigned here.
    """
    times_s = [0.0, end_s]
    for span in (*work, *parts, *calls):
        times_s += [span.begin_s, span.end_s]
    edges = np.unique(times_s)
    lengths_s = np.diff(edges)
    causes = np.full(len(lengths_s), IDLE, object)
    busy = np.zeros(len(lengths_s), bool)
    in_call = np.zeros(len(lengths_s), bool)

    def mark(segments: np.ndarray, spans: Iterable[Span], value: Any) -> None:
        for span in spans:
            first, last = np.searchsorted(edges, [span.begin_s, span.end_s])
            segments[first:last] = value

    mark(busy, work, True)
    mark(in_call, calls, True)

    # A gap waits for a call that ends in it, or for the launch of the work that ends it; after the last, for another.
    launches_s = {kernel.begin_s: kernel.launch_s for kernel in work}
    borders = np.flatnonzero(np.diff(busy, prepend=True, append=True))
    for first, last in borders.reshape(-1, 2).tolist():
        if any(edges[first] <= sync.end_s <= edges[last] for sync in syncs):
            causes[first:last] = SYNC
        elif launches_s.get(edges[last], math.inf) > edges[first]:
            causes[first:last] = LAUNCH
    causes[(causes == LAUNCH) & ~in_call & (lengths_s > HOST_WORK_S)] = OTHER

    for name in (DATA, *RARE):
        mark(causes, [part for part in parts if part.name == name], name)

    work_of = collections.defaultdict[str, list[Span]](list)
    for kernel in work:
        work_of[_cause_of_work(kernel, parts)].append(kernel)
    # A copy counts where no kernel runs, and communication where no other one does.
    for name in (SYNC, COPY, COMMUNICATION, BANDWIDTH, COMPUTE, OPTIMIZER, EVALUATION):
        mark(causes, work_of[name], name)

    seconds = pandas.Series(lengths_s)
    busy_s = seconds[busy].groupby(causes[busy]).sum().to_dict()
    gaps_s = seconds[~busy].groupby(causes[~busy]).sum().to_dict()
    return busy_s, gaps_s


def _cause_of_work(work: Span, parts: Iterable[Span]) -> str:
    """Return the cause of the time that a kernel or copy takes: the part it was launched in, or what it does."""
    launched_in = {part.name for part in parts if part.begin_s <= work.launch_s < part.end_s}
    if EVALUATION in launched_in:
        return EVALUATION
    if "HtoD" in work.name:
        return COPY
    if "DtoH" in work.name:
        return SYNC  # what comes back is what the host waits for
    if work.name.startswith("nccl"):
        return COMMUNICATION
    if OPTIMIZER in launched_in:
        return OPTIMIZER
    if _is_product(work.name):
        return COMPUTE
    return BANDWIDTH


def _is_product(kernel: str) -> bool:
    """Whether a kernel multiplies matrices. Inductor's fused kernels are named after all that they fuse."""
    name = kernel.lower()
    if "triton" in name:
        return "triton_tem" in name
    return any(word in name for word in PRODUCT_KERNELS)


def trace_of(window: Window) -> Trace:
    """Return what a window of steps holds."""
    steps = max(1, window.steps)
    exchange_s = 0.0
    for event in window.events["kernel"] + window.events["user_annotation"]:
        span = event["span"]
        if span.name.startswith(("gloo:", "nccl")):
            exchange_s += span.end_s - span.begin_s
    return dataclasses.replace(_trace_of_device(window, steps), exchange_s=exchange_s / steps)


def _trace_of_device(window: Window, steps: int) -> Trace:
    """Return what the device did in the steps of a window: a GPU where it holds any of its work."""
    events = window.events
    operators = events["cpu_op"]
    runtime = events["cuda_runtime"] + events["cuda_driver"]
    device = events["kernel"] + events["gpu_memset"] + events["gpu_memcpy"]
    if not device:
        return _trace_of_cpu(window, steps)

    work = []
    launches_s = {event["args"].get("correlation"): event["span"].begin_s for event in runtime}
    for event in device:
        launch_s = launches_s.get(event["args"].get("correlation"), -math.inf)
        work.append(event["span"]._replace(launch_s=launch_s))
    busy_s, gaps_s = classify(
        window.end_s,
        sorted(work),
        parts=window.parts,
        syncs=[event["span"] for event in runtime if event["name"].endswith("Synchronize")],
        calls=[event["span"] for event in operators + runtime],
    )
    products_s = _products_on_gpu(device, operators)
    return Trace(busy_s=busy_s, gaps_s=gaps_s, calls=len(work), products_s=products_s, steps=steps)


def _products_on_gpu(device: Iterable[Event], operators: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of a GPU's products of matrices by the number format of the operators that launched them."""
    products_s = collections.defaultdict[str, float](float)
    formats = {event["args"].get("External id"): _number_format(event) for event in operators}
    for event in device:
        span = event["span"]
        if not _is_product(span.name):
            continue
        number_format = formats.get(event["args"].get("External id"), "")
        # Of float32 a GPU multiplies only the leading bits where it may: the kernel's name says so.
        if "tf32" in span.name or "s1688" in span.name:
            number_format = "tf32"
        products_s[number_format] += span.end_s - span.begin_s
    return products_s


def _trace_of_cpu(window: Window, steps: int) -> Trace:
    """Return what PyTorch's own operators cost on a CPU."""
    operators = window.events["cpu_op"]
    callers = collections.defaultdict[int, list[Event]](list)  # by thread, each called by the one before
    for event in operators:
        stack = callers[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            stack[-1]["own_us"] -= event["dur"]
        event["own_us"] = event["dur"]
        stack.append(event)

    alike = collections.defaultdict[tuple[str, ...], list[float]](list)  # seconds of calls
    for event in operators:
        if event["name"].startswith("aten::"):
            shapes = str(event["args"].get("Input Dims"))
            alike[event["name"], _number_format(event), shapes].append(1e-6 * event["own_us"])
    trace = Trace(window_s=window.end_s, loss_share=_loss_share(window), steps=steps)
    for (name, number_format, _), own_s in alike.items():
        # The median of alike calls counts for all of them: what else the machine does may fall on any one.
        usual_s = statistics.median(own_s)
        seconds = usual_s * len(own_s)
        trace.window_s -= sum(own_s) - seconds
        if usual_s < SMALL_S:
            trace.calls += len(own_s)
            trace.small_s += seconds
        elif any(word in name for word in PRODUCT_OPERATORS):
            trace.products_s[number_format] = trace.products_s.get(number_format, 0.0) + seconds
        else:
            trace.passes_s += seconds
    return trace


def _loss_share(window: Window) -> float:
    """Return the share of the time after forward passes, up to the next part, in which operators are at work."""
    after_s = covered_s = 0.0
    for part in window.parts:
        if part.name != FORWARD:
            continue
        until_s = min((other.begin_s for other in window.parts if other.begin_s >= part.end_s), default=window.end_s)
        counted_s = part.end_s
        after_s += until_s - counted_s
        for event in window.events["cpu_op"]:  # in order of time
            begin_s, end_s = event["span"][:2]
            if end_s > counted_s and begin_s < until_s:
                covered_s += min(end_s, until_s) - max(begin_s, counted_s)
                counted_s = end_s
    return covered_s / (after_s or 1.0)


def _number_format(operator: Event) -> str:
    """Return the number format of an operator's first floating-point input, "" where it has none."""
    for kind in operator["args"].get("Input type", ()):
        if kind in FORMATS:
            return FORMATS[kind]
    return ""

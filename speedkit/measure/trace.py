"""What PyTorch's profiler saw of some training steps: as plain intervals, and from them as seconds by cause."""

import collections
import gzip
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
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
# How PyTorch itself, and `Timeline`, name ranges that stand for a cause.
PARTS = {"Optimizer.step#": OPTIMIZER, "enumerate(DataLoader)#": DATA, PART.format(""): ""}
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
    launch_s: float | None = None  # when the host began to launch it
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

    end_s: float
    work: tuple[Work, ...] = ()  # on the device
    parts: tuple[Span, ...] = ()  # of the host's time, each named by its cause
    syncs: tuple[Span, ...] = ()  # calls in which the host waits for the device
    calls: tuple[Span, ...] = ()  # operators and launches: what the host does inside of PyTorch
    costs: Costs = field(default_factory=Costs)
    copied_bytes: int = 0  # from host to device
    pinned: bool = False  # all of them from page-locked memory


# ---- seconds by cause ----


def classify(trace: Trace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds in which the device works, and those in which it stands still, both by cause.

    Time is cut at each beginning and end of anything; each segment is painted with a cause, later coats over earlier.
    """
    edges = np.unique([0.0, trace.end_s, *_times(trace.work), *_times(trace.parts), *_times(trace.calls)])
    busy = _covered(edges, trace.work)
    parts = {cause: _covered(edges, trace.parts, cause) for cause in (DATA, EVALUATION, COMPILATION, OPTIMIZER)}
    painted = np.full(len(edges) - 1, CAUSES.index(IDLE))
    _paint_gaps(painted, trace, edges, parts=parts)
    for cause in (DATA, EVALUATION, COMPILATION):
        painted[parts[cause]] = CAUSES.index(cause)

    groups = collections.defaultdict[str, list[Work]](list)
    for work in trace.work:
        groups[_cause_of(work, edges, parts)].append(work)
    for cause in (SYNC, COPY, BANDWIDTH, COMPUTE, OPTIMIZER, EVALUATION):  # a copy counts where no kernel runs
        painted[_covered(edges, groups[cause])] = CAUSES.index(cause)
    return _sums(painted[busy], np.diff(edges)[busy]), _sums(painted[~busy], np.diff(edges)[~busy])


def _sums(painted: np.ndarray, took_s: np.ndarray) -> dict[str, float]:
    sums = np.bincount(painted, took_s, minlength=len(CAUSES)).tolist()
    return {cause: seconds for cause, seconds in zip(CAUSES, sums, strict=True) if seconds}


def _paint_gaps(painted: np.ndarray, trace: Trace, edges: np.ndarray, *, parts: Mapping[str, Mask]) -> None:
    """Paint what the host keeps the device from.

    A gap is sync-bound where a call that waits ends in it; else, if the next launch began after the work before had
    ended, launch-bound, or other host work where most of it went by outside of PyTorch; else it stays idle.
    """
    took_s, busy = np.diff(edges), _covered(edges, trace.work)
    own = ~(parts[DATA] | parts[EVALUATION] | parts[COMPILATION])
    quiet = own & ~_covered(edges, trace.calls)
    sync_ends_s = np.sort([span.end_s for span in trace.syncs])
    launches_s = {work.begin_s: work.launch_s for work in reversed(trace.work)}
    changes = np.flatnonzero(np.diff(np.concatenate(([True], busy, [True]))))
    for first, last in changes.reshape(-1, 2).tolist():  # segments of a gap
        begin_s, end_s = edges[[first, last]]
        launch_s = launches_s.get(end_s, math.inf)  # None where unknown; infinite at the end, for nothing follows
        quiet_s, left_s = (took_s[first:last][mask[first:last]].sum() for mask in (quiet, own))
        if np.searchsorted(sync_ends_s, end_s, "right") > np.searchsorted(sync_ends_s, begin_s):
            painted[first:last] = CAUSES.index(SYNC)
        elif launch_s is not None and launch_s > begin_s:
            painted[first:last] = CAUSES.index(OTHER if quiet_s > max(HOST_WORK_S, left_s / 2) else LAUNCH)


def _cause_of(work: Work, edges: np.ndarray, parts: Mapping[str, Mask]) -> str:
    """Return the cause of the time that work takes; what was launched in an evaluation or an update is that."""
    at = None if work.launch_s is None else int(np.searchsorted(edges, work.launch_s, "right")) - 1
    launched_in = {cause for cause, mask in parts.items() if at is not None and at < len(mask) and mask[at]}
    if EVALUATION in launched_in:
        return EVALUATION
    if work.kind != "kernel":
        return COPY if work.kind == "host to device" else SYNC  # what comes back is what the host waits for
    if OPTIMIZER in launched_in:
        return OPTIMIZER
    return COMPUTE if work.is_product else BANDWIDTH


def _times(spans: Iterable[Span | Work]) -> Iterable[float]:
    return (time_s for span in spans for time_s in span[:2])


def _covered(edges: np.ndarray, spans: Iterable[Span | Work], name: str | None = None) -> Mask:
    """Return which of the segments between `edges` lie in one of the spans, those of a name where one is given."""
    times = np.array([span[:2] for span in spans if name is None or span.name == name]).reshape(-1, 2)
    depth = np.zeros(len(edges), int)
    np.add.at(depth, np.searchsorted(edges, times[:, 0]), 1)
    np.add.at(depth, np.searchsorted(edges, times[:, 1]), -1)
    return depth.cumsum()[:-1] > 0


# ---- reading a trace ----


class Profile:
    """PyTorch's profiler over steps of a loop: `open()` begins the window that counts, `close()` gives its trace."""

    def __init__(self, device: torch.device):
        if torch.autograd._profiler_enabled():
            raise UsageError("another profiler is at work, beside which no other can be: stop it")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that there is no GPU to look at is no news
        self.device, self.window, self.opened = device, torch.profiler.record_function(WINDOW), False
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *[kinds.CUDA] * (device.type == "cuda")]
        self.profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        self.profiler.start()

    def open(self) -> None:
        """Begin the window, with nothing left to do on the device."""
        synchronize(self.device)
        self.window.__enter__()
        self.opened = True

    def close(self, kept: str | Path | None = None) -> Trace:
        """Stop the profiler; return what was done in the window, all of it finished. `kept` is where the trace stays.

        That file is for https://ui.perfetto.dev.
        """
        if self.opened:
            synchronize(self.device)
            self.window.__exit__(None, None, None)
        # Asked for to be spared a warning; it would make an object of each event, the most of what this takes.
        self.profiler.profiler.acc_events = False  # type: ignore[union-attr]
        self.profiler.stop()
        if not self.opened:
            return Trace(0.0)
        with tempfile.TemporaryDirectory() as folder:
            path = str(kept or f"{folder}/trace.json")
            self.profiler.export_chrome_trace(path)
            return read_trace(path)


def read_trace(path: str | Path) -> Trace:
    """Return what lies in the range called WINDOW in a file of torch.profiler's `export_chrome_trace`, or its .gz."""
    data = Path(path).read_bytes()
    events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    events = sorted((event for event in events if "dur" in event), key=lambda event: (event["ts"], -event["dur"]))
    [window] = [event for event in events if event["name"] == WINDOW]
    began_us, end_us = window["ts"], window["ts"] + window["dur"]
    by = collections.defaultdict[str, list[Event]](list)
    for event in events:
        if event["ts"] < end_us and event["ts"] + event["dur"] > began_us:
            by[event.get("cat", "")].append(event)
    operators, runtime = by["cpu_op"], by["cuda_runtime"] + by["cuda_driver"]

    def clock(time_us: float) -> float:
        return (min(max(time_us, began_us), end_us) - began_us) * 1e-6

    def span(event: Event, name: str = "") -> Span:
        return Span(clock(event["ts"]), clock(event["ts"] + event["dur"]), name)

    launches_s = {_argument(event, "correlation"): clock(event["ts"]) for event in runtime}
    formats = {_argument(event, "External id"): _format(event) for event in operators}
    work = [
        Work(
            *span(event)[:2],
            event["name"],
            "host to device" if "HtoD" in event["name"] else "device to host" if "DtoH" in event["name"] else "kernel",
            launches_s.get(_argument(event, "correlation")),
            formats.get(_argument(event, "External id"), ""),
        )
        for event in by["kernel"] + by["gpu_memset"] + by["gpu_memcpy"]
    ]
    copies = [event for event in by["gpu_memcpy"] if "HtoD" in event["name"]]
    return Trace(
        clock(end_us),
        tuple(sorted(work)),
        tuple(span(event, cause) for event in by["user_annotation"] + operators if (cause := _part(event["name"]))),
        tuple(span(event) for event in runtime if event["name"].endswith("Synchronize") or event["name"] in WAITING),
        tuple(map(span, operators + runtime)),
        _costs(work, operators),
        sum(_argument(event, "bytes", 0) for event in copies),
        bool(copies) and not any("Pageable" in event["name"] for event in copies),
    )


def _costs(work: list[Work], operators: list[Event]) -> Costs:
    """Return what the kernels of a GPU cost, or where there are none PyTorch's own operators."""
    costs, products_s = Costs(), collections.defaultdict[str, float](float)
    for kernel in work:
        if kernel.kind == "kernel":
            costs.calls += 1
            if kernel.is_product:
                # Of float32 a GPU multiplies only the leading bits where it may: the kernel's name tells.
                tf32 = "tf32" in kernel.name or "s1688" in kernel.name
                products_s["tf32" if tf32 else kernel.number_format] += kernel.end_s - kernel.begin_s
    for (name, number_format, _), took_s in _own_times([] if work else operators).items():
        usual_s = statistics.median(took_s)  # what else the machine does may fall on any one call
        if usual_s < SMALL_S:
            costs.calls += len(took_s)
            costs.small_s += usual_s * len(took_s)
        elif any(word in name for word in PRODUCT_OPERATORS):
            products_s[number_format] += usual_s * len(took_s)
        else:
            costs.passes_s += usual_s * len(took_s)
    costs.products_s = dict(products_s)
    return costs


def _own_times(events: list[Event]) -> dict[tuple[str, str, str], list[float]]:
    """Return the seconds of PyTorch's own operators, in order of time, without those that they call.

    Calls of the same name, number format and shapes are together.
    """
    own_us = [event["dur"] for event in events]
    open_on = collections.defaultdict[Any, list[int]](list)  # thread: the operators that are at work
    for number, event in enumerate(events):
        callers = open_on[event["tid"]]
        while callers and events[callers[-1]]["ts"] + events[callers[-1]]["dur"] <= event["ts"]:
            callers.pop()
        if callers:
            own_us[callers[-1]] -= event["dur"]
        callers.append(number)
    alike = collections.defaultdict[tuple[str, str, str], list[float]](list)
    for event, us in zip(events, own_us, strict=True):
        if event["name"].startswith("aten::"):
            alike[event["name"], _format(event), str(_argument(event, "Input Dims"))].append(us * 1e-6)
    return alike


def _argument(event: Event, name: str, default: Any = None) -> Any:
    return event.get("args", {}).get(name, default)


def _format(operator: Event) -> str:
    """Return the number format of an operator's first decimal input, "" where it has none."""
    return next((FORMATS[kind] for kind in _argument(operator, "Input type", ()) if kind in FORMATS), "")


def _part(name: str) -> str:
    """Return the cause that a range stands for, "" for none."""
    if name.endswith("(dynamo_timed)"):
        return COMPILATION
    return next((cause or name.removeprefix(start) for start, cause in PARTS.items() if name.startswith(start)), "")

"""What PyTorch's profiler saw of some training steps, as plain intervals in seconds, on the host and on the device."""

import collections
import contextlib
import dataclasses
import functools
import gzip
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from speedkit.clock import synchronize
from speedkit.errors import UsageError
from speedkit.measure.timeline import COMPILATION, DATA, OPTIMIZER, PART

WINDOW = "speedkit window"  # the range around the steps that count
# How PyTorch itself, and `Timeline`, name ranges that stand for a cause.
PARTS = {"Optimizer.step#": OPTIMIZER, "enumerate(DataLoader)#": DATA, PART.format(""): ""}
WAITING = ("cudaMemcpy", "hipMemcpyWithStream")  # calls that wait, beside those whose name ends in Synchronize
DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}
ITEM_BYTES = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "double": 8,
    "long int": 8,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}

Event = dict[str, Any]


class Span(NamedTuple):
    """A stretch of time; seconds since the trace's beginning."""

    begin_s: float
    end_s: float
    name: str = ""


class Work(NamedTuple):
    """One kernel or copy on the device. FLOPs and bytes are its share of those of the operator that launched it."""

    begin_s: float
    end_s: float
    name: str
    kind: str = "kernel"  # or "host to device", "device to host"
    launch_s: float | None = None  # when the host began to launch it
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "fp32"  # of the operator's inputs


@dataclasses.dataclass(frozen=True)
class Trace:
    """A stretch of training from 0 to `end_s`: all that the ledger's rules look at."""

    end_s: float
    work: tuple[Work, ...] = ()  # on the device
    parts: tuple[Span, ...] = ()  # of the host's time, each named by its cause
    syncs: tuple[Span, ...] = ()  # calls in which the host waits for the device
    calls: tuple[Span, ...] = ()  # operators and launches: what the host does inside of PyTorch
    operators: int = 0  # that the loop and its backward passes call, without those inside of them
    uncounted: tuple[str, ...] = ()  # operators that launch kernels, of whose FLOPs PyTorch has no formula
    copied_bytes: int = 0  # from host to device
    pageable_bytes: int = 0  # of these, from memory that is not page-locked


def read_trace(path: str | Path) -> Trace:
    """Return the trace in a file that `export_chrome_trace` of torch.profiler wrote, plain or .gz.

    It begins and ends as the range called WINDOW, where there is one. Raises UsageError for any other file.
    """
    try:
        data = Path(path).read_bytes()
        events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
        events = sorted((event for event in events if "dur" in event), key=lambda event: (event["ts"], -event["dur"]))
        window = [event for event in events if event["name"] == WINDOW] or events
        began_us, end_us = window[0]["ts"], max(event["ts"] + event["dur"] for event in window)
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise UsageError(f"{path} is no trace of torch.profiler: {type(error).__name__}: {error}") from None
    by = collections.defaultdict[str, list[Event]](list)
    for event in events:
        if event["ts"] < end_us and event["ts"] + event["dur"] > began_us:
            by[event.get("cat", "")].append(event)
    operators, runtime = by["cpu_op"], by["cuda_runtime"] + by["cuda_driver"]
    callers, copies = _callers(operators), [event for event in by["gpu_memcpy"] if "HtoD" in event["name"]]
    waits = [event for event in runtime if event["name"].endswith("Synchronize") or event["name"] in WAITING]

    def clock(time_us: float) -> float:
        return (min(max(time_us, began_us), end_us) - began_us) * 1e-6

    def span(event: Event, name: str = "") -> Span:
        return Span(clock(event["ts"]), clock(event["ts"] + event["dur"]), name)

    launches = {_argument(event, "correlation"): clock(event["ts"]) for event in runtime}
    costs = _costs(by["kernel"] + by["gpu_memset"] + by["gpu_memcpy"], operators, callers)
    work = (
        Work(*span(event)[:2], event["name"], _kind(event), launches.get(_argument(event, "correlation")), *cost)
        for event, _, *cost in costs
    )
    return Trace(
        clock(end_us),
        tuple(sorted(work, key=lambda item: item.begin_s)),
        tuple(span(event, cause) for event in by["user_annotation"] + operators if (cause := _part(event["name"]))),
        tuple(map(span, waits)),
        tuple(map(span, operators + runtime)),
        sum(
            _is_aten(event) and (caller is None or not _is_aten(operators[caller]))
            for event, caller in zip(operators, callers, strict=True)
        ),
        tuple(sorted({name for _, name, flops, *_ in costs if name and not flops})),
        sum(_argument(event, "bytes", 0) for event in copies),
        sum(_argument(event, "bytes", 0) for event in copies if "Pageable" in event["name"]),
    )


def _argument(event: Event, name: str, default: Any = None) -> Any:
    return event.get("args", {}).get(name, default)


def _is_aten(operator: Event) -> bool:
    return operator["name"].startswith("aten::")


def _kind(event: Event) -> str:
    name = event["name"]
    return "host to device" if "HtoD" in name else "device to host" if "DtoH" in name else "kernel"


def _part(name: str) -> str:
    """Return the cause that a range stands for, "" for none."""
    if name.endswith("(dynamo_timed)"):
        return COMPILATION
    return next((cause or name.removeprefix(start) for start, cause in PARTS.items() if name.startswith(start)), "")


def _callers(operators: list[Event]) -> list[int | None]:
    """Return for each operator, in order of time, the number of the one on its thread that it was called from."""
    found, threads = list[int | None](), collections.defaultdict[Any, list[int]](list)
    for number, event in enumerate(operators):
        stack = threads[event["tid"]]
        while stack and operators[stack[-1]]["ts"] + operators[stack[-1]]["dur"] <= event["ts"]:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(number)
    return found


def _costs(work: list[Event], operators: list[Event], callers: list[int | None]) -> list[tuple[Any, ...]]:
    """Return (event, operator, FLOPs, bytes, dtype) of work on the device.

    The operator is the innermost around the launch that has a count of FLOPs, else the innermost; "" where none is
    known. What it costs is shared out to its kernels by the time they take.
    """
    numbers = {_argument(event, "External id"): number for number, event in enumerate(operators)}
    flops_of = functools.cache(lambda number: _flops(operators[number]))
    owners, took = list[int | None](), collections.Counter[int | None]()
    for event in work:
        owner = number = numbers.get(_argument(event, "External id"))
        while number is not None and not flops_of(number):
            number = callers[number]
        owners.append(owner if number is None else number)
        took[owners[-1]] += event["dur"]
    found = list[tuple[Any, ...]]()
    for event, owner in zip(work, owners, strict=True):
        if owner is None:
            found.append((event, "", 0.0, 0.0, "fp32"))
            continue
        share, (size, dtype) = event["dur"] / (took[owner] or 1), _bytes(operators[owner])
        if dtype == "fp32" and any(word in event["name"] for word in ("tf32", "s1688gemm")):
            dtype = "tf32"
        found.append((event, operators[owner]["name"], flops_of(owner) * share, size * share, dtype))
    return found


def _flops(operator: Event) -> float:
    """Return the FLOPs of an operator by PyTorch's own formula and the shapes recorded; 0 where it has none."""
    with contextlib.suppress(Exception):  # no formula, or one that wants what a trace does not hold
        packet = getattr(torch.ops.aten, operator["name"].removeprefix("aten::"))
        literals = (json.loads(text.lower()) if text else None for text in _argument(operator, "Concrete Inputs"))
        inputs: Any = [dims or value for dims, value in zip(_argument(operator, "Input Dims"), literals, strict=True)]
        positional = sum(not argument.kwarg_only for argument in packet.default._schema.arguments)
        shape = None
        if "convolution_backward" in operator["name"]:
            shape = inputs[1:3]  # of the gradients
        elif "conv" in operator["name"]:  # of inputs [B, C, ...] and weight [D, C, ...]
            sides = zip(inputs[0][2:], inputs[1][2:], *inputs[3:6], strict=True)
            shape = [
                inputs[0][0],
                inputs[1][0],
                *(
                    (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
                    for size, kernel, stride, padding, dilation in sides
                ),
            ]
        return float(flop_registry[packet](*inputs[:positional], out_val=shape))
    return 0.0


def _bytes(operator: Event) -> tuple[float, str]:
    """Return an operator's bytes, inputs read once and as many as the largest written, and its inputs' format."""
    dims, types = _argument(operator, "Input Dims", []), _argument(operator, "Input type", [])
    sizes = [
        math.prod(shape) * ITEM_BYTES.get(kind, 4)
        for shape, kind in zip(dims, types, strict=False)
        if shape and not isinstance(shape[0], list)
    ]
    formats = [DTYPES[kind] for kind in types if kind in DTYPES]
    return float(sum(sizes) + max(sizes, default=0)), formats[0] if formats else "fp32"


class Profile:
    """PyTorch's profiler over steps of a loop: `open()` begins the window that counts, `close()` gives its trace."""

    def __init__(self, device: torch.device):
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

    def close(self) -> Trace:
        """Stop the profiler; return what was done in the window, all of it finished."""
        if self.opened:
            synchronize(self.device)
            self.window.__exit__(None, None, None)
        # Asked for to be spared a warning; it would make an object of each event, the most of what this takes.
        self.profiler.profiler.acc_events = False  # type: ignore[union-attr]
        self.profiler.stop()
        if not self.opened:
            return Trace(0.0)
        with tempfile.TemporaryDirectory() as folder:
            self.profiler.export_chrome_trace(f"{folder}/trace.json")
            return read_trace(f"{folder}/trace.json")

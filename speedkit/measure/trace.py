"""What PyTorch's profiler saw of some training steps, as plain intervals in seconds, on the host and on the device."""

import collections
import contextlib
import dataclasses
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

WINDOW = "speedkit: window"  # the range around the steps that count
PART = "speedkit: {}"  # the range around a part of a step, named by the cause that it stands for
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events, as Kineto writes them
RUNTIME = ("cuda_runtime", "cuda_driver")
WAITING = ("cudaMemcpy", "hipMemcpyWithStream")  # calls that wait, beside those whose name ends in Synchronize
DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}
ITEM_BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "long": 8, "bool": 1,
              "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1}  # fmt: skip

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
    """A stretch of training steps from 0 to `end_s`: all that the ledger's rules look at."""

    end_s: float
    work: tuple[Work, ...] = ()  # on the device
    parts: tuple[Span, ...] = ()  # of the host's time, each named by its cause
    syncs: tuple[Span, ...] = ()  # calls in which the host waited for the device
    calls: tuple[Span, ...] = ()  # operators and launches: what the host did inside of PyTorch
    operators: int = 0  # that the loop and its backward passes called, not those inside of them
    uncounted: tuple[str, ...] = ()  # operators that launched kernels, whose FLOPs PyTorch has no formula for
    copied_bytes: int = 0  # from host to device
    pageable_bytes: int = 0  # of these, from memory that is not page-locked


def read_trace(path: str | Path) -> Trace:
    """Return the trace in a file that `torch.profiler`'s export_chrome_trace wrote, plain or .gz.

    Raises UsageError for any other file.
    """
    try:
        text = gzip.decompress(data) if (data := Path(path).read_bytes())[:2] == b"\x1f\x8b" else data
        known = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X" and "dur" in event]
        events = sorted(known, key=lambda event: (event["ts"], -event["dur"]))  # the outer one of two comes first
        window = next((event for event in events if event["name"] == WINDOW), None)
        began = window["ts"] if window else events[0]["ts"]
        end = began + window["dur"] if window else max(event["ts"] + event["dur"] for event in events)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UsageError(f"{path} is no trace of torch.profiler ({error!r}): export one by export_chrome_trace") from None
    events = [event for event in events if event["ts"] < end and event["ts"] + event["dur"] > began]

    def times(event: Event) -> tuple[float, float]:
        return max(0.0, event["ts"] - began) * 1e-6, (min(end, event["ts"] + event["dur"]) - began) * 1e-6

    operators = [event for event in events if event.get("cat") == "cpu_op"]
    runtime = [event for event in events if event.get("cat") in RUNTIME]
    annotated = [event for event in events if event.get("cat") in ("user_annotation", "cpu_op")]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    waits = [event for event in runtime if event["name"].endswith("Synchronize") or event["name"] in WAITING]
    parents = _parents(operators)
    work, uncounted = _work(events, operators, parents, {_argument(event, "correlation"): event for event in runtime})
    return Trace(
        end_s=(end - began) * 1e-6,
        work=tuple(item._replace(**dict(zip(("begin_s", "end_s", "launch_s"), (
            *times(event), None if launch is None else (launch["ts"] - began) * 1e-6), strict=True)))
            for event, item, launch in work),
        parts=tuple(Span(*times(event), cause) for event in annotated if (cause := _part(event["name"]))),
        syncs=tuple(Span(*times(event), event["name"]) for event in waits),
        calls=tuple(Span(*times(event)) for event in (*operators, *runtime)),
        operators=sum(event["name"].startswith("aten::") and not _inside(number, operators, parents)
                      for number, event in enumerate(operators)),
        uncounted=uncounted,
        copied_bytes=sum(_argument(event, "bytes") or 0 for event in copies),
        pageable_bytes=sum(_argument(event, "bytes") or 0 for event in copies if "Pageable" in event["name"]),
    )  # fmt: skip


def _argument(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _part(name: str) -> str:
    """Return the cause that a range stands for: ours, one that PyTorch itself puts around, or ""."""
    if name.startswith("Optimizer.step#"):
        return "optimizer"
    if name.startswith("enumerate(DataLoader)#"):
        return "data wait"
    if name.endswith("(dynamo_timed)"):
        return "compilation"
    return name.removeprefix(PART.format("")) if name.startswith(PART.format("")) and name != WINDOW else ""


def _parents(operators: list[Event]) -> list[int | None]:
    """Return for each operator, in order of time, the number of the one on its thread that it was called from."""
    found, open_ = list[int | None](), collections.defaultdict[Any, list[int]](list)
    for number, event in enumerate(operators):
        stack = open_[event["tid"]]
        while stack and operators[stack[-1]]["ts"] + operators[stack[-1]]["dur"] <= event["ts"]:
            stack.pop()
        found.append(stack[-1] if stack else None)
        stack.append(number)
    return found


def _inside(number: int, operators: list[Event], parents: list[int | None]) -> bool:
    """Whether an operator was called by another, and not by the loop, autograd's engine or compiled code."""
    above = parents[number]
    while above is not None:
        if operators[above]["name"].startswith("aten::"):
            return True
        above = parents[above]
    return False


def _work(
    events: list[Event], operators: list[Event], parents: list[int | None], launches: dict[Any, Event]
) -> tuple[list[tuple[Event, Work, Event | None]], tuple[str, ...]]:
    """Return the device's events with their FLOPs and bytes and what launched them, and the uncounted operators."""
    numbers = {_argument(event, "External id"): number for number, event in enumerate(operators)}
    members, costs = collections.defaultdict[int | None, list[Event]](list), dict[int | None, tuple[float, float, str]]()
    for event in events:
        if event.get("cat") in DEVICE:
            number = launcher = numbers.get(_argument(event, "External id"))
            while number is not None and not _flops(operators[number]):
                number = parents[number]
            members[launcher if number is None else number].append(event)
    found, uncounted = [], set[str]()
    for number, group in members.items():
        seconds = sum(event["dur"] for event in group)
        costs[number] = (0.0, 0.0, "fp32") if number is None else (_flops(operators[number]), *_bytes(operators[number]))
        flops, size, dtype = costs[number]
        if number is not None and not flops:
            uncounted.add(operators[number]["name"])
        for event in group:
            share = event["dur"] / seconds if seconds else 0.0
            name, kind = event["name"], "kernel"
            kind = "host to device" if "HtoD" in name else "device to host" if "DtoH" in name else "kernel"
            item = Work(0.0, 0.0, name, kind, None, flops * share, size * share, _tf32(dtype, name))
            found.append((event, item, launches.get(_argument(event, "correlation"))))
    return sorted(found, key=lambda row: row[0]["ts"]), tuple(sorted(uncounted))


def _tf32(dtype: str, kernel: str) -> str:
    return "tf32" if dtype == "fp32" and ("tf32" in kernel or "s1688gemm" in kernel) else dtype


def _flops(operator: Event) -> float:
    """Return the FLOPs of an operator by PyTorch's own formula and the shapes recorded; 0 where it has none."""
    packet = getattr(torch.ops.aten, operator["name"].removeprefix("aten::"), None)
    if not operator["name"].startswith("aten::") or packet not in flop_registry:
        return 0.0
    with contextlib.suppress(Exception):  # a formula that wants what a trace does not hold
        literals = [json.loads(text.lower()) if text else None for text in _argument(operator, "Concrete Inputs")]
        inputs = [dims or literal for dims, literal in zip(_argument(operator, "Input Dims"), literals, strict=True)]
        more = {}
        if "convolution_backward" in operator["name"]:
            more = {"out_shape": inputs[1:3]}
        elif "conv" in operator["name"]:
            more = {"out_shape": _convolved(*inputs[:2], *inputs[3:6])}
        return float(flop_registry[packet](*inputs, **more))
    return 0.0


def _convolved(inputs: list[int], weight: list[int], stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Return the shape that a convolution of `inputs [B, C, ...]` with `weight [D, C, ...]` gives."""
    sides = zip(inputs[2:], weight[2:], stride, padding, dilation, strict=True)
    spatial = [(size + 2 * pad - wide * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, wide in sides]
    return [inputs[0], weight[0], *spatial]


def _bytes(operator: Event) -> tuple[float, str]:
    """Return an operator's bytes, read once each and its largest input written once, and the format of its inputs."""
    dims, types = _argument(operator, "Input Dims") or [], _argument(operator, "Input type") or []
    sizes = [math.prod(shape) * ITEM_BYTES.get(kind, 4) for shape, kind in zip(dims, types, strict=False)
             if shape and not isinstance(shape[0], list)]  # fmt: skip
    formats = [DTYPES[kind] for kind in types if kind in DTYPES]
    return float(sum(sizes) + max(sizes, default=0)), formats[0] if formats else "fp32"


class Profile:
    """PyTorch's profiler over steps of a loop: `open()` begins the window that counts, `close()` gives its trace."""

    def __init__(self, device: torch.device):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that there is no GPU to look at is no news
        self.device, self.window = device, torch.profiler.record_function(WINDOW)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        self.profiler.start()
        self.opened = False

    def open(self) -> None:
        """Begin the window, with nothing left to do on the device."""
        synchronize(self.device)
        self.window.__enter__()
        self.opened = True

    def close(self) -> Trace | None:
        """Stop; return what was done in the window, all of it finished; None where it was not opened."""
        if self.opened:
            synchronize(self.device)
            self.window.__exit__(None, None, None)
        self.profiler.stop()
        if not self.opened:
            return None
        with tempfile.TemporaryDirectory() as folder:
            self.profiler.export_chrome_trace(f"{folder}/trace.json")
            return read_trace(f"{folder}/trace.json")

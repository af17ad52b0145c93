"""Files of PyTorch's profiler: the window of steps that counts, what lies in it, and the GPU that they are of."""

import collections
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speedkit.errors import UsageError
from speedkit.measure.timeline import DATA, OPTIMIZER, PART

WINDOW = "speedkit window"  # the range around the steps that count; their number follows
STEP = "ProfilerStep#"  # the range of a step, where the profiler is told of them
# The ranges that PyTorch itself puts around a part of a step.
TORCHS_PARTS = {"enumerate(DataLoader)": DATA, "Optimizer.step": OPTIMIZER}
RANGES = ("user_annotation", "cpu_op")  # older versions write a range as an operator
ONE_PROCESS = "_SingleProcessDataLoaderIter"  # in the range of a DataLoader without workers
OLD_CATEGORIES = {  # of PyTorch 1.8 to 1.11
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memset": "gpu_memset",
    "Memcpy": "gpu_memcpy",
}
Event = dict[str, Any]  # a row of a trace file


class Span(NamedTuple):
    """A stretch of time on the host or the device, in seconds since the window began."""

    begin_s: float
    end_s: float
    name: str = ""
    launch_s: float = -math.inf  # of a kernel or copy, when the host began to launch it; as it is where it is unknown


class Window(NamedTuple):
    """What a trace file holds of a window of steps."""

    end_s: float  # how long it is
    events: Mapping[str, list[Event]]  # by category, in order of time, each with its `span` inside of the window
    parts: Sequence[Span]  # of the host's time, each named by its cause
    steps: int  # 0 where the file does not say
    has_workers: bool  # whether other processes make the batches
    gpu: Mapping[str, Any]  # the properties of the first GPU; empty without one


def read_window(path: str | Path) -> Window:
    """Return the window of a trace file, plain or .gz. Raises UsageError for what is no trace of PyTorch's."""
    try:
        content = Path(path).read_bytes()
        if str(path).endswith(".gz"):
            content = gzip.decompress(content)
        return window_of(json.loads(content))
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is no file of torch.profiler's export_chrome_trace ({why})") from None


def window_of(trace: Any) -> Window:
    """Return the window of a trace: the range WINDOW, else the profiler's steps, else all of it."""
    events = [as_today(event) for event in trace["traceEvents"] if "dur" in event]
    ranges = [event for event in events if event["cat"] in RANGES]
    own = [event for event in ranges if event["name"].startswith(WINDOW)]
    told = [event for event in ranges if event["name"].startswith(STEP)]
    steps = len(told)
    for event in own:
        steps = int(event["name"].removeprefix(WINDOW) or 1)
    whole = own or told or ranges
    if not whole:
        raise ValueError("it holds no operators: profile with torch.profiler.ProfilerActivity.CPU")
    zero_us = min(event["ts"] for event in whole)
    end_us = max(event["ts"] + event["dur"] for event in whole)

    by_category = collections.defaultdict[str, list[Event]](list)
    parts = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):  # callers before what they call
        begin_us = max(event["ts"], zero_us)
        until_us = min(event["ts"] + event["dur"], end_us)
        if begin_us > until_us or event["name"].startswith((WINDOW, STEP)):
            continue
        event["span"] = Span(1e-6 * (begin_us - zero_us), 1e-6 * (until_us - zero_us), event["name"])
        cause = part_of_step(event)
        if cause:
            parts.append(event["span"]._replace(name=cause))
        else:
            by_category[event["cat"]].append(event)
    return Window(
        end_s=1e-6 * (end_us - zero_us),
        events=by_category,
        parts=parts,
        steps=steps,
        has_workers=not any(ONE_PROCESS in event["name"] for event in ranges),
        gpu=next(iter(trace.get("deviceProperties") or ()), {}),
    )


def as_today(event: Event) -> Event:
    """Return an event as PyTorch writes it today."""
    category = event.get("cat", "")
    arguments = event.get("args", {})
    if "external id" in arguments:
        arguments["External id"] = arguments["external id"]
    return event | {"cat": OLD_CATEGORIES.get(category, category), "args": arguments}


def part_of_step(event: Event) -> str:
    """Return the cause of the time in an event that is the range of a part of a step, "" for all others."""
    if event["cat"] not in RANGES:
        return ""
    name = event["name"]
    if name.startswith(PART):
        return name.removeprefix(PART)
    return TORCHS_PARTS.get(name.partition("#")[0], "")

"""The breakdown and the bottlenecks of a trace that somebody's profiler wrote, perhaps on another machine."""

import collections
from pathlib import Path
from typing import Any

import torch

from speedkit.machine import Hardware
from speedkit.measure.bottlenecks import rank
from speedkit.measure.breakdown import StepFacts, make_breakdown
from speedkit.measure.timeline import BACKWARD, FORWARD, OTHER, RARE
from speedkit.measure.trace import trace_of
from speedkit.measure.trace_file import Span, Window, read_window

# What a trace does not say of its machine is taken to be usual: its cores, and that it can compile.
USUAL: dict[str, Any] = {"cores": 4, "triton": True, "compiler": "cc", "python_headers": True}
# How fast products of matrices are beside those of float32, about, on a GPU with tensor cores.
RATES = {"fp32": 1.0, "tf32": 4.0, "bf16": 8.0, "fp16": 8.0}
IN_BACKWARD = "autograd::engine::evaluate_function"


def profile_trace(path: str | Path) -> dict[str, Any]:
    """Return why the steps in a trace file take as long as they do, in the form of `profile_workload`.

    The times are those under the profiler, which slows the host. Raises UsageError for what is no trace.
    """
    window = read_window(path)
    trace = trace_of(window)
    facts = StepFacts(trace=trace, workers=USUAL["cores"] if window.has_workers else 0)
    if trace.busy_s:
        hardware = gpu_of(window)
        host_s = {cause: trace.busy_s.get(cause, 0.0) + trace.gaps_s.get(cause, 0.0) for cause in RARE}
        host_s[OTHER] = window.end_s - sum(host_s.values())  # the gaps of the GPU say what it is
    else:
        hardware = Hardware(torch.device("cpu"), **USUAL)
        host_s = host_parts(window)
    breakdown = make_breakdown(hardware.device, host_s, steps=trace.steps, facts=facts)
    rates = {name: rate for name, rate in RATES.items() if name == "fp32" or hardware.supports(name)}
    notes = ["these times are the profiler's: without it the host is faster, and nothing here was measured again"]
    if not window.steps:
        notes.append("the profiler was told of no steps, by its step(): all of the trace, its start too, counts as one")
    return breakdown.as_dict() | {
        "workload": f"{Path(path).name}, {hardware.name}",
        "roofline": {"tells": []},
        "bottlenecks": rank(breakdown, hardware, rates),
        "notes": notes,
    }


def gpu_of(window: Window) -> Hardware:
    """Return the GPU that a trace is of, as far as it says so."""
    facts = window.gpu
    return Hardware(
        torch.device("cuda"),
        gpu=facts.get("name", "a GPU"),
        compute_capability=(facts.get("computeMajor", 0), facts.get("computeMinor", 0)),
        **USUAL,
    )


def host_parts(window: Window) -> dict[str, float]:
    """Return the seconds of a step's parts on the thread that calls most operators: all there is without a GPU."""
    operators = window.events["cpu_op"]
    threads = collections.Counter(event["tid"] for event in operators).most_common(1)
    spans = list(window.parts)
    for event in operators:
        if event["tid"] == threads[0][0]:
            cause = BACKWARD if event["name"].startswith(IN_BACKWARD) else FORWARD
            spans.append(event["span"]._replace(name=cause))
    seconds = collections.defaultdict[str, float](float)
    counted_s = 0.0  # the end of what has been counted
    for span in sorted(spans, key=outer_first):
        if span.begin_s >= counted_s:
            seconds[span.name] += span.end_s - span.begin_s
            counted_s = span.end_s
    seconds[OTHER] = window.end_s - sum(seconds.values())
    return seconds


def outer_first(span: Span) -> tuple[float, float]:
    """Return what sorts spans by time, each before those inside of it."""
    return span.begin_s, -span.end_s

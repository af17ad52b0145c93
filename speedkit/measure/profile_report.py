"""Profiles: why the steps of a workload take so long, or those in a trace that somebody's profiler wrote, anywhere."""

import collections
import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from speedkit.data.loader import collate, make_sample
from speedkit.errors import UsageError
from speedkit.files import read_json
from speedkit.machine import Hardware, this_machine, unusable_gpu
from speedkit.measure.bottlenecks import Row, bottleneck_in_words, bottleneck_table, costly_switches, rank
from speedkit.measure.breakdown import Breakdown, StepFacts, breakdown_of, make_breakdown
from speedkit.measure.loading import time_loading
from speedkit.measure.roofline import roofline
from speedkit.measure.timeline import BACKWARD, FORWARD, OTHER, RARE
from speedkit.measure.trace import trace_of
from speedkit.measure.trace_file import Window, read_window
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.workload import Workload

SMALL_BYTES = 4e9
MAKE_ROOM = "less than 4 GB of GPU memory: --micro-batch auto, --precision fp16, --checkpointing blocks, lower --width"
# What a trace does not say of its machine is taken to be usual: its cores, and that it can compile.
USUAL: dict[str, Any] = {"cores": 4, "triton": True, "compiler": "cc", "python_headers": True}
# How fast products of matrices are beside those of float32, about, on a GPU with tensor cores.
RATES = {"fp32": 1.0, "tf32": 4.0, "bf16": 8.0, "fp16": 8.0}
IN_BACKWARD = "autograd::engine::evaluate_function"


class ProfileReport(dict[str, Any]):
    """A profile: a mapping, as breakdown.json has it, that shows itself in words."""

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return breakdown_in(self)._repr_html_() + bottleneck_table(self["bottlenecks"], self["notes"])


def breakdown_in(report: Row) -> Breakdown:
    """Return the breakdown that a profile begins with."""
    names = [field.name for field in dataclasses.fields(Breakdown) if field.name in report]
    return Breakdown(**{name: report[name] for name in names})


def as_text(report: Row) -> str:
    """Return a profile in words."""
    lines = [f"{report['workload']}:", str(breakdown_in(report)), *report["notes"], *report["roofline"]["tells"]]
    if report["bottlenecks"]:
        lines.append("bottlenecks, by what a change would give (time before / time after):")
    else:
        lines.append("no bottleneck to report: what takes most of the time would not get less by a change of the plan")
    return "\n".join([*lines, *map(bottleneck_in_words, report["bottlenecks"])])


def profile_workload(
    workload: Workload,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str = "auto",
    cache_dir: str | Path | None = None,
    trace: str | Path | None = None,
) -> ProfileReport:
    """Return why a step of `workload` takes as long as it does.

    It is the breakdown as breakdown.json has it, with `workload`, `roofline`, `bottlenecks` (see `rank`) and `notes`.
    `trace` is a file that keeps the profiler's trace. Raises UsageError for a file that cannot be written.
    """
    if trace is not None:
        try:
            Path(trace).open("ab").close()
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {trace}: {error.strerror}") from None
    recipe = recipe or workload.recipe
    plan = plan or Plan()
    hardware = this_machine(device)
    notes = costly_switches(hardware.device)
    breakdown = breakdown_of(workload, recipe, plan, device=device, cache_dir=cache_dir, trace_file=trace)
    if workload.own_loader is None:
        time_samples(breakdown.facts, workload, recipe.batch_size)
        breakdown.facts.cacheable = plan.cache == "off"
    return ProfileReport(
        breakdown.as_dict(),
        workload=workload.name,
        # Last: what looks into each operator leaves compiled code switched off.
        roofline=roofline(workload, recipe, plan, hardware=hardware, breakdown=breakdown),
        bottlenecks=rank(breakdown, hardware),
        notes=notes + breakdown.facts.notes + gpu_advice(hardware),
    )


def time_samples(facts: StepFacts, workload: Workload, most: int) -> float:
    """Return the seconds of a sample, after noting what loading and joining the first ones takes, `most` at most."""
    count = min(most, len(workload.train))
    sample = functools.partial(
        make_sample, items=workload.train, load=workload.load, features=workload.features, target=workload.target
    )
    join = functools.partial(collate, varies=workload.length is not None)
    time_loading(facts, sample, join, count=count)
    return facts.items_s / count


def difference(old: Row, new: Row) -> str:
    """Return two breakdowns beside each other, in ms per step, the rows that changed most first."""
    seconds = []
    for breakdown in (old, new):
        rows = {row["cause"]: row["seconds"] / max(1, breakdown["steps"]) for row in breakdown["rows"]}
        seconds.append(collections.Counter(rows | {"step": breakdown["step_s"]}))
    before, now = seconds
    causes = sorted(before.keys() | now.keys(), key=lambda cause: -abs(now[cause] - before[cause]))
    lines = ["in ms per step, before and now:"]
    lines += [f"  {cause:<26}{1e3 * before[cause]:>10.4g} {1e3 * now[cause]:>10.4g}" for cause in causes]
    return "\n".join(lines)


def read_breakdown(path: Path | None) -> Row | None:
    """Return what breakdown.json at `path` holds, None without one. Raises UsageError for any other file."""
    if path is None:
        return None
    try:
        content = read_json(path)
        difference(content, content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no breakdown.json of speedkit profile ({type(error).__name__})") from None
    return content


def gpu_advice(hardware: Hardware) -> list[str]:
    """Return how to make room on a small GPU, in a sentence; for a CPU why no GPU is used."""
    if not hardware.gpu_count:
        return [*filter(None, [unusable_gpu()])]
    if hardware.gpu_memory_bytes is not None and hardware.gpu_memory_bytes < SMALL_BYTES:
        return [MAKE_ROOM]
    return []


# ---- a trace ----


def profile_trace(path: str | Path) -> ProfileReport:
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
    return ProfileReport(
        breakdown.as_dict(),
        workload=f"{Path(path).name}, {hardware.name}",
        roofline={"tells": []},
        bottlenecks=rank(breakdown, hardware, rates),
        notes=notes,
    )


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
    for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s)):  # each before those inside of it
        if span.begin_s >= counted_s:
            seconds[span.name] += span.end_s - span.begin_s
            counted_s = span.end_s
    seconds[OTHER] = window.end_s - sum(seconds.values())
    return seconds

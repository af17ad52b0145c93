"""The breakdown: where the time of training steps goes, in rows that add up to what the steps take unprofiled."""

import collections
import contextlib
import dataclasses
import functools
import os
import tempfile
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from speedkit import display
from speedkit.clock import synchronize
from speedkit.errors import UsageError
from speedkit.measure.process import process_kept, resources
from speedkit.measure.timeline import AFTER_FORWARD, DATA, FORWARD, OPTIMIZER, OTHER, RARE, Timeline, timing
from speedkit.measure.trace import CAUSES, UNEXPLAINED, Trace, trace_of
from speedkit.measure.trace_file import WINDOW, read_window
from speedkit.measure.waits import Sync, auditing
from speedkit.measure.warm_up import run_until_steady
from speedkit.plan import Plan
from speedkit.recipe import Recipe
from speedkit.train.loop import steps
from speedkit.train.progress import bar_of
from speedkit.train.setup import setup_run
from speedkit.workload import Workload

NOT_RECORDED = (
    "; its own work was not recorded, as under MIG, on a vGPU or beside another profiler: "
    "the rows are the host's time, in which it launches and waits"
)
AUDITED = 2  # steps that are searched for host syncs at least
AUDITED_ON_GPU = 100  # at most, and for AUDIT_S: a line that reads a number now and then is seen, too
AUDIT_S = 1.0


@dataclasses.dataclass(kw_only=True)
class StepFacts:
    """What is known of a step beside the breakdown's rows: seconds and counts per step."""

    host_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by part; a GPU's host runs ahead of it
    trace: Trace = dataclasses.field(default_factory=Trace)
    syncs: Sequence[Sync] = ()  # in `audited` steps, the most expensive first
    audited: int = 0
    batches: float = 1.0  # gradients of so many are accumulated
    items_at_once: int = 0  # in a forward pass; 0 where nobody knows
    calls: float = 1.0  # of a model that trains, an agent's on which nothing is learned included
    graphs: int = 0  # that an evaluation built, and no backward pass went through
    items_s: float = 0.0  # to make the items of these batches, one after the other
    collate_s: float = 0.0  # to join them
    batch_bytes: int = 0
    workers: int = 0
    cores_used: float = 0.0  # by this process and its workers; 0 where nobody looked
    cores_of_workers: float = 0.0  # of them
    read_bytes: float = 0.0  # from disks
    guard: str = ""  # that failed, so that graphs were compiled again
    broken: str = ""  # why a part of the model is not compiled: a line that breaks its graph, say
    cacheable: bool = False  # a cache, which the plan leaves off, could keep the features
    why_not_kept: str = ""  # in memory: the samples of a loader
    notes: list[str] = dataclasses.field(default_factory=list)
    quarantined: Mapping[str, str] = dataclasses.field(default_factory=dict)  # path -> why of what could not be read


@dataclasses.dataclass
class Breakdown:
    """Where the wall time of `steps` training steps goes.

    `rows` are `{cause, seconds, share, speedup_without}` in the order of CAUSES; shares add up to 1, seconds to
    `window_s`. A profiler slows what it sees: `unexplained` is below 0 where kernels alone take longer than the steps.
    """

    device: str
    window_s: float  # that the steps take
    steps: int
    step_s: float
    rows: list[dict[str, Any]]
    busy_share: float | None = None  # of a GPU: the union of its kernels and copies; None on a CPU
    facts: StepFacts = dataclasses.field(default_factory=StepFacts)

    def as_dict(self) -> dict[str, Any]:
        """Return what `breakdown.json` holds of it."""
        return {key: value for key, value in vars(self).items() if key != "facts"}

    def share(self, cause: str) -> float:
        """Return the share of the wall time that goes to a cause."""
        return sum(row["share"] for row in self.rows if row["cause"] == cause)

    def per_step_s(self, *causes: str) -> float:
        """Return the seconds of a step that go to these causes."""
        return self.step_s * sum(map(self.share, causes))

    def _repr_html_(self) -> str:
        rows = [(row["cause"], f"{row['share']:.1%}", display.bar(row["share"])) for row in self.rows]
        return display.table(self._title(), ("cause", "share", ""), rows)

    def _title(self) -> str:
        busy = ""
        if self.busy_share is not None:
            busy = f", busy {self.busy_share:.1%} of the time"
        elif self.device.startswith("cuda"):
            busy = NOT_RECORDED
        return f"{self.steps} steps of {1e3 * self.step_s:.4g} ms ({self.device}{busy})"

    def __repr__(self) -> str:
        lines = [f"{self._title()}, in ms per step:"]
        line = "  {cause:<26}{0:>10.4g} {share:>7.1%}   {speedup_without:.2f} times as fast without"
        lines += [line.format(1e3 * row["seconds"] / max(1, self.steps), **row) for row in self.rows]
        return "\n".join(lines)


class StepObserver:
    """Observes a loop's steps: their seconds by part, and in a few more their operators and host syncs."""

    def __init__(self, device: torch.device, steps: int, timeline: Timeline | None = None):
        self.device = device
        self.timeline = timeline or Timeline()
        self.to_time = steps
        self.profiled = 8
        if device.type == "cpu":  # each makes the trace longer, and a CPU's steps are long
            self.profiled = 3  # of which the median counts: what else the machine does may fall into one
        self.audited = AUDITED
        self.timed = 0
        self.seconds: dict[str, float] = collections.defaultdict(float)  # by part, of the steps timed so far
        self.facts = StepFacts()

    @property
    def needed(self) -> int:
        """How many steps it takes."""
        return self.to_time + 1 + self.profiled + self.audited

    def observe(self, trace_file: str | Path | None = None) -> Generator[None]:
        """Observe one step after the other: each `yield` is a step of the loop's. `trace_file` keeps the trace."""
        # Their times, undisturbed.
        synchronize(self.device)
        cpu_s, workers_s, read_bytes = resources()
        self.timeline.take()
        while self.timed < self.to_time:
            yield
            self.timed += 1
            if self.timed == self.to_time:
                synchronize(self.device)  # what is still to be done is of these steps
            for cause, part_s in self.timeline.take().items():
                self.seconds[cause] += part_s
        until_cpu_s, until_workers_s, until_bytes = resources()
        timed_s = sum(self.seconds.values())
        self.facts.cores_of_workers = (until_workers_s - workers_s) / timed_s
        self.facts.cores_used = (until_cpu_s - cpu_s) / timed_s + self.facts.cores_of_workers
        self.facts.read_bytes = (until_bytes - read_bytes) / self.timed

        # Their operators and kernels. The device has nothing left to do before and after the window.
        if torch.autograd._profiler_enabled():
            raise UsageError("another profiler is at work, beside which no other can be: stop it")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would report that there is no GPU
        with contextlib.ExitStack() as stack:
            with warnings.catch_warnings(action="ignore"):  # that each cycle clears the events: there is one
                profiler = stack.enter_context(torch.profiler.profile(record_shapes=True))
            self.timeline.annotate = True
            yield  # sets the profiler up
            synchronize(self.device)
            with torch.profiler.record_function(f"{WINDOW} {self.profiled}"):
                for _ in range(self.profiled):
                    yield
                synchronize(self.device)
        self.timeline.annotate = False
        with tempfile.TemporaryDirectory() as folder:
            path = str(trace_file or f"{folder}/trace.json")
            profiler.export_chrome_trace(path)
            self.facts.trace = trace_of(read_window(path))

        # Their host syncs.
        if self.audited:
            until_s = time.perf_counter()
            if self.device.type == "cuda":
                until_s += AUDIT_S
            with auditing(self.device) as self.facts.syncs:
                while self.facts.audited < self.audited or (
                    self.facts.audited < AUDITED_ON_GPU and time.perf_counter() < until_s
                ):
                    yield
                    self.facts.audited += 1

    def breakdown(self) -> Breakdown:
        """Return the breakdown of the timed steps."""
        return make_breakdown(self.device, self.seconds, steps=self.timed, facts=self.facts)


def make_breakdown(device: torch.device | str, host: Mapping[str, float], *, steps: int, facts: StepFacts) -> Breakdown:
    """Return the breakdown of `steps` steps, made of the `host`'s seconds in all of them and of a GPU's trace."""
    per_step_s = {cause: part_s / max(1, steps) for cause, part_s in host.items()}
    facts = dataclasses.replace(facts, host_s=per_step_s)
    window_s = sum(host.values())
    seconds: dict[str, float] = collections.defaultdict(float, host)
    after_s = seconds.pop(AFTER_FORWARD, 0.0)
    seconds[FORWARD] += facts.trace.loss_share * after_s
    seconds[OTHER] += (1 - facts.trace.loss_share) * after_s
    busy_share = None
    if facts.trace.busy_s:
        seconds, busy_share = unprofiled(facts.trace, host, steps)
    seconds[UNEXPLAINED] = window_s - sum(seconds.values())
    rows = []
    for cause in CAUSES:
        if seconds.get(cause) or cause == UNEXPLAINED:
            share = seconds[cause] / (window_s or 1.0)
            speedup = 1 / max(1 - max(share, 0.0), 1e-3)
            rows.append({"cause": cause, "seconds": seconds[cause], "share": share, "speedup_without": speedup})
    return Breakdown(str(device), window_s, steps, window_s / max(1, steps), rows, busy_share, facts)


def unprofiled(trace: Trace, host: Mapping[str, float], steps: int) -> tuple[dict[str, float], float]:
    """Rescale the trace to `steps` unprofiled steps; return a GPU's seconds by cause, and its busy share.

    A profiler slows the host, whose seconds without it are `host`. Busy time is as profiled, evaluation and compilation
    are the host's, waiting for data is no longer than the host's, and all other gaps share what is left.
    """
    window_s = sum(host.values())
    scale = steps / trace.steps
    busy = {cause: part_s * scale for cause, part_s in trace.busy_s.items()}
    gaps = {cause: gap_s * scale for cause, gap_s in trace.gaps_s.items() if cause not in RARE}
    seconds = busy | {cause: host.get(cause, 0.0) for cause in RARE}
    waiting_s = gaps.pop(DATA, 0.0)
    seconds[DATA] = min(waiting_s, host.get(DATA, waiting_s))
    left = (window_s - sum(seconds.values())) / (sum(gaps.values()) or 1.0)
    for cause, gap_s in gaps.items():
        seconds[cause] = seconds.get(cause, 0.0) + gap_s * max(0.0, min(1.0, left))
    return seconds, min(1.0, sum(busy.values()) / window_s)


def breakdown_of(
    workload: Workload,
    recipe: Recipe | None = None,
    plan: Plan | None = None,
    *,
    device: str | torch.device = "auto",
    cache_dir: str | Path | None = None,
    window_s: float = 1.0,
    trace_file: str | Path | None = None,
    progress: bool | str = "auto",
) -> Breakdown:
    """Train `workload` for about `window_s` after a warm-up, without evaluation; return where the time goes.

    On a CPU forward is the loss with what it calls. `trace_file` keeps the profiler's trace. `progress` is a bar.
    """
    timeline = Timeline()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(bar_of("step", f"profile of {workload.name}", None, show=progress))
        stack.enter_context(process_kept(device))
        run = setup_run(
            dataclasses.replace(workload, loss=timeline.timed(FORWARD, workload.loss)),
            recipe,
            plan,
            device=device,
            cache_dir=cache_dir,
            progress=False,
            endless=True,
            wrap_batches=lambda stream: iter(timeline.timed(DATA, stream.__next__), None),  # without an end
        )
        stack.callback(run.close)
        optimizer = run.learner.optimizer
        training = steps(run)
        workers = run.plan.workers
        for _ in range(1 + 2 * workers * run.plan.prefetch_factor):
            next(training)  # on batches that the loader had ready
        step_s = run_until_steady(functools.partial(next, training), run.device, max_s=max(2.0, window_s))
        observer = StepObserver(run.device, max(5, round(window_s / step_s)), timeline)
        with patch.object(optimizer, "step", timeline.timed(OPTIMIZER, optimizer.step)), timing(timeline):
            bar.total = observer.needed - observer.to_time
            bar.set_postfix_str("measuring")
            for _ in observer.observe(trace_file):
                next(training)
                if observer.timed == observer.to_time and bar.n < bar.total:  # else the bar would be timed too
                    bar.update()
        facts = observer.facts
        facts.workers = workers
        facts.quarantined = run.data.bad
        if workers:
            use = facts.cores_of_workers / workers
            facts.notes.append(f"each of {workers} loader workers uses {use:.0%} of a core")
    return observer.breakdown()

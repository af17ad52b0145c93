"""What torch.compile did: graphs and where they ended early, recompilations and their reasons, seconds, cache hits."""

import copy
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Report:
    """What was compiled in a stretch of time."""

    graphs: int  # handed to a compiler, each with its backward pass
    seconds: float  # spent on that
    breaks: tuple[str, ...]  # where a graph ended early, and why
    recompiles: tuple[str, ...]  # what was no longer as it was compiled for
    uncompiled: tuple[str, ...]  # what could not be compiled, or not once more, and why
    cache_hits: int  # graphs, forward and backward, whose code was found on disk


class Watch:
    """Reports on what this process compiles from now on. Nothing is switched off or slowed down by it."""

    def __init__(self) -> None:
        self.dynamo = torch._dynamo.utils
        self.dynamo.set_compilation_metrics_limit(4096)
        self.began_us, self.breaks = time.time_ns() // 1000, len(self.dynamo.graph_break_reasons)
        self.counters = copy.deepcopy(self.dynamo.counters)

    def report(self) -> Report:
        """Return what was compiled since this watch was made."""
        known = self.dynamo.get_compilation_metrics()
        events = [event for event in known if (event.start_time_us or 0) >= self.began_us]
        stats, cache = (self.dynamo.counters[name] - self.counters[name] for name in ("stats", "inductor"))
        again = [(event.co_name, event.recompile_reason) for event in events if event.recompile_reason]
        return Report(
            stats["unique_graphs"],
            sum(event.duration_us or 0 for event in events) / 1e6,
            tuple(_place(found) for found in self.dynamo.graph_break_reasons[self.breaks :]),
            tuple(f"{name}: {_what(why)}" for name, why in again if "deallocated" not in why),  # of a model now gone
            tuple(_what(event.fail_reason or "") for event in events if event.fail_type),
            cache["fxgraph_cache_hit"],
        )


def _place(found: Any) -> str:
    """Return where a graph ended, in the words of the source line, and why."""
    at = found.user_stack[-1]
    return f"{Path(at.filename).name}:{at.lineno} in {at.name}, `{at.line}`: {_what(found.reason)}"


def _what(reason: str) -> str:
    """Return the first line of a `reason`, without the number of the graph and without the source code after it."""
    first = reason.partition("\n")[0].partition("  #")[0].strip()
    number, _, rest = first.partition(": ")
    return rest if number.replace("/", "").isdigit() else first


def break_even_step(compile_s: float, eager_step_s: float, compiled_step_s: float) -> int | None:
    """Return after how many steps compiling has paid for itself; None where compiled steps are not faster."""
    saved_s = eager_step_s - compiled_step_s
    return math.ceil(compile_s / saved_s) if saved_s > 0 else None

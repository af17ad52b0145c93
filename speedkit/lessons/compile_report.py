"""What torch.compile did: graphs and where they ended early, recompilations and their reasons."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from speedkit.train import compile as compiling


class CompileReport(NamedTuple):
    """What was compiled in a stretch of time."""

    graphs: int  # handed to a compiler, each with its backward pass
    breaks: tuple[str, ...]  # where a graph ended early, and why
    recompiles: tuple[str, ...]  # what was no longer as it was compiled for
    uncompiled: tuple[str, ...]  # what could not be compiled, or not once more, and why


class Compilations:
    """Reports on what this process compiles from now on. Nothing is switched off or slowed down by it."""

    def __init__(self) -> None:
        self.dynamo = torch._dynamo.utils
        self.dynamo.set_compilation_metrics_limit(4096)
        self.began_us, self.breaks = time.time_ns() // 1000, len(self.dynamo.graph_break_reasons)
        self.counters = copy.deepcopy(self.dynamo.counters)

    def report(self) -> CompileReport:
        """Return what was compiled since this object was made."""
        events = [e for e in self.dynamo.get_compilation_metrics() if (e.start_time_us or 0) >= self.began_us]
        stats = self.dynamo.counters["stats"] - self.counters["stats"]
        again = [(event.co_name, event.recompile_reason) for event in events if event.recompile_reason]
        return CompileReport(
            graphs=stats["unique_graphs"],
            breaks=tuple(_place(graph_break) for graph_break in self.dynamo.graph_break_reasons[self.breaks :]),
            # Guards of a model that is gone are no reason of the next one's.
            recompiles=tuple(f"{name}: {_first_line(why)}" for name, why in again if "deallocated" not in why),
            uncompiled=tuple(_first_line(event.fail_reason or "") for event in events if event.fail_type),
        )


def graphs_of(function: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool | None = None) -> dict[str, Any]:
    """Return how many graphs torch.compile makes of `function` for some calls, and why it ended one early."""
    torch._dynamo.reset()
    counted, compiled = Compilations(), torch.compile(function, backend="eager", dynamic=dynamic)
    for call in calls:
        compiled(*call)
    report = counted.report()
    why = "; ".join(text.rpartition("`: ")[2] for text in report.breaks)
    return {"function": function.__name__, "calls": len(calls), "graphs": report.graphs, "why": why}


def thousand_calls(function: Callable[..., Any], argument: Any) -> Callable[[], Any]:
    """Return what calls the compiled `function` a thousand times."""
    compiled = torch.compile(function, backend=compiling.BACKEND)
    return lambda: [compiled(argument) for _ in range(1000)]


def _place(graph_break: Any) -> str:
    """Return the source line at which a graph ended, and why."""
    at = graph_break.user_stack[-1]
    return f"{Path(at.filename).name}:{at.lineno} in {at.name}, `{at.line}`: {_first_line(graph_break.reason)}"


def _first_line(reason: str) -> str:
    """Return the first line of `reason` without the number of its graph and without the source code after it."""
    first = reason.partition("\n")[0].partition("  #")[0].strip()
    number, _, rest = first.partition(": ")
    return rest if number.replace("/", "").isdigit() else first

"""What the host is at while it trains: seconds by cause, by a clock read where one part of a step ends and another begins.

Unlike a profiler it leaves the step as it is: a reading costs a fraction of a microsecond.
"""

import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from speedkit.measure.trace import PART

DATA, FORWARD, BACKWARD, OPTIMIZER = "data wait", "forward", "backward", "optimizer"
EVALUATION, COMPILATION, OTHER = "evaluation and checkpoint", "compilation", "other host work"


class Timeline:
    """Seconds by cause. Each moment counts once, for the innermost part that is open then; parts that
    an evaluation consists of are evaluation.
    """

    def __init__(self, cost_s: float = 0.0):
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.stack = [OTHER]  # the open parts; the first is what time outside of any is
        self.cost_s, self.readings, self.last_s = cost_s, 0, time.perf_counter()
        self.annotate = False  # whether the parts are to be ranges in a profiler's trace too
        self.ranges: list[Any] = []

    def read(self) -> float:
        """Count the time since the last reading for the open part; return the clock."""
        now_s = time.perf_counter()
        self.seconds[self.stack[-1]] += now_s - self.last_s - self.cost_s
        self.readings, self.last_s = self.readings + 1, now_s
        return now_s

    def begin(self, cause: str, then: str = OTHER) -> None:
        """Open a part. Outside of any part, time counts as `then` from its end on."""
        self.read()
        if len(self.stack) == 1:
            self.stack[0] = then
        self.stack.append(EVALUATION if self.stack[-1] == EVALUATION and len(self.stack) > 1 else cause)
        if self.annotate:
            self.ranges.append(torch.profiler.record_function(PART.format(self.stack[-1])))
            self.ranges[-1].__enter__()

    def end(self) -> None:
        """Close the part opened last."""
        self.read()
        self.stack.pop()
        if self.ranges:
            self.ranges.pop().__exit__(None, None, None)

    def reset(self) -> dict[str, float]:
        """Return what is counted into from now on, with no part open, whatever an error left so."""
        self.read()
        while len(self.stack) > 1:
            self.end()
        self.seconds = collections.defaultdict(float)
        return self.seconds

    def of(self, cause: str, function: Callable[..., Any], then: str = OTHER) -> Callable[..., Any]:
        """Return `function` with each call a part."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin(cause, then)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return timed


def reading_cost_s() -> float:
    """Return what one reading of a timeline costs here, with the call around it."""
    timeline, times = Timeline(), 500
    nothing = timeline.of(OTHER, lambda: None)
    costs = []
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(times):
            nothing()
        costs.append((time.perf_counter() - began_s) / times / 2)
    return min(costs)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give `owner` other attributes for a while; what it had itself it has again afterwards, the rest it has not."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


@contextlib.contextmanager
def backward_passes(timeline: Timeline) -> Iterator[None]:
    """Time every backward pass that begins inside, from whatever tensor."""
    with (
        replaced(torch.Tensor, backward=timeline.of(BACKWARD, torch.Tensor.backward)),
        replaced(torch.autograd, backward=timeline.of(BACKWARD, torch.autograd.backward)),
    ):
        yield


@contextlib.contextmanager
def compilations_in(timeline: Timeline) -> Iterator[None]:
    """Time whatever torch.compile compiles inside; nothing where it has not been imported yet."""
    callback = sys.modules.get("torch._dynamo.callback")
    if callback is None:
        yield
        return
    handler = callback.callback_handler
    begin, end = (lambda _: timeline.begin(COMPILATION)), (lambda _: timeline.end())
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() took them out
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)

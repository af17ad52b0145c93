"""What the host is at while it trains: seconds by part of a step, for a clock is read where a part begins or ends.

Unlike a profiler it leaves steps as they are: a reading costs a fraction of a microsecond.
"""

import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from speedkit.errors import UsageError

PART = "speedkit: "  # before a part's name in a profiler's trace
DATA, FORWARD, BACKWARD, OPTIMIZER = "data wait", "forward", "backward", "optimizer"
EVALUATION, COMPILATION, OTHER = "evaluation and checkpoint", "compilation", "other host work"
HOST = (FORWARD, BACKWARD, OPTIMIZER, EVALUATION, COMPILATION, OTHER)
RARE = (EVALUATION, COMPILATION)  # what a few steps say nothing of: all of it is timed


class Timeline:
    """Seconds by cause. Each moment counts once, for the innermost part that is open; all of an evaluation is that."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.stack = [OTHER]  # the open parts, after what the time outside of them counts as
        self.last_s = time.perf_counter()
        self.annotate = False  # whether a profiler's trace is to have the parts too
        self.ranges: list[Any] = []

    def read(self) -> None:
        """Count the time since the last reading."""
        now_s = time.perf_counter()
        self.seconds[self.stack[-1]] += now_s - self.last_s
        self.last_s = now_s

    def take(self) -> dict[str, float]:
        """Return the seconds by cause since they were last taken."""
        self.read()
        taken, self.seconds = self.seconds, collections.defaultdict(float)
        return taken

    def begin(self, cause: str, then: str = OTHER) -> None:
        """Open a part. From its end on, time outside of any part counts as `then`."""
        self.read()
        if len(self.stack) == 1:
            self.stack[0] = then
        elif self.stack[-1] == EVALUATION:
            cause = EVALUATION
        self.stack.append(cause)
        if self.annotate:
            self.ranges.append(torch.profiler.record_function(PART + cause))
            self.ranges[-1].__enter__()

    def end(self) -> None:
        """Close the part opened last."""
        if len(self.stack) == 1:  # it was opened before anybody looked
            return
        self.read()
        self.stack.pop()
        if self.ranges:
            self.ranges.pop().__exit__(None, None, None)

    def of(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with each call of it a part."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin(cause)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return timed


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
def timing(timeline: Timeline) -> Iterator[None]:
    """Time backward passes, from whatever tensor, and what torch.compile compiles, if it has been imported."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    handler = dynamo.callback_handler if dynamo else None
    begin, end = (lambda _: timeline.begin(COMPILATION)), (lambda _: timeline.end())
    if handler:
        handler.start_callbacks.append(begin)
        handler.end_callbacks.append(end)
    try:
        with replaced(torch.autograd, backward=timeline.of(BACKWARD, torch.autograd.backward)):
            yield  # Tensor.backward calls it too
    finally:
        if handler and begin in handler.start_callbacks:  # torch._dynamo.reset() takes all out
            handler.start_callbacks.remove(begin)
            handler.end_callbacks.remove(end)


class Fetched:
    """An iterator of which `fetch(take)` takes what it gives."""

    def __init__(self, source: Iterator[Any], fetch: Callable[[Callable[[], Any]], Any]):
        self.source, self.fetch = source, fetch

    def __iter__(self) -> "Fetched":
        return self

    def __next__(self) -> Any:
        return self.fetch(self.source.__next__)


@contextlib.contextmanager
def fetching(loader: Any, fetch: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Let `fetch` take the batches of this one loader, wherever it is iterated over.

    Raises UsageError for what cannot be iterated over, and for a list or a generator, whose class cannot be changed.
    """
    kind = type(loader)

    def iterate(this: Any) -> Any:
        return Fetched(begin(this), fetch) if this is loader else begin(this)

    with contextlib.ExitStack() as stack:
        try:
            begin = kind.__iter__
            stack.enter_context(replaced(kind, __iter__=iterate))
        except (AttributeError, TypeError):
            raise UsageError(
                f"a {kind.__name__} cannot be watched as a loader: give the DataLoader that the loop goes over"
            ) from None
        yield

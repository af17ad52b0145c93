"""What the host is at while it trains: seconds by cause, for a clock is read where a part of a step begins or ends.

Unlike a profiler it leaves steps as they are: a reading costs a fraction of a microsecond.
"""

import collections
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from speedkit.errors import UsageError

PART = "speedkit: {}"  # what a part is called in a profiler's trace
DATA, FORWARD, BACKWARD, OPTIMIZER = "data wait", "forward", "backward", "optimizer"
EVALUATION, COMPILATION, OTHER = "evaluation and checkpoint", "compilation", "other host work"
RARE = (EVALUATION, COMPILATION)  # what a few steps say nothing of: all of it is timed


class Timeline:
    """Seconds by cause. Each moment counts once, for the innermost part that is open; all of an evaluation is that."""

    def __init__(self, cost_s: float = 0.0):
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.stack = [OTHER]  # the open parts, after what the time outside of them counts as
        self.cost_s, self.readings, self.last_s = cost_s, 0, time.perf_counter()
        self.annotate = False  # whether a profiler's trace is to have the parts too
        self.ranges: list[Any] = []
        self.asleep = self.woken = False  # what is rare ends sleep, within a step of which nothing else is counted

    def read(self) -> None:
        """Count the time since the last reading."""
        now_s = time.perf_counter()
        self.seconds[self.stack[-1]] += now_s - self.last_s - self.cost_s
        self.readings, self.last_s = self.readings + 1, now_s

    def take(self) -> dict[str, float]:
        """Return the seconds by cause since they were last taken."""
        self.read()
        taken, self.seconds = self.seconds, collections.defaultdict(float)
        return taken

    def begin(self, cause: str, then: str = OTHER) -> None:
        """Open a part. From its end on, time outside of any part counts as `then`."""
        if self.asleep:
            if cause not in RARE:
                return
            self.wake()
            self.woken = True
        self.read()
        if len(self.stack) == 1:
            self.stack[0] = then
        elif self.stack[-1] == EVALUATION:
            cause = EVALUATION
        self.stack.append(cause)
        if self.annotate:
            self.ranges.append(torch.profiler.record_function(PART.format(cause)))
            self.ranges[-1].__enter__()

    def end(self) -> None:
        """Close the part opened last."""
        if len(self.stack) == 1:  # it was opened asleep
            return
        self.read()
        self.stack.pop()
        if self.ranges:
            self.ranges.pop().__exit__(None, None, None)

    def sleep(self) -> None:
        """Time nothing from here on but what is rare."""
        self.asleep, self.stack[0] = True, OTHER

    def wake(self) -> None:
        """Time everything from here on."""
        self.asleep = self.woken = False
        self.last_s = time.perf_counter()

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


def reading_cost_s() -> float:
    """Return what one reading costs here, among operators as in a step."""
    rows = torch.ones(64, 64)
    plain = lambda: (rows @ rows).relu().sum()  # noqa: E731
    ways, took_s = (plain, Timeline().of(OTHER, plain)), (list[float](), list[float]())
    for turn in range(200):
        for way in (turn % 2, 1 - turn % 2):
            began_s = time.perf_counter()
            ways[way]()
            took_s[way].append(time.perf_counter() - began_s)
    return max(0.0, statistics.median(took_s[1]) - statistics.median(took_s[0])) / 2


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
    backward = timeline.of(BACKWARD, torch.autograd.backward)  # what Tensor.backward calls too
    callback = sys.modules.get("torch._dynamo.callback")
    begin, end = (lambda _: timeline.begin(COMPILATION)), (lambda _: timeline.end())
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd, backward=backward))
        if callback is not None:
            handler = callback.callback_handler
            for callbacks, call in ((handler.start_callbacks, begin), (handler.end_callbacks, end)):
                callbacks.append(call)
                stack.callback(_without, callbacks, call)
        yield


def _without(callbacks: list[Any], call: Any) -> None:
    with contextlib.suppress(ValueError):  # torch._dynamo.reset() took it out
        callbacks.remove(call)


class Fetched:
    """A loader, or an iterator over one, of which `fetch(take, whether it is a batch)` takes what it gives."""

    def __init__(self, source: Any, fetch: Callable[..., Any]):
        self.source, self.fetch = source, fetch

    def __iter__(self) -> "Fetched":
        return Fetched(self.fetch(lambda: iter(self.source), False), self.fetch)

    def __next__(self) -> Any:
        return self.fetch(self.source.__next__)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


@contextlib.contextmanager
def fetching(loader: Any, fetch: Callable[..., Any]) -> Iterator[Any]:
    """Let `fetch` take the batches of a loader, by a class of this one object's own; give what is to be iterated over.

    That is the loader, but for a list or a generator, which cannot have one: for these something that stands for it.
    Raises UsageError for what cannot be iterated over.
    """
    kind = type(loader)
    if not hasattr(kind, "__iter__"):
        raise UsageError(f"the loader, a {kind.__name__}, cannot be iterated over: give what the loop goes over")

    def iterate(this: Any) -> Fetched:
        return Fetched(fetch(lambda: kind.__iter__(this), False), fetch)

    try:
        loader.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__iter__": iterate})
    except TypeError:
        yield Fetched(loader, fetch)
        return
    try:
        yield loader
    finally:
        loader.__class__ = kind

"""Time the parts of a training step on the host: data, forward, backward, optimizer.

Unlike a profiler it leaves steps as they are: a reading costs a fraction of a microsecond.
"""

import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

PART = "speedkit: "  # before a part's name in a profiler's trace
DATA = "data wait"
FORWARD = "forward"
AFTER_FORWARD = "loss, and Python"  # after a forward pass, up to the next part: a trace says how much is operators
BACKWARD = "backward"
OPTIMIZER = "optimizer"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
COMPILATION = "compilation"
OTHER = "other host work"
HOST = (FORWARD, BACKWARD, OPTIMIZER, EVALUATION, CHECKPOINT, COMPILATION, OTHER)
RARE = (EVALUATION, CHECKPOINT, COMPILATION)  # what a few steps say nothing of: all of it is timed


class Timeline:
    """Seconds by cause. Each moment counts once, for the innermost open part; all of an evaluation counts as that."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.calls: collections.Counter[str] = collections.Counter()  # parts that were opened, by cause
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
        seconds = self.seconds
        self.seconds = collections.defaultdict(float)
        return seconds

    def begin(self, cause: str, then: str = OTHER) -> None:
        """Open a part. From its end on, time outside of any part counts as `then`."""
        self.read()
        self.calls[cause] += 1
        if len(self.stack) == 1:
            self.stack[0] = then
        elif self.stack[-1] == EVALUATION:
            cause = EVALUATION
        self.stack.append(cause)
        if self.annotate:
            self.ranges.append(torch.profiler.record_function(PART + cause))
            self.ranges[-1].__enter__()

    def end(self) -> None:
        """Close the innermost part, if one was opened since timing began."""
        if len(self.stack) == 1:
            return
        self.read()
        self.stack.pop()
        if self.ranges:
            self.ranges.pop().__exit__(None, None, None)

    def timed(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with each call of it a part."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin(cause)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return call


@contextlib.contextmanager
def timing(timeline: Timeline) -> Iterator[None]:
    """Time backward passes, from whatever tensor, and compilations, if torch.compile has been imported."""
    with contextlib.ExitStack() as stack:
        # Tensor.backward calls it too.
        backward = timeline.timed(BACKWARD, torch.autograd.backward)
        stack.enter_context(patch.object(torch.autograd, "backward", backward))
        if dynamo := sys.modules.get("torch._dynamo.callback"):
            handler = dynamo.callback_handler
            begun = [*handler.start_callbacks, lambda _: timeline.begin(COMPILATION)]
            ended = [*handler.end_callbacks, lambda _: timeline.end()]
            stack.enter_context(patch.multiple(handler, start_callbacks=begun, end_callbacks=ended))
        yield

"""Profile somebody's own training loop: two lines around it, and after it the breakdown and the bottlenecks."""

import contextlib
from builtins import print  # to which a script may give another meaning
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from speedkit.errors import UsageError
from speedkit.machine import this_machine
from speedkit.measure.bottlenecks import bottleneck_in_words, bottleneck_table, costly_switches, rank, row_of
from speedkit.measure.breakdown import Breakdown, StepObserver
from speedkit.measure.growth import Growth, in_words
from speedkit.measure.loading import time_loader
from speedkit.measure.timeline import (
    AFTER_FORWARD,
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    OTHER,
    RARE,
    timing,
)
from speedkit.measure.warm_up import compilations, failed_guard_and_break

SKIP = 3  # steps, which warm up
STEPS = 20  # that are timed


@contextlib.contextmanager
def profile(
    model: nn.Module, optimizer: Optimizer, loader: Any, *, steps: int = STEPS, show: bool = True
) -> Iterator["LoopProfile"]:
    """Time the training loop inside the block: `with profile(model, optimizer, loader) as seen:` around it as it is.

    `model` is what the loop calls: the compiled one, if it is compiled. After SKIP steps of warm-up and `steps` timed
    ones, a few are looked at closely: their operators, and what makes the host wait. Of the rest only evaluation and
    compilation count. What follows the forward pass, up to `backward()`, is its loss and counts as forward as far as
    operators are at work, and as other host work where Python is; from a forward pass in evaluation mode, up to
    training again, all is evaluation. Afterwards everything is as it was, also where the loop raises, and `seen` has
    `breakdown`, `bottlenecks` and `notes`, which are printed (`show`). Raises UsageError where nothing can be profiled.
    """
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_pre_hook"):
        kinds = f"a {type(model).__name__} and a {type(optimizer).__name__}"
        raise UsageError(f"profile takes a module, its optimizer and its loader, in this order; it got {kinds}")
    compiled = any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in model.modules())
    seen = LoopProfile([model], optimizer, loader, steps=steps, compiled=compiled)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(patch.object(type(loader), "__iter__", seen.iterator(type(loader).__iter__)))
        except (AttributeError, TypeError):  # not iterable, or of a class written in C, which cannot be changed
            what = f"a {type(loader).__name__} cannot be profiled as a loader"
            raise UsageError(f"{what}: give the DataLoader that the loop goes over") from None
        stack.callback(seen.conclude, show=show)
        seen.install(stack)
        yield seen
        seen.step_may_end()


class LoopProfile:
    """What is seen of a loop that calls `models`; `breakdown`, `bottlenecks` and `notes` are there when it is over."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: Optimizer,
        loader: Any,
        *,
        compiled: bool,
        steps: int = STEPS,
    ):
        self.device = optimizer.param_groups[0]["params"][0].device
        self.models = models
        self.optimizer = optimizer
        self.loader = loader
        self.compiled = compiled
        self.compilations = compilations()
        self.breakdown: Breakdown
        self.bottlenecks: list[dict[str, Any]] = []
        self.nothing_stands_out = False
        self.notes: list[str] = []

        self.observer = StepObserver(self.device, steps)
        self.timeline = self.observer.timeline
        self.observation = self._observation()
        self.step_ended = False  # the optimizer has made it, and nothing of another has begun
        self.steps = 0
        self.batches = 0
        self.forwards = 0
        self.calls = 0  # of models that train
        self.backwards = 0  # up to the latest step
        self.graph: int | None = None  # backward passes before the latest evaluation with gradients on
        self.growth = Growth(self.device)
        self.look_end: int | None = None  # steps made when the closer look was over
        self.later_s: dict[str, float] = {}  # by part, from then to the latest step: an evaluation at the end is none

    def install(self, stack: contextlib.ExitStack) -> None:
        """See everything that the loop does, until `stack` is closed."""
        timeline = self.timeline
        for model in self.models:
            call = vars(model).get("_compiled_call_impl") or model._call_impl  # where nn.Module.compile keeps its form
            stack.enter_context(patch.object(model, "_compiled_call_impl", self._timed_forward(model, call)))
        stack.enter_context(patch.object(torch, "save", timeline.timed(CHECKPOINT, torch.save)))
        stack.callback(self.optimizer.register_step_pre_hook(lambda *_: timeline.begin(OPTIMIZER)).remove)
        stack.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
        stack.enter_context(timing(timeline))
        stack.enter_context(contextlib.closing(self.observation))
        next(self.observation)

    # ---- what the loop does ----

    def iterator(self, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """Return `iterate`, the `__iter__` of the loader's class, with the batches of this loader timed."""

        def batches(source: Iterator[Any]) -> Iterator[Any]:
            """Yield what `source` gives; the time that each takes is that of waiting for data."""
            with contextlib.suppress(StopIteration):
                while True:
                    yield self.next_batch(next, source)

        def iterator(loader: Any) -> Iterator[Any]:
            if loader is self.loader:
                return batches(iterate(loader))
            return iterate(loader)

        return iterator

    def next_batch(self, fetch: Callable[[Any], Any], source: Any) -> Any:
        """Return what `fetch` gets from the loader; the time that it takes is that of waiting for data."""
        self.step_may_end()
        self.timeline.begin(DATA)
        try:
            batch = fetch(source)
        finally:
            self.timeline.end()
        self.batches += 1
        return batch

    def _timed_forward(self, model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        timeline = self.timeline
        facts = self.observer.facts

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Return what the model returns; its time counts as forward, or as evaluation where nothing is trained."""
            self.forwards += 1
            self.calls += model.training
            backwards = timeline.calls[BACKWARD]
            facts.graphs += self.graph == backwards
            self.graph = None
            if not model.training:
                if torch.is_grad_enabled():
                    self.graph = backwards
                if timeline.stack == [OTHER]:
                    timeline.stack[0] = EVALUATION  # what it took to begin counts too, such as a loader's start
                timeline.begin(EVALUATION, then=EVALUATION)
            elif torch.is_grad_enabled():
                self.step_may_end()
                if self.look_end is None:
                    sizes = [len(leaf) for leaf in tree_leaves((args, kwargs)) if getattr(leaf, "ndim", 0)]
                    facts.items_at_once = max([facts.items_at_once, *sizes[:1]])  # an agent acts on one item first
                timeline.begin(FORWARD, then=AFTER_FORWARD)
            else:  # an agent acts, or a generator makes what a critic learns from
                timeline.begin(FORWARD)
            try:
                return call(*args, **kwargs)
            finally:
                timeline.end()

        return forward

    def _after_step(self, *_: Any) -> None:
        self.timeline.end()
        self.steps += 1
        self.backwards = self.timeline.calls[BACKWARD]
        if self.look_end is not None:
            self.later_s = dict(self.timeline.seconds)
            self.growth.see(self.steps, self.later_s)
        self.step_ended = True

    def step_may_end(self) -> None:
        """Continue the observation; the optimizer's hook is too early, for a profile needs the whole update."""
        if not self.step_ended:
            return
        self.step_ended = False
        try:
            next(self.observation, None)
        except Exception as error:  # whatever it is, the loop goes on
            self.notes.append(f"no closer look at the steps: {type(error).__name__}: {error}")

    # ---- what is seen of it ----

    def _observation(self) -> Generator[None]:
        """Observe one step after the other: each `yield` is a step of the loop's."""
        for _ in range(SKIP):
            yield
        self.notes += costly_switches(self.device)
        if self.device.type == "cpu" and self._is_compiled():
            self.observer.audited = 0  # it would run compiled code as eager, whose last bits differ
        yield from self.observer.observe()
        self.timeline.take()
        self.look_end = self.steps

    def _is_compiled(self) -> bool:
        return self.compiled or compilations() > self.compilations

    def conclude(self, *, show: bool) -> None:
        """Make the breakdown and the bottlenecks of what was seen, and print them."""
        needed = SKIP + self.observer.needed
        if self.steps < needed:
            made = f"the loop made {self.steps} steps with the optimizer given here"
            self.notes.append(f"{made}: a look at all takes {needed}")
        if not self.forwards or (self.loader is not None and not self.batches):
            self.notes.append("the loop used no such model or loader: give those that it calls, compiled or wrapped")
        observer = self.observer
        if self.look_end is not None:  # what is rare is taken from all steps, those after the closer look too
            share = observer.timed / (observer.timed + self.steps - self.look_end)
            for cause in RARE:
                observer.seconds[cause] = share * (observer.seconds[cause] + self.later_s.get(cause, 0.0))
        if self._is_compiled():  # else what failed belongs to another model of this process
            observer.facts.guard, observer.facts.broken = failed_guard_and_break()
        observer.facts.batches = (self.batches or self.backwards) / max(1, self.steps)
        observer.facts.calls = self.calls / max(1, self.steps)
        self.breakdown = observer.breakdown()
        if observer.timed:
            try:
                time_loader(self.breakdown.facts, self.loader)
                self.bottlenecks = rank(self.breakdown, this_machine(self.device))
                self.nothing_stands_out = not self.bottlenecks
            except Exception as error:  # of the loader's own items, say: the training is worth more
                self.notes.append(f"the bottlenecks are not known: {type(error).__name__}: {error}")
        mean_s = self.mean_s()
        grown = [row_of(found, mean_s) for found in self.growth.bottlenecks(mean_s)]
        self.bottlenecks = [*grown, *self.bottlenecks]
        if show:
            print(self)

    def mean_s(self) -> float:
        """Return the seconds of a step on average, over all after the closer look."""
        return sum(self.later_s.values()) / max(1, self.steps - (self.look_end or 0))

    def _repr_html_(self) -> str:
        return self.breakdown._repr_html_() + bottleneck_table(self.bottlenecks, self.notes)

    def __repr__(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        if self.observer.timed:
            lines.append(str(self.breakdown))
        if seen := self.growth.as_dict():
            mean = f"{1e3 * self.mean_s():.4g} ms on average, those looked at {1e3 * self.breakdown.step_s:.4g}"
            lines.append(f"{in_words(seen)}; all after a closer look {mean}")
        return "\n".join([*lines, *map(bottleneck_in_words, self.bottlenecks)])

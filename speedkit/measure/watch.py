"""Watch somebody's own training loop: two lines around it, and afterwards the ledger of its steps and the diagnosis."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.clock import compilations, synchronize
from speedkit.errors import UsageError
from speedkit.files import write_json
from speedkit.measure.diagnose import of_loop
from speedkit.measure.ledger import AUDITED, PROFILED, Ledger, facts_of, ledger, rates, unprofiled
from speedkit.measure.roofline import STEPS as COUNTED
from speedkit.measure.roofline import Call, Operators, per_step
from speedkit.measure.syncs import Sync, auditing
from speedkit.measure.timeline import (
    DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, Timeline, backward_passes, compilations_in, reading_cost_s, replaced,
)  # fmt: skip
from speedkit.measure.trace import Profile, Trace

SHAPES = 100  # of inputs that are told apart


@contextlib.contextmanager
def watch(model: nn.Module, optimizer: Optimizer, loader: Any, *, skip: int = 3, steps: int = 20,
          out: str | Path | None = None, show: bool = True) -> Iterator["Watched"]:  # fmt: skip
    """Time the training loop inside the block: `with watch(model, optimizer, loader) as seen:` around it as it is.

    After `skip` steps of warm-up and `steps` timed ones, a few are looked at closely (operators, reads that make the
    host wait; on a GPU a profile), the rest are timed to the end of the block. A step ends where the loader is asked
    for a batch after an optimizer step. What follows the model's forward pass, up to `backward()`, is its loss and
    counts as forward; from a forward pass in evaluation mode or without gradients on, up to training again, all is
    evaluation. On leaving, everything is as it was, also where the loop raises; then `seen` has `ledger`, `facts`,
    `diagnosis` and `notes`, which are printed (`show`) and written to `out`/ledger.json. Raises UsageError where there
    is nothing to watch.
    """
    seen = Watched(model, optimizer, loader, skip, steps)
    try:
        with seen.installed():
            yield seen
    except BaseException as error:
        with contextlib.suppress(Exception):  # the loop's own error is the one to be told
            seen.notes.append(f"the loop ended by {type(error).__name__} after {seen.steps} steps, which are measured")
            seen.conclude(out, show)
        raise
    seen.conclude(out, show)


class Watched:
    """What a watch sees; `ledger`, `facts`, `diagnosis` and `notes` are there once the block is left."""

    watching = 0  # blocks that are open in this process

    def __init__(self, model: nn.Module, optimizer: Optimizer, loader: Any, skip: int, steps: int):
        self.model, self.optimizer, self.loader, self.skip, self.timed_steps = model, optimizer, loader, skip, steps
        self.device = _device(model, optimizer)
        self.timeline = Timeline(reading_cost_s())
        self.notes: list[str] = []
        self.ledger: Ledger | None = None
        self.facts: dict[str, Any] = {}
        self.diagnosis: list[dict[str, Any]] = []
        self.steps = self.evaluations = self.forwards = self.batches = 0
        self.stepped = self.fetched = False  # since the last step's end
        self.shapes: set[Any] = set()
        self.windows: list[Window] = []
        self.course = self._course()
        self.traced: Trace | None = None
        self.traced_steps = PROFILED if self.device.type == "cuda" else 1
        self.syncs: list[Sync] = []
        self.passes: list[list[Call]] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See everything that the loop does, until the block ends."""
        timeline, model = self.timeline, self.model
        call = vars(model).get("_compiled_call_impl") or model._call_impl  # where nn.Module.compile leaves its form
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._loader_timed())
            stack.enter_context(replaced(model, _compiled_call_impl=self._timed_forward(call)))
            stack.callback(self.optimizer.register_step_pre_hook(lambda *_: timeline.begin(OPTIMIZER)).remove)
            stack.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
            stack.enter_context(backward_passes(timeline))
            stack.enter_context(replaced(torch, save=timeline.of(EVALUATION, torch.save)))
            stack.enter_context(compilations_in(timeline))
            Watched.watching += 1
            try:
                next(self.course)
                yield
            finally:
                self.course.close()
                Watched.watching -= 1

    def _course(self) -> Iterator[None]:
        """Go from one thing to look at to the next: each `next()` ends a step, closing it ends the loop."""
        for count in (self.skip, self.timed_steps):
            with self._window():
                for _ in range(count):
                    yield
        if Watched.watching > 1 or torch.autograd._profiler_enabled():
            self.notes.append("another watch or profiler is at work: operators and the host's waits are left to it")
        else:
            yield from self._looked_at()
        with self._window():
            while True:
                yield

    def _looked_at(self) -> Iterator[None]:
        """See some steps by the profiler, and what of another few makes the host wait."""
        profile, traced, self.timeline.annotate = Profile(self.device), None, True
        try:
            yield  # the first step sets the profiler up
            profile.open()
            for _ in range(self.traced_steps):
                yield
        finally:
            self.timeline.annotate = False
            traced = profile.close()
        self.traced = traced  # of all its steps
        with auditing(self.device) as self.syncs:
            for _ in range(AUDITED):
                yield
        # Compiled code that met a dispatch mode would stay off for good.
        with torch.compiler.set_stance("force_eager"), Operators() as noted:
            for _ in range(COUNTED):
                yield
                self.passes.append(noted.take())

    @contextlib.contextmanager
    def _window(self) -> Iterator[None]:
        synchronize(self.device)
        window = Window(self)
        self.windows.append(window)
        try:
            yield
        finally:
            synchronize(self.device)
            window.close(self)

    @contextlib.contextmanager
    def _loader_timed(self) -> Iterator[None]:
        """Time the loader's batches: in place, by a class of its own for this one object, else through `self.loader`."""
        loader, kind = self.loader, type(self.loader)
        if not hasattr(kind, "__iter__"):
            raise UsageError(f"the loader, a {kind.__name__}, cannot be iterated over: give what the loop does that with")

        def iterate(this: Any) -> Fetching:
            return Fetching(self, self.fetch(lambda: kind.__iter__(this)))

        try:
            loader.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__iter__": iterate})
        except TypeError:
            self.loader = Fetched(self, loader)
            yield
            return
        try:
            yield
        finally:
            loader.__class__ = kind

    def fetch(self, take: Callable[[], Any]) -> Any:
        """Return what `take()` gives, the time for it data wait; it ends the step that was made before."""
        if self.stepped:
            self._step_ends()
        self.timeline.begin(DATA)
        try:
            return take()
        finally:
            self.timeline.end()

    def _timed_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timeline, model = self.timeline, self.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.forwards += 1
            if model.training and torch.is_grad_enabled():
                timeline.begin(FORWARD, then=FORWARD)
                if len(self.shapes) < SHAPES:
                    inputs = (*args, *kwargs.values())
                    self.shapes.add(tuple(value.shape for value in inputs if isinstance(value, torch.Tensor)))
            else:
                self.evaluations += timeline.stack in ([OTHER], [FORWARD])
                if timeline.stack == [OTHER]:
                    timeline.stack[0] = EVALUATION  # what it took to begin counts too: a loader's start, say
                timeline.begin(EVALUATION, then=EVALUATION)
            try:
                return call(*args, **kwargs)
            finally:
                timeline.end()

        return forward

    def _after_step(self, *_: Any) -> None:
        self.timeline.end()
        self.steps, self.stepped = self.steps + 1, True
        if not self.fetched:  # a loop that has its batches from elsewhere
            self._step_ends()

    def _step_ends(self) -> None:
        self.stepped = self.fetched = False
        self.windows[-1].keep(self)
        next(self.course)

    def conclude(self, out: str | Path | None, show: bool) -> None:
        """Make the ledger and the diagnosis of what was seen; write and print them."""
        warm, *measured = self.windows
        windows = [window for window in measured if window.steps] or [warm]
        self.notes += self._problems(windows[0] is warm)
        host = collections.Counter[str]()
        for window in windows:
            host.update(window.seconds)
        steps, evaluations, recompiles = (sum(counts) for counts in zip(*(w.counts for w in windows), strict=True))
        window_s = sum(host.values())
        rows, slow_down, busy_share = dict(host), sum(window.wall_s for window in windows) / (window_s or 1.0), None
        if self.device.type == "cuda" and self.traced is not None:
            rows, slow_down, busy_share = unprofiled(
                self.traced, rates(self.device), self.traced_steps, host, steps, window_s)  # fmt: skip
        self.ledger = ledger(self.device, rows, window_s, steps, slow_down, busy_share=busy_share)
        self.facts = self.ledger.facts = facts_of(
            self.ledger.step_s, host, steps, recompiles, self.traced, self.traced_steps, self.syncs,
            evaluations=evaluations, shapes_seen=len(self.shapes))  # fmt: skip
        if len(self.passes) == COUNTED:
            self.facts["work"] = per_step(self.passes, rates(self.device))
        if steps:
            self.diagnosis = of_loop(self.ledger, self.facts, self.loader, str(self.device))
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            write_json(Path(out) / "ledger.json", self.as_dict())
        if show:
            print(self)

    def _problems(self, warming: bool) -> Iterator[str]:
        """Yield what kept the watch from seeing all, a sentence each."""
        if not self.steps:
            yield "the optimizer made no step inside the block: put the loop there, with the optimizer that it steps"
        elif warming:
            yield (f"the loop made {self.steps} steps, of which a warm-up of {self.skip} leaves none: all are counted, "
                   "slow first ones too")  # fmt: skip
        elif self.traced is None and self.device.type == "cuda":
            yield "the profiler saw too few steps, so the rows are of the host's time: let the loop make more"
        if not self.forwards:
            yield "the model was never called inside the block: give the module that the loop calls, compiled or wrapped"
        if not self.batches:
            yield ("no batch was taken from the loader, so that fetching counts as other host work: iterate over "
                   "seen.loader, which stands for it")  # fmt: skip
        if len(self.shapes) > max(3, self.steps / 4):
            yield (f"the inputs had {len(self.shapes)} shapes or more in {self.steps} steps: for each new one compiled "
                   "code is compiled anew and cuDNN looks for kernels; pad or bucket to a few")  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return what `ledger.json` holds."""
        measured = self.ledger.as_dict() if self.ledger else {}
        return measured | {"diagnosis": self.diagnosis, "notes": self.notes}

    def __str__(self) -> str:
        line = "{cause}: {evidence}; {change}: {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}x".format_map
        return "\n".join([*(f"note: {note}" for note in self.notes), str(self.ledger), *map(line, self.diagnosis)])


class Window:
    """Steps that are timed: seconds by cause, and (optimizer steps, evaluations, graphs compiled) in them."""

    def __init__(self, seen: Watched):
        self.seconds = seen.timeline.reset()
        self.began_s, self.began, self.ended = seen.timeline.last_s, _counts(seen), None
        self.counts, self.wall_s = (0, 0, 0), 0.0
        self.kept: Any = None

    def keep(self, seen: Watched) -> None:
        """Note where a step ended: the loop may be left in the midst of the next."""
        self.kept = seen.timeline.read(), dict(self.seconds), _counts(seen)

    def close(self, seen: Watched) -> None:
        """Count no further, and nothing of a step that was begun and not made."""
        if not (seen.fetched and not seen.stepped and self.kept):
            self.keep(seen)
        end_s, self.seconds, counts = self.kept
        self.wall_s = end_s - self.began_s
        self.counts = tuple(now - before for now, before in zip(counts, self.began, strict=True))
        seen.timeline.reset()

    @property
    def steps(self) -> int:
        return self.counts[0]


def _counts(seen: Watched) -> tuple[int, int, int]:
    return seen.steps, seen.evaluations, compilations()


class Fetching:
    """An iterator whose batches are timed."""

    def __init__(self, seen: Watched, passing: Iterator[Any]):
        self.seen, self.passing = seen, passing

    def __iter__(self) -> "Fetching":
        return self

    def __next__(self) -> Any:
        batch = self.seen.fetch(self.passing.__next__)
        self.seen.fetched, self.seen.batches = True, self.seen.batches + 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.passing, name)


class Fetched:
    """What stands for a loader (a list, a generator) that cannot be timed in place."""

    def __init__(self, seen: Watched, loader: Any):
        self.seen, self.loader = seen, loader

    def __iter__(self) -> Fetching:
        return Fetching(self.seen, self.seen.fetch(lambda: iter(self.loader)))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _device(model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Return where the model trains. Raises UsageError for a pair that trains nothing."""
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(f"watch takes a module, its optimizer and its loader, in this order; it got a "
                         f"{type(model).__name__} and a {type(optimizer).__name__}")  # fmt: skip
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    if not trained:
        raise UsageError("the optimizer has no trainable parameter: give the one that trains the model")
    device = next((parameter.device for parameter in model.parameters()), trained[0].device)
    if device not in {parameter.device for parameter in trained}:
        raise UsageError(f"the model is on {device}, what the optimizer trains on {trained[0].device}: move the model, "
                         "then make the optimizer of its parameters")  # fmt: skip
    return device

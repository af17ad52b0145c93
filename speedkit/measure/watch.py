"""Watch somebody's own training loop: two lines around it, and after it the ledger of its steps and the diagnosis."""

import collections
import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.errors import UsageError
from speedkit.files import write_json
from speedkit.measure import timeline
from speedkit.measure.diagnose import cause_in_words, costly_switches, of_loop
from speedkit.measure.ledger import AUDITED, Ledger, Look, traced_steps
from speedkit.measure.timeline import DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, RARE, replaced


@contextlib.contextmanager
def watch(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    skip: int = 3,
    steps: int = 20,
    out: str | Path | None = None,
    show: bool = True,
) -> Iterator["Watched"]:
    """Time the training loop inside the block: `with watch(model, optimizer, loader) as seen:` around it as it is.

    `model` is what the loop calls: the compiled one, if it is compiled. After `skip` steps of warm-up and `steps` timed
    ones, a few are looked at closely: their operators, and what makes the host wait. Of the rest only evaluation and
    compilation count. What follows the forward pass, up to `backward()`, is its loss and counts as forward; from a
    forward pass in evaluation mode or without gradients on, up to training again, all is evaluation. Afterwards
    everything is as it was, also where the loop raises, and `seen` has `ledger`, `diagnosis` and `notes`, which are
    printed (`show`) and written to `out`/ledger.json. Raises UsageError where nothing can be watched.
    """
    seen = Watched(model, optimizer, loader, skip=skip, steps=steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(timeline.fetching(loader, seen.fetch))
        stack.callback(seen.conclude, out, show=show)
        stack.enter_context(seen.installed())
        yield seen


class Watched:
    """What a watch sees. `ledger`, `diagnosis` and `notes` are there once the block is left."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loader: Any, *, skip: int, steps: int):
        self.device = _device(model, optimizer)
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.ledger: Ledger
        self.diagnosis: list[dict[str, Any]] = []
        self.notes: list[str] = []

        self.timeline, self.skip = timeline.Timeline(), skip
        self.look, self.course = Look(self.device, self.timeline, steps), self._course()
        self.step_ended = False  # the optimizer has made it, and nothing of another has begun
        self.steps = self.batches = self.forwards = self.evaluations = 0
        self.alone, self.alone_s = 0, collections.Counter[str]()  # steps after the closer look, and seconds by cause

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See everything that the loop does, until the block ends."""
        clock, model = self.timeline, self.model
        call = vars(model).get("_compiled_call_impl") or model._call_impl  # where nn.Module.compile keeps its form
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(model, _compiled_call_impl=self._timed_forward(call)))
            stack.enter_context(replaced(torch, save=clock.of(EVALUATION, torch.save)))
            stack.callback(self.optimizer.register_step_pre_hook(lambda *_: clock.begin(OPTIMIZER)).remove)
            stack.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
            stack.enter_context(timeline.timing(clock))
            stack.enter_context(contextlib.closing(self.course))
            next(self.course)
            yield
            self._step_may_end()

    # ---- what the loop does ----

    def fetch(self, take: Callable[[], Any]) -> Any:
        """Return the batch that `take()` gives; its time is that of waiting for data."""
        self._step_may_end()
        self.timeline.begin(DATA)
        try:
            taken = take()
            self.batches += 1
            return taken
        finally:
            self.timeline.end()

    def _timed_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, model = self.timeline, self.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Return what the model returns; its time counts as forward, or as evaluation where nothing is trained."""
            self.forwards += 1
            if model.training and torch.is_grad_enabled():
                self._step_may_end()
                clock.begin(FORWARD, then=FORWARD)
            else:
                self.evaluations += clock.stack in ([OTHER], [FORWARD])
                if clock.stack == [OTHER]:
                    clock.stack[0] = EVALUATION  # what it took to begin counts too, such as a loader's start
                clock.begin(EVALUATION, then=EVALUATION)
            try:
                return call(*args, **kwargs)
            finally:
                clock.end()

        return forward

    def _after_step(self, *_: Any) -> None:
        self.timeline.end()
        self.steps, self.step_ended = self.steps + 1, True

    def _step_may_end(self) -> None:
        """Go on with the look: here, not in the optimizer's hook, for a profile is to have the whole update."""
        if not self.step_ended:
            return
        self.step_ended = False
        try:
            next(self.course, None)
        except Exception as error:  # the loop goes on, whatever else cannot be seen of it
            self.notes.append(f"no closer look at the steps: {type(error).__name__}: {error}")

    # ---- what is seen of it ----

    def _course(self) -> Generator[None]:
        """See one step after the other: each `yield` is a step of the loop's."""
        for _ in range(self.skip):
            yield
        self.notes += costly_switches(self.device)
        yield from self.look.course()
        self.timeline.take()
        while True:
            yield
            self.alone += 1
            self.alone_s.update(self.timeline.take())

    def conclude(self, out: str | Path | None, *, show: bool) -> None:
        """Make the ledger and the diagnosis of what was seen; write and print them."""
        self.notes += self._problems()
        timed, timed_s = self.look.timed, self.look.seconds
        share = timed / max(1, timed + self.alone)
        rare = {cause: share * (timed_s[cause] + self.alone_s[cause]) for cause in RARE}
        self.ledger = self.look.ledger(rare, evaluations=self.evaluations / max(1, self.steps))
        if timed:
            try:
                self.diagnosis = of_loop(self.ledger, self.loader, self.device)
            except Exception as error:  # of the loader's own items, say: the training is worth more
                self.notes.append(f"no diagnosis: {type(error).__name__}: {error}")
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            found = self.ledger.as_dict() | {"diagnosis": self.diagnosis, "notes": self.notes}
            write_json(Path(out) / "ledger.json", found)
        if show:
            print(self)

    def _problems(self) -> Iterator[str]:
        """Yield what kept the watch from seeing all, a sentence each."""
        needed = self.skip + self.look.to_time + 1 + traced_steps(self.device) + AUDITED
        if self.steps < needed:
            yield f"the loop made {self.steps} steps with the optimizer given here: a look at all takes {needed}"
        if not self.forwards:
            yield "the model was never called inside the block: give the one that the loop calls, compiled or wrapped"
        if not self.batches:
            yield "no batch came from the loader: give the one that the loop goes over"

    def __str__(self) -> str:
        rows = [str(self.ledger)] if self.look.timed else []
        return "\n".join([*(f"note: {note}" for note in self.notes), *rows, *map(cause_in_words, self.diagnosis)])


def _device(model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Return where the model trains. Raises UsageError for a pair that trains nothing."""
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(
            f"watch takes a module, its optimizer and its loader, in this order; it got a "
            f"{type(model).__name__} and a {type(optimizer).__name__}"
        )
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    if not weights:
        raise UsageError("the optimizer has no trainable parameter: give the one that trains the model")
    return weights[0].device

"""Watch somebody's own training loop: two lines around it, and after it the ledger of its steps and the diagnosis."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.clock import compilations, synchronize
from speedkit.errors import UsageError
from speedkit.files import write_json
from speedkit.measure.diagnose import cause_in_words, costly_switches, of_loop
from speedkit.measure.ledger import AUDITED, StepFacts, make_ledger, traced_steps
from speedkit.measure.syncs import Sync, auditing
from speedkit.measure.timeline import (
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    OTHER,
    RARE,
    Timeline,
    fetching,
    replaced,
    timing,
)
from speedkit.measure.trace import Profile, Trace


@dataclasses.dataclass
class Tally:
    """What was seen in some steps."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    steps: int = 0
    evaluations: int = 0
    recompilations: int = 0


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
    compilation are timed. What follows the forward pass, up to `backward()`, is its loss and counts as forward; from a
    forward pass in evaluation mode or without gradients on, up to training again, all is evaluation. Afterwards
    everything is as it was, also where the loop raises, and `seen` has `ledger`, `diagnosis` and `notes`, which are
    printed (`show`) and written to `out`/ledger.json. Raises UsageError where nothing can be watched.
    """
    seen = Watched(model, optimizer, loader, skip=skip, steps=steps)
    try:
        with seen.installed():
            yield seen
    except BaseException as error:
        with contextlib.suppress(Exception):  # the loop's own error is the one to be told
            seen.notes.append(f"the loop ended by {type(error).__name__} after {seen.steps} steps: these are measured")
            seen.conclude(out, show=show)
        raise
    seen.conclude(out, show=show)


class Watched:
    """What a watch sees. `ledger`, `diagnosis` and `notes` are there once the block is left."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loader: Any, *, skip: int, steps: int):
        self.device = _device(model, optimizer)
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.timeline = Timeline()
        self.ledger = make_ledger(self.device, {}, 0.0, steps=0, facts=StepFacts())
        self.diagnosis: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.steps = self.batches = self.forwards = 0

        self.warm_up, self.timed, self.looked_at, self.left_alone = (Tally() for _ in range(4))
        self.tally = self.warm_up  # what is counted into
        self.step_ended = False  # the optimizer has made it, and nothing of another has begun
        self.counted_steps, self.compiled = 0, compilations()
        self.profile: Profile | None = None
        self.trace: Trace | None = None
        self.syncs: list[Sync] = []
        self.audit = contextlib.ExitStack()
        profiled = skip + steps + 1 + traced_steps(self.device)  # the first one sets the profiler up
        self.stages: dict[int, Callable[[], None]] = {  # by the number of steps made before
            skip: self._begin_timing,
            skip + steps: self._begin_profile,
            skip + steps + 1: self._open_profile,
            profiled: self._begin_audit,
            profiled + AUDITED: self._leave_alone,
        }

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See everything that the loop does, until the block ends."""
        timeline, model = self.timeline, self.model
        call = vars(model).get("_compiled_call_impl") or model._call_impl  # where nn.Module.compile keeps its form
        with contextlib.ExitStack() as stack:
            self.loader = stack.enter_context(fetching(self.loader, self._fetch))
            stack.enter_context(replaced(model, _compiled_call_impl=self._timed_forward(call)))
            stack.enter_context(replaced(torch, save=timeline.of(EVALUATION, torch.save)))
            stack.callback(self.optimizer.register_step_pre_hook(lambda *_: timeline.begin(OPTIMIZER)).remove)
            stack.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
            stack.enter_context(timing(timeline))
            stack.callback(self._end)
            timeline.take()
            yield

    # ---- what the loop does ----

    def _fetch(self, take: Callable[[], Any]) -> Any:
        self._step_may_end()
        self.timeline.begin(DATA)
        try:
            taken = take()
            self.batches += 1
            return taken
        finally:
            self.timeline.end()

    def _timed_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timeline, model = self.timeline, self.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Return what the model returns; its time counts as forward, or as evaluation where nothing is trained."""
            self.forwards += 1
            if model.training and torch.is_grad_enabled():
                self._step_may_end()
                timeline.begin(FORWARD, then=FORWARD)
            else:
                self.tally.evaluations += timeline.stack in ([OTHER], [FORWARD])
                if timeline.stack == [OTHER]:
                    timeline.stack[0] = EVALUATION  # what it took to begin counts too, such as a loader's start
                timeline.begin(EVALUATION, then=EVALUATION)
            try:
                return call(*args, **kwargs)
            finally:
                timeline.end()

        return forward

    def _after_step(self, *_: Any) -> None:
        self.timeline.end()
        self.steps, self.step_ended = self.steps + 1, True

    def _step_may_end(self) -> None:
        """Go on to the next stage: here, not in the optimizer's hook, for a profile is to have the whole update."""
        if not self.step_ended:
            return
        if self.tally is self.timed:
            self._count()
        stage, self.step_ended = self.stages.pop(self.steps, None), False
        try:
            if stage is not None:
                stage()
        except Exception as error:  # the loop goes on, whatever else cannot be seen of it
            self.notes.append(f"no closer look at the steps: {type(error).__name__}: {error}")
            self._leave_alone()

    # ---- stages ----

    def _begin_timing(self) -> None:
        self.notes += costly_switches(self.device)
        self._go_on_with(self.timed)

    def _begin_profile(self) -> None:
        self._go_on_with(self.looked_at)
        self.timeline.rare_only = True
        self.profile, self.timeline.annotate = Profile(self.device), True  # raises where another one is at work

    def _open_profile(self) -> None:
        if self.profile is not None:
            self.profile.open()

    def _begin_audit(self) -> None:
        self.trace = self._close_profile()
        self.syncs = self.audit.enter_context(auditing(self.device))

    def _close_profile(self) -> Trace | None:
        self.timeline.annotate = False
        profile, self.profile = self.profile, None
        return profile.close() if profile is not None else None

    def _leave_alone(self) -> None:
        self.stages.clear()
        self._close_profile()
        self.audit.close()
        self._go_on_with(self.left_alone)

    def _end(self) -> None:
        """End what the loop has left open; a step that was begun and not made does not count."""
        with contextlib.suppress(Exception):  # on a device that has failed
            self._close_profile()
        self.audit.close()
        if self.step_ended or self.tally is not self.timed:
            self._count()

    def _go_on_with(self, tally: Tally) -> None:
        synchronize(self.device)
        self._count()
        self.tally = tally

    def _count(self) -> None:
        """Count what has gone by since it was last counted."""
        for cause, seconds in self.timeline.take().items():
            self.tally.seconds[cause] += seconds
        self.tally.steps += self.steps - self.counted_steps
        self.tally.recompilations += compilations() - self.compiled
        self.counted_steps, self.compiled = self.steps, compilations()

    # ---- what comes of it ----

    def conclude(self, out: str | Path | None, *, show: bool) -> None:
        """Make the ledger and the diagnosis of what was seen; write and print them."""
        self.notes += self._problems()
        counted = [self.timed, self.left_alone] if self.timed.steps else [self.warm_up]
        tally, made = counted[0], sum(tally.steps for tally in counted)
        share = tally.steps / max(1, made)
        host = tally.seconds | {cause: share * sum(each.seconds[cause] for each in counted) for cause in RARE}
        facts = StepFacts(
            host_s={cause: seconds / max(1, tally.steps) for cause, seconds in host.items()},
            syncs=self.syncs,
            recompilations=tally.recompilations / max(1, tally.steps),
            evaluations=sum(each.evaluations for each in counted) / max(1, made),
        )
        window_s = sum(host.values())
        self.ledger = make_ledger(self.device, host, window_s, steps=tally.steps, facts=facts, trace=self.trace)
        if tally.steps:
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
        if not self.steps:
            yield "the optimizer made no step inside the block: put the loop there, with the optimizer that it steps"
        elif not self.timed.steps:
            yield f"the warm-up leaves nothing of the loop's steps, {self.steps}: all are counted, slow first ones too"
        elif self.trace is None and self.device.type == "cuda":
            yield "the profiler saw too few steps, so the rows are of the host's time: let the loop make more"
        if not self.forwards:
            yield "the model was never called inside the block: give the one that the loop calls, compiled or wrapped"
        if not self.batches:
            yield "no batch came from the loader, so fetching is other host work: iterate over seen.loader in its place"

    def __str__(self) -> str:
        rows = [str(self.ledger)] if self.steps else []
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

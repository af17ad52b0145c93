"""Watch somebody's own training loop: two lines around it, and after it the ledger of its steps and the diagnosis."""

import collections
import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedkit.clock import compilations, synchronize
from speedkit.errors import UsageError
from speedkit.files import write_json
from speedkit.measure import ledger as ledgers
from speedkit.measure import timeline as timelines
from speedkit.measure.diagnose import of_loop
from speedkit.measure.roofline import STEPS, Call, Operators, per_step
from speedkit.measure.syncs import Sync, auditing
from speedkit.measure.timeline import DATA, EVALUATION, FORWARD, OPTIMIZER, OTHER, RARE, Timeline, replaced
from speedkit.measure.trace import Profile, Trace

SHAPES = 100  # of inputs that are told apart
TIMED, LEFT_ALONE = 10, 90  # steps in turns, after the closer look: reading clocks costs what a short step notices


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
    ones, a few are looked at closely (operators, what makes the host wait; on a GPU a profile). Of the rest one in ten
    is timed, but of evaluation and compilation all. A step ends where the loader is asked for a batch after an
    optimizer step. What follows the forward pass, up to `backward()`, is its loss and counts as forward; from a forward
    pass in evaluation mode or without gradients on, up to training again, all is evaluation. Afterwards everything is
    as it was, also where the loop raises, and `seen` has `ledger`, `facts`, `diagnosis` and `notes`, which are printed
    (`show`) and written to `out`/ledger.json.
    Raises UsageError where nothing can be watched.
    """
    seen = Watched(model, optimizer, loader, skip, steps)
    try:
        with seen.installed():
            yield seen
    except BaseException as error:
        with contextlib.suppress(Exception):  # the loop's own error is the one to be told
            seen.notes.append(f"the loop ended by {type(error).__name__} after {seen.steps} steps: these are measured")
            seen.conclude(out, show)
        raise
    seen.conclude(out, show)


class Tally:
    """What was seen in some steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.steps = self.evaluations = self.recompiles = 0
        self.timed = 0  # steps whose parts were timed

    @property
    def rows(self) -> dict[str, float]:
        """Seconds by cause of all steps: those that were left alone took what the timed ones took."""
        scale = self.steps / self.timed if self.timed else 1.0
        return {cause: value * (1.0 if cause in RARE else scale) for cause, value in self.seconds.items()}


class Watched:
    """What a watch sees. `ledger`, `facts`, `diagnosis` and `notes` are there once the block is left."""

    watching = 0  # blocks that are open in this process

    def __init__(self, model: nn.Module, optimizer: Optimizer, loader: Any, skip: int, steps: int):
        self.device = _device(model, optimizer)
        self.model, self.optimizer, self.loader, self.skip, self.timed_steps = model, optimizer, loader, skip, steps
        self.timeline = Timeline(timelines.reading_cost_s())
        self.ledger: ledgers.Ledger | None = None
        self.facts: dict[str, Any] = {}
        self.diagnosis: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.steps = self.forwards = self.batches = self.since = 0  # since: steps since one ended
        self.fetched = False  # since a step ended
        self.shapes: set[Any] = set()
        self.warm, self.timed, self.compiled = Tally(), Tally(), compilations()
        self.tally = self.warm
        self.course = self._course()
        self.traced: Trace | None = None
        self.traced_steps = ledgers.PROFILED if self.device.type == "cuda" else 1
        self.syncs: list[Sync] = []
        self.passes: list[list[Call]] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See everything that the loop does, until the block ends."""
        timeline, model = self.timeline, self.model
        call = vars(model).get("_compiled_call_impl") or model._call_impl  # where nn.Module.compile keeps its form
        with contextlib.ExitStack() as stack:
            self.loader = stack.enter_context(timelines.fetching(self.loader, self.fetch))
            stack.enter_context(replaced(model, _compiled_call_impl=self._timed_forward(call)))
            stack.enter_context(replaced(torch, save=timeline.of(EVALUATION, torch.save)))
            stack.callback(self.optimizer.register_step_pre_hook(lambda *_: timeline.begin(OPTIMIZER)).remove)
            stack.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
            stack.enter_context(timelines.timing(timeline))
            Watched.watching += 1
            try:
                timeline.take()
                next(self.course)
                yield
            finally:
                Watched.watching -= 1
                with contextlib.suppress(Exception):  # on a device that has failed
                    self.course.close()
                if self.since or not self.fetched or not self.steps:  # a step begun and not made does not count
                    self._count()
                self._go_on_with(self.tally)

    def _course(self) -> Generator[None, None, None]:
        """Go from one thing to look at to the next: each `next()` ends a step, closing it ends the loop."""
        for _ in range(self.skip):
            yield
        synchronize(self.device)
        self._go_on_with(self.timed)
        for _ in range(self.timed_steps):
            yield
        if Watched.watching > 1 or torch.autograd._profiler_enabled():
            self.notes.append("another watch or profiler is at work: operators and the host's waits are left to it")
        else:
            synchronize(self.device)
            self._go_on_with(Tally())
            yield from self._looked_at()
            synchronize(self.device)
        yield from self._rest()

    def _rest(self) -> Generator[None, None, None]:
        self._go_on_with(self.timed)
        try:
            while True:
                for _ in range(TIMED):
                    yield
                for _ in range(LEFT_ALONE):
                    self.timeline.sleep()
                    yield
                self.timeline.wake()
        finally:
            synchronize(self.device)

    def _looked_at(self) -> Iterator[None]:
        """See some steps by the profiler, what of another few makes the host wait, and the operators of some more."""
        profile, self.timeline.annotate = Profile(self.device), True
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
            for _ in range(ledgers.AUDITED):
                yield
        # Compiled code that meets a dispatch mode stays off for good.
        with torch.compiler.set_stance("force_eager"), Operators() as noted:
            for _ in range(STEPS):
                yield
                self.passes.append(noted.take())

    def fetch(self, take: Callable[[], Any], batch: bool = True) -> Any:
        """Return what `take()` gives, its time data wait. A step made before it has ended."""
        if self.since:
            self._step_ends()
        self.timeline.begin(DATA)
        try:
            taken = take()
            self.fetched, self.batches = self.fetched or batch, self.batches + batch
            return taken
        finally:
            self.timeline.end()

    def _timed_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timeline, model = self.timeline, self.model

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Return what the model returns; its time counts as forward, or as evaluation where nothing is trained."""
            self.forwards += 1
            if model.training and torch.is_grad_enabled():
                if len(self.shapes) < SHAPES:
                    inputs = (*args, *kwargs.values())
                    self.shapes.add(tuple(value.shape for value in inputs if isinstance(value, torch.Tensor)))
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
        self.steps, self.since = self.steps + 1, self.since + 1
        if not self.fetched:  # the loop has its batches from elsewhere
            self._step_ends()

    def _step_ends(self) -> None:
        self._count()
        try:
            next(self.course)
        except Exception as error:  # the loop goes on, whatever else cannot be seen of it
            self.notes.append(f"no closer look at the steps: {type(error).__name__}: {error}")
            self.course = self._rest()
            next(self.course)

    def _count(self) -> None:
        timeline = self.timeline
        if not timeline.asleep:
            for cause, seconds in timeline.take().items():
                if cause in RARE or not timeline.woken:
                    self.tally.seconds[cause] += seconds
            self.tally.timed += 0 if timeline.woken else self.since
            timeline.woken = False
        self.tally.steps += self.since
        self.since, self.fetched = 0, False

    def _go_on_with(self, tally: Tally) -> None:
        """Count into `tally` from now on, what has gone by since the last step's end into none."""
        self.timeline.take()
        before, self.compiled = self.compiled, compilations()
        self.tally.recompiles += self.compiled - before
        self.tally = tally

    def conclude(self, out: str | Path | None, show: bool) -> None:
        """Make the ledger and the diagnosis of what was seen; write and print them."""
        self.notes += self._problems()
        tally, traced = self.timed if self.timed.steps else self.warm, self.traced
        rows, busy_share = tally.rows, None
        window_s = sum(rows.values())
        reading_s = self.timeline.cost_s * self.timeline.readings / max(1, self.steps) * tally.steps
        slow_down = 1 + reading_s / (window_s or 1.0)
        if self.device.type == "cuda" and traced is not None:
            rate = ledgers.rates(self.device)
            rows, slow_down, busy_share = ledgers.unprofiled(
                traced, rate, self.traced_steps, rows, tally.steps, window_s
            )
        self.ledger = ledgers.ledger(self.device, rows, window_s, tally.steps, slow_down, busy_share=busy_share)
        self.facts = self.ledger.facts = ledgers.facts_of(
            self.ledger.step_s,
            tally.rows,
            tally.steps,
            traced,
            self.traced_steps,
            self.syncs,
            recompiles=tally.recompiles,
            evaluations=tally.evaluations,
            shapes_seen=len(self.shapes),
        )
        if len(self.passes) == STEPS:
            self.facts["work"] = per_step(self.passes, ledgers.rates(self.device))
        if tally.steps:
            try:
                self.diagnosis = of_loop(self.ledger, self.facts, self.loader, str(self.device))
            except Exception as error:  # of the loader's own items, say: the training is worth more
                self.notes.append(f"no diagnosis: {type(error).__name__}: {error}")
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            write_json(Path(out) / "ledger.json", self.as_dict())
        if show:
            print(self)

    def _problems(self) -> Iterator[str]:
        """Yield what kept the watch from seeing all, a sentence each."""
        if not self.steps:
            yield "the optimizer made no step inside the block: put the loop there, with the optimizer that it steps"
        elif not self.timed.steps:
            yield (
                f"a warm-up of {self.skip} leaves nothing of the loop's steps, {self.steps}: all are counted, slow "
                "first ones too"
            )
        elif self.traced is None and self.device.type == "cuda":
            yield "the profiler saw too few steps, so the rows are of the host's time: let the loop make more"
        if not self.forwards:
            yield "the model was never called inside the block: give the one that the loop calls, compiled or wrapped"
        if not self.batches:
            yield "no batch came from the loader, so fetching is other host work: iterate over seen.loader in its place"
        if len(self.shapes) > max(3, self.steps / 4):
            yield (
                f"the inputs had {len(self.shapes)} shapes or more in {self.steps} steps: for each new one compiled "
                "code is compiled anew and cuDNN looks for kernels; pad or bucket to a few"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return what `ledger.json` holds."""
        measured = self.ledger.as_dict() if self.ledger else {}
        return measured | {"diagnosis": self.diagnosis, "notes": self.notes}

    def __str__(self) -> str:
        line = "{cause}: {evidence}; {change}: {predicted_speedup_low:.2f} to {predicted_speedup_high:.2f}x".format_map
        rows = [str(self.ledger)] if self.steps else []
        return "\n".join([*(f"note: {note}" for note in self.notes), *rows, *map(line, self.diagnosis)])


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
    device = next((weight.device for weight in model.parameters()), weights[0].device)
    if device not in {weight.device for weight in weights}:
        raise UsageError(
            f"the model is on {device}, what the optimizer trains on {weights[0].device}: move the model, "
            "then make the optimizer of its parameters"
        )
    return device
